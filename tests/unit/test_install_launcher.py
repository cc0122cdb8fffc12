"""The launchers: what `criu` makes of its command line, in a copy of packaging/ with a CRIU that prints its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.waiting import eventually

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"

FAKE_CRIU = """#!/bin/sh
printf '%s\\n' "$@" > "$FAKE/argv"
printf %s "$PHOS_LINKS" > "$FAKE/links"
echo "$PHOS_PROTOCOL$PHOS_RESTORE" >> "$FAKE/ways"
cat > "$FAKE/stdin"
[ -z "$FAKE_SLEEP" ] || { echo $$ > "$FAKE/pid"; exec sleep "$FAKE_SLEEP"; }
[ -z "$FAKE_TRACE" ] || exec "$FAKE_PYTHON" -c "$FAKE_TRACER" "$FAKE_TRACE" "$FAKE/traced"
[ -z "$FAKE_RESTORED" ] || {
    sh -c 'sleep 300 & echo $$ $! > "$FAKE/new"; mv "$FAKE/new" "$FAKE/restored"; wait' >/dev/null 2>&1 &
    until [ -e "$FAKE/restored" ]; do sleep 0.01; done
}
[ -z "$FAKE_SIGNAL" ] || kill -"$FAKE_SIGNAL" $$
exit "${FAKE_STATUS:-0}"
"""
FAKE_PHOSD = """#!/bin/sh
echo "$@" >> "$FAKE/phosd"
exit "${FAKE_PHOSD_STATUS:-0}"
"""
FAKE_CLIENT = """
import json, os, sys, types
MISPREDICTED, NOBODY_KNOWS = 75, 3
def has_come(directory, began):
    return directory == os.environ.get("FAKE_WHOLE") and os.path.getmtime(os.environ["FAKE"] + "/argv") >= began
def main():
    *words, folder = sys.argv[1:]
    if folder.startswith("/proc/self/fd/"):  # it is there, and the launcher has it open
        folder = os.path.relpath(os.readlink(folder))
    json.dump([*words, folder], open(os.environ["FAKE"] + "/client", "w"))
    if "FAKE_CLIENT_SAYS" in os.environ:
        print(os.environ["FAKE_CLIENT_SAYS"], file=sys.stderr)
    return int(os.environ.get("FAKE_CLIENT_STATUS", "0"))
def show_undone(directory, restore, began):
    json.dump([directory, restore, began], open(os.environ["FAKE"] + "/undone", "w"))
def status():
    return types.SimpleNamespace(jobs=[])
def interrupt(criu):
    json.dump(criu, open(os.environ["FAKE"] + "/interrupted", "w"))
