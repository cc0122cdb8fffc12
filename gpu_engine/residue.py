"""Residue files: memory for what the driver's checkpoint saves into a process, made before the process stands still.

The driver asks for hundreds of megabytes of populated memory for it (DESIGN §2). The frontend serves that out of a file
in memory (frontend/residue.c), mapped shared: nothing need be populated while the process waits, and CRIU stores the
file's path instead of its pages. The content is part of the image all the same; before a restore the file is made anew.

A file lives under /dev/shm for as long as one checkpoint or restore needs its path. Its name is drawn at random, and
phosd holds a lock on it: a file without a lock was left behind by a phosd that was killed, and anybody may remove it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import shared_memory
from phos.gpu_engine.errors import Mispredicted, PhosError, RestoreFailed
from phos.gpu_engine.process import GatedProcess
from phos.gpu_engine.shared_memory import HeldFile
from phos.images.errors import ImageError
from phos.images.files import allocate_huge, hash_segment, run_in_threads, segments
from phos.images.formats import residue_file
from phos.images.mapping import map_memory, unmap_memory
from phos.images.source import ImageSource
from phos.images.writer import COPY_THREADS, ImageWriter

log = logging.getLogger(__name__)

GRAIN = 2 << 20
"""Sizes are multiples of a huge page; the frontend leaves the first one unused."""

COLLAPSED = 32 << 20  # bytes that one thread makes huge pages for at a time

LOOK_SECONDS = 0.002  # between two processes that are parked one after the other a file is free for some milliseconds

MODE = 0o600
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.residue")


def file_bytes(needed: int) -> int:
    """The size of a file for a driver that is expected to ask for ``needed`` bytes, with an eighth to spare."""
    return (needed + needed // 8 + 2 * GRAIN - 1) // GRAIN * GRAIN + GRAIN


class ResidueFile(HeldFile):
    """One of them."""

    def find_pages(self) -> None:
        """Allocate all of it, in huge pages if the kernel has any to spare, whatever the mount says of its files.

        The driver pins what it saves into, page by page. Who maps small pages anew (a process that CRIU restores) finds
        none of them in its page tables: 92,000 faults instead of 180.

        Raises:
            OSError: there is no memory, or no room.
        """
        places = segments(self.size, COLLAPSED)
        address = map_memory(self.size, self.descriptor)
        try:
            jobs = [partial(allocate_huge, self.descriptor, at, address + at, size) for at, size in places]
            run_in_threads(jobs, COPY_THREADS)
        finally:
            unmap_memory(address, self.size)
        os.posix_fallocate(self.descriptor, 0, self.size)


def _room_for(size: int) -> bool:
    """Whether shared memory takes it without being filled up, and the machine has the memory."""
    if shared_memory.room() < 2 * size:
        return False
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 > 2 * size
    except (OSError, ValueError):
        pass
    return True


def _owner(pid: int) -> tuple[int, int]:
    """The user and group that a process opens files as."""
    status = os.stat(f"/proc/{pid}")
    return status.st_uid, status.st_gid


class DumpedResidues:
    """The residue files of one checkpoint. The steps are called one after the other; saving runs beside them."""

    def __init__(self) -> None:
        self._files: dict[bytes, ResidueFile] = {}  # by session
        self._hashes: dict[bytes, list[bytes]] = {}  # of the content before the driver's restore, by session
        self._working: threading.Thread | None = None
        self._saved = False
        self._failure: Exception | None = None

    def prepare(self, processes: Iterable[GatedProcess], estimate: int, criu: int) -> None:
        """While the processes still compute: make their files and let them be mapped.

        ``estimate``: bytes for a driver of which nothing is known yet. ``criu``: the process that will dump them. Never
        fails: without a file the driver gets ordinary memory.
        """
        for process in processes:
            needed = process.residue_bytes if process.residue_bytes is not None else estimate
            if not needed or not process.takes_residue or process.session in self._files:
                continue
            try:
                self._prepare_one(process, file_bytes(needed), criu)
            except (OSError, PhosError) as error:
                log.info("Process %d gets no residue file: %s", process.pid, error)

    def _prepare_one(self, process: GatedProcess, size: int, criu: int) -> None:
        if not _room_for(size):
            raise OSError(f"there is no room for {size} bytes in {shared_memory.SHARED_MEMORY}")
        if not shared_memory.is_ours(process.pid, criu):
            raise OSError("it has other mounts than CRIU, or another /dev/shm than phosd")
        name = f"{process.session.hex()}-{secrets.token_hex(4)}.residue"
        file = ResidueFile.make(shared_memory.folder() / name, size, *_owner(process.pid))
        try:
            file.find_pages()
            status = os.fstat(file.descriptor)
            process.prepare_residue(str(file.path), size, status.st_dev, status.st_ino)
        except BaseException:
            file.discard()
            raise
        self._files[process.session] = file

    def start_hashing(self) -> None:
        """The driver has saved its part: note its hashes, beside whatever else goes on, to be compared later."""
        self._start(self._hash)

    def start_saving(self, writer: ImageWriter) -> None:
        """Copy what the driver has saved into the image, beside whatever else goes on."""
        self._start(lambda: self._save(writer))

    def _start(self, action: Callable[[], None]) -> None:
        def work() -> None:
            try:
                action()
            except Exception as error:
                self._failure = error

        self.wait()
        if self._files and self._failure is None:
            working = threading.Thread(target=work, name="residue")
            working.start()
            self._working = working  # only now: one that never began cannot be waited for

    def _hash(self) -> None:
        for session, file in self._files.items():
            places = segments(file.size)
            jobs = [partial(hash_segment, file.descriptor, offset, length) for offset, length in places]
            self._hashes[session] = run_in_threads(jobs, COPY_THREADS)

    def _save(self, writer: ImageWriter) -> None:
        self._saved = True
        for number, (session, file) in enumerate(self._files.items()):
            hashes = writer.add_file(residue_file(number), file.descriptor, file.size)
            if self._hashes.get(session, hashes) != hashes:
                raise Mispredicted("The driver has changed what it had saved before it was in the image.")

    def wait(self) -> None:
        """Return when hashing or saving has ended: only then may the driver's restore touch the files."""
        if self._working is not None:
            self._working.join()
            self._working = None

    @property
    def changed(self) -> bool:
        """Whether the driver's restore writes to what it reads: then it has to wait for the saving."""
        return isinstance(self._failure, Mispredicted)

    def describe(self, message: pb.Inventory, writer: ImageWriter) -> None:
        """See to it that all is saved, and say so in the inventory.

        Raises:
            Mispredicted: what was saved is not what the driver had left; save before its restore instead.
            ImageError, OSError: saving has failed.
        """
        if not self._saved:
            self.start_saving(writer)
        self.wait()
        if self._failure is not None:
            raise self._failure
        by_session = {process.session: process for process in message.processes if process.session}
        for number, (session, file) in enumerate(self._files.items()):
            by_session[session].residues.add(
                file=residue_file(number), path=str(file.path), size=file.size, mode=MODE, uid=file.uid, gid=file.gid
            )

    def drop(self, processes: Iterable[GatedProcess]) -> None:
        """There is no checkpoint: whoever still has its file mapped need not keep it."""
        for process in processes:
            if process.session in self._files:
                with suppress(PhosError):
                    process.drop_residue()

    def discard(self) -> None:
        """Let the files go; the last step."""
        self.wait()
        for file in self._files.values():
            file.discard()
        self._files = {}


