"""phos.checkpoint and its way through the frontend to phosd, which a test plays; and what phosd refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import phos
from phos.gen import wire_pb2 as wire
from phos.gpu_engine.daemon import requests as requests_module
from phos.gpu_engine.daemon.jobs import Claims, JobTable
from phos.gpu_engine.daemon.requests import Requests
from phos.images.formats import COMMIT_FILE
from tests.unit.frontend_fake import FakePhosd, Session, built, program
from tests.unit.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


def result(session: Session, number: int, error: str = "", **more: Any) -> None:
    """Answer a request."""
    assert session.connection is not None
    said = wire.CheckpointResult(number=number, error=error, **more)
    session.connection.send(wire.Envelope(checkpoint_result=said))


def request_of(session: Session, count: int = 1) -> tuple[wire.CheckpointRequest, list[str]]:
    eventually(lambda: len(session.requests) >= count)
    return session.requests[count - 1]


ASKING = """
sys.path.insert(0, os.environ["SDK"])
import phos
start()
time.sleep(0.2)
before = descriptors()
made = phos.checkpoint(os.environ["IMAGE"], **eval(os.environ.get("KEYWORDS", "{}")))
assert not made.done and not made.skipped
say("asked")
heard()
assert made.wait(20)
say(made.committed, made.restored, made.seconds, made.stall, made.error)
assert not [d for d in descriptors().values() if d == os.path.realpath(os.environ["IMAGE"])]
"""


def asking(phosd: FakePhosd, folder: Path, keywords: str = "{}", body: str = ASKING) -> Any:
    return program(phosd, body, SDK=str(ROOT), IMAGE=str(folder / "new" / "image"), KEYWORDS=keywords)


@built
def test_a_request_and_its_result(phosd: FakePhosd, tmp_path: Path) -> None:
    with asking(phosd, tmp_path) as (app, session):
        assert app.line() == "asked"
        asked, directories = request_of(session)
        assert directories == [str(tmp_path / "new" / "image")]
        assert os.stat(directories[0]).st_mode & 0o777 == 0o700  # the image of a process's memory
        assert (asked.number, asked.protocol, asked.end, asked.asked_before) == (1, "cow", False, False)
        assert asked.wait  # also for a checkpoint that somebody else makes
        result(session, 1, seconds=2.5, stall=0.25)
        app.tell()
        assert app.line() == "True False 2.5 0.25 None"
        app.finish()


@built
def test_keywords_reach_phosd(phosd: FakePhosd, tmp_path: Path) -> None:
    with asking(phosd, tmp_path, "{'protocol': None, 'leave_running': False, 'if_busy': 'skip'}") as (app, session):
        app.line()
        asked, _ = request_of(session)
        assert (asked.protocol, asked.end, asked.wait) == ("", True, False)
        result(session, 1, "It went wrong, as the test says.")
        app.tell()
        assert app.line() == "False False None None It went wrong, as the test says."
        app.finish()


ASKING_WITH = """
import ctypes
ask = ctypes.CDLL(None).phos_checkpoint_request
ask.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p]
start()
for protocol in (b"fast", b"stopped", b"co", b"", b"recopy"):
    say(ask(os.environ["IMAGE"].encode(), protocol, 0, None), os.path.exists(os.environ["IMAGE"]))
