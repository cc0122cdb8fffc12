"""A session: phosd's end of one process under the frontend, over all the connections that the process makes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.daemon import kernels, wire
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.states import SessionState, StateMachine
from phos.gpu_engine.daemon.twins import Twins
from phos.gpu_engine.daemon.twins import wanted as twins_wanted
from phos.gpu_engine.errors import CheckpointFailed, MemoryLost, Mispredicted, PhosError, ProtocolError, Unresponsive
from phos.gpu_engine.inventory import LoadedModule
from phos.gpu_engine.process import (
    Allocation,
    Detached,
    HostAllocation,
    MappedBlock,
    QuiesceTimes,
    TracingWindow,
    UncarriedState,
)
from phos.gpu_engine.ptx_instrument.twin_table import Report
from phos.gpu_engine.spec.speculator import Speculator

log = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""How long a frontend may take for a request that involves no waiting for the GPU."""

HURRY_SECONDS = 30.0
"""For how long the analysis of a process's kernels goes before others' once it is checkpointed or restored."""

LATER_SECONDS = 0.25
"""How often a process that was restored lazily is told of descriptors that have been worked out since."""

DESCRIBE_RESTORED_SECONDS = 0.05
"""How long a process that is restored lazily stands still for access descriptors that are being worked out. Without
one, a launch waits for all that its arguments point to."""

RESIDUE_SECONDS = 10.0
"""How long a frontend may take to map a few hundred megabytes, while its application computes."""

HANG_UP_SECONDS = 3.0
"""How long a frontend that has said that it is detached may take to close its connection."""

UNKNOWN_USER = -1
"""Of a session whose process has not been restored yet."""

STOPPED_SECONDS = 1.0
"""A process that was stopped for so long will not answer before somebody continues it."""

MODULES_KEPT = 1 << 16
KINDS_KEPT = 64
TEXT_KEPT = 4096
"""A frontend that has gone mad must not fill phosd's memory: modules, kinds of uncarried state, bytes of a text."""


