"""The job that ``phos-gpu guard`` watches over: starting it, seeing its end, clearing away what is left of it."""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import struct
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import psutil

from phos.cli.criu import terminals, tree_of
from phos.gpu_engine import procfs
from phos.gpu_engine.errors import Unsupported

CLEAR_SECONDS = 20.0
"""How long killed processes may take to be gone: a driver may have much to free."""

LINGER_SECONDS = 1.0
"""How long what serves a job may take to notice its end: Python's resource tracker, for example."""

MARK = "PHOS_GUARD"
"""In the environment of what a guard starts, by which it finds what is left of it."""

_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info of 64 bytes); Linux 6.13."""
_PIDFD_INFO_EXIT = 1 << 3
"""Linux 6.15: tells the status also of processes that are not our children."""


@dataclass(frozen=True)
class End:
    """How a job ended. ``code``: exit status, negative for a signal's number; None: nobody knows."""

    code: int | None

    @property
    def exit_status(self) -> int:
        """What a shell would say."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code is None:
            return "ended, nobody knows how"
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            return f"was ended by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"


def refuse_unfit(pid: int) -> None:
    """A process that runs is guarded only if it could be brought back.

    Raises:
        NoSuchProcess: there is no such process.
        Unsupported: it would be restored under the number that it has in another namespace, and nobody would find it;
            or with a terminal, and whoever started the guard may have none any more by then.
    """
    if procfs.pid_namespace(pid) not in (0, procfs.pid_namespace(os.getpid())):
        raise Unsupported(
            f"Process {pid} has a pid namespace of its own, as one from a pool or in a container: the guard would not "
            "find it again after a restore. Run the guard in there, or checkpoint it with 'phos-gpu checkpoint'."
        )
    if opened := terminals(tree_of(pid)):
        raise Unsupported(
            f"Process {pid} has a terminal open ({', '.join(sorted(opened))}), and the guard could not bring it back "
            "without one. Have the guard start it, or start it with its input and output in files."
        )


class MemoryFile:
    """What a program writes, as much as it likes."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("output", os.MFD_CLOEXEC)

    def begin(self) -> int:
        """A descriptor for another program to write to."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return self._descriptor

    def text(self) -> str:
        """All that it has written."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode(errors="replace")


def become_reaper() -> None:
    """Let what CRIU restores, and what the job leaves behind, become children of this process."""
    pr_set_child_subreaper = 36
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Job:
    """One process and those below it, from its start or restore to its end."""

    def __init__(self, pid: int, mark: bytes = b"") -> None:
        """Watch over a process that runs, whosever child it is.

        ``mark``: see MARK; as an environment has it, if that is known.

        Raises:
            ProcessLookupError: there is none.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._end: End | None = None
        self._members: dict[int, psutil.Process] = {}
        self._session = os.getsid(pid)
        self._mark = mark or _mark_of(pid)
        self.look_around()

    @staticmethod
    def start(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Job:
        """Start a program in a session of its own, with its output appended to a file.

        Raises:
            OSError: it cannot be started.
        """
        # Those below it have it too, and when they are restored: in sessions of their own, and without their parents.
        mark = secrets.token_hex(8)
        environment = {**environment, MARK: mark}
        # Nothing of a terminal or a pipe: CRIU would have to save it. Files that are only appended to may have grown
        # when a process is restored; others must be as long as they were.
        with open(output, "ab") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        process.returncode = 0  # this class waits for it
        return Job(process.pid, f"{MARK}={mark}".encode())  # it may have ended already

    def look_around(self) -> None:
        """Take note of the processes below it, to know what is left when it has ended."""
        try:
            root = self._members.setdefault(self.pid, psutil.Process(self.pid))
            for child in root.children(recursive=True):
                self._members[child.pid] = child
        except psutil.Error:
            pass

    def poll(self) -> End | None:
        """How it ended, or None while it runs."""
        if self._end is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self._end = End(os.waitstatus_to_exitcode(status))
            except ChildProcessError:  # not ours
                poller = select.poll()
                poller.register(self._descriptor, select.POLLIN)
                if poller.poll(0):
                    self._end = End(self._foreign_status())
        return self._end

    def _foreign_status(self) -> int | None:
        """The exit status of somebody else's child: from its zombie, or, once that is reaped, from a newer kernel."""
        for _ in range(20):
            try:
                with open(f"/proc/{self.pid}/stat") as stat:
                    fields = stat.read().rpartition(") ")[2].split()
                if fields[0] == "Z":
                    return os.waitstatus_to_exitcode(int(fields[49]))
            except (OSError, ValueError, IndexError):
                pass
            info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
            try:
                ioctl(self._descriptor, _PIDFD_GET_INFO, info)
                if struct.unpack_from("=Q", info)[0] & _PIDFD_INFO_EXIT:
                    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, 60)[0])
            except (OSError, ValueError):
                pass
            time.sleep(0.01)
        return None

    def send(self, number: int) -> None:
        """Send it a signal; from a keyboard to the whole process group, as a terminal does.

        Not once its end is known: its number may be another's then, or that of what CRIU is just putting together.
        """
        if self._end is not None:
            return
        try:
            if number in (signal.SIGINT, signal.SIGQUIT) and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            pass

    def ignores(self, number: int) -> bool:
        """Whether it will not end by a signal, because it ignores it."""
        return procfs.ignores(self.pid, number)

    def clear_away(self, spared: Collection[int]) -> list[int]:
        """After its end: kill what is left of it, so that its pids are free. Returns what is still there in the end.

        ``spared``: pids that are none of its.
        """
        deadline = time.monotonic() + CLEAR_SECONDS
        while True:
            left = [process for process in self._left() if process.pid not in spared]
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    pass
            reap(spared)
            if not left or time.monotonic() > deadline:
                return [process.pid for process in left]
            time.sleep(0.01)

    def left_running(self, spared: Collection[int]) -> list[int]:
        """After its end: what runs on of it, and does not end within a moment."""
        deadline = time.monotonic() + LINGER_SECONDS
        while True:
            reap(spared)
            found = [process.pid for process in self._left() if process.pid not in spared]
            left = [pid for pid in found if procfs.is_alive(pid)]
            if not left or time.monotonic() > deadline:
                return sorted(left)
            time.sleep(0.02)

    def _left(self) -> list[psutil.Process]:
        left = {pid: process for pid, process in self._members.items() if process.is_running()}
        owns_session = self._session in self._members  # it is not that of a shell
        for process in psutil.process_iter():
            with suppress(OSError):
                if (owns_session and os.getsid(process.pid) == self._session) or (
                    self._mark and _mark_of(process.pid) == self._mark
                ):
                    left[process.pid] = process
        return list(left.values())

    def close(self) -> None:
        """Watch no longer."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _mark_of(pid: int) -> bytes:
    """What a process has in its environment from the guard that started it, or its ancestor; else nothing."""
    found = (entry for entry in procfs.environment(pid).split(b"\0") if entry.startswith(f"{MARK}=".encode()))
    return next(found, b"")


def reap(spared: Collection[int]) -> None:
    """Free the pids of ended children that came to us as orphans; ``spared`` are waited for elsewhere."""
    for child in psutil.Process().children():
        try:
            if child.pid not in spared and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            pass
