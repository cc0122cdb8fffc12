"""Speaking to phosd from phos-gpu and the criu launcher.

``python -m phos.gpu_engine.daemon.client wait [--restore] DIRECTORY`` is what the launcher runs: it waits until the
image in DIRECTORY is committed (or its processes compute again) and exits 0, or says what went wrong and exits with
another status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine import job_states, procfs
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.paths import log_file, socket_path
from phos.gpu_engine.daemon.reach import ANSWER_SECONDS, connect
from phos.gpu_engine.errors import CRIU_FAILED, DaemonUnavailable, PhosError
from phos.gpu_engine.job_states import SUCCEEDED

UNDO_SECONDS = 60.0
"""How long the launcher waits for a phosd that is undoing a dump or a restore."""

IDLE_SECONDS = 3600.0
"""How long a job may copy nothing before who waits for its end gives up. In all it may take as long as it likes."""

REQUEST_SECONDS = 60.0
"""How long the answer to a request may take that waits for no job."""


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


def image_name(directory: Path | str) -> str:
    """What an image's directory is called in phosd's answers."""
    return procfs.readable(os.path.realpath(directory))


def wait_image(
    directory: Path,
    *,
    restore: bool = False,
    timeout: float | None = None,
    progress: Callable[[wire_pb2.ImageState], None] | None = None,
    path: Path | None = None,
    run: str = "",
) -> wire_pb2.ImageState:
    """Wait until the job on an image directory has ended, or ``timeout`` seconds have passed; with None,
    :data:`IDLE_SECONDS` without any data being copied.

    ``progress`` is called about ten times a second. ``run``: see :meth:`JobTable.state`.

    Raises:
        DaemonUnavailable: phosd is not there, or died; the image is then not whole unless it says so itself.
    """
    done = -1
    while True:
        asked = wire_pb2.WaitImage(progress=progress is not None, restore=restore, run=run)
        asked.timeout_s = IDLE_SECONDS if timeout is None else timeout
        state = _wait_so_long(directory, asked, progress, path)
        if not state.timed_out or timeout is not None or state.bytes_done == done:
            return state
        done = state.bytes_done


def _wait_so_long(
    directory: Path,
    asked: wire_pb2.WaitImage,
    progress: Callable[[wire_pb2.ImageState], None] | None,
    path: Path | None,
) -> wire_pb2.ImageState:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    name = image_name(directory)
    try:
        with connect(path) as connection:
            connection.settimeout(asked.timeout_s + ANSWER_SECONDS)
            wire.send(connection, wire_pb2.Envelope(id=1, wait_image=asked), [descriptor])
            while True:
                try:
                    answer = wire.receive(connection)
                except TimeoutError as error:
                    raise DaemonUnavailable(f"phosd does not answer what becomes of {name}.") from error
                if answer is None:
                    raise DaemonUnavailable(f"phosd died while the image in {name} was being worked on.")
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
        run = os.environ.get("PHOS_CRIU_RUN", "")
        state = wait_image(Path(directory), restore=restore, timeout=0.001, run=run)
        if state.since < began:
            return
        state = wait_image(Path(directory), restore=restore, timeout=UNDO_SECONDS, run=run)
        if state.timed_out:
            print("phos: phosd is still undoing its part; 'phos-gpu status' shows it.", file=sys.stderr)
        elif state.error and state.error != CRIU_FAILED:
            print(f"phos: {state.error}", file=sys.stderr)
    except (PhosError, OSError):
        pass  # that may be the reason, and somebody else has said so; or nobody reads what we write


NOTHING_DONE = (
    "phos: CRIU says that it has succeeded, but phosd knows of nothing that it did. Either it has not loaded the plugin"
    " (is it a CRIU that PHOS_CRIU names?), or phosd was started anew meanwhile."
)

MISPREDICTED = 75
"""Exit status of the launcher's helper: the checkpoint can be had by the stop protocol."""

NOBODY_KNOWS = 3
"""And this one: phosd has ended, or been started anew, before it could be asked."""


def has_come(directory: str, began: float) -> bool:
    """Whether a whole image has come into a directory since ``began`` (seconds since 1970)."""
    from phos.images.errors import ImageError  # here, because the launcher mostly needs neither
    from phos.images.reader import Image

    try:
        with Image.open(directory) as image:
            return bool(image.record.committed_ns >= began * 1e9)
    except ImageError:
        return False


def main() -> int:
    """The launcher's helper; see the module's text."""
    arguments = sys.argv[1:]
    restore = arguments[1:2] == ["--restore"] and len(arguments) > 2  # else that is the directory's name
    if len(arguments) != 2 + restore or arguments[0] != "wait":
        print("usage: python -m phos.gpu_engine.daemon.client wait [--restore] DIRECTORY", file=sys.stderr)
        return 2
    run = os.environ.get("PHOS_CRIU_RUN", "")
    try:
        state = wait_image(Path(arguments[-1]), restore=restore, run=run)
    except (PhosError, OSError) as error:
        print(f"phos: {error}", file=sys.stderr)
        return NOBODY_KNOWS
    if run and state.run != run:
        print(NOTHING_DONE, file=sys.stderr)
        return NOBODY_KNOWS
    if state.error:
        print(f"phos: {state.error}", file=sys.stderr)
    if state.state == job_states.MISPREDICTED:
        return MISPREDICTED
    return 0 if state.state in (*SUCCEEDED, "none") and not state.error else 1


if __name__ == "__main__":
    sys.exit(main())
