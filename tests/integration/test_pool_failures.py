"""Pools: whose processes, phosd, image or memory are gone, that have nothing to give, or that cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.installation import launcher
from tests.integration.pool_commands import (
    LONG,
    MLP,
    create,
    dump_at,
    ended,
    full,
    layers_image,
    pool,
    take,
    wardens,
)
from tests.integration.site import Program, Site, Toggles, wait_until, words


def test_a_parked_process_that_is_killed_is_replaced(site: Site) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "its end")
    wait_until(lambda: [pid] not in [one["pids"] for one in pool(site)["parked"]], "phosd to notice it")
    again = full(site, 1)
    assert again["parked"][0]["pids"] != [pid]
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() is not None


def test_phosd_can_start_no_thread_to_load_one_that_is_taken(site: Site) -> None:
    """It is ended, and nothing is left of its memory."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="no thread to load")
    image = dump_at(site, site.example("mlp", *MLP))
    (parked,) = create(site, image, 1, "--name", "p")["parked"]
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert "cannot load its memory: can't start new thread" in refused.stderr
    site.freed(parked["pids"][0])
    site.run("phos-gpu", "pool", "drop", "p")
    site.wait_no_gpu_memory()


def test_no_image_is_mixed_with_another_that_has_come_to_its_place(site: Site) -> None:
    """CRIU finds it by its name; what the GPU had comes from what phosd has open."""
    expected = site.reference("mlp", *MLP[:2])
    site.environment["PHOS_REDUCERS"] = "none"  # a file of what the driver saved is not found, and so saves the day
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="swapped image")
    program = site.example("mlp", *MLP)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image, "--leave-running")
    program.wait_progress(20)
    site.dump(program, site.image(f"{image.name}-other"))
    refused = site.run("phos-gpu", "pool", "create", str(image), "--size", "1", "--name", "p", check=False)
    assert "Another image has been written in its place" in refused.stderr
    image.rename(f"{image}-other")
    image.with_name(f"{image.name}-away").rename(image)
    create(site, image, 1, "--name", "p")
    ended(site, take(site, "p"))
    assert program.result() == expected


