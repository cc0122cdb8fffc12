"""Images that phosd holds pinned: which, under what name, and how much memory they may take."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.cow.settings import size_of
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.errors import NO_THREAD, DriverError, NotPermitted, PhosError, UsageError
from phos.gpu_engine.landing import wait_released
from phos.gpu_engine.pinned import PinnedImage, PinnedMemory, data_bytes
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.reader import Image
from phos.images.remote import RemoteImage

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def limit_from(environment: Mapping[str, str]) -> int:
    """How much may be pinned in all: PHOS_PIN_LIMIT, else half of the machine's memory; bytes.

    Raises:
        UsageError: it is no size.
    """
    text = environment.get("PHOS_PIN_LIMIT", "")
    return size_of("PHOS_PIN_LIMIT", text) if text else int(psutil.virtual_memory().total) // 2


def available_memory() -> int:
    """What phosd can still allocate, as far as the machine and its control group say; bytes."""
    free = int(psutil.virtual_memory().available)
    try:
        group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
        folder = Path(f"/sys/fs/cgroup{group}")
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, max(0, int(limit) - int((folder / "memory.current").read_text())))
    except (OSError, IndexError, ValueError):
        pass  # no control groups, or the first kind of them
    return free


@dataclass
class Pinned:
    """One image of the table."""

    name: str
    path: str
    record: bytes  # the commit record, serialised: what has the same is the same image
    image_id: bytes
    size: int
    pools: dict[int, str] = field(default_factory=dict)
    """The names of the pools for which it is pinned; none: somebody has asked for it."""
    memory: PinnedMemory = field(default_factory=PinnedMemory)
    state: str = "loading"
    since: float = field(default_factory=time.time)


def _of_image(directory: int, name: str) -> Pinned:
    wait_released()
    with Image.open(directory) as image:
        return Pinned(name, str(image.path), image.record.SerializeToString(), image.record.image_id, data_bytes(image))


class PinnedImages:
    """The table. Methods may be called from any thread."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes."""
        self.limit = limit
        self._lock = threading.Lock()  # guards _images
        self._images: list[Pinned] = []

    def pin(self, directory: int, name: str) -> Pinned:
        """Enter an image; :meth:`load` then does the work. ``name`` may be empty: then it has only its path.

        Raises:
            ImageError: there is no whole image. UsageError, PhosError: a sentence that says why not.
        """
        if name and not _NAME.fullmatch(name):
            raise UsageError(f"'{name}' is no name for an image: use letters, digits, '.', '_' and '-', at most 100.")
        made = _of_image(directory, name)
        with self._lock:
            for other in self._images:
                if other.record == made.record:
                    if pools := ", ".join(other.pools.values()):
                        raise PhosError(f"{made.path} is pinned already, for as long as there is pool {pools}.")
                    raise PhosError(f"{made.path} is pinned already, as {other.name or other.path}.")
                if name and other.name == name:
                    raise PhosError(f"The name {name} is taken by {other.path}: choose another, or unpin that one.")
            self._enter(made)
        return made

    def _enter(self, made: Pinned) -> None:
        """With the lock held."""
        used = sum(other.size for other in self._images)
        if used + made.size > self.limit:
            raise PhosError(
                f"{made.path} has {made.size / 1e9:.2f} GB of GPU data. phosd may pin {self.limit / 1e9:.2f} GB, "
                f"of which {used / 1e9:.2f} GB are in use. Unpin another image, or raise PHOS_PIN_LIMIT (pin-limit "
                "in the configuration file) and restart phosd."
            )
        self._images.append(made)

    def hold(self, directory: int, pool: int, name: str) -> None:
        """Pin an image where it lies, for a pool. What somebody has had pinned stays theirs.

        ``pool``: a number that no other pool has.

        Raises:
            ImageError: there is no whole image. PhosError: why it is not pinned.
        """
        made = _of_image(directory, "")
        with self._lock:
            if other := next((other for other in self._images if other.record == made.record), None):
                if other.pools:
                    other.pools[pool] = name
                return
            self._enter(made)
            made.pools[pool] = name
        self.load(made, directory, copy=False, in_place=True)

    def leave(self, pool: int) -> None:
        """A pool needs no more what is pinned for it."""
        with self._lock:
            held = [entry for entry in self._images if entry.pools.pop(pool, None) is not None and not entry.pools]
        for entry in held:
            self._let_go(entry)

    def load(self, entry: Pinned, directory: int, *, copy: bool, in_place: bool = False) -> None:
        """Bring the data in; afterwards the image is pinned, or no longer in the table.

        ``in_place``: only if nothing need be copied.

        Raises:
            ImageError, PhosError: why it is not pinned.
        """

        def room(size: int) -> None:
            if in_place and size:
                raise PhosError(f"The data of {entry.path} does not lie in memory, or somebody else may write to it.")
            if size > (free := available_memory()):
                raise PhosError(
                    f"{entry.path} needs {size / 1e9:.2f} GB of memory to be copied into; {free / 1e9:.2f} GB are "
                    "available. Unpin another image, or end what else uses memory."
                )

        began = time.monotonic()
        try:
            with closing(RemoteImage.open(directory) or Image.open(directory)) as image:
                if image.record.SerializeToString() != entry.record:
                    raise ImageError(f"{entry.path} was replaced by another image meanwhile")
                entry.memory.load(image, copy=copy, room=room)
            with self._lock:
                entry.memory.go_on()
                entry.state = "pinned"
        except BaseException as error:
            with self._lock:
                given_up = entry not in self._images
                if not given_up:
                    self._images.remove(entry)
            entry.memory.release()
            if given_up:
                raise PhosError(f"{entry.path} was unpinned before all of it was loaded.") from None
            if isinstance(error, DriverError):
                raise PhosError(f"The driver cannot pin the data of {entry.path}: {error}") from error
            if isinstance(error, OSError):
                raise PhosError(f"{entry.path} cannot be pinned: {error.strerror}") from error
            raise
        size, seconds = entry.memory.bytes, time.monotonic() - began
        log.info("%s: %d bytes pinned in %.2f s, %d of them copied", entry.path, size, seconds, entry.memory.copied)

    def unpin(self, name: str, directory: int | None) -> None:
        """Let an image go, by its name, path or directory; its memory is free when no restore uses it any more.

        One that is being loaded is no more: :meth:`load` ends with an error.

        Raises:
            PhosError: there is no such image.
        """
        path = os.readlink(f"/proc/self/fd/{directory}") if directory is not None else ""
        with self._lock:
            found = [e for e in self._images if (name and name in (e.name, e.path)) or (path and e.path == path)]
            if not found:
                raise PhosError(f"No image {name or path} is pinned ('phos-gpu image list' shows which are).")
        self._let_go(found[0])
        log.info("%s is not pinned any more.", found[0].path)

    def _let_go(self, entry: Pinned) -> None:
        with self._lock:
            if entry not in self._images:
                return
            self._images.remove(entry)
            if entry.state == "loading":
                entry.memory.give_up()  # who loads it releases it
                return
        entry.memory.release()

    def find(self, directory: int) -> PinnedImage | None:
        """See :class:`~phos.gpu_engine.restore.sources.Pinned`."""
        if not self._images:
            return None
        try:
            image = RemoteImage.open(directory) or Image.open_damaged(directory)
        except ImageError:
            return None  # said by whoever opens it next
        memory = self._memory_of(image)
        if memory is None:
            image.close()
            return None
        try:
            # Its data files may be gone: they are in memory.
            data = tuple(str(image.path / f.name) for f in image.record.files if formats.stripe_of(f.name) is not None)
            problems = image.problems if isinstance(image, Image) else []
            if wrong := [problem for problem in problems if not problem.startswith(data)]:
                raise ImageError(wrong[0], wrong)
            return PinnedImage(image, memory)
        except BaseException:
            image.close()
            memory.release()
            raise

    def _memory_of(self, image: Image | RemoteImage) -> PinnedMemory | None:
        """In use, if the image is pinned and as it was."""
        entry = self.entry_of(image.record.SerializeToString())
        if entry is None or not entry.memory.use():
            return None
        if changed := entry.memory.changed():
            log.warning("%s has changed since %s was pinned: it is read anew.", changed[0], entry.path)
            entry.memory.release()
            return None
        return entry.memory

    def entry_of(self, record: bytes) -> Pinned | None:
        """The pinned image with that commit record."""
        with self._lock:
            return next((e for e in self._images if e.record == record and e.state != "loading"), None)

    def named(self, name: str) -> Pinned | None:
        """The pinned image of that name."""
        with self._lock:
            return next((e for e in self._images if name and e.name == name and e.state != "loading"), None)

    def report(self) -> list[wire_pb2.Status.Pinned]:
        """All of them, oldest first."""
        with self._lock:
            entries = [(entry, entry.memory.users - 1) for entry in self._images if entry.memory.use()]  # less us
        try:
            return self._report(entries)
        finally:
            for entry, _ in entries:
                entry.memory.release()

    @staticmethod
    def _report(entries: list[tuple[Pinned, int]]) -> list[wire_pb2.Status.Pinned]:
        return [
            wire_pb2.Status.Pinned(
                name=entry.name,
                image=procfs.readable(entry.path),
                image_id=entry.image_id,
                state="changed" if entry.state == "pinned" and entry.memory.changed() else entry.state,
                bytes=entry.size,
                copied=entry.memory.copied,
                checked=entry.memory.done,
                users=users,
                since=entry.since,
                pools=map(procfs.readable, list(entry.pools.values())),
            )
            for entry, users in entries
        ]

    # What phos-gpu asks.

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """Answer PinImage or UnpinImage."""
        try:
            if connection.uid not in (0, os.geteuid()):
                raise NotPermitted(f"User {connection.uid} may not pin images here.")
            if envelope.WhichOneof("body") == "unpin_image":
                self.unpin(envelope.unpin_image.name, descriptors[0] if descriptors else None)
            else:
                self._pin(connection, envelope, wire.only(descriptors))
        except (PhosError, ImageError, OSError) as error:
            log.error("%s", error)
            connection.done(envelope.id, error=error)
            return
        connection.done(envelope.id)

    def _pin(self, connection: wire.Connection, envelope: wire_pb2.Envelope, directory: int) -> None:
        request = envelope.pin_image
        entry = self.pin(directory, request.name)
        failures: list[Exception] = []

        def work() -> None:
            try:
                self.load(entry, directory, copy=request.copy)
            except Exception as error:
                failures.append(error)

        worker = threading.Thread(target=work, name="pin")
        try:
            worker.start()
        except RuntimeError as error:
            self._let_go(entry)
            raise PhosError(f"{entry.path} is not pinned: {NO_THREAD}") from error
        try:
            loading = True
            while loading:  # once more when all is there: whoever has gone meanwhile wants it no more
                worker.join(REPORT_SECONDS)
                loading = worker.is_alive()
                state = wire_pb2.ImageState(state="loading", bytes_done=entry.memory.done, bytes_total=entry.size)
                connection.send(wire_pb2.Envelope(id=envelope.id, image_state=state))
        except OSError:
            self._let_go(entry)
            worker.join()
            raise PhosError(f"{entry.path} is not pinned: the command that asked for it has ended.") from None
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # the error refers to this frame
