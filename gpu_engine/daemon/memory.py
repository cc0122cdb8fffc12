"""The physical-memory broker: every block of every session, by the descriptor that keeps it alive.

A block is one physical allocation (one ``cuMemCreate``). Whoever holds its descriptor holds the memory: an application
maps it, phosd copies it, and it is freed when the last of them lets go (DESIGN §1).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.daemon.keeper_link import KeeperLink
from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.errors import DaemonUnavailable

log = logging.getLogger(__name__)


class Broker:
    """All blocks that phosd holds. Methods may be called from any thread."""

    def __init__(self, keeper: KeeperLink) -> None:
        self._keeper = keeper
        self._keeper.restarted = self._hand_over
        self._lock = threading.Lock()  # guards _blocks, and has the keeper told of changes in their order
        self._blocks: dict[BlockKey, Block] = {}
        self._users: dict[bytes, int] = {}  # whose each session is; guarded by _lock
        self.removed: Callable[[BlockKey], None] | None = None  # told of blocks that their owners have freed
        self.needed: Callable[[BlockKey, int], None] | None = None
        """Returns when a process of that number may have another's block: its data is there, and it is not saved."""
        self._pids: dict[bytes, int] = {}  # with whose end the keeper lets a session go; guarded by _lock

    def _hand_over(self) -> None:
        """The keeper is to hold what we hold, and no more.

        A new one holds nothing yet; one that was lost for a moment may hold what was removed meanwhile.
        """
        with self._lock:
            for (session, number), block in self._blocks.items():
                self._keeper.add(session, self._pids[session], number, block.size, block.device, block.descriptor)
            count = len(self._blocks)
            removed: list[BlockKey] = []
            with suppress(OSError, DaemonUnavailable):  # it has gone again
                for held in self._keeper.held():
                    os.close(held.descriptor)
                    if (held.session, held.block) not in self._blocks:
                        removed.append((held.session, held.block))
            for key in removed:
                self._keeper.remove(*key)
        log.info("The keeper holds %d blocks.", count)

    @property
    def keeper_pid(self) -> int:
        """The process that holds everything a second time; 0 while there is none."""
        return self._keeper.pid

    def belongs(self, session: bytes, uid: int) -> None:
        """A session's process runs as this user."""
        with self._lock:
            self._users[session] = uid

    def user_of(self, session: bytes) -> int | None:
        """The user whose process a session is, if that is known."""
        with self._lock:
            return self._users.get(session)

    def may_hold(self, key: BlockKey, most: int) -> bool:
        """Whether a session's user may have one more block, of ``most``; root may, and so may who has it already."""
        with self._lock:
            if len(self._blocks) < most or key in self._blocks:
                return True
            uid = self._users.get(key[0])
            if uid is None or sees_all(uid):
                return True
            sessions = {session for session, user in self._users.items() if user == uid}
            return sum(session in sessions for session, _ in self._blocks) < most

    def adopt_from_keeper(self) -> dict[bytes, int]:
        """After a start: take over what the keeper holds from an earlier phosd. Returns session → pid."""
        sessions: dict[bytes, int] = {}
        for held in self._keeper.held():
            key = (held.session, held.block)
            self._blocks[key] = Block(key, held.size, held.device, held.descriptor)
            sessions[held.session] = held.pid
        self._pids.update(sessions)
        return sessions

    def add(self, block: Block, pid: int) -> None:
        """Hold a new block; the descriptor becomes the broker's. A block registered again replaces its former self."""
        with self._lock:
            former = self._blocks.pop(block.key, None)
            self._blocks[block.key] = block
            self._pids[block.key[0]] = pid
            self._keeper.add(block.key[0], pid, block.key[1], block.size, block.device, block.descriptor)
        if former:
            os.close(former.descriptor)

    def hold(self, blocks: Iterable[Block], pid: int) -> None:
        """As :meth:`add` for new blocks, but the keeper does not have them before :meth:`entrust`."""
        with self._lock:
            for block in blocks:
                self._blocks[block.key] = block
                self._pids[block.key[0]] = pid

    def entrust(self, session: bytes) -> None:
        """Give the keeper what a session's :meth:`hold` left out."""
        with self._lock:
            for key, block in self._blocks.items():
                if key[0] == session:
                    self._keeper.add(session, self._pids[session], key[1], block.size, block.device, block.descriptor)

    def remove(self, key: BlockKey) -> None:
        """The block's owner has freed it."""
        with self._lock:
            block = self._blocks.pop(key, None)
            if block:
                self._keeper.remove(*key)
        if block:
            os.close(block.descriptor)
            if self.removed is not None:
                self.removed(key)

    def settle(self) -> None:
        """Return when the keeper too has closed what was removed: it answers in order."""
        try:
            for held in self._keeper.held():
                os.close(held.descriptor)
        except (OSError, DaemonUnavailable):
            pass  # without a keeper nothing but the broker holds anything

    def drop_session(self, session: bytes) -> int:
        """Let all of a session's memory go; returns the bytes."""
        with self._lock:
            self._users.pop(session, None)
            self._pids.pop(session, None)
            gone = [self._blocks.pop(key) for key in list(self._blocks) if key[0] == session]
            self._keeper.remove(session, None)
        for block in gone:
            os.close(block.descriptor)
        return sum(block.size for block in gone)

    def moved(self, session: bytes, pid: int) -> None:
        """The session now lives in process ``pid``."""
        with self._lock:
            self._pids[session] = pid
            self._keeper.moved(session, pid)

    def get(self, key: BlockKey) -> Block | None:
        """A block, if it is held."""
        with self._lock:
            return self._blocks.get(key)

    def of_session(self, session: bytes) -> list[Block]:
        """A session's own blocks, by number."""
        with self._lock:
            return sorted((b for k, b in self._blocks.items() if k[0] == session), key=lambda b: b.key[1])

    def borrow(self, keys: Iterable[BlockKey]) -> list[Block]:
        """Copies of blocks with descriptors of their own, which the caller closes: for a copy that outlives the owner.

        Raises:
            KeyError: one of them is not held.
            OSError: phosd has no descriptors left.
        """
        with self._lock:
            wanted = [self._blocks[key] for key in keys]
            copies: list[Block] = []
            try:
                for b in wanted:
                    copies.append(Block(b.key, b.size, b.device, os.dup(b.descriptor), b.by_application))
            except OSError:
                for block in copies:
                    os.close(block.descriptor)
                raise
        return copies