def test_parked_processes_end_with_phosd_and_a_new_one_parks_others(site: Site) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    os.kill(site.daemon_pid(), signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the parked process")
    site.run("phosd", "--ensure")
    full(site, 1)
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() is not None


def test_a_pool_whose_image_is_away_for_a_while_is_not_forgotten(site: Site) -> None:
    image = dump_at(site, site.example("mlp", *MLP))
    create(site, image, 1, "--name", "p")
    site.stop_phosd()
    away = image.rename(site.folder / "away")
    site.run("phosd", "--ensure")
    assert (pool(site)["state"], pool(site)["name"]) == ("failed", "p")
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert f"Its image at {image} is gone" in refused.stderr
    site.stop_phosd()
    away.rename(image)
    site.run("phosd", "--ensure")
    full(site, 1)
    site.run("phos-gpu", "pool", "drop", "p")


def test_a_process_that_was_taken_outlives_phosd(site: Site) -> None:
    expected = site.reference("mlp", *LONG[:2])
    program = site.example("mlp", *LONG)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    site.run("phosd", "--ensure")
    ended(site, taken)
    assert program.result() == expected


def inside(pid: int, *words: str) -> list[str]:
    """A command in the namespaces of a process that came from a pool."""
    return ["nsenter", "--target", str(pid), "--pid", "--mount", "--", *words]


@pytest.mark.parametrize("keeper", ["lives", "is killed"])
def test_no_phosd_starts_among_those_of_a_pool(site: Site, keeper: str) -> None:
    """It would take everybody else's processes for dead, and drop their memory."""
    expected = site.reference("mlp", *LONG[:2])
    program, other = site.example("mlp", *LONG), site.example("mlp", *LONG)
    other.wait_iterations(3)
    site.dump(other, site.image("before"), "--leave-running")  # the keeper has its memory from here on
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    (keeping,) = (p.pid for p in site.processes() if any(word.endswith("keeper.py") for word in words(p)))
    os.kill(site.daemon_pid(), signal.SIGKILL)
    if keeper == "is killed":
        os.kill(keeping, signal.SIGKILL)
    again = site.image("again")
    number = procfs.inner_pid(taken["pids"][0])
    dump = [str(launcher("criu")), "dump", "--lib", "phos", "-t", str(number), "-D", str(again), "--leave-running"]
    done = subprocess.run(
        inside(taken["pids"][0], *dump), env=site.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "outside: phosd --ensure" in done.stderr, done.stderr
    assert not any("phos.gpu_engine.daemon" in words(process) for process in site.processes())
    site.run("phosd", "--ensure")
    if keeper == "lives":
        site.dump(other, site.image("after"), "--leave-running")
    assert other.wait_result() == expected
    ended(site, taken)
    assert program.result() == expected


def test_a_checkpoint_of_one_that_was_taken_outlives_phosd(site: Site) -> None:
    """CRIU, in its namespaces, cannot have another phosd; whoever asked for the checkpoint can."""
    expected = site.reference("mlp", *LONG[:2])
    program = site.example("mlp", *LONG, SOFTGPU_TOGGLE_HOLD=str(site.folder / "toggles"))
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    again = site.folder / "again"
    toggles = Toggles(site, "checkpoint")
    checkpoint = site.background("phos-gpu", "checkpoint", "--leave-running", str(taken["pids"][0]), str(again))
    wait_until((again / "dump.log").exists, "CRIU")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    toggles.let_go()
    assert checkpoint.wait(60) != 0
    ended(site, taken)
    assert program.result() == expected


def other_criu(site: Site, first: str) -> Path:
    """A new phosd, whose CRIU does that first; returns the file that ``first`` calls gate."""
    gate, script = site.folder / "gate", site.folder / "other-criu"
    gate.touch()
    script.write_text(f'#!/bin/sh\n{first.format(gate=gate)}\nunset PHOS_CRIU\nexec {launcher("criu")} "$@"\n')
    script.chmod(0o755)
    site.stop_phosd()
    site.run("phosd", "--ensure", PHOS_CRIU=str(script))
    return gate


def slow_criu(site: Site) -> Path:
    """A new phosd, whose CRIU waits as long as this file exists."""
    return other_criu(site, "while [ -e {gate} ]; do sleep 0.05; done")


def test_an_empty_pool_is_waited_for_or_says_no(site: Site) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    gate = slow_criu(site)
    site.run("phos-gpu", "pool", "create", str(image), "--size", "1", "--name", "p", "--no-wait")
    refused = site.run("phos-gpu", "pool", "take", "p", "--no-wait", check=False)
    assert refused.returncode == 7
    assert "Pool p has no parked process." in refused.stderr
    refused = site.run("phos-gpu", "pool", "take", "p", "--timeout", "0.2", check=False)
    assert "Pool p has no parked process within 0 s." in refused.stderr
    waiting = site.background("phos-gpu", "pool", "take", "p", "--quick")
    time.sleep(1.0)
    assert waiting.poll() is None
    gate.unlink()
    assert waiting.wait() == 0
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() is not None


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_an_image_that_is_gone_or_another_spoils_its_pool(site: Site, what: str) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    commit = image / "phos-commit.img"
    if what == "removed":
        commit.unlink()
    else:
        commit.write_bytes(commit.read_bytes())
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert refused.returncode == 7
    assert ("image is gone" if what == "removed" else "Another image") in refused.stderr
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the parked process")
    assert pool(site)["state"] == "failed"
    site.run("phos-gpu", "pool", "drop", "p")


def fill_memory(site: Site, left: int) -> Program:
    """Take the GPU's memory but for so many MiB, until the program is killed."""
    script = str(Path(__file__).parent / "programs" / "fills_memory.py")
    filler = site.start(sys.executable, script, str(left), under=False)
    wait_until(lambda: "FULL" in filler.lines() or not filler.alive(), "a full GPU")
    assert "FULL" in filler.lines(), filler.lines()
    return filler


def parked(site: Site) -> list[dict[str, Any]]:
    """Who is parked, without what each has of the host's memory: that is of the moment."""
    return [{key: value for key, value in one.items() if key != "host_bytes"} for one in pool(site)["parked"]]


def test_too_little_memory_at_a_take_leaves_the_process_parked(site: Site) -> None:
    expected = site.reference("mlp", *MLP[:2])
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    before = parked(site)
    filler = fill_memory(site, 0)
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert refused.returncode == 7, refused.stdout
    assert "GB free" in refused.stderr
    assert parked(site) == before
    os.kill(filler.pid, signal.SIGKILL)
    site.gone(filler)
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() == expected


def test_a_drop_ends_the_takes_that_wait(site: Site) -> None:
    _, image, _ = layers_image(site)
    gate = slow_criu(site)
    site.run("phos-gpu", "pool", "create", str(image), "--size", "1", "--name", "p", "--no-wait")
    waiting = site.background("phos-gpu", "pool", "take", "p")
    time.sleep(1.0)
    dropping = site.background("phos-gpu", "pool", "drop", "p")
    assert waiting.wait() == 7
    gate.unlink()
    assert dropping.wait() == 0
    wait_until(lambda: not wardens(site), "the end of the wardens")


def test_a_gpu_without_room_for_a_context_refuses_the_pool(site: Site) -> None:
    program = site.example("mlp", *LONG, under=False, SOFTGPU_FAULTS="restore-oom")
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    refused = site.run("phos-gpu", "pool", "create", str(image), "--size", "2", check=False)
    assert refused.returncode == 7
    assert "there is no pool" in refused.stderr
    assert "CUDA_ERROR_OUT_OF_MEMORY" in refused.stderr
    assert json.loads(site.run("phos-gpu", "pool", "list", "--json").stdout) == {"pools": []}
    wait_until(lambda: not wardens(site), "the end of the wardens")


def test_a_refill_that_fails_is_tried_again(site: Site) -> None:
    _, image, _ = layers_image(site)
    gate = other_criu(site, "[ ! -e {gate} ] || exit 1")
    gate.unlink()
    create(site, image, 1, "--name", "p")
    gate.touch()
    take(site, "p", "--quick")
    wait_until(lambda: pool(site)["state"] == "short", "a refill that fails")
    assert "CRIU could not restore it" in pool(site)["error"]
    refused = site.run("phos-gpu", "pool", "take", "p", "--no-wait", check=False)
    assert "The last could not be parked: CRIU could not restore it" in refused.stderr
    gate.unlink()
    made = full(site, 1)
    assert (made["state"], made["error"]) == ("full", "")


def test_what_cannot_be_a_pool_is_refused(site: Site) -> None:
    _, image, _ = layers_image(site)
    no_image = site.image("empty")
    for options, status, said in (
        ((str(no_image), "--size", "1"), 7, "holds no image"),
        ((str(image), "--size", "0"), 2, "0 is not in the range"),
        ((str(image), "--size", "100000"), 2, "100000 is not in the range"),
    ):
        refused = site.run("phos-gpu", "pool", "create", *options, check=False)
        assert refused.returncode == status, refused.stdout
        assert said in refused.stderr
    create(site, image, 1, "--name", "p")
    again = site.run("phos-gpu", "pool", "create", str(image), "--size", "1", "--name", "p", check=False)
    assert "There is a pool p already" in again.stderr
    assert "There is no pool q" in site.run("phos-gpu", "pool", "take", "q", check=False).stderr
