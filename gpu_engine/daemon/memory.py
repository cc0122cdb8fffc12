"""The physical-memory broker: every block of every session, by the descriptor that keeps it alive.

A block is one physical allocation (one ``cuMemCreate``). Whoever holds its descriptor holds the memory: an application
maps it, phosd copies it, and it is freed when the last of them lets go (DESIGN §1).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.daemon import limits
from phos.gpu_engine.daemon.keeper_link import KeeperLink
from phos.gpu_engine.daemon.loans import Loans
from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.errors import DaemonUnavailable, NotPermitted

log = logging.getLogger(__name__)


class Broker:
    """All blocks that phosd holds. Methods may be called from any thread."""

    def __init__(self, keeper: KeeperLink) -> None:
        self._keeper = keeper
        self._keeper.restarted = self._hand_over
        self._lock = threading.Lock()  # guards _blocks, _lent, _detached; has the keeper told of changes in their order
        self._blocks: dict[BlockKey, Block] = {}
        self._lent: dict[bytes, dict[int, Block]] = {}  # others' blocks, by who has them and by that one's numbers
        self._detached: set[bytes] = set()  # sessions that are detached, or about to be: the keeper knows of them
        self._users: dict[bytes, int] = {}  # whose each session is; guarded by _lock
        self.loans = Loans()
        self.removed: Callable[[BlockKey], None] | None = None  # told of blocks that their owners have freed
        self.needed: Callable[[BlockKey, int, float], bool] | None = None
        """Whether a process of that number may have another's block, within so many seconds: its data is there, and it
        is not being saved."""
        self._pids: dict[bytes, int] = {}  # with whose end the keeper lets a session go; guarded by _lock
        self._bytes: Counter[bytes] = Counter()  # of each session's own blocks; guarded by _lock
        self.capacity: Mapping[int, int] | None = None
        """The memory of each GPU, bytes; None: nobody has said."""

    def _hand_over(self) -> None:
        """The keeper is to hold what we hold, and no more.

        A new one holds nothing yet; one that was lost for a moment may hold what was removed meanwhile.
        """
        with self._lock:
            for (session, number), block in self._blocks.items():
                self._keeper.add(session, self._pids[session], number, block.size, block.device, block.descriptor)
            lent = {(who, number): block for who, blocks in self._lent.items() for number, block in blocks.items()}
            for (session, number), b in lent.items():
                self._keeper.add(session, self._pids[session], number, b.size, b.device, b.descriptor, b.key)
            for session in self._detached:
                self._keeper.detached(session, self._pids[session])
            count = len(self._blocks) + len(lent)
            removed: list[BlockKey] = []
            detached: dict[bytes, int] = {}
            with suppress(OSError, DaemonUnavailable):  # it has gone again
                for held in self._keeper.held(detached):
                    os.close(held.descriptor)
                    key = held.session, held.block
                    if key not in self._blocks and key not in lent:
                        removed.append(key)
            for key in removed:
                self._keeper.remove(*key)
            for session in detached.keys() - self._detached:
                self._keeper.attached(session)
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

    def misfit(self, block: Block) -> str:
        """Why the GPUs cannot have such a block of a session, which only says so; empty: they can."""
        if self.capacity is None:
            return ""
        total = self.capacity.get(block.device)
        if total is None:
            return f"it is said to be on GPU {block.device}, which phosd does not see"
        if block.size > total:
            return f"it is said to have {block.size} bytes, and GPU {block.device} has {total}"
        with self._lock:
            former = self._blocks.get(block.key)
            user = self._users.get(block.key[0], block.key[0])
            has = sum(size for session, size in self._bytes.items() if self._users.get(session, session) == user)
        has -= former.size if former else 0
        if has + block.size > limits.TIMES_ALL_GPUS * sum(self.capacity.values()):
            return f"with the {has} bytes that its user is said to have already, that is more than all GPUs have"
        return ""

    def may_hold(self, key: BlockKey, most: int) -> bool:
        """Whether a session's user may have one more block, of ``most``; root may, and so may who has it already."""
        with self._lock:
            return key in self._blocks or self._has_room(key[0], 1, most)

    def _has_room(self, session: bytes, more: int, most: int) -> bool:
        """Whether a session's user may have so many blocks more, its own and lent ones; with the lock held."""
        if len(self._blocks) + sum(map(len, self._lent.values())) + more <= most:
            return True
        uid = self._users.get(session)
        if uid is None or sees_all(uid):
            return True
        sessions = {session for session, user in self._users.items() if user == uid}
        has = sum(owner in sessions for owner, _ in self._blocks)
        return has + sum(len(lent) for who, lent in self._lent.items() if who in sessions) + more <= most

    def adopt_from_keeper(self) -> dict[bytes, int]:
        """After a start: take over what the keeper holds from an earlier phosd, and knows. Returns session → pid."""
        sessions: dict[bytes, int] = {}
        detached: dict[bytes, int] = {}
        for held in self._keeper.held(detached):
            key = (held.session, held.block)
            if held.owner is not None:
                lent = self._lent.setdefault(held.session, {})
                lent[held.block] = Block(held.owner, held.size, held.device, held.descriptor)
            else:
                self._put(Block(key, held.size, held.device, held.descriptor))
            sessions[held.session] = held.pid
        sessions |= detached
        self._detached |= detached.keys()
        self._pids.update(sessions)
        return sessions

    def add(self, block: Block, pid: int) -> None:
        """Hold a new block; the descriptor becomes the broker's. A block registered again replaces its former self."""
        with self._lock:
            former = self._pop(block.key)
            self._put(block)
            self._pids[block.key[0]] = pid
            self._keeper.add(block.key[0], pid, block.key[1], block.size, block.device, block.descriptor)
        if former:
            os.close(former.descriptor)

    def hold(self, blocks: Iterable[Block], pid: int) -> None:
        """As :meth:`add` for new blocks, but the keeper does not have them before :meth:`entrust`."""
        with self._lock:
            for block in blocks:
                self._put(block)
                self._pids[block.key[0]] = pid

    def _put(self, block: Block) -> None:
        self._blocks[block.key] = block
        self._bytes[block.key[0]] += block.size

    def _pop(self, key: BlockKey) -> Block | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._bytes[key[0]] -= block.size
        return block

    def entrust(self, session: bytes) -> None:
        """Give the keeper what a session's :meth:`hold` left out."""
        with self._lock:
            for key, block in self._blocks.items():
                if key[0] == session:
                    self._keeper.add(session, self._pids[session], key[1], block.size, block.device, block.descriptor)

    def remove(self, key: BlockKey) -> None:
        """The block's owner has freed it."""
        with self._lock:
            block = self._pop(key)
            if block:
                self._keeper.remove(*key)
        if block:
            os.close(block.descriptor)
            self.loans.freed(key)
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
        """Let all of a session's memory go, and what it was lent; returns the bytes that nobody has any more."""
        with self._lock:
            self._users.pop(session, None)
            self._pids.pop(session, None)
            self._detached.discard(session)
            gone = [self._blocks.pop(key) for key in list(self._blocks) if key[0] == session]
            self._bytes.pop(session, None)
            gone += self._lent.pop(session, {}).values()
            left = {block.key for lent in self._lent.values() for block in lent.values()} | self._blocks.keys()
            self._keeper.remove(session, None)
        for block in gone:
            os.close(block.descriptor)
        return sum({block.key: block.size for block in gone if block.key not in left}.values())

    def lend(self, session: bytes, pid: int, wanted: Mapping[int, BlockKey], most: int) -> None:
        """Have a session hold others' blocks itself, by its own numbers, whatever becomes of the owners.

        A mapping keeps its memory, but this session is about to unmap it. In place of what it was lent before, until
        :meth:`take_back`. ``most``: what its user may have, as in :meth:`may_hold`.

        Raises:
            KeyError: one of them is not held.
            OSError: phosd has no descriptors left.
            NotPermitted: the user has too many.
        """
        with self._lock:
            former = self._lent.get(session, {})
            if not self._has_room(session, len(wanted) - len(former), most):
                raise NotPermitted(
                    f"Process {pid} maps {len(wanted)} GPU memory blocks of others, and cannot be checkpointed: its "
                    f"user would have more than {most} blocks at phosd."
                )
            lent = dict(zip(wanted, self._copies(session, wanted.values()), strict=True))
            self._lent[session] = lent
            self._pids[session] = pid
            for number, b in lent.items():
                self._keeper.add(session, pid, number, b.size, b.device, b.descriptor, b.key)
            for number, block in former.items():
                os.close(block.descriptor)
                if number not in lent:
                    self._keeper.remove(session, number)

    def detaches(self, session: bytes, pid: int) -> None:
        """A session is about to be detached: the next phosd is to know it, although it may have no memory.

        Until :meth:`attached`. ``pid``: with whose end the keeper forgets it.
        """
        with self._lock:
            self._detached.add(session)
            self._pids[session] = pid
            self._keeper.detached(session, pid)

    def attached(self, session: bytes) -> None:
        """The session is not detached, or not any more."""
        with self._lock:
            if session in self._detached:
                self._detached.remove(session)
                self._keeper.attached(session)

    def take_back(self, session: bytes, number: int | None = None) -> None:
        """The session maps what it was lent, or has unmapped it for good: one block, or (None) all."""
        with self._lock:
            lent = self._lent.get(session, {})
            for n in [n for n in lent if number in (None, n)]:
                os.close(lent.pop(n).descriptor)
                self._keeper.remove(session, n)

    def lent(self, session: bytes) -> dict[int, BlockKey]:
        """The blocks of others that a session has been lent, by its own numbers."""
        with self._lock:
            return {number: block.key for number, block in self._lent.get(session, {}).items()}

    def left_behind(self) -> list[Block]:
        """What is held only because it is lent: its owner has ended, or has freed it. Each block once."""
        with self._lock:
            lent = {block.key: block for blocks in self._lent.values() for block in blocks.values()}
            return [block for key, block in lent.items() if key not in self._blocks]

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

    def borrow(self, keys: Iterable[BlockKey], session: bytes = b"") -> list[Block]:
        """Copies of blocks with descriptors of their own, which the caller closes: for a copy that outlives the owner.

        ``session``: for whom; what it was lent is what it had mapped.

        Raises:
            KeyError: one of them is not held.
            OSError: phosd has no descriptors left.
        """
        with self._lock:
            return self._copies(session, keys)

    def _copies(self, session: bytes, keys: Iterable[BlockKey]) -> list[Block]:
        lent = {block.key: block for block in self._lent.get(session, {}).values()}
        wanted = [lent[key] if key in lent else self._blocks[key] for key in keys]
        copies: list[Block] = []
        try:
            for b in wanted:
                copies.append(Block(b.key, b.size, b.device, os.dup(b.descriptor), b.by_application))
        except OSError:
            for block in copies:
                os.close(block.descriptor)
            raise
        return copies
