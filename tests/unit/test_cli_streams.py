"""Standard output that nobody reads, that is full, closed, or of another encoding: no traceback, a fitting status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phos.cli import restore_first
from tests.unit import image_sets
from tests.unit.frontend_fake import built
from tests.unit.waiting import eventually

KEPT = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
COMMAND = [sys.executable, "-m", "phos.cli"]


@pytest.fixture(name="environment")
def nobody_serves(tmp_path: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PHOS_", "LC_", "LANG"))}
    return {**inherited, "PHOS_SOCKET": str(tmp_path / "phosd.sock"), "PHOS_DEVICE": "software"}


@pytest.mark.parametrize(
    "words", [["bench"], ["doctor", "--json"], ["restore", "--help"], ["--help"], ["--version"]], ids=" ".join
)
def test_a_reader_that_has_gone_ends_it_quietly(environment: dict[str, str], words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*COMMAND, *words], env=environment, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("word", "who"), [("bench", "phos-gpu bench"), ("--help", "phos-gpu")])
def test_output_that_cannot_be_written_is_a_failure(environment: dict[str, str], word: str, who: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, word], env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7
    assert done.stderr.decode() == f"{who}: No space left on device.\n"


def test_what_was_done_is_said_though_standard_output_does_not_take_it(environment: dict[str, str]) -> None:
    code = "import click; from phos.cli.main import main; from phos.cli.outcome import tell"
    code += "; main.get_command = lambda *_: click.Command('say', callback=lambda: tell('It runs.')); main(['say'])"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=full, stderr=-1, check=False)
    said = "It runs.\nThat is done, but standard output did not take it: No space left on device.\n"
    assert (done.returncode, done.stderr.decode()) == (7, f"phos-gpu say: {said}")


@pytest.mark.parametrize("where", ["pipe", "/dev/full"])
@pytest.mark.parametrize("streams", [["stdout"], ["stderr"], ["stdout", "stderr"]], ids="+".join)
def test_a_failure_keeps_its_status_though_nobody_takes_what_is_said_of_it(
    environment: dict[str, str], where: str, streams: list[str]
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    lost = write_end if where == "pipe" else os.open(where, os.O_WRONLY)
    environment.pop("PYTHONUNBUFFERED", None)  # the launcher's Python buffers, whatever the environment
    command = [*COMMAND, "restore", "--json", "nowhere"]
    done = subprocess.run(command, env=environment, check=False, **{**KEPT, **dict.fromkeys(streams, lost)})
    for descriptor in {write_end, lost}:
        os.close(descriptor)
    assert done.returncode == 2
    assert done.stderr in (None, b"phos-gpu restore: There is no image directory nowhere.\n")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("bench", 0),
        ("status", 3),
        ("bench nothing", 2),
        ("--help", 0),
        ("inspect image", 0),
        ("verify image", 0),
    ],
)
def test_closed_streams_are_no_matter(
    environment: dict[str, str], tmp_path: Path, words: str, status: int, closed: str
) -> None:
    image_sets.write_small(tmp_path / "image")
    command = ["sh", "-c", f'exec "$0" -m phos.cli {words} {closed}', sys.executable]
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert b"Traceback" not in done.stdout + done.stderr
    assert done.returncode == status, done.stderr


def test_an_interruption_before_the_command_is_loaded_is_one(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}"
    done = subprocess.run([*COMMAND, "status"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interruption_while_another_restore_is_waited_for_is_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    image_sets.write_small(tmp_path / "image")
    held = restore_first.lock(str(tmp_path / "image"))
    try:
        command = [*COMMAND, "restore", "--lazy", str(tmp_path / "image")]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as waiting:
            eventually(lambda: str(tmp_path / "image") in opened(waiting.pid), "the command to wait")
            waiting.send_signal(signal.SIGINT)
            assert waiting.communicate(timeout=30)[1] == b""
            assert waiting.returncode == 130
    finally:
        os.close(held)


def opened(pid: int) -> list[str]:
    """What a process has open."""
    try:
        return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def test_no_file_of_ours_becomes_somebody_s_output(tmp_path: Path) -> None:
    """Of three descriptors none is there; the next that is opened has another number, and a child finds them closed."""
    code = f"""
import os, sys
from phos.gpu_engine import standard_streams
standard_streams.occupy()
assert not sys.stdout.isatty() and not sys.stderr.isatty()
sys.stdout.buffer.write(b"nobody reads it")
with open({str(tmp_path / "said")!r}, "w") as file:
    inherited = [os.get_inheritable(number) for number in range(3)]
    print(file.fileno() > 2, inherited, file=file)
standard_streams.occupy()
"""
    script = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable, code], check=False).returncode == 0
    assert (tmp_path / "said").read_text() == "True [False, False, False]\n"


@built
def test_a_program_that_is_started_ends_by_a_reader_that_has_gone(environment: dict[str, str]) -> None:
    """Python ignores two signals, and ignoring is inherited: by programs that would write for ever."""
    code = "from phos.cli.main import main; from phos.gpu_engine.daemon import reach; reach.ensure = lambda *_: None; "
    code += "main(['run', '--', 'grep', 'SigIgn', '/proc/self/status'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1] == []


def test_what_the_encoding_has_no_letters_for_is_shown(environment: dict[str, str]) -> None:
    code = "import click; from phos.cli.main import main; main.get_command = lambda *_: click.Command("
    code += "'say', callback=lambda: click.echo(chr(0x3a9) + chr(0xdcff))); main(['say'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\u03a9\\udcff\n", b"")
