"""Files that have grown since the dump: a job's logs, when it has run on.

The restored process goes on writing where it was, in the middle of what it wrote later, so CRIU refuses. If asked to,
phosd cuts such a file to the length that it had. What it cuts off is kept beside the file: why the job has died may be
among it.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from contextlib import suppress
from datetime import datetime, timezone

from phos.gpu_engine import procfs
from phos.gpu_engine.errors import RestoreFailed, UsageError
from phos.images.criu_open_files import written_files

log = logging.getLogger(__name__)

CHOICES = ("refuse", "cut")


def check(choice: str) -> None:
    """
    Raises:
        UsageError: ``choice`` (PHOS_GROWN_FILES) is none.
    """
    if choice and choice not in CHOICES:
        raise UsageError(f"PHOS_GROWN_FILES={choice} means nothing: choose one of {', '.join(CHOICES)}.")


def cut(directory: int, criu: int) -> list[str]:
    """Cut files to the length that they have in the image in an open directory, as process ``criu`` sees them.

    Returns which. What has shrunk, or is not there, is left for CRIU to complain about.

    Raises:
        RestoreFailed: one of them cannot be cut, or somebody else writes to it.
        ImageError, OSError: CRIU's image does not say which there are.
    """
    sizes, grown = written_files(directory), {}
    for path, size in sizes.items():
        with suppress(OSError):
            status = os.lstat(f"/proc/{criu}/root{path}")
            if stat.S_ISREG(status.st_mode) and status.st_size > size:
                grown[path] = (status.st_dev, status.st_ino)
    writers = procfs.users_of(set(grown.values()), writes=True)
    for path, file in grown.items():
        if file in writers:
            raise RestoreFailed(
                f"{path} has grown since the dump, and is not cut because process {writers[file]} "
                f"({procfs.executable(writers[file])}) writes to it. End that first."
            )
    for path in grown:
        try:
            _cut(f"/proc/{criu}/root{path}", path, sizes[path])
        except OSError as error:
            raise RestoreFailed(
                f"{path} has grown since the dump, and what has come since cannot be put aside: {error.strerror}."
            ) from error
    return list(grown)


def _cut(place: str, path: str, size: int) -> None:
    """``place``: where ``path`` is for us."""
    descriptor = os.open(place, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        suffix = f".cut-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}"
        with open(f"{place}{suffix}", "xb", opener=_private) as kept:
            try:
                os.fchown(kept.fileno(), status.st_uid, status.st_gid)
                os.fchmod(kept.fileno(), stat.S_IMODE(status.st_mode))
                file.seek(size)
                shutil.copyfileobj(file, kept, 1 << 20)
                kept.flush()
                os.fsync(kept.fileno())
            except BaseException:
                os.unlink(f"{place}{suffix}")
                raise
        file.truncate(size)
    log.warning("%s: %d bytes that came after the dump are now in %s%s", path, status.st_size - size, path, suffix)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