class RestoredResidues:
    """The residue files of one restore: made at once, because CRIU opens them, and filled beside CRIU's work."""

    def __init__(self, image: ImageSource, patience: float = 0.0) -> None:
        """Make them. For so many seconds one is waited for that is in use: the image's pool may be filled just now.

        Raises:
            RestoreFailed: one of them cannot be made.
        """
        deadline = time.monotonic() + patience
        self._image = image
        self._files: list[tuple[str, ResidueFile]] = []
        self._filled = threading.Event()
        self._using = threading.Lock()  # held while the files are filled, and while they are let go
        self.error = ""
        try:
            for process in image.inventory.processes:
                for residue in process.residues:
                    self._files.append((residue.file, _make_again(residue, deadline)))
        except BaseException:
            self.discard()
            raise

    def fill(self) -> None:
        """Copy the content out of the image, every hash checked; afterwards :attr:`error` says what went wrong."""
        try:
            with self._using:
                self._fill()
        except (ImageError, OSError) as error:
            self.error = str(error)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                self.error = self._no_room
        except Exception as error:
            log.exception("What the driver saved could not be put back")
            self.error = repr(error)
        finally:
            self._filled.set()

    def _fill(self) -> None:
        for name, file in self._files:
            if _room_for(file.size):
                with suppress(OSError):  # copying will say what is missing
                    file.find_pages()
            self._image.copy_file(name, file.descriptor)

    @property
    def _no_room(self) -> str:
        size = sum(residue.size for process in self._image.inventory.processes for residue in process.residues)
        return (
            f"{shared_memory.SHARED_MEMORY} has no room for its {size / 1e6:.0f} MB. Remove what fills that, or make "
            "it larger (in a container, by --shm-size)."
        )

    def wait(self) -> None:
        """Return when :meth:`fill` has ended."""
        self._filled.wait()

    def discard(self) -> None:
        """Let them go: the processes have them mapped, or never will. What is being filled is filled to the end."""
        with self._using:
            for _, file in self._files:
                file.discard()
            self._files = []


def _make_again(residue: pb.Residue, deadline: float = 0.0) -> ResidueFile:
    path = Path(residue.path)
    # An image is input: it must not make phosd write anywhere else.
    if (
        path.parent.parent != shared_memory.SHARED_MEMORY
        or not shared_memory.FOLDER.fullmatch(path.parent.name)
        or not _NAME.fullmatch(path.name)
    ):
        raise RestoreFailed(f"The image names {residue.path!r} as memory of a process; PhOS puts none there.")
    if stat.S_IMODE(residue.mode) != residue.mode or residue.mode & 0o7077:
        raise RestoreFailed(f"The image wants {residue.path} with mode {residue.mode:o}; PhOS makes no such file.")
    while True:
        try:
            return ResidueFile.make(path, residue.size, residue.uid, residue.gid, mode=residue.mode)
        except FileExistsError as error:
            if time.monotonic() >= deadline:
                raise RestoreFailed(
                    f"{path} is in use: a process of this image is being restored (by another phosd, or for a pool), "
                    "or checkpointed. Try again."
                ) from error
            time.sleep(LOOK_SECONDS)
        except OSError as error:
            raise RestoreFailed(
                f"{path}, where the image's process has part of its memory, cannot be made: {error.strerror or error}."
            ) from error
