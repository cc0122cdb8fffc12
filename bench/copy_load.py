#!/usr/bin/env python3
"""What copies to the host cost those who map memory, or toggle a process's GPU state, at the same time.

During a concurrent checkpoint phosd copies GPU memory while the driver brings the application's context back and the
application maps its memory. One process copies here, in pieces of a given size, of which so many are under way at once
and with pauses if asked; this one maps blocks meanwhile, and has the driver checkpoint and restore a third process. No
phosd is involved. Only on a real GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
from harness import GB, Results

MIB = 1 << 20
SOURCE_BYTES = 4 << 30
BLOCK_BYTES = 160 * MIB
BLOCKS = 100


class Load(NamedTuple):
    """How the other process copies: MiB of a piece, pieces under way, seconds of pause after each."""

    piece: int
    depth: int
    pause: float = 0.0


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
    "4 MiB, 1, half the time": Load(4, 1, 0.00008),
    "16 MiB, 1, half the time": Load(16, 1, 0.0003),
}

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


def copy_until_closed(load: Load) -> None:
    """Copy until standard input ends; print READY after the first round and GB/s at the end."""
    import select

    from cuda.bindings import driver as cuda

    _use_gpu()
    host, source = _check(cuda.cuMemHostAlloc(SOURCE_BYTES, 0)), _check(cuda.cuMemAlloc(SOURCE_BYTES))
    _check(cuda.cuMemsetD8(source, 1, SOURCE_BYTES))
    stream = _check(cuda.cuStreamCreate(1))
    events = [_check(cuda.cuEventCreate(2)) for _ in range(load.depth)]
    piece = load.piece * MIB
    copied, number, began = 0, 0, 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for at in range(0, SOURCE_BYTES // 16, piece):  # looks for the end once in a while
            event = events[number % load.depth]
            _check(cuda.cuEventSynchronize(event))
            if load.pause and number:
                until = time.perf_counter() + load.pause
                while time.perf_counter() < until:
                    pass
            _check(cuda.cuMemcpyDtoHAsync(int(host) + at, int(source) + at, piece, stream))
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

    def __init__(self) -> None:
        from cuda.bindings import driver as cuda

        device = _use_gpu()
        self._property = cuda.CUmemAllocationProp()
        self._property.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = int(device)
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._property.location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._block = _check(cuda.cuMemCreate(BLOCK_BYTES, self._property, 0))
        self._address = int(_check(cuda.cuMemAddressReserve(BLOCKS * BLOCK_BYTES, 0, 0, 0)))

    def map(self) -> tuple[float, float]:
        """Map all and unmap all; seconds a block."""
        from cuda.bindings import driver as cuda

        began = time.perf_counter()
        for number in range(BLOCKS):
            address = self._address + number * BLOCK_BYTES
            _check(cuda.cuMemMap(address, BLOCK_BYTES, 0, self._block, 0))
            _check(cuda.cuMemSetAccess(address, BLOCK_BYTES, [self._access], 1))
        mapped = time.perf_counter()
        for number in range(BLOCKS):
            _check(cuda.cuMemUnmap(self._address + number * BLOCK_BYTES, BLOCK_BYTES))
        return (mapped - began) / BLOCKS, (time.perf_counter() - mapped) / BLOCKS


def _started(*command: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline().strip() != "READY":
        child.kill()
        raise SystemExit(f"{command[0]} did not start.")
    return child


def measure(load: Load | None, blocks: Blocks, application: int, repeats: int) -> dict[str, Any]:
    """Medians of seconds under one load."""
    copier = None if load is None else _started(__file__, "--copy", *map(str, load))
    maps, toggles = [], []
    for _ in range(repeats):
        maps.append(blocks.map())
        toggles.append(driver_checkpoint.suspend(application) | driver_checkpoint.resume(application))
    row: dict[str, Any] = {
        "map_us": harness.median(one[0] for one in maps) * 1e6,
        "unmap_us": harness.median(one[1] for one in maps) * 1e6,
        **{f"{step}_s": harness.median(one[step] for one in toggles) for step in toggles[0]},
    }
    if copier is not None:
        row["copied_gb_s"] = float(copier.communicate("", timeout=60)[0])
    return row


def main() -> None:
    """Run as a program."""
    if sys.argv[1:2] == ["--copy"]:
        copy_until_closed(Load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
        return
    chosen: argparse.Namespace = harness.prepare(harness.options(__doc__ or "", budget=120))
    if chosen.device != "nvidia":
        raise SystemExit("copy_load.py measures an NVIDIA GPU and its driver.")
    results = Results(
        chosen, "copy-load", "What copies to the host cost who maps memory or toggles a process meanwhile"
    )
    blocks = Blocks()
    application = _started("-c", APPLICATION)
    try:
        harness.measure_each(
            chosen,
            results,
            LOADS,
            lambda key: results.add(key, **measure(LOADS[key], blocks, application.pid, chosen.repeats or 5)),
        )
    finally:
        application.kill()


if __name__ == "__main__":
    main()
