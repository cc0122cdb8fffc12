"""phos-gpu guard: jobs that are checkpointed at intervals and brought back when they fail, with the real CRIU."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.site import PATIENCE, Program, Site, example_words, wait_until, words

PACE = ("--iterations", "120", "--iteration-seconds", "0.05")


def job(site: Site, *options: str) -> tuple[str, ...]:
    """A job that does not end before :func:`let_end`, however slow the machine is."""
    return (*example_words("stencil"), *(options or (*PACE, "--until", str(site.folder / "end"))))


def let_end(site: Site, guarding: Program) -> int:
    """Let the job go on to its end; the guard's exit status."""
    (site.folder / "end").touch()
    return status_of(guarding)


def expected_result(site: Site) -> str:
    return site.reference("stencil", *PACE[:2])


def guard(site: Site, *options: str, **changes: str) -> Program:
    """Start a guard; its program's lines are its events."""
    command = (str(launcher("phos-gpu")), "guard", "--images", str(site.folder / "images"), "--json", *options)
    return site.start(*command, under=False, **changes)


def events(guarding: Program, name: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in guarding.lines() if line.startswith("{")]
    return [event for event in found if name in (None, event["event"])]


def wait_event(guarding: Program, name: str, count: int = 1) -> dict[str, Any]:
    wait_until(
        lambda: len(events(guarding, name)) >= count or not guarding.alive(),
        f"event {name} of {guarding.lines()[-5:] if guarding.output.exists() else ''}",
    )
    assert len(events(guarding, name)) >= count, guarding.lines()[-10:]
    return events(guarding, name)[count - 1]


def job_pid(site: Site) -> int:
    path = site.folder / "images" / "job.json"
    wait_until(lambda: path.exists() and path.read_text() != "", "the job's start")
    return int(json.loads(path.read_text())["pid"])


def status_of(guarding: Program) -> int:
    return guarding.process.wait(PATIENCE)


def results(site: Site) -> list[str]:
    """The RESULT lines of the job. Lines of iterations that were done again are there again; a result is not."""
    lines = (site.folder / "images" / "output.log").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("RESULT")]


def images(site: Site) -> list[Path]:
    return sorted((site.folder / "images").glob("image-*"))


def test_a_killed_job_comes_back_and_ends_with_the_same_result(site: Site) -> None:
    expected = expected_result(site)
    guarding = guard(site, "--interval", "0.5", "--keep", "2", "--", *job(site))
    wait_event(guarding, "checkpoint", 2)
    os.kill(job_pid(site), signal.SIGKILL)
    restored = wait_event(guarding, "restored")
    assert restored["image"] in [event["image"] for event in events(guarding, "checkpoint")]
    assert let_end(site, guarding) == 0
    assert results(site) == [expected]
    assert 1 <= len(images(site)) <= 2
    for image in images(site):
        site.run("phos-gpu", "verify", str(image))


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.5, 0.8])
def test_a_job_is_killed_in_mid_checkpoint(site: Site, delay: float) -> None:
    expected = expected_result(site)
    guarding = guard(site, "--interval", "0.5", "--", *job(site), SOFTGPU_TOGGLE_MS="300")
    wait_event(guarding, "checkpoint")
    before = len(events(guarding, "checkpoint"))

    def dumping() -> bool:
        return any("dump" in words(process) for process in site.processes())

    wait_until(lambda: not dumping() or len(events(guarding, "checkpoint")) > before, "the end of a dump")
    wait_until(dumping, "the next dump")
    time.sleep(delay)
    os.kill(job_pid(site), signal.SIGKILL)
    wait_event(guarding, "restored")
    assert let_end(site, guarding) == 0
    assert results(site) == [expected]


def test_it_comes_back_again_and_again(site: Site) -> None:
    expected = expected_result(site)
    guarding = guard(site, "--interval", "0.3", "--keep", "1", "--restarts", "20", "--", *job(site))
    for life in range(1, 4):
        done = len(events(guarding, "checkpoint"))
        wait_event(guarding, "checkpoint", done + 1)
        os.kill(job_pid(site), signal.SIGKILL)
        wait_event(guarding, "restored", life)
    assert let_end(site, guarding) == 0
    assert results(site) == [expected]


