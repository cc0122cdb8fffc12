"""Which source a kernel's descriptor comes from, and what the command prints."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from spec_build import LZ4, SCALE, THROUGH, ZSTD, container, entry, host_program, image

from phos.gpu_engine.ptx_instrument import lexer, parser
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.spec import analysis, disassembler, ptx_flow, sass_flow
from phos.gpu_engine.spec.descriptor import (
    Access,
    AccessDescriptor,
    Field,
    FieldKind,
    Parameter,
    Source,
    from_layout,
)
from phos.gpu_engine.spec.effort import OutOfTime
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Kind
from phos.gpu_engine.spec.ptx_compile import Compiler

LAYOUTS = {
    SCALE: (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4)),
    THROUGH: (Parameter(0, 16), Parameter(16, 8), Parameter(24, 8)),
}
Answer = Callable[[Collection[str]], dict[str, AccessDescriptor]]


def says(source: Source) -> Answer:
    """A source that knows every kernel it is asked for, or both of them."""
    return lambda kernels: {
        name: AccessDescriptor(
            name, LAYOUTS[name], (Field(0, 8, Access.WRITE, FieldKind.POINTER),), Access.NONE, source
        )
        for name in kernels
    }


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Data-flow sources to be filled in by a test; without an entry there is no such source."""
    given: dict[str, Answer] = {}

    class Kernels:
        def __init__(self, text: str, check: Callable[[], None]) -> None:
            pass

        @property
        def names(self) -> list[str]:
            return list(LAYOUTS) if "ptx_flow" in given else []

        def describe(self, kernel: str, check: Callable[[], None]) -> AccessDescriptor:
            return given["ptx_flow"](LAYOUTS)[kernel]

    monkeypatch.setattr(ptx_flow, "Kernels", Kernels)
    monkeypatch.setattr(sass_flow, "describe", lambda cubin, kernels: given["sass_flow"](kernels))
    monkeypatch.setattr(analysis, "find_disassembler", lambda: Path("/bin/true") if "sass_flow" in given else None)
    return given


def sources_of(found: dict[str, AccessDescriptor]) -> dict[str, Source]:
    return {name: item.source for name, item in found.items()}


WRAPPINGS = {
    "zstd": ZSTD,
    "lz4": LZ4,
    "cubin": image(Kind.ELF, 90),
    "ptx": image(Kind.PTX, 90),
    "program": host_program(ZSTD),
}


@pytest.mark.parametrize("module", WRAPPINGS.values(), ids=WRAPPINGS)
def test_names_and_layout_alone(sources: dict[str, Answer], module: bytes) -> None:
    found = analysis.describe(module, 90, None)
    assert sources_of(found) == {SCALE: Source.LAYOUT, THROUGH: Source.NAME}
    assert found[SCALE] == from_layout(SCALE, LAYOUTS[SCALE])
    assert [(f.offset, int(f.access)) for f in found[THROUGH].fields] == [(0, 3), (16, 1)]
    assert sorted(analysis.kernels(module, 90)) == sorted(LAYOUTS)


def test_only_what_is_asked_for(sources: dict[str, Answer]) -> None:
    asked: list[str] = []
    sources["sass_flow"] = lambda kernels: asked.extend(kernels) or {}
    assert list(analysis.describe(ZSTD, 80, [SCALE, "missing"])) == [SCALE]
    assert asked == [SCALE]
    assert analysis.describe(ZSTD, 80, []) == {}


def test_units_behind_the_last_kernel_are_not_read(sources: dict[str, Answer]) -> None:
    damaged = container(entry(Kind.ELF, 90, b"no cubin"))
    assert list(analysis.describe(host_program(ZSTD + damaged), 90, [SCALE])) == [SCALE]


def test_a_damaged_unit_costs_itself_only(sources: dict[str, Answer], caplog: pytest.LogCaptureFixture) -> None:
    damaged = container(entry(Kind.ELF, 90, b"no cubin"))
    damaged += bytes(-len(damaged) % 8)
    assert list(analysis.describe(host_program(damaged + ZSTD), 90, [SCALE])) == [SCALE]
    assert "passed over" in caplog.text


