"""Twin kernels compute what their kernels compute, and report what their launches were not guessed to touch."""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent / "ptx"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ptx_machine
from test_ptx_flow_differential import OFFSETS, Program
from twin_machine import UNSAVED, Pair, Window, whole

from phos.gpu_engine.ptx_instrument import twin_table as table
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.ptx_instrument.parser import parse
from phos.gpu_engine.ptx_instrument.twin import make
from phos.gpu_engine.spec.descriptor import Access

ROOT = Path(__file__).resolve().parents[2]
HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"
KERNELS = (HERE / "kernels.ptx").read_text()
WINDOW_KERNELS = (ROOT / "tests" / "windows" / "kernels.ptx").read_text()
CORPUS = [text for text in (HERE / "fuzz" / "corpus.ptx").read_text().split("// ---\n") if text.strip()]


def kernel(body: str, parameters: str = ".param .u64 p, .param .u64 q, .param .u32 n", before: str = "") -> str:
    """A module with one kernel ``k``, whose pointers are in %rd1 and %rd2 and whose number is in %r1."""
    return f"""{HEADER}{before}
.visible .entry k({parameters})
{{
	.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<5>;
	ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [q]; ld.param.u32 %r1, [n];
	{body}
	ret;
}}
"""


def checks(text: str, *, reads: bool) -> int:
    """How many checks the twins of a module have."""
    return len(re.findall(r"\bcall __phosx*_check,", make(text, reads=reads).text))


# What is checked


@pytest.mark.parametrize(
    ("body", "writes", "both"),
    [
        ("ld.global.u32 %r2, [%rd1];", 0, 1),
        ("ld.u32 %r2, [%rd1+-8];", 0, 1),
        ("ld.volatile.global.u32 %r2, [%rd1];", 0, 1),
        ("ld.relaxed.gpu.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+16];", 0, 1),
        ("ld.global.nc.u32 %r2, [%rd1];", 0, 1),
        ("st.global.v4.u32 [%rd1], {%r2,%r3,%r4,%r5};", 1, 1),
        ("@!%p1 st.u32 [%rd1], %r2;", 1, 1),
        ("atom.add.u32 %r2, [%rd1], 1;", 1, 1),
        ("red.global.add.u32 [%rd1], 1;", 1, 1),
        ("atom.shared::cluster.add.u32 %r2, [%r3], 1;", 0, 0),
        ("ld.shared.u32 %r2, [%r3]; st.shared.u32 [%r3], %r2;", 0, 0),
        (".local .b8 mine[8]; st.local.u32 [mine], %r2; ld.local.u32 %r2, [mine+4];", 0, 0),
        ("cp.async.ca.shared.global [%r2], [%rd1], 16;", 0, 1),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], %r3, [%r4];", 0, 2),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r3;", 2, 2),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 4096;", 2, 2),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], %r3;", 2, 2),
        ("cp.async.bulk.prefetch.L2.global [%rd1], %r3;", 0, 0),
        ("cp.async.wait_all; cp.async.bulk.commit_group;", 0, 0),
        ("prefetch.global.L2 [%rd1];", 0, 0),
        ("discard.global.L2 [%rd1], 128;", 1, 1),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2], %r3, [%r4];", 0, 0),
        ("st.async.release.gpu.u32 [%rd1], %r3; red.async.mmio.release.sys.add.u32 [%rd1], %r3;", 2, 2),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r3;", 0, 0),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2, %r3}, [%r4];", 0, 0),
    ],
)
def test_what_is_checked(body: str, writes: int, both: int) -> None:
    assert checks(kernel(body), reads=False) == writes
    assert checks(kernel(body), reads=True) == both


