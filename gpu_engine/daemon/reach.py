"""Reaching phosd: a connection to the one that runs, and the start of one in the background where none does.

Without protobuf: the launcher of CRIU asks for it before every dump and restore, and most of the time one runs.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from phos.gpu_engine.daemon import blocking
from phos.gpu_engine.daemon.paths import lock_file, log_file, make_folder, refuse_unfit, socket_path
from phos.gpu_engine.errors import DaemonUnavailable

ANSWER_SECONDS = 10.0
"""How much later than asked for an answer may come, before phosd counts as hanging."""

NOT_FOR_PHOSD = ("LD_PRELOAD", "NOTIFY_SOCKET", "PHOS_GUARD")
"""Of the environment of whoever starts it: it is not phosd that his service manager waits for, nor part of his job."""

FOR_ONE_COMMAND = (
    "PHOS_PROTOCOL",
    "PHOS_COW_POOL",
    "PHOS_VALIDATE",
    "PHOS_PRIORITISE",
    "PHOS_RESTORE",
    "PHOS_RESTORE_GPUS",
    "PHOS_LAZY",
    "PHOS_GROWN_FILES",
)
"""And of a command that checkpoints or restores: it tells phosd itself. Else it would hold for all that come later.
packaging/criu and packaging/supervise.py have the same."""

_CREDENTIALS = struct.Struct("3i")

_LIFELINE = 3
"""The descriptor by whose end it is known that a phosd which is being started has ended."""

START_SECONDS = 120.0
"""How long phosd may take to start. Initialising the driver on a machine without persistence mode takes seconds, and an
emulated or overloaded machine half a minute to load Python's modules; that it ended instead is noticed at once."""


class Hanging(DaemonUnavailable):
    """phosd is there, and does not answer."""


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
        blocking.limit(connection, send=ANSWER_SECONDS)
        connection.connect(str(path))
        blocking.limit(connection, send=0)
    except OSError as error:
        connection.close()
        raise DaemonUnavailable(
            f"phosd does not answer at {path} ({error.strerror}). "
            "Start it with 'phosd --ensure' or 'systemctl start phosd'."
        ) from error
    return connection


def ensure(path: Path | None = None, without: Collection[str] = ()) -> None:
    """Start phosd in the background unless it runs, and wait until it answers.

    ``without``: variables of the environment that are not for it.

    Raises:
        DaemonUnavailable: it did not come up; the message carries the end of its log. Hanging: one is there, but
            does not answer.
    """
    path = path or socket_path()
    if _answers(path):
        return
    make_folder(path)
    environment = {name: value for name, value in os.environ.items() if name not in (*NOT_FOR_PHOSD, *without)}
    # As isolated as we are: an installed phosd must not find the packages of the folder that a user stands in.
    isolated = ["-I"] if sys.flags.isolated else []
    command = [sys.executable, *isolated, "-m", "phos.gpu_engine.daemon", "--socket", str(path)]
    deadline = time.monotonic() + START_SECONDS
    while True:
        # Another one may have been started at the same moment, and answers when it has initialised the driver; or one
        # ends, and has the lock to its last moment.
        if _wait(path, deadline, partial(_is_free, path)):
            return
        before = _size(log_file(path))
        lifeline = _start_orphan(command, environment, log_file(path))
        try:
            if _wait(path, deadline, partial(_has_ended, lifeline)):
                return
        finally:
            os.close(lifeline)
        if time.monotonic() > deadline or _is_free(path):
            break
    try:
        with log_file(path).open("rb") as log:
            # Of this start alone: what an earlier phosd ended with is not why this one did not come up.
            log.seek(before if before <= _size(log_file(path)) else 0)  # it may have been cut meanwhile
            tail = log.read().decode(errors="replace").strip().splitlines()[-3:] or [_silence(path)]
    except OSError as error:
        tail = [f"its log cannot be read or written ({error.strerror})."]
    raise DaemonUnavailable(f"phosd could not be started at {path}: {' '.join(tail)} (log: {log_file(path)})")


def _silence(path: Path) -> str:
    """Why a phosd may have said nothing: it writes into the folder of its socket."""
    status = os.statvfs(path.parent)
    full = not status.f_bavail or (status.f_files and not status.f_favail)
    return "it said nothing; the file system there is full." if full else "it said nothing."


def _wait(path: Path, deadline: float, in_vain: Callable[[], bool]) -> bool:
    """Wait until a phosd answers, and say whether one does; no longer than that makes sense, nor than `deadline`."""
    while True:
        last = in_vain() or time.monotonic() > deadline  # asked before the connection: it may answer in between
        if _answers(path):
            return True
        if last:
            return False
        time.sleep(0.01)


def _answers(path: Path) -> bool:
    """Whether a phosd lives there: the socket of one that was killed takes connections to its last moment.

    One that is alive closes a connection over which nothing will come. One that dies has its connections closed by the
    kernel, but after its memory.

    Raises:
        Hanging: it is there and does not answer.
    """
    hangs = False
    try:
        with connect(path) as connection:
            blocking.limit(connection, receive=ANSWER_SECONDS)
            pid, _, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            connection.shutdown(socket.SHUT_WR)
            try:
                connection.recv(1)
            except BlockingIOError:
                hangs = True
    except (DaemonUnavailable, OSError):
        return False
    lives = _lives(pid)
    if hangs and lives:
        raise Hanging(
            f"phosd at {path}{f', process {pid},' if pid else ''} has not answered for {ANSWER_SECONDS:g} s: it is "
            f"stopped, or hangs. Its log ({log_file(path)}, or 'journalctl -u phosd') may say why. Applications run on "
            "if it is killed and started anew."
        )
    return lives


def _lives(pid: int) -> bool:
    """Whether a process has not begun to end."""
    try:
        return pid == 0 or Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # 0: in another pid namespace
    except FileNotFoundError:  # it has ended, or nobody may see it
        return _exists(pid)
    except OSError:
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _has_ended(lifeline: int) -> bool:
    """Whether what `_start_orphan` has started is gone."""
    return bool(select.select([lifeline], [], [], 0)[0])


def _is_free(path: Path) -> bool:
    """Whether no phosd has the lock of the folder.

    /proc/locks (proc(5)) tells who has it; to try would be to take it from one that starts. Of the device that is named
    there nothing is asked: a layered file system has another one. Who is just ending has no command line any more.
    """
    try:
        inode = str(lock_file(path).stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        holders = [of[4] for of in locks if of[1] == "FLOCK" and of[5].rpartition(":")[2] == inode]
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in holders]
        return not any(b"phos" in command or not command for command in commands)
    except OSError:
        return True


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