def test_an_image_of_a_job_that_was_about_to_fail_is_passed_over(site: Site) -> None:
    """One of its processes had died, and it had not noticed: it fails as soon as it comes back from there."""
    expected = expected_result(site)
    notice = site.folder / "notice"
    ranks = (sys.executable, str(Path(__file__).parent / "programs" / "two_ranks.py"), str(notice), *job(site))
    guarding = guard(site, "--interval", "4", "--keep", "9", "--restarts", "19", "--", *ranks)
    wait_event(guarding, "checkpoint")
    os.kill(psutil.Process(job_pid(site)).children()[0].pid, signal.SIGKILL)
    # The next one may still have both of them.
    wait_event(guarding, "checkpoint", len(events(guarding, "checkpoint")) + 2)
    notice.touch()

    def has_both() -> bool:
        with suppress(psutil.NoSuchProcess):
            return len(psutil.Process(job_pid(site)).children()) == 2
        return False

    wait_until(lambda: has_both() or not guarding.alive(), "the job to come back as it was before")
    assert let_end(site, guarding) == 0
    assert results(site) == [expected] * 2
    told = {name: [event["image"] for event in events(guarding, name)] for name in ("restored", "doubted")}
    # One that ends before its restore has, on a slow machine, is a restore that failed.
    bad = {event["image"] for event in events(guarding, "restore-failed")} | set(told["doubted"])
    assert bad
    assert told["restored"][-1] not in bad
    assert set(told["restored"][:-1]) <= bad
    assert all(told["restored"].count(image) == 2 for image in told["doubted"])


def test_a_job_that_always_fails_is_given_up(site: Site) -> None:
    guarding = guard(site, "--interval", "1000", "--restarts", "2", "--", "sh", "-c", "echo again; exit 3")
    assert status_of(guarding) == 3
    assert (site.folder / "images" / "output.log").read_text() == "again\n" * 3
    assert [event["event"] for event in events(guarding)][-1] == "gave-up"
    assert len(events(guarding, "started")) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_it_stays_ended(site: Site, number: signal.Signals) -> None:
    guarding = guard(site, "--interval", "0.5", "--", *job(site))
    wait_event(guarding, "checkpoint")
    pid = job_pid(site)
    os.kill(guarding.pid, number)
    assert status_of(guarding) in (128 + number, 1)  # Python makes an exception of SIGINT, and a status of that
    assert not psutil.pid_exists(pid)
    assert events(guarding)[-1]["event"] == "ended"
    assert not events(guarding, "restored")


def test_a_running_process_is_guarded(site: Site) -> None:
    expected = expected_result(site)
    program = site.example("stencil", *PACE)
    program.wait_iterations(5)
    guarding = guard(site, "--interval", "0.5", str(program.pid))
    wait_event(guarding, "checkpoint")
    os.kill(program.pid, signal.SIGKILL)
    program.process.wait()  # under its pid there may be the restored one already when that is gone
    wait_event(guarding, "restored")
    program.let_end()
    assert status_of(guarding) == 0
    assert program.result() == expected


def test_who_guards_a_running_process_may_leave(site: Site) -> None:
    program = site.example("stencil", *PACE)
    program.wait_iterations(5)
    guarding = guard(site, "--interval", "0.5", str(program.pid))
    wait_event(guarding, "checkpoint")
    os.kill(guarding.pid, signal.SIGTERM)
    assert status_of(guarding) == 128 + signal.SIGTERM
    program.wait_progress(3)


def test_phosd_is_killed_meanwhile(site: Site) -> None:
    expected = expected_result(site)
    guarding = guard(site, "--interval", "0.5", "--", *job(site))
    wait_event(guarding, "checkpoint")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    done = len(events(guarding, "checkpoint"))
    wait_event(guarding, "checkpoint", done + 1)
    os.kill(job_pid(site), signal.SIGKILL)
    wait_event(guarding, "restored")
    assert let_end(site, guarding) == 0
    assert results(site) == [expected]


