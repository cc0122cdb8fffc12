"""Pools: processes of an image that are restored up to the closed gate, and opened when somebody takes one."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.installation import launcher
from phos.images.reader import Image
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


def take(site: Site, name: str, *options: str) -> dict[str, Any]:
    """``phos-gpu pool take``."""
    taken: dict[str, Any] = json.loads(site.run("phos-gpu", "pool", "take", name, "--json", *options).stdout)
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
    for made in (image, again):
        assert [path.name for path in made.glob("phos-residue-*")] == ["phos-residue-0.raw"], made
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


def other_criu(site: Site, first: str) -> Path:
    """A new phosd, whose CRIU does that first; returns the file that ``first`` calls gate."""
    gate, script = site.folder / "gate", site.folder / "other-criu"
    gate.touch()
    script.write_text(f'#!/bin/sh\n{first.format(gate=gate)}\nunset PHOS_CRIU\nexec {launcher("criu")} "$@"\n')
    script.chmod(0o755)
    site.run("phosd", "--stop")
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


BESIDE = Path(__file__).parent / "programs" / "beside_the_gpu.py"


def test_nothing_of_a_parked_process_runs_with_or_without_cuda(site: Site) -> None:
    words = site.folder / "words"
    words.write_bytes(bytes(4096))

    def word(index: int) -> int:
        return int(struct.unpack_from("<Q", words.read_bytes(), 8 * index)[0])

    program = site.start(sys.executable, str(BESIDE), str(words))
    wait_until(lambda: "READY" in program.lines() and word(2) > 3 < word(3), "the program")
    image = site.image()
    site.dump(program, image)
    create(site, image, 2, "--name", "p")
    before = words.read_bytes()
    with words.open("r+b") as file:
        file.write(struct.pack("<Q", 1))
    time.sleep(1.0)
    assert words.read_bytes()[8:] == before[8:], "neither a thread, nor a child, nor an answer"
    taken = take(site, "p", "--quick")
    wait_until(lambda: word(1) == 1, "an answer")
    thread, child = word(2), word(3)
    wait_until(lambda: word(2) > thread and word(3) > child, "the thread and the child")
    root = psutil.Process(taken["pids"][0])
    assert len(root.children()) == 1
    full(site, 2)
    for process in [*root.children(), root]:
        process.kill()
    ended(site, taken)
    site.run("phos-gpu", "pool", "drop", "p")
    wait_until(lambda: not wardens(site), "the end of the wardens")


LAYERS = 24
LAYERS_SUM = LAYERS * (LAYERS + 1) // 2
LAYERS_PROGRAM = Path(__file__).parent / "programs" / "layers.py"


def layers_image(site: Site, action: str = "sum", layers: int = LAYERS) -> tuple[Program, Path, Path]:
    """A program with 96 MiB that nothing has touched, and its image; it acts when the file is made."""
    go = site.folder / "go"
    program = site.start(sys.executable, str(LAYERS_PROGRAM), action, str(layers), str(go))
    program.wait_iterations(1)
    image = site.image()
    site.dump(program, image)
    return program, image, go


def test_as_many_takes_at_once_as_somebody_wants(site: Site) -> None:
    program, image, go = layers_image(site)
    create(site, image, 2, "--name", "p")
    takes = [site.background("phos-gpu", "pool", "take", "p", "--quick") for _ in range(3)]
    assert [take.wait() for take in takes] == [0, 0, 0]
    go.touch()
    wait_until(lambda: len(results(program)) == 3, "three results")
    assert set(results(program)) == {str(LAYERS_SUM)}
    assert full(site, 2)["taken"] == 3


def slow_copies(site: Site) -> None:
    """A new phosd, whose GPU copies 8 MiB/s: what layers_image() has takes half a minute."""
    site.run("phosd", "--stop")
    site.run("phosd", "--ensure", SOFTGPU_COPY_BANDWIDTH=str(8 << 20))


def loading(site: Site) -> list[str]:
    """How far the processes are that were taken."""
    return [job["state"] for job in site.status()["jobs"] if job["mode"] == "pool"]


def test_what_the_second_waits_for_comes_before_the_rest_of_the_first(site: Site) -> None:
    program, image, go = layers_image(site, "first", 2 * LAYERS)
    slow_copies(site)
    create(site, image, 2, "--name", "p")
    for _ in range(2):
        take(site, "p", "--quick")
    go.touch()
    wait_until(lambda: program.lines().count("ITERATION 2") == 2, "what both need first")
    assert loading(site) == ["loading", "loading"]


def test_a_checkpoint_ends_while_a_process_that_was_taken_is_loaded(site: Site) -> None:
    _, image, _ = layers_image(site, "first", 4 * LAYERS)
    other = site.example("mlp", *LONG)
    other.wait_iterations(3)
    slow_copies(site)
    create(site, image, 1, "--name", "p")
    take(site, "p", "--quick")
    site.run("phos-gpu", "checkpoint", str(other.pid), str(site.folder / "other"))
    assert loading(site) == ["loading"]


def test_another_is_parked_while_the_one_before_is_loaded(site: Site) -> None:
    _, image, _ = layers_image(site, "first", 2 * LAYERS)
    slow_copies(site)
    create(site, image, 1, "--name", "p")
    take(site, "p", "--quick")
    full(site, 1)
    assert loading(site) == ["loading"]


def test_processes_that_share_memory_share_it_when_they_are_taken(site: Site) -> None:
    shared = Path(__file__).parent / "programs" / "shared_memory.py"
    program = site.start(sys.executable, str(shared), "parent", "300", str(site.folder / "handle"))
    program.wait_iterations(10)
    image = site.image()
    site.dump(program, image)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    assert len(taken["pids"]) == 2
    ended(site, taken)
    assert program.result() == "600"


def test_a_hold_for_the_original_does_not_hold_who_is_taken(site: Site) -> None:
    program, image, go = layers_image(site)
    create(site, image, 1, "--name", "p")
    (session,) = {process.session for process in Image.open(image).inventory.processes}
    phosd = site.daemon_pid()
    space = procfs.pid_namespace(os.getpid())
    hold = site.folder / "run" / "hold" / session.hex()
    hold.symlink_to(f"{phosd}:{procfs.start_time(phosd)}:{space}:{space}")
    assert take(site, "p")["attached"] < 20
    go.touch()
    wait_until(lambda: results(program) == [str(LAYERS_SUM)], "the result")


def test_a_take_that_phosd_does_not_live_to_finish_ends_the_process(site: Site) -> None:
    _, image, _ = layers_image(site)
    site.run("phosd", "--stop")
    site.run("phosd", "--ensure", SOFTGPU_COPY_BANDWIDTH=str(4 << 20))
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    taking = site.background("phos-gpu", "pool", "take", "p", "--eager")
    wait_until(lambda: procfs.state(pid) != "T", "the take")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    assert taking.wait() == 3
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the process")
    site.run("phosd", "--ensure")
    full(site, 1)


def test_a_drop_in_the_middle_of_a_take_leaves_the_process_to_its_taker(site: Site) -> None:
    program, image, go = layers_image(site)
    site.run("phosd", "--stop")
    site.run("phosd", "--ensure", SOFTGPU_COPY_BANDWIDTH=str(32 << 20))
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    taking = site.background("phos-gpu", "pool", "take", "p", "--eager")
    wait_until(lambda: procfs.state(pid) != "T", "the take")
    site.run("phos-gpu", "pool", "drop", "p")
    assert taking.wait() == 0
    go.touch()
    wait_until(lambda: results(program) == [str(LAYERS_SUM)], "the result")
    wait_until(lambda: not wardens(site), "the end of the wardens")


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


def test_damaged_data_ends_the_process_and_says_where(site: Site) -> None:
    _, image, _ = layers_image(site)
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    data = next(iter(sorted(image.glob("phos-data-*.raw"))))
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"damage")
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert refused.returncode == 7
    assert "is damaged" in refused.stderr
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the process")
    full(site, 1)


def foreign_image(site: Site) -> Path:
    """Of a program without the frontend: the driver brings all of its GPU memory back."""
    program = site.example("mlp", *LONG, under=False)
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    return image


def test_what_the_driver_keeps_is_what_a_parked_process_costs(site: Site) -> None:
    image = foreign_image(site)
    made = create(site, image, 1, "--name", "p")
    assert made["parked"][0]["gpu_bytes"] >= 2 << 20
    assert made["parked"][0]["host_bytes"] > 1 << 20
    shown = site.run("phos-gpu", "pool", "list").stdout
    assert "1 of 1" in shown
    assert "1 of 1" in site.run("phos-gpu", "status").stdout
    taken = take(site, "p", "--quick")
    assert psutil.pid_exists(taken["pids"][0])


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
    for words, said in (
        ((str(no_image), "--size", "1"), "holds no image"),
        ((str(image), "--size", "0"), "not 0"),
        ((str(image), "--size", "100000"), "not 100000"),
    ):
        refused = site.run("phos-gpu", "pool", "create", *words, check=False)
        assert refused.returncode == 7, refused.stdout
        assert said in refused.stderr
    create(site, image, 1, "--name", "p")
    again = site.run("phos-gpu", "pool", "create", str(image), "--size", "1", "--name", "p", check=False)
    assert "There is a pool p already" in again.stderr
    assert "There is no pool q" in site.run("phos-gpu", "pool", "take", "q", check=False).stderr
