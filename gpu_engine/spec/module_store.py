"""The bytes of modules that were never in a file, kept on disk for whoever analyses them later.

A frontend hands such a module over once and lets go of its copy. Here it is a file in the cache folder, found again by
the user, the size and the digest that the frontend names it by: by this phosd, which need not keep it in memory, and by
a later one, when a process that was restored says which modules it has. The digest is no protection against somebody
who wants two modules to have the same one, so nobody is given another user's.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from phos.gpu_engine.spec import kept_files
from phos.gpu_engine.spec.cache import SETTING, default_folder
from phos.gpu_engine.spec.sources import FileSource

log = logging.getLogger(__name__)

MAX_BYTES = 512 << 20
"""The store's size is brought below this whenever a module is added: those longest unused go."""
_OURS = re.compile(r"-?[0-9]+-[0-9a-f]+-[0-9a-f]{16}\.module")
"""The names of our files: user, size, digest."""


class ModuleStore:
    """The store in one folder, by default beside the descriptors (PHOS_CACHE). Any thread may call."""

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards _complained; one thread evicts at a time
        self._complained = False

    @property
    def folder(self) -> Path | None:
        """Where the modules are; None: nowhere, as there is no folder for them."""
        beside = default_folder() if self._folder is None else None
        return beside / "modules" if beside is not None else self._folder

    def keep(self, user: int, digest: int, image: bytes) -> FileSource | None:
        """Keep a module; None: it cannot be."""
        if not digest or len(image) > self._max_bytes // 4:
            return None
        path = self._path(user, digest, len(image))
        if path is None:
            self._complain(f"there is no folder for them; {SETTING} can name one")
            return None
        known = self.find(user, digest, len(image))
        if known is not None and _holds(known, image):
            return known
        try:
            # What a crash of the machine leaves of it may have its size and be anything: whoever has it puts it there
            # again, and who only looks it up is told by the analysis that it is no module.
            kept_files.put(path, image)
            found = self.find(user, digest, len(image))  # held from here on, should it be evicted
            with self._lock:
                kept_files.evict(path.parent, _OURS, self._max_bytes)
            return found
        except OSError as error:
            self._complain(str(error))
            return None

    def find(self, user: int, digest: int, size: int) -> FileSource | None:
        """A module that is kept, by what a frontend says of it; None: it is not (any more)."""
        path = self._path(user, digest, size)
        if path is None:
            return None
        try:
            about = path.stat(follow_symlinks=False)
            if not digest or about.st_uid != os.geteuid() or about.st_size != size:
                return None
            os.utime(path)  # for the order of eviction
        except OSError:
            return None
        name = f"module of {size} bytes"
        return FileSource.of(str(path), 0, size, identity=("kept", user, digest), name=name, kept=True)

    def _complain(self, why: str) -> None:
        with self._lock:
            if not self._complained:
                log.warning("Modules are kept in memory only: %s.", why)
                self._complained = True

    def _path(self, user: int, digest: int, size: int) -> Path | None:
        folder = self.folder
        return None if folder is None else folder / f"{user}-{size:x}-{digest:016x}.module"


def _holds(kept: FileSource, image: bytes) -> bool:
    try:
        with open(kept.path, "rb") as file:
            return file.read(len(image) + 1) == image
    except OSError:
        return False
