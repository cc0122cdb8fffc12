"""Much memory in /dev/shm, each piece a file of its own: as many semaphores, which have lost the name that they are
mapped by, as files that have kept it. When the file GO appears it prints how many of each are as they were.

Usage: many_names.py COUNT BASE GO; their names begin with BASE.
"""

import mmap
import os
import sys
import time

from cuda.bindings import driver as cuda

count, base, go = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def made(name, number, *, semaphore):
    """The memory of a new file with its number in it; for a ``semaphore`` it is made as sem_open(3) does."""
    path = f"/dev/shm/{base}-{name}-{number}"
    first = f"/dev/shm/{base}-first" if semaphore else path
    file = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(file, b"%32d" % number)
    memory = mmap.mmap(file, 32)
    os.close(file)
    if semaphore:
        os.link(first, path)
        os.unlink(first)
    return memory


semaphores = [made("sem", number, semaphore=True) for number in range(count)]
files = [made("file", number, semaphore=False) for number in range(count)]
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
check(cuda.cuMemAlloc(4 << 20))
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.005)
found = [sum(int(memory[:]) == number for number, memory in enumerate(kind)) for kind in (semaphores, files)]
print("RESULT", ",".join(map(str, found)), flush=True)
