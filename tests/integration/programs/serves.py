"""A server as those of language models are: one process answers the network, another one has the GPU.

Usage: serves.py

Prints `READY PORT`. Whoever connects sends lines, and gets one for each: how many there have been, and the word that
the whole of the GPU's memory holds then; it depends on all of them. The last word of a line that cannot be: `differ`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda_program import Buffer, Device, u32

WORDS = 1 << 17

SOURCE = r"""
extern "C" __global__ void answer(u32 *state, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        state[i] = state[i] * 1664525u + 1013904223u;
}
"""


def compute(asked: Connection) -> None:
    with Device() as device:
        kernels = device.load(SOURCE, "serves")
        state = Buffer(4 * WORDS)
        state.fill(0)
        asked.send("")
        count = 0
        while True:
            asked.recv()
            count += 1
            kernels.launch("answer", WORDS // 256, 256, state, u32(WORDS))
            words = state.download()
            same = words == words[:4] * WORDS
            asked.send(f"{count} {int.from_bytes(words[:4], 'little') if same else 'differ'}")


async def serve(engine: Connection) -> None:
    turn = asyncio.Lock()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            async with turn:
                engine.send("next")
                said = await asyncio.to_thread(engine.recv)
            writer.write(f"{said}\n".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"READY {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=compute, args=(its,), daemon=True)
    process.start()
    its.close()
    mine.recv()
    asyncio.run(serve(mine))


if __name__ == "__main__":
    main()
