"""Fills memory, and forks so many children, which share its pages; without any, it looks at it again and again.

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
children = int(sys.argv[2])
for _ in range(children):
    if os.fork() == 0:
        break
print("RIGHT", os.getpid(), flush=True)
while True:
    time.sleep(0.2)
    if not children:
        same = all(memory[start : start + len(block)] == block for start in range(0, SIZE, len(block)))
        print("RIGHT" if same else "WRONG", os.getpid(), flush=True)
