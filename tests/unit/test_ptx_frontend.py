"""The PTX front end: what is read comes out again; what is not PTX is refused with its line; nothing else happens."""

# ruff: noqa: E402
from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent / "ptx"
sys.path.insert(0, str(HERE))
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.ptx_instrument.lexer import Tokens
from phos.gpu_engine.ptx_instrument.operands import Address, Group, Immediate, Name, Pair, Vector, integer
from phos.gpu_engine.ptx_instrument.parser import parse
from phos.gpu_engine.ptx_instrument.printer import Edits, show
from phos.gpu_engine.ptx_instrument.statements import Block, Instruction, Module, Prototype, Section, Targets, Variable
from phos.gpu_engine.spec.ptx_flow import describe

HEADER = ".version 8.5\n.target sm_90a, debug\n.address_size 64\n"
KERNELS = (HERE / "kernels.ptx").read_text()
CORPUS = [text for text in (HERE / "fuzz" / "corpus.ptx").read_text().split("// ---\n") if text.strip()]

EVERYTHING = (
    HEADER
    + r"""
.file 1 "a folder/x.cu", 1234, 99
.pragma "something";
.visible .global .align 8 .u64 table[2] = {f, generic(data)+4};
.global .align 4 .b8 data[2][3] = {{1, 2, -3}, {0xFF, 4, 5}};
.extern .shared .align 16 .b8 dynamic[];
.const .f32 third = 0f3EAAAAAB; .weak .global .f64 e = 0d4005BF0A8B145769;
.global .attribute(.managed) .v4 .f32 quad, pair[];
.global .texref old;
.func (.param .b32 result) f(.param .b64 first, .reg .u32 second) .noreturn;
.extern .func vprintf(.param .b64 a, .param .b64 b);
.alias g, f;
.func (.param .b32 result) f (.param .b64 first, .reg .u32 second)
{ st.param.b32 [result+0], second; ret; }
.weak .entry k(.param .u64 .ptr .global .align 16 p, .param .align 64 .b8 s[256], .param .f32 x)
.maxntid 128, 1, 1
.minnctapersm 2
.reqnctapercluster 2, 1, 1
.explicitcluster
.pragma "nounroll";
{
    .reg .pred %p<3>; .reg .b32 %r<9>, other; .reg .b64 %rd<9>; .reg .v2 .f32 v;
    .local .align 16 .b8 __local_depot0[64];
    .loc 1 3 5
    .loc 1 3 5, function_name $L__info0+4, inlined_at 1 2 3
    ld.param.u64 %rd1, [p];
    @!%p1 bra.uni $L__1;
    setp.lt.and.s32 %p1|%p2, %r1, -4, !%p2;
    mov.b64 {%r1, _}, %rd1;
    ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%r1, %r2, %r3, %r4}, [%rd1+-8], %rd2;
    { .reg .b64 t; .param .b64 param0; st.param.b64 [param0], %rd1; call (other), f, (param0, 4); }
    proto : .callprototype (.param .b32 _) _ (.param .b64 _, .param .align 8 .b8 _[16]) .noreturn;
    call (other), %rd3, (%rd1, %r1), proto;
$L__1:
    ts: .branchtargets $L__1, $L__2;
    brx.idx %r1, ts;
$L__2: tex.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [%rd1, {%r1, %r2}];
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2}], [%r2];
    mov.f32 %r1, 0f3F800000; mov.u32 %r1, 0x7FU; mov.b32 %r2, 0b101; add.u32 %r1, %r1, -1; mov.f64 %rd1, 1.5e-3;
    mov.u32 %r1, %tid.x; mov.f32 v.x, %r1; mov.u64 %rd1, data+12;
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;
    /* a comment
       over lines */ ret; // the end
}
.section .debug_str
{
    .b8 1, 2
    .b64 $L__1
label: .b32 .debug_abbrev
}
"""
)


def tokens(text: str) -> list[str]:
    """The tokens of a text without what means nothing: a null offset, and the parentheses of no parameters."""
    return re.sub(r"\+ 0 (?=\])|\( \) ", "", " ".join(Tokens(text).texts)).split(" ")


@pytest.mark.parametrize("text", [KERNELS, EVERYTHING, *CORPUS], ids=lambda text: str(len(text)))
def test_what_is_read_is_printed_again(text: str) -> None:
    module = parse(text)
    printed = show(module)
    assert parse(printed) == module
    assert tokens(printed) == tokens(text)


