"""A session: phosd's end of one process under the frontend, over all the connections that the process makes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.attach_failures import AttachFailures
from phos.gpu_engine.daemon.conversation import ANSWER_SECONDS, ANSWERS, Conversation
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.identity import Identity
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.session_blocks import SessionBlocks
from phos.gpu_engine.daemon.session_kernels import SessionKernels
from phos.gpu_engine.daemon.session_window import SessionWindow
from phos.gpu_engine.daemon.states import SessionState, StateMachine
from phos.gpu_engine.errors import (
    PASSING,
    AttachRefused,
    CheckpointFailed,
    MemoryLost,
    PhosError,
    ProtocolError,
    Unresponsive,
)
from phos.gpu_engine.inventory import LoadedModule
from phos.gpu_engine.process import Detached, QuiesceTimes, TracingWindow, UncarriedState
from phos.gpu_engine.ptx_instrument.twin_table import Report
from phos.gpu_engine.spec.speculator import Speculator

log = logging.getLogger(__name__)

RESIDUE_SECONDS = 10.0
"""How long a frontend may take to map a few hundred megabytes, while its application computes."""

PINNED_BYTES_A_SECOND = 50e6
"""At least so many are pinned again when a process is attached: to one that is restored lazily CRIU may bring the
pages from a disk, or over a network, while they are pinned."""

HANG_UP_SECONDS = 3.0
"""How long a frontend that has said that it is detached may take to close its connection."""

SILENCE_SECONDS = 6.0
"""After so long an earlier frontend, which is not told that what it asked for will come, has asked again."""

UNKNOWN_USER = -1
"""Of a session whose process has not been restored yet."""

KINDS_KEPT = 64
TEXT_KEPT = 4096
"""A frontend that has gone mad must not fill phosd's memory: kinds of uncarried state, bytes of a text (limits.py)."""


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
        self.identity = Identity(session, pid, uid)
        self.driver_version = 0
        self.devices: dict[int, bytes] = {}
        self.machine = StateMachine(state)
        self.uncarried: dict[str, UncarriedState] = {}
        self.modules: list[LoadedModule] = []
        self.detached: Detached | None = None
        self.lost_reason = ""
        self.connections = 0  # made so far
        self.attach_failures = AttachFailures()
        self.takes_residue = False
        self.residue_bytes: int | None = None
        self.restore_thread = 0  # the driver's, as the process numbers it; 0: not asked yet
        self._resolving = threading.BoundedSemaphore(limits.RESOLVES)
        self._settling = threading.Lock()  # guards the two below
        self._settle_upto = 0  # what the process has asked for last, when it ran out of memory
        self._settles = False  # there is a thread that answers
        self._module_bytes = 0  # names, told over this connection
        self._from_image = False  # restored, and not attached yet
        self._remembers = False  # what the process has told of modules and kernels holds over this connection, too
        self._broker = broker
        self._holds = holds
        self._conversation = Conversation(self.identity)
        self._blocks = SessionBlocks(self.identity, broker)
        self._kernels = SessionKernels(session, self._conversation, speculator)
        self._window = SessionWindow(self.identity, self._conversation, self._kernels, speculator)

    @property
    def session(self) -> bytes:
        """What the process calls itself over all of its connections."""
        return self.identity.session

    @property
    def pid(self) -> int:
        """As phosd sees it; a restored process has another than before."""
        return self.identity.pid

    @property
    def uid(self) -> int:
        """Its user, or UNKNOWN_USER."""
        return self.identity.uid

    @property
    def executable(self) -> str:
        """The path of its program."""
        return self.identity.executable

    # Connections.

    def connected(self, connection: wire.Connection, hello: wire_pb2.Hello, ordinals: dict[bytes, int]) -> None:
        """A frontend said hello; ``ordinals`` gives phosd's number of each GPU by its UUID."""
        self._window.connected(detached=hello.state == wire_pb2.DETACHED)
        self.connections += 1
        self._blocks.announced(hello, ordinals)  # before anybody can ask over the new connection
        self._conversation.begin(connection)
        self.identity.pid = connection.pid
        self.identity.executable = hello.executable
        self.driver_version = hello.driver_version
        self.devices = {device.ordinal: device.uuid for device in hello.devices}
        self.uncarried = {}  # told again over every connection
        # Its last word before it was detached was read after all others; what it runs cannot have changed since.
        self._remembers = hello.state == wire_pb2.DETACHED and self.detached is not None and not self._from_image
        if not self._remembers:
            self.modules = []
            self._module_bytes = 0
            self._kernels.told = 0
        self.takes_residue = hello.residue

    @property
    def table_complete(self) -> bool:
        """Whether every block that Hello announced has been registered."""
        return self._blocks.complete

    @property
    def kernels_told(self) -> int:
        """Names of kernels that have come."""
        return self._kernels.told

    def gpu_ordinals(self) -> list[int]:
        """phosd's numbers of the GPUs the process sees, in the process's order."""
        return self._blocks.gpu_ordinals()

    def disconnected(self, connection: wire.Connection) -> None:
        """The connection ended: on purpose (detached), by a fault, or with the process."""
        self._conversation.end(connection)

    def handle(self, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """One packet from the frontend; the descriptors become the session's."""
        kind = envelope.WhichOneof("body")
        if kind in ANSWERS:
            self._conversation.take_answer(envelope, descriptors)
            return
        if kind == "block_added":
            self._blocks.added(envelope.block_added, descriptors)
            return
        if kind == "module_loaded":
            self._kernels.loaded(self.pid, self.uid, envelope.module_loaded, descriptors)
        wire.close_all(descriptors)
        if kind == "block_removed":
            self._blocks.removed(envelope.block_removed.block)
            if envelope.id:
                self._settle(envelope.id)
        elif kind == "uncarried":
            report = envelope.uncarried
            if len(self.uncarried) < KINDS_KEPT or report.kind in self.uncarried:
                kind_ = report.kind[:TEXT_KEPT]
                self.uncarried[kind_] = UncarriedState(kind_, report.count, report.bytes)
        elif kind == "module_loaded":
            loaded = envelope.module_loaded
            self._module_bytes += len(loaded.path) + len(loaded.entry_point)
            if len(self.modules) < limits.MODULES and self._module_bytes < limits.NAMES_BYTES:
                self.modules.append(
                    LoadedModule(loaded.entry_point[:TEXT_KEPT], loaded.size, loaded.path[:TEXT_KEPT], loaded.offset)
                )
        elif kind == "kernels_seen":
            self._kernels.seen(envelope.kernels_seen)
        elif kind == "token_resolve":
            key = (envelope.token_resolve.session, envelope.token_resolve.block)
            coming = partial(self._coming, envelope, self.connections, time.monotonic())
            if key[0] == self.session:  # it exports its own, and waits for nobody: nor for those who wait for others'
                self._answer(envelope.id, key, coming)
                return
            if not self._resolving.acquire(blocking=False):
                error = f"Process {self.pid} waits for {limits.RESOLVES} blocks of exported memory already."
                with suppress(PhosError):  # it has gone
                    resolved = wire_pb2.TokenResolved(error=error)
                    self._conversation.tell([], envelope.id, token_resolved=resolved)
                return
            # It may have to wait, and what the process answers meanwhile must be read.
            wish = (envelope.id, key, coming)
            try:
                threading.Thread(target=self._resolve, args=wish, daemon=True, name="resolve").start()
            except RuntimeError:  # no threads are left; it asks again, over another connection
                self._resolving.release()
                raise
        else:
            raise ProtocolError(f"Process {self.pid} sent an unexpected packet ({kind}).")

    def _settle(self, number: int) -> None:
        """The process ran out of memory, and waits for what it gave back. An answer holds for earlier requests, too."""
        with self._settling:
            self._settle_upto = number
            if self._settles:
                return
            self._settles = self._broker.loans.keeps(self.session)
        if not self._settles:
            self._settled(number)
            return
        try:  # what the process answers meanwhile must be read
            threading.Thread(target=self._settle_later, daemon=True, name="settle").start()
        except RuntimeError:  # no threads are left
            self._settles = False
            self._settled(number)

    def _settle_later(self) -> None:
        while True:
            self._broker.loans.wait(self.session)
            with self._settling:
                number = self._settle_upto
            self._settled(number)
            with self._settling:
                if number == self._settle_upto:
                    self._settles = False
                    return

    def _settled(self, number: int) -> None:
        self._broker.settle()
        with suppress(PhosError):  # it has gone
            self._conversation.tell([], number, done=wire_pb2.Done())

    def _resolve(self, number: int, key: BlockKey, coming: Callable[[], bool]) -> None:
        try:
            self._answer(number, key, coming)
        finally:
            self._resolving.release()

    def _coming(self, asked: wire_pb2.Envelope, connections: int, since: float) -> bool:
        """What the process has asked for will come. Returns whether it waits for that.

        It asks again over another connection; and one that is not told that it will come asks again soon.
        """
        if self.connections != connections or not self.is_connected:
            return False
        if not asked.token_resolve.waits:
            return time.monotonic() - since < SILENCE_SECONDS
        with suppress(PhosError):  # it has gone
            self._conversation.tell([], asked.id, token_resolved=wire_pb2.TokenResolved(coming=True))
        return True

    def _answer(self, number: int, key: BlockKey, coming: Callable[[], bool]) -> None:
        """Exported memory: the descriptor that a token stands for."""
        if (answer := self._blocks.resolve(key, coming)) is None:
            return
        resolved, descriptors = answer
        try:
            with suppress(PhosError):  # it has gone
                self._conversation.tell(descriptors, number, token_resolved=resolved)
        finally:
            wire.close_all(descriptors)

    # GatedProcess.

    def prepare_residue(self, path: str, size: int, device: int, inode: int) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        wanted = wire_pb2.PrepareResidue(path=path, bytes=size, device=device, inode=inode)
        answer = self._conversation.ask(RESIDUE_SECONDS, prepare_residue=wanted)
        if answer.done.error:
            raise PhosError(answer.done.error)

    def drop_residue(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._conversation.tell([], prepare_residue=wire_pb2.PrepareResidue())

    def quiesce(self, timeout: float, patience: float) -> QuiesceTimes:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        try:
            # The frontend keeps the time, of its gate and of the GPU's work each; the driver keeps none.
            request = wire_pb2.Quiesce(timeout_ms=max(1, int(timeout * 1000)))
            answer = self._conversation.ask(2 * timeout + patience, quiesce=request)
        except Unresponsive:
            with suppress(PhosError):  # it will read the request some day: let it open its gate again then
                self._conversation.tell([], open=wire_pb2.Open())
            raise
        done = answer.quiesce_done
        if done.error:
            raise CheckpointFailed(f"Process {self.pid} ({self.executable}) could not be quiesced: {done.error}")
        self.machine.to(SessionState.QUIESCED)
        return QuiesceTimes(done.gate_ns * 1e-9, done.synchronize_ns * 1e-9)

    def detach(self, *, reduce_stack: bool, huge_pages: bool, copy_threads: bool) -> Detached:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self.detached = None
        try:
            self._holds.place(self.session, self.pid)
            self._blocks.secure()
            wanted = wire_pb2.Detach(reduce_stack=reduce_stack, huge_pages=huge_pages, copy_threads=copy_threads)
            answer, descriptors = self._conversation.call(ANSWER_SECONDS, detach=wanted)
            done = answer.detach_done
            if done.error:
                wire.close_all(descriptors)
                self._blocks.returned()
                raise CheckpointFailed(
                    f"Process {self.pid} ({self.executable}) could not give its GPU memory over: {done.error}"
                )
        except (PhosError, OSError):
            # Should it detach after all, it will say so: it finds no hold and is attached again at once.
            self._holds.release(self.session)
            raise
        try:
            self.machine.to(SessionState.DETACHED)
        except ProtocolError as error:  # its end was noticed before its last word was read
            wire.close_all(descriptors)
            self._holds.release(self.session)
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) ended while it was being checkpointed."
            ) from error
        self._kernels.detached()
        try:
            self.detached = self._blocks.parse_map(done, descriptors)
        except Exception as error:
            self.allow_attach()
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) gave its GPU memory over, but its map cannot be read: {error}"
            ) from error
        # Its control thread may be slow to close what it has: CRIU must not find it (CRIU refuses a socket of ours).
        if not self._conversation.wait_hung_up(HANG_UP_SECONDS):
            log.warning("Process %d (%s) is detached and keeps its connection.", self.pid, self.executable)
        return self.detached

    def open(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        if self.machine.state is not SessionState.QUIESCED:
            return  # its connection broke, or it is given its memory back: its gate is opened with that
        try:
            self._conversation.ask(ANSWER_SECONDS, open=wire_pb2.Open())
        finally:  # if it does not answer, it will read the request some day, and any other after it
            self.machine.adopt(SessionState.RUNNING)  # unless it has ended since

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
            self._conversation.tell([], welcome=wire_pb2.Welcome(action=wire_pb2.Welcome.LOST, error=reason))

    def wait_attached(self, timeout: float) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        state = self.machine.wait_for(SessionState.RUNNING, timeout=timeout)
        if state in (SessionState.LOST, SessionState.ENDED):
            raise CheckpointFailed(
                f"Process {self.pid} ({self.executable}) did not come back: it is {state.value}"
                + (f" ({self.lost_reason})." if self.lost_reason else ".")
            )
        if state is not SessionState.RUNNING:
            why = f": {self.attach_failures.last}" if self.attach_failures.last else ""
            raise Unresponsive(f"Process {self.pid} ({self.executable}) has not come back (it is {state.value}){why}.")

    def own_blocks(self) -> list[Block]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._blocks.own()

    def blocks_of_others(self) -> set[BlockKey]:
        """Other processes' blocks that this one maps, or may be about to map."""
        return self._blocks.of_others()

    def block_keys(self) -> dict[int, BlockKey]:
        """The blocks that the process has, by its own numbers: its own, and those of others that it maps."""
        return self._blocks.keys()

    def borrow(self, keys: Iterable[BlockKey]) -> list[Block]:
        """See :meth:`SessionBlocks.borrow`."""
        return self._blocks.borrow(keys)

    # Attach, run by the thread of the connection that asked.

    def attach(self) -> tuple[float, float]:
        """Hand the frontend its descriptors, let it map them, open its gate. Returns (mapping, undoing) in s.

        Raises:
            MemoryLost, AttachRefused: it could not, and cannot be expected to.
            PhosError: it could not now.
        """
        began = time.perf_counter()
        if self.detached is not None:
            numbers = [(block.number, block.key) for block in self.detached.blocks]
        else:
            numbers = list(self._blocks.keys().items())
        window = self._window.attaching()
        self._send_blocks(numbers)
        attach = wire_pb2.Attach(
            blocks=len(numbers),
            restored=self._from_image,
            shut=window is not None and window.shut,
            tell=window is not None and window.loads and not self._kernels.whole,
            loads=window is not None and window.loads,
            remembers=self._remembers,
        )
        try:
            done = self._conversation.ask(self._attach_seconds(), patient=True, attach=attach).attach_done
        except PhosError:
            self._window.cut_off()
            raise
        if done.error:
            raise (PhosError if done.code in PASSING else AttachRefused)(
                f"Process {self.pid} ({self.executable}) could not map its GPU memory again: {done.error}"
            )
        if self._from_image:  # not before: now it knows whether its data is still to come, and ends if phosd does
            if done.devices:  # a frontend of before does not say it; in Hello it has said those that it had
                self._blocks.sees(done.devices)
            self._broker.moved(self.session, self.pid)
        if self.takes_residue:
            self.residue_bytes = done.residue_bytes
            log.info(
                "Process %d: the driver saved its part to %d bytes, %d of them prepared; several threads copied %d.",
                self.pid,
                done.residue_bytes,
                done.residue_served,
                done.residue_shared,
            )
        mapped = time.perf_counter()
        try:
            self._window.open()
        except PhosError:
            self._window.cut_off()
            raise
        opened = time.perf_counter()
        self._conversation.ask(ANSWER_SECONDS, patient=True, open=wire_pb2.Open())
        log.info(
            "Process %d is attached: %d blocks in %.1f ms (mapping %.1f, settings %.1f), window %.1f ms",
            self.pid,
            len(numbers),
            (mapped - began) * 1e3,
            done.map_ns * 1e-6,
            done.undo_ns * 1e-6,
            (opened - mapped) * 1e3,
        )
        self._blocks.returned()  # nobody waits for this
        self.detached = None
        self._from_image = False
        return done.map_ns * 1e-9, done.undo_ns * 1e-9

    def _attach_seconds(self) -> float:
        pinned = 0 if self.detached is None else sum(host.size for host in self.detached.host_allocations)
        return ANSWER_SECONDS + pinned / PINNED_BYTES_A_SECOND

    def _send_blocks(self, numbers: Sequence[tuple[int, BlockKey]]) -> None:
        """Hand the frontend the descriptors of blocks, by its own numbers."""
        try:
            borrowed = self._blocks.borrow(key for _, key in numbers)
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
                self._conversation.tell(
                    [block.descriptor for block in borrowed[part]],
                    attach_blocks=wire_pb2.AttachBlocks(block=[number for number, _ in numbers[part]]),
                )
        finally:
            wire.close_all(block.descriptor for block in borrowed)

    def keep_imports(self, pid: int) -> None:
        """See :meth:`SessionBlocks.keep_imports`; for a process that is about to be restored."""
        self._blocks.keep_imports(pid)

    def adopted(self) -> None:
        """An earlier phosd had it, and may have lent it memory."""
        self._blocks.adopted()

    def tell(self, **body: object) -> None:
        """A packet that wants no answer. A process that is not connected now asks again when it is."""
        with suppress(PhosError):
            self._conversation.tell([], **body)

    def hurry_kernels(self) -> None:
        """Somebody will soon want to know what its kernels touch."""
        self._kernels.hurry()

    def watch(self, descriptors: Sequence[int]) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._window.watch(descriptors)

    def unwatch(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._window.unwatch()

    def trace(self, window: TracingWindow) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._window.trace(window)

    def untrace(self) -> Callable[[float], None]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._window.untrace()

    def twin_counts(self) -> dict[str, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._window.twin_counts()

    def twin_report(self) -> Report | None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._window.twin_report()

    def ordinals(self) -> dict[int, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return self._blocks.by_ordinal()

    def describe_kernels(self, timeout: float) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._kernels.describe(timeout)

    def knows(self, table: bytes) -> None:
        """Another process of its image has been described: it need not tell of its kernels before it runs."""
        self._kernels.restored(table, whole=True)

    def access_table(self) -> tuple[bytes, bool]:
        """What is known by now of what its kernels touch, nobody being kept waiting; and whether that is all."""
        return self._kernels.table()

    def end(self) -> None:
        """The process is gone; its memory may be let go after this, and nothing of it comes any more."""
        self.machine.end()
        self._blocks.end()
        self._kernels.end()

    def hang_up(self) -> None:
        """End the connection; the frontend will make another."""
        self._conversation.hang_up()

    def alive(self) -> bool:
        """Whether the process still exists (a zombie does not count), and has not become another program."""
        return self.machine.state is not SessionState.ENDED and procfs.is_alive(self.pid)

    @property
    def is_connected(self) -> bool:
        """Whether the frontend is connected now."""
        return self._conversation.is_connected

    def restored_from(self, message: pb.Process, imports: dict[int, BlockKey]) -> None:
        """Take over what the image knows: executable, modules, and whose blocks the process maps."""
        self._from_image = True
        self._kernels.restored(message.access_table, whole=message.access_table_whole)
        self.restore_thread = message.restore_thread
        self.identity.executable = message.executable
        self.modules = [LoadedModule(m.entry_point, m.size, m.path, m.offset) for m in message.modules]
        self.uncarried = {u.kind: UncarriedState(u.kind, u.count, u.bytes) for u in message.uncarried}
        self.detached = self._blocks.restored(message, imports)
