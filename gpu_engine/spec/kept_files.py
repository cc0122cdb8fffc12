"""A folder of files that may go at any time: written whole or not at all, and those longest unused go first."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

_PART = ".part"


def put(path: Path, data: bytes) -> None:
    """Write a file whole, in place of one of that name; its folder is made if it is missing.

    No fsync: what a crash of the machine leaves of it is for its reader to notice.

    Raises:
        OSError: it cannot be; nothing of it is left.
    """
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=_PART, delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def evict(folder: Path, suffix: str, most: int) -> None:
    """Delete the files of that suffix longest unused until the rest has at most ``most`` bytes.

    Half-written ones of dead writers go with them.

    Raises:
        OSError: the folder cannot be read.
    """
    files = []
    with os.scandir(folder) as listing:
        for item in listing:
            with contextlib.suppress(OSError):  # another process was faster
                if item.name.endswith((suffix, _PART)) and item.is_file(follow_symlinks=False):
                    about = item.stat(follow_symlinks=False)
                    files.append((about.st_mtime_ns, about.st_size, item.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
