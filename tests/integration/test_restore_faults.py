"""Restores that fail, through the real CRIU: nothing of the application runs then, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.many_blocks import BLOCKS, Fault, blocks, daemon, fit_for_the_next, log_of, renewed, text_of
from tests.integration.site import PATIENCE, Site, Toggles, wait_until

RESTORE_FAULTS = {
    "driver restore": Fault("cuCheckpointProcessRestore", application="restore-fail:1"),
    "attach": Fault("block", application="import-fail-at:1"),
    "no memory": Fault("cuMemCreate", phosd="alloc-oom-at:2"),
    "no descriptor": Fault("cuMemExportToShareableHandle", phosd="export-fail-at:2"),
    "phosd cannot map": Fault("cuMemMap", phosd="map-fail-at:2+"),  # one of them is for hashing, which can do without
    "phosd's context is lost": Fault("Loading GPU memory", phosd="copy-fail-at:2"),
}


@pytest.mark.parametrize("name", RESTORE_FAULTS)
def test_driver_fails_while_restoring(site: Site, name: str) -> None:
    fault = RESTORE_FAULTS[name]
    daemon(site)
    program = blocks(site, "--blocks", "3", SOFTGPU_FAULTS=fault.application)
    image = site.image()
    site.dump(program, image)
    if fault.phosd:
        site.stop_phosd()
        daemon(site, SOFTGPU_FAULTS=fault.phosd)
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert fault.said in result.stderr + (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "the end of what was restored")
    assert program.result() is None
    site.wait_no_gpu_memory()
    site.run("phos-gpu", "verify", str(image))
    wait_until(lambda: "GPU context is lost" not in log_of(site) or renewed(site), "phosd's renewal")
    if fault.phosd:
        site.stop_phosd()
        daemon(site)
    fit_for_the_next(site)


def test_a_pid_of_the_image_that_is_somebody_elses(site: Site) -> None:
    """Here the dumped process's own remains have it, until this test waits for them."""
    program = blocks(site)
    image = site.image()
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log")
    refused = site.restore(image, check=False)
    assert refused.returncode != 0
    said = f"The image needs the pid {program.pid}, and process {program.pid}, which has ended and which its parent has"
    assert said in refused.stderr + (image / "restore.log").read_text()
    site.wait_no_gpu_memory()
    (image / "restore.log").unlink()
    restore = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(lambda: "phos" in text_of(image / "restore.log"), "the plugin")
    site.gone(program)
    assert restore.wait(PATIENCE) == 0
    assert program.wait_result() == "right"


def test_restored_process_that_is_killed_before_it_computes(site: Site) -> None:
    toggles = Toggles(site, "restore")
    program = blocks(site, **toggles.environment)
    image = site.image()
    site.dump(program, image)
    restore = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(lambda: "Restore finished successfully" in text_of(image / "restore.log"), "CRIU")
    toggles.wait(program.pid)
    os.kill(program.pid, signal.SIGKILL)
    assert restore.wait(30) != 0
    wait_until(lambda: not program.alive(), "its end")
    site.wait_no_gpu_memory()
    assert "ended before its GPU state was back" in site.status()["jobs"][-1]["error"]
    fit_for_the_next(site)


@pytest.mark.parametrize("killed", ["criu", "phosd"])
def test_no_task_runs_on_when_somebody_is_killed_at_the_last_moment(site: Site, killed: str) -> None:
    """CRIU has put a tree of tasks together and holds them; its end lets them go. One of them uses no CUDA."""
    (site.folder / "blocks.py").write_text(BLOCKS)
    logs = [site.folder / f"{name}.log" for name in "ab"]
    script = "; ".join(f"{sys.executable} {site.folder}/blocks.py >{log} 2>&1 &" for log in logs).replace("&;", "&")
    family = site.start("/bin/sh", "-c", f"{script} wait; echo RESULT ended")
    wait_until(lambda: all(text_of(log).count("ITERATION") > 3 for log in logs), "both children")
    members = [family.pid, *(child.pid for child in psutil.Process(family.pid).children())]
    assert len(members) == 3
    image = site.image()
    site.dump(family, image)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=f"{killed} killed")
    # Not -d: then nobody but phosd and the plugin is there to end anything.
    words = ["criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log", "-v4"]
    assert site.run(*words, check=False).returncode != 0
    assert "Run late stage hook" in text_of(image / "restore.log")
    for pid in members:
        site.freed(pid)
    assert family.result() is None
    site.run("phosd", "--ensure")
    site.wait_no_gpu_memory()


