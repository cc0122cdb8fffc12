"""Holds: how a detached process waits without a descriptor.

CRIU refuses a process with a socket connected to phosd, and cannot be asked when exactly it freezes one. So a detached
frontend only looks, with readlink(), for ``hold/<session>`` beside phosd's socket: while that link names a living phosd
it waits; when the link is gone it connects. The link's text is ``<pid>:<start time>`` of phosd (field 22 of
/proc/PID/stat), so that a hold left behind by a phosd that was killed is recognised, and the pid namespaces of phosd
and of the process that is held: one of another namespace that comes from the same image does not wait.
"""

from __future__ import annotations

import os
from pathlib import Path

from phos.gpu_engine.procfs import pid_namespace, start_time

FOLDER_MODE = 0o711
"""Everybody may look up the own session, whose number is a secret between users; nobody may list them."""


class Holds:
    """The holds that this phosd has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)  # whatever the umask is, or an earlier phosd had
        self._text = f"{os.getpid()}:{start_time(os.getpid())}:{pid_namespace(os.getpid())}"

    def _path(self, session: bytes) -> Path:
        return self._folder / session.hex()

    def place(self, session: bytes, pid: int) -> None:
        """From now on the session's frontend, which is in process ``pid``, waits once it is detached."""
        self.release(session)
        self._path(session).symlink_to(f"{self._text}:{pid_namespace(pid)}")

    def release(self, session: bytes) -> None:
        """The session's frontend may connect."""
        self._path(session).unlink(missing_ok=True)

    def clear_stale(self) -> None:
        """Remove what an earlier phosd left behind (it may have had our pid: see Daemon's renewal)."""
        for path in self._folder.iterdir():
            if path.is_symlink():
                path.unlink(missing_ok=True)
