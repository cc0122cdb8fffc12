"""Batches for the GPU come from worker processes that were spawned: they find the semaphores of their queues by name,
and one named piece of shared memory, in which they count.

spawned_workers.py OPTIONS (those of the examples); --size: how many workers. With --context forkserver they are forked
by a process that listens at a socket with a name in a folder of its own.
"""

from __future__ import annotations

import multiprocessing
import struct
import sys
from multiprocessing.queues import SimpleQueue
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda_program import Buffer, Device, u32
from report import Report, parser

WORDS = 4096
AREA = 1 << 20
"""Bytes of the memory that each worker has; how many batches it has made stands at its end."""

SOURCE = r"""
extern "C" __global__ void learn(u32 *state, const u32 *batch, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = state[i] * 1664525u + batch[i];
}
"""


def work(number: int, of: int, asked: SimpleQueue[int], ready: SimpleQueue[int], name: str) -> None:
    memory = SharedMemory(name)
    start, count = number * AREA, (number + 1) * AREA - 8
    while (batch := asked.get()) >= 0:
        (made,) = struct.unpack_from("=Q", memory.buf, count)
        if made != batch:
            raise SystemExit(f"the memory knows of {made} batches, and this is number {batch}")
        memory.buf[start : start + 4 * WORDS] = (batch * of + number).to_bytes(4, "little") * WORDS
        struct.pack_into("=Q", memory.buf, count, made + 1)
        ready.put(batch)
    memory.close()


def main() -> None:
    arguments = parser("Spawned workers.", iterations=60, size=2, size_help="workers")
    arguments.add_argument("--context", default="spawn")
    options = arguments.parse_args()
    report = Report(options)
    made = multiprocessing.get_context(options.context)
    memory = SharedMemory(create=True, size=options.size * AREA)
    asked = [made.SimpleQueue() for _ in range(options.size)]
    ready = [made.SimpleQueue() for _ in range(options.size)]
    workers = [
        made.Process(target=work, args=(i, options.size, asked[i], ready[i], memory.name), daemon=True)
        for i in range(options.size)
    ]
    for worker in workers:
        worker.start()
    with Device() as device:
        module = device.load(SOURCE, "spawned_workers.cu")
        state, batch = Buffer(4 * WORDS), Buffer(4 * WORDS)
        state.fill(1)
        device.synchronize()
        report.device(f"workers {[worker.pid for worker in workers]}, memory {memory.name}")
        for queue in asked:
            queue.put(0)
        for iteration in range(options.iterations):
            for i in range(options.size):
                if ready[i].get() != iteration:
                    raise SystemExit("a worker made another batch")
                batch.upload(memory.buf[i * AREA : i * AREA + 4 * WORDS])
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
    memory.close()
    memory.unlink()


if __name__ == "__main__":
    main()
