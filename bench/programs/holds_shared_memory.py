"""Run a program that has shared memory besides: half of it anonymous, half a file in /dev/shm whose name is gone.

holds_shared_memory.py MIB SCRIPT [OPTION...]. Such files are how the batches of PyTorch's loaders are handed over.
"""

from __future__ import annotations

import mmap
import os
import runpy
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20


def main() -> None:
    """Run the program."""
    size, script = int(sys.argv[1]) * MIB // 2, sys.argv[2]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), size)
        held = mmap.mmap(-1, size), mmap.mmap(file.fileno(), size)
    block = os.urandom(MIB)
    for memory in held:
        for at in range(0, size, MIB):
            memory[at : at + MIB] = block[: size - at]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
