"""The sole caller of cuda-python: the few driver calls that the engine needs, as typed functions.

Everything raises :class:`~phos.gpu_engine.errors.DriverError`. cuda-python releases the interpreter lock during each
call, so threads may wait in the driver side by side. phosd never allocates with ``cuMemAlloc``: what it maps are blocks
that it created with a descriptor or imported from one (DESIGN §1).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cuda.bindings import driver as cuda

from phos.gpu_engine.errors import DriverError, Unsupported

GRANULARITY = 2 << 20
"""Physical memory comes in multiples of this many bytes on every GPU with VMM support."""

MINIMUM_DRIVER = 12080
"""``cuDriverGetVersion`` of the first driver with the public checkpoint API (release 570)."""

_OWN_THREAD = re.compile(r"cuda(-EvtHandlr|\d{6,})")
_FD_HANDLE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_STACK_LIMIT = cuda.CUlimit.CU_LIMIT_STACK_SIZE


_in_use = threading.local()
"""The thread's current context, which nobody else sets: each call that is spared is one after which the thread would
have to get the interpreter lock back."""


def _check(call: str, result: tuple[Any, ...], context: str = "") -> Any:
    code = int(result[0])
    if code != 0:
        status, name = cuda.cuGetErrorName(result[0])
        spelled = name.decode() if int(status) == 0 and name else "unknown"
        raise DriverError(call, code, spelled, context)
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def fail(call: str, code: int, context: str = "") -> NoReturn:
    """Raise what a driver call's status means, for who has called it himself."""
    try:
        result = cuda.CUresult(code)
    except ValueError:  # newer than cuda-python
        raise DriverError(call, code, "unknown", context) from None
    _check(call, (result,), context)
    raise ValueError(f"{call} has not failed")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def entry_points(symbols: Sequence[str]) -> list[int]:
    """The addresses of functions of the driver, for native code that calls it."""
    library = _library()
    return [int(ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0) for symbol in symbols]


def kind() -> str:
    """``software`` when the loaded libcuda.so.1 is the software GPU's, else ``nvidia``."""
    return "software" if hasattr(_library(), "softgpu_version") else "nvidia"


def device_files() -> tuple[str, ...]:
    """How the links in /proc/PID/fd begin that lead to device files of the driver's.

    The software GPU has none, but a descriptor that CRIU refuses as it does those (softgpu/checkpoint.c).
    """
    return ("anon_inode:[userfaultfd]", "anon_inode:[perf_event]") if kind() == "software" else ("/dev/nvidia",)


def own_thread(name: str) -> bool:
    """Whether a thread of the driver's is called so. A process with CUDA or NVML has one, a forked child has none.

    Seen with 580.159: cuda-EvtHandlr, and cuda with a number.
    """
    return name.startswith("softgpu-") if kind() == "software" else bool(_OWN_THREAD.fullmatch(name))


def release() -> str:
    """The kernel driver's release, for example 580.159.04; empty when there is none."""
    module = Path("/sys/module/nvidia/version")
    return module.read_text().strip() if module.exists() and kind() == "nvidia" else ""


@dataclass(frozen=True)
class Gpu:
    """One device as the driver shows it. Sizes in bytes."""

    ordinal: int
    uuid: str
    name: str
    compute_capability: tuple[int, int]
    total_memory: int


def initialise() -> int:
    """Initialise the driver once and return its version (for example 13000).

    The number of hardware connections is set to one first: phosd needs no more, and its context is smaller (DESIGN §2).

    Raises:
        DriverError: no usable driver or GPU.
        Unsupported: the driver is older than release 570 and has no checkpoint API.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        _check("cuInit", cuda.cuInit(0))
    except RuntimeError as error:  # cuda-python's own, when it finds no libcuda.so.1
        raise Unsupported(
            f"No CUDA driver could be loaded ({error}). Install NVIDIA driver 570 or later, "
            "or use the software GPU (PHOS_DEVICE=software)."
        ) from error
    version = int(_check("cuDriverGetVersion", cuda.cuDriverGetVersion()))
    if version < MINIMUM_DRIVER:
        raise Unsupported(
            f"The NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, which has no checkpoint API. "
            "Install driver 570 or later."
        )
    return version


def gpus() -> list[Gpu]:
    """Every visible GPU, in ordinal order."""
    found = []
    for ordinal in range(int(_check("cuDeviceGetCount", cuda.cuDeviceGetCount()))):
        device = _check("cuDeviceGet", cuda.cuDeviceGet(ordinal))
        raw_uuid = _check("cuDeviceGetUuid", cuda.cuDeviceGetUuid(device))
        name = _check("cuDeviceGetName", cuda.cuDeviceGetName(256, device))
        attribute = cuda.CUdevice_attribute
        major, minor = (
            int(_check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(which, device)))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        found.append(
            Gpu(
                ordinal=ordinal,
                uuid=format_uuid(bytes(raw_uuid.bytes)),
                name=name.split(b"\0")[0].decode(errors="replace"),
                compute_capability=(major, minor),
                total_memory=int(_check("cuDeviceTotalMem", cuda.cuDeviceTotalMem(device))),
            )
        )
    return found


def format_uuid(raw: bytes) -> str:
    """The spelling that nvidia-smi prints: ``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx``."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:32]}"


