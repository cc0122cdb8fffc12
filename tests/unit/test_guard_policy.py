"""What phos-gpu guard decides: frequency, rotation, giving up; and how it sees a job end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phos.cli.guard_job import End, Job
from phos.cli.guard_policy import (
    ASSUMED_OVERHEAD,
    FIRST_AT_LATEST,
    LEAST_INTERVAL,
    Failures,
    Restarts,
    Schedule,
    Shelf,
    optimal_frequency,
    wasted_share,
)
from phos.gpu_engine import procfs
from phos.images.formats import COMMIT_FILE, INVENTORY_FILE
from phos.images.reader import Image
from tests.unit.image_sets import write_small

# The frequency.


@pytest.mark.parametrize("overhead, per_hour", [(0.185, 279), (3.2, 67)])
def test_the_frequencies_that_the_paper_names(overhead: float, per_hour: int) -> None:
    """Section 8.2: eight GPUs, a failure an hour each."""
    assert round(optimal_frequency(8, 1.0, overhead)) == per_hour


rates = st.floats(1e-6, 1e3)
overheads = st.floats(1e-3, 1e3)


@given(st.integers(1, 4096), rates, overheads, st.floats(0.5, 2.0))
def test_no_other_frequency_wastes_less(gpus: int, rate: float, overhead: float, factor: float) -> None:
    best = optimal_frequency(gpus, rate, overhead)
    assert wasted_share(gpus, rate, overhead, best) <= wasted_share(gpus, rate, overhead, best * factor) * (1 + 1e-9)


def test_the_first_checkpoint_comes_soon() -> None:
    assert Schedule(1e-6).interval == FIRST_AT_LATEST
    assert Schedule(1e3, gpus=1000).interval == LEAST_INTERVAL


def test_the_overhead_is_that_of_the_last_checkpoints() -> None:
    schedule = Schedule(1.0)
    assert schedule.overhead == ASSUMED_OVERHEAD
    schedule.measured(None)
    assert schedule.overhead == ASSUMED_OVERHEAD
    for stall in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        schedule.measured(stall)
    assert schedule.overhead == pytest.approx(3.0)
    assert schedule.interval == pytest.approx(3600 / optimal_frequency(1, 1.0, 3.0))


@given(st.lists(st.floats(0, 1e4), max_size=20), rates, st.integers(1, 4096))
def test_the_interval_is_always_a_time(stalls: list[float], rate: float, gpus: int) -> None:
    schedule = Schedule(rate, gpus=gpus)
    for stall in stalls:
        schedule.measured(stall)
    assert LEAST_INTERVAL <= schedule.interval < float("inf")
    assert Schedule(rate, gpus=gpus, interval=0.25).interval == 0.25


# Giving up.


def test_a_job_is_disturbed_less_and_less_for_nothing() -> None:
    failures = Failures()
    assert [failures.wait(40.0, disturbs=True) for _ in range(5)] == [40, 80, 160, 300, 300]
    assert [failures.wait(40.0, disturbs=True) for _ in range(2000)][-1] == 300
    failures = Failures()
    assert [failures.wait(1.0, disturbs=False) for _ in range(3)] == [1, 1, 1]  # it does not use CUDA yet
    assert Failures().wait(1e6, disturbs=True) == 300


def test_what_is_wrong_is_said_again_after_an_hour() -> None:
    failures = Failures()
    said = [failures.is_news("full", 60.0 * minute) for minute in range(1, 130)]
    assert [minute for minute, each in enumerate(said, 1) if each] == [1, 61, 121]
    assert failures.again
    assert failures.is_news("refused", 60.0 * 130)
    assert not failures.again


def test_failing_at_the_same_point_is_not_progress() -> None:
    restarts = Restarts(3)
    assert [restarts.failed(point, 1.0) for point in (50.0, 50.5, 49.0, 50.9)] == [True, True, True, False]


def test_getting_further_is_progress() -> None:
    restarts = Restarts(1)
    assert all(restarts.failed(point, 5.0) for point in (10.0, 20.0, 30.0, 40.0))
    assert not restarts.failed(42.0, 5.0)


@given(st.lists(st.floats(0, 1e4), min_size=1), st.integers(0, 5), st.floats(0.1, 100))
def test_a_job_that_does_not_get_further_is_given_up(points: list[float], limit: int, margin: float) -> None:
    restarts = Restarts(limit)
    for point in points:
        restarts.failed(point, margin)
    answers = [restarts.failed(max(points), margin) for _ in range(limit + 1)]
    assert not answers[-1]


# Rotation.


def whole(image: Path) -> bool:
    return (image / COMMIT_FILE).exists()


def make(shelf: Shelf, *, committed: bool) -> Path:
    image = shelf.next()
    image.mkdir()
    (image / "pages-1.img").write_bytes(b"x")
    if committed:
        (image / COMMIT_FILE).touch()
    return image


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["commit", "fail", "tidy", "damage", "anew"]), max_size=40), st.integers(1, 4))
def test_the_newest_whole_images_stay(steps: list[str], keep: int) -> None:
    with TemporaryDirectory() as name:
        shelf = Shelf(Path(name), keep, whole)
        (Path(name) / "output.log").touch()
        model: list[Path] = []  # whole images, oldest first
        for step in steps:
            if step == "commit":
                model.append(make(shelf, committed=True))
            elif step == "fail":
                make(shelf, committed=False)
            elif step == "damage" and model:
                (model.pop() / COMMIT_FILE).unlink()
            elif step == "anew":  # guard itself was ended
                shelf = Shelf(Path(name), keep, whole)
            elif step == "tidy":
                shelf.tidy()
                model = model[-keep:]
                assert shelf.images() == model
            assert shelf.whole() == model[::-1]
        assert (Path(name) / "output.log").exists()


def test_an_image_that_could_not_be_restored_takes_no_others_place(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 2, whole)
    oldest, good, bad = (make(shelf, committed=True) for _ in range(3))
    shelf.doubted.add(bad)
    assert shelf.tidy() == []
    newer = make(shelf, committed=True)
    assert shelf.tidy() == [oldest]
    newest = make(shelf, committed=True)
    assert shelf.tidy() == [good, bad]
    assert shelf.whole() == [newest, newer]


def test_the_images_go_round_when_the_job_ends_again_from_each(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 3, whole)
    older, newer = make(shelf, committed=True), make(shelf, committed=True)
    order = []
    for _ in range(6):
        image = shelf.to_try()[0]
        order.append((image, shelf.came_to_nothing(image)))
    assert order == [(newer, False), (newer, True), (older, False), (older, True), (newer, False), (newer, True)]
    assert shelf.doubted == {older, newer}
    newest = make(shelf, committed=True)
    assert shelf.to_try()[0] == newest
    assert shelf.tidy() == [], "neither of the two counts"


def test_a_number_is_not_used_twice(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 1, whole)
    first = make(shelf, committed=False)
    shelf.tidy()
    assert shelf.next() != first


def test_a_removal_that_is_interrupted_leaves_nothing_that_passes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, 1, whole)
    old = make(shelf, committed=True)
    new = make(shelf, committed=True)
    monkeypatch.setattr("shutil.rmtree", lambda *_args, **_more: None)
    shelf.tidy()
    assert old.exists()
    assert shelf.whole() == [new]


def test_what_cannot_be_read_is_neither_counted_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two newer images that would pass for whole must not cost the job its one image that is."""
    shelf = Shelf(tmp_path, 2)
    good, inventory, directory = (shelf.next() for _ in range(3))
    for image in (good, inventory, directory):
        write_small(image)
    read, opened = Image.read_file, os.open

    def failing(image: Image, name: str) -> bytes:
        if image.path == inventory and name == INVENTORY_FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(image, name)

    def denied(path: object, *arguments: object, **more: object) -> int:
        if path == directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Image, "read_file", failing)
        patch.setattr(os, "open", denied)
        assert shelf.whole() == [good]
        assert shelf.unreadable() == [directory, inventory]
        assert shelf.passed_over(good) == [directory, inventory]
        assert shelf.passed_over(directory) == []
        assert shelf.tidy() == []
    assert shelf.whole() == [directory, inventory, good]
    assert shelf.tidy() == [good]


