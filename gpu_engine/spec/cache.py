"""Descriptors kept on disk, one file for each module's content, so that a module is analysed once on a machine.

A file is ``phos-<hash>.json`` in the cache folder: 16 bytes xxh3_128 of what follows, then JSON. The hash in the name
covers the module's bytes, the GPU's capability, and the sources of the analyser itself: another version looks for other
files. It is a cryptographic one, as modules are what applications load and a phosd of root's serves all users: nobody
can make a module that passes for another. It covers the user too, whose file may change while it is read; only what is
found in root's own files is found by everybody.

Writers replace files by rename, so readers see whole ones; of two writers the later one's kernels stay. A file that is
torn, changed, or somebody else's is ignored and rewritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from phos.gpu_engine.spec import kept_files
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Parameter, Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer

log = logging.getLogger(__name__)

SETTING = "PHOS_CACHE"
"""Environment: the folder to use."""
MAX_BYTES = 256 << 20
"""The cache's size is brought below this whenever a file is written."""
MAX_FILE_BYTES = 64 << 20
_CHECKSUM_BYTES = 16
_KEY_BYTES = 20
_OURS = re.compile(rf"phos-[0-9a-f]{{{2 * _KEY_BYTES}}}\.json")
"""The names of our files."""


def encode(found: AccessDescriptor) -> list[Any]:
    """A descriptor as JSON can hold it."""
    return [
        found.kernel,
        [[p.offset, p.size] for p in found.parameters],
        [[f.offset, f.size, int(f.access), int(f.kind)] for f in found.fields],
        int(found.indirect),
        int(found.source),
        found.guessed,
    ]


def decode(data: Any) -> AccessDescriptor:
    """The descriptor that :func:`encode` wrote. Raises SpecError for anything else."""
    try:
        kernel, parameters, fields, indirect, source, guessed = data
        found = AccessDescriptor(
            kernel,
            tuple(Parameter(_number(offset), _number(size)) for offset, size in parameters),
            tuple(Field(_number(o), _number(s), Access(a), FieldKind(k)) for o, s, a, k in fields),
            Access(indirect),
            Source(source),
            bool(guessed),
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"This is no access descriptor: {error}.") from None
    if not isinstance(kernel, str):
        raise SpecError("This is no access descriptor: its kernel has no name.")
    return found


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ValueError(f"{value!r} is no number of bytes")
    return value


@cache
def analyser_version() -> bytes:
    """A hash of the analyser's own sources: what another version wrote may be wrong, or worse than could be had now."""
    folder = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for source in sorted([*folder.glob("*.py"), *folder.parent.glob("ptx_instrument/*.py")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.digest()


def default_folder() -> Path | None:
    """``PHOS_CACHE``, or the system's cache folder for root, or one's own. None: this user has no folder of its own."""
    named = os.environ.get(SETTING)
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/phos")
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phos"
    except RuntimeError:  # a user id that nobody has entered anywhere, as in a container
        return None


class Kept(NamedTuple):
    """What is kept of a module."""

    kernels: dict[str, AccessDescriptor]
    hard: frozenset[int | str]
    """What of it takes too long as PTX: parts to be read, kernels to be followed (analysis.Hard)."""


class Cache:
    """The cache in one folder. Every failure to read or write is logged once and otherwise means: not cached.

    Without a folder nothing is kept.
    """

    def __init__(self, folder: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder or default_folder()
        self.max_bytes = max_bytes
        self._complained = False

    def key(self, image: Buffer, capability: int, tools: str = "", *, user: int | None = None) -> str:
        """The name under which a module's descriptors are kept.

        Arguments:
            tools: what else decides what can be found out.
            user: who has loaded the module; None: nobody but root can have made it, and all users share what is found.
        """
        digest = hashlib.blake2b(analyser_version(), digest_size=_KEY_BYTES)
        digest.update(f"{'all' if user is None else user} {capability} {tools}\0".encode())
        digest.update(image)
        return digest.hexdigest()

    def load(self, key: str) -> Kept:
        """What is kept under a key; nothing where there is no such file, or one that cannot be trusted."""
        nothing = Kept({}, frozenset())
        path = self._path(key)
        if path is None:
            return nothing
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size > MAX_FILE_BYTES:
                    return nothing
                data = file.read(MAX_FILE_BYTES)
        except OSError:
            return nothing
        if xxhash.xxh3_128_digest(data[_CHECKSUM_BYTES:]) != data[:_CHECKSUM_BYTES]:
            return nothing
        try:
            body = json.loads(data[_CHECKSUM_BYTES:])
            found = Kept(
                {item.kernel: item for item in map(decode, body["kernels"])},
                frozenset(what if isinstance(what, str) else _number(what) for what in body["hard"]),
            )
        except (SpecError, LookupError, ValueError, TypeError, RecursionError):
            return nothing
        with contextlib.suppress(OSError):
            os.utime(path)  # for the order of eviction
        return found

    def store(self, key: str, descriptors: Iterable[AccessDescriptor], hard: Collection[int | str] = ()) -> None:
        """Keep descriptors under a key, in place of what was there."""
        path = self._path(key)
        if path is None:
            self._complain(f"there is no folder for them; {SETTING} can name one")
            return
        kept = {"kernels": [encode(item) for item in descriptors], "hard": sorted(hard, key=str)}
        body = json.dumps(kept, separators=(",", ":")).encode()
        data = xxhash.xxh3_128_digest(body) + body
        if len(data) > min(MAX_FILE_BYTES, self.max_bytes):
            return
        try:
            # After a crash of the machine a torn file is one that its checksum gives away.
            kept_files.put(path, data)
            kept_files.evict(path.parent, _OURS, self.max_bytes)
        except OSError as error:
            self._complain(str(error))

    def _path(self, key: str) -> Path | None:
        return self.folder / f"phos-{key}.json" if self.folder is not None else None

    def _complain(self, why: str) -> None:
        if not self._complained:
            log.warning("Descriptors are not cached: %s.", why)
            self._complained = True
