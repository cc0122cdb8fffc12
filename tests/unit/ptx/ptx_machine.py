"""The PTX interpreter of the software GPU, driven from Python without any libcuda.

The sources are compiled into one shared object, once per state of theirs, and called through ctypes. Device memory is
ordinary host memory that this module hands out; the interpreter asks for permission to touch it as it asks the software
GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "softgpu").glob("ptx_*.c"))

OK = 0
INVALID_VALUE = 1
INVALID_PTX = 218
ILLEGAL_ADDRESS = 700
OUT_OF_RESOURCES = 701
ASSERT = 710
STACK_ERROR = 714
ILLEGAL_INSTRUCTION = 715
MISALIGNED_ADDRESS = 716
LAUNCH_FAILED = 719
NOT_SUPPORTED = 801


class Range(ctypes.Structure):
    """struct ptx_range"""

    _fields_ = [("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("writable", ctypes.c_bool)]


ACCESS = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_bool, ctypes.POINTER(Range)
)
PRINT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class Global(ctypes.Structure):
    """struct ptx_global"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_size_t),
        ("align", ctypes.c_size_t),
        ("constant", ctypes.c_bool),
    ]


class Launch(ctypes.Structure):
    """struct ptx_launch"""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_size_t),
        ("params", ctypes.c_void_p),
        ("addresses", ctypes.POINTER(ctypes.c_uint64)),
        ("threads", ctypes.c_uint),
        ("access", ACCESS),
        ("cookie", ctypes.c_void_p),
        ("print", PRINT),
    ]


class Fault(ctypes.Structure):
    """struct ptx_fault"""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("write", ctypes.c_bool),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("message", ctypes.c_char * 256),
    ]


def _build(folder: Path, flags: list[str]) -> Path:
    """The interpreter, compiled by as many compilers at a time as there are processors."""
    objects = []
    running = []
    for source in SOURCES:
        target = folder / (source.stem + ".o")
        objects.append(str(target))
        running.append(subprocess.Popen(["gcc", *flags, "-c", str(source), "-o", str(target)]))
        if len(running) >= (os.cpu_count() or 1):
            assert running.pop(0).wait() == 0
    for process in running:
        assert process.wait() == 0
    so = folder / "libptx.so"
    subprocess.run(["gcc", "-shared", "-pthread", "-o", str(so), *objects, "-lm"], check=True)
    return so


def _built() -> Path:
    """The interpreter of these sources, compiled (half a minute of processor time) unless some worker has done so."""
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-pthread"]
    flags += os.environ.get("PTX_TEST_FLAGS", "").split()  # for example -DPTX_VARIANT=ptx_run_warp_base
    state = hashlib.sha256(repr(flags).encode())
    included = [path for kind in ("h", "inc", "def") for path in sorted((ROOT / "softgpu").glob(f"*.{kind}"))]
    for path in [*SOURCES, *included]:
        state.update(path.read_bytes())
    kept = ROOT / "build" / "tests" / f"libptx-{state.hexdigest()[:16]}.so"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.parent / "libptx.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for old in kept.parent.glob("libptx-*.so"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                _build(Path(folder), flags).rename(kept)
        return kept


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the interpreter. Raises CalledProcessError with the compiler's words, or AssertionError behind them."""
    lib = ctypes.CDLL(str(_built()))
    lib.ptx_module_load.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    lib.ptx_module_unload.argtypes = [ctypes.c_void_p]
    lib.ptx_module_unload.restype = None
    for name, result, arguments in [
        ("ptx_module_kernel_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ptx_module_kernel", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
        ("ptx_kernel_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ptx_kernel_param_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ptx_kernel_param_bytes", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ptx_kernel_static_shared", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ptx_kernel_max_threads", ctypes.c_uint, [ctypes.c_void_p]),
        ("ptx_module_global_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ptx_module_global", ctypes.POINTER(Global), [ctypes.c_void_p, ctypes.c_size_t]),
        ("ptx_module_global_init", None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]),
    ]:
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result
    size = ctypes.POINTER(ctypes.c_size_t)
    lib.ptx_kernel_param.argtypes = [ctypes.c_void_p, ctypes.c_size_t, size, size]
    lib.ptx_kernel_param.restype = None
    lib.ptx_launch_run.argtypes = [ctypes.POINTER(Launch), ctypes.POINTER(Fault)]
    return lib


