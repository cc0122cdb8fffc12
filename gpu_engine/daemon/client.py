"""Speaking to phosd from phos-gpu and the criu launcher.

``python -m phos.gpu_engine.daemon.client wait [--restore] DIRECTORY`` is what the launcher runs: it waits until the
image in DIRECTORY is committed (or its processes compute again) and exits 0, or says what went wrong and exits with
another status.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.paths import log_file, make_folder, refuse_unfit, socket_path
from phos.gpu_engine.errors import CRIU_FAILED, DaemonUnavailable, PhosError
from phos.gpu_engine.job_states import SUCCEEDED

UNDO_SECONDS = 60.0
"""How long the launcher waits for a phosd that is undoing a dump or a restore."""

ANSWER_SECONDS = 10.0
"""How much later than asked for an answer may come, before phosd counts as hanging."""

REQUEST_SECONDS = 60.0
"""How long the answer to a request may take that waits for no job."""

_LIFELINE = 3
"""The descriptor by whose end it is known that a phosd which is being started has ended."""

START_SECONDS = 120.0
"""How long phosd may take to start. Initialising the driver on a machine without persistence mode takes seconds, and an
emulated or overloaded machine half a minute to load Python's modules; that it ended instead is noticed at once."""


def connect(path: Path | None = None) -> socket.socket:
    """A connection to the running phosd.

    Raises:
        DaemonUnavailable: none answers there. UsageError: there can be none.
    """
    path = path or socket_path()
    refuse_unfit(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # One that accepts nobody any more keeps everybody waiting. Not settimeout(): no place would be waited for then.
        wire.limit(connection, send=ANSWER_SECONDS)
        connection.connect(str(path))
        wire.limit(connection, send=0)
    except OSError as error:
        connection.close()
        raise DaemonUnavailable(
            f"phosd does not answer at {path} ({error.strerror}). "
            "Start it with 'phosd --ensure' or 'systemctl start phosd'."
        ) from error
    return connection


def ensure(path: Path | None = None) -> None:
    """Start phosd in the background unless it runs, and wait until it answers.

    Raises:
        DaemonUnavailable: it did not come up; the message carries the end of its log.
    """
    path = path or socket_path()
    try:
        connect(path).close()
        return
    except DaemonUnavailable:
        pass
    make_folder(path)
    # NOTIFY_SOCKET: it is not phosd that the service manager of whoever needs it waits for.
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "NOTIFY_SOCKET")}
    # As isolated as we are: an installed phosd must not find the packages of the folder that a user stands in.
    isolated = ["-I"] if sys.flags.isolated else []
    command = [sys.executable, *isolated, "-m", "phos.gpu_engine.daemon", "--socket", str(path)]
    before = _size(log_file(path))
    lifeline = _start_orphan(command, environment, log_file(path))
    deadline = time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline:
            ended = bool(select.select([lifeline], [], [], 0.01)[0])
            try:
                connect(path).close()  # if ours has ended: another was started at the same moment, and won
                return
            except DaemonUnavailable:
                if ended:
                    break
    finally:
        os.close(lifeline)
    try:
        with log_file(path).open("rb") as log:
            # Of this start alone: what an earlier phosd ended with is not why this one did not come up.
            log.seek(before if before <= _size(log_file(path)) else 0)  # it may have been cut meanwhile
            tail = log.read().decode(errors="replace").strip().splitlines()[-3:] or ["it said nothing."]
    except OSError as error:
        tail = [f"its log cannot be read or written ({error.strerror})."]
    raise DaemonUnavailable(f"phosd could not be started at {path}: {' '.join(tail)} (log: {log_file(path)})")


