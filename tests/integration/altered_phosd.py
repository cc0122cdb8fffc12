"""phosd for tests of what hardly ever happens: ALTERED_PHOSD names one or several of the alterations below.

Started as phosd is: ``python -m tests.integration.altered_phosd --socket PATH``.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phos.gpu_engine import landing, procfs, toggle
from phos.gpu_engine.copy_placed import PlacedSave
from phos.gpu_engine.daemon import command_line
from phos.gpu_engine.daemon.jobs import JobTable
from phos.gpu_engine.daemon.server import Daemon
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.session_kernels import SessionKernels
from phos.gpu_engine.daemon.session_window import SessionWindow
from phos.gpu_engine.daemon.wire import Connection, close_all
from phos.gpu_engine.errors import CheckpointFailed, ProtocolError
from phos.gpu_engine.job_states import MISPREDICTED
from phos.gpu_engine.named_memory import DumpedNamedMemory
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.lazy import LazyRestore
from phos.gpu_engine.restore.pool import PooledRestore
from phos.gpu_engine.shared_files import _FileCopy
from phos.gpu_engine.stop.dump import StopDump
from phos.gpu_engine.task_pages import TaskPages, _Pool
from phos.images.reader import Image
from phos.images.writer import ImageWriter

SECONDS = 0.5
"""Many times what a program needs to end."""


def after(kind: Any, name: str, seconds: float = SECONDS) -> None:
    """Whoever calls this takes his time behind it."""
    function: Callable[..., Any] = getattr(kind, name)

    def slow(*arguments: Any) -> Any:
        answer = function(*arguments)
        time.sleep(seconds)
        return answer

    setattr(kind, name, slow)


def tardy() -> None:
    """Threads take their time to say that a process computes again: it may have ended by then."""
    after(toggle, "revive")
    after(Session, "attach")


def crossed() -> None:
    """A process is attached while the thread that brought the driver's part back has not ended yet."""
    after(Restore, "_bring_back_driver_part")
    after(Session, "attach", 4 * SECONDS)


def no_pidfd() -> None:
    """There is no descriptor left when CRIU names a restored task, nor to look into /proc when it has been attached."""
    after_attach = Restore.attached
    take_task = Restore.take_task

    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def take(restore: Restore, pid: int) -> dict[int, int]:
        pidfd_open, os.pidfd_open = os.pidfd_open, refused
        try:
            return take_task(restore, pid)
        finally:
            os.pidfd_open = pidfd_open

    def attached(restore: Restore, pid: int) -> None:
        fields, procfs._fields = procfs._fields, lambda pid: []
        threading.Timer(SECONDS, setattr, (procfs, "_fields", fields)).start()
        after_attach(restore, pid)

    Restore.take_task = take  # type: ignore[method-assign]
    Restore.attached = attached  # type: ignore[method-assign]


def killed_at_first_task(whom: Callable[[int], int]) -> None:
    """Somebody is killed when CRIU has put everything together, and names the first of its tasks."""
    take_task = Restore.take_task

    def take(restore: Restore, pid: int) -> dict[int, int]:
        os.kill(whom(procfs.tracer(pid)), signal.SIGKILL)
        return take_task(restore, pid)

    Restore.take_task = take  # type: ignore[method-assign]


def criu_killed() -> None:
    """It lets its tasks go with that."""
    killed_at_first_task(lambda criu: criu)


def criu_killed_late() -> None:
    """When it has let the driver's threads run, and phosd is about to bring back what stands still."""
    bring_back = Restore.bring_back

    def bring(restore: Restore, pids: Sequence[int], *seconds: float) -> None:
        os.kill(procfs.tracer(pids[0]), signal.SIGKILL)
        time.sleep(SECONDS)
        bring_back(restore, pids, *seconds)

    Restore.bring_back = bring  # type: ignore[method-assign]


def slow_take() -> None:
    """Somebody else may see a task that CRIU's plugin names before all is noted about it."""
    after(Restore, "_thread")


