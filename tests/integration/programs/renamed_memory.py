"""Three files in /dev/shm, each made under one name and linked to another, as sem_open(3) does; the first name is the
same for all. Two are mapped, and one is only open. When the file GO appears it prints the first letter of each.

Usage: renamed_memory.py BASE GO; their names begin with BASE.
"""

import mmap
import os
import sys
import time

from cuda.bindings import driver as cuda

base, go = sys.argv[1:]


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def made(letter):
    first = f"/dev/shm/{base}-first"
    file = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(file, letter.encode() * 4096)
    os.link(first, f"/dev/shm/{base}-{letter}")
    os.unlink(first)
    return file


memories = []
for letter in "AB":
    file = made(letter)
    memories.append(mmap.mmap(file, 4096))
    os.close(file)
kept = made("C")
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
check(cuda.cuMemAlloc(4 << 20))
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.005)
print("RESULT", ",".join([*(chr(memory[0]) for memory in memories), os.pread(kept, 1, 0).decode()]), flush=True)
