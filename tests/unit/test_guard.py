"""phos-gpu guard around jobs that are played by the test: signals and failures at unlucky moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phos.cli.guard import FORWARDED, JOB_FILE, Guard, guard
from phos.cli.guard_job import End
from phos.cli.guard_policy import Restarts, Schedule, Shelf
from phos.cli.launched import heed
from phos.gpu_engine.errors import RestoreFailed, UsageError
from phos.images.formats import COMMIT_FILE
from tests.unit.image_sets import write_small

PATIENCE = 3.0


class FakeJob:
    """Ends as it is told, or by the first signal that it gets."""

    def __init__(self, code: int | None = None, pid: int = 4711) -> None:
        self.pid = pid
        self.code = code
        self._deadline = time.monotonic() + PATIENCE

    def poll(self) -> End | None:
        assert time.monotonic() < self._deadline, "nobody ended the job"
        return None if self.code is None else End(self.code)

    def send(self, number: int) -> None:
        self.code = -number if self.code is None else self.code

    def ignores(self, number: int) -> bool:
        return False

    def look_around(self) -> None:
        """There is nothing below it."""

    def clear_away(self, _spared: object) -> list[int]:
        return []

    def left_running(self, _spared: object) -> list[int]:
        return []

    def close(self) -> None:
        """Nothing of it is open."""


class Watched:
    """A guard, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.events: list[str] = []
        self.folder = folder
        shelf = Shelf(folder, 1, lambda image: (image / COMMIT_FILE).exists())
        schedule = Schedule(1.0, interval=1000.0)
        self.guard = Guard(shelf, schedule, Restarts(3), None, lambda event, *_, **__: self.events.append(event))

    def image(self) -> Path:
        image = self.guard.shelf.next()
        image.mkdir()
        (image / COMMIT_FILE).touch()
        return image

    def watch(self, *jobs: FakeJob) -> int:
        """From the first of the jobs; the others come when it is begun anew."""
        made = iter(jobs)
        begin: Callable[[], Any] = lambda: next(made)  # noqa: E731
        return self.guard.watch(begin, begin)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr("phos.cli.guard._daemon_pids", set)
    return Watched(tmp_path)


def restores(monkeypatch: pytest.MonkeyPatch, restore: Callable[[Path, int], object]) -> None:
    monkeypatch.setattr(Guard, "restore", staticmethod(restore))


def test_a_signal_that_comes_while_a_job_is_brought_back_ends_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(_image: Path, _pid: int) -> FakeJob:
        watched.guard.received(signal.SIGTERM, None)
        return FakeJob()

    restores(monkeypatch, restore)
    watched.image()
    assert watched.watch(FakeJob(1)) == 128 + signal.SIGTERM
    assert watched.events == ["failed", "restored", "ended"]


def test_a_signal_that_comes_before_there_is_a_job_ends_it(watched: Watched) -> None:
    """A restore with --resume may take long."""
    watched.guard.received(signal.SIGINT, None)
    assert watched.watch(FakeJob()) == 128 + signal.SIGINT


class HeedsOtherwise(FakeJob):
    """A signal does not end it; it ends with ``code`` a while later, by itself."""

    def __init__(self, code: int, *, ignores: bool) -> None:
        super().__init__(pid=4712)
        self._later = code
        self._ignores = ignores
        self._ends = time.monotonic() + 2.0

    def poll(self) -> End | None:
        if time.monotonic() > self._ends:
            self.code = self._later
        return super().poll()

    def send(self, number: int) -> None:
        """It reads its settings anew, say."""

    def ignores(self, number: int) -> bool:
        return self._ignores


@pytest.mark.parametrize("ignores", [True, False])
def test_a_job_that_a_signal_does_not_end_is_guarded_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    """It would stay without checkpoints, and not come back when it fails."""
    if not ignores:
        monkeypatch.setattr("phos.cli.guard.GRACE_SECONDS", 0.5)
    restores(monkeypatch, lambda *_: FakeJob(0))
    watched.image()
    watched.guard.received(signal.SIGHUP, None)
    assert watched.watch(HeedsOtherwise(1, ignores=ignores)) == 0
    assert watched.events == ["survived", "failed", "restored", "ended"]


