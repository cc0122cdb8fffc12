"""Asks for an io_uring by libc's syscall(), as libuv does, and says what it got; then makes calls of no, of two and of
six words by the same function, some that fail, in a child too. When the file GO appears it says whether all were right.

Usage: io_uring.py FILE GO.
"""

import ctypes
import errno
import mmap
import os
import sys
import time

from cuda.bindings import driver as cuda

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
GETPID, KILL, MMAP, MUNMAP, PREAD64, FORK, SETUP = 39, 62, 9, 11, 17, 57, 425


def call(number, *words):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, words))
    return result, ctypes.get_errno()


def right():
    with open(sys.argv[1], "w+b") as file:
        file.write(b"0123456789" * 1000)
        file.flush()
        address, error = call(MMAP, 0, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 4096)
        assert not error, error
        assert ctypes.string_at(address, 10) == b"6789012345"
        assert call(MUNMAP, address, 4096) == (0, 0)
        buffer = ctypes.create_string_buffer(4)
        assert call(PREAD64, file.fileno(), ctypes.addressof(buffer), 3, 5) == (3, 0)
        assert buffer.value == b"567"
    assert call(GETPID) == (os.getpid(), 0)
    assert call(KILL, os.getpid(), 0) == (0, 0)
    assert call(KILL, os.getpid(), 1000) == (-1, errno.EINVAL)
    assert call(MUNMAP, 1, 4096) == (-1, errno.EINVAL)
    assert call(100000) == (-1, errno.ENOSYS)
    child, _ = call(FORK)
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    return True


parameters = ctypes.create_string_buffer(120)
ring, failure = call(SETUP, 1, ctypes.addressof(parameters))
print("io_uring:", os.strerror(failure) if ring < 0 else "Success", flush=True)
if int(cuda.cuInit(0)[0]):
    raise SystemExit("there is no GPU")
context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1]
cuda.cuCtxSetCurrent(context)
cuda.cuMemAlloc(4 << 20)
before = right()
print("READY", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
print("RESULT", "right" if before and right() else "wrong", flush=True)
