#!/usr/bin/env python3
"""What copies cost those who map memory, or toggle a process's GPU state, at the same time.

During a concurrent checkpoint phosd copies GPU memory while the driver brings the application's context back and the
application maps its memory; during a restore it copies the other way. One process copies here, in pieces of a given
size, of which so many are under way at once and with pauses if asked; this one imports and maps blocks meanwhile, and
has the driver checkpoint and restore a third process. No phosd is involved.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
import process
from harness import GB, Results

MIB = 1 << 20


class Sizes(NamedTuple):
    """Bytes that are copied round and round, bytes of a block, and how many blocks are mapped."""

    source: int = 4 << 30
    block: int = 160 * MIB
    blocks: int = 100


SMALL = Sizes(64 * MIB, 2 * MIB, 8)


class Load(NamedTuple):
    """How the other process copies: MiB of a piece, pieces under way, seconds of pause after each; to the host unless
    ``inward``. ``back``: bytes that go to the host after each piece that came from there. ``kernel``: no copy engine
    copies, but a kernel does; ``hashed``: the GPU hashes each piece that has come, before the next one comes.
    ``within``: the driver is told that it copies within the GPU, and may take another engine.
    """

    piece: float
    depth: int
    pause: float = 0.0
    inward: bool = False
    back: int = 0
    kernel: bool = False
    hashed: bool = False
    within: bool = False


LOADS = {
    "none": None,
    "16 MiB, 6 under way": Load(16, 6),
    "16 MiB, 2": Load(16, 2),
    "16 MiB, 1": Load(16, 1),
    "4 MiB, 2": Load(4, 2),
    "4 MiB, 1": Load(4, 1),
    "2 MiB, 2": Load(2, 2),
    "2 MiB, 1": Load(2, 1),
    "1 MiB, 1": Load(1, 1),
    "512 KiB, 1": Load(0.5, 1),
    "16 MiB, 2, as within the GPU": Load(16, 2, within=True),
    "2 MiB, 1, as within the GPU": Load(2, 1, within=True),
    "4 MiB, 1, half the time": Load(4, 1, 0.00008),
    "16 MiB, 1, half the time": Load(16, 1, 0.0003),
    "to the GPU: 16 MiB, 4": Load(16, 4, inward=True),
    "to the GPU: 4 MiB, 16": Load(4, 16, inward=True),
    "to the GPU: 4 MiB, 16, and 64 bytes back": Load(4, 16, inward=True, back=64),
    "to the GPU: 4 MiB, 1": Load(4, 1, inward=True),
    "to the GPU: 2 MiB, 1": Load(2, 1, inward=True),
    "to the GPU: 16 MiB, 4, hashed": Load(16, 4, inward=True, hashed=True),
    "to the GPU: 4 MiB, 16, hashed": Load(4, 16, inward=True, hashed=True),
    "to the GPU: 16 MiB, 4, by kernels": Load(16, 4, inward=True, kernel=True),
    "to the GPU: 4 MiB, 8, by kernels": Load(4, 8, inward=True, kernel=True),
    "16 MiB, 4, by kernels": Load(16, 4, kernel=True),
    "4 MiB, 8, by kernels": Load(4, 8, kernel=True),
}

SMALL_LOADS = (
    "none",
    "16 MiB, 2",
    "4 MiB, 1, half the time",
    "to the GPU: 4 MiB, 16, and 64 bytes back",
    "to the GPU: 4 MiB, 16, hashed",
    "4 MiB, 8, by kernels",
    "2 MiB, 1, as within the GPU",
)

SMALL_APPLICATION = """
import sys
from cuda.bindings import driver as cuda
assert not int(cuda.cuInit(0)[0])
error, context = cuda.cuDevicePrimaryCtxRetain(0)
assert not int(error) and not int(cuda.cuCtxSetCurrent(context)[0]) and not int(cuda.cuMemAlloc(4 << 20)[0])
print("READY", flush=True)
sys.stdin.read()
"""

APPLICATION = """
import sys, torch
model = torch.nn.TransformerEncoderLayer(1024, 8, batch_first=True, device="cuda")
model(torch.randn(8, 256, 1024, device="cuda")).sum().backward()
torch.cuda.synchronize()
torch.cuda.empty_cache()
print("READY", flush=True)
sys.stdin.read()
"""


def _check(answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise SystemExit(f"The driver refused a call: {answer[0].name}.")
    return answer[1] if len(answer) > 1 else None


def _use_gpu() -> Any:
    """The first GPU, with its primary context made current."""
    from cuda.bindings import driver as cuda

    _check(cuda.cuInit(0))
    device = _check(cuda.cuDeviceGet(0))
    _check(cuda.cuCtxSetCurrent(_check(cuda.cuDevicePrimaryCtxRetain(device))))
    return device


SPAN, THREADS = 65536, 256  # of a thread block; of content_hash.cu as well

COPY = """
extern "C" __global__ void __launch_bounds__(256) copy(uint4 *to, const uint4 *from)
{
    unsigned long long at = blockIdx.x * 4096ull + threadIdx.x;
    for (int i = 0; i < 16; i += 4, at += 1024) {
        uint4 a = from[at], b = from[at + 256], c = from[at + 512], d = from[at + 768];
        to[at] = a, to[at + 256] = b, to[at + 512] = c, to[at + 768] = d;
    }
}
"""


class Kernels:
    """One that copies, in either direction, and the one that phosd hashes with what has arrived."""

    def __init__(self) -> None:
        from cuda.bindings import driver as cuda

        sys.path.insert(0, str(process.EXAMPLES))
        from cuda_program import compile_ptx

        image = (Path(__file__).resolve().parent.parent / "gpu_engine" / "content_hash.ptx").read_bytes()
        self._hash = self._kernel(image, b"phos_arrival_hash")
        self._copy = self._kernel(compile_ptx(COPY, "compute_75"), b"copy")
        self._room, self._sums = int(_check(cuda.cuMemAlloc(MIB))), int(_check(cuda.cuMemHostAlloc(MIB, 0)))
        _check(cuda.cuMemsetD8(self._room, 0, MIB))

    @staticmethod
    def _kernel(image: bytes, name: bytes) -> Any:
        from cuda.bindings import driver as cuda

        return _check(cuda.cuModuleGetFunction(_check(cuda.cuModuleLoadData(image + b"\0")), name))

    @staticmethod
    def _launch(kernel: Any, size: int, stream: Any, *arguments: int) -> None:
        from cuda.bindings import driver as cuda

        values = arguments, (ctypes.c_uint64,) * len(arguments)
        _check(cuda.cuLaunchKernel(kernel, size // SPAN, 1, 1, THREADS, 1, 1, 0, stream, values, 0))

    def hash(self, memory: int, size: int, stream: Any) -> None:
        """Hash what has come, in chunks of 4 MiB."""
        self._launch(self._hash, size, stream, memory, 4 * MIB, self._room, self._sums)

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        """Copy without a copy engine."""
        self._launch(self._copy, size, stream, to, source)


def copy_until_closed(load: Load, size: int) -> None:
    """Copy until standard input ends; print READY after the first round and GB/s at the end."""
    import select

    from cuda.bindings import driver as cuda

    _use_gpu()
    host, memory = int(_check(cuda.cuMemHostAlloc(size, 0))), int(_check(cuda.cuMemAlloc(size)))
    _check(cuda.cuMemsetD8(memory, 1, size))
    kernels = Kernels() if load.kernel or load.hashed else None
    stream = _check(cuda.cuStreamCreate(1))
    events = [_check(cuda.cuEventCreate(2)) for _ in range(load.depth)]
    piece = int(load.piece * MIB)
    copied, number, began = 0, 0, 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for at in range(0, max(piece, size // 16), piece):  # looks for the end once in a while
            event = events[number % load.depth]
            _check(cuda.cuEventSynchronize(event))
            if load.pause and number:
                until = time.perf_counter() + load.pause
                while time.perf_counter() < until:
                    pass
            if kernels is not None and load.kernel:
                to, source = (memory, host) if load.inward else (host, memory)
                kernels.copy(to + at, source + at, piece, stream)
            elif load.inward:
                _check(cuda.cuMemcpyHtoDAsync(memory + at, host + at, piece, stream))
            if kernels is not None and load.hashed:
                kernels.hash(memory + at, piece, stream)
            if load.within:
                _check(cuda.cuMemcpyDtoDAsync(host + at, memory + at, piece, stream))
            elif not load.kernel and (not load.inward or load.back):
                _check(cuda.cuMemcpyDtoHAsync(host + at, memory + at, load.back or piece, stream))
            _check(cuda.cuEventRecord(event, stream))
            number += 1
            copied += piece
        if not began:
            print("READY", flush=True)
            copied, began = 0, time.perf_counter()
    _check(cuda.cuStreamSynchronize(stream))
    print(copied / (time.perf_counter() - began) / GB)


class Blocks:
    """One block of physical memory and addresses to map it at."""

    def __init__(self, sizes: Sizes) -> None:
        from cuda.bindings import driver as cuda

        self._size, self._count = sizes.block, sizes.blocks
        device = _use_gpu()
        self._property = cuda.CUmemAllocationProp()
        self._property.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = int(device)
        self._property.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._property.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._block = _check(cuda.cuMemCreate(self._size, self._property, 0))
        self._address = int(_check(cuda.cuMemAddressReserve(self._count * self._size, 0, 0, 0)))
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._kind, self._descriptor = kind, int(_check(cuda.cuMemExportToShareableHandle(self._block, kind, 0)))

    def map(self) -> tuple[float, float, float]:
        """Import one again and again, map all and unmap all; seconds a block."""
        from cuda.bindings import driver as cuda

        began = time.perf_counter()
        imported = [
            _check(cuda.cuMemImportFromShareableHandle(self._descriptor, self._kind)) for _ in range(self._count)
        ]
        importing = time.perf_counter() - began
        for handle in imported:
            _check(cuda.cuMemRelease(handle))
        began = time.perf_counter()
        for number in range(self._count):
            address = self._address + number * self._size
            _check(cuda.cuMemMap(address, self._size, 0, self._block, 0))
            _check(cuda.cuMemSetAccess(address, self._size, [self._access], 1))
        mapped = time.perf_counter()
        for number in range(self._count):
            _check(cuda.cuMemUnmap(self._address + number * self._size, self._size))
        unmapping = time.perf_counter() - mapped
        return importing / self._count, (mapped - began) / self._count, unmapping / self._count


def _started(*command: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline().strip() != "READY":
        child.kill()
        raise SystemExit(f"{command[0]} did not start.")
    return child


def measure(key: str, sizes: Sizes, blocks: Blocks, application: int, repeats: int) -> dict[str, Any]:
    """Medians of seconds under one load."""
    copier = None if LOADS[key] is None else _started(__file__, "--copy", key, str(sizes.source))
    maps, toggles = [], []
    for _ in range(repeats):
        maps.append(blocks.map())
        toggles.append(driver_checkpoint.suspend(application) | driver_checkpoint.resume(application))
    row: dict[str, Any] = {
        "import_us": harness.median(one[0] for one in maps) * 1e6,
        "map_us": harness.median(one[1] for one in maps) * 1e6,
        "unmap_us": harness.median(one[2] for one in maps) * 1e6,
        **{f"{step}_s": harness.median(one[step] for one in toggles) for step in toggles[0]},
    }
    if copier is not None:
        row["copied_gb_s"] = float(copier.communicate("", timeout=60)[0])
    return row


def main() -> None:
    """Run as a program."""
    if sys.argv[1:2] == ["--copy"]:
        load = LOADS[sys.argv[2]]
        assert load is not None
        copy_until_closed(load, int(sys.argv[3]))
        return
    parser = harness.options(__doc__ or "", budget=120)
    parser.add_argument("--only", action="append", choices=LOADS, help="of the loads; may be repeated")
    chosen: argparse.Namespace = harness.prepare(parser)
    environment = process.device_environment(chosen.device)
    if "PHOS_COPY_LOAD" not in os.environ:  # what is loaded from where is decided when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment, "PHOS_COPY_LOAD": "1"})
    results = Results(chosen, "copy-load", "What copies cost who maps memory or toggles a process meanwhile")
    sizes, loads, program = (SMALL, SMALL_LOADS, SMALL_APPLICATION) if chosen.smoke else (Sizes(), LOADS, APPLICATION)
    blocks, repeats = Blocks(sizes), chosen.repeats or (1 if chosen.smoke else 5)
    application = _started("-c", program)
    try:
        harness.measure_each(
            chosen,
            results,
            chosen.only or loads,
            lambda key: results.add(key, **measure(key, sizes, blocks, application.pid, repeats)),
        )
    finally:
        application.kill()


if __name__ == "__main__":
    main()