def test_a_job_that_takes_long_to_end_by_a_signal_is_not_brought_back(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that handle a signal end with 128 and its number, as shells do."""
    monkeypatch.setattr("phos.cli.guard.GRACE_SECONDS", 0.5)
    watched.image()
    watched.guard.received(signal.SIGTERM, None)
    assert watched.watch(HeedsOtherwise(128 + signal.SIGTERM, ignores=False)) == 128 + signal.SIGTERM
    assert watched.events == ["survived", "ended"]


def test_a_job_is_resumed_from_the_newest_image_that_can_be_restored(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = watched.image(), watched.image()

    def restore(image: Path, pid: int) -> FakeJob:
        if image == newer:
            raise RestoreFailed("Its GPU data is damaged.")
        return FakeJob(0, pid)

    restores(monkeypatch, restore)
    assert watched.guard.resume([newer, older], 4713).pid == 4713
    assert watched.events == ["restore-failed", "restored"]
    with pytest.raises(RestoreFailed, match="of 1"):
        watched.guard.resume([newer], 4713)


def test_a_guard_that_keeps_fewer_removes_none_before_one_was_restored(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest may be damaged where its metadata do not tell, and the job is then brought back from an older one."""
    oldest, older, newest = watched.image(), watched.image(), watched.image()

    def restore(image: Path, pid: int) -> FakeJob:
        if image == newest or not image.exists():
            raise RestoreFailed("Its GPU data is damaged.")
        return FakeJob(0, pid)

    restores(monkeypatch, restore)
    found = watched.guard.shelf.whole()
    assert watched.guard.watch(lambda: watched.guard.resume(found, 4713), None) == 0
    assert watched.events == ["restore-failed", "restored", "ended"]
    assert watched.guard.shelf.whole() == [newest, older]
    assert not oldest.exists()


def test_a_job_whose_images_cannot_be_restored_now_does_not_begin_anew(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of what is begun anew would take the places of those that hold all the work."""

    def restore(image: Path, _pid: int) -> FakeJob:
        raise RestoreFailed(f"There is no room for {image.name}.")

    restores(monkeypatch, restore)
    image = watched.image()
    assert watched.watch(FakeJob(3), FakeJob(0)) == 3
    assert watched.events == ["failed", "restore-failed", "gave-up"]
    assert watched.guard.shelf.whole() == [image]


def test_a_job_whose_number_cannot_be_noted_is_guarded_all_the_same(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example. What was noted before stays: a restored job has the same number."""
    job_file = watched.folder / JOB_FILE
    job_file.write_text(json.dumps({"pid": 4711}))
    restores(monkeypatch, lambda *_: FakeJob(0))
    watched.image()

    def full(path: Path, *_: object, **__: object) -> int:
        path.write_bytes(b"")
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    assert watched.watch(FakeJob(1)) == 0
    assert watched.events == ["not-noted", "failed", "not-noted", "restored", "ended"]
    assert json.loads(job_file.read_text()) == {"pid": 4711}


def test_images_from_which_a_job_only_ends_again_come_last(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was made when a process of the job had died and the job had not noticed: an older one may be whole."""
    images = [watched.image() for _ in range(3)]
    tried: list[Path] = []

    def restore(image: Path, _pid: int) -> FakeJob:
        tried.append(image)
        return FakeJob(0 if image == images[0] else 1)

    restores(monkeypatch, restore)
    watched.guard.shelf = Shelf(watched.folder, 3, lambda image: (image / COMMIT_FILE).exists())
    watched.guard.restarts = Restarts(5)
    assert watched.watch(FakeJob(1)) == 0
    assert tried == [images[number] for number in (2, 2, 1, 1, 0)]
    life, last = ["failed", "restored"], ["failed", "doubted", "restored"]
    assert watched.events == [*life, *life, *last, *life, *last, "ended"]


def test_an_image_of_a_job_that_has_got_further_since_stays_the_first(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed three times, each time later."""
    watched.guard.schedule = Schedule(1.0, interval=0.2)
    monkeypatch.setattr(Guard, "_begin_checkpoint", lambda _: None)
    older, newer = watched.image(), watched.image()
    watched.guard.shelf = Shelf(watched.folder, 2, lambda image: (image / COMMIT_FILE).exists())
    lives = iter((0.5, 1.0, 1.5))
    tried: list[Path] = []

    class Later(FakeJob):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self._ends = time.monotonic() + seconds

        def poll(self) -> End | None:
            self.code = 1 if time.monotonic() > self._ends else None
            return super().poll()

    def restore(image: Path, _pid: int) -> FakeJob:
        tried.append(image)
        seconds = next(lives, None)
        return FakeJob(0) if seconds is None else Later(seconds)

    restores(monkeypatch, restore)
    assert watched.watch(Later(0.1)) == 0
    assert tried == [newer] * 4
    assert older not in watched.guard.shelf.doubted
    assert "doubted" not in watched.events


@pytest.mark.parametrize("stream, as_json", [(1, True), (2, False)])
def test_a_guard_to_whom_nobody_listens_guards_on(stream: int, as_json: bool) -> None:
    text = (
        "import os, sys\n"
        "from phos.cli.guard_speaker import Speaker\n"
        "read, write = os.pipe()\n"
        f"os.dup2(write, {stream})\n"
        "os.close(read)\n"
        "os.close(write)\n"
        f"speaker = Speaker(as_json={as_json})\n"
        "for _ in range(3):\n"
        "    speaker.say('checkpoint', 'image-000001 is whole.')\n"
        "speaker.finish()\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr


def test_a_guard_whose_reader_sleeps_guards_on(tmp_path: Path) -> None:
    """A terminal that was stopped, say: what is said is kept, and given up at the end."""
    text = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from phos.cli import guard_speaker\n"
        "guard_speaker.FINISH_SECONDS = 0.3\n"
        "speaker = guard_speaker.Speaker(as_json=False)\n"
        "output = Path(sys.argv[1])\n"
        "speaker.follow(output)\n"
        "with open(output, 'ab') as file: file.write(b'x' * (1 << 20))\n"
        "time.sleep(0.3)\n"
        "speaker.say('checkpoint', 'image-000001 is whole.')\n"
        "output.with_name('went-on').touch()\n"
        "speaker.finish()\n"
        "sys.exit(7)\n"
    )
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", text, str(tmp_path / "output")], stdout=write) as guarding:
        os.close(write)
        assert guarding.wait(20) == 7
    assert (tmp_path / "went-on").exists()
    os.close(read)


def test_all_that_was_said_and_put_out_is_written_before_the_end(tmp_path: Path) -> None:
    text = (
        "import sys\n"
        "from pathlib import Path\n"
        "from phos.cli.guard_speaker import Speaker\n"
        "speaker = Speaker(as_json=False)\n"
        "output = Path(sys.argv[1])\n"
        "output.write_bytes(b'of an earlier job')\n"
        "speaker.follow(output)\n"
        "with open(output, 'ab') as file: file.write(b'x' * (1 << 20))\n"
        "for number in range(1000): speaker.say('checkpoint', str(number))\n"
        "speaker.finish()\n"
    )
    done = subprocess.run([sys.executable, "-c", text, str(tmp_path / "output")], capture_output=True, check=True)
    assert done.stdout == b"x" * (1 << 20)
    assert done.stderr.decode().splitlines() == [f"guard: {number}" for number in range(1000)]


def test_what_a_job_puts_out_is_passed_on_though_its_file_is_emptied_meanwhile(tmp_path: Path) -> None:
    """As by who rotates logs: the job appends, and goes on at the file's new end."""
    text = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from phos.cli.guard_speaker import Speaker\n"
        "speaker = Speaker(as_json=False)\n"
        "output = Path(sys.argv[1])\n"
        "speaker.follow(output)\n"
        "with open(output, 'ab', buffering=0) as file:\n"
        "    file.write(b'before' * 10)\n"
        "    while speaker._written < 60: time.sleep(0.01)\n"
        "    os.truncate(output, 0)\n"
        "    file.write(b'after')\n"
        "speaker.finish()\n"
    )
    done = subprocess.run([sys.executable, "-c", text, str(tmp_path / "output")], capture_output=True, check=True)
    assert done.stdout == b"before" * 10 + b"after"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_a_process_in_a_namespace_of_its_own_is_refused(tmp_path: Path) -> None:
    """After a restore it would be sought under another number than it has."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; sleep 60; :"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as outer:
        assert outer.stdout
        outer.stdout.readline()
        (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        done = CliRunner().invoke(guard, ["--images", str(tmp_path / "images"), inner])
        outer.kill()
    assert "has a pid namespace of its own" in str(done.exception), done.output
    assert not (tmp_path / "images").exists()


def test_signals_that_are_ignored_stay_ignored(watched: Watched) -> None:
    """As nohup has a program ignore the end of its terminal, and what it starts."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        heed(FORWARDED, watched.guard.received, [])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == watched.guard.received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_checkpoint_that_cannot_be_started_is_tried_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory, for example: the job needs its guard all the more."""
    job = FakeJob()
    tries: list[float] = []

    def popen(words: list[str], **__: object) -> None:
        tries.append(time.monotonic())
        if len(tries) == 2:
            job.code = 0
        raise OSError(12, os.strerror(12), words[-1])  # with the image's name, each time another

    monkeypatch.setattr("phos.cli.guard.RETRY_SECONDS", 0.1)
    monkeypatch.setattr(subprocess, "Popen", popen)
    watched.guard.schedule = Schedule(1.0, interval=0.0)
    assert watched.watch(job) == 0
    assert len(tries) == 2
    assert watched.events == ["checkpoint-failed", "ended"], "the same is said once"


@pytest.mark.parametrize("writes", [True, False])
def test_a_checkpoint_of_a_job_that_has_ended_may_take_as_long_as_it_writes(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr("phos.cli.guard.LAST_WORDS_SECONDS", 0.5)
    job = FakeJob()
    popen = subprocess.Popen

    def checkpoint(words: list[str], **options: Any) -> object:
        image = Path(words[-1])
        image.mkdir()
        job.code = 1  # it dies of what the checkpoint finds
        text = f"for i in 1 2 3 4 5 6 7 8; do {'head -c 9000 /dev/zero >>' if writes else 'echo'} {image}/data"
        text += f"; sleep 0.25; done; touch {image / COMMIT_FILE}; echo '{{\"seconds\": 2.0}}'"
        return popen(["sh", "-c", text], stdout=options["stdout"], stderr=options["stderr"], text=True)

    restores(monkeypatch, lambda *_: FakeJob(0))
    monkeypatch.setattr(subprocess, "Popen", checkpoint)
    monkeypatch.setattr("phos.cli.guard._gpus_of", lambda _: 1)
    watched.guard.schedule = Schedule(1.0, interval=0.01)
    assert watched.watch(job, FakeJob(0)) == 0
    came = ["checkpoint", "failed", "restored"] if writes else ["checkpoint-failed", "failed", "started"]
    assert watched.events == [*came, "ended"]


def test_a_checkpoint_may_say_as_much_as_it_likes(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings and CRIU's errors: more than a pipe holds, which nobody would read before it ends."""
    job = FakeJob()
    popen = subprocess.Popen

    def checkpoint(_words: list[str], **options: Any) -> object:
        text = "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2; exit 1"
        return popen(["sh", "-c", text], stdout=options["stdout"], stderr=options["stderr"])

    def say(event: str, *_: object, **__: object) -> None:
        watched.events.append(event)
        job.code = 0

    monkeypatch.setattr(subprocess, "Popen", checkpoint)
    watched.guard.say = say
    watched.guard.schedule = Schedule(1.0, interval=0.01)
    assert watched.watch(job) == 0
    assert watched.events == ["checkpoint-failed", "ended"]


def test_a_guard_that_is_refused_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another guard may have been told to keep more images."""
    for name in ("become_reaper", "reach.ensure"):
        monkeypatch.setattr(f"phos.cli.guard.{name}", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    images = [tmp_path / f"image-{number:06}" for number in (1, 2, 3)]
    for image in images:
        image.mkdir()
        write_small(image)
    done = CliRunner().invoke(guard, ["--images", str(tmp_path), "--keep", "1", "--", "true"])
    assert "holds images of an earlier job" in str(done.exception)
    assert Shelf(tmp_path, 1).whole() == images[::-1]


def test_a_guard_of_its_own_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint of it could ever be made."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    done = CliRunner().invoke(guard, ["--images", str(tmp_path / "images"), str(os.getppid())])
    assert "has started this command" in str(done.exception), done.output
    assert isinstance(done.exception, UsageError)
    assert not (tmp_path / "images").exists()
