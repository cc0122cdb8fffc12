"""Pools: what is done while the memory of a process that was taken is still on its way, and what ends that."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil

from phos.gpu_engine import procfs
from tests.integration.pool_commands import (
    LAYERS,
    LAYERS_SUM,
    LONG,
    create,
    full,
    layers_image,
    results,
    take,
    wardens,
)
from tests.integration.site import Site, wait_until


def slow_copies(site: Site, rate: int = 8 << 20) -> None:
    """A new phosd, whose GPU copies so many bytes a second: with 8 MiB, what layers_image() has takes half a minute."""
    site.stop_phosd()
    site.run("phosd", "--ensure", SOFTGPU_COPY_BANDWIDTH=str(rate))


def begin_take(site: Site, image: Path) -> tuple[int, subprocess.Popen[bytes]]:
    """A process of a new pool p that is being opened eagerly, and the command that opens it."""
    made = create(site, image, 1, "--name", "p")
    (pid,) = made["parked"][0]["pids"]
    taking = site.background("phos-gpu", "pool", "take", "p", "--eager")
    wait_until(lambda: procfs.state(pid) != "T", "the take")
    return pid, taking


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


def test_a_process_is_taken_while_another_is_restored_from_the_same_image(site: Site) -> None:
    """Each command waits for what it has begun."""
    program, image, go = layers_image(site)
    site.stop_phosd()
    hold = site.folder / "copies-held"
    site.run("phosd", "--ensure", SOFTGPU_COPY_HOLD=str(hold), SOFTGPU_COPY_HOLD_BYTES="64K")
    create(site, image, 1, "--name", "p")
    hold.touch()
    restoring = site.background("phos-gpu", "restore", str(image))
    wait_until(lambda: "loading" in [job["state"] for job in site.status()["jobs"] if job["mode"] != "pool"], "it")
    taking = site.background("phos-gpu", "pool", "take", "p")
    wait_until(lambda: loading(site) == ["loading"], "the take")
    hold.unlink()
    assert [command.wait() for command in (restoring, taking)] == [0, 0]
    go.touch()
    wait_until(lambda: len(results(program)) == 2, "two results")
    assert set(results(program)) == {str(LAYERS_SUM)}


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
    slow_copies(site, 2 << 20)  # a pool whose process is taken waits before it parks another
    create(site, image, 1, "--name", "p")
    take(site, "p", "--quick")
    full(site, 1)
    assert loading(site) == ["loading"]


def test_a_take_that_phosd_does_not_live_to_finish_ends_the_process(site: Site) -> None:
    _, image, _ = layers_image(site)
    slow_copies(site, 4 << 20)
    pid, taking = begin_take(site, image)
    os.kill(site.daemon_pid(), signal.SIGKILL)
    assert taking.wait() == 3
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the process")
    site.run("phosd", "--ensure")
    full(site, 1)


def test_a_drop_in_the_middle_of_a_take_leaves_the_process_to_its_taker(site: Site) -> None:
    program, image, go = layers_image(site)
    slow_copies(site, 32 << 20)
    _, taking = begin_take(site, image)
    site.run("phos-gpu", "pool", "drop", "p")
    assert taking.wait() == 0
    go.touch()
    wait_until(lambda: results(program) == [str(LAYERS_SUM)], "the result")
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