def criu_killed_in_a_dump() -> None:
    """When it has done its part, and what its tasks share by name is still being saved."""
    save, wait = DumpedNamedMemory._save_file, DumpedNamedMemory.wait

    def late(memory: DumpedNamedMemory, inode: int, names: list[str]) -> None:
        time.sleep(SECONDS)
        save(memory, inode, names)

    def killed(memory: DumpedNamedMemory) -> None:
        os.kill(procfs.tracer(next(iter(memory._tasks))), signal.SIGKILL)
        wait(memory)

    DumpedNamedMemory._save_file = late  # type: ignore[method-assign]
    DumpedNamedMemory.wait = killed  # type: ignore[method-assign]


def slow_shared_files() -> None:
    """What tasks share without a name takes its time to be copied."""
    run = _FileCopy.run

    def slowly(copy: _FileCopy, *arguments: Any, **named: Any) -> None:
        logging.getLogger(__name__).info("shared memory is being copied")
        time.sleep(SECONDS)
        run(copy, *arguments, **named)

    _FileCopy.run = slowly  # type: ignore[method-assign]


def slow_withdrawal() -> None:
    """Others see for a while what is left of a checkpoint that is given up."""
    after(StopDump, "_withdraw", SECONDS / 2)


def swapped_image() -> None:
    """When a process of a pool is to be parked, another image comes to its image's place; once."""
    park = PooledRestore.park
    done: list[bool] = []

    def then(restore: PooledRestore, register: Callable[..., Any]) -> None:
        park(restore, register)
        if not done:
            done.append(True)
            os.rename(restore.path, f"{restore.path}-away")
            os.rename(f"{restore.path}-other", restore.path)

    PooledRestore.park = then  # type: ignore[method-assign]


def wrong_when_taken() -> None:
    """A process from a pool computes for a while, and then a guess turns out wrong."""
    look = LazyRestore._look

    def looked(restore: LazyRestore) -> None:
        if isinstance(restore, PooledRestore) and restore.running.is_set():
            time.sleep(SECONDS)
            restore.fail("A guess was wrong.", MISPREDICTED)
        look(restore)

    LazyRestore._look = looked  # type: ignore[method-assign]


def phosd_killed() -> None:
    """CRIU asks in vain."""
    killed_at_first_task(lambda _: os.getpid())


def killed_while_attaching() -> None:
    """phosd ends when a process is about to be handed its memory."""

    def killed(session: Session, numbers: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Session._send_blocks = killed  # type: ignore[method-assign]


def full_at_the_merge() -> None:
    """The image's file system is full when CPU pages are merged, and what GPUs wrote is still being compared."""
    one = PlacedSave.one

    def merge(pages: TaskPages, hidden: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "pages-1.img")

    def slowly(save: PlacedSave, worker: int) -> int:
        time.sleep(SECONDS)
        return one(save, worker)

    TaskPages.merge = merge  # type: ignore[method-assign]
    PlacedSave.one = slowly  # type: ignore[method-assign]


def slow_commit() -> None:
    """CRIU and its tasks are long done when the image becomes whole."""
    commit = ImageWriter.commit

    def slowly(writer: ImageWriter, *arguments: Any) -> None:
        time.sleep(SECONDS)
        commit(writer, *arguments)

    ImageWriter.commit = slowly  # type: ignore[method-assign]


def full_at_the_commit() -> None:
    """The image's file system is full when all but the commit record is there."""

    def commit(writer: ImageWriter, *arguments: Any) -> None:
        time.sleep(SECONDS)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "phos-commit.img")

    ImageWriter.commit = commit  # type: ignore[method-assign]