class _Request:
    """A request on its way: filled by the receiving thread."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: wire_pb2.Envelope | None = None
        self.descriptors: list[int] = []


class Session:
    """One process under the frontend. Implements :class:`phos.gpu_engine.process.GatedProcess`."""

    def __init__(
        self,
        session: bytes,
        pid: int,
        uid: int,
        broker: Broker,
        holds: Holds,
        speculator: Speculator,
        state: SessionState,
    ) -> None:
        self.session = session
        self.pid = pid
        self.uid = uid
        self.executable = ""
        self.driver_version = 0
        self.devices: dict[int, bytes] = {}
        self.machine = StateMachine(state)
        self.uncarried: dict[str, UncarriedState] = {}
        self.modules: list[LoadedModule] = []
        self.detached: Detached | None = None
        self.lost_reason = ""
        self.connections = 0  # made so far
        self.attach_failures = 0  # in a row
        self.takes_residue = False
        self.residue_bytes: int | None = None
        self.restore_thread = 0  # the driver's, as the process numbers it; 0: not asked yet
        self.announced_blocks = 0
        self.kernels_told = 0  # names of kernels that have come over this connection
        self._seen: set[int] | None = None  # the blocks registered over this connection, until the table is whole
        self._from_image = False  # restored, and not attached yet
        self._image_table = b""  # of access descriptors, as the image has it
        self._whole_table = False  # it names every kernel that the process has asked for
        self._unheld: set[int] = set()  # blocks without a descriptor: to unmap them would be to lose them
        self._granted: set[BlockKey] = set()  # blocks of others that the image says this process maps
        self._ordinals: dict[int, int] = {}  # the process's numbering of GPUs → phosd's
        self._broker = broker
        self._holds = holds
        self._speculator = speculator
        self._connection: wire.Connection | None = None
        self._hung_up = threading.Event()  # the last connection has ended
        self._lock = threading.Lock()  # guards _requests, _next_id, _connection, _imports
        self._requests: dict[int, _Request] = {}
        self._next_id = 1
        self._window_lock = threading.Lock()  # guards _window, _tracing; held while the window is opened
        self._window: TracingWindow | None = None
        self._tracing = False
        self._broken_window = False
        self._twins: Twins | None = None  # those of the last window
        self._imports: dict[int, BlockKey] = {}  # block numbers that stand for another session's blocks

    # Connections.

    def connected(self, connection: wire.Connection, hello: wire_pb2.Hello, ordinals: dict[bytes, int]) -> None:
        """A frontend said hello; ``ordinals`` gives phosd's number of each GPU by its UUID."""
        if self._tracing:
            self._broken_window = True  # it ended its window with the connection, and has not traced since
        with self._lock:
            self.connections += 1
            former, self._connection = self._connection, connection
            self._hung_up.clear()
            waiting, self._requests = list(self._requests.values()), {}
            if hello.state != wire_pb2.DETACHED:
                self._imports = {}  # told again
                self._unheld = set()
        for request in waiting:  # asked over the former connection: no answer will come
            request.done.set()
        if former:
            former.shutdown()
        self.pid = connection.pid
        self.executable = hello.executable
        self.driver_version = hello.driver_version
        self.devices = {device.ordinal: device.uuid for device in hello.devices}
        self.modules = []  # told again over every connection, as the totals are
        self.uncarried = {}
        self.kernels_told = 0
        self.announced_blocks = hello.blocks
        self.takes_residue = hello.residue
        self._seen = None if hello.state == wire_pb2.DETACHED else set()
        self._ordinals = {n: ordinals[uuid] for n, uuid in self.devices.items() if uuid in ordinals}
        self._settle_table()

    @property
    def table_complete(self) -> bool:
        """Whether every block that Hello announced has been registered."""
        return self._seen is None

    def _settle_table(self) -> None:
        """Once all blocks are registered: what was not among them was freed while no phosd was there to be told."""
        if self._seen is None or len(self._seen) < self.announced_blocks:
            return
        for block in self._broker.of_session(self.session):
            if block.key[1] not in self._seen:
                self._broker.remove(block.key)
        self._seen = None

    def gpu_ordinals(self) -> list[int]:
        """phosd's numbers of the GPUs the process sees, in the process's order."""
        return [self._ordinals[n] for n in sorted(self._ordinals)]

    def disconnected(self, connection: wire.Connection) -> None:
        """The connection ended: on purpose (detached), by a fault, or with the process."""
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            waiting, self._requests = list(self._requests.values()), {}
            self._hung_up.set()
        for request in waiting:
            request.done.set()

    def handle(self, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """One packet from the frontend; the descriptors become the session's."""
        kind = envelope.WhichOneof("body")
        if kind in ("done", "quiesce_done", "detach_done", "attach_done"):
            with self._lock:
                request = self._requests.pop(envelope.id, None)
            if request is None:
                wire.close_all(descriptors)
                return
            request.answer, request.descriptors = envelope, descriptors
            request.done.set()
            return
        if kind == "block_added":
            self._block_added(envelope.block_added, descriptors)
            return
        if kind == "module_loaded":
            loaded_ = envelope.module_loaded
            kernels.module_loaded(self._speculator, self.session, self.pid, self.uid, loaded_, descriptors)
        wire.close_all(descriptors)
        if kind == "block_removed":
            self._block_removed(envelope.block_removed.block)
            if envelope.id:  # the process ran out of memory and waits for what it gave back
                self._broker.settle()
                self._tell([], envelope.id, done=wire_pb2.Done())
        elif kind == "uncarried":
            report = envelope.uncarried
            if len(self.uncarried) < KINDS_KEPT or report.kind in self.uncarried:
                kind_ = report.kind[:TEXT_KEPT]
                self.uncarried[kind_] = UncarriedState(kind_, report.count, report.bytes)
        elif kind == "module_loaded":
            loaded = envelope.module_loaded
            if len(self.modules) < MODULES_KEPT:
                self.modules.append(
                    LoadedModule(loaded.entry_point[:TEXT_KEPT], loaded.size, loaded.path[:TEXT_KEPT], loaded.offset)
                )
        elif kind == "kernels_seen":
            kernels.kernels_seen(self._speculator, self.session, envelope.kernels_seen)
            self.kernels_told += len(envelope.kernels_seen.kernel)
        elif kind == "token_resolve":
            asked = (envelope.id, (envelope.token_resolve.session, envelope.token_resolve.block))
            # It may have to wait, and what the process answers meanwhile must be read.
            threading.Thread(target=self._resolve, args=asked, daemon=True, name="resolve").start()
        else:
            raise ProtocolError(f"Process {self.pid} sent an unexpected packet ({kind}).")

    def _entitled(self, key: BlockKey) -> bool:
        """Memory of another process goes only to the same user's processes and to root's (DESIGN §3)."""
        return (
            key[0] == self.session or key in self._granted or self.uid == 0 or self._broker.user_of(key[0]) == self.uid
        )

    def _resolve(self, number: int, key: BlockKey) -> None:
        """Exported memory: the descriptor that a token stands for."""
        resolved = wire_pb2.TokenResolved(error="phosd knows no such exported memory; its owner may have ended.")
        try:
            if self._broker.needed is not None and key[0] != self.session:
                self._broker.needed(key)
            borrowed = self._broker.borrow([key]) if self._entitled(key) else []
        except KeyError:
            borrowed = []
        if borrowed:
            ordinals = {mine: theirs for theirs, mine in self._ordinals.items()}
            if borrowed[0].device in ordinals:
                resolved = wire_pb2.TokenResolved(size=borrowed[0].size, device=ordinals[borrowed[0].device])
            else:
                resolved.error = f"The memory is on GPU {borrowed[0].device}, which process {self.pid} does not see."
        try:
            self._tell([block.descriptor for block in borrowed if not resolved.error], number, token_resolved=resolved)
        except PhosError:
            pass  # it has gone
        finally:
            wire.close_all(block.descriptor for block in borrowed)

    def _block_added(self, added: wire_pb2.BlockAdded, descriptors: list[int]) -> None:
        if self._seen is not None:
            self._seen.add(added.block)
        try:
            self._take_block(added, descriptors)
        finally:
            self._settle_table()

    def _take_block(self, added: wire_pb2.BlockAdded, descriptors: list[int]) -> None:
        if added.owner_session:
            wire.close_all(descriptors)
            key = (added.owner_session, added.owner_block)
            if not self._entitled(key):
                raise ProtocolError(f"Process {self.pid} named memory of a process that is not its user's.")
            with self._lock:
                self._imports[added.block] = key
            return
        key = (self.session, added.block)
        if added.descriptor_lost:
            wire.close_all(descriptors)
            if self._broker.get(key) is None:
                log.error(
                    "Process %d: nobody has a descriptor of its %d byte block %d.", self.pid, added.size, added.block
                )
                with self._lock:
                    self._unheld.add(added.block)
            return
        if len(descriptors) != 1:
            wire.close_all(descriptors)
            raise ProtocolError(f"Process {self.pid} announced block {added.block} without its descriptor.")
        by_application = added.owner == wire_pb2.BlockAdded.APPLICATION
        device = self._ordinals.get(added.device, added.device)
        self._broker.add(Block(key, added.size, device, descriptors[0], by_application), self.pid)

    def _block_removed(self, number: int) -> None:
        with self._lock:
            self._unheld.discard(number)
            imported = self._imports.pop(number, None)
        if imported is None:
            self._broker.remove((self.session, number))

    def _call(
        self, timeout: float, *, patient: bool = False, carried: Sequence[int] = (), **body: object
    ) -> tuple[wire_pb2.Envelope, list[int]]:
        """Send a request and wait for its answer. ``patient``: the time that the process is stopped does not count.

        ``carried``: descriptors that go with it; they stay the caller's.

        Raises:
            Unresponsive: no answer in time, or (unless ``patient``) the process is stopped.
            CheckpointFailed: the connection ended, or there is none.
        """
        request = _Request()
        with self._lock:
            connection = self._connection
            number, self._next_id = self._next_id, self._next_id + 1
            if connection is not None:
                self._requests[number] = request
        if connection is None:
            raise CheckpointFailed(f"Process {self.pid} ({self.executable}) is not connected to phosd.")
        step = next(iter(body))
        try:
            connection.send(wire_pb2.Envelope(id=number, **body), list(carried))  # type: ignore[arg-type]
        except OSError as error:
            with self._lock:
                self._requests.pop(number, None)
            raise CheckpointFailed(f"Process {self.pid} ({self.executable}) has gone away ({error}).") from error
        spent = stopped = 0.0
        while not request.done.wait(slice_ := min(0.1, max(0.001, timeout))):
            is_stopped = procfs.is_stopped(self.pid)
            stopped = stopped + slice_ if is_stopped else 0.0
            if not (patient and is_stopped):
                spent += slice_
            if spent < timeout and (patient or stopped < STOPPED_SECONDS):
                continue
            with self._lock:
                self._requests.pop(number, None)
            if request.done.is_set():
                break  # at the last moment
            if is_stopped:
                raise Unresponsive(
                    f"Process {self.pid} ({self.executable}) is stopped, by a signal or a debugger, and cannot answer "
                    f"'{step}'. Continue it, then try again."
                )
            raise Unresponsive(
                f"Process {self.pid} ({self.executable}) did not answer '{step}' within {timeout:.0f} s. "
                "Does its GPU work ever end?"
            )
        if request.answer is None:
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) ended, or closed its connection, at '{step}'."
            )
        return request.answer, request.descriptors

    # GatedProcess.

    def prepare_residue(self, path: str, size: int, device: int, inode: int) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        wanted = wire_pb2.PrepareResidue(path=path, bytes=size, device=device, inode=inode)
        answer, extra = self._call(RESIDUE_SECONDS, prepare_residue=wanted)
        wire.close_all(extra)
        if answer.done.error:
            raise PhosError(answer.done.error)

    def drop_residue(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._tell([], prepare_residue=wire_pb2.PrepareResidue())

    def quiesce(self, timeout: float) -> QuiesceTimes:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        try:
            # The frontend keeps the time of its gate; waiting for the GPU's work itself cannot be interrupted.
            answer, extra = self._call(3 * timeout, quiesce=wire_pb2.Quiesce(timeout_ms=max(1, int(timeout * 1000))))
        except Unresponsive:
            with suppress(PhosError):  # it will read the request some day: let it open its gate again then
                self._tell([], open=wire_pb2.Open())
            raise
        wire.close_all(extra)
        done = answer.quiesce_done
        if done.error:
            raise CheckpointFailed(f"Process {self.pid} ({self.executable}) could not be quiesced: {done.error}")
        self.machine.to(SessionState.QUIESCED)
        return QuiesceTimes(done.gate_ns * 1e-9, done.synchronize_ns * 1e-9)

    def detach(self, *, reduce_stack: bool, huge_pages: bool) -> Detached:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._refuse_to_lose()
        self.detached = None
        try:
            self._holds.place(self.session, self.pid)
            answer, descriptors = self._call(
                ANSWER_SECONDS, detach=wire_pb2.Detach(reduce_stack=reduce_stack, huge_pages=huge_pages)
            )
            done = answer.detach_done
            if done.error:
                wire.close_all(descriptors)
                raise CheckpointFailed(
                    f"Process {self.pid} ({self.executable}) could not give its GPU memory over: {done.error}"
                )
        except (PhosError, OSError):
            # Should it detach after all, it will say so: it finds no hold and is attached again at once.
            self._holds.release(self.session)
            raise
        self.machine.to(SessionState.DETACHED)
        try:
            self.detached = self._parse_map(done, descriptors)
        except Exception as error:
            self.allow_attach()
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) gave its GPU memory over, but its map cannot be read: {error}"
            ) from error
        # Its control thread may be slow to close what it has: CRIU must not find it (CRIU refuses a socket of ours).
        if not self._hung_up.wait(HANG_UP_SECONDS):
            log.warning("Process %d (%s) is detached and keeps its connection.", self.pid, self.executable)
        return self.detached

    def _refuse_to_lose(self) -> None:
        """Before anything is unmapped: is all that will be unmapped held here?"""
        with self._lock:
            missing = set(self._unheld) | {n for n, key in self._imports.items() if self._broker.get(key) is None}
        if missing:
            raise CheckpointFailed(
                f"phosd has no descriptor of {len(missing)} GPU memory block(s) of process {self.pid} "
                f"({self.executable}): the driver did not give one, or phosd and its keeper were both killed since the "
                "process was last restored. It runs on, but it cannot be checkpointed; restart it."
            )

    def _parse_map(self, done: wire_pb2.DetachDone, descriptors: list[int]) -> Detached:
        memory = wire_pb2.MemoryMap()
        try:
            if len(descriptors) != 1:
                raise ProtocolError("the memory map is missing.")
            with open(descriptors[0], "rb", closefd=False) as file:
                memory.ParseFromString(file.read())
        finally:
            wire.close_all(descriptors)
        for block in memory.blocks:
            if block.owner_session and not self._entitled((block.owner_session, block.owner_block)):
                raise ProtocolError(f"block {block.block} belongs to another user's process.")
        blocks = [
            MappedBlock(
                number=block.block,
                key=(block.owner_session, block.owner_block) if block.owner_session else (self.session, block.block),
                size=block.size,
                device=self._ordinals.get(block.device, block.device),
            )
            for block in memory.blocks
        ]
        return Detached(
            blocks=blocks,
            allocations=[Allocation(a.address, a.size, a.block, a.offset, a.entry_point) for a in memory.allocations],
            host_allocations=[HostAllocation(h.address, h.size, h.entry_point) for h in memory.host_allocations],
            uncarried=[UncarriedState(u.kind, u.count, u.bytes) for u in memory.uncarried],
            unmap=done.unmap_ns * 1e-9,
            reduce=done.reduce_ns * 1e-9,
        )

    def open(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        _, extra = self._call(ANSWER_SECONDS, open=wire_pb2.Open())
        wire.close_all(extra)
        if self.machine.state is not SessionState.RUNNING:  # it may have connected anew, and opened its gate for that
            self.machine.to(SessionState.RUNNING)

    def allow_attach(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self.machine.to(SessionState.RETURNING)
        self._holds.release(self.session)

    def lose(self, reason: str) -> None:
        """Its memory is gone: tell the frontend when it asks."""
        self.lost_reason = reason
        self.machine.to(SessionState.LOST)
        self._holds.release(self.session)
        with suppress(PhosError):  # if it is connected at this moment
            self._tell([], welcome=wire_pb2.Welcome(action=wire_pb2.Welcome.LOST, error=reason))

    def wait_attached(self, timeout: float) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        state = self.machine.wait_for(SessionState.RUNNING, timeout=timeout)
        if state in (SessionState.LOST, SessionState.ENDED):
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) did not come back: it is {state.value}"
                + (f" ({self.lost_reason})." if state is SessionState.LOST and self.lost_reason else ".")
            )
        if state is not SessionState.RUNNING:
            raise Unresponsive(f"Process {self.pid} ({self.executable}) has not come back (it is {state.value}).")

    def own_blocks(self) -> list[Block]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._broker.of_session(self.session)

    def block_keys(self) -> dict[int, BlockKey]:
        """The blocks that the process has, by its own numbers: its own, and those of others that it maps."""
        with self._lock:
            imports = dict(self._imports)
        return {block.key[1]: block.key for block in self.own_blocks()} | imports

    # Attach, run by the thread of the connection that asked.

    def attach(self) -> tuple[float, float]:
        """Hand the frontend its descriptors, let it map them, open its gate. Returns (mapping, undoing) in s.

        Raises:
            PhosError: it could not; the session can be asked again.
        """
        began = time.perf_counter()
        numbers = [(block.key[1], block.key) for block in self._broker.of_session(self.session)]
        with self._lock:
            numbers += list(self._imports.items())
        if self.detached is not None:
            numbers = [(block.number, block.key) for block in self.detached.blocks]
        try:
            borrowed = self._broker.borrow(key for _, key in numbers)
        except KeyError as error:
            raise MemoryLost(
                f"phosd no longer holds GPU memory block {error.args[0][1]} that process {self.pid} "
                f"({self.executable}) maps."
            ) from error
        except OSError as error:
            raise PhosError(f"phosd cannot hand process {self.pid} its memory: {error}") from error
        try:
            for start in range(0, len(borrowed), wire.DESCRIPTOR_LIMIT):
                part = slice(start, start + wire.DESCRIPTOR_LIMIT)
                self._tell(
                    [block.descriptor for block in borrowed[part]],
                    attach_blocks=wire_pb2.AttachBlocks(block=[number for number, _ in numbers[part]]),
                )
        finally:
            wire.close_all(block.descriptor for block in borrowed)
        with self._window_lock:
            window = self._window
        attach = wire_pb2.Attach(
            blocks=len(numbers),
            restored=self._from_image,
            shut=window is not None and window.shut,
            tell=window is not None and window.loads and not self._whole_table,
        )
        answer, extra = self._call(ANSWER_SECONDS, patient=True, attach=attach)
        wire.close_all(extra)
        done = answer.attach_done
        if done.error:
            raise PhosError(f"Process {self.pid} ({self.executable}) could not map its GPU memory again: {done.error}")
        if self.takes_residue:
            self.residue_bytes = done.residue_bytes
            log.info(
                "Process %d: the driver saved its part to %d bytes, %d of them prepared.",
                self.pid,
                done.residue_bytes,
                done.residue_served,
            )
        mapped = time.perf_counter()
        self._open_window()
        opened = time.perf_counter()
        _, extra = self._call(ANSWER_SECONDS, patient=True, open=wire_pb2.Open())
        wire.close_all(extra)
        log.info(
            "Process %d is attached: %d blocks in %.1f ms (mapping %.1f, settings %.1f), window %.1f ms",
            self.pid,
            len(numbers),
            (mapped - began) * 1e3,
            done.map_ns * 1e-6,
            done.undo_ns * 1e-6,
            (opened - mapped) * 1e3,
        )
        self.detached = None
        self._from_image = False
        return done.map_ns * 1e-9, done.undo_ns * 1e-9

    def tell(self, **body: object) -> None:
        """A packet that wants no answer. A process that is not connected now asks again when it is."""
        with suppress(PhosError):
            self._tell([], **body)

    def _open_window(self) -> None:
        """Between attach and open: from here on the process's calls are traced, if somebody saves its memory."""
        with self._window_lock:
            window = self._window
            carried = window.descriptors() if window is not None else []
            if window is None or not carried:
                return
            if window.loads:
                self._describe_restored()
            answer, extra = self._call(
                ANSWER_SECONDS, patient=True, carried=carried, window_begin=wire_pb2.WindowBegin()
            )
            wire.close_all(extra)
            self._tracing = not answer.done.error
            if self._tracing and twins_wanted(window):
                self._twins = Twins(self.session, self._speculator, window, self._send_twins)
                self._twins.start()
        if self._tracing and window.loads and self._speculator.pending(self.session):
            threading.Thread(target=self._describe_later, daemon=True, name="describe").start()
        if answer.done.error:
            log.warning(
                "Process %d (%s) cannot run while its memory is saved: %s", self.pid, self.executable, answer.done.error
            )
            window.wait_saved()

    def _describe_restored(self) -> None:
        """As the image has it (numbers of modules survive a restore), and as it is known here."""
        self.hurry_kernels()
        self.describe_kernels(0.0 if self._image_table else DESCRIBE_RESTORED_SECONDS)

    def _describe_later(self) -> None:
        """What was still being worked out when the process ran on, as it comes."""
        deadline = time.monotonic() + ANSWER_SECONDS
        told = b""
        more = True
        with suppress(PhosError):  # it has ended, or is about to be dumped
            while more and self._tracing and time.monotonic() < deadline:
                known = kernels.known_table(self._speculator, self.session, LATER_SECONDS, quiet=True)
                more = self._speculator.pending(self.session)
                if known != told:
                    self.describe_kernels(0.0)
                    told = known

    def hurry_kernels(self) -> None:
        """Somebody will soon want to know what its kernels touch."""
        self._speculator.hurry(self.session, HURRY_SECONDS)

    def trace(self, window: TracingWindow | None) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        with self._window_lock:
            self._window = window
            if window is not None or not self._tracing:
                self._broken_window = False
                return
            self._tracing = False
            twins = self._twins
        if twins is not None:
            twins.join()
        if self._broken_window:
            raise Mispredicted(
                f"The connection to process {self.pid} ({self.executable}) broke while its memory was saved: what it "
                "wrote since is not known."
            )
        if self.is_connected:  # otherwise it has ended its window by itself, or ended
            _, extra = self._call(ANSWER_SECONDS, patient=True, window_end=wire_pb2.WindowEnd())
            wire.close_all(extra)
        if twins is not None and not twins.loads and (report := twins.report()).violations:
            raise Mispredicted(
                f"Process {self.pid} ({self.executable}) touched GPU memory that was not saved yet and that no guess "
                f"named: {report.named()}."
            )

    def _send_twins(self, descriptors: Sequence[int], twins: wire_pb2.Twins) -> None:
        self._tell(list(descriptors), twins=twins)

    def twin_counts(self) -> dict[str, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return {} if self._twins is None else self._twins.counts()

    def twin_report(self) -> Report | None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return None if self._twins is None else self._twins.report()

    def ordinals(self) -> dict[int, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return {mine: theirs for theirs, mine in self._ordinals.items()}

    def describe_kernels(self, timeout: float) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        table = kernels.table_file(self._speculator, self.session, timeout, self._image_table)
        try:
            self._tell([table], access_table=wire_pb2.AccessTable())
        finally:
            os.close(table)

    def knows(self, table: bytes) -> None:
        """Another process of its image has been described: it need not tell of its kernels before it runs."""
        self._image_table, self._whole_table = table, True

    def whole_table(self) -> bytes:
        """What its kernels touch, for :meth:`knows`; nothing as long as some are being analysed."""
        return b"" if self._speculator.pending(self.session) else self.access_table()

    def access_table(self) -> bytes:
        """What is known by now of what its kernels touch, for an image: nobody is kept waiting for more."""
        return kernels.known_table(self._speculator, self.session, 0.0, self._image_table)

    def hang_up(self) -> None:
        """End the connection; the frontend will make another."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.shutdown()

    def _tell(self, descriptors: list[int], number: int = 0, /, **body: object) -> None:
        with self._lock:
            connection = self._connection
        if connection is None:
            raise PhosError(f"Process {self.pid} ({self.executable}) closed its connection while it was attached.")
        try:
            connection.send(wire_pb2.Envelope(id=number, **body), descriptors)  # type: ignore[arg-type]
        except OSError as error:
            raise PhosError(f"Process {self.pid} ({self.executable}) has gone away ({error}).") from error

    def alive(self) -> bool:
        """Whether the process still exists (a zombie does not count), and has not become another program."""
        return self.machine.state is not SessionState.ENDED and procfs.is_alive(self.pid)

    @property
    def is_connected(self) -> bool:
        """Whether the frontend is connected now."""
        with self._lock:
            return self._connection is not None

    def restored_from(self, message: pb.Process, imports: dict[int, BlockKey]) -> None:
        """Take over what the image knows: executable, modules, and whose blocks the process maps."""
        self._from_image = True
        self._image_table = message.access_table
        self.restore_thread = message.restore_thread
        self.executable = message.executable
        self.modules = [LoadedModule(m.entry_point, m.size, m.path, m.offset) for m in message.modules]
        self.uncarried = {u.kind: UncarriedState(u.kind, u.count, u.bytes) for u in message.uncarried}
        self.detached = Detached(
            blocks=[
                MappedBlock(b.block, imports.get(b.block, (self.session, b.block)), b.size, b.device)
                for b in message.blocks
            ]
        )
        self._granted = set(imports.values())
        with self._lock:
            self._imports = dict(imports)