@pytest.mark.parametrize(
    ("body", "before", "why"),
    [
        ("tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1}];", "", "textures"),
        ("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];", "", "tensor maps"),
        ("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%rd1], {%f1,%f2,%f3,%f4}, %r1;", "", "wmma.store"),
        ("multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1;", "", "multicast"),
        ("something.new.u32 %r1, [%rd1];", "", "something.new"),
        ("cp.async.something.new [%rd1], [%rd2], 16;", "", "something.new"),
        ("st.global.u32 [4096], %r1;", "", "address"),
        ("proto: .callprototype _ (.param .b64 _); call %rd1, (%rd2), proto;", "", "by address"),
        ("call f, (%rd1);", ".extern .func f(.param .b64 a);", "not in the module"),
        (
            "call f;",
            ".func f() { .reg .b64 %rd<2>; proto: .callprototype _ (); call %rd1, proto; ret; }",
            "by address (in f)",
        ),
        ("{ .local .b8 x[8]; } { .reg .b64 x; mov.b64 x, %rd1; st.u32 [x], %r1; }", "", "the same name"),
        ("{ .local .b8 x1[8]; } { .reg .b64 x<2>; mov.b64 x1, %rd1; st.u32 [x1], %r1; }", "", "the same name"),
        (".reg .b64 x<2>; mov.b64 x1, %rd1; st.u32 [x1], %r1;", ".global .b32 x1;", "the same name"),
        ("setmaxnreg.inc.sync.aligned.u32 240;", "", "registers"),
    ],
)
def test_kernels_without_a_twin(body: str, before: str, why: str) -> None:
    twin = make(kernel(body, before=before), reads=False)
    assert (twin.text, twin.kernels) == ("", {})
    assert why in twin.left_out["k"]


def test_too_many_parameters() -> None:
    text = kernel("", ".param .u64 p, .param .u64 q, .param .u32 n, .param .b8 s[3600]")
    assert "too many" in make(text, reads=False).left_out["k"]


def test_another_kernel_may_have_one() -> None:
    text = kernel("tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1}];")
    text += kernel("st.global.u32 [%rd1], %r1;").replace(HEADER, "").replace("entry k", "entry other")
    twin = make(text, reads=False)
    assert list(twin.kernels) == ["other"]
    assert [f.name for f in parse(twin.text).functions if f.kernel] == ["other"]
    assert make(text, reads=False, wanted=["k"]).kernels == {}


def test_debug_information_and_old_versions() -> None:
    text = kernel("st.global.u32 [%rd1], %r1;\n\t.loc 1 2 3\n").replace("8.5", "7.0").replace("sm_90a", "sm_80, debug")
    text = text.replace(".visible", '.file 1 "x.cu"\n.visible') + ".section .debug_abbrev { .b8 1, 2 }\n"
    module = parse(make(text, reads=False).text)
    assert (module.version, module.target) == ((7, 7), "sm_80")
    assert not any(word in make(text, reads=False).text for word in (".loc", ".file", ".section", "debug"))


# What twins compute and report


def test_a_store_outside_is_reported_and_made() -> None:
    pair = Pair(kernel("st.global.u32 [%rd1+4], %r1; st.global.u32 [%rd2], %r1;"), reads=False)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    window = Window([a, b])
    code, _ = pair.run_twin("k", 1, 1, a, b, 7, window=window, ranges=whole([b]))
    assert code == ptx_machine.OK
    assert (a.bytes()[4], b.bytes()[0]) == (7, 7)
    report = window.report()
    assert report.violations == 1
    assert report.first[0] == table.Violation("k", a.address + 4, report.first[0].line, True)
    line = kernel("st.global.u32 [%rd1+4], %r1; st.global.u32 [%rd2], %r1;").split("\n")[report.first[0].line - 1]
    assert "st.global" in line
    assert "writes to" in report.named()


@pytest.mark.parametrize("what", ["saved", "closed", "not in the window"])
def test_what_is_in_order_whatever_was_guessed(what: str) -> None:
    pair = Pair(kernel("st.global.u32 [%rd1+4], %r1; ld.global.u32 %r2, [%rd2];"), reads=True)
    a, b, other = (ptx_machine.Buffer(4096) for _ in range(3))
    window = Window([other] if what == "not in the window" else [a, b])
    if what == "saved":
        window.set_all(table.SAVED)
    elif what == "closed":
        window.close()
    code, _ = pair.run_twin("k", 1, 32, a, b, 7, window=window, extra=[a, b])
    assert code == ptx_machine.OK
    assert window.report().violations == 0


