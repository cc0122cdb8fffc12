"""A folder of files that may go at any time: written whole or not at all, and those longest unused go first."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

_PART_PREFIX, _PART_SUFFIX = ".phos-", ".part"
_PART = re.compile(r"\.phos-\w{8}\.part", re.ASCII)
"""Files that are being written, or whose writer was killed: as tempfile names them."""


def put(path: Path, data: bytes) -> None:
    """Write a file whole, in place of one of that name; its folder is made if it is missing.

    No fsync: what a crash of the machine leaves of it is for its reader to notice.

    Raises:
        OSError: it cannot be; nothing of it is left.
    """
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=_PART_PREFIX, suffix=_PART_SUFFIX, delete=False
        ) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def evict(folder: Path, ours: re.Pattern[str], most: int) -> None:
    """Delete the files named like that (in full) longest unused until the rest has at most ``most`` bytes.

    Half-written ones of dead writers go with them. Others are neither counted nor touched: people name folders of
    their own, with other things in them.

    Raises:
        OSError: the folder cannot be read.
    """
    files = []
    with os.scandir(folder) as listing:
        for item in listing:
            with contextlib.suppress(OSError):  # another process was faster
                if (ours.fullmatch(item.name) or _PART.fullmatch(item.name)) and item.is_file(follow_symlinks=False):
                    about = item.stat(follow_symlinks=False)
                    files.append((about.st_mtime_ns, about.st_size, item.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