heard()
"""


@built
def test_a_protocol_that_there_is_not_is_refused_before_anything_is_made(phosd: FakePhosd, tmp_path: Path) -> None:
    with asking(phosd, tmp_path, body=ASKING_WITH) as (app, session):
        assert [app.line() for _ in range(5)] == ["5 False"] * 5  # PHOS_INVALID
        assert not session.requests
        app.tell()
        app.finish()


@built
def test_the_result_survives_the_connection(phosd: FakePhosd, tmp_path: Path) -> None:
    """Every checkpoint ends it: phosd is asked again over the next."""
    with asking(phosd, tmp_path) as (app, session):
        app.line()
        request_of(session)
        phosd.toggle(session)
        asked, directories = request_of(session, 2)
        assert asked.asked_before
        assert asked.number == 1
        assert len(directories) == 1
        result(session, 1)
        app.tell()
        assert app.line().startswith("True False")
        app.finish()


@built
def test_another_phosd_is_asked(tmp_path: Path) -> None:
    first = FakePhosd(tmp_path)
    with asking(first, tmp_path) as (app, session):
        app.line()
        request_of(session)
        first.stop()
        with FakePhosd(tmp_path) as second:
            again = second.arrival()
            assert request_of(again)[0].asked_before
            result(again, 1)
            app.tell()
            assert app.line().startswith("True False")
            app.finish()


@built
def test_a_restored_process_is_told_so(phosd: FakePhosd, tmp_path: Path) -> None:
    with asking(phosd, tmp_path) as (app, session):
        app.line()
        request_of(session)
        for step in (phosd.quiesce, phosd.detach):
            assert not step(session).error  # type: ignore[operator]
        assert not phosd.attach(session, restored=True).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "False True None None None"
        app.finish()
        assert len(session.requests) == 1  # it is not asked for again


@built
def test_a_forked_child_does_not_wait_for_it(phosd: FakePhosd, tmp_path: Path) -> None:
    body = (
        ASKING
        + """
made = phos.checkpoint(os.environ["IMAGE"] + "2")
child = os.fork()
if child == 0:
    assert made.wait(5) and "forked" in made.error, made.error
    assert phos.checkpoint("/nowhere").skipped
    os._exit(0)
say(os.waitpid(child, 0)[1], made.done)
"""
    )
    with asking(phosd, tmp_path, body=body) as (app, session):
        app.line()
        request_of(session)
        result(session, 1)
        app.tell()
        app.line()
        assert app.line() == "0 False"
        app.finish()


@built
def test_what_a_call_costs(phosd: FakePhosd, tmp_path: Path) -> None:
    """Microseconds: asked for, and refused because one is in progress."""
    body = """
import sys
sys.path.insert(0, os.environ["SDK"])
import phos
start()
time.sleep(0.2)
heard()
def costs(call):
    "Seconds that pass, and those of a processor: what others do on the machine is in the first alone."
    passed, worked = time.perf_counter(), time.thread_time()
    made = call()
    return time.perf_counter() - passed, time.thread_time() - worked, made
times, works = [], []
for number in range(20):
    passed, worked, made = costs(lambda: phos.checkpoint(os.environ["IMAGE"] + str(number)))
    times.append(passed)
    works.append(worked)
    assert made.wait(10)
def skip():
    for _ in range(50):
        assert phos.checkpoint(os.environ["IMAGE"], if_busy="skip").skipped
