"""Data flow over machine code: what each kernel of spec/sass/kernels.cu does with its arguments, by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phos.gpu_engine.spec import cubin, sass_flow
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, FieldKind, Parameter, Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.sass_disassembly import SETTING, disassemble, find_disassembler
from phos.gpu_engine.spec.sass_state import Layout
from phos.gpu_engine.spec.sass_text import parse

HERE = Path(__file__).parent / "spec" / "sass"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100a")

NONE, READ, WRITE = Access.NONE, Access.READ, Access.WRITE
BOTH = READ | WRITE
POINTER, SCAN, TENSOR_MAP = FieldKind.POINTER, FieldKind.SCAN, FieldKind.TENSOR_MAP

# Per kernel: fields as (parameter's number, offset in it, size, access, kind), and what is done indirectly.
Expected = tuple[list[tuple[int, int, int, Access, FieldKind]], Access]


def pointers(*accesses: Access) -> list[tuple[int, int, int, Access, FieldKind]]:
    """The first parameters are pointers with these accesses; NONE is one that is not followed."""
    return [(number, 0, 8, access, POINTER) for number, access in enumerate(accesses) if access]


EXPECTED: dict[str, Expected] = {
    "vectorised": ([(1, 0, 8, WRITE, POINTER), (1, 8, 8, READ, POINTER), (1, 16, 8, READ, POINTER)], NONE),
    "pairs": ([(0, 0, 384, BOTH, SCAN)], NONE),
    "reduction": (pointers(READ, BOTH), NONE),
    "locked": (pointers(BOTH, BOTH), NONE),
    "product": (pointers(READ, READ, WRITE), NONE),
    "pipeline": (pointers(READ, WRITE), NONE),
    "strided": (pointers(WRITE, READ), NONE),
    "bytes": (pointers(WRITE), NONE),
    "gather": (pointers(READ, READ, WRITE), NONE),
    "own_variable": ([], NONE),
    "through_variable": ([], WRITE),
    "through_constant": ([], WRITE),
    "chase": (pointers(READ, WRITE), READ),
    "table": (pointers(READ, NONE, READ), WRITE),
    "calls": (pointers(READ, READ, WRITE), NONE),
    "through_function": (pointers(BOTH), NONE),
    "spills": (pointers(READ, READ, WRITE, WRITE), NONE),
    "stack": (pointers(WRITE, WRITE, BOTH), NONE),
    "chosen": (pointers(WRITE, WRITE), NONE),
    "difference": (pointers(NONE, NONE, WRITE), NONE),
    "branches": (pointers(BOTH, BOTH, WRITE), NONE),
    "divided": (pointers(WRITE), NONE),
    "generic": (pointers(WRITE), NONE),
    "prints": (pointers(WRITE), NONE),
    "heap": (pointers(WRITE), NONE),
    "textures": ([(1, 0, 8, WRITE, POINTER)], READ),
    "surfaces": ([], WRITE),
    "by_address": ([(0, 0, 328, WRITE, SCAN)], NONE),
    "tensors": ([(0, 0, 128, READ, TENSOR_MAP), (2, 0, 128, WRITE, TENSOR_MAP)], NONE),
    "tensor_sum": ([(0, 192, 128, BOTH, TENSOR_MAP)], NONE),
    "tensor_any": ([(0, 64, 128, WRITE, TENSOR_MAP), (0, 192, 128, WRITE, TENSOR_MAP)], NONE),
    "tensor_pointer": (pointers(READ), WRITE),
    "bulk": (pointers(READ, WRITE, BOTH), NONE),
}

# The last of the two lists is followed by numbers; nothing says where it ends.
LISTS: Expected = ([(0, 0, 240, READ, SCAN), (0, 240, 1960, WRITE, SCAN)], NONE)


def as_expected(found: AccessDescriptor) -> Expected:
    """A descriptor's fields by parameter."""
    fields = []
    for field in found.fields:
        number = max(n for n, p in enumerate(found.parameters) if p.offset <= field.offset)
        fields.append((number, field.offset - found.parameters[number].offset, field.size, field.access, field.kind))
    return fields, found.indirect


def recorded(architecture: str) -> dict[str, AccessDescriptor]:
    """The descriptors from the listing that is checked in."""
    listing = parse((HERE / f"{architecture}.txt").read_text())
    document = json.loads((HERE / f"{architecture}.json").read_text())
    assert listing.architecture == document["architecture"]
    layouts = {
        name: (
            tuple(Parameter(*p) for p in kernel["parameters"]),
            Layout(kernel["base"], kernel["size"], document["architecture"]),
        )
        for name, kernel in document["kernels"].items()
    }
    slots = {int(place): symbol for place, symbol in document["slots"].items()}
    return sass_flow.describe_listing(listing, layouts, slots)


_recorded: dict[str, dict[str, AccessDescriptor]] = {}


