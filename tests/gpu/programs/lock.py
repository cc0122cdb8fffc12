#!/usr/bin/env python3
"""Has the driver lock a process without the frontend, and brings it back as if it might be checkpointed."""

from __future__ import annotations

import sys

from phos.gpu_engine import driver, toggle


def main() -> None:
    """Lock it, bring it back, and see that it runs."""
    pid = int(sys.argv[1])
    driver.initialise()
    toggle.lock(pid)
    if driver.checkpoint_state(pid) != "locked":
        sys.exit(f"The driver says that process {pid} is {driver.checkpoint_state(pid)}.")
    toggle.recover(pid)
    if driver.checkpoint_state(pid) != "running":
        sys.exit(f"The driver says that process {pid} is {driver.checkpoint_state(pid)}.")


if __name__ == "__main__":
    main()
