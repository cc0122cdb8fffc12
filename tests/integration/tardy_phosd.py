"""phosd for tests of programs that end at once: its threads take their time to say that a process computes again.

Started as phosd is: ``python -m tests.integration.tardy_phosd --socket PATH``.
"""

from __future__ import annotations

import time
from typing import Any

from phos.gpu_engine import toggle
from phos.gpu_engine.daemon import __main__ as daemon
from phos.gpu_engine.daemon.session import Session

SECONDS = 0.5
"""Many times what the program needs to end."""


def dawdle() -> None:
    """Sleep behind what lets a process compute: the end of the driver's restore, and the opening of the gate."""
    revive, attach = toggle.revive, Session.attach

    def slow_revive(pid: int, gpu_pairs: dict[str, str] | None = None) -> None:
        revive(pid, gpu_pairs)
        time.sleep(SECONDS)

    def slow_attach(session: Session) -> Any:
        times = attach(session)
        time.sleep(SECONDS)
        return times

    toggle.revive = slow_revive
    Session.attach = slow_attach  # type: ignore[method-assign]


if __name__ == "__main__":
    dawdle()
    daemon.main(prog_name="phosd")
