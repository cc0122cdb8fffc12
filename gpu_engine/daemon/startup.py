"""What phosd does before it serves, and that it serves."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from phos.gpu_engine import configuration, standard_streams
from phos.gpu_engine.daemon.own_log import LogHandler
from phos.gpu_engine.daemon.paths import lock_file, log_file, make_folder, refuse_unfit
from phos.gpu_engine.daemon.remote_settings import VARIABLES, RemoteSettings
from phos.gpu_engine.daemon.service import Service
from phos.gpu_engine.errors import DaemonUnavailable, NotPermitted, PhosError, UsageError
from phos.gpu_engine.installation import device_kind, load_driver, version
from phos.gpu_engine.restore.pool_warden import WARDEN_NAME

DESCRIPTORS_USUAL = 16384
"""Room for so many is made at the start: 128 KiB."""


def _make_room(descriptors: int) -> None:
    """Let the table of descriptors grow now. With threads, and somebody waiting, each doubling takes 10 ms and more."""
    os.close(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, descriptors - 1))


def _listen(path: Path) -> socket.socket:
    """Bind the socket; only one phosd may serve a folder.

    Raises:
        PhosError: another phosd runs there, or there can be no socket.
    """
    refuse_unfit(path)
    make_folder(path)
    try:
        lock = os.open(lock_file(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotPermitted(f"phosd cannot write to {path.parent}, where its socket is: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends
    except OSError as error:
        raise PhosError(f"Another phosd already serves {path}.") from error
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    try:
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and phosd does not replace it. Remove it, or name another place.")
        path.unlink(missing_ok=True)  # of a phosd that was killed: we have the lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        # Any user may connect: what a peer may do is decided by its credentials (SO_PEERCRED), request by request.
        path.chmod(0o666 if os.geteuid() == 0 else 0o600)
    except OSError as error:
        raise PhosError(f"phosd cannot listen at {path}: {error.strerror or error}.") from error
    return listener


M_ARENA_MAX = -8
"""mallopt(3)'s number for it; malloc.h."""


def _share_arenas() -> None:
    """Let all threads allocate from two arenas of memory.

    By default glibc makes eight for each processor, and what is free in one is of no use to a thread of another: phosd,
    which has a thread for whatever it does, grew a little with every restore (bench/soak.py).
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def _on_ending(act: Callable[[], None]) -> None:
    """Do something, in a thread, when a signal asks phosd to end.

    A handler of Python's would run in the first thread alone, and only when that leaves accept(): for which nothing
    wakes it if another thread got the signal, or if it came right before.
    """
    come, note = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # only signals that have a handler are noted

    def wait() -> None:
        os.read(come, 1)
        act()

    threading.Thread(target=wait, daemon=True, name="stop").start()


def _refuse_a_pools_namespace() -> None:
    """Whoever runs CRIU there may look for a phosd; one that started there would see nobody else's processes.

    Raises:
        DaemonUnavailable: this process is in one.
    """
    try:
        first = Path("/proc/1/comm").read_text().strip()
    except OSError:
        return
    if first == WARDEN_NAME:
        raise DaemonUnavailable(
            "phosd does not start in the pid namespace of a pool's process. Start it outside: phosd --ensure."
        )


def run(path: Path, *, verbose: bool) -> None:
    """Serve at a socket until asked to end; does not return then.

    Raises:
        PhosError: another phosd runs there, there can be no socket, or there is no driver.
        DaemonUnavailable: phosd cannot be in this pid namespace.
    """
    _refuse_a_pools_namespace()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever has started it may have some blocked
    service = Service()
    faulthandler.enable()  # should native code ever crash, the log has the stacks of all threads
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(threadName)s: %(message)s",
        handlers=[LogHandler(sys.stderr, log_file(path))],
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor for each block of each process
    _make_room(min(hard, DESCRIPTORS_USUAL))
    try:
        configuration.fill_environment(VARIABLES)
    except UsageError as error:  # it matters for checkpoints, and they say so; applications need their phosd
        logging.getLogger(__name__).error("%s", error)
    sharing = RemoteSettings.from_environment(os.environ)
    load_driver(device_kind())
    from phos.gpu_engine.daemon.server import Daemon  # loads cuda-python, so not before load_driver

    # Copying threads need the interpreter for microseconds at a time; by default one may wait 5 ms for it.
    sys.setswitchinterval(0.0002)
    _share_arenas()
    # With Python's thresholds it looked for garbage for 4 % of a checkpoint, up to 34 ms at a time (64 GB, an H100).
    gc.freeze()
    gc.set_threshold(100_000)
    listener = _listen(path)
    try:
        daemon = Daemon(path, version(), sharing)
    except BaseException:
        path.unlink(missing_ok=True)  # other users' programs would take it for that of a phosd that is to come
        raise
    _on_ending(lambda: daemon.stop(listener))
    listener.listen(128)
    logging.getLogger(__name__).info(
        "phosd serves %s: %s", path, ", ".join(gpu.name for gpu in daemon.gpus) or "no GPU"
    )
    service.tell("READY=1")  # not before: whoever waits for it connects at once
    daemon.serve(listener)
    service.tell("STOPPING=1")
    path.unlink(missing_ok=True)
    standard_streams.flush()
    os._exit(0)  # worker threads may sit in driver calls; the keeper holds what has to live on