def cut_off() -> None:
    """The connection to a process breaks when it has its memory again and its window is to be opened; once.

    Copies that SOFTGPU_COPY_HOLD holds go on then: not all is saved before.
    """
    opened = SessionWindow.open
    done: list[bool] = []

    def cut(window: SessionWindow) -> None:
        if window._window is None or done:
            opened(window)
            return
        done.append(True)
        window._conversation.hang_up()
        if hold := os.environ.get("SOFTGPU_COPY_HOLD"):
            Path(hold).unlink()
        time.sleep(SECONDS / 10)
        raise CheckpointFailed("The connection was cut off.")

    SessionWindow.open = cut  # type: ignore[method-assign]


def cut_off_lazily() -> None:
    """As the one before, of a process that is restored lazily."""
    described = SessionKernels.describe_restored

    def cut(kernels: SessionKernels) -> None:
        described(kernels)
        kernels._conversation.hang_up()
        time.sleep(SECONDS / 10)

    SessionKernels.describe_restored = cut  # type: ignore[method-assign]


def unhurried() -> None:
    """Preparing a checkpoint takes as long as if there were a lot of memory; for one process it then fails."""
    prepare = StopDump._prepare_gpu

    def slowly(dump: StopDump, *arguments: Any) -> None:
        prepare(dump, *arguments)
        time.sleep(4 * SECONDS)
        if "refused" in dump.path:
            raise CheckpointFailed("It was prepared for nothing.")

    StopDump._prepare_gpu = slowly  # type: ignore[method-assign]


def frozen() -> None:
    """CRIU has frozen a task, and is not told to go on as long as it lives."""

    def late(_dump: StopDump, _pid: int, _criu_pid: int, criu: int) -> None:
        logging.getLogger(__name__).info("all is frozen")
        while procfs.is_alive(criu):
            time.sleep(SECONDS / 10)

    StopDump.task_frozen = late  # type: ignore[method-assign]


def full_house() -> None:
    """There are so many connections that a CRIU that dumps is refused one."""
    begin = Daemon._begin

    def refuse(phosd: Daemon, peer: Connection) -> None:
        if b"\0dump\0" in Path(f"/proc/{peer.pid}/cmdline").read_bytes():
            peer.refuse("There are too many of you.")
        else:
            begin(phosd, peer)

    Daemon._begin = refuse  # type: ignore[method-assign]


def patient() -> None:
    """However long it takes to find huge pages, small ones are no better."""
    landing.SLOWEST = 1.0


def stingy() -> None:
    """What there will be to copy is far more than there was when room was made for it."""

    def little(dump: StopDump, blocks: Sequence[Any]) -> int:
        return 4 << 20

    StopDump._room_for = little  # type: ignore[method-assign]


