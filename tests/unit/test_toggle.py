"""The driver's calls on a process, which wait for it: bounded, and undone where they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import cast

import pytest

from phos.gpu_engine import driver, procfs, toggle
from phos.gpu_engine.errors import OUT_OF_MEMORY, CheckpointFailed, DriverError, NoSuchProcess, Unresponsive
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.stop.tree import ProcessTree
from phos.gpu_engine.timeline import Timeline
from tests.unit.waiting import eventually


def test_step_that_hangs_holds_up_nobody() -> None:
    release = threading.Event()
    order: list[str] = []

    def hang(_pid: int) -> None:
        release.wait(20)
        order.append("first")

    def after(_pid: int) -> None:
        order.append("second")

    hanging = toggle.Step(hang, os.getpid())
    quick = toggle.Step(lambda _pid: None, os.getpid())
    follower = toggle.Step(after, os.getpid(), hanging)
    assert toggle.wait_for([hanging, quick], 0.3) == [hanging]
    assert order == []
    release.set()
    assert toggle.wait_for([hanging, follower], 5) == []
    assert order == ["first", "second"]


def test_waiting_ends_when_only_stopped_processes_are_left() -> None:
    child = subprocess.Popen(["sleep", "60"])
    release = threading.Event()

    def hang(_pid: int) -> None:
        release.wait(20)

    step = toggle.Step(hang, child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(child.pid), "the stop")
    began = time.monotonic()
    assert toggle.wait_for([step], 15) == [step]
    assert time.monotonic() - began < 3
    release.set()
    child.kill()
    child.wait()
    assert not procfs.is_stopped(child.pid)


class FakeDriver:
    """The driver's checkpoint API for one process; what is in ``fail`` fails so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str | None = "running", **fail: int) -> None:
        self.state = state
        self.fail = fail
        self.code = 999
        self.dies = False
        monkeypatch.setattr(driver, "checkpoint_state", lambda _pid: self.state)
        monkeypatch.setattr(driver, "checkpoint_lock", lambda _pid, _ms: self.go("lock", "locked"))
        monkeypatch.setattr(driver, "checkpoint_checkpoint", lambda _pid: self.go("checkpoint", "checkpointed"))
        monkeypatch.setattr(driver, "checkpoint_restore", lambda _pid, _pairs=None: self.go("restore", "locked"))
        monkeypatch.setattr(driver, "checkpoint_unlock", lambda _pid: self.go("unlock", "running"))

    def go(self, call: str, state: str) -> None:
        if self.fail.get(call, 0) > 0:
            self.fail[call] -= 1
            if self.dies:
                self.state = None
            raise DriverError(call, self.code, "CUDA_ERROR_X")
        self.state = state


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_checkpoint_that_fails_leaves_the_process_running(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = FakeDriver(monkeypatch, "running", **{call: 1})
    with pytest.raises(CheckpointFailed, match="goes on as before"):
        toggle.checkpoint(1)
    assert fake.state == "running"
    toggle.checkpoint(1)
    assert fake.state == "checkpointed"
    toggle.revive(1)
    assert fake.state == "running"


def test_checkpoint_whose_undoing_fails_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, checkpoint=1, unlock=1)
    with pytest.raises(CheckpointFailed, match=r"checkpoint failed .*Bringing it back failed as well.*unlock"):
        toggle.checkpoint(1)


def test_process_that_ends_meanwhile_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, lock=1).dies = True
    with pytest.raises(CheckpointFailed, match="ended while it was being checkpointed"):
        toggle.checkpoint(1)
    FakeDriver(monkeypatch, "checkpointed", restore=1).dies = True
    with pytest.raises(NoSuchProcess, match="ended while"):
        toggle.revive(1)


def test_process_that_the_driver_gave_up_is_not_called_revived(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, "failed")
    with pytest.raises(CheckpointFailed, match="has lost the GPU state"):
        toggle.revive(1)


def test_only_lack_of_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(monkeypatch, "checkpointed", restore=1)
    fake.code = OUT_OF_MEMORY
    toggle.revive_when_there_is_room(1)
    assert fake.state == "running"
    FakeDriver(monkeypatch, "checkpointed", restore=1)
    with pytest.raises(DriverError):
        toggle.revive_when_there_is_room(1)


def strangers(**settings: float) -> ProcessTree:
    """A tree of one process without the frontend, this one, whose thread 7 carries out what the driver is asked."""
    return ProcessTree([], [ForeignProcess(os.getpid(), "python", 7, silent=False)], Settings(**settings), Timeline())  # type: ignore[arg-type]


def test_a_process_without_the_frontend_is_locked_then_saved_then_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(monkeypatch)
    tree, pid = strangers(), os.getpid()
    with pytest.raises(CheckpointFailed, match="none that the driver alone is to save now"):
        tree.save_frozen([pid])
    tree.checkpoint()
    assert fake.state == "locked"
    with pytest.raises(CheckpointFailed, match=f"Process {pid + 1} is none"):
        tree.save_frozen([pid + 1])
    assert tree.unsaved == [pid]
    tree.save_frozen([pid])
    assert fake.state == "checkpointed"
    assert tree.unsaved == []
    tree.put_back_frozen([pid])
    assert fake.state == "running"
    assert tree.bring_back() == ""
    assert fake.state == "running"


