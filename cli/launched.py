"""The programs that a command starts, CRIU's launcher mostly, and what a signal to the command does to them.

They are in sessions of their own: a terminal sends SIGINT to everybody in the command's process group, and CRIU, ended
in the middle of its work inside a process, takes that process with it. A signal that would end the command is passed on
to the launcher (packaging/supervise.py) as SIGTERM, which undoes what was begun; the command waits for that. Who is to
give a terminal to what it restores stays in its session, in a process group of its own.

Imported before anything slow (restore_first.py), and so imports nothing slow.
"""

import fcntl
import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(Exception):
    """A signal has ended the command; the message says what holds now."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


def heed(numbers: "Sequence[int]", handler: "Callable[[int, Any], None]", former: "list[tuple[int, Any]]") -> None:
    """Have signals handled, but for those that whoever started this process has had it ignore: by nohup, for example.

    ``former``: gets each number with what handled it before; for :func:`handle_as_before`.
    """
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            former.append((number, signal.signal(number, handler)))


def handle_as_before(former: "list[tuple[int, Any]]") -> None:
    """Signals mean again what they meant before :func:`heed`."""
    while former:
        number, handler = former.pop()
        signal.signal(number, handler)


class Launched:
    """One program that is waited for, and perhaps others at its side; their output goes to a file in memory."""

    def __init__(self) -> None:
        self.interrupted = 0
        """The signal that came first since the program was started, if any has."""
        self.when_late: Callable[[], object] | None = None
        """What a signal is to do once the program has ended: a function, or None."""
        self._pid = 0
        self._runs = False
        self._entered = False  # the program itself is the child of the one that was started
        self._handlers: list[tuple[int, Any]] = []
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken = -1
        self._foreground = 0
        """The process group that had the terminal which was handed on; 0 if none was."""
        self._output = os.memfd_create("output")
        # Two programs share its offset, which the kernel does not lock in a memfd: one would overwrite the other.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)

    def start_beside(self, command: list[str], changes: dict[str, str], *, terminal: bool = False) -> int:
        """Start a program that somebody else waits for; returns its pid.

        ``changes``: of its environment. ``terminal``: it gets that of our standard input.

        Raises:
            OSError: it cannot be started.
        """
        streams: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, self._output, 1),
            (os.POSIX_SPAWN_DUP2, self._output, 2),
        ]
        if not terminal:
            streams.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        # A terminal belongs to one session; whoever is in another cannot give it to a process group.
        group: dict[str, Any] = {"setpgroup": 0} if terminal else {"setsid": True}
        return os.posix_spawnp(
            command[0],
            command,
            {**os.environ, **changes},
            file_actions=streams,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them, and ignoring is inherited
            **group,
        )

    def start(
        self, command: list[str], changes: dict[str, str], *, entered: bool = False, terminal: bool = False
    ) -> None:
        """Start the program; from here on a signal is passed on to it.

        ``entered``: by nsenter, as its child. ``terminal``: see :meth:`start_beside`; it has it until it has ended.

        Raises:
            OSError: it cannot be started.
        """
        if terminal:
            try:
                self._foreground = os.tcgetpgrp(0)
            except OSError:
                pass  # it is another session's
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._pid, self._entered = self.start_beside(command, changes, terminal=terminal), entered
            self._runs = True
            self._woken = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
            heed(ENDING, self._received, self._handlers)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def _received(self, number: int, _frame: object) -> None:
        if self.interrupted:
            return  # it is being undone
        self.interrupted = number
        try:
            os.write(2, b"Interrupted: what was begun is undone first.\n")
        except OSError:
            pass  # nobody reads it
        if self._runs:
            os.kill(self._program(), signal.SIGTERM)
        elif self.when_late is not None:
            self.when_late()

    def _program(self) -> int:
        if self._entered:
            with open(f"/proc/{self._pid}/task/{self._pid}/children") as children:
                if inside := children.read().split():
                    return int(inside[0])
        return self._pid

    def wait(self) -> int:
        """Wait for the program's end. Returns its exit status, or the negative number of a signal."""
        poll, pidfd = select.poll(), os.pidfd_open(self._pid)
        poll.register(pidfd, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        # A signal that comes just before another call of the kernel would be handled only when that returns.
        while pidfd not in [found for found, _ in poll.poll()]:
            os.read(self._wake[0], 4096)
        os.close(pidfd)
        self._runs = False  # from here on nobody signals it
        _, status = os.waitpid(self._pid, 0)
        if self._foreground:
            self._take_terminal_back()
        return os.waitstatus_to_exitcode(status)

    def _take_terminal_back(self) -> None:
        """What was restored has become the terminal's foreground, and a shell script would be stopped when it reads."""
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])  # sent to who is not in the foreground
        try:
            os.tcsetpgrp(0, self._foreground)
        except OSError:
            pass  # the terminal is gone
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def said(self) -> str:
        """What the programs wrote to their output."""
        return os.pread(self._output, os.fstat(self._output).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Signals mean again what they meant before."""
        if self._handlers:
            signal.set_wakeup_fd(self._woken)
        handle_as_before(self._handlers)
