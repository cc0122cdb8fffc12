"""In which order programs first touch their GPU memory: what a lazy restore loads first.

A window (frontend/window_table.h) writes it down, of a concurrent checkpoint or of a lazy restore. It is advice: a
chunk that it does not name comes later, one that does not exist any more is passed over.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine.blocks import BlockKey
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.files import open_regular
from phos.images.formats import digest

log = logging.getLogger(__name__)

ORDER_MOST = 16 << 20
"""Bytes of such a file that are believed: no commit record says how long it is, and it may be anybody's. A chunk takes
30 at most, so these are the chunks of two terabytes."""

_writing = threading.Lock()  # several restores of one image may end at the same moment

Touched = tuple[BlockKey, int]
"""A block, and the number of the chunk in it."""


class FirstTouches(NamedTuple):
    """Chunks in the order in which a process first read or wrote them, and in which it first wrote to them."""

    touched: list[Touched]
    written: list[Touched]


class TouchOrder:
    """What phosd knows of the processes it serves. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _sessions
        self._sessions: dict[bytes, list[Touched]] = {}

    def learn(self, session: bytes, touched: Sequence[Touched], blocks: Container[BlockKey]) -> None:
        """What a window has seen; where it was too short to see all, what was known before still counts.

        ``blocks``: those that its process had; what was known of others is forgotten, as they were freed.
        """
        with self._lock:
            known = [place for place in self._sessions.pop(session, []) if place[0] in blocks]
            if learnt := list(dict.fromkeys([*touched, *known])):
                self._sessions[session] = learnt

    def of(self, sessions: Iterable[bytes]) -> list[Touched]:
        """Of several processes, which begin at the same moment."""
        with self._lock:
            lists = [self._sessions[session] for session in sessions if session in self._sessions]
        return list(dict.fromkeys(place for places in zip_longest(*lists) for place in places if place is not None))

    def forget(self, session: bytes) -> None:
        """Its process has ended."""
        with self._lock:
            self._sessions.pop(session, None)


def to_messages(order: Iterable[Touched]) -> list[pb.Touched]:
    """For an image: neighbours in the order that are in one block share a message."""
    messages: list[pb.Touched] = []
    last: BlockKey | None = None
    for key, chunk in order:
        if key != last:
            messages.append(pb.Touched(session=key[0], block=key[1]))
            last = key
        messages[-1].chunks.append(chunk)
    return messages


def from_messages(messages: Iterable[pb.Touched]) -> list[Touched]:
    """The reverse."""
    return [((m.session, m.block), chunk) for m in messages for chunk in m.chunks]


def _sealed(image_id: bytes, messages: Iterable[pb.Touched]) -> pb.Order:
    order = pb.Order(image_id=image_id, touched=messages)
    order.hash = digest(order.SerializeToString(deterministic=True))
    return order


def read_beside(directory: int, image_id: bytes) -> list[Touched]:
    """What a lazy restore of this image has written beside it; nothing if there is nothing that can be trusted."""
    try:
        with open(open_regular(directory, formats.ORDER_FILE), "rb") as file:
            raw = file.read(ORDER_MOST + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s is of no use: %s", formats.ORDER_FILE, error)
        return []
    if len(raw) > ORDER_MOST:
        log.warning("%s is of no use: it has more than %d bytes.", formats.ORDER_FILE, ORDER_MOST)
        return []
    try:
        (order,) = formats.parse_file(raw, formats.ORDER_FILE, formats.ORDER)
    except (ImageError, ValueError) as error:
        log.warning("%s is of no use: %s", formats.ORDER_FILE, error)
        return []
    if order.image_id != image_id or _sealed(image_id, order.touched).hash != order.hash:
        log.warning("%s is of no use: it is damaged, or another image's.", formats.ORDER_FILE)
        return []
    return from_messages(order.touched)


def write_beside(directory: int, image_id: bytes, touched: Iterable[Touched]) -> bool:
    """Keep it beside an image, whole or not at all; whether the directory could be written to."""
    raw = formats.frame_file(formats.ORDER, [_sealed(image_id, to_messages(touched))])
    temporary = formats.ORDER_TEMPORARY
    with _writing:
        # A phosd that was killed may have left one, and the directory's owner may have put anything there.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o644, dir_fd=directory), "wb") as file:
                file.write(raw)
            os.rename(temporary, formats.ORDER_FILE, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            return False
    return True
