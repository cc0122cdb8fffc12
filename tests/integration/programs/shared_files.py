"""A parent that uses the GPU and a child share memory of every kind that has no name that lasts.

The child counts up in the first words of two of them. When the file GO appears the parent sees whether it still does,
and whether the rest is as it was. Usage: shared_files.py FOLDER GO [still]; FOLDER is on a disk, and a child that is
still counts only when there is GO.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import zlib

from cuda.bindings import driver as cuda

MIB = 1 << 20
folder, go, *still = sys.argv[1:]


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def pattern(seed, size):
    words = (zlib.crc32(b"%d %d" % (seed, at)).to_bytes(4, "little") for at in range(0, size, 4096))
    return b"".join(word * 1024 for word in words)[:size]


filled = {}  # by the memory's id: what it holds. It is not read for that: it would have pages then where it has none


def fill(memory, at, size):
    memory[at : at + size] = filled.setdefault(id(memory), bytearray(len(memory)))[at : at + size] = pattern(at, size)


def memfd(name, size):
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def ghost(place, size):
    with tempfile.NamedTemporaryFile(dir=place) as file:
        os.ftruncate(file.fileno(), size)
        return mmap.mmap(file.fileno(), size)


anonymous = mmap.mmap(-1, 9 * MIB)
fill(anonymous, 0, 5 * MIB)
for page in range(6 * MIB, 9 * MIB, 3 * 4096):
    fill(anonymous, page, 4096)
odd = mmap.mmap(memfd("odd", 5 * MIB + 123), 5 * MIB + 123)
fill(odd, 0, 5 * MIB + 123)
unmapped = memfd("unmapped", 8 << 30)
os.pwrite(unmapped, pattern(1, 2 * MIB), 3 * MIB)
os.pwrite(unmapped, pattern(2, 4096), (8 << 30) - 4096)
sealed = memfd("sealed", 2 * MIB)
os.pwrite(sealed, pattern(3, 2 * MIB), 0)
fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
empty = mmap.mmap(-1, 4 * MIB)
small = mmap.mmap(-1, MIB // 2)
fill(small, 0, MIB // 2)
dense = ghost("/dev/shm", 7 * MIB + 77)
fill(dense, 0, 7 * MIB + 77)
sparse = ghost("/dev/shm", 64 * MIB)  # CRIU reads the first word of a mapping, so the first page is there
for at, size in ((0, 4096), (2 * MIB, 3 * MIB), (10 * MIB, 4096), (62 * MIB, 2 * MIB)):
    fill(sparse, at, size)
trimmed = mmap.mmap(-1, 4 * MIB)  # of which only the first half is still mapped
trimmed[:] = pattern(4, 4 * MIB)
at = ctypes.addressof(ctypes.c_char.from_buffer(trimmed))
assert not ctypes.CDLL(None).munmap(ctypes.c_void_p(at + 2 * MIB), ctypes.c_size_t(2 * MIB))
on_disk = ghost(folder, 6 * MIB)
fill(on_disk, 0, 6 * MIB)
MAPPINGS = {"anonymous": anonymous, "odd": odd, "empty": empty, "small": small, "dense": dense, "sparse": sparse}
MAPPINGS["on disk"] = on_disk


def expected():
    """Of each, a checksum of all but the word that the child counts in."""
    return {name: zlib.crc32(filled.get(id(memory), bytes(len(memory)))[8:]) for name, memory in MAPPINGS.items()}


def state():
    return {name: zlib.crc32(memory[8:]) for name, memory in MAPPINGS.items()}


def state_of_unmapped():
    """Of what nobody has mapped: a checksum, whether it is sealed and how large, and whether it is mostly holes."""
    yield zlib.crc32(os.pread(unmapped, 8 * MIB, 0) + os.pread(unmapped, MIB, (8 << 30) - MIB))
    yield zlib.crc32(os.pread(sealed, 2 * MIB, 0)), fcntl.fcntl(sealed, fcntl.F_GET_SEALS)
    yield [os.fstat(descriptor).st_size for descriptor in (unmapped, sealed)]
    yield os.fstat(unmapped).st_blocks < 3 * MIB // 512


def spans():
    """Where these are mapped, as the names in /proc/PID/map_files say it."""
    at = {f"{ctypes.addressof(ctypes.c_char.from_buffer(memory)):x}" for memory in (*MAPPINGS.values(), trimmed)}
    return [span for span in os.listdir("/proc/self/map_files") if span.split("-")[0] in at]


def counts():
    return [struct.unpack_from("<Q", memory)[0] for memory in (anonymous, dense)]


for memory in (anonymous, dense):
    struct.pack_into("<Q", memory, 0, 0)
child = os.fork()
if child == 0:
    for rounds in itertools.count():
        while still and rounds and not os.path.exists(go):
            time.sleep(0.005)
        for memory, count in zip((anonymous, dense), counts(), strict=True):
            struct.pack_into("<Q", memory, 0, count + 1)
        time.sleep(0.005)
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
block = check(cuda.cuMemAlloc(4 << 20))
host = (ctypes.c_char * 64)()
wanted, wanted_of_unmapped = expected(), list(state_of_unmapped())
while not all(counts()):
    time.sleep(0.005)
print("INODES", *(os.stat(f"/proc/self/map_files/{span}").st_ino for span in spans()), flush=True)
print("READY", flush=True)
while not os.path.exists(go):
    time.sleep(0.005)
before, late = counts(), time.monotonic() + 60
while not all(now > then for now, then in zip(counts(), before, strict=True)) and time.monotonic() < late:
    time.sleep(0.005)
found = state()
wrong = [name for name in wanted if found[name] != wanted[name]]
wrong += ["trimmed"] if trimmed[: 2 * MIB] != pattern(4, 2 * MIB) else []
wrong += ["unmapped"] if list(state_of_unmapped()) != wanted_of_unmapped else []
wrong += ["counts"] if time.monotonic() >= late else []
check(cuda.cuMemcpyDtoH(ctypes.addressof(host), int(block), 64))
os.kill(child, signal.SIGKILL)
print("RESULT", ",".join(wrong) or "right", flush=True)
