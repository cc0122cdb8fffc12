#!/usr/bin/env python3
"""A parent that uses no CUDA and waits for children that do; prints RESULT in the end.

Some train the perceptron. Others poll, and are not under the frontend even if the parent is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def main() -> None:
    """Start the children, wait for them, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--training", type=int, default=2, help="children that train")
    parser.add_argument("--polling", type=int, default=0, help="children that poll")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--iteration-seconds", default="0")
    options = parser.parse_args()
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    children: list[subprocess.Popen[bytes]] = []
    for index in range(options.training + options.polling):
        polls = index >= options.training
        program = Path(__file__).with_name("polls.py") if polls else EXAMPLES / "mlp.py"
        command = [sys.executable, str(program), "--iteration-seconds", options.iteration_seconds]
        command += ["--report", f"{options.report}.{index}"]
        children.append(subprocess.Popen(command, env=without if polls else None))
    # A line a tenth of a second, as a sign of life for whoever waits for one after a restore.
    number = 0
    while any(child.poll() is None for child in children):
        number += 1
        with open(options.report, "a") as file:
            file.write(f"ITERATION {number}\n")
        try:
            children[0].wait(0.1)
            children[-1].wait(0.1)
        except subprocess.TimeoutExpired:
            pass
    with open(options.report, "a") as file:
        file.write(f"RESULT {[child.returncode for child in children]}\n")


if __name__ == "__main__":
    main()
