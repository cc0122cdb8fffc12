"""A program that computes on two GPUs at once: checkpointed while it does, restored, and compared word by word."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.pool_commands import create, full, take
from tests.integration.site import Program, Site, wait_until
from tests.windows.builds import HERE, build

SEED, THREADS, MEGABYTES, NAP_US, RARE = 3, 4, 32, 1500, 0


@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_what_two_gpus_hold_is_there_again(site: Site, tmp_path: Path, protocol: str, how: str) -> None:
    site.environment |= {"SOFTGPU_DEVICES": "2", "NO_FORK": "1"}
    numbers = map(str, (SEED, THREADS, MEGABYTES, NAP_US, RARE))
    program = site.start(str(build(tmp_path)), str(HERE / "kernels.ptx"), *numbers)
    wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program to begin")
    image = site.image()
    command = ("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol)
    site.run(*command)
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert len(said["gpus"]) == 2, said
    site.run("phos-gpu", "verify", str(image))
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    site.restore(image, PHOS_RESTORE=how)
    os.kill(program.pid, signal.SIGUSR1)
    wait_until(lambda: not program.alive(), "the end of the program")
    assert program.lines()[-1] == "GOOD"


@dataclass
class OnTheFirst:
    """A program that has computed on the first of phosd's two GPUs, the only one that it sees; it is in an image."""

    program: Program
    image: Path


@pytest.fixture
def first(site: Site) -> OnTheFirst:
    site.environment |= {"SOFTGPU_DEVICES": "2"}
    site.run("phosd", "--ensure")
    program = site.example("mlp", "--iterations", "100000", SOFTGPU_DEVICES="1")
    program.wait_iterations(2)
    wait_until(lambda: (devices(site), held(site)) == ([0], [True, False]), "phosd to know of its memory")
    image = site.image("first")
    site.dump(program, image)
    return OnTheFirst(program, image)


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_on_another_gpu_it_is_that_one_s_process_from_then_on(site: Site, first: OnTheFirst, how: str) -> None:
    """Its memory stays where it computes, over generations and phosds, until it is told to go elsewhere."""
    program, second = first.program, site.image("second")
    site.restore(first.image, PHOS_RESTORE=how, PHOS_RESTORE_GPUS="0=1")
    program.wait_progress()
    assert (devices(site), held(site)) == ([1], [False, True])
    site.stop_phosd()
    site.run("phosd", "--ensure")
    wait_until(lambda: devices(site) == [1], "the program to connect anew")
    site.dump(program, second)
    site.restore(second, PHOS_RESTORE=how)
    program.wait_progress()
    assert (devices(site), held(site)) == ([1], [False, True])
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    uuid = site.status()["gpus"][0]["uuid"]
    site.run("phos-gpu", "restore", str(second), "--gpu", f"1={uuid}", *(["--lazy"] if how == "lazy" else []))
    program.wait_progress()
    assert (devices(site), held(site)) == ([0], [True, False])


def test_where_it_is_to_come_is_looked_at_before_anything_is_done(site: Site, first: OnTheFirst) -> None:
    """A GPU that neither has is named, with those that there are; nothing is restored, and no memory is left."""
    for words, said, status in (
        ("0=2", "There is no GPU 2 here for the image's GPU 0. phosd has 0 (GPU-", 7),
        ("2=0", "The image has no GPU 2 that could come to 0; it has 0, 1 ", 7),
        ("0", "says of no GPU where it comes", 2),
    ):
        told = site.run("phos-gpu", "restore", str(first.image), "--gpu", words, check=False)
        assert (told.returncode, said in told.stderr) == (status, True), told.stderr
        refused = site.restore(first.image, check=False, PHOS_RESTORE_GPUS=words)
        assert refused.returncode != 0
        assert said in site.errors(first.image / "restore.log")
        pool = site.run("phos-gpu", "pool", "create", str(first.image), "--size", "1", "--gpu", words, check=False)
        assert (pool.returncode, said in pool.stderr) == (status, True), pool.stderr
    assert not first.program.alive()
    site.wait_no_gpu_memory()
    site.restore(first.image)
    first.program.wait_progress()


def test_a_pool_parks_its_processes_on_the_gpu_that_it_was_told(site: Site, first: OnTheFirst) -> None:
    """Also those of a later phosd, which knows no more of what was asked for than the one before had written down."""
    create(site, first.image, 1, "--gpu", "0=1")
    assert take(site, "first")["pids"]
    assert (devices(site), held(site)) == ([1], [False, True])
    full(site, 1)
    site.stop_phosd()
    site.run("phosd", "--ensure")
    full(site, 1)
    assert take(site, "first")["pids"]
    wait_until(lambda: devices(site) == [1, 1], "both to be known to phosd")
    assert held(site) == [False, True]


def test_a_guarded_job_is_moved_once(site: Site, first: OnTheFirst) -> None:
    """Its guard restores it where it was: what says where an image comes, in the environment, is not for later ones."""
    site.restore(first.image, PHOS_RESTORE_GPUS="0=1")
    first.program.wait_progress()
    words = ("phos-gpu", "guard", "--images", str(site.folder / "images"), "--json", "--interval", "0.5")
    guarding = site.start(*words, str(first.program.pid), under=False, PHOS_RESTORE_GPUS="1=0")
    wait_until(lambda: any('"checkpoint"' in line for line in guarding.lines()), "a checkpoint")
    os.kill(first.program.pid, signal.SIGKILL)
    site.gone(first.program)
    wait_until(lambda: any('"restored"' in line for line in guarding.lines()), "the job to be restored")
    assert devices(site) == [1]
    os.kill(guarding.pid, signal.SIGTERM)


def devices(site: Site) -> list[int]:
    """The GPUs that the one program sees, by phosd's numbers."""
    return [device for process in site.status()["processes"] for device in process["devices"]]


def held(site: Site) -> list[bool]:
    """Whether phosd holds memory of it, on each GPU."""
    return [bool(gpu["held"]) for gpu in site.status()["gpus"]]