class Context:
    """phosd's primary context on one GPU: small, and current in whatever thread entered :meth:`use`."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        device = _check("cuDeviceGet", cuda.cuDeviceGet(ordinal), f"on GPU {ordinal}")
        self._context = _check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(device), f"on GPU {ordinal}")
        self.use()
        _check("cuCtxSetLimit", cuda.cuCtxSetLimit(_STACK_LIMIT, 0))
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = _FD_HANDLE
        self._properties = properties
        access = cuda.CUmemAccessDesc()
        access.location = properties.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access

    def use(self) -> None:
        """Make this context current in the calling thread."""
        if getattr(_in_use, "context", None) is not self:
            _check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(self._context), f"on GPU {self.ordinal}")
            _in_use.context = self

    def free_memory(self) -> int:
        """Bytes free on the GPU now."""
        self.use()
        free, _total = _check("cuMemGetInfo", cuda.cuMemGetInfo(), f"on GPU {self.ordinal}")
        return int(free)

    def create_block(self, size: int) -> int:
        """Create ``size`` bytes of physical memory (a multiple of 2 MiB) and return a descriptor that keeps it alive.

        Raises:
            DriverError: with code 2 (CUDA_ERROR_OUT_OF_MEMORY) when the GPU has not that much left.
        """
        self.use()
        where = f"of {size} bytes on GPU {self.ordinal}"
        handle = _check("cuMemCreate", cuda.cuMemCreate(size, self._properties, 0), where)
        try:
            return int(
                _check("cuMemExportToShareableHandle", cuda.cuMemExportToShareableHandle(handle, _FD_HANDLE, 0), where)
            )
        finally:
            _check("cuMemRelease", cuda.cuMemRelease(handle))

    def kernels(self, image: bytes, *names: str) -> list[Kernel]:
        """Kernels of a module in PTX or machine code, loaded for good."""
        self.use()
        module = _check("cuModuleLoadData", cuda.cuModuleLoadData(image + b"\0"), f"on GPU {self.ordinal}")
        functions = [
            _check("cuModuleGetFunction", cuda.cuModuleGetFunction(module, name.encode()), name) for name in names
        ]
        return [Kernel(name, function) for name, function in zip(names, functions, strict=True)]

    def reserve(self, size: int) -> int:
        """A range of addresses for :meth:`map_block`, with nothing behind it."""
        self.use()
        where = f"of {size} bytes on GPU {self.ordinal}"
        return int(_check("cuMemAddressReserve", cuda.cuMemAddressReserve(size, 0, 0, 0), where))

    def free_reserved(self, address: int, size: int) -> None:
        """Give a range back that nothing is mapped to."""
        self.use()
        _check("cuMemAddressFree", cuda.cuMemAddressFree(address, size))

    def map_block(self, descriptor: int, size: int, reserved: int = 0) -> Mapping:
        """Map the physical memory behind a descriptor; the descriptor stays the caller's.

        ``reserved``: where, from :meth:`reserve`. It becomes the mapping's; if this fails it has been given back.
        """
        self.use()
        where = f"of {size} bytes on GPU {self.ordinal}"
        try:
            handle = _check(
                "cuMemImportFromShareableHandle", cuda.cuMemImportFromShareableHandle(descriptor, _FD_HANDLE), where
            )
        except DriverError:
            if reserved:
                cuda.cuMemAddressFree(reserved, size)
            raise
        try:
            address = reserved or self.reserve(size)
            try:
                _check("cuMemMap", cuda.cuMemMap(address, size, 0, handle, 0), where)
                try:
                    _check("cuMemSetAccess", cuda.cuMemSetAccess(address, size, [self._access], 1), where)
                except DriverError:
                    cuda.cuMemUnmap(address, size)
                    raise
            except DriverError:
                cuda.cuMemAddressFree(address, size)
                raise
        finally:
            cuda.cuMemRelease(handle)  # the mapping keeps the memory; the import is not needed any more
        return Mapping(self, address, size)


@dataclass(frozen=True)
class Kernel:
    """A kernel loaded in one context."""

    name: str
    function: Any

    @property
    def handle(self) -> int:
        """For native code."""
        return int(self.function)


@dataclass
class Mapping:
    """A block mapped in phosd's context; ``address`` is a device address."""

    context: Context
    address: int
    size: int

    def unmap(self) -> None:
        """Drop the mapping. The physical memory lives on as long as its descriptor does."""
        self.context.use()
        _check("cuMemUnmap", cuda.cuMemUnmap(self.address, self.size))
        _check("cuMemAddressFree", cuda.cuMemAddressFree(self.address, self.size))


