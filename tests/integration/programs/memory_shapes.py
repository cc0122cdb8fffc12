"""A GPU program whose own memory is of every kind that CRIU dumps in its own way; it checks all of it, again and
again until there is the file that its last argument names.
"""

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
import zlib

from cuda.bindings import driver as cuda

MIB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for call in ("mprotect", "madvise"):
    getattr(libc, call).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def check(answer):
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]


def mapping(size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, descriptor=-1):
    at = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    assert at != ctypes.c_void_p(-1).value
    return at


def fill(at, size, step=1):
    """Different bytes on every page, or on every so-manieth."""
    for offset in range(0, size, 4096 * step):
        ctypes.memmove(at + offset, zlib.crc32(b"%d" % (at + offset)).to_bytes(4, "little") * 1024, 4096)


plain = mapping(24 * MIB)
fill(plain, 24 * MIB)
holes = mapping(16 * MIB)
fill(holes, 16 * MIB, 3)
locked = mapping(2 * MIB)
fill(locked, 2 * MIB)
libc.mlock(locked, 2 * MIB)
huge = mapping(8 * MIB)
libc.madvise(huge, 8 * MIB, 14)
fill(huge, 8 * MIB)
with open("private.bin", "wb") as file:
    file.write(b"x" * MIB)
descriptor = os.open("private.bin", os.O_RDWR)
private_file = mapping(MIB, mmap.MAP_PRIVATE, descriptor)
fill(private_file, MIB, 2)
shared = mapping(MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
fill(shared, MIB)
read_only = mapping(MIB)
fill(read_only, MIB)
libc.mprotect(read_only, MIB, mmap.PROT_READ)
code = mapping(MIB)
fill(code, MIB)
libc.mprotect(code, MIB, mmap.PROT_READ | mmap.PROT_EXEC)
hidden = mapping(MIB)
fill(hidden, MIB)
libc.mprotect(hidden, MIB, 0)
zeros = mapping(4 * MIB)
ctypes.string_at(zeros, 4 * MIB)  # read, never written

places = ((plain, 24), (holes, 16), (locked, 2), (huge, 8), (private_file, 1), (shared, 1), (read_only, 1), (code, 1))


def total():
    """A checksum of all of it."""
    sums = [zlib.crc32(ctypes.string_at(at, size * MIB)) for at, size in places]
    libc.mprotect(hidden, MIB, mmap.PROT_READ)
    sums.append(zlib.crc32(ctypes.string_at(hidden, MIB)))
    libc.mprotect(hidden, MIB, 0)
    return sums


def idle():
    with lock:  # held by the main thread
        pass


check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
block = int(check(cuda.cuMemAlloc(4 * MIB)))
lock = threading.Lock()
lock.acquire()
for _ in range(3):
    threading.Thread(target=idle, daemon=True).start()
expected = total()
for at, size in (*places, (hidden, 1)):
    if at != shared:
        print("AREA", hex(at), size * MIB, flush=True)
if "--undumpable" in sys.argv:  # CRIU meets it when it has had the tasks frozen for a while
    libc.syscall(323, 1)  # userfaultfd(UFFD_USER_MODE_ONLY)
for i in itertools.count(1):
    last = os.path.exists(sys.argv[-1])  # so after that it checks all of it once more
    check(cuda.cuMemsetD32(block, i, MIB))
    if total() != expected:
        print("RESULT wrong", flush=True)
        sys.exit(4)
    print("ITERATION", i, flush=True)
    if last:
        break
    time.sleep(0.05)
print("RESULT right", flush=True)
os._exit(0)
