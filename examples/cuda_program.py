"""What the example programs share: CUDA C compiled by NVRTC, loaded through the driver, launched with typed arguments.

The examples are ordinary CUDA programs: nothing in them knows of PhOS. They run on an NVIDIA GPU and on the software
GPU alike, and print the same digits on both, because

- every kernel adds, multiplies, divides and takes square roots as IEEE 754 says (no fast math, no contraction of a
  multiply and an add into one unless the source says `__fmaf_rn`), and in an order that the source fixes;
- what is added by atomics is integer, so the order in which threads come by does not matter.

What the programs print is report.py's.
"""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any, NoReturn

from cuda.bindings import driver, nvrtc

# `--fmad=false`: a contracted multiply-add rounds once instead of twice, and whether the compiler contracts is its own
# choice. The other three are NVRTC's defaults, spelled out because the reference outputs depend on them.
COMPILE_OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17")

# In every program: a digest of a buffer that does not depend on the order in which threads run.
DIGEST_SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

// The finalizer of splitmix64: every input bit reaches every output bit.
__device__ u64 mix(u64 x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

extern "C" __global__ void digest(const u32 *words, u32 count, u64 salt, u64 *sum)
{
    u64 local = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        local += mix(((u64)i << 32 | words[i]) ^ salt);
    atomicAdd(sum, local);
}
"""


class CudaError(RuntimeError):
    """A CUDA call that failed: the message says what was being done, and the driver's name and text for the error."""


def check(answer: tuple[Any, ...], doing: str) -> Any:
    """Return what a cuda-python call returned, without its status.

    `answer` is the tuple that every call of cuda.bindings returns: the status, then the results. `doing` completes the
    sentence "Could not ...". Raises CudaError if the status is not success.
    """
    status, *results = answer
    if int(status) != 0:
        if isinstance(status, driver.CUresult):
            # The error functions themselves can fail: with no driver loaded, or a number it does not know.
            _, text = driver.cuGetErrorString(status)
            detail = f"{status.name} ({text.decode() if text else 'the driver has no text for it'})"
        else:
            detail = status.name
        raise CudaError(f"Could not {doing}: {detail}.")
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def compile_ptx(source: str, architecture: str, name: str = "program.cu") -> bytes:
    """Compile CUDA C to PTX with NVRTC; needs no GPU.

    `architecture` is a virtual one, such as "compute_90". Raises CudaError with the compiler's log if the source is
    wrong.
    """
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []), "create an NVRTC program")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in COMPILE_OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "read the size of the compiler's log")
            check(nvrtc.nvrtcGetProgramLog(program, log), "read the compiler's log")
            raise CudaError(f"Could not compile {name} for {architecture}: {status.name}\n{log.decode().strip()}")
        ptx: bytes = b" " * check(nvrtc.nvrtcGetPTXSize(program), "read the size of the PTX")
        check(nvrtc.nvrtcGetPTX(program, ptx), "read the PTX")
        return ptx
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def supported_architecture(major: int, minor: int) -> str:
    """Name the newest virtual architecture that NVRTC knows and a device of this compute capability can run."""
    known = check(nvrtc.nvrtcGetSupportedArchs(), "ask NVRTC which architectures it knows")
    wanted = 10 * major + minor
    usable = [number for number in known if number <= wanted]
    if not usable:
        raise CudaError(
            f"Could not choose an architecture: the device has compute capability {major}.{minor}, and this NVRTC"
            f" compiles for {min(known) / 10:.1f} and later only. Install an older nvidia-cuda-nvrtc."
        )
    return f"compute_{max(usable)}"


