"""The files that one image set is made of while it is being made: created, named in errors, and removed again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from phos.images import formats
from phos.images.errors import ImageError
from phos.images.files import describe_path, free_bytes, new_file_in

_WRITE_SIZE = 64 << 20


class NewFiles:
    """A directory and what was made in it, never anything of others (CRIU's)."""

    def __init__(self, directory: int, stored: Callable[[], int]) -> None:
        """``directory``: an open descriptor; it is duplicated. ``stored``: how much GPU data there is, for errors."""
        self.directory = os.dup(directory)
        self.path = describe_path(self.directory)
        self._stored = stored
        self._made: list[str] = []  # in the order of creation

    def refuse_used(self) -> None:
        """
        Raises:
            ImageError: the directory holds another image, whole or not.
        """
        with self.saying(""):
            names = set(os.listdir(self.directory))
        if formats.COMMIT_FILE in names:
            raise ImageError(f"{self.path} holds another image; choose a directory that is empty")
        ours = sorted(n for n in names if formats.is_ours(n))
        if ours:
            raise ImageError(
                f"{self.path} is not empty: it holds the remains of an image that was not finished, or one that is "
                f"being written now ({', '.join(ours[:3])}); choose another directory or remove them"
            )
        if formats.CRIU_INVENTORY_FILE in names:
            # CRIU writes it at the very end of a dump, so this one is of an earlier dump.
            raise ImageError(f"{self.path} holds another image, made by CRIU; choose a directory that is empty")

    def create(self, name: str) -> int:
        """A new file, open for reading and writing; ImageError if there is one already."""
        with self.saying(name):
            fd = new_file_in(self.directory, name)
        self._made.append(name)
        return fd

    def write_whole(self, name: str, fd: int, raw: bytes) -> None:
        """All of a file, on stable storage."""
        view = memoryview(raw)
        done = 0
        with self.saying(name, len(raw)):
            while done < len(raw):
                done += os.pwrite(fd, view[done : done + _WRITE_SIZE], done)
            os.fsync(fd)

    def write_new(self, name: str, raw: bytes) -> None:
        """:meth:`create` and :meth:`write_whole`."""
        fd = self.create(name)
        try:
            self.write_whole(name, fd, raw)
        finally:
            os.close(fd)

    def rename(self, name: str, to: str) -> None:
        """A file that was made here gets another name, on stable storage as soon as the directory is.

        The new name is known to :meth:`remove_all` before it exists.
        """
        self._made.append(to)
        os.rename(name, to, src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def remove(self, name: str) -> None:
        """One file is not needed after all."""
        self._unlink(name)
        self._made.remove(name)

    def remove_all(self) -> None:
        """As if nothing had been made. What was made last goes first."""
        for name in reversed(self._made):
            self._unlink(name)
        with suppress(OSError):
            os.fsync(self.directory)

    def close(self) -> None:
        """Close the directory."""
        if self.directory >= 0:
            with suppress(OSError):
                os.close(self.directory)
        self.directory = -1

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self.directory)

    @contextmanager
    def saying(self, name: str, needed: int = 0) -> Iterator[None]:
        """Turns an OSError inside it into an ImageError about the file ``name`` ('' for the directory)."""
        try:
            yield
        except OSError as error:
            raise self.failure(name, error, needed) from error

    def failure(self, name: str, error: OSError, needed: int) -> ImageError:
        """What to say of a file that ``needed`` so many more bytes."""
        where = os.path.join(self.path, name) if name else self.path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk quota is used up" if error.errno == errno.EDQUOT else "the file system is full"
            return ImageError(
                f"{where}: {what}: {needed} more bytes were needed, {free_bytes(self.directory)} are free, "
                f"{self._stored()} of GPU data had been written; make room or choose another directory"
            )
        follow = f" ({needed} bytes were to follow)" if needed else ""
        return ImageError(f"{where} cannot be written, or read back: {error.strerror or error}{follow}")