def test_a_guard_guards_its_check() -> None:
    body = "setp.eq.u32 %p1, %r1, 7; @%p1 st.global.u32 [%rd1], %r1; @!%p1 st.global.u32 [%rd2], %r1;"
    pair = Pair(kernel(body), reads=False)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    for number, touched in ((7, a), (8, b)):
        window = Window([a, b])
        assert pair.run_twin("k", 1, 1, a, b, number, window=window)[0] == ptx_machine.OK
        assert [violation.address for violation in window.report().first] == [touched.address]


def test_generic_addresses_of_shared_and_local_memory_are_left_alone() -> None:
    body = """.shared .align 4 .b8 ours[64]; .local .align 4 .b8 mine[64];
	mov.u64 %rd3, ours; cvta.shared.u64 %rd3, %rd3; st.u32 [%rd3], %r1; ld.u32 %r2, [%rd3];
	mov.u64 %rd4, mine; cvta.local.u64 %rd4, %rd4; st.u32 [%rd4], %r2; ld.u32 %r3, [%rd4];
	isspacep.shared %p1, %rd3; @%p1 st.global.u32 [%rd1], %r3;"""
    pair = Pair(kernel(body), reads=True)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    window = Window([a, b])
    assert pair.run_twin("k", 1, 1, a, b, 9, window=window, ranges=whole([a]))[0] == ptx_machine.OK
    assert a.bytes()[0] == 9
    assert window.report().violations == 0


def test_a_lazy_twin_waits_for_data() -> None:
    pair = Pair(kernel("ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd2], %r2;"), reads=True)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    window = Window([a, b], table.LOADING, 20 * 10**9)
    window.set_state(b, table.SAVED)

    def load() -> None:
        time.sleep(0.2)
        ctypes.memmove(a.address, b"\x2a", 1)
        window.set_state(a, table.SAVED)

    loader = threading.Thread(target=load)
    loader.start()
    code, _ = pair.run_twin("k", 1, 1, a, b, 7, window=window)
    loader.join()
    assert code == ptx_machine.OK
    assert b.bytes()[0] == 0x2A
    report = window.report()
    assert (report.violations, report.trapped) == (1, False)
    assert "reads" in report.named()


def test_a_lazy_twin_does_not_go_on_without_data() -> None:
    pair = Pair(kernel("ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd2], %r1;"), reads=True)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    window = Window([a, b], table.LOADING, 10**8)
    window.set_state(b, table.SAVED)
    code, _ = pair.run_twin("k", 1, 1, a, b, 7, window=window)
    assert code != ptx_machine.OK
    assert b.bytes()[0] == 0
    assert window.report().trapped


def test_module_variables_are_the_originals() -> None:
    before = """.visible .global .align 8 .u64 target; .visible .const .align 4 .b8 weights[16] = {1, 0, 0, 0, 5};
.global .align 8 .u64 counter = 3;
.func (.param .b32 result) weight(.param .b32 which)
{ .reg .b32 %r<4>; .reg .b64 %rd<4>; ld.param.u32 %r1, [which]; mov.u64 %rd1, weights; mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2; ld.const.u32 %r2, [%rd3]; st.param.b32 [result], %r2; ret; }
"""
    body = """ld.global.u64 %rd3, [target]; ld.const.u32 %r2, [weights+4];
	{ .param .b32 a; .param .b32 r; st.param.b32 [a], 1; call (r), weight, (a); ld.param.b32 %r3, [r]; }
	add.u32 %r2, %r2, %r3; st.global.u32 [%rd3], %r2;
	mov.u64 %rd4, counter; cvta.global.u64 %rd4, %rd4; atom.add.u64 %rd5, [%rd4], 1; st.global.u64 [target], %rd2;"""
    pair = Pair(kernel(body, before=before), reads=True)
    assert [name for _, name in pair.twin.kernels["k"]] == ["counter", "target", "weights"]
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    ctypes.memmove(pair.original.globals["target"].address, struct.pack("<Q", a.address), 8)
    ctypes.memmove(pair.original.globals["weights"].address + 4, struct.pack("<I", 6), 4)  # as the host may
    window = Window([a, b])
    assert pair.run_twin("k", 1, 1, a, b, 9, window=window)[0] == ptx_machine.OK
    assert struct.unpack("<I", a.bytes()[:4])[0] == 12
    assert struct.unpack("<Q", pair.original.globals["counter"].bytes())[0] == 4
    assert struct.unpack("<Q", pair.original.globals["target"].bytes())[0] == b.address
    assert [violation.address for violation in window.report().first] == [a.address]


