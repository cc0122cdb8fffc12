"""Faults of the driver and of phosd, one at a time, through the real CRIU.

Each gets a sentence and a nonzero exit; the application computes on correctly wherever it was running before; no image
that claims to be whole, no GPU memory and no process is left; and phosd is fit for the next job.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.integration.many_blocks import (
    Fault,
    blocks,
    daemon,
    end,
    fit_for_the_next,
    log_of,
    nothing_of_ours,
    renewed,
    text_of,
)
from tests.integration.site import Site, example_words, wait_until

# The driver fails while dumping.

# Memory for hashes is imported and mapped first.
# Copies fail later than phosd's successor, which has the same fault, needs for its own dump and restore.
DUMP_FAULTS = {
    "lock": Fault("cuCheckpointProcessLock", application="lock-timeout:1"),
    "a profiler": Fault("a profiler (CUPTI", application="profiled:1"),
    "checkpoint": Fault("cuCheckpointProcessCheckpoint", application="checkpoint-fail:1"),
    "phosd cannot import": Fault("cuMemImportFromShareableHandle", phosd="import-fail-at:2"),
    "phosd cannot map": Fault("cuMemMap", phosd="map-fail-at:2"),
    "phosd's context is lost": Fault("Copying GPU memory", phosd="copy-fail-at:8"),
    "a block has no descriptor": Fault("no descriptor", application="export-fail-at:2"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("lock", "kill"),
        ("a profiler", "leave-running"),
        ("checkpoint", "leave-running"),
        ("phosd cannot import", "kill"),
        ("phosd cannot map", "leave-running"),
        ("phosd's context is lost", "kill"),
        ("phosd's context is lost", "leave-running"),
        ("a block has no descriptor", "kill"),
    ],
)
def test_driver_fails_while_dumping(site: Site, name: str, mode: str) -> None:
    fault = DUMP_FAULTS[name]
    daemon(site, SOFTGPU_FAULTS=fault.phosd)
    program = blocks(site, "--blocks", "9", SOFTGPU_FAULTS=fault.application)
    image = site.image()
    result = site.dump(program, image, *(["--leave-running"] if mode == "leave-running" else []), check=False)
    assert result.returncode != 0
    assert fault.said in result.stderr + (image / "dump.log").read_text()
    program.wait_progress()
    assert nothing_of_ours(image)
    end(site, program)
    wait_until(lambda: "GPU context is lost" not in log_of(site) or renewed(site), "phosd's renewal")
    fit_for_the_next(site)


def test_application_survives_the_renewal_of_phosd(site: Site) -> None:
    """A bad copy costs phosd its context, so it becomes a new process; who was attached before can be dumped again."""
    daemon(site, SOFTGPU_FAULTS="copy-fail-at:8")  # its successor has it, too, and makes seven copies below
    program = blocks(site, "--blocks", "2")
    site.dump(program, site.image("first"), "--leave-running")
    for number in range(4):
        result = site.dump(program, site.image(f"image-{number}"), "--leave-running", check=False)
        if result.returncode:
            break
    assert "Copying GPU memory" in result.stderr
    wait_until(lambda: renewed(site), "phosd's renewal")
    program.wait_progress()
    image = site.image("after")
    site.dump(program, image)
    site.wait_no_gpu_memory(15)
    site.restore(image)
    assert program.wait_result() == "right"


# The driver fails while the processes come back.


def test_attach_is_tried_again(site: Site) -> None:
    daemon(site)
    program = blocks(site, "--blocks", "3", SOFTGPU_FAULTS="import-fail-at:2")
    image = site.image()
    site.dump(program, image, "--leave-running")
    site.run("phos-gpu", "verify", str(image))
    assert program.wait_result() == "right"


def test_attach_is_tried_again_for_as_long_as_it_may_succeed(site: Site) -> None:
    """Within milliseconds it cannot import, nor map, nor have access: descriptors are short, the GPU is full."""
    daemon(site)
    faults = "import-fail-at:1,map-fail-at:5,access-fail-at:6"
    program = blocks(site, "--blocks", "3", SOFTGPU_FAULTS=faults)
    image = site.image()
    site.dump(program, image, "--leave-running")
    assert log_of(site).count("It is tried again") == 3
    assert program.wait_result() == "right"


def test_a_process_that_cannot_attach_yet_says_why_and_holds_up_no_other_job(site: Site) -> None:
    daemon(site, PHOS_RETURN_SECONDS="1")
    program = blocks(site, "--blocks", "3", SOFTGPU_FAULTS="access-fail-at:4+")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    assert "has not come back (it is" in result.stderr
    assert "access to memory" in result.stderr
    site.run("phos-gpu", "verify", str(image))
    end(site, program)
    fit_for_the_next(site)


def test_process_waits_for_gpu_memory(site: Site) -> None:
    program = blocks(site, SOFTGPU_FAULTS="restore-oom:1")
    image = site.image()
    site.dump(program, image, "--leave-running")
    assert "waits for GPU memory" in log_of(site)
    assert program.wait_result() == "right"


def test_driver_loses_the_process_but_the_image_is_whole(site: Site) -> None:
    program = blocks(site, SOFTGPU_FAULTS="restore-fail:1")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    assert result.returncode != 0
    assert "cuCheckpointProcessRestore" in result.stderr
    wait_until(lambda: not program.alive(), "the program to notice that its GPU is gone")
    assert any(line.startswith("ERROR") for line in program.lines()), program.lines()[-5:]
    site.run("phos-gpu", "verify", str(image))
    site.wait_no_gpu_memory()
    fit_for_the_next(site)


# What never ends.


def test_gpu_work_that_never_ends(site: Site) -> None:
    daemon(site, PHOS_QUIESCE_SECONDS="2")
    program = blocks(site, SOFTGPU_FAULTS="hang-sync")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "did not answer 'quiesce'" in (image / "dump.log").read_text()
    assert nothing_of_ours(image)
    end(site, program)
    fit_for_the_next(site)


SILENT = """
import time
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1])
memory = cu.cuMemAlloc(4 << 20)
print("READY", flush=True)
time.sleep(1000)
"""


def test_who_does_not_answer_keeps_no_other_process_standing(site: Site, tmp_path: Path) -> None:
    """The checkpoint fails for it; the others stand still for as long as that takes to know, and no longer."""
    daemon(site, PHOS_QUIESCE_SECONDS="2")
    (tmp_path / "silent.py").write_text(SILENT)
    (tmp_path / "family.sh").write_text(
        f"SOFTGPU_FAULTS=hang-sync {shlex.join([sys.executable, str(tmp_path / 'silent.py')])} >silent.log 2>&1 &\n"
        f"exec {shlex.join(example_words('stencil'))} --iterations 100000 --iteration-seconds 0.05 --until $1\n"
    )
    program = site.until_awaited("/bin/sh", str(tmp_path / "family.sh"))
    program.wait_iterations(3)
    wait_until(lambda: "READY" in text_of(site.folder / "silent.log"), "the one that will not answer")
    dump = site.begin_dump(program, site.image(), "--leave-running", PHOS_PROTOCOL="cow")
    longest, at, seen = 0.0, time.monotonic(), program.iterations()
    while dump.poll() is None or time.monotonic() - at > 1:
        time.sleep(0.02)
        if (now := program.iterations()) != seen:
            longest, at, seen = max(longest, time.monotonic() - at), time.monotonic(), now
        assert time.monotonic() - at < 20, "it waits for the other's answers"
    assert dump.returncode != 0
    assert longest > 1, "it was not quiesced with the other"
    assert "did not answer 'quiesce'" in log_of(site)


def test_driver_that_never_answers(site: Site) -> None:
    daemon(site, PHOS_CHECKPOINT_SECONDS="1", PHOS_RETURN_SECONDS="1")
    program = blocks(site, SOFTGPU_FAULTS="hang-control")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    said = (image / "dump.log").read_text()
    assert "does not answer" in said
    assert "phosd goes on trying" in said
    assert nothing_of_ours(image)
    end(site, program)
    fit_for_the_next(site)


def test_stopped_application_is_refused_and_unharmed(site: Site) -> None:
    program = blocks(site)
    os.kill(program.pid, signal.SIGSTOP)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "is stopped" in (image / "dump.log").read_text()
    assert nothing_of_ours(image)
    os.kill(program.pid, signal.SIGCONT)
    program.wait_progress()
    again = site.image("again")
    site.dump(program, again)
    site.restore(again)
    assert program.wait_result() == "right"


def all_stopped(pid: int) -> bool:
    """Whether no thread of a process goes on: each stops for itself, and the process counts as stopped by its first."""
    try:
        stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_application_that_is_left_stopped_comes_back_when_it_is_continued(site: Site) -> None:
    program = blocks(site)
    image = site.image()
    site.dump(program, image, "--leave-running", "--leave-stopped")
    site.run("phos-gpu", "verify", str(image))
    wait_until(lambda: all_stopped(program.pid), "all its threads to stand still")
    before = program.iterations()
    time.sleep(0.3)
    assert program.iterations() == before
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait_result() == "right"


@pytest.mark.parametrize("what", ["to save", "for residue", "to watch CRIU", "to bring back"])
def test_phosd_can_start_no_thread(site: Site, what: str) -> None:
    """Whatever it was for, the processes, which are detached by then, come back."""
    site.environment["PHOS_PROTOCOL"] = "stop"
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=f"no thread {what}")
    program = blocks(site, "--blocks", "9")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    if what in ("to watch CRIU", "to bring back"):  # the dump can do without
        assert result.returncode == 0
    else:
        assert "a limit on processes is reached" in result.stderr + (image / "dump.log").read_text()
        assert not (image / "phos-commit.img").exists()
    program.wait_progress(3)
    assert [job["state"] for job in site.status()["jobs"]] == ["failed" if result.returncode else "committed"]
    site.dump(program, site.image("next"), "--leave-running")
    program.wait_progress(3)


@pytest.mark.parametrize("kills", [False, True], ids=["left running", "to be killed"])
@pytest.mark.parametrize("body", ["task_frozen", "task_pages", "dump_end"])
def test_a_packet_of_crius_plugin_is_cut_off(site: Site, body: str, kills: bool) -> None:
    """While CRIU holds the processes: it fails and lets them go before phosd brings them back."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=f"cut {body}")
    program = blocks(site, "--blocks", "9")
    image = site.image()
    began = time.monotonic()
    result = site.dump(program, image, *(() if kills else ("--leave-running",)), check=False)
    assert time.monotonic() - began < 20
    assert result.returncode != 0
    assert "phosd" in result.stderr + (image / "dump.log").read_text()
    assert not (image / "phos-commit.img").exists()
    program.wait_progress(3)
    assert [job["state"] for job in site.status()["jobs"]] == ["failed"]
    site.dump(program, site.image("next"), "--leave-running")
    program.wait_progress(3)


