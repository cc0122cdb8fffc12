"""What the launcher says of a CRIU that failed, and how long it waits; answers of any length."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from phos.cli.run import run
from phos.gen import wire_pb2
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import __main__, client, command_line, paths, program, reach, wire
from phos.gpu_engine.daemon.serve_client import ClientServer
from phos.gpu_engine.daemon.startup import _listen
from phos.gpu_engine.errors import CRIU_FAILED, DaemonUnavailable, DriverError, NotPermitted, PhosError, UsageError
from tests.unit.image_sets import write_small
from tests.unit.session_fake import open_descriptors

BEGAN = 1000.0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[wire_pb2.ImageState], list[float]]:
    """Make phosd answer so; returns the seconds for which it was asked to wait."""

    def set_answer(state: wire_pb2.ImageState) -> list[float]:
        waited: list[float] = []

        def answer(_directory: Path, *, restore: bool, timeout: float, run: str) -> wire_pb2.ImageState:
            assert restore
            waited.append(timeout)
            return state

        monkeypatch.setattr(client, "wait_image", answer)
        return waited

    return set_answer


def test_a_phosd_that_does_not_start_leaves_no_socket(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from phos.gpu_engine.daemon import server, startup

def refuse(path, *_):
    sys.exit(9 if path.is_socket() else 8)

startup.load_driver = lambda kind: None
server.Daemon = refuse
startup.run(Path(sys.argv[1]), verbose=False)
"""
    path = tmp_path / "run" / "phosd.sock"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert not path.exists()