def test_functions_that_store_are_checked() -> None:
    before = """.func put(.param .b64 at, .param .b32 what)
{ .reg .pred %p; .reg .b32 %r; .reg .b64 %rd; ld.param.u64 %rd, [at]; ld.param.u32 %r, [what];
  setp.eq.u32 %p, %r, 0; @%p bra end; st.u32 [%rd], %r; end: ret; }
.func nothing() { ret; }
"""
    body = """call nothing;
	{ .param .b64 a; .param .b32 b; st.param.b64 [a], %rd1; st.param.b32 [b], %r1; call.uni put, (a, b); }"""
    pair = Pair(kernel(body, before=before), reads=False)
    a, b = ptx_machine.Buffer(4096), ptx_machine.Buffer(4096)
    window = Window([a, b])
    assert pair.run_twin("k", 1, 1, a, b, 9, window=window)[0] == ptx_machine.OK
    assert (a.bytes()[0], window.report().violations) == (9, 1)


def test_functions_that_are_given_an_address_in_a_register_are_checked() -> None:
    before = ".func put(.reg .b64 at) { st.u32 [at], 1; ret; }\n"
    assert checks(kernel("call put, (%rd1);", before=before), reads=False) == 1


def test_a_bulk_copy_is_checked_at_both_ends() -> None:
    text = make(kernel("cp.async.bulk.global.shared::cta.bulk_group [%rd1+16], [%r2], %r3;"), reads=False).text
    assert re.search(
        r"cvt\.u64\.u32 %phos_e, %r3;\s+add\.u64 %phos_a, %phos_a, %phos_e;\s+add\.u64 %phos_a, %phos_a, -1;", text
    )


# Programs by chance


def compiled(source: str, *options: str) -> str:
    """PTX by NVRTC, or the test is skipped."""
    try:
        return ptx_machine.compile_cuda(source, *options)
    except ImportError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    except RuntimeError as error:
        if "libnvrtc" in str(error) or "Failed to" in str(error):
            pytest.skip(f"NVRTC is not installed: {error}")
        raise


@pytest.mark.parametrize("options", [(), ("-G",)], ids=["optimised", "debug"])
@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed: int, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    text = compiled(Program(seed).source(), *options)
    chance = random.Random(seed)
    for reads in (False, True):
        pair = Pair(text, reads=reads)
        assert pair.twin.left_out == {}
        for _ in range(2):
            _compare(pair, chance, reads, monkeypatch)


