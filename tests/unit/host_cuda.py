"""An independent oracle for the examples: their kernels compiled as C++, behind a fake cuda.bindings.driver.

It shares nothing with the software GPU: no PTX, no interpreter, another compiler. Kernels run at once and in the
order of submission, threads of a block one after the other, or as coroutines where the kernel has a barrier. What the
examples print here is what they must print on every device, since their arithmetic leaves nothing open.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from enum import IntEnum
from pathlib import Path
from typing import Any

SHIM = r"""
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __global__
#define __device__
#define __constant__
#define __shared__ static
struct three { unsigned x, y, z; };
static three threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t host_scheduler, host_fibers[1024];
static char host_stacks[1024][65536];
static unsigned host_running;
static void (*host_body)(void **);
static void **host_body_arguments;
static bool host_finished[1024], is_fiber;
static void __syncthreads() { swapcontext(&host_fibers[host_running], &host_scheduler); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
template <class T> static T atomicAdd(T *p, T v) { T old = *p; *p += v; return old; }
template <class T> static T atomicMax(T *p, T v) { T old = *p; if (v > old) *p = v; return old; }
template <class... A, size_t... I>
static void host_call(void (*f)(A...), void **arguments, std::integer_sequence<size_t, I...>)
{
    f(*(A *)arguments[I]...);
}
template <class... A> static void host_call(void (*f)(A...), void **arguments)
{
    host_call(f, arguments, std::make_integer_sequence<size_t, sizeof...(A)>());
}
static void host_fiber()
{
    host_body(host_body_arguments);
    host_finished[host_running] = true;
    swapcontext(&host_fibers[host_running], &host_scheduler);
}
static void host_place(unsigned t)
{
    host_running = t;
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}
static void host_run(void (*what)(void **), bool barriers, three grid, three block, void **arguments)
{
    unsigned threads = block.x * block.y * block.z;
    gridDim = grid, blockDim = block, host_body = what, host_body_arguments = arguments;
    for (unsigned b = 0; b < grid.x * grid.y * grid.z; b++) {
        blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        if (!barriers) {
            for (unsigned t = 0; t < threads; t++)
                host_place(t), what(arguments);
            continue;
        }
        for (unsigned t = 0; t < threads; t++) {
            host_finished[t] = false;
            getcontext(&host_fibers[t]);
            host_fibers[t].uc_stack.ss_sp = host_stacks[t], host_fibers[t].uc_stack.ss_size = sizeof host_stacks[t];
            makecontext(&host_fibers[t], host_fiber, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned t = 0; t < threads; t++)
                if (!host_finished[t])
                    host_place(t), any = true, swapcontext(&host_scheduler, &host_fibers[t]);
        }
    }
}
"""


class Status(IntEnum):
    """The fake's CUresult."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_FOUND = 500


class _Names:
    """Any enumeration of the driver: every member is 0, for the fake looks at none but the two attributes below."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9

    def __getattr__(self, name: str) -> int:
        return 0


class HostDriver:
    """Stands in for the module cuda.bindings.driver. Device memory is host memory, kept until the object goes."""

    CUresult = Status

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory: list[Any] = []
        self.loaded = 0
        self.CUdevice_attribute = self.CUstream_flags = self.CUevent_flags = _Names()

    def __getattr__(self, name: str) -> Any:
        """Streams, events, contexts: there is nothing to do, and the handle 0 will do."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: (Status.CUDA_SUCCESS, 0)

    def cuDeviceGetAttribute(self, attribute: int, _: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, attribute

    def cuDeviceGetName(self, length: int, _: int) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, b"host compiler".ljust(length, b"\0")

    def cuMemAlloc(self, size: int) -> tuple[Status, int]:
        block = (ctypes.c_uint64 * ((size + 7) // 8))()
        ctypes.memset(block, 0xA5, ctypes.sizeof(block))  # a program must not count on zeros
        self.memory.append(block)
        return Status.CUDA_SUCCESS, ctypes.addressof(block)

    def cuMemHostAlloc(self, size: int, _: int) -> tuple[Status, int]:
        return self.cuMemAlloc(size)

    def cuMemsetD32(self, address: int, word: int, count: int) -> tuple[Status]:
        ctypes.memmove(address, word.to_bytes(4, "little") * count, 4 * count)
        return (Status.CUDA_SUCCESS,)

    def cuMemsetD32Async(self, address: int, word: int, count: int, _: int) -> tuple[Status]:
        return self.cuMemsetD32(address, word, count)

    def cuMemcpyHtoD(self, address: int, data: bytes, size: int) -> tuple[Status]:
        ctypes.memmove(address, data, size)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, host: int | bytearray, address: int, size: int) -> tuple[Status]:
        if isinstance(host, bytearray):
            host[:size] = ctypes.string_at(address, size)
        else:
            ctypes.memmove(host, address, size)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, host: int, address: int, size: int, _: int) -> tuple[Status]:
        return self.cuMemcpyDtoH(host, address, size)

    def cuModuleLoadData(self, source: bytes) -> tuple[Status, ctypes.CDLL]:
        """Compile CUDA C for the host; `source` is what the patched compile_ptx passed through."""
        text = source.decode()
        name = self.folder / f"kernels{self.loaded}"
        self.loaded += 1
        launchers = []
        for kernel, code in re.findall(r"__global__ void (\w+)(.*?\n}\n)", text, re.DOTALL):
            barriers = "true" if "__syncthreads" in code else "false"
            launchers.append(
                f"static void body_{kernel}(void **a) {{ host_call({kernel}, a); }}\n"
                f'extern "C" void launch_{kernel}(three grid, three block, void **a)'
                f" {{ host_run(body_{kernel}, {barriers}, grid, block, a); }}"
            )
        file = name.with_suffix(".cpp")
        file.write_text(SHIM + text + "\n".join(launchers))
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-w",
            "-ffp-contract=off",
            "-fPIC",
            "-shared",
            "-Wl,-Bsymbolic",
            str(file),
            "-o",
            f"{name}.so",
        ]
        subprocess.run(command, check=True)
        return Status.CUDA_SUCCESS, ctypes.CDLL(f"{name}.so")

    def cuModuleGetFunction(self, module: ctypes.CDLL, name: bytes) -> tuple[Status, Any]:
        return Status.CUDA_SUCCESS, module[f"launch_{name.decode()}"]

    def cuModuleGetGlobal(self, module: ctypes.CDLL, name: bytes) -> tuple[Status, int, int]:
        return Status.CUDA_SUCCESS, ctypes.addressof(ctypes.c_char.in_dll(module, name.decode())), 8

    def cuLaunchKernel(self, kernel: Any, *rest: Any) -> tuple[Status]:
        three = ctypes.c_uint32 * 3
        grid, block = Three(three(*rest[0:3])), Three(three(*rest[3:6]))
        kernel(grid, block, ctypes.c_void_p(rest[8]))
        return (Status.CUDA_SUCCESS,)


class Three(ctypes.Structure):
    """The shim's `struct three`."""

    _fields_ = [("xyz", ctypes.c_uint32 * 3)]
