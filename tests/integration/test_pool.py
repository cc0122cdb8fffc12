"""Pools: processes of an image that are restored up to the closed gate, and opened when somebody takes one."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path

import psutil

from phos.gpu_engine import procfs
from phos.images.reader import Image
from tests.integration.pool_commands import (
    LAYERS_SUM,
    LONG,
    MLP,
    create,
    dump_at,
    ended,
    full,
    layers_image,
    results,
    take,
    wardens,
)
from tests.integration.site import Site, wait_until


def test_a_parked_process_runs_nothing_and_computes_on_when_it_is_taken(site: Site) -> None:
    expected = site.reference("mlp", *MLP[:2])
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
    ended(site, taken)
    assert program.result() == expected
    full(site, 1)


def test_the_image_s_path_may_be_any_bytes(site: Site) -> None:
    program = site.example("mlp", *MLP)
    program.wait_iterations(5)
    image = site.image(os.fsdecode(b"\xff"))
    site.dump(program, image)
    create(site, image, 1, "--name", "any")
    taken = take(site, "any")
    assert taken["image"] == f"{site.folder}/?"
    ended(site, taken)
    full(site, 1)


def test_options_for_criu_come_from_a_file_of_who_wants_the_pool(site: Site) -> None:
    """Not of who has started phosd; and from the same one after another phosd has come."""
    site.run("phosd", "--ensure")
    image = dump_at(site, site.example("mlp", *MLP))
    pidfile = site.folder / "pid"
    settings = site.folder / "criu.conf"
    settings.write_text(f"pidfile {pidfile}\n")
    words = ("phos-gpu", "pool", "create", str(image), "--size", "1")
    site.run(*words, CRIU_CONFIG_FILE=os.path.relpath(settings))
    assert pidfile.exists()
    pidfile.unlink()
    site.stop_phosd()
    site.run("phosd", "--ensure")
    full(site, 1)
    assert pidfile.exists()


def test_several_from_one_image_compute_at_once_beside_the_original(site: Site) -> None:
    expected = site.reference("mlp", *LONG[:2])
    program = site.example("mlp", *LONG)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image, "--leave-running")
    made = create(site, image, 2, "--name", "two")
    assert made["state"] == "full"
    first, second = take(site, "two", "--quick"), take(site, "two", "--quick")
    third = take(site, os.path.relpath(image), "--quick")
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
    expected = site.reference("mlp", *LONG[:2])
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
    expected = site.reference("mlp", *LONG[:2])
    program = site.example("mlp", *LONG)
    image = dump_at(site, program)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    site.run("phos-gpu", "checkpoint", "--leave-running", str(taken["pids"][0]), str(site.folder / "again"))
    ended(site, taken)
    assert program.result() == expected


def test_eager_takes_compute_when_all_memory_is_there(site: Site) -> None:
    expected = site.reference("mlp", *MLP[:2])
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


def test_nobody_of_a_tree_outlives_a_load_that_fails(site: Site) -> None:
    """Nor do those without CUDA, when all computed already."""
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(1 << 20)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="wrong when taken")
    words = site.folder / "words"
    words.write_bytes(bytes(4096))
    program = site.start(sys.executable, str(BESIDE), str(words), SOFTGPU_COPY_BANDWIDTH="0")
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    site.dump(program, image)
    create(site, image, 1, "--name", "p")
    refused = site.run("phos-gpu", "pool", "take", "p", check=False)
    assert "A guess was wrong." in refused.stderr
    site.run("phos-gpu", "pool", "drop", "p")
    wait_until(lambda: not wardens(site), "the end of the wardens, and so of whom they look after")


def test_as_many_takes_at_once_as_somebody_wants(site: Site) -> None:
    program, image, go = layers_image(site)
    create(site, image, 2, "--name", "p")
    takes = [site.background("phos-gpu", "pool", "take", "p", "--quick") for _ in range(3)]
    assert [take.wait() for take in takes] == [0, 0, 0]
    go.touch()
    wait_until(lambda: len(results(program)) == 3, "three results")
    assert set(results(program)) == {str(LAYERS_SUM)}
    assert full(site, 2)["taken"] == 3


def test_processes_that_share_memory_share_it_when_they_are_taken(site: Site) -> None:
    shared = Path(__file__).parent / "programs" / "shared_memory.py"
    program = site.until_awaited(sys.executable, str(shared), "parent", "1000", str(site.folder / "handle"))
    program.wait_iterations(10)
    image = site.image()
    site.dump(program, image)
    create(site, image, 1, "--name", "p")
    taken = take(site, "p")
    assert len(taken["pids"]) == 2
    ended(site, taken)
    assert program.result() == "2000"


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