busy = phos.checkpoint(os.environ["IMAGE"])
skips = [costs(skip) for _ in range(20)]
say(*(1e6 * seconds for seconds in (
    min(times), sorted(works)[len(works) // 2],
    min(passed for passed, _, _ in skips) / 50, sum(worked for _, worked, _ in skips) / 1000)))
"""
    with asking(phosd, tmp_path, body=body) as (app, session):
        app.tell()
        for number in range(1, 21):
            request_of(session, number)
            result(session, number)
        asked, asking_work, skipped, skipping_work = (float(word) for word in app.line().split())
        assert asked < 300  # the fastest; usually 20
        assert asking_work < 500  # the median; usually 30
        assert skipped < 60
        assert skipping_work < 100  # usually 5
        app.finish()


@built
def test_results_are_kept_for_a_while(phosd: FakePhosd, tmp_path: Path) -> None:
    body = """
import sys
sys.path.insert(0, os.environ["SDK"])
import phos
start()
time.sleep(0.2)
heard()
made = []
for number in range(70):
    made.append(phos.checkpoint(os.environ["IMAGE"] + str(number)))
    made[-1].wait(10)
    made[-1] = phos.Checkpoint("x", made[-1]._library, number + 1)  # as if nobody had looked
say(made[0].done, made[0].error, made[69].committed, made[10].committed)
"""
    with asking(phosd, tmp_path, body=body) as (app, session):
        app.tell()
        for number in range(1, 71):
            request_of(session, number)
            result(session, number)
        assert app.line() == "True No result is known: the request is too long ago. True True"
        app.finish()


# Without the frontend.


def test_it_does_nothing_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phos, "_warned", set())
    with pytest.warns(RuntimeWarning, match="not started by 'phos-gpu run'") as seen:
        made = [phos.checkpoint("/nonexistent/image") for _ in range(3)]
    assert len(seen) == 1
    assert all(one.done and one.skipped and not one.committed and not one.restored for one in made)
    assert made[0].wait(0)
    assert "not started" in (made[0].error or "")
    assert not os.path.exists("/nonexistent")
    assert repr(made[0]) == "<phos.Checkpoint '/nonexistent/image': skipped>"


@pytest.mark.parametrize(
    "arguments",
    [{"directory": ""}, {"protocol": "fast"}, {"if_busy": "maybe"}, {"directory": "a\0b"}, {"directory": b"a\0b"}],
)
def test_arguments_without_a_meaning(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        phos.checkpoint(**{"directory": "x", **arguments})


def test_importing_loads_next_to_nothing() -> None:
    code = "import sys; before = set(sys.modules); import phos; print(*sorted(set(sys.modules) - before))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["__future__", "phos"]


def test_the_folder_for_programs_does_not_hide_the_rest(tmp_path: Path) -> None:
    (tmp_path / "phos").mkdir()
    (tmp_path / "phos" / "__init__.py").write_text((ROOT / "phos" / "__init__.py").read_text())
    code = "import phos, phos.gpu_engine.errors as e; print(phos.__file__, e.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0].startswith(str(tmp_path))
    assert done.stdout.split()[1].startswith(str(ROOT))


# phosd's side.


class Told:
    """A session that notes what it is told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.results: list[wire.CheckpointResult] = []

    def tell(self, **body: Any) -> None:
        self.results.append(body["checkpoint_result"])


class Daemon:
    """Requests with a registry of nothing, and a checkpoint that the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uid: int = 0) -> None:
        registry = types.SimpleNamespace(claims=Claims(), jobs=JobTable(), path=Path("/nonexistent/phosd.sock"))
        self.registry = registry
        self.requests = Requests(registry)  # type: ignore[arg-type]
        self.session = Told(os.getpid())
        self.peer = types.SimpleNamespace(pid=os.getpid(), uid=uid, gid=uid)
        self.ran: list[str] = []
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(Requests, "_run", self._run)

    def _run(self, pid: int, request: wire.CheckpointRequest, directory: int, **_more: object) -> dict[str, object]:
        self.ran.append(os.readlink(f"/proc/self/fd/{directory}"))
        return {"seconds": 1.5, "stall": 0.5, "warnings": ["Mind the gap."]}

    def ask(self, folder: Path | None, number: int = 1, **more: Any) -> None:
        descriptors = [os.open(folder, os.O_RDONLY)] if folder else []
        envelope = wire.Envelope(checkpoint_request=wire.CheckpointRequest(number=number, **more))
        assert self.requests.take(self.session, self.peer, envelope, descriptors)  # type: ignore[arg-type]

    def result(self, count: int = 1) -> wire.CheckpointResult:
        eventually(lambda: len(self.session.results) >= count)
        return self.session.results[count - 1]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_phosd_answers_once_and_again_when_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    daemon = Daemon(monkeypatch)
    before = open_descriptors()
    daemon.ask(tmp_path)
    said = daemon.result()
    assert (said.error, said.seconds, said.stall, list(said.warnings)) == ("", 1.5, 0.5, ["Mind the gap."])
    daemon.ask(tmp_path, asked_before=True)
    assert daemon.result(2) == said
    assert daemon.ran == [str(tmp_path)]
    eventually(lambda: open_descriptors() == before)


def test_a_request_that_an_earlier_phosd_did_not_read_is_carried_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemon = Daemon(monkeypatch)
    daemon.ask(tmp_path, asked_before=True)
    assert daemon.result().error == ""
    assert daemon.ran


@pytest.mark.parametrize("names, error", [((COMMIT_FILE, "x"), ""), (("x",), "phosd was restarted")])
def test_what_became_of_a_request_to_an_earlier_phosd(
    names: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    daemon = Daemon(monkeypatch)
    daemon.ask(tmp_path, asked_before=True)
    assert daemon.result().error.startswith(error)
    assert bool(error) == bool(daemon.result().error)
    assert not daemon.ran


def test_the_command_of_an_earlier_phosd_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may have written nothing yet. A second one would be refused, as the image of the first is in its way."""
    code = f"import pathlib, sys; sys.stdin.read(); pathlib.Path({COMMIT_FILE!r}).touch()"
    words = [sys.executable, "-c", code, "checkpoint", "--json", str(os.getpid()), "."]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE) as command:
        eventually(lambda: b"checkpoint" in Path(f"/proc/{command.pid}/cmdline").read_bytes())
        daemon = Daemon(monkeypatch)
        daemon.ask(tmp_path, asked_before=True)
        time.sleep(0.3)
        assert not daemon.session.results
        assert command.stdin is not None
        command.stdin.close()
    assert daemon.result().error == ""
    assert not daemon.ran


