"""Programs for audits: `audited.py WHAT`. Each makes calls whose effect on memory is known to the byte."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from cuda.bindings import driver
from cuda_program import Buffer, Device, Module, Stream, check

SOURCE = r"""
extern "C" __global__ void put(unsigned *to, unsigned from, unsigned count, unsigned value)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        to[from + i] = value;
}
extern "C" __global__ void copy(unsigned *to, const unsigned *from, unsigned count)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] = from[i] + 1;
}
extern "C" __global__ void only_reads(const unsigned *from, unsigned count, unsigned *never)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && from[i] == 0xffffffff)
        *never = 1;
}
__device__ unsigned *hidden;
extern "C" __global__ void through_variable(unsigned value) { hidden[0] = value; }
"""

CHUNK = 65536
MIB = 1 << 20
u32 = ctypes.c_uint32


def put(module: Module, to: Buffer, chunk: int, count: int, value: int, stream: object = 0) -> None:
    """Set `count` words from the start of a chunk of 64 KiB."""
    arguments = (to, u32(chunk * CHUNK // 4), u32(count), u32(value))
    module.launch("put", -(-count // 128), 128, *arguments, stream=stream)


def kernels(device: Device, module: Module) -> None:
    """Three launches that write 1, 3 and 0 chunks of 64; one that copies; one that writes nothing; one to anywhere."""
    first, second = Buffer(4 * MIB), Buffer(4 * MIB)
    first.fill(7)
    put(module, first, 3, 16, 1)
    put(module, first, 8, 3 * CHUNK // 4, 2)
    put(module, first, 3, 16, 1)  # what is there already
    module.launch("copy", 128, 128, second, first, u32(CHUNK // 4))
    module.launch("only_reads", 128, 128, first, u32(CHUNK // 4), second)
    address, _ = module.variable("hidden")
    pointer = ctypes.c_uint64(second.address + 5 * CHUNK)
    check(driver.cuMemcpyHtoD(address, ctypes.addressof(pointer), 8), "set a variable")
    module.launch("through_variable", 1, 1, u32(9))
    second.upload(bytes(range(256)), offset=10 * CHUNK)


def graph(device: Device, module: Module) -> None:
    """A graph of two kernels and a memset, launched twice."""
    first, second = Buffer(MIB), Buffer(MIB)
    stream = Stream()
    put(module, first, 0, 1, 0)  # so that the kernels are loaded
    module.launch("copy", 1, 1, second, first, u32(1))
    device.synchronize()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    check(driver.cuStreamBeginCapture(stream.handle, mode), "capture")
    check(driver.cuMemsetD32Async(first.address, 5, CHUNK // 4, stream.handle), "memset")
    module.launch("copy", 128, 128, second, first, u32(CHUNK // 4), stream=stream.handle)
    put(module, first, 1, 8, 3, stream=stream.handle)
    captured = check(driver.cuStreamEndCapture(stream.handle), "end the capture")
    executable = check(driver.cuGraphInstantiate(captured, 0), "make it executable")
    for _ in range(2):
        check(driver.cuGraphLaunch(executable, stream.handle), "launch")
        first.fill(0)
    stream.synchronize()


def threads(device: Device, module: Module) -> None:
    """Four threads with a buffer and a stream each, 20 launches a thread; buffers come and go meanwhile."""
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Device():
                stream = Stream()
                for turn in range(20):
                    mine = Buffer(MIB)
                    put(module, mine, number, 8, 1000 * number + turn + 1, stream.handle)
                    stream.synchronize()
                    mine.close()
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


def library(device: Device, module: Module) -> None:
    """A launch inside cublasSgemm_v2 of the library named by the second argument."""
    blas = ctypes.CDLL(sys.argv[2])
    a, b, c = Buffer(MIB), Buffer(MIB), Buffer(MIB)
    module.launch("copy", 1, 1, a, b, u32(1))
    launch = ctypes.CFUNCTYPE(None)(lambda: module.launch("copy", 1, 128, c, a, u32(128)))
    blas.fake_callback(launch)
    p, size = ctypes.c_void_p, ctypes.c_int
    call = blas.cublasSgemm_v2
    call.argtypes = [p, size, size, size, size, size, p, p, size, p, size, p, p, size]
    answer = call(1, 0, 1, 16, 8, 4, 7, a.address, 16, b.address, 8, 12, c.address, 16)
    assert answer == 1300, answer


def hanging(device: Device, module: Module) -> None:
    """A stream that waits for what is written only after the next launch was made."""
    flag, data = Buffer(MIB), Buffer(MIB)
    flag.fill(0)
    put(module, data, 0, 1, 1)
    waiting, setting = Stream(), Stream()
    check(driver.cuStreamWaitValue32(waiting.handle, flag.address, 1, 1), "wait for a value")
    put(module, data, 0, 1, 2, waiting.handle)
    check(driver.cuStreamWriteValue32(setting.handle, flag.address, 1, 0), "write the value")
    waiting.synchronize()
    put(module, data, 0, 1, 3)
    device.synchronize()
    assert data.download(4) == (3).to_bytes(4, "little")


PROGRAMS: dict[str, Callable[[Device, Module], None]] = {
    "kernels": kernels,
    "graph": graph,
    "threads": threads,
    "library": library,
    "hanging": hanging,
}

if __name__ == "__main__":
    with Device() as opened:
        PROGRAMS[sys.argv[1]](opened, opened.load(SOURCE, "audited.cu"))
        opened.synchronize()
    print("RESULT done")