@pytest.mark.parametrize("directory", ["image", "--d2", "--restore", "-x", "--"])
@pytest.mark.parametrize("restore", [True, False])
def test_a_directory_may_be_called_like_an_option(
    directory: str, restore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU takes it after -D."""
    waited: list[tuple[Path, bool]] = []

    def answer(where: Path, *, restore: bool, run: str) -> wire_pb2.ImageState:
        waited.append((where, restore))
        return wire_pb2.ImageState(state="none")

    monkeypatch.setattr(client, "wait_image", answer)
    monkeypatch.setattr(sys, "argv", ["criu", "wait", *(["--restore"] if restore else []), directory])
    assert client.main() == 0
    assert waited == [(Path(directory), restore)]


def test_an_image_that_has_come_is_whole_and_new(tmp_path: Path) -> None:
    before = time.time()
    write_small(tmp_path / "image")
    assert client.has_come(str(tmp_path / "image"), before)
    assert not client.has_come(str(tmp_path / "image"), time.time())
    (tmp_path / "image" / "core-100.img").unlink()
    assert not client.has_come(str(tmp_path / "image"), before)
    assert not client.has_come(str(tmp_path), before)


@pytest.mark.parametrize("words", [[], ["wait"], ["image"], ["wait", "image", "another"], ["see", "image"]])
def test_other_words_mean_nothing_to_the_helper(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["criu", *words])
    assert client.main() == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_its_own_job_is_waited_for(
    answers: Callable[[wire_pb2.ImageState], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    waited = answers(wire_pb2.ImageState(state="failed", error="The disk is full.", since=BEGAN + 1))
    client.show_undone("image", restore=True, began=BEGAN)
    assert max(waited) == client.UNDO_SECONDS
    assert capsys.readouterr().err == "phos: The disk is full.\n"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (wire_pb2.ImageState(state="failed", error=CRIU_FAILED), ""),  # CRIU has said why
        (wire_pb2.ImageState(state="committed"), ""),
        (
            wire_pb2.ImageState(state="writing", error="not complete after 60 s", timed_out=True),
            "phos: phosd is still undoing its part; 'phos-gpu status' shows it.\n",
        ),
    ],
)
def test_what_is_no_reason_is_not_said(
    answers: Callable[[wire_pb2.ImageState], list[float]],
    capsys: pytest.CaptureFixture[str],
    state: wire_pb2.ImageState,
    said: str,
) -> None:
    state.since = BEGAN
    answers(state)
    client.show_undone("image", restore=True, began=BEGAN)
    assert capsys.readouterr().err == said


def test_a_phosd_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "phosd.sock"
    monkeypatch.setenv("PHOS_SOCKET", str(path))
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        client.show_undone(str(tmp_path), restore=False, began=BEGAN)
    assert capsys.readouterr().err == ""


@pytest.fixture
def hangs(tmp_path: Path) -> Iterator[Path]:
    """The path of a phosd that accepts connections and says nothing."""
    path = tmp_path / "phosd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(4)
        yield path


@pytest.mark.parametrize("ask", [client.status, client.shutdown])
def test_a_request_to_a_phosd_that_hangs_ends_with_a_sentence(
    hangs: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.1)
    with pytest.raises(DaemonUnavailable, match=f"phosd at {hangs} (has not answered|does not answer)"):
        ask(hangs)


def test_one_that_hangs_is_not_taken_for_one_that_answers(hangs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.1)
    said = f"phosd at {hangs}, process {os.getpid()}, has not answered for 0.1 s: it is stopped, or hangs"
    with pytest.raises(DaemonUnavailable, match=said):
        reach.ensure(hangs)
    # An application needs none to begin.
    started: list[str] = []
    monkeypatch.setenv("PHOS_SOCKET", str(hangs))
    monkeypatch.setenv("PHOS_DEVICE", "software")
    monkeypatch.setattr("phos.cli.run.application_environment", lambda *_: {})
    monkeypatch.setattr(os, "execv", lambda program, _: started.append(program))
    done = CliRunner().invoke(run, ["--device", "software", "--", "true"])
    assert (done.exit_code, len(started)) == (0, 1)
    assert said in done.output
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # who cannot be replaced is as before


def test_a_phosd_that_accepts_nobody_is_not_waited_for_either(hangs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ANSWER_SECONDS", 0.1)
    with ExitStack() as waiting, pytest.raises(DaemonUnavailable, match="phosd does not answer at"):
        any(waiting.enter_context(reach.connect(hangs)) is None for _ in range(20))  # more than it lets wait


def test_why_a_request_is_refused_is_told(tmp_path: Path) -> None:
    path = tmp_path / "phosd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()

        def refuse() -> None:
            wire.Connection(listening.accept()[0]).refuse("There are too many.")

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(PhosError, match="There are too many"):
            client.status(path)
        thread.join()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"The folder {tmp_path}/file/run for phosd's socket cannot be made"):
        reach.ensure(tmp_path / "file" / "run" / "phosd.sock")


def test_a_failed_start_is_not_blamed_on_what_the_log_had_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "phosd.sock"
    paths.log_file(path).write_text("CRIU failed; its own log says why.\n")
    monkeypatch.setenv("PHOS_LISTEN", "7070")
    with pytest.raises(DaemonUnavailable) as failed:
        reach.ensure(path)
    assert "PHOS_LISTEN=7070 is no address" in str(failed.value)
    assert "CRIU" not in str(failed.value)


def test_what_only_asks_whether_one_runs_loads_nothing_slow() -> None:
    """The launcher of CRIU does so before every dump and restore."""
    code = "import sys; import phos.gpu_engine.daemon.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "phos.gpu_engine.daemon.reach" in loaded
    assert not {"click", "google.protobuf", "logging", "importlib.metadata", "cuda"} & set(loaded)


@pytest.mark.parametrize("words", [[], ["--ensure"], ["--stop"], ["--socket", "a"], ["--ensure", "--socket", "a"]])
def test_command_lines_known_without_click_mean_what_they_mean_to_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path | None, bool, bool, bool]] = []

    def perform(path: Path | None = None, *, ensure: bool = False, stop: bool = False, verbose: bool = False) -> None:
        asked.append((path, ensure, stop, verbose))

    monkeypatch.setattr(program, "perform", perform)
    monkeypatch.setattr(sys, "argv", ["phosd", *words])
    __main__.main()
    command_line.main(words, standalone_mode=False)
    assert asked[0] == asked[1]


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    room = paths.PATH_BYTES - len(str(tmp_path)) - len("//keeper.sock")
    paths.refuse_unfit(tmp_path / ("x" * room) / "phosd.sock")
    too_long = tmp_path / ("x" * (room + 1)) / "phosd.sock"
    for ask in (reach.connect, reach.ensure, client.status):
        with pytest.raises(UsageError, match="is 1 bytes too long"):
            ask(too_long)
    assert not too_long.parent.exists()


# phosd's side.


def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    for number, make in enumerate((Path.touch, Path.mkdir, lambda path: path.symlink_to("/etc/passwd"))):
        path = tmp_path / str(number) / "phosd.sock"
        path.parent.mkdir()
        make(path)
        with pytest.raises(UsageError, match="is no socket, and phosd does not replace it"):
            _listen(path)
        assert path.exists()


def test_a_socket_that_is_just_being_replaced_is_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "phosd.sock"
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.bind(str(path))
            path.unlink()

    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(replace)
        try:
            for _ in range(20_000):
                paths.refuse_unfit(path)
        finally:
            done.set()
        replacing.result()


def test_the_socket_of_a_phosd_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "phosd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    listener = _listen(path)
    listener.listen(1)
    reach.connect(path).close()
    with pytest.raises(PhosError, match="Another phosd already serves"):
        _listen(path)
    listener.close()


def test_a_socket_of_that_path_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "phosd.lock").mkdir()
    with pytest.raises(NotPermitted, match=r"cannot write to .*, where its socket is"):
        _listen(tmp_path / "phosd.sock")
    with pytest.raises(UsageError, match="too long"):
        _listen(tmp_path / ("x" * 100) / "phosd.sock")


def test_an_earlier_one_is_none_of_its_business(
    answers: Callable[[wire_pb2.ImageState], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As where CRIU failed before it asked phosd for anything, or was refused because that one is still under way."""
    waited = answers(wire_pb2.ImageState(state="loading", error="not complete after 0 s", since=BEGAN - 1))
    client.show_undone("image", restore=True, began=BEGAN)
    assert max(waited) < 1
    assert capsys.readouterr().err == ""


def test_a_phosd_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*_words: object, **_names: object) -> wire_pb2.ImageState:
        raise DaemonUnavailable("phosd does not answer")

    monkeypatch.setattr(client, "wait_image", answer)
    client.show_undone("image", restore=False, began=BEGAN)
    assert capsys.readouterr().err == ""