@pytest.mark.parametrize(
    "said",
    [
        "Others than root may write to {}, and lead what root writes there to any file.",
        "Interrupted: process 5 runs on as before; {} holds no image.",
        "CRIU's log: {}/dump.log",
    ],
)
def test_what_the_command_says_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str) -> None:
    """The command is given it as the one that it stands in."""
    run = Requests._run
    daemon = Daemon(monkeypatch)
    monkeypatch.setattr(Requests, "_run", run)
    short = said.format(".").replace("./", "")
    failed = subprocess.CompletedProcess([], 2, "", f"phos-gpu checkpoint: {short}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    daemon.ask(tmp_path)
    assert daemon.result().error == said.format(tmp_path)


def test_a_directory_that_the_user_may_not_write_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    daemon = Daemon(monkeypatch, uid=4242)
    daemon.ask(tmp_path)
    assert "User 4242 may not write to" in daemon.result().error
    assert not daemon.ran


def test_a_tree_with_processes_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    daemon = Daemon(monkeypatch, uid=4242)
    daemon.ask(tmp_path)
    assert "belongs to another user" in daemon.result().error
    assert not daemon.ran


def test_a_directory_that_was_removed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, folder = Requests._run, tmp_path / "image"
    daemon = Daemon(monkeypatch)
    monkeypatch.setattr(Requests, "_run", run)
    folder.mkdir()
    with daemon.registry.claims.hold([os.getpid()]):
        daemon.ask(folder, wait=True)
        folder.rmdir()
    assert daemon.result().error == f"The image directory {folder} has been removed since it was asked for."


def test_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    daemon.ask(None)
    assert "directory is gone" in daemon.result().error


def test_it_waits_for_another_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    daemon = Daemon(monkeypatch)
    with daemon.registry.claims.hold([os.getpid()]):
        daemon.ask(tmp_path, wait=True)
        time.sleep(5 * requests_module.POLL_SECONDS)
        assert not daemon.ran
    assert daemon.result().error == ""


def test_other_packets_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    packet = wire.Envelope(block_removed=wire.BlockRemoved(block=1))
    assert not daemon.requests.take(daemon.session, daemon.peer, packet, [])  # type: ignore[arg-type]