def test_a_guard_that_was_killed_is_resumed(site: Site) -> None:
    expected = expected_result(site)
    guarding = guard(site, "--interval", "0.5", "--", *job(site))
    wait_event(guarding, "checkpoint")
    pid = job_pid(site)
    for victim in (guarding.pid, pid):
        os.kill(victim, signal.SIGKILL)
    site.gone(guarding)
    wait_until(lambda: not any("dump" in words(process) for process in site.processes()), "the end of the last dump")
    site.freed(pid)  # its job, which was killed after it
    refused = guard(site, "--", *job(site))
    assert status_of(refused) == 2
    assert "holds images of an earlier job" in refused.lines()[-1]
    again = guard(site, "--interval", "0.5", "--resume", "--", *job(site))
    resumed = wait_event(again, "restored")
    assert resumed["pid"] == pid
    assert resumed["image"].startswith(str(site.folder / "images" / "image-"))
    assert let_end(site, again) == 0
    assert job_pid(site) == pid
    assert results(site) == [expected]


def test_a_restore_outlives_its_guard_and_keeps_others_away(site: Site) -> None:
    """The next would find that no image can be restored: the processes of all are being restored already."""
    expected = expected_result(site)
    hold = site.folder / "copies-held"
    site.run("phosd", "--ensure", SOFTGPU_COPY_HOLD=str(hold), SOFTGPU_COPY_HOLD_BYTES="64K")
    guarding = guard(site, "--interval", "0.5", "--", *job(site))
    wait_event(guarding, "checkpoint")
    hold.touch()
    os.kill(job_pid(site), signal.SIGKILL)
    wait_until(lambda: any("restore" in words(process) for process in site.processes()), "the restore")
    os.kill(guarding.pid, signal.SIGKILL)
    site.gone(guarding)
    refused = guard(site, "--resume", "--", *job(site))
    assert status_of(refused) == 2
    assert "a checkpoint or restore that one began, still works in" in refused.lines()[-1]
    hold.unlink()
    (site.folder / "end").touch()
    wait_until(lambda: results(site) == [expected], "the end of the job")


def test_two_guards_do_not_share_a_directory(site: Site) -> None:
    guarding = guard(site, "--interval", "100", "--", *job(site))
    wait_event(guarding, "guarding")
    second = guard(site, "--", *job(site))
    assert status_of(second) == 2
    assert "Another guard" in second.lines()[-1]


def test_output_and_events_in_plain_lines(site: Site) -> None:
    result = site.run(
        "phos-gpu", "guard", "--images", str(site.folder / "images"), "--", *job(site, "--iterations", "3")
    )
    assert "ITERATION 3" in result.stdout
    assert "guard: The job ended with status 0." in result.stderr


def own_log(site: Site) -> tuple[Path, tuple[str, ...]]:
    """A job that writes a log of its own, not to append to it; and that log."""
    log = site.folder / "train.log"
    return log, ("sh", "-c", 'log=$1; shift; exec "$@" >"$log"', "sh", str(log), *job(site))


def test_a_log_of_the_job_s_own_goes_back_with_it(site: Site) -> None:
    """CRIU would not restore a program with a file open that has grown since. What the job said last is kept."""
    expected = expected_result(site)
    log, command = own_log(site)
    guarding = guard(site, "--interval", "0.5", "--", *command)
    wait_event(guarding, "checkpoint", 2)
    wait_until(lambda: log.read_text().count("ITERATION") > 20, "output")
    os.kill(job_pid(site), signal.SIGKILL)
    wait_event(guarding, "restored")
    assert let_end(site, guarding) == 0
    lines = log.read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("RESULT")] == [expected]
    said = [line.split()[1] for line in lines if line.startswith("ITERATION")]
    assert said == [str(number + 1) for number in range(120)]
    kept = "".join(path.read_text() for path in site.folder.glob("train.log.cut-*"))
    assert set(kept.splitlines()) <= set(lines)


def test_a_log_of_the_job_s_own_stays_if_that_is_asked_for(site: Site) -> None:
    log, command = own_log(site)
    guarding = guard(site, "--interval", "0.5", "--", *command, PHOS_GROWN_FILES="refuse")
    wait_event(guarding, "checkpoint")
    os.kill(job_pid(site), signal.SIGSTOP)  # else the next checkpoint might have the log as it is
    before = log.read_text()
    with log.open("a") as file:
        file.write("more\n")
    os.kill(job_pid(site), signal.SIGKILL)
    assert "has bad size" in wait_event(guarding, "restore-failed")["text"]
    status_of(guarding)
    assert log.read_text().startswith(before)
    assert not list(site.folder.glob("train.log.cut-*"))