@pytest.fixture
def described(architecture: str) -> dict[str, AccessDescriptor]:
    if architecture not in _recorded:
        _recorded[architecture] = recorded(architecture)
    return _recorded[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", sorted([*EXPECTED, "lists"]))
def test_a_kernel_does_what_its_source_says(
    architecture: str, kernel: str, described: dict[str, AccessDescriptor]
) -> None:
    if kernel not in described:
        assert architecture == "sm_80"
        assert kernel.startswith(("tensor", "bulk"))
        return
    expected = LISTS if kernel == "lists" else EXPECTED[kernel]
    assert as_expected(described[kernel]) == expected
    assert described[kernel].source == Source.SASS
    assert described[kernel].kernel == kernel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_recorded_kernel_is_described(architecture: str, described: dict[str, AccessDescriptor]) -> None:
    assert described.keys() <= EXPECTED.keys() | {"lists"}
    assert len(described) == (29 if architecture == "sm_80" else 34)


def flow(code: str, *parameters: Parameter, architecture: int = 90, slots: dict[int, str] | None = None) -> Expected:
    """What a kernel k of these instructions does."""
    lines = [
        line if line.endswith(":") else f"/*{16 * n:04x}*/ {line} ;"
        for n, line in enumerate(line.strip() for line in code.strip().splitlines())
    ]
    text = f'.target sm_{architecture}\n.section .text.k,"ax",@progbits\nk:\n' + "\n".join(lines)
    size = max((p.offset + p.size for p in parameters), default=0)
    layouts = {"k": (tuple(parameters), Layout(0x210, size, architecture))}
    return as_expected(sass_flow.describe_listing(parse(text), layouts, slots or {})["k"])


P0, P1, P2 = Parameter(0, 8), Parameter(8, 8), Parameter(16, 8)


def test_a_register_used_again_loses_what_it_held() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        LDG.E R0, desc[UR4][R2.64]
        MOV R2, R4
        MOV R3, R5
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_a_predicated_move_may_leave_the_old_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        @P0 LDC.64 R2, c[0x0][0x218]
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_what_is_set_and_used_under_one_predicate_is_nothing_else() -> None:
    code = """
        LDC.64 R2, c[0x0][0x210]
        ISETP.NE.AND P0, PT, R9, RZ, PT
        @P0 LDC.64 R2, c[0x0][0x218]
        @P0 STG.E desc[UR4][R2.64], R0
        LDG.E R1, desc[UR4][R2.64]
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(READ, BOTH), NONE)
    # Not so once the predicate was changed in between, or under the opposite one.
    changed = code.replace("@P0 STG", "ISETP.NE.AND P0, PT, R8, RZ, PT\n@P0 STG")
    assert flow(changed, P0, P1) == (pointers(BOTH, BOTH), NONE)
    assert flow(code.replace("@P0 STG", "@!P0 STG"), P0, P1) == (pointers(BOTH, BOTH), NONE)


def test_a_vote_stands_for_the_predicate_it_was_taken_on() -> None:
    code = """
        ULDC.64 UR6, c[0x0][0x198]
        UMOV UR4, 0x1
        UMOV UR5, 0x2
        VOTEU.ANY UP3, P5
        @P5 R2UR UR4, UR6
        @P5 R2UR UR5, UR7
        @UP3 UTMALDG.2D [UR20], [UR4]
        EXIT
    """
    assert flow(code, Parameter(0, 128)) == ([(0, 0, 128, READ, TENSOR_MAP)], NONE)


def test_a_call_of_a_place_in_the_same_function_is_a_jump() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        .L_x_0:
        @P0 CALL.REL.NOINC `(.L_x_1)
        LDG.E R0, desc[UR4][R2.64]
        BRA `(.L_x_0)
        .L_x_1:
        LDC.64 R2, c[0x0][0x218]
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_threads_go_on_where_their_own_barrier_says() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        BSSY B0, `(.L_x_0)
        BSYNC B0
        .L_x_0:
        LDG.E R0, desc[UR4][R2.64]
        LDC.64 R2, c[0x0][0x218]
        BSSY B0, `(.L_x_1)
        BSYNC B0
        .L_x_1:
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_an_instruction_that_is_never_executed_does_nothing() -> None:
    assert flow("LDC.64 R2, c[0x0][0x210]\n@!PT STG.E desc[UR4][R2.64], R0\nEXIT", P0) == ([], NONE)


def test_code_after_an_unconditional_exit_is_not_reached() -> None:
    assert flow("LDC.64 R2, c[0x0][0x210]\nEXIT\nSTG.E desc[UR4][R2.64], R0", P0) == ([], NONE)


def test_a_pointer_changed_in_a_loop_stays_that_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R6, c[0x0][0x218]
        .L_x_0:
        STG.E desc[UR4][R2.64], R0
        IADD3 R2, P0, R2, R6, RZ
        IADD3.X R3, R3, R7, RZ, P0, !PT
        @P1 BRA `(.L_x_0)
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE), NONE)


def test_a_sum_of_two_words_is_doubtful_where_nothing_says_which_is_the_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R6, c[0x0][0x218]
        IADD3 R2, P0, R2, R6, RZ
        IADD3.X R3, R3, R7, RZ, P0, !PT
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


LEFTOVER = """
    LDC.64 R6, c[0x0][0x210]
    LDG.E.64 R2, desc[UR4][R6.64]
    @P0 LDC.64 R2, c[0x0][0x218]
    STG.E desc[UR4][R2.64], R0
    EXIT
"""


def test_a_store_through_a_parameter_or_what_was_loaded_before_is_one_through_the_parameter() -> None:
    assert flow(LEFTOVER, P0, P1) == (pointers(READ, WRITE), NONE)
    # Of a load it costs little to believe both; and another store that goes nowhere else is one to anywhere.
    assert flow(LEFTOVER.replace("STG.E desc[UR4][R2.64], R0", "LDG.E R0, desc[UR4][R2.64]"), P0, P1) == (
        pointers(READ, READ),
        READ,
    )
    other = LEFTOVER.replace("EXIT", "LDG.E.64 R8, desc[UR4][R6.64+0x8]\nSTG.E desc[UR4][R8.64], R0\nEXIT")
    assert flow(other, P0, P1) == (pointers(READ, WRITE), WRITE)


def test_a_tensor_map_in_memory_may_stand_for_anything_whatever_else_is_written() -> None:
    """As in cuDNN's attention: the maps lie in the workspace, sums go out through an argument."""
    code = """
        LDC.64 R2, c[0x0][0x210]
        STG.E desc[UR8][R2.64], R0
        ULDC.64 UR6, c[0x0][0x218]
        UIADD3 UR4, UP0, UR6, 0x80, URZ
        UIADD3.X UR5, URZ, UR7, URZ, UP0, !UPT
        UTMASTG.4D [UR12], [UR4]
        UTMACMDFLUSH
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, READ), WRITE)
    # The address of the map itself may have been loaded, too.
    loaded = code.replace("ULDC.64 UR6, c[0x0][0x218]", "LDG.E.64 R4, desc[UR8][R2.64]\nR2UR UR6, R4\nR2UR UR7, R5")
    assert flow(loaded, P0, P1) == (pointers(BOTH), BOTH)
    # Among the arguments it is not: the frontend knows what it was made of.
    argument = code.replace("c[0x0][0x218]", "c[0x0][0x198]").replace("UR6, 0x80", "UR6, 0x40")
    assert flow(argument, P0, Parameter(64, 128)) == (
        [(0, 0, 8, WRITE, POINTER), (1, 0, 128, WRITE, TENSOR_MAP)],
        NONE,
    )


def test_an_instruction_that_nobody_knows_keeps_the_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        NEWOP.64 R4, R2, 0x10, RZ
        STG.E desc[UR4][R4.64], R0
        EXIT
        """,
        P0,
    )
    assert found == (pointers(WRITE), NONE)