class Buffer:
    """Device memory of `size` bytes. Freed by close(), or when the process ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(check(driver.cuMemAlloc(size), f"allocate {size} bytes of device memory"))

    def fill(self, word: int) -> None:
        """Set every 32-bit word of the buffer to `word`."""
        check(driver.cuMemsetD32(self.address, word, self.size // 4), f"fill {self.size} bytes of device memory")

    def upload(self, data: bytes, offset: int = 0) -> None:
        """Copy bytes from the host to the buffer, `offset` bytes from its start."""
        check(driver.cuMemcpyHtoD(self.address + offset, data, len(data)), f"copy {len(data)} bytes to the device")

    def download(self, size: int | None = None, offset: int = 0) -> bytes:
        """Copy `size` bytes (default: all that follow `offset`) from the buffer to the host."""
        length = self.size - offset if size is None else size
        data = bytearray(length)
        where = (ctypes.c_char * length).from_buffer(data)
        doing = f"copy {length} bytes from the device"
        check(driver.cuMemcpyDtoH(ctypes.addressof(where), self.address + offset, length), doing)
        return bytes(data)

    def close(self) -> None:
        """Free the memory. The buffer cannot be used afterwards."""
        if self.address:
            check(driver.cuMemFree(self.address), f"free {self.size} bytes of device memory")
            self.address = 0


Argument = Any  # a Buffer, or a ctypes value


class Device:
    """The first CUDA device with its primary context, current on this thread while the `with` block lasts."""

    def __init__(self, ordinal: int = 0) -> None:
        check(driver.cuInit(0), "start the CUDA driver (is there a GPU, or is the software GPU selected?)")
        self.handle = check(driver.cuDeviceGet(ordinal), f"open CUDA device {ordinal}")
        attribute = driver.CUdevice_attribute
        self.major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        self.minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        name = check(driver.cuDeviceGetName(128, self.handle), "read the device's name")
        self.name = name.split(b"\0")[0].decode()
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.handle), "create a context")

    def _attribute(self, attribute: driver.CUdevice_attribute) -> int:
        return int(check(driver.cuDeviceGetAttribute(attribute, self.handle), "read an attribute of the device"))

    def __enter__(self) -> Device:
        check(driver.cuCtxSetCurrent(self.context), "make the context current")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        answer = driver.cuDevicePrimaryCtxRelease(self.handle)
        if kind is None:  # else the first error is the one to report
            check(answer, "release the context")

    def load(self, source: str, name: str) -> Module:
        """Compile `source`, with the digest kernel in front of it, for this device and load it."""
        return Module(compile_ptx(DIGEST_SOURCE + source, supported_architecture(self.major, self.minor), name), name)

    def describe(self) -> str:
        """Say which device this is."""
        return f"{self.name}, compute capability {self.major}.{self.minor}"

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        check(driver.cuCtxSynchronize(), "wait for the device")


class Module:
    """Loaded code: kernels are looked up at their first launch, `__device__` variables by variable()."""

    def __init__(self, ptx: bytes, name: str) -> None:
        self.name = name
        self._image = ptx  # must be followed by a zero byte; NVRTC counts it in the size
        self.handle = check(driver.cuModuleLoadData(self._image), f"load the compiled {name}")
        self._kernels: dict[str, Any] = {}
        self._sum: Buffer | None = None

    def variable(self, name: str) -> tuple[int, int]:
        """Return address and size in bytes of a `__device__` variable."""
        address, size = check(driver.cuModuleGetGlobal(self.handle, name.encode()), f"find {name} in {self.name}")
        return int(address), int(size)

    def launch(
        self,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *arguments: Argument,
        stream: Any = 0,
        shared: int = 0,
    ) -> None:
        """Launch a kernel; returns before it has run.

        Each argument is a Buffer (passed as its address) or a ctypes value of the very type that the kernel declares.
        `grid` and `block` have one to three dimensions; `shared` is dynamic shared memory in bytes.
        """
        if kernel not in self._kernels:
            self._kernels[kernel] = check(
                driver.cuModuleGetFunction(self.handle, kernel.encode()), f"find the kernel {kernel} in {self.name}"
            )
        values = [ctypes.c_uint64(value.address) if isinstance(value, Buffer) else value for value in arguments]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        # The driver copies the arguments before it returns, so `values` may go then.
        answer = driver.cuLaunchKernel(
            self._kernels[kernel], *_three(grid), *_three(block), shared, stream, ctypes.addressof(pointers), 0
        )
        check(answer, f"launch the kernel {kernel}")

    def digest(self, buffer: Buffer, salt: int = 0, count: int | None = None) -> int:
        """Return a 64-bit digest of the buffer's 32-bit words (the first `count`), computed on the device."""
        words = buffer.size // 4 if count is None else count
        if self._sum is None:
            self._sum = Buffer(8)
        self._sum.fill(0)
        blocks = min(64, (words + 127) // 128)
        arguments = (buffer, ctypes.c_uint32(words), ctypes.c_uint64(salt), self._sum)
        self.launch("digest", blocks, 128, *arguments)
        return int.from_bytes(self._sum.download(), "little")


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z, *_ = (*((size,) if isinstance(size, int) else size), 1, 1)
    return x, y, z


class Stream:
    """A stream that does not wait for the default stream."""

    def __init__(self) -> None:
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = check(driver.cuStreamCreate(flag), "create a stream")

    def wait(self, event: Event) -> None:
        """Let what is submitted from now on begin only after the event."""
        check(driver.cuStreamWaitEvent(self.handle, event.handle, 0), "make a stream wait for an event")

    def synchronize(self) -> None:
        """Wait until the stream has done all it was given."""
        check(driver.cuStreamSynchronize(self.handle), "wait for a stream")


class Event:
    """A point in a stream's work."""

    def __init__(self) -> None:
        flag = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = check(driver.cuEventCreate(flag), "create an event")

    def record(self, stream: Stream) -> None:
        """Set the event to the stream's work so far."""
        check(driver.cuEventRecord(self.handle, stream.handle), "record an event")


def fail(error: CudaError) -> NoReturn:
    """End the program with the error's sentence on stderr and exit status 1."""
    print(error, file=sys.stderr)
    raise SystemExit(1)


def blocks_for(threads: int, block: int) -> int:
    """Return how many blocks of `block` threads hold at least `threads` threads."""
    return (threads + block - 1) // block


def u32(value: int) -> ctypes.c_uint32:
    """A 32-bit unsigned kernel argument."""
    return ctypes.c_uint32(value)


def u64(value: int) -> ctypes.c_uint64:
    """A 64-bit unsigned kernel argument, or an address."""
    return ctypes.c_uint64(value)


def f32(value: float) -> ctypes.c_float:
    """A 32-bit float kernel argument, rounded to nearest."""
    return ctypes.c_float(value)
