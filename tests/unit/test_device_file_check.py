"""Who may be restored without device files of the GPU's (gpu_engine/stop/tree.py), and what tells (procfs.py)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gpu_engine import driver, procfs
from phos.gpu_engine.daemon import serve_dump
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.process import ForeignProcess
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.stop.tree import ProcessTree
from phos.gpu_engine.timeline import Timeline

CUDA = "/usr/lib/libcuda.so.580.1"


def tree(*saved: int) -> ProcessTree:
    foreign = [ForeignProcess(pid, "python", pid, silent=False) for pid in saved]
    return ProcessTree([], foreign, Settings(), Timeline())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process with a device file, as the kernel tells of one."""
    said = SimpleNamespace(file="/dev/nvidia0", threads={"pt_data_worker"}, files={CUDA, "/usr/lib/libc.so.6"})
    monkeypatch.setattr(driver, "device_files", lambda: ("/dev/nvidia",))
    monkeypatch.setattr(driver, "kind", lambda: "nvidia")
    monkeypatch.setattr(procfs, "file_open_in", lambda _pid, _prefixes: said.file)
    monkeypatch.setattr(procfs, "thread_names", lambda _pid: said.threads)
    monkeypatch.setattr(procfs, "mapped_files", lambda _pid: said.files)
    return said


def test_a_forked_child_may_be(worker: SimpleNamespace) -> None:
    tree().check_device_files([os.getpid()])
    worker.threads = {"cuda", "cuda-things", "cuda7"}  # a program calls its threads as it likes
    tree().check_device_files([os.getpid()])


@pytest.mark.parametrize("name", ["cuda-EvtHandlr", "cuda00001800007"])
def test_one_with_a_thread_of_the_driver_s_may_not(worker: SimpleNamespace, name: str) -> None:
    """It began with CUDA, or NVML, after phosd had looked."""
    worker.threads = {"python3", name}
    with pytest.raises(CheckpointFailed, match=r"a thread of the driver's, which has not saved it.*try again"):
        tree().check_device_files([os.getpid()])
    worker.file = ""
    tree().check_device_files([os.getpid()])


def test_one_with_graphics_may_not(worker: SimpleNamespace) -> None:
    worker.files |= {"/usr/lib/libnvidia-eglcore.so.580.1"}
    with pytest.raises(CheckpointFailed, match="library for graphics"):
        tree().check_device_files([os.getpid()])
    worker.files = {"/usr/lib/libnvidia-tls.so.580.1"}
    with pytest.raises(CheckpointFailed, match="not from a process with CUDA"):
        tree().check_device_files([os.getpid()])


def test_one_that_was_saved_may_not(worker: SimpleNamespace) -> None:
    with pytest.raises(CheckpointFailed, match=r"/dev/nvidia0 open, though the driver has saved it"):
        tree(os.getpid()).check_device_files([os.getpid()])


def test_what_cannot_be_told_is_no_yes(worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int, _prefixes: tuple[str, ...]) -> str:
        raise PermissionError(13, "no")

    monkeypatch.setattr(procfs, "file_open_in", refused)
    with pytest.raises(CheckpointFailed, match="cannot be told"):
        tree().check_device_files([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        tree().check_device_files([ended.pid])


OPENS_AND_MAPS = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
said = lambda: (print(flush=True), sys.stdin.readline())
said()
descriptor = os.open("/dev/zero", os.O_RDWR)
said()
memory = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), 3, 1, descriptor, ctypes.c_long(0)))  # shared
os.close(descriptor)
said()
libc.munmap(memory, ctypes.c_size_t(4096))
said()
"""


def test_what_a_process_has_open_and_mapped() -> None:
    nothing = ("/dev/nothing",)
    with subprocess.Popen(
        [sys.executable, "-c", OPENS_AND_MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin
        assert child.stdout
        found = []
        for _ in range(4):
            child.stdout.readline()
            assert procfs.file_open_in(child.pid, nothing) == ""
            found.append(procfs.file_open_in(child.pid, (*nothing, "/dev/ze")))
            child.stdin.write("\n")
            child.stdin.flush()
    # Mapped to be shared it is named as a file that is gone.
    assert found == ["", "/dev/zero", "/dev/zero (deleted)", ""]
    with pytest.raises(OSError, match="/proc"):
        procfs.file_open_in(1 << 22, nothing)


def test_what_threads_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    thread = threading.Thread(target=gone.wait)
    thread.start()
    with open(f"/proc/self/task/{thread.native_id}/comm", "w") as name:
        name.write("phos")
    try:
        assert "phos" in procfs.thread_names(os.getpid())
        real = Path.read_text

        def read_text(path: Path, **how: str) -> str:
            if path.parent.name == str(thread.native_id):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path, **how)

        monkeypatch.setattr(Path, "read_text", read_text)
        assert procfs.thread_names(os.getpid()) == set(), "of some it is not known"
    finally:
        gone.set()
        thread.join()
    assert procfs.thread_names(1 << 22) == set()


def test_one_that_begins_with_cuda_before_it_is_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver alone must not save what phosd has a part in by now."""
    abandoned: list[str] = []
    job = SimpleNamespace(abandon=abandoned.append)
    jobs = SimpleNamespace(settle=abandoned.append)
    server = serve_dump.DumpServer(SimpleNamespace(jobs=jobs))  # type: ignore[arg-type]
    monkeypatch.setattr(procfs, "thread_names", lambda pid: {"python", "phos"} if pid == 8 else {"python"})
    silent, other = (ForeignProcess(pid, "python", pid, silent=pid != 9) for pid in (8, 9))
    server._refuse_late(job, [other, ForeignProcess(7, "python", 7, silent=True)])  # type: ignore[arg-type]
    assert abandoned == []
    with pytest.raises(CheckpointFailed, match=r"Process 8 \(python\) has just initialised CUDA"):
        server._refuse_late(job, [other, silent])  # type: ignore[arg-type]
    assert len(abandoned) == 2
