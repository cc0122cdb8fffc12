"""The checkpoint API of the software GPU, called from another process as phosd does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from .softgpu_host import ROOT, Target, needs_softgpu, run

pytestmark = needs_softgpu

# The calling side: `python -c ... PID`; the target's pid is in TARGET.
CALLER = """
ok(cu.cuInit(0))
PID = int(os.environ["TARGET"])
state = lambda: ok(cu.cuCheckpointProcessGetState(PID)).name.rsplit("_", 1)[1]
def lock(ms=5000):
    args = cu.CUcheckpointLockArgs()
    args.timeoutMs = ms
    return cu.cuCheckpointProcessLock(PID, args)[0]
checkpoint = lambda: cu.cuCheckpointProcessCheckpoint(PID, None)[0]
unlock = lambda: cu.cuCheckpointProcessUnlock(PID, None)[0]
def restore(pairs=None):
    if pairs is None:
        return cu.cuCheckpointProcessRestore(PID, None)[0]
    args = cu.CUcheckpointRestoreArgs()
    args.gpuPairs = pairs
    args.gpuPairsCount = len(pairs)
    return cu.cuCheckpointProcessRestore(PID, args)[0]
GOOD = E.CUDA_SUCCESS
"""

# A target with every kind of device memory, which checks all of it whenever it is told to go on.
WORKER = """
start()
kernel = addn()
module = ok(cu.cuModuleLoadData(PTX + bytes(1)))
variable, _ = ok(cu.cuModuleGetGlobal(module, b"counter"))
small, large = ok(cu.cuMemAlloc(400)), ok(cu.cuMemAlloc(5 * MIB))
data = os.urandom(5 * MIB)
put(large, data)
private, handle = mapped(2 * MIB, shared=False)
put(private, b"private")
ok(cu.cuMemsetD32(small, 0, 100))
ok(cu.cuCtxSynchronize())  # a memset may still run when it returns, and the stream below waits for no other
stream, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
ok(cu.cuEventRecord(event, stream))
host = ok(cu.cuMemHostAlloc(4096, 0))
ctypes.memmove(int(host), b"pinned", 6)
step = 0
print("ready", flush=True)
while input() != "end":
    step += 1
    ok(launch(kernel, small, 100, 1, stream))
    ok(launch(kernel, variable, 1, 1, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert words(small, 100) == [step] * 100 and words(variable, 1) == [41 + step]
    assert get(large, 5 * MIB) == data and get(private, 7) == b"private"
    assert ctypes.string_at(int(host), 6) == b"pinned"
    ok(cu.cuMemcpyHtoD(private, b"private", 7))
    ok(cu.cuEventSynchronize(event))
    print("step", step, ok(cu.cuDeviceGetUuid(0)).bytes[-1], flush=True)
print("end", flush=True)
"""


def call(target: Target, text: str, **settings: Any) -> str:
    return run(CALLER + text, TARGET=target.pid, **settings)


def descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(entry) for entry in folder.iterdir()]


def step(target: Target, number: int, gpu: int = 0) -> None:
    target.tell()
    target.expect(f"step {number} {gpu}")


def test_everything_survives_checkpoint_and_restore_twice_and_no_descriptor_stays_meanwhile() -> None:
    with Target(WORKER) as target:
        target.expect("ready")
        step(target, 1)
        assert any("userfaultfd" in link or "perf_event" in link for link in descriptors(target.pid))
        for generation in (2, 3):
            call(
                target,
                "assert state() == 'RUNNING' and lock() == GOOD and state() == 'LOCKED'; assert checkpoint() == GOOD",
            )
            links = descriptors(target.pid)
            assert not [link for link in links if "softgpu" in link or "anon_inode" in link], links
            assert "memfd:softgpu" not in Path(f"/proc/{target.pid}/maps").read_text()
            call(
                target,
                "assert state() == 'CHECKPOINTED' and restore() == GOOD and state() == 'LOCKED' and unlock() == GOOD",
            )
            step(target, generation)
            assert any("userfaultfd" in link or "perf_event" in link for link in descriptors(target.pid))
        target.tell("end")
        target.expect("end")


def test_calls_wait_while_the_process_is_locked() -> None:
    with Target(WORKER) as target:
        target.expect("ready")
        call(target, "assert lock() == GOOD")
        target.tell()
        time.sleep(0.2)
        assert Path(f"/proc/{target.pid}/wchan").exists()
        call(target, "assert checkpoint() == GOOD and restore() == GOOD")
        time.sleep(0.1)
        began = time.monotonic()
        call(target, "assert unlock() == GOOD")
        target.expect("step 1 0")
        assert time.monotonic() - began < 10


def test_steps_out_of_order_are_refused_and_change_nothing() -> None:
    with Target(WORKER) as target:
        target.expect("ready")
        call(
            target,
            """
bad = E.CUDA_ERROR_ILLEGAL_STATE
assert checkpoint() == restore() == unlock() == bad and state() == "RUNNING"
assert lock() == GOOD and lock() == bad and restore() == bad
assert checkpoint() == GOOD and checkpoint() == lock() == unlock() == bad
assert restore() == GOOD and unlock() == GOOD and state() == "RUNNING"
""",
        )
        step(target, 1)


def test_a_lock_that_a_running_call_holds_up_times_out_and_leaves_the_process_running() -> None:
    target_text = """
        start()
        s = ok(cu.cuStreamCreate(1))
        p = ok(cu.cuMemAlloc(64))
        ok(cu.cuMemsetD8(p, 0, 64))
        ok(cu.cuStreamWaitValue32(s, p, 1, 0))
        print("ready", flush=True)
        def release():
            input()
            ctypes.memset(int(p), 1, 1)  # the application's own doing: a device address is a host address here
        threading.Thread(target=release).start()
        ok(cu.cuStreamSynchronize(s))
        print("released", flush=True)
        input()
    """
    with Target(target_text) as target:
        target.expect("ready")
        time.sleep(0.1)
        call(target, "assert lock(100) == E.CUDA_ERROR_NOT_READY and state() == 'RUNNING'")
        target.tell()
        target.expect("released")
        call(target, "assert lock() == GOOD and unlock() == GOOD")


def test_a_lock_waits_for_work_that_no_call_waits_for() -> None:
    """A host function too: no thread of the program need run after it."""
    target_text = """
        start()
        s = ok(cu.cuStreamCreate(1))
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: (print("begun", flush=True), input()))
        ok(cu.cuLaunchHostFunc(s, ctypes.cast(kept, ctypes.c_void_p).value, 0))
        time.sleep(60)
    """
    with Target(target_text) as target:
        target.expect("begun")
        call(target, "assert lock(100) == E.CUDA_ERROR_NOT_READY and state() == 'RUNNING'")
        target.tell()
        call(target, "assert lock() == GOOD and state() == 'LOCKED' and unlock() == GOOD")


POLLS = {
    "stream": "cu.cuStreamQuery(s)",
    "event": "cu.cuEventQuery(e)",
    "own stream": "cu.cuStreamIsCapturing(cu.CUstream(cu.CU_STREAM_PER_THREAD))",
}


@pytest.mark.parametrize("what", POLLS)
def test_polls_are_answered_while_locked_and_crash_while_checkpointed(what: str) -> None:
    """As the driver of an H100 does it (bench/ungated.py)."""
    target_text = f"""
        start()
        s, e = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
        ok(cu.cuEventRecord(e, s))
        ok(cu.cuStreamSynchronize(s))
        print("ready", flush=True)
        while input() != "end":
            print("answered", int({POLLS[what]}[0]), flush=True)
    """
    with Target(target_text) as target:
        target.expect("ready")
        for steps in ("lock() == GOOD", "checkpoint() == GOOD and restore() == GOOD", "unlock() == GOOD"):
            call(target, f"assert {steps}")
            target.tell()
            target.expect("answered 0")
        call(target, "assert lock() == GOOD and checkpoint() == GOOD")
        target.tell()
        assert "was called while process" in target.read()
        assert target.process.wait(30) == -signal.SIGSEGV


@pytest.mark.parametrize("what", ["exported", "imported"])
def test_shared_handles_left_open_make_the_restore_fail_for_good(what: str) -> None:
    target_text = f"""
        start()
        address, handle = mapped(2 * MIB)
        fd = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
        if "{what}" == "imported":
            imported = ok(cu.cuMemImportFromShareableHandle(fd, FD))
            ok(cu.cuMemUnmap(address, 2 * MIB)); ok(cu.cuMemRelease(handle))
        os.close(fd)
        print("ready", flush=True)
        input()
        print(cu.cuMemGetInfo()[0].name, flush=True)
    """
    with Target(target_text) as target:
        target.expect("ready")
        call(
            target,
            "assert lock() == checkpoint() == GOOD\n"
            "assert restore() == E.CUDA_ERROR_NOT_SUPPORTED and state() == 'FAILED'",
        )
        assert "lost its GPU state" in target.read()
        target.tell()
        target.expect("CUDA_ERROR_DEVICE_UNAVAILABLE")


def test_memory_that_was_shared_and_let_go_of_does_not_stand_in_the_way() -> None:
    target_text = """
        start()
        address, handle = mapped(2 * MIB)
        put(address, b"kept")
        fd = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
        ok(cu.cuMemUnmap(address, 2 * MIB)); ok(cu.cuMemRelease(handle))
        print("ready", flush=True)
        input()
        ok(cu.cuMemMap(address, 2 * MIB, 0, ok(cu.cuMemImportFromShareableHandle(fd, FD)), 0))
        ok(access(address, 2 * MIB))
        print(get(address, 4).decode(), flush=True)
    """
    with Target(target_text) as target:
        target.expect("ready")
        call(target, "assert lock() == checkpoint() == restore() == unlock() == GOOD")
        target.tell()
        target.expect("kept")


def test_gpus_can_be_exchanged_and_a_list_must_name_all_of_them() -> None:
    settings: dict[str, Any] = {"SOFTGPU_DEVICES": 2, "SOFTGPU_MEMORY": "64M"}
    with Target(WORKER, **settings) as target:
        target.expect("ready")
        step(target, 1)
        call(
            target,
            """
def pair(a, b):
    p = cu.CUcheckpointGpuPair()
    p.oldUuid, p.newUuid = ok(cu.cuDeviceGetUuid(a)), ok(cu.cuDeviceGetUuid(b))
    return p
def free(device):
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
    return ok(cu.cuMemGetInfo())[0] // MIB
before = free(0), free(1)
assert before[0] < before[1] == 64
assert lock() == checkpoint() == GOOD
time.sleep(0.1)
assert free(0) == 64
assert restore([pair(0, 1)]) == E.CUDA_ERROR_INVALID_VALUE and state() == "CHECKPOINTED"
assert restore([pair(0, 1), pair(1, 0)]) == GOOD and unlock() == GOOD
time.sleep(0.1)
assert (free(1), free(0)) == before
""",
            **settings,
        )
        step(target, 2, gpu=1)


def test_too_little_memory_at_restore_leaves_the_process_checkpointed() -> None:
    settings: dict[str, Any] = {"SOFTGPU_MEMORY": "16M"}
    with Target(WORKER, **settings) as target:
        target.expect("ready")
        call(target, "assert lock() == checkpoint() == GOOD", **settings)
        with Target("start()\nmapped(8 * MIB)\nprint('full', flush=True)\ninput()", **settings) as other:
            other.expect("full")
            call(target, "assert restore() == E.CUDA_ERROR_OUT_OF_MEMORY and state() == 'CHECKPOINTED'", **settings)
        call(target, "assert restore() == unlock() == GOOD", **settings)
        step(target, 1)


def test_a_stopped_process_answers_when_it_runs_again() -> None:
    with Target(WORKER) as target:
        target.expect("ready")
        call(target, "assert lock() == checkpoint() == GOOD")
        call(
            target,
            """
os.kill(PID, signal.SIGSTOP)
threading.Timer(0.3, lambda: os.kill(PID, signal.SIGCONT)).start()
assert state() == "CHECKPOINTED"
began = time.monotonic()
assert restore() == GOOD and time.monotonic() - began > 0.25
assert unlock() == GOOD
""",
        )
        step(target, 1)


def test_processes_without_a_gpu_are_told_apart() -> None:
    sleeper = subprocess.Popen(["sleep", "30"])
    try:
        run(
            CALLER
            + """
assert cu.cuCheckpointProcessGetState(PID)[0] == E.CUDA_ERROR_NOT_INITIALIZED
assert cu.cuCheckpointProcessGetState(2 ** 22 + 5)[0] == E.CUDA_ERROR_INVALID_VALUE
assert cu.cuCheckpointProcessLock(PID, None)[0] == E.CUDA_ERROR_NOT_INITIALIZED
""",
            TARGET=sleeper.pid,
        )
    finally:
        sleeper.kill()
        sleeper.wait()


def test_the_restore_thread_is_one_of_the_processs_threads() -> None:
    with Target(WORKER) as target:
        target.expect("ready")
        tid = int(call(target, "print(ok(cu.cuCheckpointProcessGetRestoreThreadId(PID)))"))
        assert Path(f"/proc/{target.pid}/task/{tid}/comm").read_text().strip() == "softgpu-control"


def test_another_user_may_not_touch_the_process() -> None:
    if os.geteuid():
        pytest.skip("needs root to become somebody else")
    with Target(WORKER) as target:
        target.expect("ready")
        call(
            target,
            """
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert lock() in (E.CUDA_ERROR_NOT_PERMITTED, E.CUDA_ERROR_INVALID_VALUE)
""",
        )
        step(target, 1)


@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        (
            "lock-timeout:1",
            "assert lock(50) == E.CUDA_ERROR_NOT_READY and state() == 'RUNNING'\nassert lock() == unlock() == GOOD",
        ),
        (
            "checkpoint-fail:1",
            "assert lock() == GOOD and checkpoint() == E.CUDA_ERROR_UNKNOWN and state() == 'LOCKED'\n"
            "assert checkpoint() == restore() == unlock() == GOOD",
        ),
        (
            "restore-oom:1",
            "assert lock() == checkpoint() == GOOD\n"
            "assert restore() == E.CUDA_ERROR_OUT_OF_MEMORY and state() == 'CHECKPOINTED'\n"
            "assert restore() == unlock() == GOOD",
        ),
    ],
)
def test_faults_of_the_checkpoint_leave_the_process_able_to_go_on(fault: str, steps: str) -> None:
    with Target(WORKER, SOFTGPU_FAULTS=fault) as target:
        target.expect("ready")
        call(target, steps)
        step(target, 1)


def test_the_toggle_can_be_made_to_take_its_time() -> None:
    with Target(WORKER, SOFTGPU_TOGGLE_MS=150) as target:
        target.expect("ready")
        call(
            target,
            """
times = []
for act in (lock, checkpoint, restore, unlock):
    began = time.monotonic(); assert act() == GOOD; times.append(time.monotonic() - began)
assert times[1] >= 0.15 and times[2] >= 0.15 and times[0] < 0.1 and times[3] < 0.1, times
""",
        )


def test_a_process_that_another_tool_saves_is_left_to_that_one() -> None:
    """A state of CUDA 13.4, which cuda-python of 13.0 has no name for."""
    with Target("start()\nprint('ready', flush=True)\ninput()") as target:
        target.expect("ready")
        run(
            """
            from phos.gpu_engine import driver, toggle
            from phos.gpu_engine.errors import CheckpointFailed
            driver.initialise()
            pid = int(os.environ["TARGET"])
            assert driver.checkpoint_state(pid) == "busy"
            assert toggle.holds_cuda(pid)
            try:
                toggle.revive(pid)
            except CheckpointFailed as error:
                assert "Another tool" in str(error), error
            else:
                raise AssertionError("it was brought back")
            """,
            TARGET=target.pid,
            PYTHONPATH=ROOT,
            SOFTGPU_FAULTS="custom-storage",
        )
