"""What of `phos-gpu restore` is begun before anything is imported: what the command line means, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phos.cli import launched, restore, restore_first
from phos.cli.criu import errors
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client, reach
from phos.gpu_engine.errors import RestoreFailed, Unsupported
from phos.gpu_engine.installation import launcher
from phos.images import formats, native
from tests.unit.image_sets import write_small


def test_the_name_of_the_commit_record_is_the_format_s() -> None:
    assert restore_first.COMMIT_FILE == formats.COMMIT_FILE


def by_click(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool] | None:
    """What the command line itself understands; None if it refuses."""
    understood: list[tuple[str, bool]] = []
    monkeypatch.setattr(restore, "_restore", lambda image, _d, lazy, *_: understood.append((image, lazy)))
    done = CliRunner().invoke(restore.restore, words)
    return understood[0] if done.exit_code == 0 and understood else None


@given(words=st.lists(st.sampled_from(["--lazy", "--json", "there", "./there", "-x", "--", "--laz", "elsewhere", ""])))
def test_what_is_understood_at_once_means_what_the_command_line_means(
    words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("images")
    (folder / "there").mkdir()
    (folder / "there" / formats.COMMIT_FILE).touch()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        understood = restore_first.understand(["restore", *words])
        if understood is not None:
            assert by_click(words, monkeypatch) == understood
        assert restore_first.understand(["checkpoint", *words]) is None
        assert restore_first.understand(words) is None


@pytest.mark.parametrize(
    ("words", "lazy"), [(["image"], False), (["--lazy", "image"], True), (["image", "--json", "--lazy"], True)]
)
def test_what_people_write_is_understood(
    words: list[str], lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert restore_first.understand(["restore", *words]) is None  # there is no image: the command says so
    Path("image").mkdir()
    assert restore_first.understand(["restore", *words]) is None  # nor is that one
    Path("image", formats.COMMIT_FILE).touch()
    assert restore_first.understand(["restore", *words]) == ("image", lazy)


def test_nothing_slow_is_imported_before() -> None:
    """The whole point: none of the modules that take long."""
    code = "import sys; from phos.cli import restore_first; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "phos.cli.restore_first" in loaded
    assert not {"click", "google.protobuf", "pathlib", "subprocess", "re", "threading"} & set(loaded)


def test_launchers_are_where_the_installation_says() -> None:
    assert native.launcher("criu") == str(launcher("criu"))
    assert os.access(native.launcher("criu"), os.X_OK)


@pytest.fixture(name="home")
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation whose CRIU is a script: what is asked of it is what matters here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "image").mkdir()
    monkeypatch.setenv("PHOS_HOME", str(tmp_path))
    return tmp_path


def criu(home: Path, script: str) -> None:
    """Let CRIU be this."""
    path = home / "bin" / "criu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_other_restores_of_the_image_are_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes would be killed when the server of this one's CPU memory ends."""

    def job(pid: int, since: float, mode: str = "lazy", kind: str = "restore") -> wire_pb2.Status.Job:
        return wire_pb2.Status.Job(kind=kind, mode=mode, image=str(tmp_path), pids=[pid], since=since)

    said = wire_pb2.Status(jobs=[job(1, 5.0)])
    monkeypatch.setattr(client, "status", lambda: said)
    assert not restore._jobs(tmp_path, 10.0)
    said.jobs.extend([job(2, 11.0), job(3, 12.0, "pool"), job(4, 12.0, kind="dump")])
    assert [list(one.pids) for one in restore._jobs(tmp_path, 10.0)] == [[2]]


@pytest.mark.parametrize(
    ("states", "said"),
    [(["mispredicted", "attached"], "A guess was wrong"), (["attached"], "chunks of another size")],
)
def test_why_a_lazy_restore_was_an_eager_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], states: list[str], said: str
) -> None:
    jobs = [wire_pb2.Status.Job(kind="restore", state=s, mode="eager", image=str(tmp_path), since=11) for s in states]
    monkeypatch.setattr(client, "status", lambda: wire_pb2.Status(jobs=jobs))
    found = restore._jobs(tmp_path, 10.0)
    restore._show(restore._lazily(found[-1], 10.0), found)
    assert said in capsys.readouterr().out


