"""A place for the image that fills up or goes away, and what is left behind by many dumps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.dumped import LAYERS_SUM, Dumped
from tests.integration.many_blocks import blocks, end, fit_for_the_next, nothing_of_ours, phosd_descriptors, text_of
from tests.integration.pool_commands import create, take
from tests.integration.site import Site, Toggles, wait_until


@contextmanager
def small_disk(site: Site, kilobytes: int) -> Iterator[Path]:
    """A tmpfs of that size."""
    folder = site.folder / f"disk-{kilobytes}"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full_at_every_step(site: Site) -> None:
    """From too small for the reserve, over GPU data and CRIU's pages, to a few pages short at the commit."""
    program = blocks(site, "--served", "--size", str(4 << 20), "--seconds", "0.005")
    fitting = site.image("fitting")
    site.dump(program, fitting, "--leave-running")
    ours = sum(path.stat().st_blocks * 512 for path in fitting.glob("phos-*"))
    whole = ours + sum(path.stat().st_blocks * 512 for path in fitting.glob("*.img") if not path.match("phos-*"))
    before = phosd_descriptors(site)
    sizes = [64, 4096, ours // 1024 + 256, whole * 3 // 4096, whole // 1024 - 64, whole // 1024 - 16, whole // 1024 - 4]
    for size in sizes:
        with small_disk(site, size) as disk:
            image = disk / "image"
            image.mkdir()
            log = site.folder / f"{size}.log"
            result = site.dump(program, image, "-o", str(log), "-W", str(site.folder), check=False)
            if result.returncode == 0:  # compiled or mapped a little less this time
                pytest.fail(f"a disk of {size} KiB took an image of {whole >> 10} KiB")
            assert nothing_of_ours(image), (size, sorted(p.name for p in image.iterdir()))
            said = result.stderr + text_of(log)
            assert "No space" in said or "is full" in said, [line for line in said.splitlines() if "Error" in line]
            program.wait_progress()
    wait_until(lambda: len(phosd_descriptors(site)) <= len(before), "phosd to close what it opened")
    with small_disk(site, whole // 1024 + 8192) as disk:
        image = disk / "image"
        image.mkdir()
        site.dump(program, image, "-o", str(site.folder / "last.log"), "-W", str(site.folder))
        site.restore(image, "-o", str(site.folder / "restore.log"), "-W", str(site.folder))
        program.wait_progress()
        end(site, program)


@contextmanager
def read_only(directory: Path) -> Iterator[Path]:
    """A directory that shows another one, in which nothing can be written."""
    shown = directory.with_name("shown")
    shown.mkdir()
    subprocess.run(["mount", "--bind", str(directory), str(shown)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(shown)], check=True)
        yield shown
    finally:
        subprocess.run(["umount", "-l", str(shown)], check=True)


@pytest.mark.parametrize("options", [(), ("--lazy",)])
def test_an_image_on_a_read_only_file_system_is_restored(site: Site, options: tuple[str, ...]) -> None:
    dumped = Dumped(site, site.folder)
    held = sorted(dumped.image.iterdir())
    temporary = site.folder / "tmp"
    temporary.mkdir()
    with read_only(dumped.image) as image:
        dumped.program.output.write_bytes(dumped.output)
        done = site.run("phos-gpu", "restore", *options, str(image), TMPDIR=str(temporary))
        assert f"Restored process {dumped.program.pid} from {image}" in done.stdout
        assert dumped.program.wait_result() == LAYERS_SUM
        assert list(temporary.iterdir()) == []
        dumped.program.output.unlink()  # CRIU misses it
        failed = site.run("phos-gpu", "restore", *options, str(image), check=False, TMPDIR=str(temporary))
        assert failed.returncode == 7
        (kept,) = temporary.iterdir()
        assert failed.stderr.rstrip().endswith(f"CRIU's log: {kept}/restore.log")
        assert "install.sh" not in failed.stderr
        assert dumped.program.output.name in site.errors(kept / "restore.log")
    assert sorted(dumped.image.iterdir()) == held


@pytest.mark.parametrize("options", [(), ("--lazy",)])
def test_an_image_of_links_is_restored(site: Site, options: tuple[str, ...]) -> None:
    """What phos-gpu verify finds whole."""
    dumped = Dumped(site, site.folder)
    links = site.folder / "links"
    subprocess.run(["cp", "-rs", str(dumped.image), str(links)], check=True)
    site.run("phos-gpu", "verify", str(links))
    site.run("phos-gpu", "image", "pin", str(links))
    site.run("phos-gpu", "image", "unpin", str(links))
    dumped.program.output.write_bytes(dumped.output)
    site.run("phos-gpu", "restore", *options, str(links))
    assert dumped.program.wait_result() == LAYERS_SUM


REMOVALS: dict[str, Callable[[Path], object]] = {
    "directory": lambda image: wait_until(  # phosd may have made a file since the others were removed
        lambda: subprocess.run(["rm", "-rf", str(image)], check=False).returncode == 0, "the directory to be removed"
    ),
    "our files": lambda image: subprocess.run(f"rm {image}/phos-*", shell=True, check=True),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_image_is_removed_while_it_is_written(site: Site, what: str) -> None:
    toggles = Toggles(site, "checkpoint")
    program = blocks(site, **toggles.environment)
    image = site.image()
    logs = ["-o", str(site.folder / "dump.log"), "-W", str(site.folder)]
    dump = site.background("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-v4", *logs)
    toggles.wait(program.pid)
    REMOVALS[what](image)
    toggles.let_go()
    status = dump.wait(60)
    if status != 0:
        program.wait_progress()
        end(site, program)
    else:
        site.run("phos-gpu", "verify", str(image))
    fit_for_the_next(site)


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_phosd_is_killed_in_a_dump_that_kills(site: Site, delay: float) -> None:
    """The application is killed only once its image is whole."""
    program = blocks(site, "--blocks", "8", SOFTGPU_TOGGLE_MS="200")
    image = site.image()
    pid = site.daemon_pid()
    dump = site.background(
        "criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4"
    )
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    dump.wait(60)
    whole = site.run("phos-gpu", "verify", str(image), check=False).returncode == 0
    program.process.poll()
    if program.alive():
        program.wait_progress()
        end(site, program)
    else:
        assert whole


# Nothing accumulates.


def test_descriptors_and_threads_of_phosd_do_not_grow(site: Site) -> None:
    program = blocks(site)
    site.dump(program, site.image("warm"), "--leave-running")

    def open_now() -> tuple[int, int]:
        return len(phosd_descriptors(site)), psutil.Process(site.daemon_pid()).num_threads()

    wait_until(lambda: site.status()["jobs"][-1]["state"] == "committed", "the end of the first")
    before = open_now()
    rounds = 3
    for number in range(rounds):
        image = site.image(f"image-{number}")
        site.dump(program, image, "--leave-running")
        program.wait_progress()
        failed = site.dump(program, image, "--leave-running", check=False)  # not empty
        assert failed.returncode != 0
        refused = site.restore(image, check=False)  # it still runs
        assert refused.returncode != 0
        program.wait_progress()
    # A worker that had nothing to do in the first dump may have made its stream since; a leak has one for each dump.
    wait_until(lambda: open_now()[0] <= before[0] and open_now()[1] < before[1] + rounds, "phosd to settle", 15)


def let_go_of(site: Site, *states: str, but: tuple[str, ...] = ()) -> None:
    """Wait until phosd, which counts it, has nothing in memory of jobs that have ended so, nor of processes."""
    log = site.folder / "run" / "phosd.log"

    def none() -> bool:
        assert tuple(job["state"] for job in site.status()["jobs"]) == states
        said = [line for line in log.read_text().splitlines() if "in memory: " in line]
        return set(re.findall(r"\d+ (\w+)", said[-1].partition("in memory: ")[2])) <= set(but)

    wait_until(none, "phosd to let go of what is over", 30)


def test_checkpoints_and_restores_that_are_over_leave_phosd_s_memory(site: Site) -> None:
    """Each knows every chunk of its image: what the table of jobs shows is a few words. So do their processes."""
    site.environment |= {"PHOS_TWINS": "on", "SOFTGPU_COPY_BANDWIDTH": str(8 << 20)}  # windows, and twins in them
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="counted")
    program = blocks(site)
    for protocol in ("stop", "cow"):
        site.dump(program, site.image(protocol), "--leave-running", PHOS_PROTOCOL=protocol)
        program.wait_progress()
    assert site.dump(program, site.folder / "cow", "--leave-running", check=False).returncode != 0  # not empty
    assert site.restore(site.folder / "cow", check=False).returncode != 0  # it still runs
    image = site.image()
    site.dump(program, image)
    output = program.output.read_bytes()
    for mode in ("eager", "lazy"):
        wait_until(lambda: not program.alive(), "the pid to be free")
        program.output.write_bytes(output)
        site.restore(image, PHOS_RESTORE=mode)
        program.wait_progress()
        os.kill(program.pid, signal.SIGKILL)
    made = create(site, image, 1)
    taken = take(site, made["name"])["pids"][0]
    site.run("phos-gpu", "pool", "drop", made["name"])
    ended = ("committed", "committed", "committed", "attached", "attached", "attached")
    let_go_of(site, *ended, but=("Session", "SessionWindow"))
    os.kill(taken, signal.SIGKILL)
    let_go_of(site, *ended)
    site.wait_no_gpu_memory()


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_a_checkpoint_that_has_failed_leaves_phosd_s_memory(site: Site, protocol: str) -> None:
    """An exception refers to the frames that raised it, and they to who keeps it."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="counted")
    program = blocks(site, SOFTGPU_FAULTS="checkpoint-fail:1")
    assert site.dump(program, site.image(), "--leave-running", check=False, PHOS_PROTOCOL=protocol).returncode != 0
    program.wait_progress()
    os.kill(program.pid, signal.SIGKILL)
    let_go_of(site, "failed")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_restore_that_has_failed_leaves_phosd_s_memory(site: Site, mode: str) -> None:
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="counted")
    program = blocks(site)
    image = site.image()
    site.dump(program, image)
    wait_until(lambda: not program.alive(), "the pid to be free")
    data = max(image.glob("phos-data-*.raw"), key=lambda path: path.stat().st_size)
    with open(data, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    for _ in range(2):
        assert site.restore(image, check=False, PHOS_RESTORE=mode).returncode != 0
        wait_until(lambda: not program.alive(), "its end")
    let_go_of(site, "committed", "failed", "failed")