@pytest.mark.parametrize("options", [(), ("-G",), ("-lineinfo",)], ids=str)
def test_what_the_compiler_writes_is_printed_again(options: tuple[str, ...]) -> None:
    nvrtc = pytest.importorskip("ptx_machine")
    try:
        text = nvrtc.compile_cuda((HERE / "kernels.cu").read_text(), *options)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    printed = show(parse(text))
    assert tokens(printed) == tokens(text)


def statements(module: Module, name: str) -> list:
    """All statements of a function, those of inner blocks too."""
    body = next(function.body for function in module.functions if function.name == name and function.body)
    found, queue = [], [body]
    while queue:
        for statement in queue.pop().statements:
            found.append(statement)
            if isinstance(statement, Block):
                queue.append(statement)
    return found


def test_an_element_of_an_array_is_an_offset_from_its_name() -> None:
    head = ".version 8.0\n.target sm_90\n.address_size 64\n.global .v2 .f32 pairs[4];\n"
    body = ".reg .b64 %a; .shared .b8 pairs2[4]; mov.u64 %a, pairs[3]; mov.u64 %a, pairs2[3]+1;"
    (kernel,) = parse(head + f".entry k() {{ {body} }}").functions
    assert kernel.body is not None
    moves = [s.operands[1] for s in kernel.body.statements if isinstance(s, Instruction)]
    assert [str(operand) for operand in moves] == ["pairs+24", "pairs2+4"]
    for unknown in (".shared .b8 pairs[4]; mov.u64 %a, pairs[1];", "mov.u64 %a, nothing[1];"):
        with pytest.raises(PtxError, match=r"how large an element of (pairs|nothing) is"):
            parse(head + f".entry k() {{ .reg .b64 %a; {unknown} }}")


def test_parts_are_found_where_they_belong() -> None:
    module = parse(EVERYTHING)
    assert (module.version, module.target) == ((8, 5), "sm_90a")
    assert [(f.name, f.kernel, f.body is not None) for f in module.functions] == [
        ("f", False, False),
        ("vprintf", False, False),
        ("f", False, True),
        ("k", True, True),
    ]
    kernel = module.functions[-1]
    assert [(p.declarators[0].name, p.pointer, p.bytes(p.declarators[0])) for p in kernel.parameters] == [
        ("p", True, 8),
        ("s", False, 256),
        ("x", False, 4),
    ]
    assert kernel.parameters[1].natural_alignment == 64
    assert [d.name for d in kernel.directives] == [
        ".maxntid",
        ".minnctapersm",
        ".reqnctapercluster",
        ".explicitcluster",
        ".pragma",
    ]
    body = statements(module, "k")
    by_opcode = {statement.opcode: statement for statement in body if isinstance(statement, Instruction)}
    assert by_opcode["bra.uni"].guard == "!%p1"
    load = by_opcode["ld.global.L1::no_allocate.L2::cache_hint.v4.f32"]
    assert isinstance(load.operands[0], Vector)
    assert load.operands[1] == Address((Name("%rd1", -8),))
    assert isinstance(by_opcode["setp.lt.and.s32"].operands[0], Pair)
    assert by_opcode["setp.lt.and.s32"].operands[2] == Immediate("-4")
    assert by_opcode["call"].operands[0] == Group((Name("other"),))
    assert by_opcode["mov.f64"].operands[1] == Immediate("1.5e-3")
    assert {type(statement) for statement in body} >= {Targets, Prototype, Variable, Block}
    assert any(isinstance(item, Section) and item.name == ".debug_str" for item in module.items)
    sizes = {d.name: v.bytes(d) for v in module.variables for d in v.declarators}
    assert sizes == {"table": 16, "data": 6, "dynamic": 0, "third": 4, "e": 8, "quad": 16, "pair": 0, "old": 8}


def test_spans_are_the_texts_own() -> None:
    module = parse(EVERYTHING)
    for statement in statements(module, "k"):
        if isinstance(statement, Instruction):
            span = EVERYTHING[statement.start : statement.end]
            assert span.endswith(";")
            assert statement.opcode in span
            assert span.startswith("@" if statement.guard else statement.opcode)
    for function in module.functions:
        assert EVERYTHING[function.start : function.end].endswith(("}", ";"))


