"""Fills memory, and forks so many children, which share its pages. All of them say so, and sleep.

shares_pages.py MIB CHILDREN
"""

from __future__ import annotations

import mmap
import os
import sys
import time

SIZE = int(sys.argv[1]) << 20
memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = os.urandom(1 << 20)
for start in range(0, SIZE, len(block)):
    memory[start : start + len(block)] = block
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        break
print(os.getpid(), flush=True)
while True:
    time.sleep(1)
