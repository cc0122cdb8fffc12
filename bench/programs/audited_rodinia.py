#!/usr/bin/env python3
"""Kernels in the manner of the Rodinia suite (bench/rodinia_like), one program after another in one process.

audited_rodinia.py [--code ptx|cubin] [--scale N] [PROGRAM...]

Every program compares what it computed with plain Python's result. One process for all of them: starting one, and
compiling, takes far longer than their kernels do.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rodinia_like"))
from common import Device, Program

PROGRAMS = ("backprop", "bfs", "btree", "gaussian", "hotspot", "kmeans")
PROGRAMS += ("lud", "nn", "nw", "particlefilter", "pathfinder", "srad")


def main() -> None:
    """Run them; the last line says how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", choices=("ptx", "cubin"), default="ptx", help="what the driver gets (%(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="size of the problems (%(default)s)")
    parser.add_argument("program", nargs="*", help="(all)")
    options = parser.parse_args()
    wrong = []
    with Device() as device:
        for name in options.program or PROGRAMS:
            begun = time.perf_counter()
            module: ModuleType = importlib.import_module(name)
            cubin = options.code == "cubin"
            said = module.run(Program(device, module.SOURCE, module.NAMES, cubin=cubin, scale=options.scale))
            device.synchronize()
            print(f"{name}: {said or 'right'}, {time.perf_counter() - begun:.1f} s", flush=True)
            if said:
                wrong.append(name)
    if wrong:
        raise SystemExit(f"The result is wrong: {', '.join(wrong)}")
    print("RESULT right")


if __name__ == "__main__":
    main()
