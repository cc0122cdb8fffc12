#!/usr/bin/env python3
"""A parent that uses no CUDA and waits for children that train the perceptron; prints RESULT in the end."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def main() -> None:
    """Start the children, wait for them, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--iteration-seconds", default="0")
    options = parser.parse_args()
    common = [sys.executable, str(EXAMPLES / "mlp.py"), "--iteration-seconds", options.iteration_seconds]
    children = [
        subprocess.Popen([*common, "--report", f"{options.report}.{index}"]) for index in range(options.children)
    ]
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
