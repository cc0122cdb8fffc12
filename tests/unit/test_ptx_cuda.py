"""CUDA C kernels on the PTX interpreter: the checked-in PTX of ptx/kernels.cu, and the same source through NVRTC where it is installed."""

# ruff: noqa: E501, E402
from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "ptx"
sys.path.insert(0, str(HERE))
from ptx_machine import Buffer, Module, array, compile_cuda

F32, F64, I32, I64, U64 = ctypes.c_float, ctypes.c_double, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
OPTIONS = {"plain": (), "fast": ("--use_fast_math",), "debug": ("-G",), "line": ("-lineinfo",)}


@pytest.fixture(scope="module", params=["checked in", *OPTIONS])
def module(request: pytest.FixtureRequest) -> Module:
    if request.param == "checked in":
        return Module((HERE / "kernels.ptx").read_text())
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        return Module(compile_cuda((HERE / "kernels.cu").read_text(), *OPTIONS[request.param]))
    except RuntimeError as error:  # cuda.bindings without the compiler's library
        if "nvrtc" not in str(error).lower():
            raise
        pytest.skip("NVRTC is not installed")


def floats(n: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [F32(rng.uniform(-2, 2)).value for _ in range(n)]


def test_vector_add_leaves_the_rest_alone(module: Module) -> None:
    a, b = floats(1000), floats(1000, 2)
    out = array(F32, [9.0] * 1024)
    module.run("vector_add", 8, 128, array(F32, a), array(F32, b), out, 1000, threads=2)
    assert out.array(F32) == [F32(x + y).value for x, y in zip(a, b, strict=True)] + [9.0] * 24


def test_struct_arguments_globals_and_constants(module: Module) -> None:
    out = Buffer(4 * 64)
    argument = struct.pack("<Qif3h2x", out.address, 40, 2.0, 5, 6, 7)
    module.run("through_struct", 1, 64, argument, extra=[out])
    fib = [1, 1, 2, 3, 5, 8, 13, 21]
    assert out.array(F32) == [2.0 * (2 + (i & 1)) + 5 + i % 3 + fib[i & 7] if i < 40 else 0.0 for i in range(64)]


def test_recursion(module: Module) -> None:
    out = Buffer(4 * 40)
    module.run("recursion", 1, 40, out)
    fib = [0, 1]
    while len(fib) < 16:
        fib.append(fib[-1] + fib[-2])
    assert out.array(I32) == [fib[i & 15] for i in range(40)]


def test_tiled_matrix_product(module: Module) -> None:
    n = 48
    a, b, out = floats(n * n), floats(n * n, 2), Buffer(4 * n * n)
    module.run("matrix_product", (3, 3), (16, 16), array(F32, a), array(F32, b), out, n, threads=2)
    got = out.array(F32)
    for i in range(n):
        for j in range(n):
            assert got[i * n + j] == pytest.approx(math.fsum(a[i * n + k] * b[k * n + j] for k in range(n)), abs=1e-4)


def test_reduction_with_shuffles_shared_memory_and_atomics(module: Module) -> None:
    a, out = floats(5000), Buffer(4)
    before = module.globals["counter"].array(U64)[0]
    module.run("reduce", 6, 128, array(F32, a), out, 5000, shared=64, threads=2)
    assert out.array(F32)[0] == pytest.approx(math.fsum(a), abs=1e-3)
    assert module.globals["counter"].array(U64)[0] == before + 6


def test_mathematical_functions(module: Module) -> None:
    x, y, z = floats(64), Buffer(256), Buffer(512)
    module.run("functions", 1, 64, array(F32, x), y, z)
    for v, single, double in zip(x, y.array(F32), z.array(F64), strict=True):
        want = math.sin(v) + math.exp(-v) * math.log(1 + v * v) + math.tanh(v) + 2.5**v
        assert single == pytest.approx(want, rel=1e-5, abs=2e-5)
        assert double == pytest.approx(
            math.sqrt(v * v + 1) / 3 + math.exp(v / 10) + math.copysign(abs(v) ** (1 / 3), v), rel=1e-13
        )


def test_switches(module: Module) -> None:
    source = [random.Random(i).randrange(8) for i in range(97)]
    p = array(I32, source)
    module.run("many_ways", 1, 96, p)
    got = p.array(I32)
    for t in range(96):
        case, after = source[t], None
        want = {0: 3, 1: 14, 3: t.bit_count(), 4: t * 1000003 % 97, 5: -(t // 3)}.get(case)
        if case == 2:
            continue  # reads its neighbour, which may have been written
        after = source[t] if want is None else want + 10000
        assert got[t] == after


def test_adam_step(module: Module) -> None:
    n = 300
    w, g, m, v = (array(F32, floats(n, s)) for s in (1, 2, 3, 4))
    old = [b.array(F32) for b in (w, g, m, v)]
    vs = [abs(x) for x in old[3]]
    v = array(F32, vs)
    module.run("adam", 3, 128, w, g, m, v, n, 0.01, 0.9, 0.999, 1e-8, 3)
    for i in range(n):
        mi = 0.9 * old[2][i] + 0.1 * old[1][i]
        vi = 0.999 * vs[i] + 0.001 * old[1][i] ** 2
        want = old[0][i] - 0.01 * (mi / (1 - 0.9**3)) / (math.sqrt(vi / (1 - 0.999**3)) + 1e-8)
        assert w.array(F32)[i] == pytest.approx(want, rel=1e-3, abs=1e-3)


def test_pointer_chasing(module: Module) -> None:
    n = 512
    order = list(range(n))
    random.Random(4).shuffle(order)
    out = Buffer(8 * 64)
    module.run("chase", 1, 64, array(I64, order), 10, 100, out)
    for t in range(64):
        at = 10 + t
        for _ in range(100):
            at = order[at]
        assert out.array(I64)[t] == at


def test_printf() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        text = compile_cuda(
            'extern "C" __global__ void k(double x) { printf("%s %d %5.2f %llx %c%%\\n", "lane", threadIdx.x, x, 1ull << 40, 65); }'
        )
    except RuntimeError:
        pytest.skip("NVRTC is not installed")
    printed: list[str] = []
    Module(text).run("k", 1, 3, 2.5, printed=printed)
    assert printed == [f"lane {t}  2.50 10000000000 A%\n" for t in range(3)]


def test_a_matrix_product_is_fast_enough() -> None:
    """256x256x256 took 0.03 s on one core of a server of 2023; the limit allows for a machine 30 times slower."""
    n = 256
    module = Module((HERE / "kernels.ptx").read_text())
    a, b, out = array(F32, floats(n * n)), array(F32, floats(n * n, 2)), Buffer(4 * n * n)
    start = time.perf_counter()
    module.run("matrix_product", (16, 16), (16, 16), a, b, out, n)
    assert time.perf_counter() - start < 1.0
