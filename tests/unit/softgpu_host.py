"""Run small CUDA programs on the software GPU, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import TracebackType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("PHOS_BUILD", ROOT / "build"))
LIBRARY = BUILD / "softgpu" / "libcuda.so.1"

# A machine of this test process's own: tests beside it do not change its account of memory.
MACHINE = f"test-{os.getpid()}"

needs_softgpu = pytest.mark.skipif(
    not LIBRARY.exists() and not os.environ.get("PHOS_NO_SKIP"), reason="build/softgpu is not built (make softgpu)"
)

PRELUDE = '''
import ctypes, os, signal, sys, threading, time
from cuda.bindings import driver as cu
E = cu.CUresult
MIB = 1 << 20

def ok(result):
    """The answers of a call that must succeed."""
    assert result[0] == E.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]

def start(device=0):
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))

def put(address, data):
    ok(cu.cuMemcpyHtoD(address, bytes(data), len(data)))

def get(address, size):
    out = bytearray(size)
    ok(cu.cuMemcpyDtoH(out, address, size))
    return bytes(out)

def properties(device=0, shared=True):
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    kinds = cu.CUmemAllocationHandleType
    p.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if shared else kinds.CU_MEM_HANDLE_TYPE_NONE
    return p

FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

def access(address, size, flags="READWRITE", device=0):
    a = cu.CUmemAccessDesc()
    a.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = device
    a.flags = getattr(cu.CUmemAccess_flags, "CU_MEM_ACCESS_FLAGS_PROT_" + flags)
    return cu.cuMemSetAccess(address, size, [a], 1)

def mapped(size, flags="READWRITE", device=0, shared=True):
    handle = ok(cu.cuMemCreate(size, properties(device, shared), 0))
    address = ok(cu.cuMemAddressReserve(size, 0, 0, 0))
    ok(cu.cuMemMap(address, size, 0, handle, 0))
    ok(access(address, size, flags, device))
    return address, handle

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter = 41;
.visible .entry addn(.param .u64 p, .param .u32 n, .param .u32 v)
{
 .reg .u64 %rd<5>; .reg .u32 %r<8>; .reg .pred %p<2>;
 ld.param.u64 %rd1,[p]; ld.param.u32 %r1,[n]; ld.param.u32 %r2,[v];
 mov.u32 %r3,%ctaid.x; mov.u32 %r4,%ntid.x; mov.u32 %r5,%tid.x; mad.lo.u32 %r6,%r3,%r4,%r5;
 setp.ge.u32 %p1,%r6,%r1; @%p1 bra DONE;
 mul.wide.u32 %rd2,%r6,4; add.u64 %rd3,%rd1,%rd2;
 ld.global.u32 %r7,[%rd3]; add.u32 %r7,%r7,%r2; st.global.u32 [%rd3],%r7;
DONE: ret;
}
"""

def addn():
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(PTX + bytes(1))), b"addn"))

def arguments(address, n, value):
    return ((int(address), n, value), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32))

def launch(kernel, address, n, value, stream=0):
    return cu.cuLaunchKernel(kernel, (n + 127) // 128, 1, 1, 128, 1, 1, 0, stream, arguments(address, n, value), 0)

def words(address, n):
    return list(memoryview(get(address, 4 * n)).cast("I"))
'''


def environment(**settings: object) -> dict[str, str]:
    """The environment of a program: the software GPU in front, its settings, and nothing of the caller's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SOFTGPU_", "LD_PRELOAD", "PHOS_"))
    }
    kept["LD_LIBRARY_PATH"] = str(LIBRARY.parent)
    kept["SOFTGPU_MACHINE"] = MACHINE
    kept.update({name: str(value) for name, value in settings.items()})
    return kept


def program(text: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(text)]


def run(text: str, *, error: str = "", **settings: object) -> str:
    """Run a program to its end, which must be a good one; `error` must be in what it says on stderr. Returns stdout."""
    done = subprocess.run(
        program(text), check=False, env=environment(**settings), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert error in done.stderr, done.stderr
    return done.stdout


class Target:
    """A program that runs beside the test: it prints lines, and waits for lines."""

    def __init__(self, text: str, pass_fds: tuple[int, ...] = (), **settings: object) -> None:
        self.process = subprocess.Popen(
            program(text),
            env=environment(**settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            pass_fds=pass_fds,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()

    def read(self) -> str:
        """The next line it prints; its whole output in the error if it ends instead."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the target ended with {self.process.wait()}"
        return line.strip()

    def expect(self, line: str) -> None:
        got = self.read()
        if got.startswith("Traceback"):  # it is about to end
            assert self.process.stdout
            got += "\n" + self.process.stdout.read()
        assert got == line, got

    def tell(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
