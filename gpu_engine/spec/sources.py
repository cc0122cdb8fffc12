"""Where the bytes of a module are, for as long as somebody may want to analyse it.

A process that loaded a module from a file may end, and with it the only path to that file that phosd knows, as it may
have lived in a container. So the file itself is held: by a descriptor that only names it (O_PATH), of which the
analysis process opens what it stands for. Modules in memory are kept in files too (module_store.py).
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from dataclasses import dataclass, field

import xxhash

from phos.gpu_engine.spec.identity import FileIdentity

FILES_HELD = 1024
"""Descriptors that may be held at once. A program has its modules in some dozen files."""


class HeldFile:
    """One file, held by a descriptor until the last user has let go of this object."""

    def __init__(self, descriptor: int, about: os.stat_result) -> None:
        self.descriptor = descriptor
        self.identity = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def path(self) -> str:
        """A path under which this process and its children can open the file, whatever became of its name."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


_lock = threading.Lock()  # guards _held
_held: weakref.WeakValueDictionary[tuple[int, ...], HeldFile] = weakref.WeakValueDictionary()


def hold(path: str) -> HeldFile | None:
    """Hold a file. None: it is no regular file, it is not there, or too many are held already."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens nothing: no pipe is waited for, no device woken
    except OSError:
        return None
    about = os.fstat(descriptor)
    with _lock:
        known = _held.get((about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))
        if known is None and stat.S_ISREG(about.st_mode) and len(_held) < FILES_HELD:
            known = _held[about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns] = HeldFile(descriptor, about)
            return known
    os.close(descriptor)
    return known


@dataclass(frozen=True)
class FileSource:
    """A module in a file: a path that this process can open, and bytes; size 0 is up to the end of the module.

    ``identity`` says which bytes these are, if more is known than the path; ``held`` keeps the path valid; ``name`` is
    what people know the file by; ``kept``: the file is a copy of ours of what the application had in memory;
    ``file``: which file the process has loaded, if that is known. Of another one nothing is to be told.
    """

    path: str
    offset: int = 0
    size: int = 0
    identity: object = None
    name: str = ""
    kept: bool = False
    file: FileIdentity | None = field(default=None, compare=False)
    held: HeldFile | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(
        path: str,
        offset: int = 0,
        size: int = 0,
        *,
        identity: object = None,
        name: str = "",
        kept: bool = False,
        file: FileIdentity | None = None,
    ) -> FileSource:
        """A module in a file that is held from now on, if it can be."""
        held = hold(path)
        if held is None:
            return FileSource(path, offset, size, identity, name, kept, file)
        return FileSource(held.path, offset, size, identity or held.identity, name or path, kept, file, held)

    def request(self) -> dict[str, object]:
        """What the analysis process is told of it."""
        file = self.file.packed() if self.file is not None else None
        return {"path": self.path, "offset": self.offset, "size": self.size, "kept": self.kept, "file": file}


ModuleSource = bytes | FileSource


def identity_of(source: ModuleSource) -> object:
    """What two sources of the same bytes have in common."""
    if isinstance(source, bytes):
        return len(source), xxhash.xxh3_128_digest(source)
    return source.identity or source.path, source.offset, source.size