def test_both_servers_are_started_and_the_one_knows_the_other(home: Path) -> None:
    criu(home, 'echo "$PHOS_RESTORE/$PHOS_LAZY_PAGES/$*"; [ "$1" = lazy-pages ] || exit 3')
    image = home / "image"
    (image / restore_first.PAGES_SOCKET).touch()
    begun = restore_first.Begun(str(image), lazy=True)
    assert os.waitpid(begun.pages, 0)[1] == 0
    assert begun.wait() == 3
    assert not (image / restore_first.PAGES_SOCKET).exists()  # that of one that was killed
    lines = begun.said().splitlines()
    assert f"//lazy-pages -D {image} -o lazy-pages.log -v2" in lines
    options = "--restore-detached --shell-job --file-locks --lazy-pages"
    assert any(line.startswith(f"lazy/{begun.pages}/restore {options}") for line in lines)
    assert all(f"-D {image}" in line for line in lines)


@pytest.fixture(name="closed")
def image_on_what_is_not_to_be_written_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its directory, with a socket in it of a server that was killed before; and TMPDIR is the installation's."""
    image = small_image(home, monkeypatch)
    (image / restore_first.PAGES_SOCKET).touch()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (str(image), os.W_OK) and allowed(path, mode))
    monkeypatch.setenv("TMPDIR", str(home / "tmp"))
    (home / "tmp").mkdir()
    return image


def test_an_image_that_is_not_to_be_written_to_has_its_logs_and_socket_elsewhere(home: Path, closed: Path) -> None:
    criu(home, 'echo "$*"')
    begun = restore_first.Begun(str(closed), lazy=True)
    os.waitpid(begun.pages, 0)
    assert begun.wait() == 0
    assert Path(begun.work).parent == home / "tmp"
    assert Path(begun.work).stat().st_mode & 0o777 == 0o700
    lines = begun.said().splitlines()
    assert f"lazy-pages -D {closed} -W {begun.work} -o lazy-pages.log -v2" in lines
    assert all(f"-D {closed} -W {begun.work} " in line for line in lines)
    assert (closed / restore_first.PAGES_SOCKET).exists()
    begun.tidy()
    assert not list((home / "tmp").iterdir())
    os.close(begun._lock)


def test_such_an_image_leaves_nothing_elsewhere(home: Path, closed: Path) -> None:
    criu(home, "exit 0")
    assert CliRunner().invoke(restore.restore, [str(closed)]).exit_code == 0
    assert not list((home / "tmp").iterdir())


def test_such_an_image_leaves_the_log_of_a_failure_and_names_it(home: Path, closed: Path) -> None:
    criu(home, 'while [ "$1" != -W ]; do shift; done; echo "Error: no memory" >"$2/restore.log"; exit 1')
    failed = CliRunner().invoke(restore.restore, [str(closed)])
    assert isinstance(failed.exception, RestoreFailed)
    (kept,) = (home / "tmp").iterdir()
    assert "\nError: no memory\n" in str(failed.exception)
    assert str(failed.exception).endswith(f"CRIU's log: {kept}/restore.log")