"""

Run = Callable[..., "Outcome"]


class Outcome:
    """What one run of the launcher did."""

    def __init__(self, status: int, stderr: str, record: Path) -> None:
        self.status, self.stderr, self.record = status, stderr, record

    def _read(self, name: str) -> str | None:
        path = self.record / name
        return path.read_text() if path.exists() else None

    @property
    def argv(self) -> list[str] | None:
        """CRIU's arguments; None if it was not started."""
        text = self._read("argv")
        return None if text is None else text.split("\n")[:-1]

    @property
    def phosd(self) -> list[str]:
        return (self._read("phosd") or "").splitlines()

    @property
    def waited(self) -> list[str] | None:
        text = self._read("client")
        return None if text is None else json.loads(text)

    @property
    def undone(self) -> list[Any] | None:
        """Of which directory it was waited for that a failure is undone, whether of a restore, and since when."""
        text = self._read("undone")
        return None if text is None else json.loads(text)

    @property
    def stdin(self) -> str | None:
        return self._read("stdin")


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone with the real launcher and everything around it faked. A blank in its name, as people have."""
    root = tmp_path / "a clone"
    (root / "packaging").mkdir(parents=True)
    for name in ("criu", "layout.sh", "supervise.py"):
        shutil.copy(PACKAGING / name, root / "packaging" / name)
    write_program(root / "packaging" / "phosd", FAKE_PHOSD)
    write_program(root / "fake-criu", FAKE_CRIU)
    plugin = root / "build" / "plugin" / "phos_plugin.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    for package in ("phos", "phos/gpu_engine", "phos/gpu_engine/daemon"):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    (root / "phos/gpu_engine/daemon/client.py").write_text(FAKE_CLIENT)
    return root


@pytest.fixture
def environment(tree: Path, tmp_path: Path) -> dict[str, str]:
    record = tmp_path / "record"
    record.mkdir()
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PHOS", "FAKE", "PYTHON", "CRIU"))},
        "FAKE": str(record),
        "PHOS_CRIU": str(tree / "fake-criu"),
        "PHOS_PYTHON": sys.executable,
        "PHOS_SOCKET": str(tmp_path / "phosd.sock"),
    }


@pytest.fixture
def run(tree: Path, environment: dict[str, str]) -> Run:
    def call(*arguments: str, stdin: str = "", **settings: str) -> Outcome:
        done = subprocess.run(
            [str(tree / "packaging" / "criu"), *arguments],
            env={**environment, **settings},
            input=stdin,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
        return Outcome(done.returncode, done.stderr, Path(environment["FAKE"]))

    return call


def plugins(tree: Path) -> str:
    return str(tree / "build" / "plugin")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["--version"],
        [],
        ["dump", "-t", "5", "-D", "image", "-vvvv", "-o", "dump.log"],
        ["dump", "--lib", "/usr/lib/criu", "-t", "5"],
        ["check", "--log-file", "phos"],  # phos is the name of a log here
        ["restore", "-D", "phos"],
        ["restore", "-o", "phos", "--root=phos"],
        ["restore", "--exec-cmd", "--", "program", "--lib", "phos"],
        ["check", "--lib", "phosphor"],
        ["check", "-v4Lphos"],  # -v takes the rest of its word
        ["check", "--li", "phos"],  # ambiguous: CRIU shall say so
        ["dump", "", "two words", "--lib"],
        ["dump", "-t", "5", "--lib", "phos", "--lib", "elsewhere"],  # the last one counts
    ],
)
def test_other_command_lines_are_handed_on_unchanged(run: Run, tree: Path, arguments: list[str]) -> None:
    outcome = run(*arguments, stdin="typed", FAKE_STATUS="7")
    expected = [plugins(tree) if word == "phos" and "elsewhere" in arguments else word for word in arguments]
    assert outcome.argv == (expected or [""])
    assert outcome.status == 7
    assert outcome.stdin == "typed"
    assert outcome.phosd == []
    assert outcome.waited is None


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (["--lib", "phos"], ["--lib", "{}"]),
        (["--libdir", "phos"], ["--libdir", "{}"]),
        (["--lib=phos"], ["--lib={}"]),
        (["--libdir=phos"], ["--libdir={}"]),
        (["-L", "phos"], ["-L", "{}"]),
        (["-Lphos"], ["-L{}"]),
        (["-jlLphos"], ["-jlL{}"]),
        (["-jL", "phos"], ["-jL", "{}"]),
    ],
)
def test_every_spelling_of_the_plugin_folder(run: Run, tree: Path, spelling: list[str], expected: list[str]) -> None:
    outcome = run("check", *spelling, "-v4")
    assert outcome.argv == ["check", *[word.format(plugins(tree)) for word in expected], "-v4"]
    outcome = run(*spelling, "check")
    assert outcome.argv == [*[word.format(plugins(tree)) for word in expected], "check"]


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["-D", "image"], "image"),
        (["-Dimage"], "image"),
        (["--images-dir", "image"], "image"),
        (["--images-dir=image"], "image"),
        (["--im", "image"], "image"),
        (["-RD", "image"], "image"),
        (["--images-dir", "one", "-D", "two words"], "two words"),
        (["-W", "work", "-o", "-D"], "."),  # -D is the name of a log here
        ([], "."),
    ],
)
def test_dump_waits_for_the_image(run: Run, tree: Path, arguments: list[str], folder: str) -> None:
    outcome = run("dump", "--lib", "phos", "-t", "5", *arguments, stdin="typed")
    assert outcome.status == 0
    assert outcome.argv == ["--ghost-limit", "1G", "dump", "--lib", plugins(tree), "-t", "5", *arguments]
    assert outcome.phosd == ["--ensure"]
    assert outcome.waited == ["wait", folder]
    assert outcome.stdin == "typed"


@pytest.mark.parametrize("given", [["--timeout", "30"], ["--timeout=30"], ["--timeo", "30"]])
def test_dump_keeps_the_callers_timeout(run: Run, tree: Path, given: list[str]) -> None:
    outcome = run("dump", *given, "-t", "5", "-Lphos")
    assert outcome.argv == ["--ghost-limit", "1G", "dump", *given, "-t", "5", f"-L{plugins(tree)}"]


@pytest.mark.parametrize("given", [["--ghost-limit", "2M"], ["--ghost-limit=2M"], ["--ghost-l", "2M"]])
def test_dump_keeps_the_callers_limit_of_files_without_a_name(run: Run, tree: Path, given: list[str]) -> None:
    outcome = run("dump", *given, "-t", "5", "-Lphos")
    assert outcome.argv == ["dump", *given, "-t", "5", f"-L{plugins(tree)}"]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("ghost-limit 2M", []),
        ("timeout 30", ["--ghost-limit", "1G"]),
        ("timeout 30\nghost-limit 2M", []),
        ("#timeout 30", ["--ghost-limit", "1G"]),
        ("#ghost-limit 2M", ["--ghost-limit", "1G"]),
    ],
)
def test_dump_keeps_what_a_file_of_options_says(
    run: Run, tree: Path, tmp_path: Path, given: str, ours: list[str]
) -> None:
    options = tmp_path / "criu.conf"
    options.write_text(f"{given}\n")
    outcome = run("dump", "-t", "5", "-Lphos", CRIU_CONFIG_FILE=str(options))
    assert outcome.argv == [*ours, "dump", "-t", "5", f"-L{plugins(tree)}"]


@pytest.mark.parametrize("status", ["1", "3"])
def test_dump_fails_when_the_image_is_not_whole(run: Run, status: str) -> None:
    outcome = run("dump", "--lib", "phos", "-t", "5", FAKE_CLIENT_STATUS=status)
    assert (outcome.status, outcome.stderr) == (1, "")


def test_dump_looks_itself_whether_the_image_is_whole_where_nobody_knows(run: Run) -> None:
    words = ("dump", "--lib", "phos", "-t", "5", "-D", "image")
    outcome = run(*words, FAKE_CLIENT_STATUS="3", FAKE_WHOLE="image")
    assert (outcome.status, outcome.stderr) == (0, "criu: the image is whole all the same.\n")
    assert outcome.phosd == ["--ensure", "--ensure"]  # others may wait to be brought back
    assert run(*words, FAKE_CLIENT_STATUS="1", FAKE_WHOLE="image").status == 1


@pytest.mark.parametrize("words", [("dump", "-t", "5"), ("restore", "-d")], ids=["dump", "restore"])
def test_what_failed_is_undone_by_a_living_phosd_before_it_returns(run: Run, words: tuple[str, ...]) -> None:
    before = time.time()
    outcome = run(*words, "--lib", "phos", "-D", "image", FAKE_STATUS="9")
    assert outcome.status == 9
    assert outcome.waited is None
    assert outcome.phosd == ["--ensure", "--ensure"]
    assert outcome.undone is not None
    directory, restore, began = outcome.undone
    assert (directory, restore) == ("image", words[0] == "restore")
    assert before <= began <= time.time()


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("action", "way"), [("dump", "stop"), ("restore", "eager")])
def test_it_is_done_once_more_though_nobody_takes_what_is_said_of_that(
    tree: Path, environment: dict[str, str], action: str, way: str, stream: str
) -> None:
    """Where a guess was wrong: the second try does not depend on who reads why there is one."""
    script = f'exec "$0" {action} --lib phos -d -t 5 -D image {stream}'
    settings = {"FAKE_CLIENT_STATUS": "75", "FAKE_CLIENT_SAYS": "phos: A guess was wrong."}
    done = subprocess.run(
        ["sh", "-c", script, str(tree / "packaging" / "criu")],
        env={**environment, **settings},
        stdin=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    ways = Path(environment["FAKE"], "ways").read_text().splitlines()
    assert (done.returncode, ways) == (1, ["", way])


def test_nothing_is_dumped_without_phosd(run: Run) -> None:
    outcome = run("dump", "--lib", "phos", "-t", "5", FAKE_PHOSD_STATUS="1")
    assert outcome.status == 1
    assert outcome.argv is None
    assert "phosd could not be started" in outcome.stderr


def test_a_missing_plugin_is_said(run: Run, tree: Path) -> None:
    (tree / "build" / "plugin" / "phos_plugin.so").unlink()
    outcome = run("dump", "--lib", "phos", "-t", "5")
    assert outcome.status == 1
    assert outcome.argv is None
    assert "install.sh" in outcome.stderr


def test_restore_starts_phosd_and_becomes_criu(run: Run, tree: Path) -> None:
    outcome = run("restore", "--lazy-pages", "--lib", "phos", "-D", "image", FAKE_STATUS="4")
    assert outcome.argv == ["restore", "--lazy-pages", "--lib", plugins(tree), "-D", "image"]
    assert outcome.phosd == ["--ensure"]
    assert outcome.waited is None
    assert outcome.status == 4


@pytest.mark.parametrize("detached", ["-d", "-dv4", "--restore-detached", "--restore-det"])
def test_detached_restore_waits_for_the_gpu(run: Run, detached: str) -> None:
    outcome = run("restore", detached, "--lib", "phos", "-D", "image")
    assert outcome.status == 0
    assert outcome.waited == ["wait", "--restore", "image"]
    assert run("restore", detached, "--lib", "phos", FAKE_CLIENT_STATUS="1").status == 1


@pytest.mark.parametrize("failure", [{"FAKE_STATUS": "1"}, {"FAKE_SIGNAL": "KILL"}, {"FAKE_CLIENT_STATUS": "1"}, {}])
def test_a_detached_restore_that_fails_leaves_nothing_running(
    run: Run, environment: dict[str, str], failure: dict[str, str]
) -> None:
    """Whoever has died before it could end it: CRIU, or phosd. One that succeeds leaves its processes alone."""

    def is_running(pid: int) -> bool:
        """That process, not another one that has got its number since."""
        try:
            return environment["FAKE"].encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    run("restore", "--lib", "phos", "-d", FAKE_RESTORED="1", **failure)
    pids = [int(pid) for pid in Path(environment["FAKE"], "restored").read_text().split()]
    try:
        assert len(pids) == 2
        if failure:
            eventually(lambda: not any(map(is_running, pids)))
        else:
            assert all(map(is_running, pids))
    finally:
        for pid in pids if not failure else []:
            os.kill(pid, signal.SIGKILL)


def test_death_by_signal_is_passed_up(run: Run) -> None:
    outcome = run("dump", "--lib", "phos", "-t", "5", FAKE_SIGNAL="KILL")
    assert outcome.status == -signal.SIGKILL
    assert outcome.waited is None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_down(tree: Path, environment: dict[str, str], number: signal.Signals, whole: bool) -> None:
    """Unless the image is whole: CRIU has ended its process, then, and traces none any more."""
    with subprocess.Popen(
        [str(tree / "packaging" / "criu"), "dump", "--lib", "phos", "-t", "5", "-D", "image"],
        env={**environment, "FAKE_SLEEP": "60", "FAKE_WHOLE": "image" if whole else ""},
        stdin=subprocess.DEVNULL,
    ) as launcher:
        note = Path(environment["FAKE"], "pid")
        deadline = time.monotonic() + 60
        while not (note.exists() and note.read_text().strip()):
            assert time.monotonic() < deadline, "the fake CRIU did not start"
            time.sleep(0.01)
        launcher.send_signal(number)
        assert launcher.wait(timeout=60) == (0 if whole else -number)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


# Seizes the process argv[1] for half a second, as CRIU does; writes down that it has, and that it is about to let go.
TRACER = """
import ctypes, sys, time
pid, note, ptrace = int(sys.argv[1]), sys.argv[2], ctypes.CDLL(None).ptrace
def say(word):
    with open(note, "a") as file:
        file.write(word + " ")
