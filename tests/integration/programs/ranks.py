"""Two processes whose streams wait for each other at every step, as those of a training with collectives.

Usage: ranks.py FOLDER

The process itself has nothing to do with CUDA; it starts both and waits for them. A step of a rank is queued, not
waited for: it writes its number into the other's memory and waits for the other's number in its own. At random moments
one is ahead. RANKS_REST: so many seconds rank 0 rests after every 16 steps, when they are done; rank 1 has the next
ones queued then, and waits. Prints `RANK r ITERATION n` every 16 steps, once they are done, and `ERROR ...` if the
GPU's memory is not what it should be.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

SIZE = 4 << 20
STEPS = 16


def check(result: Any) -> Any:
    if int(result[0]):
        print(f"ERROR {result[0]!r}", flush=True)
        raise SystemExit(1)
    return result[1] if len(result) == 2 else None


def exchange(folder: Path, rank: int, memory: int) -> int:
    """The other's memory."""
    mine, other = folder / f"handle-{rank}", folder / f"handle-{1 - rank}"
    mine.with_suffix(".new").write_bytes(bytes(check(cuda.cuIpcGetMemHandle(memory)).reserved))
    mine.with_suffix(".new").rename(mine)
    while not other.exists():
        time.sleep(0.005)
    handle = cuda.CUipcMemHandle()
    handle.reserved = other.read_bytes()
    return int(check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))


def compute(folder: Path, rank: int) -> None:
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(0))))
    memory, flag = int(check(cuda.cuMemAlloc(SIZE))), int(check(cuda.cuMemAlloc(SIZE)))
    check(cuda.cuMemsetD8(flag, 0, SIZE))
    stream = check(cuda.cuStreamCreate(1))
    others = exchange(folder, rank, flag)
    chance = random.Random(rank)
    found = (ctypes.c_ubyte * SIZE)()
    number = 0
    while True:
        number += 1
        time.sleep(chance.uniform(0, 0.003))
        check(cuda.cuStreamWriteValue32(stream, others, number, 0))
        check(cuda.cuStreamWaitValue32(stream, flag, number, 0))
        check(cuda.cuMemsetD8Async(memory, number % 251, SIZE, stream))
        if number % STEPS == 0:
            check(cuda.cuMemcpyDtoHAsync(ctypes.addressof(found), memory, SIZE, stream))
            check(cuda.cuStreamSynchronize(stream))
            if bytes(found) != bytes([number % 251]) * SIZE:
                print(f"ERROR rank {rank}, step {number}: {bytes(found[:4]).hex()}", flush=True)
                raise SystemExit(1)
            # In one piece: the other writes there as well.
            sys.stdout.write(f"RANK {rank} ITERATION {number // STEPS}\n")
            sys.stdout.flush()
            if rank == 0:
                time.sleep(float(os.environ.get("RANKS_REST", "0")))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        compute(folder, int(sys.argv[2]))
        return
    ranks = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank)]) for rank in (0, 1)]
    for rank in ranks:
        rank.wait()


if __name__ == "__main__":
    main()
