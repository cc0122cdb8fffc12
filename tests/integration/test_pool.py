"""Pools: processes of an image that are restored up to the closed gate, and opened when somebody takes one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.installation import launcher
from tests.integration.site import Program, Site, wait_until

LONG = ("--iterations", "200", "--iteration-seconds", "0.1")
"""Of a program that lives longer than several commands take."""

MLP = ("--iterations", "40", "--iteration-seconds", "0.02")


def dump_at(site: Site, program: Program, iterations: int = 5) -> Path:
    """A checkpoint that ends the program."""
    program.wait_iterations(iterations)
    image = site.image()
    site.dump(program, image)
    return image


def create(site: Site, image: Path, size: int, *options: str) -> dict[str, Any]:
    """``phos-gpu pool create``."""
    words = ("phos-gpu", "pool", "create", str(image), "--size", str(size), "--json", *options)
    made: dict[str, Any] = json.loads(site.run(*words).stdout)
    return made


def take(site: Site, name: str, *options: str, **changes: str) -> dict[str, Any]:
    """``phos-gpu pool take``."""
    taken: dict[str, Any] = json.loads(site.run("phos-gpu", "pool", "take", name, "--json", *options, **changes).stdout)
    return taken


def pool(site: Site) -> dict[str, Any]:
    """The only pool."""
    (found,) = json.loads(site.run("phos-gpu", "pool", "list", "--json").stdout)["pools"]
    return dict(found)


def full(site: Site, size: int) -> dict[str, Any]:
    """Wait until so many are parked."""
    wait_until(lambda: sum(p["state"] == "parked" for p in pool(site)["parked"]) >= size, f"{size} parked processes")
    return pool(site)


def test_a_parked_process_runs_nothing_and_computes_on_when_it_is_taken(site: Site) -> None:
    expected = site.example("mlp", *MLP[:2], under=False).wait_result()
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    before = program.lines()
    made = create(site, image, 1)
    (parked,) = made["parked"]
    (pid,) = parked["pids"]
    assert procfs.state(pid) == "T"
    assert procfs.inner_pid(pid) == program.pid
    time.sleep(0.5)
    assert program.lines() == before
    taken = take(site, made["name"])
    assert taken["pids"] == [pid]
    assert 0 < taken["attached"] < 10
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the process")
    assert program.result() == expected
    full(site, 1)


def ended(site: Site, taken: dict[str, Any]) -> None:
    """Wait for the end of what was taken."""
    wait_until(lambda: not any(map(psutil.pid_exists, taken["pids"])), f"the end of processes {taken['pids']}")


def results(program: Program) -> list[str]:
    """All results that are in a file to which several processes write."""
    return [line.split()[1] for line in program.lines() if line.startswith("RESULT")]


def test_several_from_one_image_compute_at_once_beside_the_original(site: Site) -> None:
    expected = site.example("mlp", *LONG[:2], under=False).wait_result()
    program = site.example("mlp", *LONG)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image, "--leave-running")
    made = create(site, image, 2, "--name", "two")
    assert made["state"] == "full"
    first, second = take(site, "two", "--quick"), take(site, "two", "--quick")
    third = take(site, str(image), "--quick")
    pids = {pid for taken in (first, second, third) for pid in taken["pids"]} | {program.pid}
    assert len(pids) == 4
    assert all(psutil.pid_exists(pid) for pid in pids)
    sessions = [p["session"] for p in site.status()["processes"] if p["pid"] in pids]
    assert len(set(sessions)) == 4
    for taken in (first, second, third):
        ended(site, taken)
    assert program.wait_result() == expected
    assert set(results(program)) == {expected}
    assert len(results(program)) >= 2, "they share one file, and may write over one another's lines"
    assert full(site, 2)["taken"] == 3


def test_a_process_that_was_taken_can_be_checkpointed_and_its_image_restored(site: Site) -> None:
    expected = site.example("mlp", *LONG[:2], under=False).wait_result()
    program = site.example("mlp", *LONG)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    again = site.folder / "again"
    site.run("phos-gpu", "checkpoint", str(taken["pids"][0]), str(again))
    ended(site, taken)
    assert program.result() is None
    site.run("phos-gpu", "pool", "drop", "p")
    site.restore(again)
    assert program.wait_result() == expected


def test_a_process_that_was_taken_can_be_checkpointed_while_it_runs(site: Site) -> None:
    expected = site.example("mlp", *LONG[:2], under=False).wait_result()
    program = site.example("mlp", *LONG)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    site.run("phos-gpu", "checkpoint", "--leave-running", str(taken["pids"][0]), str(site.folder / "again"))
    ended(site, taken)
    assert program.result() == expected


def test_eager_takes_compute_when_all_memory_is_there(site: Site) -> None:
    expected = site.example("mlp", *MLP[:2], under=False).wait_result()
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p", "--eager")
    assert taken["last_byte"] <= taken["attached"]
    assert taken["on_demand_bytes"] == 0
    ended(site, taken)
    assert program.result() == expected


def test_a_dropped_pool_leaves_nothing_behind(site: Site) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    site.status()
    held = site.gpu_memory()
    made = create(site, image, 2, "--name", "p")
    pids = [pid for parked in made["parked"] for pid in parked["pids"]]
    assert len(pids) == 2
    site.run("phos-gpu", "pool", "drop", "p")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the parked processes")
    assert json.loads(site.run("phos-gpu", "pool", "list", "--json").stdout) == {"pools": []}
    assert site.status()["processes"] == []
    wait_until(lambda: site.gpu_memory() <= held, "GPU memory to be given back")
    wait_until(lambda: not wardens(site), "the end of the wardens")


def wardens(site: Site) -> list[int]:
    """The first processes of the pid namespaces that were made."""
    return [p.pid for p in site.processes() if p.name() == "phos-pool"]


def test_a_parked_process_that_is_killed_is_replaced(site: Site) -> None:
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "its end")
    again = full(site, 1)
    assert again["parked"][0]["pids"] != [pid]
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() is not None


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


def test_a_process_that_was_taken_outlives_phosd(site: Site) -> None:
    expected = site.example("mlp", *LONG[:2], under=False).wait_result()
    program = site.example("mlp", *LONG)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    site.run("phosd", "--ensure")
    ended(site, taken)
    assert program.result() == expected


def slow_criu(site: Site) -> Path:
    """A new phosd, whose CRIU waits as long as this file exists."""
    gate, script = site.folder / "gate", site.folder / "slow-criu"
    gate.touch()
    script.write_text(
        f"""#!/bin/sh
while [ -e {gate} ]; do sleep 0.05; done
unset PHOS_CRIU
exec {launcher("criu")} "$@"
"""
    )
    script.chmod(0o755)
    site.run("phosd", "--stop")
    site.run("phosd", "--ensure", PHOS_CRIU=str(script))
    return gate


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


def test_too_little_memory_at_a_take_leaves_the_process_parked(site: Site) -> None:
    expected = site.example("mlp", *MLP[:2], under=False).wait_result()
    program = site.example("mlp", *MLP)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    before = pool(site)["parked"]
    filler = fill_memory(site, 0)
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert refused.returncode == 7, refused.stdout
    assert "GB free" in refused.stderr
    assert pool(site)["parked"] == before
    os.kill(filler.pid, signal.SIGKILL)
    site.gone(filler)
    taken = take(site, "p")
    ended(site, taken)
    assert program.result() == expected