def test_a_frozen_process_cannot_be_looked_at(site: Site) -> None:
    """CRIU has gone on by then, and is told at its end."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="blind")
    program = blocks(site, "--blocks", "9")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "could not be looked at while it was frozen" in result.stderr + (image / "dump.log").read_text()
    program.wait_progress(3)
    site.dump(program, site.image("next"), "--leave-running")
    program.wait_progress(3)


@pytest.mark.parametrize("what", ["to quiesce", "to detach"])
def test_phosd_can_start_no_thread_for_another_process(site: Site, tmp_path: Path, what: str) -> None:
    """The first process has its gate closed by then, or is detached."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=f"no thread {what}")
    script = tmp_path / "family.sh"
    command = f"{shlex.join(example_words('stencil'))} --iterations 400 --iteration-seconds 0.05 --until $1"
    script.write_text(f"{command} >a.log 2>&1 &\n{command} >b.log 2>&1 &\nwait\necho RESULT family\n")
    program = site.until_awaited("/bin/sh", str(script))
    logs = [site.folder / "a.log", site.folder / "b.log"]

    def iterations(log: Path) -> int:
        return log.read_text().count("ITERATION") if log.exists() else 0

    wait_until(lambda: all(iterations(log) >= 5 for log in logs), "both children")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    assert result.returncode != 0
    assert "a limit on processes is reached" in result.stderr + (image / "dump.log").read_text()
    before = [iterations(log) for log in logs]
    wait_until(lambda: all(iterations(log) > was for log, was in zip(logs, before, strict=True)), "both to go on")
    site.dump(program, site.image("next"))
    site.restore(site.folder / "next")
    assert program.wait_result() == "family"
