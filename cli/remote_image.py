"""A folder that stands for an image at another host while it is being restored."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phos.cli.launched import ENDING, Interrupted, handle_as_before, heed
from phos.gpu_engine import configuration
from phos.gpu_engine.errors import RestoreFailed, UsageError
from phos.gpu_engine.procfs import is_alive
from phos.images.errors import ImageError
from phos.images.remote import fetch_description
from phos.images.remote_wire import DEFAULT_KEY, Address

FOLDER = "phos-remote-"
"""How temporary folders are called, before the pid of who has made them."""

LEFT_SECONDS = 3600.0
"""So long after a restore was killed, what it had started has surely ended."""

ANEW_SECONDS = 0.05
"""How long after a signal, and after each time, its exception is raised anew."""


def address(image: str) -> Address:
    """Raises UsageError if it is no address of an image."""
    try:
        return Address.parse(image)
    except ImageError as error:
        raise UsageError(str(error)) from error


def fetch(image: Address, directory: Path, *, lasting: bool = False, made: list[Path] | None = None) -> int:
    """Make an empty directory stand for the image at that address. Returns the bytes copied.

    ``lasting``: for more than one restore, and ``made``: see fetch_description().

    Raises:
        ImageError: the image cannot be had.
        RestoreFailed: there is no place for it.
    """
    key = Path(os.environ.get("PHOS_REMOTE_KEY") or configuration.read().get("PHOS_REMOTE_KEY", "") or DEFAULT_KEY)
    try:
        return fetch_description(image, key, directory, lasting=lasting, made=made)
    except OSError as error:
        raise RestoreFailed(f"{image} cannot be copied to {directory}: {error.strerror}.") from error


def remove(made: Sequence[Path], directory: Path) -> None:
    """Remove these files of a directory, and it too if it has nothing else in it."""
    for path in made:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()


def clear(directory: Path) -> None:
    """Leave nothing but logs in it, and not even it without them."""
    for entry in directory.iterdir():
        if entry.suffix != ".log":
            entry.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()


def sweep() -> None:
    """Clear what restores that were killed have left: copies of all but the GPU data. Logs are to be read."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        maker = folder.name.removeprefix(FOLDER).partition("-")[0]
        with suppress(OSError):
            status = folder.lstat()
            left = maker.isdigit() and not is_alive(int(maker)) and time.time() - status.st_mtime > LEFT_SECONDS
            if left and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                clear(folder)


class Interruption:
    """A signal that would end the command; it raises Interrupted: what was copied of ``image`` is removed.

    Python loses what a handler raises inside a finalizer, and calls the handler late if the signal comes right before
    a call of the kernel that waits. So the exception is raised anew while files are being copied, until it is on its
    way.
    """

    def __init__(self, image: str) -> None:
        self._image = image
        self._number = 0  # the signal that came first
        self._held = False
        self._copying = True

    def received(self, number: int, _frame: object) -> None:
        """The handler."""
        if self._number:
            return
        self._number = number
        if self._copying:
            signal.setitimer(signal.ITIMER_REAL, ANEW_SECONDS, ANEW_SECONDS)
        self._raise()

    def anew(self, _number: int, _frame: object) -> None:
        """The handler of SIGALRM."""
        self._raise()

    def _raise(self) -> None:
        if self._number and not self._held and not _under_way(sys.exc_info()[1]):
            raise Interrupted(self._number, f"Interrupted: what was copied of {self._image} is removed.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is begun in the block is also noted in it: a signal that comes meanwhile raises at the block's end.

        It is not blocked: the kernel would give it to another thread, and Python's handler runs in this one.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._raise()

    def copied(self) -> None:
        """All is copied: what a signal raised and Python lost is raised now, and what comes is raised once."""
        self._copying = False
        self._leave()
        self._raise()

    def end(self) -> None:
        """Nothing is raised any more."""
        self._held = True
        self._leave()

    def _leave(self) -> None:
        if self._number:  # else the timer is not ours
            signal.setitimer(signal.ITIMER_REAL, 0)


def _under_way(error: BaseException | None) -> bool:
    """Whether an Interrupted is what is being handled, or led to that."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def interruptible(image: str) -> Iterator[Interruption]:
    """A signal that would end the command raises Interrupted in the block: what was copied of ``image`` is removed."""
    interruption = Interruption(image)
    former: list[tuple[int, Any]] = []
    try:
        former.append((signal.SIGALRM, signal.signal(signal.SIGALRM, interruption.anew)))
        heed(ENDING, interruption.received, former)
        yield interruption
    finally:
        interruption.end()
        handle_as_before(former)


@contextmanager
def fetched(image: str) -> Iterator[Path]:
    """Copy what is not GPU data of the image at that address; after the block only logs are left, if it failed.

    Raises: as :func:`address`, :func:`interruptible` and :func:`fetch`.
    """
    at = address(image)
    sweep()
    with interruptible(image) as interruption:
        directory: Path | None = None
        try:
            with interruption.held():
                directory = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
            fetch(at, directory)
            interruption.copied()
            yield directory
        except BaseException:
            if directory is not None:
                with interruption.held():
                    clear(directory)
            raise
        shutil.rmtree(directory, ignore_errors=True)