def test_ptx_of_the_same_architecture_comes_first(sources: dict[str, Answer]) -> None:
    sources.update(ptx_flow=says(Source.PTX), sass_flow=says(Source.SASS))
    assert set(sources_of(analysis.describe(ZSTD, 90, None)).values()) == {Source.PTX}


def test_machine_code_comes_before_ptx_of_another_architecture(sources: dict[str, Answer]) -> None:
    sources.update(ptx_flow=says(Source.PTX), sass_flow=says(Source.SASS))
    module = container(entry(Kind.ELF, 90, image(Kind.ELF, 90)), entry(Kind.PTX, 80, image(Kind.PTX, 90)))
    assert set(sources_of(analysis.describe(module, 90, None)).values()) == {Source.SASS}
    del sources["sass_flow"]
    assert set(sources_of(analysis.describe(module, 90, None)).values()) == {Source.PTX}


@pytest.mark.parametrize("failure", [SpecError("It is damaged."), RuntimeError("bug"), RecursionError()])
def test_a_failing_source_gives_way_to_the_next(
    sources: dict[str, Answer], caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    def fail(kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        raise failure

    sources.update(ptx_flow=fail, sass_flow=says(Source.SASS))
    assert set(sources_of(analysis.describe(ZSTD, 90, None)).values()) == {Source.SASS}
    assert "the next source is asked" in caplog.text


@pytest.mark.parametrize(
    ("source", "failure", "unsure"),
    [
        ("sass_flow", SpecError("The disassembler nvdisasm failed: no space left on device"), True),
        ("sass_flow", OSError(28, "No space left on device"), True),
        ("sass_flow", KeyError("bug"), False),
        ("ptx_flow", MemoryError(), True),
        ("ptx_flow", PtxError(3, "this is no PTX."), False),
    ],
)
def test_what_may_have_failed_for_the_moment_is_not_the_last_word(
    sources: dict[str, Answer], source: str, failure: Exception, unsure: bool
) -> None:
    def fail(kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        raise failure

    sources[source] = fail
    described = analysis.describe_within(ZSTD, 90, [SCALE, THROUGH], 20)
    assert sources_of(described.found) == {SCALE: Source.LAYOUT, THROUGH: Source.NAME}
    assert (described.unsure, described.later) == ({SCALE, THROUGH} if unsure else set(), set())
    sources["sass_flow" if source == "ptx_flow" else "ptx_flow"] = says(Source.SASS)
    assert analysis.describe_within(ZSTD, 90, [SCALE], 20).unsure == set()


CALLS = f"""
.version 9.0
.target sm_90
.address_size 64
.visible .entry {SCALE}(.param .u64 a, .param .u64 b, .param .u32 c) {{
    .reg .b64 %rd<3>; ld.param.u64 %rd1,[b]; st.global.u32 [%rd1],5; ret; }}
.visible .entry {THROUGH}(.param .align 8 .b8 a[16], .param .u64 b, .param .u64 c) {{
    .reg .b64 %rd<3>; ld.param.u64 %rd1,[c]; st.global.u32 [%rd1],5; ret; }}
""".encode()
BOTH_KINDS = container(entry(Kind.ELF, 90, image(Kind.ELF, 90)), entry(Kind.PTX, 90, CALLS))


@pytest.fixture
def beside_ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source of machine code answers whatever it is asked; the kernels that it was asked for."""
    asked: list[str] = []

    def describe(cubin: bytes, kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        asked.extend(kernels)
        return says(Source.SASS)(kernels)

    monkeypatch.setattr(sass_flow, "describe", describe)
    monkeypatch.setattr(analysis, "find_disassembler", lambda: Path("/bin/true"))
    analysis._texts.clear()
    return asked


def test_only_the_kernels_asked_for_are_followed_in_ptx(beside_ptx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    real = ptx_flow.Kernels.describe

    def describe(self: ptx_flow.Kernels, name: str, check: Callable[[], None]) -> AccessDescriptor:
        followed.append(name)
        return real(self, name, check)

    monkeypatch.setattr(ptx_flow.Kernels, "describe", describe)
    told: list[dict[str, Source]] = []
    analysis.describe_within(BOTH_KINDS, 90, [SCALE], 20, lambda partly: told.append(sources_of(partly)))
    assert followed == [SCALE]
    monkeypatch.setattr(analysis, "TELL_SECONDS", -1.0)
    analysis.describe_within(BOTH_KINDS, 90, None, 20, lambda partly: told.append(sources_of(partly)))
    assert told[1] == {SCALE: Source.PTX}
    assert told[3:] == [{THROUGH: Source.PTX}, {SCALE: Source.PTX}]
    assert not beside_ptx


@pytest.mark.parametrize("step", ["lexer", "parser", "compiler"])
def test_ptx_that_takes_too_long_to_read_is_not_read_again(
    beside_ptx: list[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Debug builds have tens of megabytes of it."""
    places = {
        "lexer": (lexer.Tokens, "__init__"),
        "parser": (parser._Parser, "_item"),
        "compiler": (Compiler, "compile"),
    }
    place: Any
    place, name = places[step]
    real = getattr(place, name)

    def slow(*arguments: Any) -> Any:
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            pass
        return real(*arguments)

    monkeypatch.setattr(place, name, slow)
    monkeypatch.setattr(analysis, "PTX_SECONDS", 0.1)
    hard: set[analysis.Hard] = set()
    told: list[tuple[dict[str, Source], set[analysis.Hard]]] = []
    described = analysis.describe_within(
        BOTH_KINDS, 90, [SCALE], 20, lambda partly: told.append((sources_of(partly), set(hard))), hard
    )
    assert told == [({SCALE: Source.LAYOUT}, set()), ({}, {0}), ({SCALE: Source.SASS}, {0})]
    assert (described.later, described.unsure, hard) == (set(), set(), {0})
    monkeypatch.setattr(analysis, "_read", None)
    assert sources_of(analysis.describe_within(BOTH_KINDS, 90, None, 20, hard=hard).found) == dict.fromkeys(
        LAYOUTS, Source.SASS
    )
    monkeypatch.undo()
    assert sources_of(analysis.describe(BOTH_KINDS, 90, [SCALE])) == {SCALE: Source.PTX}


def test_a_kernel_that_is_too_hard_costs_no_other(beside_ptx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = ptx_flow.Solver._run

    def slow(self: ptx_flow.Solver, instance: ptx_flow.Instance) -> None:
        if instance.code.name == THROUGH:
            while True:
                self.check()  # type: ignore[attr-defined]
        real(self, instance)

    monkeypatch.setattr(ptx_flow.Solver, "_run", slow)
    monkeypatch.setattr(analysis, "KERNEL_SECONDS", 0.1)
    hard: set[analysis.Hard] = set()
    described = analysis.describe_within(BOTH_KINDS, 90, None, 20, hard=hard)
    assert hard == {THROUGH}
    monkeypatch.setattr(analysis, "KERNEL_SECONDS", 100.0)
    again = analysis.describe_within(BOTH_KINDS, 90, [THROUGH], 20, hard=hard)
    assert sources_of(again.found) == {THROUGH: Source.SASS}
    assert sources_of(described.found) == {THROUGH: Source.SASS, SCALE: Source.PTX}
    assert (beside_ptx, described.later, described.unsure) == ([THROUGH] * 2, set(), set())
    # When the turn is over: with nothing found, the next source is asked; with something, the rest comes later.
    monkeypatch.setattr(analysis, "SASS_KERNELS", 1)
    described = analysis.describe_within(BOTH_KINDS, 90, None, 0.3)
    assert (sources_of(described.found)[THROUGH], described.later) == (Source.SASS, {SCALE})
    monkeypatch.setattr(ptx_flow.Solver, "_run", real)
    monkeypatch.setattr(
        ptx_flow.Kernels, "describe", lambda self, name, check: time.sleep(0.3) or says(Source.PTX)([name])[name]
    )
    described = analysis.describe_within(BOTH_KINDS, 90, None, 0.2)
    assert (sources_of(described.found)[THROUGH], described.later) == (Source.PTX, {SCALE})


def test_with_no_time_and_no_other_source_nothing_is_the_last_word(
    sources: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        raise OutOfTime(hard=False)

    sources["ptx_flow"] = none_left
    described = analysis.describe_within(BOTH_KINDS, 90, [SCALE], 20)
    assert (sources_of(described.found), described.unsure) == ({SCALE: Source.LAYOUT}, {SCALE})


def test_contradictions_of_the_layout_are_refused(sources: dict[str, Answer], caplog: pytest.LogCaptureFixture) -> None:
    def wrong(kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        found = says(Source.PTX)(kernels)
        found[SCALE] = replace(found[SCALE], parameters=LAYOUTS[THROUGH])
        found[THROUGH] = replace(found[THROUGH], fields=(Field(28, 8, Access.READ, FieldKind.POINTER),))
        return found

    sources["ptx_flow"] = wrong
    assert sources_of(analysis.describe(ZSTD, 90, None)) == {SCALE: Source.LAYOUT, THROUGH: Source.NAME}
    assert caplog.text.count("contradicts its layout") == 2


def test_fields_are_moved_to_where_the_parameters_are(sources: dict[str, Answer]) -> None:
    def elsewhere(kernels: Collection[str]) -> dict[str, AccessDescriptor]:
        shifted = tuple(Parameter(p.offset + 64, p.size) for p in LAYOUTS[THROUGH])
        fields = (Field(72, 8, Access.READ, FieldKind.POINTER), Field(80, 8, Access.WRITE, FieldKind.POINTER))
        return {THROUGH: AccessDescriptor(THROUGH, shifted, fields, Access.NONE, Source.PTX)}

    sources["ptx_flow"] = elsewhere
    found = analysis.describe(ZSTD, 90, [THROUGH])[THROUGH]
    assert found.parameters == LAYOUTS[THROUGH]
    assert [field.offset for field in found.fields] == [8, 16]


def test_progress_is_told_quick_answers_first(sources: dict[str, Answer]) -> None:
    sources["ptx_flow"] = says(Source.PTX)
    told: list[dict[str, Source]] = []
    analysis.describe(ZSTD, 90, [THROUGH], lambda partly: told.append(sources_of(partly)))
    assert told == [{THROUGH: Source.NAME}, {THROUGH: Source.PTX}]


def test_what_there_is_no_time_for_is_named(sources: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    sources["sass_flow"] = says(Source.SASS)
    monkeypatch.setattr(analysis, "SASS_KERNELS", 1)
    found, later, _ = analysis.describe_within(image(Kind.ELF, 90), 90, None, -1)
    assert later == {SCALE}
    assert sources_of(found) == {SCALE: Source.LAYOUT, THROUGH: Source.SASS}


@pytest.mark.parametrize("noise", [b"", b"\x7fELF", b"hello", bytes(100), b"\xb1\x43\x62\x46" + bytes(20)])
def test_what_is_no_module_is_refused(noise: bytes) -> None:
    with pytest.raises(SpecError):
        analysis.describe(noise, 90, None)


def test_another_disassembler_is_told_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    monkeypatch.setenv("PHOS_NVDISASM", str(tool))
    assert disassembler.identity() == ""
    tool.write_text("one")
    tool.chmod(0o755)
    one = disassembler.identity()
    tool.write_text("another")
    assert disassembler.identity() not in (one, "")


def command(*arguments: str, file: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PHOS_NVDISASM": ""}
    line = [sys.executable, "-m", "phos.gpu_engine.spec", str(file), *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


def test_the_command_prints_json(tmp_path: Path) -> None:
    (tmp_path / "module").write_bytes(image(Kind.ELF, 80))
    done = command("--json", "--kernel", "through", file=tmp_path / "module")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = map(json.loads, done.stdout.splitlines())
    assert found == {
        "kernel": THROUGH,
        "source": "name",
        "parameters": [{"offset": p.offset, "size": p.size} for p in LAYOUTS[THROUGH]],
        "fields": [
            {"offset": 0, "size": 16, "access": "rw", "kind": "scan"},
            {"offset": 16, "size": 8, "access": "r", "kind": "pointer"},
        ],
        "indirect": "-",
        "guessed": False,
    }


def test_the_command_prints_a_table_and_errors(tmp_path: Path) -> None:
    (tmp_path / "module").write_bytes(image(Kind.ELF, 80))
    done = command(file=tmp_path / "module")
    assert done.returncode == 0
    assert THROUGH in done.stdout
    assert "2 kernels" in done.stdout
    (tmp_path / "module").write_bytes(b"nothing of ours")
    done = command(file=tmp_path / "module")
    assert done.returncode == 1
    assert "This is no module" in done.stderr
    logging.getLogger(__name__).debug(done.stderr)
