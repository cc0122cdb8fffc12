"""Random kernels run on the PTX interpreter: what they are seen to touch must be what was predicted, or less."""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "ptx"
sys.path.insert(0, str(HERE))
import ptx_machine

from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, FieldKind
from phos.gpu_engine.spec.ptx_flow import describe

BYTES = 4096
PROGRAMS = 60

PRELUDE = r"""
struct S { float *a; int n; float *b[3]; };
__device__ __noinline__ float *step(float *a, int n) { return a + n; }
__device__ __noinline__ float get(const float *a) { return *a; }
__device__ __noinline__ void put(float *a, float v) { *a = v; }
__device__ __noinline__ void exchange(float **a, float **b) { float *c = *a; *a = *b; *b = c; }
__device__ __noinline__ float *member(const S &s, int i) { return i & 1 ? s.a : s.b[i & 1]; }
__device__ __noinline__ void last(float *a, int n) { if (n > 0) last(a + 1, n - 1); else *a = 3; }
__device__ __noinline__ long long apart(const float *a, const float *b) { return (char *)a - (char *)b; }
__device__ __noinline__ float *before(float *a, long long d) { return (float *)((char *)a - d); }
__device__ __noinline__ float *behind(float *a, long long d) { return (float *)((char *)a + d); }
__device__ float *remembered;
"""