assert ptrace(0x4206, pid, None, None) == ptrace(0x4207, pid, None, None) == 0  # PTRACE_SEIZE, PTRACE_INTERRUPT
say("seized")
time.sleep(0.5)
say("done")  # afterwards it may be ended before it can say so
assert ptrace(17, pid, None, None) == 0  # PTRACE_DETACH
time.sleep(60)
"""


@pytest.mark.parametrize("group", [False, True], ids=["launcher", "keyboard"])
def test_no_signal_ends_a_dump_that_traces_a_process(tree: Path, environment: dict[str, str], group: bool) -> None:
    """A process whose tracer ends while it works inside it dies of the tracer's breakpoint."""
    changes = {"FAKE_PYTHON": sys.executable, "FAKE_TRACER": TRACER}
    with subprocess.Popen(["sleep", "600"]) as traced:
        try:
            launcher = subprocess.Popen(
                [str(tree / "packaging" / "criu"), "dump", "--lib", "phos", "-t", "5"],
                env={**environment, **changes, "FAKE_TRACE": str(traced.pid)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            note = Path(environment["FAKE"], "traced")
            deadline = time.monotonic() + 60
            while not (note.exists() and note.read_text()):
                assert time.monotonic() < deadline, "the fake CRIU did not start"
                time.sleep(0.01)
            (os.killpg if group else os.kill)(launcher.pid, signal.SIGINT)
            assert launcher.wait(timeout=60) == -signal.SIGINT
            assert note.read_text() == "seized done "
            assert traced.poll() is None
        finally:
            traced.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_reach_the_phosd_that_undoes_a_dump(
    tree: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    record = Path(environment["FAKE"])
    undoing = 'if [ -e "$FAKE/argv" ]; then touch "$FAKE/undoing"; sleep 0.5; fi\necho ensured >>"$FAKE/phosd"\n'
    write_program(tree / "packaging" / "phosd", f"#!/bin/sh\n{undoing}")
    with subprocess.Popen(
        [str(tree / "packaging" / "criu"), "dump", "--lib", "phos", "-t", "5"],
        env={**environment, "FAKE_STATUS": "9"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as launcher:
        eventually((record / "undoing").exists)
        os.killpg(launcher.pid, number)
        assert launcher.communicate(timeout=60) == (None, "")
        assert launcher.returncode == -number
    assert (record / "phosd").read_text() == "ensured\nensured\n"


TIDIED_AWAY = """
class Tidied:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 15)
tidied = Tidied()
"""


@pytest.mark.parametrize("words", [("dump", "-t", "5"), ("restore", "-d")], ids=["dump", "restore"])
def test_a_signal_that_comes_when_all_is_done_is_no_interruption(run: Run, tree: Path, words: tuple[str, ...]) -> None:
    """Python heeds none while it tidies up, and would be ended by it: phos-gpu said that nothing was left running."""
    (tree / "phos/gpu_engine/daemon/client.py").write_text(FAKE_CLIENT + TIDIED_AWAY)
    outcome = run(*words, "--lib", "phos", "-D", "image")
    assert outcome.waited is not None
    assert outcome.status == 0


NO_THREAD = """
import threading
def refused(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refused
"""


@pytest.mark.parametrize("words", [("dump", "-t", "5"), ("restore", "-d")], ids=["dump", "restore"])
def test_it_waits_although_there_can_be_no_thread_more(run: Run, tree: Path, words: tuple[str, ...]) -> None:
    """What was restored may be what has used up a limit on processes."""
    (tree / "phos/gpu_engine/daemon/client.py").write_text(FAKE_CLIENT + NO_THREAD)
    outcome = run(*words, "--lib", "phos", "-D", "image")
    assert outcome.waited is not None
    assert (outcome.status, outcome.stderr) == (0, "")


def test_a_listening_phosd_is_seen_without_python(run: Run, environment: dict[str, str]) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(environment["PHOS_SOCKET"])
        outcome = run("restore", "--lib", "phos")
        assert outcome.phosd == ["--ensure"], "bound, but nobody listens"
        server.listen()
        outcome = run("restore", "--lib", "phos")
        assert outcome.phosd == ["--ensure"], "the one of before"


def test_the_launcher_adds_little_to_a_restore(run: Run, environment: dict[str, str]) -> None:
    """In processor time: other programs take of the rest what they like."""
    import socket

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(environment["PHOS_SOCKET"])
        server.listen()
        best = 1.0
        for _ in range(10):
            before = spent()
            run("restore", "--lazy-pages", "--lib", "phos", "-D", "image", "-vvvv", "--log-file", "restore.log")
            best = min(best, spent() - before)
    assert 0 < best < 0.030


def test_links_to_the_launcher_find_home(run: Run, tree: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "criu").symlink_to("../a clone/packaging/criu")
    path = f"{tmp_path / 'bin'}:{environment['PATH']}"
    subprocess.run(["criu", "check", "-Lphos"], env={**environment, "PATH": path}, check=True, stdin=subprocess.DEVNULL)
    assert Path(environment["FAKE"], "argv").read_text().splitlines() == ["check", f"-L{plugins(tree)}"]


@pytest.mark.parametrize("called", ["folder/criu", "a clone/packaging//criu", "a clone/packaging/../packaging/criu"])
def test_a_launcher_finds_home_whatever_it_is_called(
    tree: Path, environment: dict[str, str], tmp_path: Path, called: str
) -> None:
    (tmp_path / "folder").symlink_to("a clone/packaging")
    for command, cwd in ((f"{tmp_path}/{called}", "/"), (f"./{called}", tmp_path)):
        words = [command, "check", "-Lphos"]
        subprocess.run(words, env=environment, check=True, stdin=subprocess.DEVNULL, cwd=cwd)
        _, option = Path(environment["FAKE"], "argv").read_text().splitlines()
        assert os.path.realpath(option.removeprefix("-L")) == str(plugins(tree))


def test_the_launcher_looks_for_nothing_in_files_that_do_not_exist(run: Run, tmp_path: Path) -> None:
    write_program(tmp_path / "asked" / "grep", f"#!/bin/sh\necho grep >>'{tmp_path}/runs'\nexit 1\n")
    if Path("/etc/criu/default.conf").exists():
        pytest.skip("CRIU has options of this machine's")
    path = f"{tmp_path / 'asked'}:{os.environ['PATH']}"
    outcome = run("restore", "--lib", "phos", "-D", "image", "-d", PATH=path, HOME=str(tmp_path))
    assert outcome.status == 0
    assert not (tmp_path / "runs").exists()


def test_installed_layout_starts_criu_through_its_own_loader(
    tree: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "prefix" / "lib" / "phos"
    (home / "bin").mkdir(parents=True)
    for name in ("criu", "layout.sh", "supervise.py"):
        shutil.copy(PACKAGING / name, home / "bin" / name)
    write_program(home / "criu" / "loader" / "criu", FAKE_CRIU)
    del environment["PHOS_CRIU"]
    subprocess.run([str(home / "bin" / "criu"), "check", "x"], env=environment, check=True, stdin=subprocess.DEVNULL)
    library, program = str(home / "criu" / "lib"), str(home / "criu" / "bin" / "criu")
    started = Path(environment["FAKE"], "argv").read_text().splitlines()
    assert started == ["--library-path", library, "--argv0", "criu", program, "check", "x"]


def with_own_criu(tree: Path, environment: dict[str, str]) -> Path:
    """A clone with a CRIU that has a loader, and no blank in its name: ld.so would take that for the name's end."""
    clone = tree.parent / "clone"
    shutil.copytree(tree, clone)
    write_program(clone / "build" / "criu" / "loader" / "criu", FAKE_CRIU)
    del environment["PHOS_CRIU"]
    return clone


def test_nothing_is_preloaded_from_a_folder_that_ld_so_cannot_name(tree: Path, environment: dict[str, str]) -> None:
    write_program(tree / "build" / "criu" / "loader" / "criu", FAKE_CRIU)
    del environment["PHOS_CRIU"]
    words = [str(tree / "packaging" / "criu"), "dump", "-t", "5", "--lib", "phos"]
    subprocess.run(words, env=environment, check=True, stdin=subprocess.DEVNULL)
    assert "--preload" not in Path(environment["FAKE"], "argv").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "preloads"),
    [
        (["dump", "-t", "5", "-D", "image"], True),
        (["dump", "-t", "5", "--leave-running", "--images-dir=image"], True),
        (["dump", "-t", "5", "--page-server", "--address", "host"], False),
        (["dump", "-t", "5", "--prev-images-dir", "../before", "--track-mem"], False),
        (["dump", "-t", "5", "--stream"], False),
        (["dump", "-t", "5", "--lazy-p"], False),
        (["restore", "-d"], False),
    ],
)
def test_criu_asks_the_plugin_for_pages_when_it_dumps_into_files(
    tree: Path, environment: dict[str, str], words: list[str], preloads: bool
) -> None:
    tree = with_own_criu(tree, environment)
    launcher = str(tree / "packaging" / "criu")
    subprocess.run([launcher, *words, "--lib", "phos"], env=environment, check=True, stdin=subprocess.DEVNULL)
    started = Path(environment["FAKE"], "argv").read_text().splitlines()
    loaders = started[: started.index("--argv0")]
    assert (loaders[2:] == ["--preload", f"{plugins(tree)}/phos_plugin.so"]) is preloads
    assert "--preload" not in started[started.index("--argv0") :]


def test_a_criu_that_serves_somebody_has_the_plugin_at_hand(tree: Path, environment: dict[str, str]) -> None:
    tree = with_own_criu(tree, environment)
    write_program(
        tree / "build" / "criu" / "loader" / "criu",
        '#!/bin/sh\nprintf "%s\\n" "$@" >"$FAKE/argv"\nenv | grep ^PHOS_ >"$FAKE/variables"\n',
    )
    launcher = str(tree / "packaging" / "criu")
    asked = {**environment, "PHOS_LINKS": "ours", "PHOS_FILL_PAGES": "1"}
    subprocess.run([launcher, "swrk", "3"], env=asked, check=True, stdin=subprocess.DEVNULL)
    started = Path(environment["FAKE"], "argv").read_text().splitlines()
    assert started[2:4] == ["--preload", f"{plugins(tree)}/phos_plugin.so"]
    assert started[-2:] == ["swrk", "3"]
    variables = dict(line.split("=", 1) for line in Path(environment["FAKE"], "variables").read_text().splitlines())
    assert (variables["PHOS_CRIU_SERVES"], variables["PHOS_MAY_KEEP"]) == ("1", "1")
    assert not {"PHOS_LINKS", "PHOS_FILL_PAGES"} & set(variables)
    # What another one has set is of no meaning to a CRIU with a command line.
    others = {**environment, "PHOS_CRIU_SERVES": "1"}
    subprocess.run([launcher, "check", "x"], env=others, check=True, stdin=subprocess.DEVNULL)
    assert "PHOS_CRIU_SERVES" not in Path(environment["FAKE"], "variables").read_text()


HOLDER = """
import mmap, os, subprocess, sys
name = sys.argv[1]
if sys.argv[2:]:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
else:
    with open(name, "w+b") as file:
        file.truncate(32)
        memory = mmap.mmap(file.fileno(), 32)
    os.unlink(name)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "/dev/shm/folder"])
@pytest.mark.parametrize("child", [False, True])
def test_criu_makes_links_where_a_task_has_semaphores(
    tree: Path, environment: dict[str, str], place: str, child: bool
) -> None:
    """And of nothing that lies elsewhere, which would have to stay there; nor where our library cannot be in it."""
    tree = with_own_criu(tree, environment)
    folder = Path(place)
    there = folder.exists()
    folder.mkdir(exist_ok=True)
    environment["PHOS_LINKS"] = "a caller's"
    try:
        words = [sys.executable, "-c", HOLDER, str(folder / f"phos-test-{os.getpid()}"), *([HOLDER] if child else [])]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as task:
            assert task.stdout
            assert task.stdout.readline() == b"ready\n"
            for more, may in ((["-R"], True), (["--link-r"], False), (["--stream"], False)):
                launcher = [str(tree / "packaging" / "criu"), "dump", f"-t{task.pid}", "--lib", "phos", *more]
                subprocess.run(launcher, env=environment, check=True, stdin=subprocess.DEVNULL)
                adds = may and place == "/dev/shm"
                started = Path(environment["FAKE"], "argv").read_text().splitlines()
                assert ("--link-remap" in started) is adds
                said = Path(environment["FAKE"], "links").read_text()
                assert said == ("ours" if adds else "")
            task.communicate()
    finally:
        if not there:
            folder.rmdir()


def test_criu_s_own_options_from_a_file_count_as_well(tree: Path, environment: dict[str, str], tmp_path: Path) -> None:
    tree = with_own_criu(tree, environment)
    options = tmp_path / "criu.conf"
    launcher = [str(tree / "packaging" / "criu"), "dump", "-t", "5", "--lib", "phos"]
    for text, preloads in (("# page-server\ntcp-established\n", True), ("tcp-close\n  page-server\n", False)):
        options.write_text(text)
        for words, more in ((["--config", str(options)], {}), ([], {"CRIU_CONFIG_FILE": str(options)})):
            subprocess.run([*launcher, *words], env={**environment, **more}, check=True, stdin=subprocess.DEVNULL)
            started = Path(environment["FAKE"], "argv").read_text().splitlines()
            assert ("--preload" in started) is preloads


@pytest.mark.parametrize("words", [("dump", "-t", "5"), ("restore", "-d")], ids=["dump", "restore"])
def test_an_image_directory_that_only_a_file_of_options_names_is_asked_for(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """phosd would be asked about another one: a dump that has ended the program would be said to have failed."""
    options = tmp_path / "criu.conf"
    options.write_text("images-dir /elsewhere\n")
    outcome = run(*words, "--lib", "phos", CRIU_CONFIG_FILE=str(options))
    assert (outcome.status, outcome.argv, outcome.phosd) == (1, None, [])
    assert "by -D" in outcome.stderr
    outcome = run(*words, "--lib", "phos", "-D", "image", CRIU_CONFIG_FILE=str(options))
    assert outcome.status == 0
    assert outcome.waited is not None
    assert outcome.waited[-1] == "image"


def test_a_file_of_options_may_have_a_restore_return_when_the_program_runs(run: Run, tmp_path: Path) -> None:
    options = tmp_path / "criu.conf"
    options.write_text("restore-detached\n")
    outcome = run("restore", "--lib", "phos", "-D", "image", CRIU_CONFIG_FILE=str(options))
    assert outcome.waited == ["wait", "--restore", "image"]


@pytest.mark.parametrize(
    ("words", "changes", "can", "fills"),
    [
        (["-D", "image", "-d"], {}, True, True),
        (["-D", "image"], {}, True, True),
        (["-D", "image", "--exec-cmd", "--", "program"], {}, True, True),
        (["-D", "image", "-d"], {"PHOS_RESTORE": "lazy"}, True, True),
        (["-D", "image", "-d", "-W", "elsewhere"], {}, True, True),
        (["-D", "image", "-d", "--work-dir=elsewhere"], {}, True, True),
        (["-D", "image", "-d"], {}, False, False),
        (["-D", "image", "-d", "--lazy-pages"], {}, True, False),
        (["-D", "image", "-d", "--auto-dedup"], {}, True, False),
    ],
)
def test_the_plugin_fills_memory_where_it_can(
    tree: Path, environment: dict[str, str], words: list[str], changes: dict[str, str], can: bool, fills: bool
) -> None:
    clone = with_own_criu(tree, environment)
    tells = '\necho "$PHOS_FILL_PAGES/$PHOS_RESTORE" >"$FAKE/fill"\n'
    write_program(clone / "build" / "criu" / "loader" / "criu", FAKE_CRIU.replace("\n", tells, 1))
    write_program(
        clone / "build" / "lib" / "phos-can-fill", f'#!/bin/sh\necho "$@" >"$FAKE/asked"\nexit {0 if can else 1}\n'
    )
    command = [str(clone / "packaging" / "criu"), "restore", "--lib", "phos", *words]
    environment |= {"PHOS_FILL_PAGES": "of somebody else", **changes}
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL)
    argv = Path(environment["FAKE"], "argv").read_text().splitlines()
    given = changes.get("PHOS_RESTORE", "")
    assert Path(environment["FAKE"], "fill").read_text() == f"{1 if fills else ''}/{given}\n"
    if fills:
        assert argv[argv.index("restore") - 1] == "--lazy-pages"
        elsewhere = "elsewhere" if any("elsewhere" in word for word in words) else "image"
        assert Path(environment["FAKE"], "asked").read_text() == f"image {elsewhere}\n"
    else:
        assert argv.count("--lazy-pages") == words.count("--lazy-pages")


def test_phosd_is_not_told_that_memory_was_to_be_filled(tree: Path, environment: dict[str, str]) -> None:
    """It may be started after a failure, and starts CRIU itself for pools."""
    clone = with_own_criu(tree, environment)
    write_program(clone / "build" / "lib" / "phos-can-fill", "#!/bin/sh\n")
    phosd = FAKE_PHOSD.replace("\n", '\necho "fill:$PHOS_FILL_PAGES" >>"$FAKE/phosd"\n', 1)
    write_program(clone / "packaging" / "phosd", phosd)
    command = [str(clone / "packaging" / "criu"), "restore", "-d", "--lib", "phos", "-D", "image"]
    subprocess.run(command, env={**environment, "FAKE_STATUS": "3"}, check=False, stdin=subprocess.DEVNULL)
    started = Path(environment["FAKE"], "phosd").read_text().splitlines()
    assert started.count("--ensure") == 2
    assert started.count("fill:") == 2


def test_an_installation_without_criu_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "lib" / "phos" / "bin"
    home.mkdir(parents=True)
    for name in ("criu", "layout.sh"):
        shutil.copy(PACKAGING / name, home / name)
    del environment["PHOS_CRIU"]
    done = subprocess.run([str(home / "criu"), "check"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run install.sh" in done.stderr
