"""What may happen while the memory of a process that runs on is being saved, with the real CRIU.

The random program (tests/windows/program.c) checks its own memory: after a window, and after a restore.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.site import PATIENCE, Program, Site, example_words, wait_until, words
from tests.integration.test_cow import dump_concurrently, inventory, restore_at
from tests.windows import windows

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


@pytest.fixture
def random_site(site: Site, tmp_path: Path) -> Site:
    """A site whose phosd saves so slowly that much happens meanwhile."""
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(24 << 20)
    site.environment["PHOS_PROTOCOL"] = "cow"
    windows.build(tmp_path)
    return site


def held_copies(site: Site) -> dict[str, str]:
    """Of a phosd's environment: no copy of memory ends while this file exists."""
    return {"SOFTGPU_COPY_HOLD": str(site.folder / "copies-held"), "SOFTGPU_COPY_HOLD_BYTES": "64K"}


def start(site: Site, seed: int, become: str = "") -> Program:
    """The random program, at work."""
    numbers = [str(number) for number in (seed, 2, 16, 300, 0)]
    site.run("phosd", "--ensure", **held_copies(site))  # its copies are slow; the program's are not
    command = [str(site.folder / "program"), str(windows.HERE / "kernels.ptx"), *numbers]
    program = site.start(*command, SOFTGPU_COPY_BANDWIDTH="0", BECOME_ANOTHER=become)
    wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program")
    assert program.alive(), program.lines()
    time.sleep(0.3)
    return program


def end(program: Program) -> None:
    """The program compares its memory with what it must be."""
    os.kill(program.pid, signal.SIGUSR1)
    wait_until(lambda: not program.alive(), "the program's end")
    assert program.lines()[-1] == "GOOD", program.lines()[-20:]


def come_back(site: Site, program: Program, image: Path) -> None:
    """The program of an image is restored, and its memory is what it must be."""
    site.gone(program)
    program.output.write_bytes((image / "output").read_bytes())
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    end(program)


