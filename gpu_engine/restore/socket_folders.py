"""Folders in which restored processes have sockets, as Python makes them for the processes of a job: with the job they
went, or whoever outlived it removed them. CRIU binds a socket only where there is a folder.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from phos.gpu_engine.errors import RestoreFailed
from phos.images.criu_open_files import Owner, socket_folders

MODE = 0o700


class SocketFolders:
    """Those that were made for one restore."""

    def __init__(self, directory: int, criu: int) -> None:
        """Make those that an image in an open directory needs, where process ``criu`` looks for them.

        Raises:
            RestoreFailed: one cannot be made; none is left.
            ImageError, OSError: CRIU's image does not say which there are.
        """
        self._made: list[str] = []
        self._root = -1  # the process may have ended when they have to go
        for path, owner in socket_folders(directory).items():
            try:
                if self._root < 0:
                    self._root = os.open(f"/proc/{criu}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._make(f"/proc/self/fd/{self._root}", path, owner)
            except OSError as error:
                self.discard()
                raise RestoreFailed(
                    f"The folder {path}, in which a process has a socket, is not there and cannot be made: "
                    f"{error.strerror}."
                ) from error

    def _make(self, root: str, path: str, owner: Owner) -> None:
        if path == "/" or os.path.lexists(root + path):
            return
        self._make(root, os.path.dirname(path), owner)
        os.mkdir(root + path, MODE)
        self._made.append(root + path)
        os.chown(root + path, owner.uid, owner.gid, follow_symlinks=False)

    def keep(self) -> None:
        """They are the processes'."""
        self._made = []
        if self._root >= 0:
            os.close(self._root)
        self._root = -1

    def discard(self) -> None:
        """Nobody needs them, nor the sockets that CRIU has bound there; what somebody has put into one stays."""
        for folder in reversed(self._made):
            with suppress(OSError):
                for name in os.listdir(folder):
                    if stat.S_ISSOCK(os.lstat(f"{folder}/{name}").st_mode):
                        os.unlink(f"{folder}/{name}")
                os.rmdir(folder)
        self.keep()
