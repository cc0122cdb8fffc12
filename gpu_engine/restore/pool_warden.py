"""The first process of a parked process's pid namespace: starts CRIU there, and reaps whatever ends there.

CRIU restores processes under the pids that they had, so every process of a pool has a pid namespace of its own, with a
/proc that shows it. Linux ends all that is in such a namespace with its first process. That makes the warden the one
handle on everything: phosd holds the other end of its lifeline, and whoever closes that end before it has said
``taken`` (phosd's death does) ends the warden, and with it the parked process.

It runs as ``python -I -S pool_warden.py LIFELINE LAST_PID PROGRAM [ARGUMENT...]`` with the standard library alone:
LIFELINE is the number of a stream socket, LAST_PID the pid before CRIU's own, far from those that it will need. What it
says there are JSON objects, one a line: ``{"pid": n}`` (the warden's, as phosd sees it), ``{"criu": wait status}``,
``{"error": sentence}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

CLONE_NEWNS = 0x20000
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 0x4000, 1 << 19

TAKEN = b"taken\n"

WARDEN_NAME = "phos-pool"
"""What the first process of such a namespace is called."""


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _say(lifeline: socket.socket, descriptors: Sequence[int] = (), **what: object) -> None:
    with contextlib.suppress(OSError):
        socket.send_fds(lifeline, [json.dumps(what).encode() + b"\n"], descriptors)


def start(lifeline: socket.socket, last_pid: str, command: list[str]) -> None:
    """Make the namespaces and the warden in them; this process is done then, so that the warden is nobody's child.

    Raises:
        OSError: the kernel does not let us.
    """
    _call("unshare", CLONE_NEWPID | CLONE_NEWNS)
    # What is mounted outside later is seen in here; not the other way round.
    _call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)
    introduced, introducing = os.pipe()
    pid = os.fork()
    if pid:
        # The warden may end at once, and be waited for by whoever is its parent then; until this returns it is ours.
        _say(lifeline, [os.pidfd_open(pid)], pid=pid)
        return
    try:
        # Who listens wants to know first whose words these are. Nothing comes here but the end, which is its maker's.
        os.close(introducing)
        os.read(introduced, 1)
        os.close(introduced)
        os.setsid()
        _call("prctl", 15, WARDEN_NAME.encode(), 0, 0, 0)  # PR_SET_NAME
        _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC), None)
        with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(last_pid)
        serve(lifeline, command)
    except Exception as error:
        _say(lifeline, error=str(error))
    finally:
        os._exit(0)


def serve(lifeline: socket.socket, command: list[str]) -> None:
    """Until nothing is left in here, or nobody wants it."""
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    criu = os.posix_spawn(command[0], command, os.environ, setsigdef=[signal.SIGPIPE, signal.SIGCHLD])
    listening = lifeline.fileno()
    poll = select.poll()  # not select(): the lifeline has the number that it had in phosd, which may be beyond 1024
    poll.register(wake_read, select.POLLIN)
    poll.register(listening, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if listening in ready:
            said = b""
            with contextlib.suppress(ConnectionError):
                said = lifeline.recv(64)
            if said != TAKEN:
                return
            poll.unregister(listening)
            lifeline.close()
            listening = -1
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == criu and listening >= 0:
                    _say(lifeline, criu=status)
        except ChildProcessError:
            _wait_until_alone()
            return


def _alone() -> bool:
    return not any(name.isdigit() and name != "1" for name in os.listdir("/proc"))


def _wait_until_alone() -> None:
    """CRIU may have come in here from outside, to dump what has just ended; it must not end with it."""
    while not _alone():
        time.sleep(0.02)


def main() -> None:
    """See the module's text."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    lifeline.set_inheritable(False)
    try:
        start(lifeline, sys.argv[2], sys.argv[3:])
    except OSError as error:
        _say(lifeline, error=f"a pid namespace for it cannot be made ({error})")


if __name__ == "__main__":
    main()
