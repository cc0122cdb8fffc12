"""What commands print is text: no name of a program or directory means a style, an emoji, or the end of the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phos.cli import audit, console, image, pool, status
from phos.cli.demo import Demo
from phos.cli.main import main
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.spec import __main__ as spec
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Source

PROGRAM = "/opt/[/x]/[bold]prog:smile:"
LONG = f"/srv/{'a' * 200}/[red]/{'b' * 200}"
REASON = "No space in [/tmp]."


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What phosd holds, under names as people may choose them."""
    monkeypatch.setenv("COLUMNS", "80")
    answer = wire_pb2.Status(version="1[/]", mode="software", driver_version=13000, listen="[host]:1")
    answer.gpus.add(name="[/gpu]")
    answer.processes.add(pid=1, executable=PROGRAM, state="attached").uncarried.add(kind="[/kind]", count=1)
    answer.jobs.add(image=LONG, kind="dump", state="failed", error=REASON, pids=[1])
    answer.pools.add(name="[/pool]", image=LONG, size=1, state="short", error=REASON).parked.add(pids=[1])
    answer.pinned.add(name="[/pin]", image=LONG, state="pinned")
    monkeypatch.setattr(client, "status", lambda: answer)


@pytest.mark.parametrize(
    ("command", "words", "shown"),
    [
        (status.status, [], (PROGRAM, LONG, REASON, "1[/]", "[host]:1", "[/gpu]", "[/kind]", "[/pool]", "[/pin]")),
        (pool.pool, ["list"], ("[/pool]", LONG, REASON)),
        (image.image, ["list"], ("[/pin]", LONG)),
    ],
)
def test_names_are_shown_as_they_are(command: click.Command, words: list[str], shown: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command, words)
    assert done.exception is None
    for text in shown:
        assert text in done.stdout


def test_no_escape_sequence_reaches_a_terminal() -> None:
    """Errors name files, and tell what CRIU logged of an image that may be anybody's."""
    answer = client.status()
    answer.jobs[0].error = answer.pools[0].error = "two\x1b[2J\nlines"
    for command, words in ((status.status, []), (pool.pool, ["list"])):
        done = CliRunner().invoke(command, words)
        assert "\x1b" not in done.stdout
        assert "two\\x1b[2J" in done.stdout
    done = CliRunner().invoke(main, ["restore", "\x1b[2J"])
    assert (done.exit_code, done.stderr) == (2, "phos-gpu restore: There is no image directory \\x1b[2J.\n")


def test_an_audit_s_kernels_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "_Z3fooB5[/x]"
    wrong: dict[str, Any] = {"launch": 1, "pid": 2, "parameters": ["[/p]"], "written": [], "more": 0}
    kernel = {
        **dict.fromkeys(("launches", "audited", "written_chunks", "predicted_chunks", "wrong_chunks"), 1),
        "kernel": name,
        "library": "/opt/[/lib].so",
        "source": "ptx",
        "wrong": [wrong],
        "skipped": {"[/why]": 1},
        "over_traced_bytes": 0,
        "predicted_bytes": 0,
    }
    audit.show({"sources": [], "kernels": [kernel], "chunk_bytes": 4096})
    said = capsys.readouterr().out
    for text in (name, "/opt/[/lib].so", "[/p]", "[/why]"):
        assert text in said


def test_the_demo_s_steps_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo("software", "mlp", 4, tmp_path)
    with demo.timed("restore [/x]"):
        demo.console.print("[bold]:smile:")
    assert "1. restore [/x] ... [bold]:smile:\n" in capsys.readouterr().out


def test_the_analyser_s_table_shows_kernels_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    spec._print_table([AccessDescriptor("_Z3fooB5[/x]", (), (), Access(0), Source.PTX)])
    assert "_Z3fooB5[/x]" in capsys.readouterr().out


def test_a_terminal_s_width_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert console.Console().width == 80


def test_nobody_prints_by_rich_s_own() -> None:
    """Its markup, and its end of the program."""
    folder = Path(console.__file__).parent
    for file in folder.glob("*.py"):
        text = file.read_text()
        assert file.name == "console.py" or "from rich.console import" not in text, file
        assert text.count(" Progress(") == text.count("console="), f"{file}: a bar on another console"
