"""The GPU memory of one session: the blocks that its frontend registers, and those of others that it maps."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable

from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.identity import Identity
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.errors import CheckpointFailed, ProtocolError
from phos.gpu_engine.process import Allocation, Detached, HostAllocation, MappedBlock, UncarriedState

log = logging.getLogger(__name__)


MAPPING_SECONDS = 10.0
"""A process that was handed another's block says long before that that it maps it, if it does."""


COMING_SECONDS = 1.0
"""So often who waits for another's memory hears that it will come; it gives up when it has heard nothing for longer."""


class SessionBlocks:
    """What one session has of the broker's blocks, by the process's own numbers."""

    def __init__(self, owner: Identity, broker: Broker) -> None:
        self._owner = owner
        self._broker = broker
        self._ordinals: dict[int, int] = {}  # the process's numbering of GPUs → phosd's
        self._by_uuid: dict[bytes, int] = {}  # phosd's numbers
        self._granted: set[BlockKey] = set()  # blocks of others that the image says this process maps
        self._announced = 0
        self._seen: set[int] | None = None  # the blocks registered over this connection, until the table is whole
        self._lock = threading.Lock()  # guards _imports, _handed, _unheld
        self._imports: dict[int, BlockKey] = {}  # block numbers that stand for another session's blocks
        self._handed: dict[BlockKey, float] = {}  # others' that it is about to map, and since when
        self._unheld: set[int] = set()  # blocks without a descriptor: to unmap them would be to lose them
        self._changing = threading.Lock()  # guards _ended; held while the broker is given something for the process
        self._ended = False

    # Registration.

    def announced(self, hello: wire_pb2.Hello, ordinals: dict[bytes, int]) -> None:
        """A connection begins; ``ordinals`` gives phosd's number of each GPU by its UUID."""
        detached = hello.state == wire_pb2.DETACHED
        if not detached:  # it maps all of them, and they are told again
            with self._lock:
                self._imports = {}
                self._unheld = set()
            self.returned()
        self._announced = hello.blocks
        self._seen = None if detached else set()
        self._by_uuid = ordinals
        self.sees(hello.devices)
        self._settle_table()

    def sees(self, devices: Iterable[wire_pb2.Device]) -> None:
        """These are the process's GPUs, by its own numbers."""
        self._ordinals = {d.ordinal: self._by_uuid[d.uuid] for d in devices if d.uuid in self._by_uuid}

    def restored(self, message: pb.Process, imports: dict[int, BlockKey]) -> Detached:
        """What an image says the process maps; ``imports`` of it are other sessions' blocks."""
        self._granted = set(imports.values())
        with self._lock:
            self._imports = dict(imports)
        return Detached(
            blocks=[
                MappedBlock(b.block, imports.get(b.block, (self._owner.session, b.block)), b.size, b.device)
                for b in message.blocks
            ],
            host_allocations=[HostAllocation(h.address, h.size, h.entry_point) for h in message.host_allocations],
        )

    def adopted(self) -> None:
        """An earlier phosd has lent the process others' blocks: it was detached, and maps them when it is attached."""
        with self._lock:
            self._imports = self._broker.lent(self._owner.session)

    @property
    def complete(self) -> bool:
        """Whether every block that Hello announced has been registered."""
        return self._seen is None

    def _settle_table(self) -> None:
        """Once all blocks are registered: what was not among them was freed while no phosd was there to be told."""
        if self._seen is None or len(self._seen) < self._announced:
            return
        for block in self._broker.of_session(self._owner.session):
            if block.key[1] not in self._seen:
                self._broker.remove(block.key)
        self._seen = None

    def added(self, added: wire_pb2.BlockAdded, descriptors: list[int]) -> None:
        """The process has a block; the descriptors become the broker's.

        Raises:
            ProtocolError: it may not have it, or its descriptor is missing.
        """
        with self._changing:
            if self._ended:
                wire.close_all(descriptors)
                return
            try:
                if self._seen is not None:
                    self._require_room(self._seen, added.block)
                    self._seen.add(added.block)
            except ProtocolError:
                wire.close_all(descriptors)
                raise
            try:
                self._take(added, descriptors)
            finally:
                self._settle_table()

    def _require_room(self, kept: Collection[int], number: int) -> None:
        """
        Raises:
            ProtocolError: no GPUs have room for so many blocks: somebody only fills phosd's memory.
        """
        if len(kept) >= limits.NUMBERS and number not in kept:
            raise ProtocolError(f"Process {self._owner.pid} told of more than {limits.NUMBERS} GPU memory blocks.")

    def end(self) -> None:
        """The process has ended, and its memory is about to be let go.

        What it has told and nobody has read yet is read after that: it would be held for ever, or as the memory of
        another process that is restored under the same number.
        """
        with self._changing:
            self._ended = True

    def _take(self, added: wire_pb2.BlockAdded, descriptors: list[int]) -> None:
        pid = self._owner.pid
        if added.owner_session:
            wire.close_all(descriptors)
            key = (added.owner_session, added.owner_block)
            self._refuse_anothers(key)
            with self._lock:
                self._require_room(self._imports, added.block)
                self._imports[added.block] = key
                self._handed.pop(key, None)
            return
        key = (self._owner.session, added.block)
        if added.descriptor_lost:
            wire.close_all(descriptors)
            if self._broker.get(key) is None:
                log.error("Process %d: nobody has a descriptor of its %d byte block %d.", pid, added.size, added.block)
                with self._lock:
                    self._require_room(self._unheld, added.block)
                    self._unheld.add(added.block)
            return
        if len(descriptors) != 1:
            wire.close_all(descriptors)
            raise ProtocolError(f"Process {pid} announced block {added.block} without its descriptor.")
        device = self._ordinals.get(added.device, added.device)
        block = Block(key, added.size, device, descriptors[0], added.owner == wire_pb2.BlockAdded.APPLICATION)
        if why := self._broker.misfit(block):
            self._refuse(block, f"Process {pid} has told of GPU memory block {added.block}, and {why}")
            return
        if not sealed.can_be_mapped(descriptors[0], added.size):
            wire.close_all(descriptors)
            raise ProtocolError(
                f"Process {pid} announced block {added.block}, and could still shorten its memory (it is no memfd of "
                f"{added.size} bytes that is sealed against that), which phosd would not survive when it copies it."
            )
        if not self._broker.may_hold(key, limits.blocks()):
            self._refuse(
                block,
                f"User {self._owner.uid} has {limits.blocks()} GPU memory blocks at phosd already, and one user may "
                f"have no more: process {pid} has another",
            )
            return
        self._broker.add(block, pid)

    def _refuse(self, block: Block, why: str) -> None:
        """It is not held: its process runs on with it."""
        os.close(block.descriptor)
        if not self._unheld:
            log.error("%s. The process runs on, and cannot be checkpointed.", why)
        with self._lock:
            self._require_room(self._unheld, block.key[1])
            self._unheld.add(block.key[1])

    def _refuse_anothers(self, key: BlockKey) -> None:
        """A process that names another's memory says that it maps it, and is handed nothing for that.

        An owner that ended before this phosd began is nobody whom it knows, nor are those who connect later. Whoever
        maps their memory is served all the same, without it: what follows asks whether it is :meth:`entitled`.

        Raises:
            ProtocolError: it is another user's.
        """
        if len(key[0]) != len(self._owner.session):
            raise ProtocolError(f"Process {self._owner.pid} named a session of {len(key[0])} bytes.")
        unknown = self._broker.user_of(key[0]) is None  # first: who becomes known meanwhile is asked for again
        if not unknown and not self.entitled(key):
            raise ProtocolError(f"Process {self._owner.pid} named memory of a process that is not its user's.")

    def removed(self, number: int) -> None:
        """The process has freed a block, or unmapped another's."""
        with self._changing:
            if self._ended:
                return
            with self._lock:
                self._unheld.discard(number)
                imported = self._imports.pop(number, None)
            if imported is None:
                self._broker.remove((self._owner.session, number))
            else:
                self._broker.take_back(self._owner.session, number)

    # Questions.

    def gpu_ordinals(self) -> list[int]:
        """phosd's numbers of the GPUs the process sees, in the process's order."""
        return [self._ordinals[n] for n in sorted(self._ordinals)]

    def by_ordinal(self) -> dict[int, int]:
        """The process's numbers of the GPUs it sees, by phosd's."""
        return {mine: theirs for theirs, mine in self._ordinals.items()}

    def own(self) -> list[Block]:
        """Those whose owner the process is."""
        return self._broker.of_session(self._owner.session)

    def keys(self) -> dict[int, BlockKey]:
        """All: its own, and those of others that it maps, or says so: it may not be entitled to them."""
        own = {block.key[1]: block.key for block in self.own()}
        with self._lock:
            return own | self._imports

    def of_others(self) -> set[BlockKey]:
        """Other processes' that it maps, or may be about to map."""
        since = time.monotonic() - MAPPING_SECONDS
        with self._lock:
            keys = {*self._imports.values(), *(key for key, at in self._handed.items() if at > since)}
        return keys.difference(
            self._unentitled(keys)
        )  # who only says so is not in the way of another user's checkpoint

    def entitled(self, key: BlockKey) -> bool:
        """Memory of another process goes only to the same user's processes and to root's (DESIGN §3)."""
        return not self._unentitled([key])

    def _unentitled(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those that are no memory of this process's, of its user's or of its image's."""
        others = [
            key
            for key in keys
            if key[0] != self._owner.session
            and key not in self._granted
            and self._owner.uid != 0
            and self._broker.user_of(key[0]) != self._owner.uid
        ]
        if not others:
            return []
        lent = set(self._broker.lent(self._owner.session).values())  # whose user is forgotten with its owner
        return [key for key in others if key not in lent]

    def resolve(self, key: BlockKey, coming: Callable[[], bool]) -> tuple[wire_pb2.TokenResolved, list[int]] | None:
        """Exported memory: the descriptor that a token stands for, now the caller's, or a sentence why there is none.

        Waits until the block's data is there, and no checkpoint has its owner and not this process. ``coming`` is told
        every second that it does, and says whether anybody wants to know; None if not.
        """
        try:
            if not self.entitled(key):  # first: nobody is to ask, or to be taken for somebody who maps it
                raise KeyError(key)
            if self._broker.needed is not None and key[0] != self._owner.session:
                self._is_handed(key)  # before it waits: a checkpoint that begins then sees it
                while not self._broker.needed(key, self._owner.pid, COMING_SECONDS):
                    if not coming():
                        self._not_handed(key)
                        return None
                    self._is_handed(key)
                self._is_handed(key)
            borrowed = self._broker.borrow([key], self._owner.session)
        except (KeyError, OSError) as failure:
            self._not_handed(key)
            error = "phosd knows no such exported memory; its owner may have ended."
            if isinstance(failure, OSError):
                error = f"phosd cannot hand it over: {failure}"
            return wire_pb2.TokenResolved(error=error), []
        block = borrowed[0]
        ordinals = self.by_ordinal()
        if block.device not in ordinals:
            wire.close_all([block.descriptor])
            self._not_handed(key)
            error = f"The memory is on GPU {block.device}, which process {self._owner.pid} does not see."
            return wire_pb2.TokenResolved(error=error), []
        return wire_pb2.TokenResolved(size=block.size, device=ordinals[block.device]), [block.descriptor]

    def _is_handed(self, key: BlockKey) -> None:
        with self._lock:
            self._handed[key] = time.monotonic()

    def _not_handed(self, key: BlockKey) -> None:
        with self._lock:
            self._handed.pop(key, None)

    # Detach.

    def secure(self) -> None:
        """Before anything is unmapped: see to it that all of it is held here until it is mapped again.

        Raises:
            CheckpointFailed: something is held by nobody.
            NotPermitted: its user has too much.
        """
        pid, executable = self._owner.pid, self._owner.executable
        with self._lock:
            unheld = len(self._unheld)
        if unheld:
            raise CheckpointFailed(
                f"phosd has no descriptor of {unheld} GPU memory block(s) of process {pid} ({executable}): the driver "
                "did not give one, phosd and its keeper were both killed since the process was last restored, or its "
                "user has too many, or larger ones than there is memory (phosd's log says so). It runs on, but it "
                "cannot be checkpointed; restart it."
            )
        try:
            if not self._keep_imports(pid, detaches=True):
                raise CheckpointFailed(f"Process {pid} ({executable}) ended while it was being checkpointed.")
        except KeyError as error:
            raise CheckpointFailed(
                f"Process {pid} ({executable}) maps GPU memory of another process that has ended, or has freed it: "
                "phosd holds it no more. It runs on, but it cannot be checkpointed while it maps that."
            ) from error
        except OSError as error:
            raise CheckpointFailed(
                f"phosd cannot hold what process {pid} ({executable}) maps of other processes: {error}"
            ) from error

    def keep_imports(self, pid: int) -> None:
        """Until :meth:`returned` the process is lent what it maps of others, who may end meanwhile.

        ``pid``: with whose end the keeper lets it go.

        Raises: as :meth:`~phos.gpu_engine.daemon.memory.Broker.lend`.
        """
        self._keep_imports(pid)

    def _keep_imports(self, pid: int, *, detaches: bool = False) -> bool:
        """The same; returns False if the process has ended.

        ``detaches``: and the next phosd is to bring it back. Not what is being restored, and fails with this phosd.
        """
        with self._changing:
            if self._ended:
                return False
            with self._lock:
                imports = dict(self._imports)
            self._require_entitled(imports.values())
            self._broker.lend(self._owner.session, pid, imports, limits.blocks())
            if detaches:
                self._broker.detaches(self._owner.session, pid)
            return True

    def returned(self) -> None:
        """The process maps its memory again, or still: that keeps what is another's."""
        self._broker.take_back(self._owner.session)
        self._broker.attached(self._owner.session)

    def borrow(self, keys: Iterable[BlockKey]) -> list[Block]:
        """Copies of blocks that it maps; see :meth:`~phos.gpu_engine.daemon.memory.Broker.borrow`.

        Raises: as there; KeyError also for what it only says that it maps.
        """
        wanted = list(keys)
        self._require_entitled(wanted)
        return self._broker.borrow(wanted, self._owner.session)

    def _require_entitled(self, keys: Iterable[BlockKey]) -> None:
        """
        Raises:
            KeyError: it is not; the same as if nobody held that memory.
        """
        for key in self._unentitled(keys):
            raise KeyError(key)

    def parse_map(self, done: wire_pb2.DetachDone, descriptors: list[int]) -> Detached:
        """What the process had mapped, from the file that came with DetachDone; the descriptors are closed.

        Raises:
            ProtocolError: there is none, or it names memory that the process may not have.
            Exception: protobuf's own, of a file that is no MemoryMap.
        """
        memory = wire_pb2.MemoryMap()
        try:
            if len(descriptors) != 1:
                raise ProtocolError("the memory map is missing.")
            memory.ParseFromString(wire.content(descriptors[0], limits.MAP_BYTES))
        finally:
            wire.close_all(descriptors)
        own = self._owner.session
        blocks = []
        for b in memory.blocks:
            key = (b.owner_session, b.owner_block) if b.owner_session else (own, b.block)
            if b.owner_session and not self.entitled(key):
                raise ProtocolError(f"block {b.block} belongs to another user's process.")
            held = self._broker.get(key)
            if held is not None and held.size != b.size:  # tables are made for that many chunks
                raise ProtocolError(f"block {b.block} has {b.size} bytes in it, and {held.size} as phosd was told.")
            blocks.append(MappedBlock(b.block, key, b.size, self._ordinals.get(b.device, b.device)))
        return Detached(
            blocks=blocks,
            allocations=[Allocation(a.address, a.size, a.block, a.offset, a.entry_point) for a in memory.allocations],
            host_allocations=[HostAllocation(h.address, h.size, h.entry_point) for h in memory.host_allocations],
            uncarried=[UncarriedState(u.kind, u.count, u.bytes) for u in memory.uncarried],
            unmap=done.unmap_ns * 1e-9,
            reduce=done.reduce_ns * 1e-9,
        )
