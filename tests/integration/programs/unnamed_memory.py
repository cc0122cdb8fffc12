"""A parent that uses the GPU and a child share memory that is a file without a name, larger than CRIU takes by itself.

The child counts up in its first word. When the file GO appears the parent sees whether it still does, and whether
the rest is as it was. Usage: unnamed_memory.py FOLDER GO BYTES [NAME]; FOLDER is where the file has been. With NAME it
still is, called so, and only the name is gone that it was mapped by.
"""

import mmap
import os
import signal
import struct
import sys
import tempfile
import time

from cuda.bindings import driver as cuda

folder, go, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
PATTERN = bytes(range(1, 256)) * 16


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


with tempfile.NamedTemporaryFile(dir=folder) as file:
    os.ftruncate(file.fileno(), size)
    memory = mmap.mmap(file.fileno(), size)
    for name in sys.argv[4:]:
        os.link(file.name, os.path.join(folder, name))
for at in range(4096, size - len(PATTERN), len(PATTERN)):
    memory[at : at + len(PATTERN)] = PATTERN
wanted = memory[4096:]


def count():
    return struct.unpack_from("<Q", memory)[0]


child = os.fork()
if child == 0:
    while True:
        struct.pack_into("<Q", memory, 0, count() + 1)
        time.sleep(0.005)
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
check(cuda.cuMemAlloc(4 << 20))
while not count():
    time.sleep(0.005)
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.005)
before, late = count(), time.monotonic() + 60
while count() == before and time.monotonic() < late:
    time.sleep(0.005)
found = "counts" if count() > before else "stands", "same" if memory[4096:] == wanted else "other"
os.kill(child, signal.SIGKILL)
print("RESULT", ",".join(found), flush=True)