def test_an_image_without_a_commit_is_not_whole(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 1)
    make(shelf, committed=False)
    make(shelf, committed=True)  # an empty commit record is none
    assert shelf.whole() == []


# The end of a job.


def wait_for(job: Job) -> End:
    deadline = time.monotonic() + 20
    while (end := job.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    "text, code, status",
    [
        ("pass", 0, 0),
        ("raise SystemExit(7)", 7, 7),
        ("import os; os.kill(os.getpid(), 9)", -9, 137),
        ("import os; os.abort()", -6, 134),
    ],
)
def test_how_a_child_ended(text: str, code: int, status: int, tmp_path: Path) -> None:
    job = Job.start(script(text), os.environ, tmp_path / "output")
    end = wait_for(job)
    job.close()
    assert (end.code, end.exit_status) == (code, status)


def test_how_somebody_elses_child_ended(tmp_path: Path) -> None:
    """The child of another process, which is slow to reap it."""
    text = "import subprocess, time; p = subprocess.Popen(['sh', '-c', 'sleep 0.3; exit 5'])\n"
    text += "print(p.pid, flush=True); time.sleep(1); p.wait()"
    with subprocess.Popen(script(text), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        job = Job(int(parent.stdout.readline()))
        assert wait_for(job).code == 5
        job.close()


def test_signals_that_a_job_ignores(tmp_path: Path) -> None:
    job = Job.start(["sh", "-c", "trap '' HUP; echo ready; exec sleep 60"], os.environ, tmp_path / "output")
    try:
        deadline = time.monotonic() + 10
        while b"ready" not in (tmp_path / "output").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert job.ignores(signal.SIGHUP)
        assert not job.ignores(signal.SIGTERM)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        while job.poll() is None:
            time.sleep(0.01)
    assert not job.ignores(signal.SIGHUP), "it is gone"
    job.close()


def test_the_output_is_only_appended_to(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("before\n")
    job = Job.start(script("print('after')"), os.environ, tmp_path / "output")
    wait_for(job)
    job.close()
    assert (tmp_path / "output").read_text() == "before\nafter\n"


def test_what_is_left_of_a_job_is_cleared_away(tmp_path: Path) -> None:
    text = "import subprocess, os; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True)\n"
    text += "import time; time.sleep(0.5); os.kill(os.getpid(), 9)"
    job = Job.start(script(text), os.environ, tmp_path / "output")
    assert wait_for(job).code == -signal.SIGKILL
    left = int((tmp_path / "output").read_text())
    os.kill(left, 0)
    assert job.clear_away(set()) == []
    job.close()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{left}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("own_session", [True, False])
def test_what_a_job_leaves_behind_is_known(tmp_path: Path, own_session: bool) -> None:
    setsid = "setsid" if own_session else ""
    job = Job.start(["sh", "-c", f"{setsid} sleep 60 & sleep 0.1 &"], os.environ, tmp_path / "output")
    wait_for(job)
    left = job.left_running(set())
    assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left] == [b"sleep\x0060\0"]
    assert job.clear_away(set()) == []
    assert job.left_running(set()) == []
    job.close()


def test_an_environment_is_waited_for_while_a_program_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes what is to be closed, by which who waits for the start learns of it, before it has that."""
    read, found = Path.read_bytes, [b"", b""]
    monkeypatch.setattr(Path, "read_bytes", lambda path: found.pop() if found else read(path))
    none_yet = [False, True, True]
    monkeypatch.setattr(procfs, "_has_none_yet", lambda fields: none_yet.pop())
    assert procfs.environment(os.getpid()) == read(Path("/proc/self/environ"))
    assert not none_yet


def test_who_has_no_environment_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with subprocess.Popen(["cat"], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(b"x")
        program.stdin.flush()
        assert program.stdout.read(1) == b"x"  # it has come to its main function
        assert procfs.environment(program.pid) == b""
        program.stdin.close()
    assert procfs.environment(program.pid) == b""  # it has ended
    of_the_kernel = ["0"] * (procfs._ENV_END + 1)
    of_the_kernel[procfs._FLAGS] = str(procfs._PF_KTHREAD)
    assert not procfs._has_none_yet(of_the_kernel)


def test_what_has_a_session_of_its_own_is_cleared_away_too(tmp_path: Path) -> None:
    """As torchrun's workers have. The job ends before anybody has looked around; a stranger is left alone."""
    text = "import subprocess, os; p = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
    text += "print(p.pid, flush=True); os._exit(1)"
    stranger = subprocess.Popen(["sleep", "100"], start_new_session=True)
    job = Job.start(script(text), os.environ, tmp_path / "output")
    assert wait_for(job).code == 1
    assert job.clear_away({stranger.pid}) == []
    job.close()
    left = int((tmp_path / "output").read_text())
    assert not procfs.is_alive(left)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_whose_end_is_known_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Its number may be another's."""
    job = Job.start(["sleep", "100"], os.environ, tmp_path / "output")
    job.send(number)
    assert wait_for(job).code == -number
    sent: list[object] = []
    for module, name in ((os, "kill"), (os, "killpg"), (os, "getpgid"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, lambda *words: sent.append(words))
    job.send(number)
    assert sent == []
    job.close()


@pytest.mark.parametrize("code, said", [(None, "nobody knows"), (3, "status 3"), (-15, "SIGTERM"), (-60, "signal 60")])
def test_an_end_in_words(code: int | None, said: str) -> None:
    assert said in str(End(code))
