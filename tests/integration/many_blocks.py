"""A program whose GPU memory is in many shapes and checked all the time; and what holds after every fault."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.integration.site import Program, Site, opened

BLOCKS = """
# GPU memory in many shapes, checked all the time; every word of it is known, so nothing can go wrong unseen.
import argparse, itertools, os, sys, threading, time
from cuda.bindings import driver as cuda

def check(answer):
    if int(answer[0]):
        print("ERROR", answer[0].name, flush=True)
        sys.exit(3)
    return answer[1] if len(answer) == 2 else answer[1:]

p = argparse.ArgumentParser()
p.add_argument("--blocks", type=int, default=4)
p.add_argument("--size", type=int, default=2 << 20)
p.add_argument("--devices", type=int, default=1)
p.add_argument("--threads", type=int, default=1)
p.add_argument("--until", default="")  # there is this file; else for ever
p.add_argument("--seconds", type=float, default=0.02)
p.add_argument("--served", action="store_true")  # by cuMemAlloc; else each has physical memory of its own
o = p.parse_args()
check(cuda.cuInit(0))
contexts = [check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(d)))) for d in range(o.devices)]

def allocate(device):
    if o.served:
        return int(check(cuda.cuMemAlloc(o.size)))
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    access = cuda.CUmemAccessDesc()
    access.location = properties.location
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    at = int(check(cuda.cuMemAddressReserve(o.size, 0, 0, 0)))
    handle = check(cuda.cuMemCreate(o.size, properties, 0))
    check(cuda.cuMemMap(at, o.size, 0, handle, 0))
    check(cuda.cuMemSetAccess(at, o.size, [access], 1))
    check(cuda.cuMemRelease(handle))
    return at

WORDS = 256
buffers = []
for device, context in enumerate(contexts):
    check(cuda.cuCtxSetCurrent(context))
    for i in range(o.blocks):
        at = allocate(device)
        value = len(buffers) if len(buffers) < 64 else 0  # of thousands most are zeros: less to write
        if value or o.served:
            check(cuda.cuMemsetD32(at, value, o.size // 4 if o.served else WORDS))
        buffers.append([device, at, value])
lock = threading.Lock()
done = 0
ended = []

def verify(buffer):
    device, at, value = buffer
    data = bytearray(4 * WORDS)
    check(cuda.cuMemcpyDtoH(data, at, len(data)))
    if bytes(data) != value.to_bytes(4, "little") * WORDS:
        print("WRONG", device, value, data[:8].hex(), flush=True)
        sys.exit(4)

def work(number):
    global done
    mine = buffers[number::o.threads]
    stream = None
    for i in itertools.count():
        if os.path.exists(o.until):
            ended.append(number)
            return
        buffer = mine[i % len(mine)]
        check(cuda.cuCtxSetCurrent(contexts[buffer[0]]))
        verify(buffer)
        buffer[2] = (buffer[2] * 1103515245 + 12345) & 0x7fffffff
        if o.threads > 1 and o.devices == 1:
            stream = stream or check(cuda.cuStreamCreate(1))
            check(cuda.cuMemsetD32Async(buffer[1], buffer[2], WORDS, stream))
            check(cuda.cuStreamSynchronize(stream))
        else:
            check(cuda.cuMemsetD32(buffer[1], buffer[2], WORDS))
        with lock:
            done += 1
            print("ITERATION", done, flush=True)
        time.sleep(o.seconds)

threads = [threading.Thread(target=work, args=(n,)) for n in range(o.threads)]
for t in threads:
    t.start()
for t in threads:
    t.join()
if len(ended) == o.threads:
    for buffer in buffers:
        check(cuda.cuCtxSetCurrent(contexts[buffer[0]]))
        verify(buffer)
    print("RESULT right", flush=True)
"""


def blocks(site: Site, *options: str, wait: bool = True, **changes: str) -> Program:
    """Start the program above. It ends, with the result "right", when one waits for its end."""
    script = site.folder / "blocks.py"
    script.write_text(BLOCKS)
    program = site.until_awaited(sys.executable, str(script), *options, "--until", **changes)
    if wait:
        program.wait_iterations(3)
    return program


def daemon(site: Site, **settings: str) -> None:
    """Start phosd with faults or settings of its own."""
    site.run("phosd", "--ensure", check=True, **settings)


def nothing_of_ours(image: Path) -> bool:
    return not list(image.glob("phos-*"))


def phosd_descriptors(site: Site) -> list[str]:
    """What phosd has open, but for what it opens for the question itself."""
    return [name for name, _ in opened(site.daemon_pid())]


def fit_for_the_next(site: Site, name: str = "next") -> None:
    """phosd checkpoints and restores another program after whatever happened."""
    program = blocks(site, "--blocks", "2")
    image = site.image(name)
    site.dump(program, image)
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    program.wait_progress()
    assert program.wait_result() == "right"
    site.wait_no_gpu_memory()


def end(site: Site, program: Program) -> None:
    """Kill a program that would run on; all its memory has to go."""
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    site.wait_no_gpu_memory(15)


@dataclass(frozen=True)
class Fault:
    """Where it strikes, and what has to be said of it."""

    said: str
    application: str = ""
    phosd: str = ""


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def log_of(site: Site) -> str:
    return (site.folder / "run" / "phosd.log").read_text(errors="replace")


def renewed(site: Site) -> bool:
    """Whether phosd has lost its GPU context, and serves again since."""
    _, lost, since = log_of(site).rpartition("GPU context is lost")
    return bool(lost) and "phosd serves" in since