def test_an_address_without_a_base_is_laid_to_whatever_went_into_it() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        SHF.R.U64 R4, R2, 0x3, R3
        SHF.R.U32.HI R5, RZ, 0x3, R3
        SHF.L.U64.HI R7, R4, 0x3, R5
        IMAD.SHL.U32 R6, R4, 0x8, RZ
        IADD3 R7, R7, R3, RZ
        IADD3 R7, R7, -R3, RZ
        STG.E desc[UR4][R6.64], R0
        EXIT
        """,
        P0,
    )
    assert found == (pointers(WRITE), NONE)


def test_texture_and_surface_handles_are_indirect() -> None:
    assert flow("TEX.SCR.LL R0, R2, R4, 0x0, UR4, 2D\nEXIT", P0) == ([], READ)
    assert flow("SURED.D.BA.2D.ADD [R2], R4, UR4, 0x0\nEXIT", P0) == ([], BOTH)


@pytest.mark.parametrize(
    "code",
    [
        "CALL.ABS.NOINC R2\nEXIT",
        "CALL.REL.NOINC `(elsewhere)\nEXIT",
        "BRX R2 -0x10\nEXIT",
        "RET.REL.NODEC R2 `(k)",
        "again:\nMOV R20, 0x20\nCALL.REL.NOINC `(again)\nEXIT",
    ],
)
def test_code_that_cannot_be_followed_may_do_anything_to_what_its_arguments_name(code: str) -> None:
    assert flow(code, P0, Parameter(8, 4), Parameter(16, 40)) == (
        [(0, 0, 8, BOTH, SCAN), (2, 0, 40, BOTH, SCAN)],
        NONE,
    )


def test_printing_and_failing_assertions_touch_nothing() -> None:
    code = """
        LDC.64 R16, c[0x0][0x210]
        MOV R0, 0x8
        LDC.64 R2, c[0x4][R0]
        LEPC R20, `(.L_x_1)
        CALL.ABS.NOINC R2
        .L_x_1:
        STG.E desc[UR4][R16.64], R4
        EXIT
    """
    assert flow(code, P0, slots={8: "vprintf"}) == (pointers(WRITE), NONE)
    assert flow(code, P0, slots={8: "__assertfail"}) == ([], NONE)
    assert flow(code, P0, slots={8: "cudaLaunchDeviceV2"}) == ([(0, 0, 8, BOTH, SCAN)], NONE)


def test_helpers_are_followed_apart_for_each_caller() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        MOV R20, 0x30
        CALL.REL.NOINC `(helper)
        LDG.E R0, desc[UR4][R2.64]
        LDC.64 R2, c[0x0][0x218]
        MOV R20, 0x70
        CALL.REL.NOINC `(helper)
        STG.E desc[UR4][R2.64], R0
        EXIT
        helper:
        IADD3 R2, P0, R2, 0x10, RZ
        IADD3.X R3, R3, RZ, RZ, P0, !PT
        RET.REL.NODEC R20 `(k)
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