def _size(file: Path) -> int:
    """Bytes; 0 if it cannot be told."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _start_orphan(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Start a program that is nobody's child. Returns a descriptor that reads end of file when it has ended.

    ``phos-gpu run`` becomes the application: were phosd its child, CRIU would dump phosd as part of the application.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                null = os.open(os.devnull, os.O_RDONLY)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(null, 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                if write_end != _LIFELINE:
                    os.dup2(write_end, _LIFELINE)
                os.set_inheritable(_LIFELINE, True)
                # What else we have inherited is none of its business: a lock would be taken for as long as it runs.
                for name in os.listdir("/proc/self/fd"):
                    if int(name) > _LIFELINE:
                        with suppress(OSError):  # the one by which they were listed
                            os.close(int(name))
                os.chdir("/")
                os.execve(command[0], command, environment)
            finally:
                os._exit(127)
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    return read_end


def request(
    path: Path | None, descriptors: list[int] | None = None, *, timeout: float | None = None, **body: object
) -> wire_pb2.Envelope:
    """One request, one answer, for which ``timeout`` seconds are waited (:data:`REQUEST_SECONDS`).

    Raises:
        DaemonUnavailable: phosd is not there, ends before it answers, or does not answer.
    """
    answer, beside = _ask(path, descriptors, timeout, **body)
    wire.close_all(beside)
    return answer


def _ask(
    path: Path | None, descriptors: list[int] | None = None, timeout: float | None = None, **body: object
) -> tuple[wire_pb2.Envelope, list[int]]:
    """As :func:`request`, with what came beside the answer, for the caller to close."""
    path = path or socket_path()
    with connect(path) as connection:
        connection.settimeout(REQUEST_SECONDS if timeout is None else timeout)
        try:
            with suppress(BrokenPipeError):  # it has hung up, and may have said why
                wire.send(connection, wire_pb2.Envelope(id=1, **body), descriptors or [])  # type: ignore[arg-type]
            answer = wire.receive(connection)
        except TimeoutError as error:
            raise DaemonUnavailable(
                f"phosd at {path} has not answered for {connection.gettimeout():.0f} s. Its log ({log_file(path)}, or "
                "'journalctl -u phosd') may say why. Applications run on if it is killed and started anew."
            ) from error
    if answer is None:
        raise DaemonUnavailable("phosd ended before it answered.")
    return answer


def status(path: Path | None = None) -> wire_pb2.Status:
    """What phosd knows of GPUs, processes and jobs.

    Raises:
        DaemonUnavailable: as :func:`request`. PhosError: phosd's reason not to say it.
    """
    answer, beside = _ask(path, status_request=wire_pb2.StatusRequest())
    try:
        if answer.done.error:
            raise PhosError(answer.done.error)
        return wire_pb2.Status.FromString(wire.content_of(wire.only(beside)))
    finally:
        wire.close_all(beside)


def shutdown(path: Path | None = None) -> None:
    """Ask phosd to end, and wait until it has. Applications run on; their memory stays held by the keeper."""
    path = path or socket_path()
    with connect(path) as connection:
        connection.settimeout(REQUEST_SECONDS)
        try:
            wire.send(connection, wire_pb2.Envelope(id=1, shutdown=wire_pb2.Shutdown()))
            answer = wire.receive(connection)
        except TimeoutError as error:
            raise DaemonUnavailable(f"phosd at {path} does not answer.") from error
        connection.settimeout(None)
        if answer is not None and answer[0].done.error:
            raise PhosError(answer[0].done.error)
        wire.receive(connection)  # end of file: its process is gone


def interrupt(criu: int, path: Path | None = None) -> None:
    """Ask phosd to end what the plugin of that CRIU has begun; who waits for the image learns what became of it."""
    with suppress(PhosError, OSError):  # it has ended, or hangs: CRIU is ended all the same, where that harms nobody
        request(path, timeout=ANSWER_SECONDS, interrupt=wire_pb2.Interrupt(criu=criu))


def wait_image(
    directory: Path,
    *,
    restore: bool = False,
    timeout: float = 3600.0,
    progress: Callable[[wire_pb2.ImageState], None] | None = None,
    path: Path | None = None,
) -> wire_pb2.ImageState:
    """Wait until the job on an image directory has ended, or ``timeout`` seconds have passed.

    ``progress`` is called about ten times a second.

    Raises:
        DaemonUnavailable: phosd is not there, or died; the image is then not whole unless it says so itself.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with connect(path) as connection:
            connection.settimeout(timeout + ANSWER_SECONDS)
            asked = wire_pb2.WaitImage(timeout_s=timeout, progress=progress is not None, restore=restore)
            wire.send(connection, wire_pb2.Envelope(id=1, wait_image=asked), [descriptor])
            while True:
                try:
                    answer = wire.receive(connection)
                except TimeoutError as error:
                    raise DaemonUnavailable(f"phosd does not answer what becomes of {directory}.") from error
                if answer is None:
                    raise DaemonUnavailable(f"phosd died while the image in {directory} was being worked on.")
                state = answer[0].image_state
                if state.final:
                    return state
                if progress:
                    progress(state)
    finally:
        os.close(descriptor)


def show_undone(directory: str, *, restore: bool, began: float) -> None:
    """After a CRIU that failed: return when phosd has undone what it did for that, and tell the user why, if it knows.

    ``began``: when CRIU was started, in seconds since 1970. A job of before that is none of this CRIU's.
    """
    try:
        state = wait_image(Path(directory), restore=restore, timeout=0.001)
        if state.since < began:
            return
        state = wait_image(Path(directory), restore=restore, timeout=UNDO_SECONDS)
        if state.timed_out:
            print("phos: phosd is still undoing its part; 'phos-gpu status' shows it.", file=sys.stderr)
        elif state.error and state.error != CRIU_FAILED:
            print(f"phos: {state.error}", file=sys.stderr)
    except (PhosError, OSError):
        pass  # that may be the reason, and somebody else has said so; or nobody reads what we write


MISPREDICTED = 75
"""Exit status of the launcher's helper: the checkpoint can be had by the stop protocol."""


def main() -> int:
    """The launcher's helper; see the module's text."""
    arguments = sys.argv[1:]
    restore = "--restore" in arguments
    names = [argument for argument in arguments if not argument.startswith("--")]
    if len(names) != 2 or names[0] != "wait":
        print("usage: python -m phos.gpu_engine.daemon.client wait [--restore] DIRECTORY", file=sys.stderr)
        return 2
    try:
        state = wait_image(Path(names[1]), restore=restore)
    except (PhosError, OSError) as error:
        print(f"phos: {error}", file=sys.stderr)
        return 3
    if state.error:
        print(f"phos: {state.error}", file=sys.stderr)
    if state.state == "mispredicted":
        return MISPREDICTED
    return 0 if state.state in (*SUCCEEDED, "none") and not state.error else 1


if __name__ == "__main__":
    sys.exit(main())
