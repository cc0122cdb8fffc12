"""Moves, frees, forgets and copies its memory all the time, and says so if it ever finds what it did not put there.

    changes_memory.py MIB

Prints `ROUND N` again and again, and `WRONG ...` at once if a page is not what it should be, or cannot be changed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import threading
from typing import NoReturn

PAGE = mmap.PAGESIZE
REGION = 64  # pages
PROTECTION, PRIVATE = 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAYMOVE, DONTNEED = 1, 4
FAILED = 2**64 - 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def wrong(what: str) -> NoReturn:
    print(f"WRONG {what}", flush=True)
    os._exit(1)


class Region:
    """Pages that begin with their number, but for those that have been forgotten."""

    made = 0

    def __init__(self) -> None:
        Region.made += 1
        self.number = Region.made
        self.forgotten: set[int] = set()
        self.address = libc.mmap(None, REGION * PAGE, PROTECTION, PRIVATE, -1, 0)
        for page in range(REGION):
            self._word(page).value = self._mark(page)

    def _word(self, page: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self.address + page * PAGE)

    def _mark(self, page: int) -> int:
        return self.number << 16 | page + 1

    def check(self, what: str) -> None:
        for page in range(REGION):
            wanted = 0 if page in self.forgotten else self._mark(page)
            if (found := self._word(page).value) != wanted:
                wrong(f"{what}: page {page} of region {self.number} holds {found:#x}, not {wanted:#x}")

    def move(self) -> None:
        # Its address is free then, so that the next region may come to lie there.
        grown = libc.mremap(self.address, REGION * PAGE, (REGION + 1) * PAGE, MAYMOVE)
        if grown == FAILED:
            wrong(f"region {self.number} cannot be moved: {os.strerror(ctypes.get_errno())}")
        libc.munmap(grown + REGION * PAGE, PAGE)
        self.address = grown

    def forget(self, page: int, count: int) -> None:
        libc.madvise(self.address + page * PAGE, count * PAGE, DONTNEED)
        self.forgotten |= set(range(page, page + count))

    def free(self) -> None:
        libc.munmap(self.address, REGION * PAGE)


def change(regions: list[Region], chance: random.Random) -> None:
    """One step of a thread, on regions that are its own."""
    place = chance.randrange(len(regions))
    region = regions[place]
    step = chance.choice(["look", "look", "move", "forget", "forget and move", "replace"])
    if "forget" in step:
        first = chance.randrange(REGION)
        region.forget(first, chance.randint(1, REGION - first))
    if "move" in step:
        region.move()
    if step == "replace":
        region.check("before it was freed")
        region.free()
        regions[place] = region = Region()
    region.check(step)


def fork_and_check(regions: list[Region]) -> None:
    """A child finds what its parent had, wherever that lies."""
    if not (child := os.fork()):
        for region in regions:
            region.check("in a child")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        wrong("a child did not end well")


def main() -> None:
    wanted = int(sys.argv[1]) * (1 << 20) // (REGION * PAGE)
    sets = [[Region() for _ in range(wanted // 3)] for _ in range(3)]

    def run(seed: int) -> None:
        chance = random.Random(seed)
        while True:
            change(sets[seed], chance)

    for seed in (0, 1):
        threading.Thread(target=run, args=(seed,), daemon=True).start()
    chance = random.Random(2)
    number = 0
    while True:
        for _ in range(20):
            change(sets[2], chance)
        fork_and_check(sets[2])
        number += 1
        print(f"ROUND {number}", flush=True)


if __name__ == "__main__":
    main()