class PtxError(Exception):
    """A load that failed: the interpreter's sentence, and `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Buffer:
    """Device memory: `size` bytes, zeroed, aligned to 256; readable, and writable unless told otherwise."""

    def __init__(self, data: bytes | int, writable: bool = True) -> None:
        content = bytes(data)
        self.size = len(content)
        self.writable = writable
        self._store = ctypes.create_string_buffer(self.size + 256)
        self.address = (ctypes.addressof(self._store) + 255) & ~255
        ctypes.memmove(self.address, content, self.size)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def array(self, kind: Any) -> list:
        count = self.size // ctypes.sizeof(kind)
        return list((kind * count).from_address(self.address))


def array(kind: Any, values: Sequence) -> Buffer:
    """A buffer of C values."""
    return Buffer(bytes((kind * len(values))(*values)))


class Module:
    """A loaded module with its globals in memory."""

    def __init__(self, text: str | bytes) -> None:
        self.lib = library()
        raw = text.encode() if isinstance(text, str) else text
        handle = ctypes.c_void_p()
        log = ctypes.create_string_buffer(512)
        code = self.lib.ptx_module_load(raw, len(raw), ctypes.byref(handle), log, len(log))
        if code != OK:
            raise PtxError(code, log.value.decode(errors="replace"))
        self.handle = handle
        self.globals: dict[str, Buffer] = {}
        count = self.lib.ptx_module_global_count(handle)
        self.addresses = (ctypes.c_uint64 * (count + 1))()
        infos = [self.lib.ptx_module_global(handle, i).contents for i in range(count)]
        for i, info in enumerate(infos):
            buffer = Buffer(info.size, writable=not info.constant)
            self.globals[info.name.decode()] = buffer
            self.addresses[i] = buffer.address
        for i, info in enumerate(infos):
            self.lib.ptx_module_global_init(handle, i, self.addresses, self.globals[info.name.decode()].address)
        self.kernels: dict[str, int] = {}
        for i in range(self.lib.ptx_module_kernel_count(handle)):
            kernel = self.lib.ptx_module_kernel(handle, i)
            self.kernels[self.lib.ptx_kernel_name(kernel).decode()] = kernel

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.lib.ptx_module_unload(self.handle)

    def params(self, kernel: str) -> list[tuple[int, int]]:
        """Offset and size of each parameter."""
        k, result = self.kernels[kernel], []
        for i in range(self.lib.ptx_kernel_param_count(k)):
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            self.lib.ptx_kernel_param(k, i, ctypes.byref(offset), ctypes.byref(size))
            result.append((offset.value, size.value))
        return result

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: object,
        shared: int = 0,
        threads: int = 1,
        printed: list[str] | None = None,
        extra: Sequence[Buffer] = (),
    ) -> tuple[int, Fault]:
        """Runs a kernel. Arguments: Buffer, int, float (of its parameter's size) or bytes. Gives result and fault."""
        packed = bytearray(self.lib.ptx_kernel_param_bytes(self.kernels[kernel]))
        allowed = [*self.globals.values(), *extra]
        for (offset, size), value in zip(self.params(kernel), arguments, strict=True):
            if isinstance(value, Buffer):
                allowed.append(value)
                raw = value.address.to_bytes(8, "little")
            elif isinstance(value, int):
                raw = (value & ((1 << size * 8) - 1)).to_bytes(size, "little")
            elif isinstance(value, float):
                raw = bytes(ctypes.c_float(value) if size == 4 else ctypes.c_double(value))
            else:
                assert isinstance(value, bytes)
                raw = value
            packed[offset : offset + size] = raw.ljust(size, b"\0")[:size]

        def access(_cookie: int, address: int, size: int, write: bool, found: ctypes._Pointer) -> bool:
            for b in allowed:
                if b.address <= address and address + size <= b.address + b.size:
                    found.contents.begin, found.contents.end = b.address, b.address + b.size
                    found.contents.writable = b.writable
                    return b.writable or not write
            return False

        def show(_cookie: int, text: bytes) -> None:
            if printed is not None:
                printed.append(text.decode(errors="replace"))

        def three(v: int | Sequence[int]) -> list[int]:
            return [v, 1, 1] if isinstance(v, int) else [*v, 1, 1][:3]

        params = ctypes.create_string_buffer(bytes(packed), max(len(packed), 1))
        launch = Launch(
            kernel=self.kernels[kernel],
            grid=(ctypes.c_uint * 3)(*three(grid)),
            block=(ctypes.c_uint * 3)(*three(block)),
            cluster=(ctypes.c_uint * 3)(0, 0, 0),
            dynamic_shared=shared,
            params=ctypes.addressof(params),
            addresses=self.addresses,
            threads=threads,
            access=ACCESS(access),
            print=PRINT(show),
        )
        fault = Fault()
        return self.lib.ptx_launch_run(ctypes.byref(launch), ctypes.byref(fault)), fault

    def run(
        self, kernel: str, grid: int | Sequence[int], block: int | Sequence[int], *arguments: object, **options: object
    ) -> None:
        """launch(), which must succeed."""
        code, fault = self.launch(kernel, grid, block, *arguments, **options)  # type: ignore[arg-type]
        assert code == OK, f"{code}: {fault.message.decode()} block {list(fault.block)} thread {list(fault.thread)}"


HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def compile_cuda(source: str, *options: str) -> str:
    """CUDA C to PTX with NVRTC. Raises ImportError where there is none, RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    check: Callable = lambda result: result[1] if len(result) > 1 else None  # noqa: E731
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], []))
    arguments = [b"--gpu-architecture=compute_90", *(o.encode() for o in options)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
    size = check(nvrtc.nvrtcGetProgramLogSize(program))
    # One byte more: NVRTC writes into it, and bytes of one character are the same object everywhere in Python.
    log = bytes(size + 1)
    nvrtc.nvrtcGetProgramLog(program, log)
    if int(code) != 0:
        raise RuntimeError(log.decode())
    text = bytes(check(nvrtc.nvrtcGetPTXSize(program)) + 1)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0").decode()
