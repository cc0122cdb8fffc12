"""Batches for the GPU come from worker processes that were forked after CUDA had been initialised, as PyTorch's
DataLoader forks them: queues, semaphores, and shared memory without a name. The workers have no CUDA.

forked_workers.py OPTIONS (those of the examples); --size: how many workers.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
from multiprocessing.queues import Queue
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, Device, u32
from report import Report, parser

WORDS = 4096
SOURCE = r"""
extern "C" __global__ void learn(u32 *state, const u32 *batch, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = state[i] * 1664525u + batch[i];
}
"""


def work(number: int, of: int, asked: Queue[int], ready: Queue[int], memory: mmap.mmap) -> None:
    if int(driver.cuCtxSynchronize()[0]) != int(driver.CUresult.CUDA_ERROR_NOT_INITIALIZED):
        raise SystemExit("a forked worker has CUDA")
    while (batch := asked.get()) >= 0:
        memory[: 4 * WORDS] = (batch * of + number).to_bytes(4, "little") * WORDS
        ready.put(batch)


def main() -> None:
    options = parser("Forked workers.", iterations=60, size=2, size_help="workers").parse_args()
    report = Report(options)
    with Device() as device:
        module = device.load(SOURCE, "forked_workers.cu")
        state, batch = Buffer(4 * WORDS), Buffer(4 * WORDS)
        state.fill(1)
        device.synchronize()
        made = multiprocessing.get_context("fork")
        memories = [mmap.mmap(-1, 4 << 20) for _ in range(options.size)]
        asked = [made.Queue() for _ in memories]
        ready = [made.Queue() for _ in memories]
        workers = [
            made.Process(target=work, args=(i, options.size, asked[i], ready[i], memories[i]), daemon=True)
            for i in range(options.size)
        ]
        for worker in workers:
            worker.start()
        report.device(f"workers {[worker.pid for worker in workers]}")
        for queue in asked:
            queue.put(0)
        for iteration in range(options.iterations):
            for i, memory in enumerate(memories):
                if ready[i].get() != iteration:
                    raise SystemExit("a worker made another batch")
                batch.upload(memory[: 4 * WORDS])
                asked[i].put(iteration + 1)
                module.launch("learn", WORDS // 256, 256, state, batch, u32(WORDS))
            report.step(module.digest(state))
        report.result()
        for queue in asked:
            queue.put(-1)
        for worker in workers:
            worker.join()
            if worker.exitcode:
                raise SystemExit(f"a worker ended with {worker.exitcode}")
    os._exit(0)


if __name__ == "__main__":
    main()
