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
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Parameter, Source
from phos.gpu_engine.spec.disassembler import SETTING, find_disassembler
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.sass_disassembly import disassemble
from phos.gpu_engine.spec.sass_state import Layout
from phos.gpu_engine.spec.sass_text import parse
from tests.unit.spec_access import (
    BOTH,
    NONE,
    POINTER,
    READ,
    SCAN,
    TENSOR_MAP,
    WRITE,
    Expected,
    as_expected,
    pointers,
    table,
)

HERE = Path(__file__).parent / "spec" / "sass"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100a")

EXPECTED: dict[str, Expected] = {
    "vectorised": ([(1, 0, 8, WRITE, POINTER), (1, 8, 8, READ, POINTER), (1, 16, 8, READ, POINTER)], NONE),
    "pairs": ([(0, 0, 8, READ, SCAN), (0, 8, 376, BOTH, SCAN)], NONE),
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
    "table": ([(0, 0, 8, READ, POINTER), table(0, WRITE), (2, 0, 8, READ, POINTER)], NONE),
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

# Nothing says where a list ends: the first might be all, and the last is followed by numbers.
LISTS: Expected = ([(0, 0, 240, READ, SCAN), (0, 240, 1960, BOTH, SCAN)], NONE)


def recorded(architecture: str, renamed: dict[str, str] | None = None) -> dict[str, AccessDescriptor]:
    """The descriptors from the listing that is checked in."""
    text = (HERE / f"{architecture}.txt").read_text()
    renamed = renamed or {}
    for old, new in renamed.items():
        text = text.replace(f".text.{old}", f".text.{new}").replace(f"\n{old}:", f"\n{new}:")
    listing = parse(text)
    document = json.loads((HERE / f"{architecture}.json").read_text())
    assert listing.architecture == document["architecture"]
    layouts = {
        renamed.get(name, name): (
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
def test_lists_of_tensors_that_the_name_tells_of_end_where_the_next_begins(architecture: str) -> None:
    """PyTorch's and Apex's: one index, and nothing but the name says that the arrays are several."""
    name = "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi2EEEfEEvT_T0_"
    found = as_expected(recorded(architecture, {"lists": name})[name])
    assert found == ([(0, 0, 240, READ, SCAN), (0, 240, 1960, WRITE, SCAN)], NONE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_recorded_kernel_is_described(architecture: str, described: dict[str, AccessDescriptor]) -> None:
    assert described.keys() <= EXPECTED.keys() | {"lists"}
    assert len(described) == (29 if architecture == "sm_80" else 34)


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