# The same on this machine: the compiler and the disassembler that are here.


def _record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_sass", HERE / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = _record()
needs_nvrtc = pytest.mark.skipif(record.find_nvrtc() is None, reason="NVRTC is not installed")
needs_disassembler = pytest.mark.skipif(find_disassembler() is None, reason="there is no nvdisasm")


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sm_86", "sm_120"])
def test_compiled_here_the_kernels_do_the_same(architecture: str) -> None:
    try:
        image, _ = record.compile_kernels(architecture)
    except RuntimeError as error:
        if "invalid value" not in str(error) and "asm" not in str(error):
            raise
        pytest.skip(f"this NVRTC does not compile for {architecture}")
    found = sass_flow.describe(image, cubin.kernels(image))
    assert found.keys() == set(cubin.kernels(image))
    wrong = {
        name: as_expected(one) for name, one in found.items() if name != "lists" and as_expected(one) != EXPECTED[name]
    }
    assert not wrong


@needs_nvrtc
def test_machine_code_and_ptx_agree() -> None:
    ptx_flow = pytest.importorskip("phos.gpu_engine.spec.ptx_flow")
    _, text = record.compile_kernels("sm_90")
    from_ptx = ptx_flow.describe(text)
    from_sass = recorded("sm_90")
    compared = 0
    for name, mine in from_sass.items():
        if name in from_ptx:
            compared += 1
            # PTX has no addresses of its own for what SASS finds by reading machine code; writes must never differ.
            assert _written(mine) == _written(from_ptx[name]), name
    assert compared == len(from_sass)


def _written(found: AccessDescriptor) -> tuple[set[int], bool]:
    """The parameters through which something is written, and whether something is written indirectly."""
    numbers = {number for number, _, _, access, _ in as_expected(found)[0] if access & WRITE}
    return numbers, bool(found.indirect & WRITE)


@needs_nvrtc
@needs_disassembler
def test_only_kernels_asked_for_are_described() -> None:
    image, _ = record.compile_kernels("sm_80")
    tool = find_disassembler()
    assert tool is not None
    assert parse(disassemble(image, ["chosen"], tool)).sections.keys() == {"chosen"}
    assert sass_flow.describe(image, ["chosen", "no_such_kernel"]).keys() == {"chosen"}
    assert sass_flow.describe(image, []) == {}


def script(folder: Path, text: str) -> Path:
    path = folder / "nvdisasm"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return path


@needs_nvrtc
def test_a_disassembler_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    image, _ = record.compile_kernels("sm_80", 'extern "C" __global__ void k(int *p) { *p = 1; }')
    broken = script(tmp_path, "import sys; sys.exit('it does not like this file')")
    with pytest.raises(SpecError, match="nvdisasm failed: it does not like this file"):
        sass_flow.describe(image, ["k"], broken)
    slow = script(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(SpecError, match=r"did not finish within 0.2 s"):
        disassemble(image, ["k"], slow, time_limit=0.2)
    with pytest.raises(SpecError, match="cannot be started"):
        sass_flow.describe(image, ["k"], tmp_path / "missing")


def test_the_setting_decides_which_disassembler_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = script(tmp_path, "")
    monkeypatch.setenv(SETTING, str(mine))
    assert find_disassembler() == mine
    monkeypatch.setenv(SETTING, "")
    assert find_disassembler() is None
    monkeypatch.delenv(SETTING)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_disassembler() == mine


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(SpecError, match="no cubin"):
        sass_flow.describe(b"\x7fELF", ["k"])