@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_what_fails_while_it_stands_still_is_undone_when_it_runs(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = FakeDriver(monkeypatch, "running", **{call: 1})
    tree = strangers()
    tree.checkpoint()
    if call == "restore":
        tree.save_frozen([os.getpid()])
    with pytest.raises(CheckpointFailed, match=rf"Process {os.getpid()}: .*{call}"):
        (tree.put_back_frozen if call == "restore" else tree.save_frozen)([os.getpid()])
    assert tree.bring_back() == ""
    assert fake.state == "running"


@pytest.mark.parametrize("killed", [False, True], ids=["runs on", "is killed"])
def test_one_that_ends_by_the_driver_s_error_is_told_of(monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """It stood still when the driver failed, and has ended before anybody looks again; unless CRIU was to kill it."""
    fake = FakeDriver(monkeypatch, "running", restore=1)
    tree = strangers()
    tree.checkpoint()
    tree.save_frozen([os.getpid()])
    with pytest.raises(CheckpointFailed):
        tree.put_back_frozen([os.getpid()])
    fake.state = None
    said = tree.bring_back(killed=killed)
    assert (f"Process {os.getpid()}: The CUDA driver's restore failed" in said) is not killed
    assert tree.warnings == []


@pytest.mark.parametrize("killed", [False, True], ids=["runs on", "is killed"])
def test_one_that_ends_while_it_is_brought_back_is_warned_of(monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """All of its threads run: whether it ends by itself cannot be known."""
    fake = FakeDriver(monkeypatch, "running", restore=1)
    tree = strangers()
    tree.checkpoint()
    tree.save_frozen([os.getpid()])
    fake.dies = True
    assert tree.bring_back(killed=killed) == ""
    assert ["ended while its GPU state was brought back" in text for text in tree.warnings] == [True] * (not killed)


def test_who_is_only_locked_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU failed before it had frozen the tree."""
    fake = FakeDriver(monkeypatch)
    tree = strangers()
    tree.checkpoint()
    assert tree.bring_back() == ""
    assert fake.state == "running"


def test_a_driver_that_waits_for_a_thread_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(monkeypatch)
    tree = strangers(checkpoint_timeout=0.2)
    tree.checkpoint()
    released = threading.Event()

    def wait(_pid: int) -> None:
        released.wait(20)
        fake.go("checkpoint", "checkpointed")

    monkeypatch.setattr(driver, "checkpoint_checkpoint", wait)
    with pytest.raises(Unresponsive, match="did not save"):
        tree.save_frozen([os.getpid()])
    with pytest.raises(Unresponsive, match="has not done what it was asked before"):
        tree.put_back_frozen([os.getpid()])  # at once: it could not help
    released.set()  # all of its threads run again
    assert tree.bring_back() == ""
    assert fake.state == "running"


def test_what_went_wrong_with_each_of_several_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the second; and nothing is begun that there is no thread for, unless it is to be done at any rate."""
    done: list[int] = []
    begun: dict[int, toggle.Step] = {}

    def refuse(pid: int) -> None:
        done.append(pid)
        if pid != 2:
            raise NoSuchProcess("Process 1 has ended." if pid == 1 else "It is not known.")

    with pytest.raises(CheckpointFailed, match=r"^Process 1 has ended\. Process 3: It is not known\.$"):
        toggle.together(refuse, [1, 2, 3], 10, "save", begun=begun)
    assert sorted(done) == sorted(begun) == [1, 2, 3]
    assert all(step.ended() for step in begun.values())

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(CheckpointFailed, match="is not asked to save process 2: can't start new thread"):
        toggle.together(refuse, [2], 10, "save")
    assert len(done) == 3
    toggle.together(refuse, [2], 10, "save", at_any_rate=True)
    assert done[3:] == [2]


def test_one_that_ends_while_it_is_saved_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    FakeDriver(monkeypatch, checkpoint=1)
    child.kill()
    child.wait()
    with pytest.raises(NoSuchProcess, match="ended while it was being checkpointed"):
        toggle.save(child.pid)


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, toggle.ILLEGAL_STATE])
def test_one_that_stands_still_waits_for_memory_and_may_only_be_locked(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fake = FakeDriver(monkeypatch, "checkpointed", restore=1)
    fake.code = code
    toggle.recover(os.getpid())
    assert fake.state == "running"


class QuickToEnd:
    """A process that notices at once that its GPU is gone, and ends."""

    pid = 1
    session = b"s"
    executable = "python"

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.lost_reason = ""

    def alive(self) -> bool:
        return self.fake.state is not None

    def lose(self, reason: str) -> None:
        self.lost_reason = reason
        self.fake.state = None

    def allow_attach(self) -> None:
        """It may come; phosd does not hold its memory any more."""

    def wait_attached(self, _timeout: float) -> None:
        self.lose("phosd holds no memory of it")
        raise CheckpointFailed(f"did not come back ({self.lost_reason})")


@pytest.mark.parametrize("killed", [False, True], ids=["by its loss", "by CRIU, before it"])
def test_a_lost_process_is_told_of_however_soon_it_ends(monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    fake = FakeDriver(monkeypatch, restore=1)
    fake.dies = killed
    process = QuickToEnd(fake)
    # Of a GatedProcess this is all that a tree asks one that does not come back.
    tree = ProcessTree([cast(GatedProcess, process)], [], Settings(), Timeline())
    tree.detached = {process.session: Detached()}
    tree.checkpoint()
    said = tree.bring_back()
    assert ("CUDA calls fail from now on" in said) is not killed
    assert bool(process.lost_reason) is not killed


def test_a_process_whose_memory_is_lost_is_told_of_however_soon_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    process = QuickToEnd(FakeDriver(monkeypatch))
    tree = ProcessTree([cast(GatedProcess, process)], [], Settings(), Timeline())
    tree.detached = {process.session: Detached()}
    tree.checkpoint()
    assert "phosd holds no memory of it" in tree.bring_back()