def _compare(pair: Pair, chance: random.Random, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel and its twin, on the same memory: the same results, and exactly what is touched is reported."""
    names = [*OFFSETS, "hidden"]
    buffers = {
        name: ptx_machine.Buffer(struct.pack("<1024f", *(chance.random() for _ in range(1024)))) for name in names
    }
    ctypes.memmove(buffers["t"].address, struct.pack("<Q", buffers["hidden"].address), 8)
    s = struct.pack(
        "<QiiQQQ", buffers["a"].address, chance.randint(0, 9), 0, *(buffers[f"b{i}"].address for i in range(3))
    )
    arguments = (buffers["p"], buffers["q"], s, buffers["t"], chance.randint(0, 63), chance.randint(0, 15))
    content = {name: buffer.bytes() for name, buffer in buffers.items()}
    extra = list(buffers.values())

    def put_back() -> None:
        for name, buffer in buffers.items():
            ctypes.memmove(buffer.address, content[name], buffer.size)

    seen = _touched(pair, arguments, extra, buffers, monkeypatch)
    results = {name: buffer.bytes() for name, buffer in buffers.items()}
    window = Window(extra)
    guess = chance.sample(names, chance.randint(0, len(names)))
    for name in names:
        put_back()
        window.set_all(table.SAVED)
        window.set_state(buffers[name], UNSAVED)
        window.forget()
        ranges = whole(buffers[other] for other in guess)
        code, fault = pair.run_twin("k", 1, 4, *arguments, window=window, ranges=ranges, extra=extra)
        assert code == ptx_machine.OK, fault.message
        for other, buffer in buffers.items():
            assert buffer.bytes() == results[other], other
        wrong = name not in guess and bool(seen[name] & (Access.WRITE if not reads else Access.READ | Access.WRITE))
        report = window.report()
        assert (report.violations > 0) == wrong, (name, guess, seen[name])
        for violation in report.first:
            assert buffers[name].address <= violation.address < buffers[name].address + buffers[name].size


def _touched(
    pair: Pair, arguments: tuple, extra: list, buffers: dict, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Access]:
    """Run the original; what it did to each buffer."""
    seen = dict.fromkeys(buffers, Access.NONE)
    real = ptx_machine.ACCESS

    def watching(allowed: object) -> object:
        def access(cookie: int, address: int, size: int, write: bool, found: ctypes._Pointer) -> bool:
            answer = allowed(cookie, address, size, write, found)  # type: ignore[operator]
            for name, buffer in buffers.items():
                if buffer.address <= address < buffer.address + buffer.size:
                    seen[name] |= Access.WRITE if write else Access.READ
            # Nothing is remembered: a thread's next access, to another word, asks again.
            found.contents.begin, found.contents.end = address, address + size
            found.contents.writable = write
            return bool(answer)

        return real(access)

    monkeypatch.setattr(ptx_machine, "ACCESS", watching)
    code, fault = pair.original.launch("k", 1, 4, *arguments, extra=extra)
    monkeypatch.setattr(ptx_machine, "ACCESS", real)
    assert code == ptx_machine.OK, fault.message
    return seen


def test_the_kernels_of_the_interpreter_test() -> None:
    """Compiled by NVRTC 13, with reductions, shuffles, recursion and printing: every one has a twin."""
    for options in ((), ("-G",), ("-lineinfo",)):
        text = compiled((HERE / "kernels.cu").read_text(), *options)
        twin = make(text, reads=True)
        assert twin.left_out == {}
        kernels = [function.name for function in parse(text).functions if function.kernel]
        assert sorted(twin.kernels) == sorted(kernels)
        ptx_machine.Module(twin.text)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("text", [KERNELS, WINDOW_KERNELS], ids=["interpreter", "windows"])
def test_an_assembler_takes_the_twins(text: str, reads: bool, tmp_path: Path) -> None:
    source = tmp_path / "twin.ptx"
    source.write_text(make(text, reads=reads).text)
    command = ["ptxas", "-arch=sm_90", "-o", str(tmp_path / "twin.cubin"), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Nonsense


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([KERNELS, WINDOW_KERNELS, *CORPUS]), st.randoms(use_true_random=False), st.booleans())
def test_any_text_has_twins_or_is_refused(text: str, chance: random.Random, reads: bool) -> None:
    words = re.split(r"(\s+|[;,{}()\[\]])", text)
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(words))
        kind = chance.randint(0, 2)
        if kind == 0:
            words[at] = chance.choice(words)
        elif kind == 1:
            del words[at]
        else:
            words.insert(at, chance.choice(words))
    try:
        twin = make("".join(words), reads=reads)
    except PtxError:
        return
    if twin.text:
        made = parse(twin.text)
        assert {function.name for function in made.functions if function.kernel} == set(twin.kernels)


def test_tables_are_read_as_they_are() -> None:
    with pytest.raises(ValueError, match="cut short"):
        table.read(b"")
    with pytest.raises(ValueError, match="magic"):
        table.read(bytes(table.WINDOW_BYTES))
    assert table.read(table.header().ljust(table.WINDOW_BYTES, b"\0")).violations == 0