@contextmanager
def window(site: Site, program: Program, image: Path, processes: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A checkpoint in the background, and a block in its window: not all is saved before the block ends."""
    log, hold = site.folder / "run" / "phosd.log", Path(held_copies(site)["SOFTGPU_COPY_HOLD"])
    wanted = log.read_text().count(" is attached: ") + processes
    script = site.folder / f"{image.name}-post-dump"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || cp {program.output} {image}/output\n')
    script.chmod(0o755)
    hold.touch()
    dump = site.begin_dump(program, image, "--leave-running", "--action-script", str(script))
    wait_until(
        lambda: log.read_text().count(" is attached: ") >= wanted or dump.poll() is not None, f"the window of {image}"
    )
    assert dump.poll() is None, site.errors(image / "dump.log")
    yield dump
    hold.unlink()


def committed(dump: subprocess.Popen[bytes], image: Path) -> None:
    """The image is whole."""
    assert dump.wait(PATIENCE) == 0, Site.errors(image / "dump.log")
    assert (image / "phos-commit.img").exists()


def no_image(dump: subprocess.Popen[bytes], image: Path) -> None:
    """There is none, and nothing of ours is left of it."""
    assert dump.wait(PATIENCE) != 0
    wait_until(lambda: not list(image.glob("phos-*")), f"{image} to be empty: {list(image.glob('phos-*'))}")


def test_ten_checkpoints_in_a_row(random_site: Site) -> None:
    random_site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(200 << 20)
    program = start(random_site, 1)
    images = [dump_concurrently(random_site, program, f"image-{number}") for number in range(10)]
    end(program)
    for image in (images[0], images[9]):
        come_back(random_site, program, image)


@pytest.mark.parametrize("pool", ["2G", "0"])
def test_a_program_that_exits(random_site: Site, pool: str) -> None:
    random_site.environment["PHOS_COW_POOL"] = pool
    program = start(random_site, 2)
    image = random_site.image()
    with window(random_site, program, image) as dump:
        os.kill(program.pid, signal.SIGUSR2)
    committed(dump, image)
    come_back(random_site, program, image)


def test_a_program_that_is_killed(random_site: Site) -> None:
    program = start(random_site, 3)
    image = random_site.image()
    with window(random_site, program, image) as dump:
        os.kill(program.pid, signal.SIGKILL)
    committed(dump, image)
    come_back(random_site, program, image)


def test_a_program_that_becomes_another(random_site: Site) -> None:
    program = start(random_site, 4, become="sleep")
    image = random_site.image()
    with window(random_site, program, image) as dump:
        os.kill(program.pid, signal.SIGUSR2)
    wait_until(lambda: words(psutil.Process(program.pid))[:1] == ["sleep"], "the other program")
    committed(dump, image)
    os.kill(program.pid, signal.SIGKILL)
    come_back(random_site, program, image)


def test_a_program_that_is_stopped_and_goes_on(random_site: Site) -> None:
    program = start(random_site, 5)
    image = random_site.image()
    with window(random_site, program, image) as dump:
        os.kill(program.pid, signal.SIGSTOP)
    time.sleep(15)
    os.kill(program.pid, signal.SIGCONT)
    committed(dump, image)
    end(program)
    come_back(random_site, program, image)


def test_a_program_that_stays_stopped_keeps_no_image_from_being_whole(site: Site) -> None:
    site.environment |= {"PHOS_PROTOCOL": "cow", "SOFTGPU_COPY_BANDWIDTH": str(24 << 20)}
    site.run("phosd", "--ensure", **held_copies(site))
    stencil = (*example_words("stencil"), "--iterations", "100000", "--iteration-seconds", "0.2", "--until")
    script = site.folder / "family.sh"
    script.write_text(f"{shlex.join(stencil)} $1 >other.log 2>&1 &\nexec {shlex.join(stencil)} $1\n")
    program = site.until_awaited("/bin/sh", str(script))
    program.wait_iterations(3)
    (other,) = psutil.Process(program.pid).children()

    def iterations() -> int:
        return (site.folder / "other.log").read_text().count("ITERATION")

    wait_until(lambda: iterations() >= 3, "the other one")
    image = site.image()
    with window(site, program, image, processes=2) as dump:
        assert not (image / "phos-commit.img").exists()
        other.suspend()
    seen = program.iterations()
    committed(dump, image)
    program.wait_iterations(seen + 3)
    assert other.status() == psutil.STATUS_STOPPED
    other.resume()
    again = site.image("again")
    site.dump(program, again, "--leave-running")
    site.run("phos-gpu", "verify", str(image))
    site.run("phos-gpu", "verify", str(again))
    counted = program.iterations()
    wait_until(lambda: iterations() > counted, "the other one to come as far")
    theirs = [line for line in (site.folder / "other.log").read_text().splitlines() if line.startswith("ITERATION")]
    assert theirs[:counted] == [line for line in program.lines() if line.startswith("ITERATION")][:counted]


def test_phosd_is_killed(random_site: Site) -> None:
    program = start(random_site, 6)
    image = random_site.image()
    phosd = random_site.daemon_pid()
    with window(random_site, program, image) as dump:
        os.kill(phosd, signal.SIGKILL)
    assert dump.wait(PATIENCE) != 0
    assert not (image / "phos-commit.img").exists()
    assert random_site.run("phos-gpu", "verify", str(image), check=False).returncode != 0
    random_site.run("phosd", "--ensure")
    again = dump_concurrently(random_site, program, "again")
    end(program)
    come_back(random_site, program, again)


def test_the_one_who_waits_for_the_image_is_killed(random_site: Site) -> None:
    program = start(random_site, 7)
    image = random_site.image()
    with window(random_site, program, image) as dump:
        dump.kill()
        dump.wait()
    wait_until((image / "phos-commit.img").exists, "the image")
    end(program)
    come_back(random_site, program, image)


def test_a_second_request_is_refused(random_site: Site) -> None:
    program = start(random_site, 8)
    image, other = random_site.image(), random_site.image("other")
    with window(random_site, program, image) as dump:
        second = random_site.dump(program, other, "--leave-running", check=False)
    assert second.returncode != 0
    said = second.stdout + second.stderr + random_site.errors(other / "dump.log")
    assert str(program.pid) in said
    assert "under way" in said or "in progress" in said or "another" in said, said
    assert not list(other.glob("phos-*"))
    committed(dump, image)
    end(program)
    come_back(random_site, program, image)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A tmpfs of that size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_disk_becomes_full(random_site: Site) -> None:
    random_site.environment["PHOS_VALIDATE"] = "off"
    program = start(random_site, 9)
    with small_disk(random_site.folder / "small", 64) as disk:  # too little for phosd to reserve what it needs
        image = disk / "image"
        image.mkdir()
        with (
            window(random_site, program, image) as dump,
            suppress(OSError),
            open(disk / "other", "wb", buffering=0) as other,
        ):
            while True:
                other.write(bytes(1 << 20))
        no_image(dump, image)
    again = dump_concurrently(random_site, program, "again")
    end(program)
    come_back(random_site, program, again)


def test_a_window_ends_while_a_transfer_is_queued(site: Site) -> None:
    """A flag follows it, into memory that is the window's."""
    go = site.folder / "go"
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(24 << 20)
    site.environment["PHOS_PROTOCOL"] = "cow"
    site.run("phosd", "--ensure", **held_copies(site))
    script = PROGRAMS / "pending_transfer.py"
    program = site.start(sys.executable, str(script), "32", str(go), SOFTGPU_COPY_BANDWIDTH="0")
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    with window(site, program, image) as dump:
        go.touch()
        wait_until(lambda: "QUEUED" in program.lines(), "the transfer")
    time.sleep(3)  # all is saved by then
    go.unlink()
    wait_until(lambda: program.lines()[-1] != "QUEUED", "the transfer's end")
    assert program.lines()[-1] == "GOOD", program.lines()
    committed(dump, image)
    assert inventory(site, image)["protocol"] == "cow"


def test_two_processes_with_one_buffer(site: Site) -> None:
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(16 << 20)
    command = [sys.executable, str(PROGRAMS / "shared_memory.py"), "parent", "1000", str(site.folder / "handle")]
    program = site.until_awaited(*command, SOFTGPU_COPY_BANDWIDTH="0")
    program.wait_iterations(10)
    image = dump_concurrently(site, program)
    expected = program.wait_result()
    said = inventory(site, image)
    assert said["protocol"] == "cow"
    assert len(said["processes"]) == 2
    restore_at(site, program, image)
    assert program.wait_result() == expected


@pytest.mark.parametrize("validate", ["on", "off"])
def test_memory_of_another_is_opened_in_the_window(site: Site, validate: str) -> None:
    """What a process maps only then, its window knows nothing of: it waits until all is saved."""
    site.environment |= {"SOFTGPU_COPY_BANDWIDTH": str(16 << 20), "PHOS_PROTOCOL": "cow", "PHOS_VALIDATE": validate}
    handle = site.folder / "handle"
    site.run("phosd", "--ensure", **held_copies(site))
    command = [sys.executable, str(PROGRAMS / "shared_memory.py"), "late", "0", str(handle)]
    program = site.start(*command, SOFTGPU_COPY_BANDWIDTH="0")
    wait_until(handle.with_suffix(".ready").exists, "the child")
    image = site.image()
    with window(site, program, image, processes=2) as dump:
        handle.with_suffix(".go").touch()
    wait_until(handle.with_suffix(".written").exists, "the memory to be overwritten")
    committed(dump, image)
    assert inventory(site, image)["protocol"] == "cow"
    handle.with_suffix(".over").touch()
    assert program.wait_result() == "0"
    for suffix in (".go", ".over"):
        handle.with_suffix(suffix).unlink()
    site.gone(program)
    program.output.write_bytes(b"")
    site.restore(image)
    handle.with_suffix(".over").touch()
    assert program.wait_result() == "64"


def test_the_order_of_first_touches_is_kept_over_windows(site: Site) -> None:
    """A window is too short to see all, and what an earlier one saw still counts."""
    go = site.folder / "go"
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(12 << 20)  # 48 MiB take seconds
    site.run("phosd", "--ensure", **held_copies(site))
    program = site.start(sys.executable, str(PROGRAMS / "layers.py"), "ends", "12", str(go), SOFTGPU_COPY_BANDWIDTH="0")
    program.wait_iterations(1)
    seen = []
    for number, file in enumerate((go, Path(f"{go}.end"))):
        image = site.image(f"image-{number}")
        with window(site, program, image) as checkpoint:
            file.touch()
            if number == 0:
                program.wait_iterations(2)
        assert checkpoint.wait(PATIENCE) == 0
        seen.append(inventory(site, image)["order"]["chunks"])
    assert seen == [1, 2]
    Path(f"{go}.over").touch()
    assert program.wait_result() == "1"


@pytest.mark.parametrize("altered", ["cut off", "cut off,slow withdrawal"])
@pytest.mark.parametrize(
    ("validate", "said"), [("on", "changed before it was saved"), ("off", "broke while its memory was saved")]
)
def test_a_connection_that_breaks_before_the_window_is_open(site: Site, validate: str, said: str, altered: str) -> None:
    """The program opens its gate then and computes, and nobody traces what it writes: there is no such image."""
    options = ("--iterations", "400", "--iteration-seconds", "0.03")
    expected = site.reference("mlp", *options[:2])
    site.environment |= {"SOFTGPU_COPY_BANDWIDTH": str(8 << 20), "PHOS_PROTOCOL": "cow", "PHOS_RETURN_SECONDS": "5"}
    site.environment["PHOS_VALIDATE"] = validate
    held = held_copies(site)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=altered, **held)
    program = site.example("mlp", *options, SOFTGPU_COPY_BANDWIDTH="0")
    program.wait_iterations(5)
    image = site.image()
    Path(held["SOFTGPU_COPY_HOLD"]).touch()  # not all is saved before the connection breaks
    done = site.dump(program, image, "--leave-running")
    assert "dumping once more, by the stop protocol" in done.stderr
    assert said in done.stderr
    site.run("phos-gpu", "verify", str(image))
    assert [job["state"] for job in site.status()["jobs"]] == ["mispredicted", "committed"]
    assert site.status()["processes"][0]["state"] == "running"
    assert program.wait_result() == expected


def test_a_program_that_ends_before_its_image_is_made_anew(site: Site) -> None:
    """What became of the first shows at the end of the window, and then there is nobody to stop any more."""
    site.environment |= {"SOFTGPU_COPY_BANDWIDTH": str(12 << 20), "PHOS_VALIDATE": "off"}  # 48 MiB take seconds
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="cut off")
    go, log = site.folder / "go", site.folder / "run" / "phosd.log"
    program = site.start(sys.executable, str(PROGRAMS / "layers.py"), "last", "12", str(go), SOFTGPU_COPY_BANDWIDTH="0")
    program.wait_iterations(1)
    image = site.folder / "image"
    words = ["phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", "cow"]
    with ThreadPoolExecutor(1) as beside:
        checkpoint = beside.submit(site.run, *words, check=False)
        wait_until(lambda: "are detached" in log.read_text() or checkpoint.done(), "the dump to begin")
        go.touch()
        done = checkpoint.result()
    assert done.returncode != 0
    assert f"Process {program.pid} could not be checkpointed; it has ended." in done.stderr
    assert program.result() == "12"
    assert not list(image.glob("phos-*"))