class Program:
    """A random kernel: pointers are computed, chosen, kept in arrays, handed to functions, and used."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pointers = ["p", "q", "s.a", "s.b[(n + 1) & 1]", "s.b[2]", "(*t)"]
        self.lines: list[str] = []
        self.names = 0
        for _ in range(self.random.randint(4, 12)):
            self.random.choice([self.compute, self.compute, self.access, self.access, self.assign])()
        self.access()

    def pointer(self) -> str:
        return self.random.choice(self.pointers)

    def number(self) -> str:
        return self.random.choice(["0", "3", "(n & 7)", "(int)threadIdx.x", "(int)(m & 15)", "(s.n & 3)"])

    def condition(self) -> str:
        return self.random.choice(["n & 1", "n & 2", "m & 1", "threadIdx.x & 1", "s.n > 4"])

    def new(self, value: str) -> None:
        self.names += 1
        self.lines.append(f"float *v{self.names} = {value};")
        self.pointers.append(f"v{self.names}")

    def compute(self) -> None:
        x, y, i = self.pointer(), self.pointer(), self.number()
        kind = self.random.randint(0, 10)
        if kind == 0:
            self.new(f"({self.condition()}) ? {x} : {y}")
        elif kind == 1:
            self.new(f"{x} + {i}")
        elif kind == 2:
            self.new(f"step({x}, {i})")
        elif kind == 3:
            self.lines.append(f"float *w{self.names}[2] = {{{x}, {y}}};")
            self.new(f"w{self.names}[{i} & 1]")
        elif kind == 4:
            self.lines.append(f"if (threadIdx.x == 0) {{ kept[0] = {x}; kept[1] = {y}; }} __syncthreads();")
            self.new("kept[n & 1]")
            self.lines.append("__syncthreads();")
        elif kind == 5:
            self.new(f"(float *)((unsigned long long){x} + 4 * {i})")
        elif kind == 6:
            self.new("member(s, n)")
        elif kind == 9:
            self.new(f"before({x}, apart({x}, {y}))")
        elif kind == 10:
            self.new(f"behind({y}, apart({x}, {y}) / 4 * 4)")
        elif kind == 7:
            self.new(f"(float *)((char *){x} + (m & 12))")
        else:
            self.new(x)
            self.new(y)
            self.lines.append(f"exchange(&v{self.names - 1}, &v{self.names});")

    def assign(self) -> None:
        if self.names:
            name = f"v{self.random.randint(1, self.names)}"
            head = self.random.choice([f"if ({self.condition()})", "for (int i = 0; i < (n & 3); ++i)"])
            value = self.random.choice([self.pointer(), f"{name} + 1", f"step({self.pointer()}, 1)"])
            self.lines.append(f"{head} {name} = {value};")

    def access(self) -> None:
        x, y, i = self.pointer(), self.pointer(), self.number()
        self.lines.append(
            self.random.choice(
                [
                    f"{x}[{i}] = {y}[{i}];",
                    f"put({x}, get({y}));",
                    f"atomicAdd({x} + {i}, 1.0f);",
                    f"if ({self.condition()}) {x}[1] += 2;",
                    f"last({x}, 2);",
                    f"r += {x}[{i}];",
                    f"remembered = {x}; __threadfence(); r += remembered[0];",
                ]
            )
        )

    def source(self) -> str:
        body = "\n  ".join(["__shared__ float *kept[2]; float r = 0;", *self.lines, "if (r == 12345.0f) *p = r;"])
        head = 'extern "C" __global__ void k(float *p, float *q, S s, float **t, long long m, int n) {'
        return f"{PRELUDE}{head}\n  {body}\n}}"


OFFSETS = {"p": 0, "q": 8, "a": 16, "b0": 32, "b1": 40, "b2": 48, "t": 56}


def observe(machine: ptx_machine.Module, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[str, Access]:
    """Launch the kernel; gives what it did to each buffer, "hidden" being the one whose address only memory holds."""
    buffers = {
        name: ptx_machine.Buffer(struct.pack("<1024f", *(chance.random() for _ in range(1024)))) for name in OFFSETS
    }
    hidden = buffers["hidden"] = ptx_machine.Buffer(bytes(BYTES))
    buffers["t"] = ptx_machine.Buffer(struct.pack("<Q", hidden.address))
    seen = dict.fromkeys(buffers, Access.NONE)
    real = ptx_machine.ACCESS

    def watching(allowed: Callable) -> object:
        def access(cookie: int, address: int, size: int, write: bool, found: ctypes._Pointer) -> bool:
            answer = allowed(cookie, address, size, write, found)
            for name, buffer in buffers.items():
                if buffer.address <= address < buffer.address + buffer.size:
                    seen[name] |= Access.WRITE if write else Access.READ
            if not write:
                found.contents.writable = False  # a write to the same range must be asked for again
            return answer

        return real(access)

    monkeypatch.setattr(ptx_machine, "ACCESS", watching)
    content = {name: buffer.bytes() for name, buffer in buffers.items()}
    s = struct.pack(
        "<QiiQQQ",
        buffers["a"].address,
        chance.randint(0, 9),
        0,
        *(buffers[name].address for name in ("b0", "b1", "b2")),
    )
    code, fault = machine.launch(
        "k",
        1,
        4,
        buffers["p"],
        buffers["q"],
        s,
        buffers["t"],
        chance.randint(0, 63),
        chance.randint(0, 15),
        extra=list(buffers.values()),
    )
    monkeypatch.setattr(ptx_machine, "ACCESS", real)
    assert code == ptx_machine.OK, fault.message
    for name, buffer in buffers.items():
        if buffer.bytes() != content[name]:
            assert seen[name] & Access.WRITE, f"{name} changed unseen"
    return seen


def predicted(descriptor: AccessDescriptor, name: str) -> Access:
    """What a descriptor says of a buffer."""
    result = descriptor.indirect if name == "hidden" else Access.NONE
    for field in descriptor.fields:
        if (field.kind is FieldKind.TABLE) != (name == "hidden"):
            continue
        if name == "hidden":
            result |= field.access  # it is in a table, or in none
        elif field.offset <= OFFSETS[name] and OFFSETS[name] + 8 <= field.offset + field.size:
            result |= field.access
    return result


@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimised", "debug"])
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_kernels_touch_what_was_predicted(seed: int, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Program(seed).source()
    try:
        text = ptx_machine.compile_cuda(source, *options)
    except ImportError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    except RuntimeError as error:
        if "libnvrtc" in str(error) or "Failed to" in str(error):
            pytest.skip(f"NVRTC is not installed: {error}")
        raise
    machine, descriptor = ptx_machine.Module(text), describe(text)["k"]
    chance = random.Random(seed)
    anything = Access.NONE
    for _ in range(12):
        for name, access in observe(machine, chance, monkeypatch).items():
            anything |= access
            # A pointer kept in a module variable is found again as an address from memory.
            allowed = predicted(descriptor, name) | (descriptor.indirect if "remembered =" in source else Access.NONE)
            assert access & ~allowed == Access.NONE, f"{name}: {access!r}, predicted {descriptor}\n{source}"
    assert anything, source