def test_an_earlier_failure_is_not_taken_for_this_one_s(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU may end before it writes a log, and what is there then is another restore's."""
    image = small_image(home, monkeypatch)
    (image / "restore.log").write_text("Error: of yesterday\n")
    criu(home, "echo 'criu: it is not here' >&2; exit 127")
    failed = CliRunner().invoke(restore.restore, [f"{image}/"])
    assert "criu: it is not here" in str(failed.exception)
    assert "of yesterday" not in str(failed.exception)
    assert "CRIU's log" not in str(failed.exception)


def test_a_criu_that_fails_has_the_word_and_not_its_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends as well then, because CRIU has hung up."""
    image = small_image(home, monkeypatch)
    hung_up = "Error (criu/uffd.c:750): uffd: PID recv: short read"
    criu(home, f'[ "$1" = restore ] || {{ echo "{hung_up}" >{image}/lazy-pages.log; exit 1; }}; sleep 0.5; exit 1')
    failed = CliRunner().invoke(restore.restore, ["--lazy", str(image)])
    assert isinstance(failed.exception, RestoreFailed)
    assert "lazy-pages" not in str(failed.exception)


def test_such_an_image_whose_server_fails_leaves_its_log(home: Path, closed: Path) -> None:
    criu(home, '[ "$1" = restore ] || exit 3')
    failed = CliRunner().invoke(restore.restore, ["--lazy", str(closed)])
    assert isinstance(failed.exception, RestoreFailed)
    (kept,) = (home / "tmp").iterdir()
    assert str(failed.exception).endswith(f"Its log: {kept}/lazy-pages.log")


def test_where_nothing_can_be_written_that_is_said(home: Path, closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criu(home, "exit 0")
    (home / "file").touch()
    monkeypatch.setenv("TMPDIR", str(home / "file"))
    monkeypatch.setattr(restore_first, "TEMPORARY", (str(home / "file"),))
    refused = CliRunner().invoke(restore.restore, ["--lazy", str(closed)])
    assert isinstance(refused.exception, RestoreFailed)
    assert str(refused.exception).startswith(f"CRIU cannot be started: {home}/file/phos-restore-")
    assert str(refused.exception).endswith(": Not a directory.")


def small_image(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image that is whole, to be restored without a phosd."""
    monkeypatch.setattr(reach, "ensure", lambda **_: None)
    image = home / "image"
    with monkeypatch.context() as real:
        real.delenv("PHOS_HOME")
        write_small(image)
    return image


def test_a_second_lazy_restore_leaves_the_first_one_s_server_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when whoever began the first has been killed, and the server goes on."""
    criu(home, '[ "$1" != lazy-pages ] || exec sleep 100')
    monkeypatch.setattr(restore_first, "LOCK_SECONDS", 0.0)
    image = small_image(home, monkeypatch)
    begun = restore_first.Begun(str(image), lazy=True)
    try:
        (image / restore_first.PAGES_SOCKET).touch()
        assert begun.wait() == 0
        os.close(begun._lock)
        refused = CliRunner().invoke(restore.restore, ["--lazy", str(image)])
        assert isinstance(refused.exception, RestoreFailed)
        assert f"Another restore brings memory from {image}" in str(refused.exception)
        assert (image / restore_first.PAGES_SOCKET).exists()
    finally:
        os.kill(begun.pages, signal.SIGKILL)
        os.waitpid(begun.pages, 0)
    third = restore_first.Begun(str(image), lazy=True)
    os.kill(third.pages, signal.SIGKILL)
    os.waitpid(third.pages, 0)
    assert third.wait() == 0
    os.close(third._lock)


@pytest.mark.parametrize("as_json", [True, False])
def test_what_is_restored_is_restored_although_phosd_has_ended_since(
    home: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """What it could say besides is not there, and nothing is said in its place."""
    criu(home, "exit 0")
    monkeypatch.setenv("PHOS_SOCKET", str(home / "phosd.sock"))
    image = small_image(home, monkeypatch)
    done = CliRunner().invoke(restore.restore, ["--lazy", str(image), *(["--json"] if as_json else [])])
    assert done.exit_code == 0, done.exception
    if as_json:
        said = json.loads(done.output)
        assert (said["pids"], said["first_kernel"], said["last_byte"]) == ([100, 101], None, None)
    else:
        assert done.output.startswith(f"Restored process 100, 101 from {image} (")
        assert len(done.output.splitlines()) == 1


def test_a_criu_that_cannot_be_started_is_not_taken_for_another_restore(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried twice: before the command line has been read, and by the command, which says what is wrong."""
    monkeypatch.setattr(restore_first, "LOCK_SECONDS", 0.0)
    image = small_image(home, monkeypatch)
    assert restore_first.begin(["restore", "--lazy", str(image)]) is None
    refused = CliRunner().invoke(restore.restore, ["--lazy", str(image)])
    assert isinstance(refused.exception, RestoreFailed)
    launch = native.launcher("criu")
    said = str(refused.exception)
    assert said == f"CRIU cannot be started: {launch}: No such file or directory. Run install.sh again."


@pytest.mark.parametrize("lazy", [[], ["--lazy"]])
def test_a_machine_full_of_processes_is_not_taken_for_another_restore(
    home: Path, monkeypatch: pytest.MonkeyPatch, lazy: list[str]
) -> None:
    """Both are EAGAIN."""

    def full(*_: object, **__: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(restore_first.Begun, "start", full)
    monkeypatch.setattr(restore_first.Begun, "start_beside", full)
    image = small_image(home, monkeypatch)
    refused = CliRunner().invoke(restore.restore, [*lazy, str(image)])
    assert isinstance(refused.exception, RestoreFailed)
    assert "CRIU cannot be started" in str(refused.exception)
    assert "too many processes" in str(refused.exception)


def test_neither_overwrites_what_the_other_says(home: Path) -> None:
    criu(home, 'i=1000; while [ $i -lt 4000 ]; do echo "$1 says $i"; i=$((i + 1)); done')
    begun = restore_first.Begun(str(home / "image"), lazy=True)
    os.waitpid(begun.pages, 0)
    begun.wait()
    said = [f"{name} says {i}" for name in ("lazy-pages", "restore") for i in range(1000, 4000)]
    assert sorted(begun.said().splitlines()) == said


def test_without_lazy_there_is_no_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_RESTORE", "eager")
    monkeypatch.setenv("PHOS_CRIU_VERBOSITY", "4")
    criu(home, 'echo "$PHOS_RESTORE/$PHOS_LAZY_PAGES/$*" >&2')
    begun = restore_first.Begun(str(home / "image"), lazy=False)
    assert (begun.wait(), begun.pages) == (0, 0)
    assert begun.said().startswith("eager//restore --restore-detached")
    assert "--lazy-pages" not in begun.said()
    assert begun.said().split()[-1] == "-v4"


@pytest.mark.parametrize("level", ["x", "", "5", "-1", "2 --tcp-close"])
def test_a_level_that_criu_does_not_know_starts_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    criu(home, 'touch "$0.ran"')
    monkeypatch.setenv("PHOS_CRIU_VERBOSITY", level)
    with pytest.raises(ValueError, match=f"^PHOS_CRIU_VERBOSITY={level} in the environment is no level"):
        restore_first.Begun(str(home / "image"), lazy=True)
    (home / "image" / restore_first.COMMIT_FILE).touch()
    assert restore_first.understand(["restore", str(home / "image")])
    assert restore_first.begin(["restore", str(home / "image")]) is None
    assert not list(home.rglob("*.ran"))


def test_a_signal_that_ends_criu_is_told(home: Path) -> None:
    criu(home, "kill -TERM $$")
    assert restore_first.Begun(str(home / "image"), lazy=False).wait() == -signal.SIGTERM


WAITS = """
import os, signal, sys, time
from phos.cli import restore_first
signal.signal(signal.SIGINT, signal.default_int_handler)
begun = restore_first.Begun(sys.argv[1], lazy=False)
while not begun.said():
    time.sleep(0.01)
print(begun.said(), flush=True)
status = begun.wait()
print(status, begun.interrupted, os.getsid(0), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_is_passed_on_and_its_end_is_waited_for(home: Path, number: signal.Signals) -> None:
    """The whole process group has the signal, as from a terminal; the launcher only what is passed on to it."""
    criu(home, "trap 'echo undone; exit 9' TERM; trap 'echo hit' INT HUP; echo $$; while :; do sleep 0.1; done")
    command = [sys.executable, "-c", WAITS, str(home / "image")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as waiting:
        assert waiting.stdout
        begun = int(waiting.stdout.readline())
        waiting.stdout.readline()
        assert os.getsid(begun) == begun
        os.killpg(waiting.pid, number)
        output, errors = waiting.communicate(timeout=50)
    assert output.split()[:2] == ["9", str(int(number))]
    assert "Interrupted" in errors
    assert not Path(f"/proc/{begun}").exists()


SIGNALLED = """
import os, signal, sys
from phos.cli import restore_first
signal.signal(signal.SIGINT, signal.default_int_handler)
start = restore_first.Begun.start_beside
def then_a_signal(begun, words, *more, **named):
    pid = start(begun, words, *more, **named)
    if "lazy-pages" in words:
        print(pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[2]))
    return pid
restore_first.Begun.start_beside = then_a_signal
begun = restore_first.Begun(sys.argv[1], lazy=True)
print(begun.interrupted)
os.kill(begun.pages, signal.SIGKILL)
begun.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_between_two_programs_waits_for_the_second(home: Path, number: signal.Signals) -> None:
    """Else it ended the command, and the server of the pages kept the image's directory for ever."""
    criu(home, "exec sleep 100")
    command = [sys.executable, "-c", SIGNALLED, str(home / "image"), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    server = int(done.stdout.split()[0])
    if Path(f"/proc/{server}").exists():
        os.kill(server, signal.SIGKILL)
    assert done.stdout.split()[1:] == [str(int(number))], done
    assert "Traceback" not in done.stderr


def test_signals_mean_again_what_they_meant(home: Path) -> None:
    criu(home, "exit 0")
    before = [signal.getsignal(number) for number in launched.ENDING]
    begun = restore_first.Begun(str(home / "image"), lazy=False)
    assert [signal.getsignal(number) for number in launched.ENDING] != before
    begun.wait()
    begun.close()
    assert [signal.getsignal(number) for number in launched.ENDING] == before


def test_a_signal_that_is_ignored_stays_ignored(home: Path) -> None:
    criu(home, "exit 0")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        begun = restore_first.Begun(str(home / "image"), lazy=False)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        begun.wait()
        begun.close()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_server_does_not_outlive_a_restore_that_cannot_be_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    criu(home, "exec sleep 100")
    spawned: list[int] = []
    spawn = os.posix_spawnp

    def once(*arguments: Any, **more: Any) -> int:
        if spawned:
            raise OSError(11, "Resource temporarily unavailable")
        spawned.append(spawn(*arguments, **more))
        return spawned[0]

    monkeypatch.setattr(os, "posix_spawnp", once)
    with pytest.raises(OSError, match="temporarily"):
        restore_first.Begun(str(home / "image"), lazy=True)
    assert not Path("/proc", str(spawned[0])).exists()


def test_one_that_cannot_be_started_is_left_to_the_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "image" / formats.COMMIT_FILE).touch()
    monkeypatch.chdir(home)
    (home / "bin" / "criu").write_text("no script")  # not to be executed
    assert restore_first.begin(["restore", "image"]) is None


def test_who_has_no_rights_is_not_told_in_criu_s_words(tmp_path: Path) -> None:
    words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", str(launcher("criu")), "dump", "-t", "1"]
    done = subprocess.run([*words, "-D", str(tmp_path)], capture_output=True, text=True, check=False)
    with pytest.raises(Unsupported, match="needs the rights of root"):
        errors(done.returncode, done.stdout + done.stderr, tmp_path / "dump.log")


@pytest.mark.parametrize("time", ["", "(00.012345)  "], ids=["by default", "-v4"])
def test_what_phosd_said_is_shown_once_without_criu_s_heads(tmp_path: Path, time: str) -> None:
    log = tmp_path / "restore.log"
    log.write_text(
        f"{time}Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self\n"
        f"{time}  4711: Error (criu/files-reg.c:2175): File log has bad size\n"
        f"{time}Error: phos: It is damaged.\n"
        f"{time}Error (compel/src/lib/infect.c:418): Unable to detach from 4711: No such process\n"
    )
    assert errors(1, "phos: It is damaged.\n", log).splitlines() == [
        "Error (criu/files-reg.c:2175): File log has bad size",
        "phos: It is damaged.",
    ]
