"""The PTX interpreter of the software GPU, driven from Python without any libcuda.

The software GPU's objects are linked into a library of their own, and called through ctypes. Device memory is ordinary
host memory that this module hands out; the interpreter asks for permission to touch it as it asks the software GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
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


ADDRESS, SIZE, SIZES = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ptx_module_load": (ctypes.c_int, ctypes.c_char_p, SIZE, ctypes.POINTER(ADDRESS), ctypes.c_char_p, SIZE),
    "ptx_module_unload": (None, ADDRESS),
    "ptx_module_kernel_count": (SIZE, ADDRESS),
    "ptx_module_kernel": (ADDRESS, ADDRESS, SIZE),
    "ptx_kernel_name": (ctypes.c_char_p, ADDRESS),
    "ptx_kernel_param_count": (SIZE, ADDRESS),
    "ptx_kernel_param": (None, ADDRESS, SIZE, SIZES, SIZES),
    "ptx_kernel_param_bytes": (SIZE, ADDRESS),
    "ptx_kernel_static_shared": (SIZE, ADDRESS),
    "ptx_kernel_max_threads": (ctypes.c_uint, ADDRESS),
    "ptx_module_global_count": (SIZE, ADDRESS),
    "ptx_module_global": (ctypes.POINTER(Global), ADDRESS, SIZE),
    "ptx_module_global_init": (None, ADDRESS, SIZE, ADDRESS, ADDRESS),
    "ptx_launch_run": (ctypes.c_int, ctypes.POINTER(Launch), ctypes.POINTER(Fault)),
}
"""Of ptx.h: what each gives, and what it takes."""


def _objects() -> list[Path]:
    """The interpreter as it is in the software GPU, or with other flags; what is older than its sources, anew."""
    flags = os.environ.get("PTX_TEST_FLAGS", "")  # for example -DPTX_VARIANT=ptx_run_warp_base
    build, variables = ROOT / "build", []
    if flags:
        build = build / "tests" / f"ptx-{hashlib.sha256(flags.encode()).hexdigest()[:16]}"
        variables = [f"CFLAGS={flags}"]
    made = [build / "obj" / "softgpu" / f"{source.stem}.o" for source in SOURCES]
    command = ["make", f"-j{os.cpu_count() or 1}", "-C", str(ROOT), f"BUILD={build.relative_to(ROOT)}"]
    command += [f"PYTHON={sys.executable}", *variables, *(str(path.relative_to(ROOT)) for path in made)]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return made


def _built() -> Path:
    """A library with the interpreter, linked unless some worker has done so."""
    kept = ROOT / "build" / "tests"
    kept.mkdir(parents=True, exist_ok=True)
    # Everything is hidden in it but what is exported on purpose.
    exported = f'#include "ptx.h"\nvoid *const exported[] = {{{", ".join(FUNCTIONS)}}};\n'
    with open(kept / "libptx.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = _objects()
        state = hashlib.sha256(exported.encode())
        for path in objects:
            state.update(path.read_bytes())
        library = kept / f"libptx-{state.hexdigest()[:16]}.so"
        if not library.exists():
            for old in kept.glob("libptx-*.so"):
                old.unlink()
            words = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-I", str(ROOT / "softgpu"), "-x", "c", "-"]
            words += ["-x", "none", *map(str, objects), "-lm", "-o", f"{library}.new"]
            subprocess.run(words, input=exported, text=True, check=True)
            Path(f"{library}.new").rename(library)
        return library


@functools.cache
def library() -> SimpleNamespace:
    """Loads the interpreter. Raises CalledProcessError behind the compiler's words."""
    exported = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(ctypes.CDLL(str(_built())), "exported")
    return SimpleNamespace(
        **{
            name: ctypes.CFUNCTYPE(*kinds)(address)
            for (name, kinds), address in zip(FUNCTIONS.items(), exported, strict=True)
        }
    )


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