def counted() -> None:
    """Who asks for phosd's jobs finds in its log what it still has in memory of those, their images and processes.

    Nothing looks for garbage: what has ended is to go by itself, and phosd looks for garbage once in a hundred thousand
    objects (startup.py).
    """
    gc.disable()
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    lock = threading.Lock()  # a set must not grow while it is read
    report = JobTable.report

    def count(kind: Any) -> None:
        made = kind.__init__

        def make(job: object, *arguments: Any, **named: Any) -> None:
            with lock:
                alive.add(job)
            made(job, *arguments, **named)

        kind.__init__ = make

    def counting(table: JobTable, viewer: int) -> Any:
        with lock:
            kinds = Counter(type(one).__name__ for one in alive)
        logging.getLogger(__name__).info("in memory: %s", ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
        return report(table, viewer)

    for kind in (StopDump, Restore, Session, SessionWindow, ImageWriter, Image):
        count(kind)
    JobTable.report = counting  # type: ignore[method-assign]


def blind() -> None:
    """What a frozen task shares by name cannot be looked at; once."""
    look = DumpedNamedMemory.look
    done: list[bool] = []

    def fails(memory: DumpedNamedMemory, pid: int, criu: int) -> None:
        if done:
            look(memory, pid, criu)
            return
        done.append(True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    DumpedNamedMemory.look = fails  # type: ignore[method-assign]


def cut_packet(body: str) -> Callable[[], None]:
    """A packet with such a message is cut off, once: phosd may open no more files than it has, for example."""

    def alter() -> None:
        receive = Connection.receive
        done: list[bool] = []

        def cut(connection: Connection) -> Any:
            packet = receive(connection)
            if done or packet is None or packet[0].WhichOneof("body") != body:
                return packet
            done.append(True)
            close_all(packet[1])
            raise ProtocolError("A packet was cut off: too long, or more descriptors than this process may open.")

        Connection.receive = cut  # type: ignore[method-assign]

    return alter


def no_thread_to_copy_pages() -> None:
    """Likewise; they are native code's."""
    begin = _Pool.__init__
    asked: list[bool] = []

    def refused(pool: _Pool) -> None:
        asked.append(True)
        if len(asked) <= 2:  # before the tasks are frozen, and when one is
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        begin(pool)

    _Pool.__init__ = refused  # type: ignore[method-assign]


def no_thread(name: str) -> Callable[[], None]:
    """A limit on processes is reached, for once, when a thread of such a name is to begin."""

    def alter() -> None:
        start = threading.Thread.start
        done: list[bool] = []

        def refused(thread: threading.Thread) -> None:
            if thread.name.startswith(name) and not done:
                done.append(True)
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = refused  # type: ignore[method-assign]

    return alter


def no_second_thread(prefix: str) -> Callable[[], None]:
    """As no_thread(), for the second thread of a pool, however soon the first is idle again."""

    def alter() -> None:
        submit = ThreadPoolExecutor.submit
        asked: list[ThreadPoolExecutor] = []

        def refused(pool: ThreadPoolExecutor, *what: Any, **named: Any) -> Any:
            if pool._thread_name_prefix == prefix:  # type: ignore[attr-defined]
                asked.append(pool)
                if len(asked) == 2:
                    raise RuntimeError("can't start new thread")
            return submit(pool, *what, **named)

        ThreadPoolExecutor.submit = refused  # type: ignore[assignment, method-assign]

    return alter


if __name__ == "__main__":
    for alteration in os.environ["ALTERED_PHOSD"].split(","):
        {
            "tardy": tardy,
            "crossed": crossed,
            "no pidfd": no_pidfd,
            "criu killed": criu_killed,
            "criu killed in a dump": criu_killed_in_a_dump,
            "slow shared files": slow_shared_files,
            "slow withdrawal": slow_withdrawal,
            "swapped image": swapped_image,
            "wrong when taken": wrong_when_taken,
            "criu killed late": criu_killed_late,
            "slow take": slow_take,
            "phosd killed": phosd_killed,
            "killed while attaching": killed_while_attaching,
            "full at the merge": full_at_the_merge,
            "slow commit": slow_commit,
            "full at the commit": full_at_the_commit,
            "cut off": cut_off,
            "cut off lazily": cut_off_lazily,
            "unhurried": unhurried,
            "frozen": frozen,
            "counted": counted,
            "patient": patient,
            "stingy": stingy,
            "full house": full_house,
            "no thread to save": no_thread("save"),
            "no thread to copy pages": no_thread_to_copy_pages,
            "blind": blind,
            "cut task_frozen": cut_packet("task_frozen"),
            "cut task_pages": cut_packet("task_pages"),
            "cut take_memory": cut_packet("take_memory"),
            "cut take_range": cut_packet("take_range"),
            "cut dump_end": cut_packet("dump_end"),
            "no thread for shared files": no_thread("shared-files"),
            "no thread for residue": no_thread("residue"),
            "no thread to watch CRIU": no_thread("watch-criu"),
            "no thread to bring back": no_thread("revive-"),
            "no thread to load": no_thread("load"),
            "no thread to renew": no_thread("renew"),
            "no thread to release": no_thread("release"),
            "no thread to restore": no_thread("restore-"),
            "no thread to end a restore": no_thread("end-restore"),
            "no thread to quiesce": no_second_thread("quiesce"),
            "no thread to detach": no_second_thread("detach"),
        }[alteration]()
    command_line.main(prog_name="phosd")
