"""phosd's side of a parked process: its warden, and CRIU in the warden's namespaces."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phos.gpu_engine.daemon.keeper import receive
from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.installation import launcher, plugin_folder
from phos.gpu_engine.restore import pool_warden

START_SECONDS = 30.0
CRIU_SECONDS = 600.0
"""How long CRIU may take for one process."""

NOISE = ("RLIMIT", "Warn ")


def far_from(pids: list[int]) -> int:
    """A pid before CRIU's own, with room above it, that no task of the image has: ``pids`` are those of all of them."""
    try:
        limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        limit = 32768
    room, at = 200, limit - 400
    while at > 400 and any(at <= pid <= at + room for pid in pids):
        at -= room
    return at


class Warden:
    """A warden and everything in its namespaces. Usable from several threads, :meth:`wait_restored` from one."""

    def __init__(self, image: Path, log: Path, environment: Mapping[str, str], avoid: list[int]) -> None:
        """Start CRIU on an image; ``environment`` is the warden's, and CRIU's.

        ``avoid``: the numbers of processes and threads that CRIU will need.

        Raises:
            RestoreFailed: the namespaces cannot be made.
        """
        self.log = log
        self._said = b""
        self._given: list[int] = []  # descriptors that came with what it has said
        self._lock = threading.Lock()  # guards pidfd against being closed while it is used
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lifeline = mine
        verbosity = "-v" + environment.get("PHOS_CRIU_VERBOSITY", "2")
        command = [
            *(sys.executable, "-I", "-S", pool_warden.__file__, str(its.fileno()), str(far_from(avoid))),
            # The plugin's folder, not "--lib phos": the launcher would wait until the process computes.
            *(str(launcher("criu")), "restore", "-L", str(plugin_folder()), "--restore-detached"),
            *("--shell-job", "-D", str(image), "-W", str(log.parent), "-o", log.name, verbosity),
        ]
        try:
            with its, open(log.with_suffix(".out"), "wb") as output:
                starter = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
            starter.wait()
            answer = self._hear(START_SECONDS)
            if "pid" not in answer:
                raise RestoreFailed(f"No process can be parked: {answer.get('error', 'its warden did not start')}.")
            if not self._given:
                raise RestoreFailed("No process can be parked: phosd has no descriptors left.")
            self.pid, self.pidfd = int(str(answer["pid"])), self._given[0]
        except (OSError, RestoreFailed) as error:
            mine.close()
            if isinstance(error, RestoreFailed):
                raise
            raise RestoreFailed(f"No process can be parked: {error}.") from error

    def _hear(self, seconds: float) -> dict[str, object]:
        """What it says next; nothing, if it has ended.

        Raises:
            TimeoutError: it says nothing for so long.
        """
        poll = select.poll()  # not select(): descriptor numbers go far beyond its 1024, there are some for each block
        poll.register(self._lifeline, select.POLLIN)
        while b"\n" not in self._said:
            if not poll.poll(seconds * 1000):
                raise TimeoutError(f"its warden says nothing for {seconds:.0f} s")
            try:
                more, given, _ = receive(self._lifeline, 4096, 1)
            except OSError:
                more, given = b"", []
            self._given += given
            if not more:
                return {}
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        heard: dict[str, object] = json.loads(line)
        return heard

    def wait_restored(self) -> None:
        """Return when CRIU has ended well.

        Raises:
            RestoreFailed: it has not; everything in the namespaces is gone, or about to go.
        """
        try:
            answer = self._hear(CRIU_SECONDS)
        except TimeoutError as error:
            raise RestoreFailed(f"CRIU did not end within {CRIU_SECONDS:.0f} s. Its log: {self.log}") from error
        if answer.get("criu") == 0:
            return
        if "error" in answer:
            raise RestoreFailed(f"No process can be parked: {answer['error']}.")
        raise RestoreFailed(f"CRIU could not restore it: {self._errors()} Its log: {self.log}")

    def _errors(self) -> str:
        lines: list[str] = []
        for path in (self.log, self.log.with_suffix(".out")):
            with suppress(OSError):
                text = path.read_text(errors="replace").splitlines()
                lines += [line for line in text if "Error" in line and not any(n in line for n in NOISE)]
        return " ".join(lines[:4]) or "it was ended."

    def taken(self) -> None:
        """Its process belongs to somebody: it lives on without phosd."""
        with suppress(OSError):
            self._lifeline.sendall(pool_warden.TAKEN)

    def end(self) -> None:
        """End it, with everything in its namespaces."""
        with self._lock, suppress(OSError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait_ended(self, seconds: float) -> None:
        """Return when nothing of it is left, or so many seconds have passed."""
        with self._lock:
            descriptor = os.dup(self.pidfd) if self.pidfd >= 0 else -1
        if descriptor >= 0:
            gone = select.poll()
            gone.register(descriptor, select.POLLIN)
            gone.poll(int(seconds * 1000))
            os.close(descriptor)

    def close(self) -> None:
        """Let its descriptors go; it may be called twice."""
        with self._lock:
            if self.pidfd >= 0:
                self._lifeline.close()
                os.close(self.pidfd)
                self.pidfd = -1