def test_edits_change_nothing_else() -> None:
    module = parse(KERNELS)
    assert Edits(module).text() == KERNELS
    edits = Edits(module)
    stores = [s for s in statements(module, "vector_add") if isinstance(s, Instruction) and s.opcode == "st.global.f32"]
    body = next(f.body for f in module.functions if f.name == "vector_add")
    assert body is not None
    edits.inside(body, " .reg .b64 spy;")
    for store in stores:
        edits.before(store, "mov.b64 spy, 1; ")
        edits.before(store, "mov.b64 spy, 2; ")
        edits.after(store, " // seen")
    edits.replace(module.items[1], ".target sm_80")
    text = edits.text()
    assert len(stores) == 1
    assert "mov.b64 spy, 1; mov.b64 spy, 2; st.global.f32" in text
    removed = (
        text.replace(" .reg .b64 spy;", "").replace("mov.b64 spy, 1; mov.b64 spy, 2; ", "").replace(" // seen", "")
    )
    assert removed.replace(".target sm_80", ".target sm_90") == KERNELS
    edits.replace(stores[0], "ret;")
    edits.replace(stores[0], "exit;")
    with pytest.raises(ValueError, match="two edits"):
        edits.text()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "begins with .version"),
        (".version 8.0\n.target sm_90\n§", 3, "no place in PTX"),
        (".version 8.0\n.target sm_90\n/* for ever", 3, "comment has no end"),
        ('.version 8.0\n.target sm_90\n.file 1 "for ever\n', 3, "string has no end"),
        (".version 8.0\n.target sm_90\n.entry k(\n", 4, "state space"),
        (".version 8.0\n.target sm_90\n.entry k() {\n ret\n}", 5, "operand is missing before '}'"),
        (".version 8.0\n.target sm_90\n.entry k() {\n ret;", 4, "end of the text"),
        (".version 8.0\n.target sm_90\n.entry k() { mov.u32 %r1, ; }", 3, "operand is missing"),
        (".version 8.0\n.target sm_90\n.global .u32 x[z];", 3, "array's size"),
        (".version 8.0\n.target sm_90\n.global .align 3 .u32 x;", 3, "power of two"),
        (".version 8.0\n.target sm_90\n.entry k() { ld.u32 %r1, " + "[" * 5000, 3, "operand is missing"),
        (".version x\n.target sm_90\n", 1, "not a PTX version"),
        (".version 8.0\n.target sm_90\nstray;", 3, "directive is missing"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(PtxError, match=re.escape(words)) as caught:
        parse(text)
    assert caught.value.line == line
    assert caught.value.sentence.endswith(".")


def test_deep_blocks_are_no_danger() -> None:
    depth = 20_000
    text = HEADER + ".entry k() " + "{" * depth + "ret;" + "}" * depth
    module = parse(text)
    assert parse(show(module)).text.count("{") == depth
    assert describe(text)["k"].fields == ()


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("-0x1F", -31), ("0b101U", 5), ("017", 15), ("0", 0), ("1.5", None), ("089", None)]
)
def test_integers(text: str, value: int | None) -> None:
    assert integer(text) == value


def test_two_megabytes_take_seconds() -> None:
    head, body = KERNELS.split(".address_size 64", 1)
    text = head + ".address_size 64" + body * 50
    begun = time.process_time()
    assert len(parse(text).functions) > 450
    assert time.process_time() - begun < 6


PIECES = sorted({token for text in (EVERYTHING, KERNELS) for token in Tokens(text).texts if token})


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A real text with pieces cut out, doubled, replaced, or put in."""
    text = draw(st.sampled_from([EVERYTHING, EVERYTHING, *CORPUS]))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 30)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:end] + text[at:end] + text[end:]
        elif kind == 2:
            text = text[:at] + " " + draw(st.sampled_from(PIECES)) + " " + text[end:]
        elif kind == 3:
            text = text[:at] + draw(st.text(max_size=4)) + text[at:]
        else:
            # Whole tokens change places: much of that is still PTX, and reaches the analysis.
            parts = re.split(r"(\s+|[,;])", text)
            here, there = draw(st.integers(0, len(parts) - 1)), draw(st.integers(0, len(parts) - 1))
            parts[here], parts[there] = parts[there], parts[here]
            text = "".join(parts)
    return text


@settings(max_examples=400, deadline=4000, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_mutated_texts_raise_nothing_but_ptx_errors(text: str) -> None:
    try:
        module = parse(text)
    except PtxError:
        return
    assert parse(show(module)) == module
    describe(text)
