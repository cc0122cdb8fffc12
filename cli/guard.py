"""``phos-gpu guard``: checkpoint a job again and again, and bring it back from its newest whole image when it fails."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil

from phos.cli.checkpoint import refuse_own
from phos.cli.criu import refuse_foreign, tree_of
from phos.cli.guard_job import End, Job, MemoryFile, become_reaper, reap, refuse_unfit
from phos.cli.guard_policy import Failures, Restarts, Schedule, Shelf
from phos.cli.guard_speaker import Speaker
from phos.cli.launched import ENDING, heed
from phos.cli.parameters import RATE, SECONDS, Place, json_option
from phos.cli.run import program_of, starting
from phos.gpu_engine import configuration
from phos.gpu_engine.daemon import client, reach
from phos.gpu_engine.daemon.paths import socket_path
from phos.gpu_engine.errors import ExitStatus, NoSuchProcess, PhosError, RestoreFailed, Unsupported, UsageError
from phos.gpu_engine.installation import application_environment, device_kind, launcher
from phos.images.errors import ImageError
from phos.images.reader import Image

JOB_FILE = "job.json"
"""In the directory of the images: the pid of the job, which it has again when it is restored."""

TICK_SECONDS = 0.05
LOOK_SECONDS = 1.0
"""How often the processes below the job are counted."""

RETRY_SECONDS = 1.0
"""After a checkpoint that failed, at least; also until a job uses CUDA."""

LAST_WORDS_SECONDS = 120.0
"""How long a checkpoint under way may write nothing once its job has ended."""

GRACE_SECONDS = 300.0
"""How long a job may take to end by a signal with which people and schedulers end one. One that then still runs heeds
it in its own way (HUP to read its settings anew, for example): it is checkpointed again, and brought back if it fails.
"""

# A job that ends by one of ENDING is not brought back.
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class Guard:
    """Watches over one job. ``say`` is told what happens: (event, sentence, fields)."""

    def __init__(
        self, shelf: Shelf, schedule: Schedule, restarts: Restarts, protocol: str | None, say: Callable[..., None]
    ) -> None:
        self.shelf = shelf
        self.schedule = schedule
        self.restarts = restarts
        self.protocol = protocol
        self.say = say
        self.count_gpus = True
        self.lock = -1
        self.forwards = True
        self._job: Job | None = None
        self._checkpoint: subprocess.Popen[bytes] | None = None
        self._output, self._errors = MemoryFile(), MemoryFile()  # its: nobody reads a pipe before it ends
        self._image = Path()
        self._signal = 0  # by which the job is to end, or (not forwarding) this process ...
        self._sent = 0.0  # ... and since when
        self._survived: set[int] = set()  # those by which it was to end, and has not
        self._began = 0.0  # when the job began to compute as it does now ...
        self._base = 0.0  # ... and how many seconds of computing were behind it then
        self._points: dict[Path, float] = {}  # the same for each image
        self._from: Path | None = None  # what it was brought back from, as long as it has made no image since
        self._due = self._asked = 0.0  # when a checkpoint is due; when the last one was
        self._failures = Failures()

    def received(self, number: int, _frame: object) -> None:
        """A signal came."""
        if number in ENDING:
            self._signal, self._sent = number, time.monotonic()
        if self.forwards and self._job is not None:
            self._job.send(number)

    @property
    def _inherited(self) -> tuple[int, ...]:
        """Of checkpoints and restores: one that outlives this process keeps other guards away."""
        return (self.lock,) if self.lock >= 0 else ()

    # One life of the job after the other.

    def watch(self, start: Callable[[], Job], again: Callable[[], Job] | None) -> int:
        """Watch over a job from its start to its last end; ``again`` starts it anew when there is no image.

        Returns:
            The exit status.
        """
        self._begin(start(), 0.0)
        self.tidy()  # not before: a job that is resumed may need an older image than those that are to stay
        while True:
            end = self._until_it_ends()
            if end is None:
                self._finish_checkpoint()
                self.say("released", "The job runs on, unguarded.")
                return 128 + self._signal
            self._finish_checkpoint()
            if self._signal or self._is_wanted(end):
                self.say("ended", f"The job {end}.", status=end.exit_status)
                self._say_what_runs_on()
                return end.exit_status
            point = self._base + time.monotonic() - self._began
            self.say("failed", f"The job {end} after {point:.1f} s of computing.", status=end.exit_status)
            if not self.restarts.failed(point, self.schedule.interval):
                self.say("gave-up", f"It was brought back {self.restarts.in_vain - 1} times without getting further.")
                return end.exit_status
            if self.restarts.in_vain > 1 and self._from is not None:
                self._ended_again(self._from)
            if not self._bring_back(again):
                return end.exit_status

    def _say_what_runs_on(self) -> None:
        """A program that starts another one in the background and ends is done; that one is nobody's from here on."""
        assert self._job is not None
        if left := self._job.left_running(self._spared() | _daemon_pids()):
            pids = ", ".join(map(str, left))
            self.say(
                "left",
                f"Processes that the job has left run on, unguarded: {pids}. A job is guarded as long as the process "
                "that was started: have it wait for them.",
                pids=left,
            )

    def _is_wanted(self, end: End) -> bool:
        """Done, or ended by a person or a scheduler: by a signal, or as programs end that have a handler for it."""
        if end.code is None:
            return False
        return end.code == 0 or -end.code in ENDING or end.code - 128 in self._survived

    def _begin(self, job: Job, point: float) -> None:
        if self._job is not None:
            self._job.close()
        self._note(job.pid)
        self._job, self._base, self._began = job, point, time.monotonic()
        self._due = self._began + self.schedule.interval
        if self._signal and self.forwards:
            self._sent = time.monotonic()
            job.send(self._signal)  # it came before there was this job

    def _note(self, pid: int) -> None:
        """For --resume. The disk may be full of images; what was noted before stays then, and is mostly the same."""
        noted = self.shelf.folder / JOB_FILE
        temporary = noted.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps({"pid": pid}))
            temporary.rename(noted)
        except OSError as error:
            self.say("not-noted", f"{noted} cannot be written: {error}. It is what --resume needs.", error=str(error))

    def _until_it_ends(self) -> End | None:
        """None: this process is to end, and the job is not."""
        assert self._job is not None
        looked = 0.0
        while (end := self._job.poll()) is None:
            if self._signal and not self.forwards:
                return None
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                self._job.look_around()
                reap(self._spared())
                if self._signal:
                    self._does_it_end(self._job)
            if self._checkpoint is not None:
                if self._checkpoint.poll() is not None:
                    self._checkpoint_ended()
            elif now >= self._due and not self._signal:
                self._begin_checkpoint()
            time.sleep(TICK_SECONDS)
        return end

    def _does_it_end(self, job: Job) -> None:
        """By the signal that it was sent. If not, it needs its guard as before."""
        name = signal.Signals(self._signal).name
        if job.ignores(self._signal):
            why = f"The job ignores {name}"
        elif time.monotonic() - self._sent > GRACE_SECONDS:
            why = f"The job has not ended by {name} within {GRACE_SECONDS:g} s"
        else:
            return
        self._survived.add(self._signal)
        self._signal = 0
        self.say("survived", f"{why}: it is guarded as before.")

    def _spared(self) -> set[int]:
        """Our children that somebody else waits for, and phosd with its keeper, which may be orphans of ours."""
        assert self._job is not None
        spared = {os.getpid(), self._job.pid}
        if self._checkpoint is not None:
            spared.add(self._checkpoint.pid)
        return spared

    # Checkpoints.

    def _begin_checkpoint(self) -> None:
        assert self._job is not None
        self._image = self.shelf.next()
        self._points[self._image] = self._base + time.monotonic() - self._began
        self._asked = time.monotonic()
        command = [str(launcher("phos-gpu")), "checkpoint", "--json", "--leave-running"]
        command += ["--protocol", self.protocol] if self.protocol else []
        try:
            self._checkpoint = subprocess.Popen(
                [*command, str(self._job.pid), str(self._image)],
                stdin=subprocess.DEVNULL,
                stdout=self._output.begin(),
                stderr=self._errors.begin(),
                start_new_session=True,  # Ctrl-C is for the job
                pass_fds=self._inherited,
            )
        except OSError as error:  # no memory left, for example
            self._failed(f"It cannot be started: {error}.", str(error), disturbs=False)

    def _checkpoint_ended(self) -> None:
        """Take note of what came of a checkpoint, and tidy up."""
        assert self._checkpoint is not None
        status, self._checkpoint = self._checkpoint.wait(), None
        if status == 0:
            said: dict[str, Any] = json.loads(self._output.text())
            self._failures = Failures()
            self._from = None
            self.schedule.measured(said.get("stall"))
            if self.count_gpus:
                self.schedule.gpus = _gpus_of(self._image)
            self._due = self._asked + self.schedule.interval
            self.say(
                "checkpoint",
                f"{self._image.name} is whole ({said['seconds']:.2f} s, of which the job stood still "
                f"{self.schedule.overhead:.2f} s on average). The next one in {self.schedule.interval:.3g} s.",
                image=str(self._image),
                seconds=said["seconds"],
                stall=said.get("stall"),
                gpus=self.schedule.gpus,
                interval=round(self.schedule.interval, 3),
            )
        else:
            reason = self._errors.text().strip().removeprefix("phos-gpu checkpoint: ")
            first = " ".join(reason.splitlines()[:2])
            disturbs = False
            if self._job is not None and self._job.poll() is not None:
                first = "The job ended meanwhile."
            elif status == ExitStatus.NO_PROCESS:
                first = "The job does not use CUDA yet."
            else:
                disturbs = True
            self._failed(first, reason, disturbs=disturbs)
        self.tidy()

    def _failed(self, first: str, reason: str, *, disturbs: bool) -> None:
        """No image was made; ``first`` of what is to be said of the reason: now and then, whichever image it names."""
        failures, now = self._failures, time.monotonic()
        self._due = now + failures.wait(max(RETRY_SECONDS, self.schedule.interval), disturbs=disturbs)
        if failures.is_news(first.replace(self._image.name, ""), now):
            what = f"Still no image, after {failures.count} tries" if failures.again else "No image was made"
            self.say("checkpoint-failed", f"{what}: {first}", image=str(self._image), error=reason)

    def tidy(self) -> None:
        """Remove the images that nobody needs; one that cannot be removed now can be later."""
        try:
            for gone in self.shelf.tidy():
                self._points.pop(gone, None)
        except OSError as error:
            self.say("not-tidied", f"Images that nobody needs could not be removed: {error}.", error=str(error))

    def _finish_checkpoint(self) -> None:
        """The job has ended: a checkpoint under way ends too, whole or not."""
        if self._checkpoint is None:
            return
        done: object = None
        while not self._has_finished(self._checkpoint, LAST_WORDS_SECONDS):
            if done != (done := _progress_of(self._image)):
                continue
            self._checkpoint.terminate()  # the launcher ends CRIU where that harms nobody
            if not self._has_finished(self._checkpoint, 10 * RETRY_SECONDS):
                self._checkpoint.kill()
        self._checkpoint_ended()

    @staticmethod
    def _has_finished(checkpoint: subprocess.Popen[bytes], seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            checkpoint.wait(seconds)
        return checkpoint.poll() is not None

    # Coming back.

    def _ended_again(self, image: Path) -> None:
        """The job came back from this image and got no further than before, nor as far as another image."""
        if self.shelf.came_to_nothing(image):
            self.say(
                "doubted",
                f"The job has come back from {image.name} only to end again: older images are tried before it.",
                image=str(image),
            )

    def _bring_back(self, again: Callable[[], Job] | None) -> bool:
        """From the first of the whole images that can be restored, or from the beginning. False: neither."""
        assert self._job is not None
        left = self._job.clear_away(self._spared() | _daemon_pids())
        if left:
            self.say(
                "stuck", f"Processes of the job cannot be ended: {', '.join(map(str, left))}. It cannot come back."
            )
            return False
        try:
            whole, unreadable = self.shelf.to_try(), self.shelf.unreadable()
        except OSError as error:
            self.say("gave-up", f"The images cannot be read: {error}. Bring the job back with --resume when they can.")
            return False
        if (found := self._restored(whole, self._job.pid)) is not None:
            image, job = found
            self._begin(job, self._points.get(image, 0.0))
            self._runs_from(image, job)
            return True
        if self._signal:
            return False
        if unreadable:
            self.say(
                "gave-up",
                f"{_listed(unreadable)} cannot be read (perhaps only by the release of PhOS that made it), and may be "
                "whole. Make it readable, then bring the job back with --resume; remove it if the job is to begin "
                "anew.",
            )
            return False
        if whole:
            self.say(
                "gave-up",
                f"No image could be restored, of {len(whole)}. They stay: bring the job back with --resume when they "
                "can be, or remove them if the job is to begin anew.",
            )
            return False
        if again is None or self._signal:
            self.say("gave-up", "There is no image that the job could be brought back from.")
            return False
        self._begin(again(), 0.0)
        self._from = None
        self.say("started", f"The job has no image and begins anew, as process {self._job.pid}.", pid=self._job.pid)
        return True

    def _restored(self, images: Sequence[Path], pid: int) -> tuple[Path, Job] | None:
        """The first of them that can be restored, unless the job is to end."""
        for image in images:
            if self._signal:
                break
            try:
                job = self.restore(image, pid)
                self.shelf.doubted.discard(image)
                return image, job
            except (PhosError, OSError) as error:
                self.shelf.doubted.add(image)
                self.say("restore-failed", f"{image.name} could not be restored: {error}", image=str(image))
        return None

    def resume(self, images: Sequence[Path], pid: int) -> Job:
        """Restore the newest of some images, the first, or the newest of the others that can be.

        Raises:
            RestoreFailed: none can be.
        """
        found = self._restored(images, pid)
        if found is None:
            if self._signal:
                raise SystemExit(128 + self._signal)
            raise RestoreFailed(f"No image could be restored, of {len(images)}. They stay.")
        image, job = found
        self._runs_from(image, job)
        return job

    def _runs_from(self, image: Path, job: Job) -> None:
        """Say so, and whether there were newer ones."""
        self._from = image
        text = f"The job runs again from {image.name}, as process {job.pid}."
        self.say("restored", text, image=str(image), pid=job.pid)
        try:
            newer = self.shelf.passed_over(image)
        except OSError:
            return
        if newer:
            self.say(
                "passed-over",
                f"{_listed(newer)} cannot be read (perhaps only by the release of PhOS that made it), and may be whole "
                f"and newer than {image.name}.",
                image=str(image),
                unreadable=[str(each) for each in newer],
            )

    def restore(self, image: Path, pid: int) -> Job:
        """Restore an image and watch over the process of that pid in it.

        Raises:
            RestoreFailed: with what ``phos-gpu restore`` said.
        """
        # Where the job was moved once, later images have it already: by the same words it would be moved again.
        done = subprocess.run(
            [str(launcher("phos-gpu")), "restore", "--json", str(image)],
            env={
                **os.environ,
                "PHOS_RESTORE_GPUS": "",
                "PHOS_GROWN_FILES": os.environ.get("PHOS_GROWN_FILES") or "cut",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=self._inherited,
            check=False,
        )
        if done.returncode != 0:
            raise RestoreFailed(done.stderr.strip().removeprefix("phos-gpu restore: ") or "phos-gpu restore failed.")
        try:
            return Job(pid)
        except ProcessLookupError as error:
            raise RestoreFailed(f"Process {pid} has ended at once.") from error


def _listed(images: Sequence[Path]) -> str:
    return ", ".join(map(str, images))


def _daemon_pids() -> set[int]:
    """phosd and what is below it: orphans, which may have come to us."""
    try:
        return tree_of(client.status().pid)
    except (PhosError, psutil.Error, OSError):
        return set()


def _progress_of(image: Path) -> object:
    """What changes as long as an image is being written. Its files have room for all data before that is copied."""
    phases: list[str] = []
    done = used = 0
    with suppress(PhosError, OSError):
        for job in client.status().jobs:
            if job.kind == "dump" and job.image == client.image_name(image):
                done, phases = job.bytes_done, [phase.name for phase in job.phases]
    with suppress(OSError):
        used = sum(entry.stat(follow_symlinks=False).st_blocks for entry in os.scandir(image))
    return done, phases, used


def _gpus_of(image: Path) -> int:
    """How many GPUs an image holds memory of."""
    try:
        with Image.open(image) as opened:
            return len({block.device for process in opened.inventory.processes for block in process.blocks}) or 1
    except (ImageError, OSError):
        return 1


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--images",
    type=Place(path_type=Path, file_okay=False),
    required=True,
    help="Directory for the images, made if it is missing. One job each.",
)
@click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Whole images that stay.")
@click.option(
    "--failure-rate",
    type=RATE,
    default=1.0,
    show_default=True,
    help="F: failures of one GPU an hour.",
)
@click.option("--gpus", type=click.IntRange(1, 1024), help="N. Default: as many as the last image has memory of.")
@click.option("--interval", type=SECONDS, help="Seconds between checkpoints, instead of 1/f*.")
@click.option("--protocol", type=click.Choice(configuration.PROTOCOLS), help="As for phos-gpu checkpoint.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Give up after so many in a row that did not get the job further.",
)
@click.option("--resume", is_flag=True, help="Begin with the newest restorable image in --images instead of CMD.")
@json_option("Print events, one JSON object a line, and not the job's output.")
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PID | -- CMD...")
def guard(
    images: Path,
    keep: int,
    failure_rate: float,
    gpus: int | None,
    interval: float | None,
    protocol: str | None,
    restarts: int,
    resume: bool,
    as_json: bool,
    job: tuple[str, ...],
) -> None:
    """Keep a job alive: checkpoint it at the frequency that wastes the least GPU time, and bring it back when it fails.

    The job is a running process PID, or CMD, which is started under PhOS. It failed if it ended with a status other
    than 0 or by a signal that is none of those by which people end programs.
    """
    if os.geteuid() != 0:
        raise Unsupported("guard needs root, because CRIU does. Run it with sudo.")
    existing_pid = int(job[0]) if len(job) == 1 and job[0].isascii() and job[0].isdigit() and not resume else None
    if existing_pid is not None:
        refuse_own(existing_pid)
        refuse_unfit(existing_pid)
    folder = images.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The directory {folder} cannot be made: {error.strerror}.") from error
    refuse_foreign(folder)
    schedule = Schedule(failure_rate, gpus=gpus or 1, interval=interval)
    speaker = Speaker(as_json=as_json)
    made = Guard(Shelf(folder, keep), schedule, Restarts(restarts), protocol, speaker.say)
    made.count_gpus = gpus is None
    made.lock = _lock(folder)
    reach.ensure()
    become_reaper()
    existing = made.shelf.whole()
    if not existing and (unreadable := made.shelf.unreadable()):
        raise UsageError(
            f"{_listed(unreadable)} cannot be read (perhaps only by the release of PhOS that made it), and may be "
            "whole. Make it readable, or name another directory."
        )
    again: Callable[[], Job] | None = None
    if existing_pid is not None:
        pid = existing_pid
        _refuse_foreign(existing, pid)
        made.forwards = False
        start: Callable[[], Job] = lambda: _existing(pid)  # noqa: E731
    else:
        output = folder / "output.log"
        speaker.follow(output)
        again = lambda: _start(job, output)  # noqa: E731
        start = again
        if resume and existing:
            pid = _former_pid(folder)
            start = lambda: made.resume(existing, pid)  # noqa: E731
        elif existing:
            raise UsageError(
                f"{folder} holds images of an earlier job. Name another directory, or go on from the newest of them "
                "with --resume."
            )
    heed(FORWARDED, made.received, [])
    what = f"The first checkpoint comes in {schedule.interval:.3g} s; whole images that stay: {keep}."
    made.say("guarding", f"Images go to {folder}. {what}", images=str(folder), keep=keep)
    try:
        sys.exit(made.watch(start, again))
    finally:
        speaker.finish()


def _lock(folder: Path) -> int:
    lock = os.open(folder / "guard.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UsageError(
            f"Another guard, or a checkpoint or restore that one began, still works in {folder}."
        ) from error
    return lock


def _existing(pid: int) -> Job:
    try:
        return Job(pid)
    except ProcessLookupError as error:
        raise NoSuchProcess(f"There is no process {pid}.") from error


def _start(command: Sequence[str], output: Path) -> Job:
    program = program_of(command[0])
    environment = {**os.environ, **application_environment(device_kind(), socket_path())}
    with starting(program):
        return Job.start([program, *command[1:]], environment, output)


def _former_pid(folder: Path) -> int:
    try:
        return int(json.loads((folder / JOB_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder / JOB_FILE} is missing or damaged: restore an image with 'phos-gpu restore'."
        ) from error


def _refuse_foreign(existing: Sequence[Path], pid: int) -> None:
    """Images of another process would be restored in place of this one. A session's number tells, restored or not."""
    tree = tree_of(pid)
    sessions = {process.session for process in client.status().processes if process.pid in tree}
    for image in existing:
        with Image.open(image) as opened:
            if not any(process.session in sessions for process in opened.inventory.processes):
                raise UsageError(f"{image} is not of process {pid} as it runs now. Name another directory.")