@contextmanager
def scratch(context: Context, size: int) -> Iterator[Mapping]:
    """GPU memory of phosd's own until the block is left; ``size`` is a multiple of 2 MiB."""
    descriptor = context.create_block(size)
    try:
        mapping = context.map_block(descriptor, size)
    finally:
        os.close(descriptor)
    try:
        yield mapping
    finally:
        mapping.unmap()


class PinnedBuffer:
    """Page-locked host memory, usable from every GPU's context; ``view`` is its bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        # CU_MEMHOSTALLOC_PORTABLE: the ring serves all GPUs.
        self.address = int(_check("cuMemHostAlloc", cuda.cuMemHostAlloc(size, 1), f"of {size} bytes"))
        self.view = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")

    def free(self) -> None:
        """Give the memory back. No view of it may be used afterwards."""
        self.view.release()
        _check("cuMemFreeHost", cuda.cuMemFreeHost(self.address))


def register_host(address: int, size: int) -> None:
    """Page-lock memory of this process, so that every GPU copies from it without a bounce; page-aligned.

    Raises:
        DriverError: the kernel or the driver refuses so much.
    """
    _check("cuMemHostRegister", cuda.cuMemHostRegister(address, size, 1), f"of {size} bytes")  # PORTABLE


def unregister_host(address: int) -> None:
    """Undo :func:`register_host`."""
    _check("cuMemHostUnregister", cuda.cuMemHostUnregister(address))


class Lane:
    """One stream. Threads may share it, as the driver lets them: what they queue goes in some order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        context.use()
        self._stream = _check("cuStreamCreate", cuda.cuStreamCreate(1))  # CU_STREAM_NON_BLOCKING

    @property
    def handle(self) -> int:
        """The stream, for native code."""
        return int(self._stream)

    def event(self) -> Any:
        """A reusable event, for native code to record and wait for."""
        return _check("cuEventCreate", cuda.cuEventCreate(2))  # CU_EVENT_DISABLE_TIMING

    def copy_to_host(self, host: int, device: int, size: int) -> None:
        """Queue a copy of ``size`` bytes from the device address to pinned host memory."""
        _check("cuMemcpyDtoHAsync", cuda.cuMemcpyDtoHAsync(host, device, size, self._stream))

    def fill_zero(self, device: int, size: int) -> None:
        """Queue setting ``size`` bytes at the device address to zero."""
        _check("cuMemsetD8Async", cuda.cuMemsetD8Async(device, 0, size, self._stream))

    def launch(self, kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
        """Queue a kernel whose arguments are all 64-bit integers or addresses, on a grid of one dimension."""
        values = (tuple(arguments), tuple(ctypes.c_uint64 for _ in arguments))
        result = cuda.cuLaunchKernel(kernel.function, blocks, 1, 1, threads, 1, 1, 0, self._stream, values, 0)
        _check("cuLaunchKernel", result, kernel.name)

    def record(self, event: Any) -> None:
        """Have an event reached when what was queued so far is done."""
        _check("cuEventRecord", cuda.cuEventRecord(event, self._stream))

    def synchronise(self) -> None:
        """Wait for everything queued."""
        _check("cuStreamSynchronize", cuda.cuStreamSynchronize(self._stream))

    def destroy(self) -> None:
        """Give the stream back."""
        self._context.use()
        _check("cuStreamDestroy", cuda.cuStreamDestroy(self._stream))


def wait_event(event: Any) -> None:
    """Return when an event has been reached."""
    _check("cuEventSynchronize", cuda.cuEventSynchronize(event))


def destroy_event(event: Any) -> None:
    """Give an event back."""
    _check("cuEventDestroy", cuda.cuEventDestroy(event))


_contexts: dict[int, Context] = {}
_contexts_lock = threading.Lock()  # guards _contexts: a context is made once per GPU


def context(ordinal: int) -> Context:
    """phosd's context on a GPU, made at first use (about 0.3 s on an H100)."""
    with _contexts_lock:
        if ordinal not in _contexts:
            _contexts[ordinal] = Context(ordinal)
        return _contexts[ordinal]


def broken() -> str:
    """What is wrong with phosd's contexts: an error that stays until the process ends (as after a bad copy), or ''."""
    with _contexts_lock:
        known = list(_contexts.values())
    for made in known:
        try:
            made.use()
            _check("cuCtxSynchronize", cuda.cuCtxSynchronize(), f"on GPU {made.ordinal}")
        except DriverError as error:
            return str(error)
    return ""


# The checkpoint API. CUDA driver API documentation, section "CUDA Checkpointing".


def checkpoint_state(pid: int) -> str | None:
    """``running``, ``locked``, ``checkpointed``, ``failed`` or ``busy``; None when the process holds no CUDA.

    ``busy``: another tool saves or restores it with storage of its own (CUDA 13.4).
    """
    try:
        result = cuda.cuCheckpointProcessGetState(pid)
    except ValueError:  # cuda-python's, of a state that was not known when it was made
        return "busy"
    if int(result[0]) != 0:
        return None
    state = str(cuda.CUprocessState(result[1]).name).rsplit("_", 1)[-1].lower()
    return "busy" if state in ("checkpointing", "restoring") else state


def checkpoint_thread(pid: int) -> int:
    """The thread of a process that carries the driver's restore out, by its number for this process or for that one."""
    result = cuda.cuCheckpointProcessGetRestoreThreadId(pid)
    return int(_check("cuCheckpointProcessGetRestoreThreadId", result, f"of process {pid}"))


def checkpoint_lock(pid: int, timeout_ms: int) -> None:
    """Block the process's further driver calls and wait until its GPU work is done."""
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    _check("cuCheckpointProcessLock", cuda.cuCheckpointProcessLock(pid, arguments), f"of process {pid}")


def checkpoint_checkpoint(pid: int) -> None:
    """Move what the driver holds on the GPU for a locked process into that process's host memory."""
    _check("cuCheckpointProcessCheckpoint", cuda.cuCheckpointProcessCheckpoint(pid, None), f"of process {pid}")


def checkpoint_restore(pid: int, gpu_pairs: dict[str, str] | None = None) -> None:
    """Put a checkpointed process's driver state back on the GPU; ``gpu_pairs`` maps old to new UUIDs.

    Waits while the process is stopped. A list of pairs must name every visible GPU (DESIGN §2).
    """
    arguments = None
    if gpu_pairs:
        arguments = cuda.CUcheckpointRestoreArgs()
        pairs = []
        for old, new in gpu_pairs.items():
            pair = cuda.CUcheckpointGpuPair()
            pair.oldUuid = _uuid(old)
            pair.newUuid = _uuid(new)
            pairs.append(pair)
        arguments.gpuPairs = pairs
        arguments.gpuPairsCount = len(pairs)
    _check("cuCheckpointProcessRestore", cuda.cuCheckpointProcessRestore(pid, arguments), f"of process {pid}")


def checkpoint_unlock(pid: int) -> None:
    """Let a locked process make driver calls again."""
    _check("cuCheckpointProcessUnlock", cuda.cuCheckpointProcessUnlock(pid, None), f"of process {pid}")


def _uuid(text: str) -> Any:
    value = cuda.CUuuid()
    raw = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    ctypes.memmove(value.getPtr(), raw, len(raw))  # cuda-python has no setter for a uuid's bytes
    return value