def test_phosd_can_start_no_threads_to_load_memory(site: Site) -> None:
    """Nothing is left of the restore that fails for that."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="no thread to load,no thread to renew")
    program = blocks(site)
    image = site.image()
    site.dump(program, image)
    assert site.restore(image, check=False).returncode != 0
    site.wait_no_gpu_memory()
    assert [job["state"] for job in site.status()["jobs"] if job["kind"] == "restore"] == ["failed"]
    site.restore(image)
    program.wait_progress()
    assert program.wait_result() == "right"


def test_phosd_can_start_no_thread_to_see_a_restore_end(site: Site) -> None:
    """It is put away all the same, if only when CRIU has ended."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="no thread to end a restore")
    program = blocks(site)
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    program.wait_progress(3)
    again = site.image("again")
    site.dump(program, again)  # nor is the first restore in the way of the next
    site.restore(again)
    assert [job["state"] for job in site.status()["jobs"] if job["kind"] == "restore"] == ["attached"] * 2
    assert program.wait_result() == "right"


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_restore_into_a_fresh_pid_namespace(site: Site, mode: str) -> None:
    """Its pids mean nothing to phosd, which is outside: somebody else has one of them, perhaps."""
    program = blocks(site)
    image = site.image()
    site.dump(program, image)
    site.freed(program.pid)
    program.let_end()
    criu = f"{launcher('criu')} restore --lib phos -D {image} -o restore.log -v4"
    within = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", f"{criu}; exit $?"]
    environment = {**site.environment, "PHOS_RESTORE": mode}
    done = subprocess.run(within, env=environment, stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False)
    assert program.result() == "right", (done.returncode, site.errors(image / "restore.log"))


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_process_beside_the_one_that_was_dumped(site: Site, mode: str) -> None:
    """In a pid namespace of its own it is another process, with memory of its own; where the first is it is refused."""
    program = blocks(site)
    image = site.image()
    site.dump(program, image, "--leave-running")
    refused = site.restore(image, check=False)
    assert refused.returncode != 0
    assert "The process of this image still runs as pid" in site.errors(image / "restore.log")
    criu = f"{launcher('criu')} restore --lib phos -D {image} -o restore.log -v4"
    within = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", f"{criu}; exit $?"]
    other = subprocess.Popen(within, env={**site.environment, "PHOS_RESTORE": mode}, stdin=subprocess.DEVNULL)
    try:

        def both_run() -> bool:
            assert other.poll() is None, site.errors(image / "restore.log")
            known = site.status()["processes"]
            return len(known) == 2 and {process["state"] for process in known} == {"running"}

        wait_until(both_run, "both to run")
        assert len({process["session"] for process in site.status()["processes"]}) == 2
        again = site.image("again")
        site.dump(program, again, "--leave-running")  # whose session is the first one's
        program.let_end()
        wait_until(lambda: program.lines().count("RESULT right") == 2, "both results")
        assert other.wait(PATIENCE) == 0
    finally:
        other.kill()
        other.wait()
    site.wait_no_gpu_memory()


def test_phosd_dies_before_a_process_beside_another_has_its_memory(site: Site) -> None:
    """It still goes by the other one's name then, and the next phosd knows that one alone: who gets nothing of it."""
    daemon(site)
    program = blocks(site)
    image = site.image()
    site.dump(program, image, "--leave-running")
    site.stop_phosd()
    daemon(site, SOFTGPU_COPY_BANDWIDTH=str(1 << 20))
    wait_until(lambda: len(site.status()["processes"]) == 1, "the program to connect anew")
    log, criu = image / "restore.log", f"{launcher('criu')} restore --lib phos -D {image} -o restore.log -v4"
    within = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", f"{criu}; exit $?"]
    other = subprocess.Popen(within, env={**site.environment, "PHOS_RESTORE": "eager"}, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: "Restore finished successfully" in text_of(log), "CRIU")
        os.kill(site.daemon_pid(), signal.SIGKILL)
        daemon(site)
        wait_until(lambda: "was restored beside another one" in log_of(site), "the next phosd to be asked")
        other.wait(PATIENCE)
        assert any("is the memory of another process of its image" in line for line in program.lines())
        program.wait_progress(3)
        assert [process["pid"] for process in site.status()["processes"]] == [program.pid]
        assert program.wait_result() == "right"
    finally:
        other.kill()
        other.wait()


def test_second_restore_of_an_image_that_is_being_restored(site: Site) -> None:
    toggles = Toggles(site, "restore")
    program = blocks(site, **toggles.environment)
    image = site.image()
    site.dump(program, image)
    first = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(lambda: any(job["kind"] == "restore" for job in site.status()["jobs"]), "the first")
    second = site.run("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "second.log", check=False)
    assert second.returncode != 0
    said = (image / "second.log").read_text()
    assert "being restored already" in said or "still runs" in said
    toggles.let_go()
    assert first.wait(30) == 0
    assert program.wait_result() == "right"


def test_two_restores_at_the_same_time(site: Site) -> None:
    images = [site.image(f"image-{n}") for n in range(2)]
    programs = []
    for image in images:
        programs.append(blocks(site))
        site.dump(programs[-1], image)
    running = [
        site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
        for image in images
    ]
    assert [one.wait(60) for one in running] == [0, 0], [site.errors(i / "restore.log") for i in images]
    assert [program.wait_result() for program in programs] == ["right", "right"]


def test_restored_process_can_be_dumped_by_a_phosd_that_never_knew_it(site: Site) -> None:
    """The keeper's record follows the process to its new life."""
    program = blocks(site)
    first = site.image("first")
    site.dump(program, first)
    site.restore(first)
    program.wait_progress()
    os.kill(site.daemon_pid(), signal.SIGKILL)
    daemon(site)
    program.wait_progress(10)
    second = site.image("second")
    site.dump(program, second)
    site.restore(second)
    assert program.wait_result() == "right"


# GPUs.


def test_fewer_gpus_and_another_model_are_refused(site: Site) -> None:
    site.environment["SOFTGPU_DEVICES"] = "2"
    program = blocks(site, "--devices", "2")
    image = site.image()
    site.dump(program, image)
    site.stop_phosd()
    daemon(site, SOFTGPU_DEVICES="1")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "needs 2 GPU" in (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "its end")
    site.stop_phosd()
    daemon(site, SOFTGPU_NAME="Another GPU")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "same model" in (image / "restore.log").read_text()
    site.stop_phosd()
    daemon(site)
    site.restore(image)
    assert program.wait_result() == "right"
