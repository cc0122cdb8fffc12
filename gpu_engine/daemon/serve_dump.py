"""Dumps: what CRIU's plugin asks of phosd from the pause of the GPU processes to the end of CRIU."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from phos.gen import wire_pb2
from phos.gpu_engine import driver, inventory, procfs, shared_memory, toggle
from phos.gpu_engine.cow.dump import CowDump
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.daemon import limits, twins, wire
from phos.gpu_engine.daemon.permissions import refuse_others, refuse_unwritable, sees_all, tree_of, uid_of
from phos.gpu_engine.daemon.registry import Registry, say_failure
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import (
    CheckpointFailed,
    NoSuchProcess,
    NotPermitted,
    PhosError,
    ProtocolError,
    UsageError,
)
from phos.gpu_engine.interruption import Interruption
from phos.gpu_engine.process import CONTROL_THREAD, Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.scheduler_hooks import SchedulerHooks
from phos.gpu_engine.stop.dump import Assignment, StopDump
from phos.gpu_engine.stop.settings import Settings

log = logging.getLogger(__name__)

REGISTER_SECONDS = 10.0
"""How long a process with the frontend in it may take to connect to a phosd that has just been started."""

THREAD_SECONDS = 1.0
"""How long the driver may take to name a thread that only a pool will need; one that is stopped does not answer."""

NEEDED_THREAD_SECONDS = 10.0
"""And one without which there is no dump."""

PROTOCOLS = ("stop", "cow")

NOTICE_SECONDS = 3.0
"""How long CRIU may wait for a task that has ended before it counts as stuck."""

LEAVE = re.compile(r"--leave-(r\w*|s\w*)|-[A-CE-IKNP-VX-Za-npqsu-z]*[Rs].*")
"""How ``--leave-running`` (-R) and ``--leave-stopped`` (-s) may look on CRIU's command line."""


SCRIPT = re.compile(r"--ac.*")
"""How ``--action-script`` may look there. One that fails after the dump keeps the tasks."""

CRIU_END_SECONDS = 20.0
"""How long a CRIU whose dump has failed may take to let the tasks go and to end: twice its own alarm."""

END_LOOK_SECONDS = 0.02

SILENT_SECONDS = 1.0
"""How long one with the frontend may have the driver at work and be silent before it counts as one that only asks NVML:
it may be within cuInit, or about to end."""