def test_a_phosd_that_is_started_keeps_nothing_of_who_started_it(tmp_path: Path) -> None:
    """A lock, for example: it would be taken for as long as phosd runs."""
    with open(tmp_path / "lock", "w") as held:
        os.set_inheritable(held.fileno(), True)
        command = ["/bin/sh", "-c", "ls -l /proc/$$/fd; sleep 0.2"]
        lifeline = reach._start_orphan(command, dict(os.environ), tmp_path / "log")
    try:
        assert select.select([lifeline], [], [], 0)[0] == [], "it runs"
        assert os.read(lifeline, 1) == b"", "it has ended"
    finally:
        os.close(lifeline)
    said = (tmp_path / "log").read_text()
    assert str(tmp_path / "log") in said
    assert str(tmp_path / "lock") not in said


def test_a_status_of_any_length_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With some dozens of jobs it is longer than a packet may be."""
    job = wire_pb2.Status.Job(image="/" + "x" * 2000, error="y" * 2000)
    long = wire_pb2.Status(pid=7, jobs=[job] * 200)
    monkeypatch.setattr(ClientServer, "_status", lambda _server, _viewer: long)
    server = ClientServer(None, (), None)  # type: ignore[arg-type]
    before = open_descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()

        def serve() -> None:
            connection = wire.Connection(listening.accept()[0])
            while (packet := connection.receive()) is not None:
                server.serve(connection, *packet)
            connection.close()

        serving = threading.Thread(target=serve)
        serving.start()
        assert client.status(tmp_path / "s") == long
        serving.join()
    assert open_descriptors() == before


def test_a_gpu_without_room_for_a_context_of_phosds_has_a_status_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, too, ask for it."""

    def context(_ordinal: int) -> driver.Context:
        raise DriverError("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver, "context", context)
    status = status_of(broker=SimpleNamespace(left_behind=list), prepared={0})
    assert [(found.name, found.free) for found in status.gpus] == [("H100", 0)]


def test_numbers_that_fit_no_packet_keep_nobody_from_a_status() -> None:
    """One process's, which any user may have started."""
    blocks = [Block((bytes(16), number), (1 << 63) - 4096, 0, -1) for number in range(3)]
    status = status_of(broker=SimpleNamespace(left_behind=lambda: blocks))
    assert [found.held for found in status.gpus] == [(1 << 64) - 1]


def status_of(**parts: Any) -> wire_pb2.Status:
    """Of a phosd with one GPU and no processes."""
    registry = SimpleNamespace(
        versions=SimpleNamespace(phos="1", device_kind="software", cuda=13000),
        copier=SimpleNamespace(ring_bytes=1),
        pinned=SimpleNamespace(limit=1, report=list),
        jobs=SimpleNamespace(report=lambda _viewer: []),
        lock=threading.Lock(),
        sessions={},
        **{"prepared": set(), **parts},
    )
    gpu: Any = SimpleNamespace(ordinal=0, uuid="GPU-0", name="H100", total_memory=80 << 30)
    server = ClientServer(registry, [gpu], SimpleNamespace(report=list))  # type: ignore[arg-type]
    return server._status(os.geteuid())


def test_a_file_beside_a_packet_cannot_be_changed() -> None:
    file = wire.file_of("phos-test", b"as it was")
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    assert wire.content_of(file) == b"as it was"
    os.close(file)


@pytest.mark.parametrize(("timeout", "expected"), [(None, [3600.0] * 4), (5.0, [5.0])])
def test_a_job_that_copies_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timeout: float | None, expected: list[float]
) -> None:
    """Unless somebody says for how long; one that has copied nothing since is given up."""
    done = [7, 8, 20, 20, 21]
    asked: list[float] = []

    def so_long(_directory: Path, wanted: wire_pb2.WaitImage, *_: object) -> wire_pb2.ImageState:
        asked.append(wanted.timeout_s)
        return wire_pb2.ImageState(state="copying", timed_out=True, bytes_done=done[len(asked) - 1])

    monkeypatch.setattr(client, "_wait_so_long", so_long)
    assert client.wait_image(tmp_path, timeout=timeout).timed_out
    assert asked == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_phosd_that_could_not_write_its_log_is_said_to_lack_room(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "fill").write_bytes(bytes(1 << 20))
        with pytest.raises(DaemonUnavailable, match="the file system there is full"):
            reach.ensure(tmp_path / "phosd.sock")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