class DumpServer:
    """Serves the connections of CRIU's plugin while CRIU dumps. Each runs in a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """From the plugin's first packet until CRIU's process has ended and the image is whole or given up."""
        request = envelope.dump_begin
        # CRIU may be in a pid namespace of its own, with a process from a pool.
        known = procfs.outer_pid(connection.pid, request.pid)
        request.pid = known or request.pid
        with self._registry.runs.entered(connection, request.criu_pid) as interruption, ExitStack() as claim:
            hooks = SchedulerHooks()
            claim.callback(hooks.close)
            try:
                job = self._begin(connection, envelope, wire.only(descriptors), claim, interruption)
            except Exception as error:
                say_failure(f"Checkpoint of process {request.pid}", error)
                connection.done(envelope.id, error=error if str(error) else repr(error))
                threading.Thread(target=self._registry.renew_if_broken, daemon=True, name="renew").start()
                return
            finally:
                wire.close_all(descriptors)
            connection.done(
                envelope.id,
                warnings=job.warnings() if job else [],
                gpu_part=job is not None,
                device_files=driver.device_files() if job else (),
                names=job is not None and job.shares_names,
                # Of one that is not known nobody could say whether CRIU has held it until all was copied.
                copies=job is not None and job.copies and bool(known),
            )
            result = -1
            over = threading.Event()
            watch = threading.Thread(target=_free_criu, args=(connection, over), daemon=True, name="watch-criu")
            try:
                watch.start()
            except RuntimeError as error:  # the processes stand still: whatever fails here, they are to come back
                log.warning("Checkpoint of process %d: nobody looks whether CRIU is stuck: %s", request.pid, error)
            try:
                result = self._follow_criu(connection, job, interruption, request)
            except (PhosError, OSError) as error:
                log.error("Checkpoint of process %d: CRIU's plugin is not to be understood: %s", request.pid, error)
                _wait_for_end(connection, error)
            except Exception as error:
                log.exception("Checkpoint of process %d", request.pid)
                _wait_for_end(connection, repr(error))
            finally:
                over.set()
            # CRIU's process has ended: its tasks are killed, or run.
            if job:
                try:
                    job.finish(result)
                except CheckpointFailed as error:
                    log.error("Checkpoint of process %d: %s", request.pid, error)
                except Exception as error:
                    log.exception("Checkpoint of process %d", request.pid)
                    job.abandon(f"The checkpoint failed in an unforeseen way ({error!r}).")
        if job:
            self._registry.jobs.settle(job)
            failed = job.state == "failed"
            job = None  # the next may take long
            if failed:
                self._registry.renew_if_broken()

    def _follow_criu(
        self, connection: wire.Connection, job: StopDump | None, interruption: Interruption, request: wire_pb2.DumpBegin
    ) -> int:
        """Until CRIU's process ends. Returns its result; -1 if it did not say any, or was told to keep the tasks."""
        result = -1
        kills, kept = not _leaves_alive(connection.pid, request), _may_leave_alive(connection.pid)
        links: dict[str, int] = {}
        while (packet := connection.receive()) is not None:
            envelope, descriptors = packet
            if job and self._takes(job, envelope, descriptors):
                continue
            frozen: int | None = None
            try:
                match envelope.WhichOneof("body"):
                    case "task_frozen" if job:
                        # One in a pid namespace below CRIU's is not found, and CRIU dumps it alone.
                        criu_pid = envelope.task_frozen.pid
                        frozen = procfs.outer_pid(connection.pid, criu_pid)
                        job.task_frozen(frozen, criu_pid, connection.pid)
                    case "task_pages" if job:
                        job.tell_pages(envelope.task_pages.pid, wire.only(descriptors))
                    case "task_runs" if job:
                        job.tasks_run(_outer(connection.pid, envelope.task_runs), back=envelope.task_runs.back)
                    case "spared_links":
                        links |= {link.path: link.inode for link in envelope.spared_links.links}
                        if len(links) > limits.LINKS:
                            raise ProtocolError(f"CRIU needs links for more than {limits.LINKS} files.")
                    case "dump_end":
                        end = envelope.dump_end
                        result = end.result
                        if job:
                            hidden = wire.content(wire.only(descriptors), limits.MAP_BYTES) if descriptors else b""
                            if end.device_files or end.device_mappings:
                                job.leave_out_device_files(_tasks_of(request.pid), mappings=end.device_mappings)
                            job.criu_ended(result, hidden, links, kills=kills)
                        else:
                            interruption.settle()
                    case _:
                        raise ProtocolError("phosd expects a frozen task here, tasks that run, or the end of the dump.")
            except (PhosError, OSError) as error:
                if not envelope.task_runs.back:  # what is not back yet will be, and says nothing of the image
                    result = -1
                connection.done(envelope.id, error=error)
            else:
                connection.done(envelope.id, kept=kept)
                if job and frozen is not None:
                    job.look_at(frozen, connection.pid)
            finally:
                wire.close_all(descriptors)
        return result

    @staticmethod
    def _takes(job: StopDump, envelope: wire_pb2.Envelope, descriptors: list[int]) -> bool:
        """Whether the plugin gives something to copy in CRIU's place. It is told at the end what came of it."""
        body = envelope.WhichOneof("body")
        if body not in ("take_memory", "take_range"):
            return False
        try:
            if not job.copies or len(descriptors) != (1 if body == "take_memory" else 2):
                job.shared_files.lacks(ProtocolError("phosd has not asked for files to copy, or one is missing."))
            elif body == "take_memory":
                job.shared_files.take_memory(envelope.take_memory.inode, descriptors[0])
            else:
                taken = envelope.take_range
                job.shared_files.take_range(descriptors[0], descriptors[1], taken.offset, taken.place, taken.size)
        finally:
            wire.close_all(descriptors)
        return True

    def serve_lost(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """CRIU's plugin, about to let tasks go whose phosd has died: the driver's part of each is brought back."""
        packet: tuple[wire_pb2.Envelope, list[int]] | None = (envelope, descriptors)
        while packet is not None:
            wire.close_all(packet[1])
            error = ""
            try:
                self._recover(connection, packet[0])
            except (PhosError, psutil.Error) as failure:
                error = str(failure)
                log.warning("Process %d asks for what a phosd that died has left: %s", connection.pid, error)
            connection.done(packet[0].id, error=error)
            packet = connection.receive()

    def _recover(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        if envelope.WhichOneof("body") != "task_runs" or not envelope.task_runs.back:
            raise ProtocolError("phosd expects here that tasks are to be brought back.")
        pids = _outer(connection.pid, envelope.task_runs)
        with self._registry.lock:
            own = {session.pid for session in self._registry.sessions.values()}
        for pid in pids:
            owner = uid_of(pid) if pid else -1
            if connection.uid not in (0, owner) or procfs.tracer(pid) not in (0, connection.pid) or pid in own:
                raise NotPermitted(
                    f"Process {connection.pid} of user {connection.uid} has no business with process {pid}."
                )

        def recover(pid: int) -> None:
            with self._registry.claims.hold([pid]):  # until it is through, however long somebody waits for it
                toggle.recover(pid)
            log.warning("Process %d, whose phosd died while it was checkpointed, is back", pid)

        toggle.together(recover, pids, Settings.from_environment().return_timeout, "bring back", at_any_rate=True)

    def _begin(
        self,
        connection: wire.Connection,
        envelope: wire_pb2.Envelope,
        directory: int,
        claim: ExitStack,
        interruption: Interruption,
    ) -> StopDump | None:
        request = envelope.dump_begin
        root = request.pid
        if not psutil.pid_exists(root):
            raise NoSuchProcess(f"There is no process {root}.")
        if connection.uid not in (0, uid_of(root)):
            raise NotPermitted(f"User {connection.uid} may not checkpoint process {root} of user {uid_of(root)}.")
        try:
            refuse_others(root, connection.uid)
            owner = connection.uid or uid_of(root)
        except psutil.NoSuchProcess as error:
            raise NoSuchProcess(f"Process {root} has ended.") from error
        refuse_unwritable(directory, connection.uid, connection.gid)
        try:
            self._refuse_ourselves(root)
            gated, foreign = self._find_processes(root)
        except psutil.NoSuchProcess as error:
            raise NoSuchProcess(f"Process {root} has ended.") from error
        if not gated and not foreign:
            self._registry.jobs.none_for(directory, owner, request.run)
            return None
        claim.enter_context(self._registry.claims.hold([p.pid for p in gated] + [p.pid for p in foreign]))
        self._wait_until_loaded(gated)
        for session in gated:
            if session.machine.state is SessionState.LOST:
                raise CheckpointFailed(
                    f"The GPU memory of process {session.pid} ({session.executable}) is lost: {session.lost_reason}"
                )
            if session.machine.state is SessionState.ENDED:
                raise NoSuchProcess(f"Process {session.pid} ({session.executable}) has ended.")
            if session.machine.state is not SessionState.RUNNING:
                raise CheckpointFailed(
                    f"Process {session.pid} ({session.executable}) is {session.machine.state.value}: "
                    "another checkpoint or restore of it is under way. Wait for it ('phos-gpu status' shows it)."
                )
        self._refuse_guests(gated)
        for session in gated:  # while it runs: a pool has to know it when it does not
            session.restore_thread = session.restore_thread or toggle.restore_thread(session.pid, THREAD_SECONDS)
        versions = dataclasses.replace(self._registry.versions, criu=request.criu_version)
        path = os.readlink(f"/proc/self/fd/{directory}")
        settings = Settings.from_environment()
        if not request.hides_pages or not sees_all(connection.uid):  # who asks also says whose memory is to be copied
            settings = dataclasses.replace(settings, cpu_pages=False)
        assignment = Assignment(
            directory=directory,
            path=path,
            gated=gated,
            foreign=foreign,
            copier=self._registry.copier,
            settings=settings,
            versions=versions,
            criu=connection.pid,
            shares_names=sees_all(connection.uid) and shared_memory.is_ours(root, connection.pid),
            interruption=interruption,
        )
        interruption.check()
        if foreign:  # before they are locked: the plugin can ask another phosd then, should this one die
            strangers = wire_pb2.Strangers(alone=[_alone(connection.pid, process) for process in foreign])
            connection.reply(envelope.id, strangers=strangers)
        job = self._job(connection, request, assignment)
        job.order = self._registry.cow.touched
        claim.enter_context(self._registry.broker.loans.lent([session.session for session in gated], job))
        self._registry.jobs.add(directory, job, owner, request.run)
        for session in gated:
            session.hurry_kernels()  # while it is quiesced and copied: the image has what is known by the end of that
        try:
            job.begin(self._registry.broker.borrow, self._describe)
        except BaseException:
            self._registry.jobs.settle(job)
            raise
        self._refuse_late(job, foreign)
        job.access_tables = {s.session: s.access_table for s in gated}
        return job

    def _refuse_late(self, job: StopDump, foreign: list[ForeignProcess]) -> None:
        """One that only asked NVML may have begun with CUDA before it was locked: the driver must not save it then."""
        for process in foreign:
            if process.silent and CONTROL_THREAD in procfs.thread_names(process.pid):
                reason = f"Process {process.pid} ({process.executable}) has just initialised CUDA. Try again."
                job.abandon(reason)
                self._registry.jobs.settle(job)
                raise CheckpointFailed(reason)

    def _refuse_ourselves(self, root: int) -> None:
        """CRIU would freeze who has to answer it, and wait for ever.

        A daemon's parent is the first process of its container, and that may be the application.
        """
        tree = tree_of(root)
        for pid, what in ((os.getpid(), "phosd itself"), (self._registry.broker.keeper_pid, "phosd's keeper")):
            if pid in tree:
                raise CheckpointFailed(
                    f"{what} (process {pid}) is in the process tree of process {root}, and cannot be checkpointed with "
                    "it. Where the application is the first process of a container, give the container an init "
                    "('docker run --init'), or run phosd outside of it."
                )

    def _refuse_guests(self, gated: list[Session]) -> None:
        """Somebody outside the tree who maps memory of it does not stand still, and may write there meanwhile.

        With the tree claimed: from here on nobody outside is handed any.
        """
        owners = {session.session: session for session in gated}
        pids = {session.pid for session in gated}  # one that replaced its program has a former session for a while
        with self._registry.lock:
            others = [s for s in self._registry.sessions.values() if s.session not in owners and s.pid not in pids]
        for other in others:
            for key in other.blocks_of_others():
                owner = owners.get(key[0])
                if owner is not None and self._registry.broker.get(key) is not None and other.alive():
                    raise CheckpointFailed(
                        f"Process {other.pid} ({other.executable}), which is outside the tree being dumped, maps GPU "
                        f"memory of process {owner.pid}. Dump their common ancestor."
                    )

    def _wait_until_loaded(self, gated: list[Session]) -> None:
        """What is restored lazily has an image again only when all of its memory is there."""
        for session in gated:
            with self._registry.lock:
                restore = self._registry.loading.get(session.session)
            if restore is None or session.machine.state is not SessionState.RUNNING:
                continue
            restore.wait()
            if restore.error:
                raise CheckpointFailed(restore.error)

    def _job(self, connection: wire.Connection, request: wire_pb2.DumpBegin, assignment: Assignment) -> StopDump:
        """A checkpoint by the protocol asked for; by copy-on-write if none was, and the processes are to run on."""
        twins.setting()  # says what has no meaning before anything is done
        options = request.cow
        cow = CowSettings.from_environment().changed(
            pool=options.pool, validate=options.validate, prioritise=options.prioritise
        )
        protocol = request.protocol or "cow"
        if protocol not in PROTOCOLS:
            raise UsageError(f"There is no protocol {protocol!r}: choose one of {', '.join(PROTOCOLS)}.")
        # Processes that are about to be killed, or that the driver alone saves, have nothing to compute meanwhile.
        if protocol == "stop" or not assignment.gated or not _leaves_alive(connection.pid, request):
            return StopDump(assignment)
        return CowDump(assignment, cow, self._registry.cow)

    def _find_processes(self, root: int) -> tuple[list[Session], list[ForeignProcess]]:
        tree = tree_of(root)
        began = time.monotonic()
        while True:
            with self._registry.lock:
                by_pid = {
                    s.pid: s
                    for s in self._registry.sessions.values()
                    if s.is_connected or s.machine.state is not SessionState.RUNNING
                }
            gated = [by_pid[pid] for pid in tree if pid in by_pid]
            others = [pid for pid in tree if pid not in by_pid and toggle.holds_cuda(pid)]
            waited = time.monotonic() - began
            late = [
                pid
                for pid in others
                if _has_frontend(pid) and (waited < SILENT_SECONDS or CONTROL_THREAD in procfs.thread_names(pid))
            ]
            if (not late and all(s.table_complete for s in gated)) or waited > REGISTER_SECONDS:
                break
            time.sleep(0.02)
        for session in gated:
            if not session.table_complete and session.machine.state is SessionState.RUNNING:
                raise CheckpointFailed(
                    f"Process {session.pid} ({session.executable}) has not handed all of its GPU memory to phosd "
                    f"within {REGISTER_SECONDS:.0f} s. Is it stopped, or very busy? Try again."
                )
        for pid in late:
            raise CheckpointFailed(
                f"Process {pid} ({procfs.executable(pid)}) runs under PhOS but has not connected to this phosd "
                f"({self._registry.path}) within {REGISTER_SECONDS:.0f} s. Is it stopped, or was it started "
                "with another PHOS_SOCKET?"
            )
        return gated, [_foreign(pid) for pid in others]

    def _describe(self, process: GatedProcess, detached: Detached) -> inventory.ProcessRecord:
        arguments, parent = inventory.command_line(process.pid)
        with self._registry.lock:
            session = self._registry.sessions.get(process.session)
        if session is None:
            raise CheckpointFailed(f"Process {process.pid} ({process.executable}) ended while it was checkpointed.")
        return inventory.ProcessRecord(
            pid=procfs.inner_pid(process.pid),
            session=process.session,
            executable=process.executable,
            command_line=arguments,
            parent_pid=parent,
            detached=detached,
            own_blocks=process.own_blocks(),
            modules=list(session.modules),  # the process runs on before this is written, and loads others
            devices=session.gpu_ordinals(),
            restore_thread=session.restore_thread,
        )


def _foreign(pid: int) -> ForeignProcess:
    """
    Raises:
        CheckpointFailed: the driver does not say which of its threads it needs.
    """
    thread = toggle.restore_thread(pid, NEEDED_THREAD_SECONDS)
    if not thread and procfs.is_alive(pid):
        why = "it is stopped. Continue it first" if procfs.is_stopped(pid) else "the driver does not name its thread"
        raise CheckpointFailed(f"The driver could not checkpoint process {pid} ({procfs.executable(pid)}): {why}.")
    return ForeignProcess(pid, procfs.executable(pid), thread, silent=_has_frontend(pid))


def _alone(criu: int, process: ForeignProcess) -> wire_pb2.Alone:
    """What CRIU calls a process and its thread.

    Raises:
        CheckpointFailed: it has no names for them.
    """
    pid = procfs.number_for(criu, process.pid, procfs.inner_pid(process.pid))
    thread = procfs.number_for(criu, process.pid, process.restore_thread)
    if not pid or not thread:
        raise CheckpointFailed(
            f"Process {process.pid} ({process.executable}) has ended, or is in a pid namespace that CRIU (process "
            f"{criu}) does not see into. Run CRIU outside of that namespace, or inside it."
        )
    return wire_pb2.Alone(pid=pid, thread=thread)


def _outer(criu: int, request: wire_pb2.TaskRuns) -> list[int]:
    """Our numbers of the tasks that CRIU names; 0 for one that there is not."""
    return [procfs.outer_pid(criu, pid) for pid in request.pids]


def _free_criu(connection: wire.Connection, over: threading.Event) -> None:
    """End a CRIU that waits for ever, until its connection is ``over``.

    If a task is killed while CRIU puts its parasite into it, CRIU 4.1.1 waits for the task's first thread alone. That
    is not to be had before the other threads have been collected, which is CRIU's work, too, as their tracer.
    """
    criu, step = connection.pid, 0.5
    # By the first CRIU's own alarm goes off, which interrupts the wait: it fails then, and undoes what it has done.
    for number in (signal.SIGALRM, signal.SIGKILL):
        stuck_for, task = 0.0, 0
        while stuck_for < NOTICE_SECONDS:
            if over.wait(step):
                return
            task = procfs.waited_for(criu)
            task = procfs.outer_pid(criu, task) if task else 0
            stuck = task and procfs.is_remains(task) and not procfs.is_stopped(criu)
            stuck_for = stuck_for + step if stuck else 0.0
        log.error("CRIU (process %d) waits for ever for process %d, which was killed: it is ended.", criu, task)
        pidfd = connection.peer_pidfd()
        with suppress(ProcessLookupError):
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, number)
            else:
                os.kill(criu, number)
        if pidfd >= 0:
            os.close(pidfd)


def _wait_for_end(connection: wire.Connection, why: object) -> None:
    """Return when a CRIU has ended that nobody listens to any more: before, it may hold the tasks.

    Its plugin's next request fails, and with it the dump, which lets them go. After a while it is no longer waited for.
    """
    connection.done(0, error=why)
    connection.shutdown()
    criu = connection.peer_pidfd()
    try:
        until = time.monotonic() + CRIU_END_SECONDS
        # A pid of 0: it is in no namespace that we see.
        while connection.pid and not procfs.has_ended(connection.pid, criu):
            if time.monotonic() > until:
                log.error("CRIU (process %d), whose dump has failed, does not end.", connection.pid)
                break
            time.sleep(END_LOOK_SECONDS)
    finally:
        if criu >= 0:
            os.close(criu)


def _leaves_alive(criu: int, request: wire_pb2.DumpBegin) -> bool:
    """Whether a CRIU that is dumping will leave its tasks alive. In doubt (an RPC client asked it): it will not."""
    return request.leaves_running or any(LEAVE.fullmatch(word) for word in _command_line(criu))


def _may_leave_alive(criu: int) -> bool:
    """Whether it may, by its command line: an RPC client asked it, or a script of the user's has a say.

    The launcher looks into CRIU's configuration files (PHOS_MAY_KEEP).
    """
    words = _command_line(criu)
    return "dump" not in words or any(LEAVE.fullmatch(word) or SCRIPT.fullmatch(word) for word in words)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _tasks_of(root: int) -> list[int]:
    """The tasks of a frozen tree; none if it was killed meanwhile."""
    try:
        return list(tree_of(root))
    except psutil.NoSuchProcess:
        return []


def _has_frontend(pid: int) -> bool:
    try:
        return "/libphos.so" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
