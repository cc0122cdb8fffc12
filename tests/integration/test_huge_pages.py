"""Images in a tmpfs: GPUs write into its pages, huge ones, and no processor copies; and restores from there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.site import Program, Site, wait_until
from tests.integration.test_cow import inventory
from tests.integration.test_cow_window import PROGRAMS, held_copies
from tests.integration.test_lazy import analysed
from tests.integration.test_stop_protocol import EXAMPLES, uninterrupted
from tests.unit.image_sets import skip


def mount(folder: Path, huge: str, size: str) -> None:
    folder.mkdir()
    options = f"huge={huge},size={size},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")


@pytest.fixture(params=["always", "never"])
def folder(site: Site, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs that is mounted with huge pages, or, as /dev/shm, without."""
    place = site.folder / "tmpfs"
    mount(place, request.param, "2g")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def log_of(site: Site) -> str:
    return (site.folder / "run" / "phosd.log").read_text()


def restored(site: Site, program: Program, image: Path) -> str:
    """The result of a program that is killed where it has run on to, and restored."""
    program.process.kill()
    site.gone(program)
    site.restore(image)
    return program.wait_result()


def be_patient(site: Site) -> None:
    """A phosd that waits for huge pages where other tests have scattered the machine's memory."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="patient")


@pytest.mark.parametrize("name", ["mlp", "stencil"])
def test_dump_into_huge_pages_and_restore_from_them(site: Site, folder: Path, name: str) -> None:
    expected = uninterrupted(site, name, *EXAMPLES[name])
    be_patient(site)
    program = site.example(name, *EXAMPLES[name])
    program.wait_iterations(5)
    image = folder / "image"
    image.mkdir()
    site.dump(program, image)
    assert "GPUs write into the image's own pages" in log_of(site)
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == expected


def test_phosd_can_start_no_thread_to_unlock_the_pages(site: Site, folder: Path) -> None:
    """The image is whole all the same, and nobody waits for such a thread."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="no thread to release,patient")
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = folder / "image"
    image.mkdir()
    site.dump(program, image)
    assert "GPUs write into the image's own pages" in log_of(site)
    assert [job["state"] for job in site.status()["jobs"]] == ["committed"]
    site.run("phos-gpu", "image", "pin", str(image))


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_what_is_zeros_is_not_made_room_for(site: Site, folder: Path, protocol: str) -> None:
    """Room for twice what there is to copy, and for a sixty-fourth of all memory."""
    unused = (sys.executable, str(PROGRAMS / "unused_memory.py"), "--iterations", "100")
    expected = site.reference_of(*unused, "--until")
    be_patient(site)
    program = site.until_awaited(*unused, "--iteration-seconds", "0.05", "--until")
    program.wait_iterations(3)
    image = folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol)
    rooms = re.findall(r"the image's own pages: (\d+) bytes", log_of(site))
    assert 0 < max(map(int, rooms)) < 32 << 20
    data = inventory(site, image)["gpu_data"]
    assert data["total_bytes"] >= 128 << 20
    assert data["written_bytes"] < 16 << 20
    site.run("phos-gpu", "verify", str(image))
    assert restored(site, program, image) == expected


@pytest.mark.parametrize("protocol", ["stop", "cow"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_memory_that_nobody_has_written_to(site: Site, folder: Path, protocol: str, place: str) -> None:
    """All of it is zeros: there is nothing to make room for, nor to copy."""
    unused = (sys.executable, str(PROGRAMS / "unused_memory.py"), "--iterations", "100")
    expected = site.reference_of(*unused, "--until", UNUSED_MEMORY="all")
    program = site.until_awaited(*unused, "--iteration-seconds", "0.05", "--until", UNUSED_MEMORY="all")
    program.wait_iterations(3)
    image = (folder if place == "memory" else site.folder) / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol)
    assert inventory(site, image)["gpu_data"]["written_bytes"] == 0
    site.run("phos-gpu", "verify", str(image))
    assert restored(site, program, image) == expected


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_more_than_room_was_made_for_is_written_otherwise(site: Site, folder: Path, protocol: str) -> None:
    expected = uninterrupted(site, "mlp", *EXAMPLES["mlp"])
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="stingy,patient")
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol)
    assert "more in the GPU's memory by now than room was made for" in log_of(site)
    site.run("phos-gpu", "verify", str(image))
    assert restored(site, program, image) == expected


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_a_lazy_restore_from_huge_pages(site: Site, folder: Path, mode: str) -> None:
    expected = uninterrupted(site, "mlp", *EXAMPLES["mlp"])
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = folder / "image"
    image.mkdir()
    site.dump(program, image)
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(4 << 20)
    site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
    assert program.wait_result() == expected


def test_a_concurrent_checkpoint_into_huge_pages_is_whole(site: Site, folder: Path) -> None:
    expected = uninterrupted(site, "mlp", *EXAMPLES["mlp"])
    be_patient(site)
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.run("phos-gpu", "checkpoint", str(program.pid), str(folder / "image"), "--leave-running", "--protocol", "cow")
    assert "GPUs write into the image's own pages" in log_of(site)
    site.run("phos-gpu", "verify", str(folder / "image"))
    assert program.wait_result() == expected


def test_copies_are_made_by_parts_while_the_program_is_brought_back(site: Site, folder: Path) -> None:
    go = site.folder / "go"
    # The copies take longer than the driver's checkpoint and CRIU, and the driver's restore longer than what is queued
    # for the copy engine when it begins.
    site.environment |= {"SOFTGPU_COPY_BANDWIDTH": str(20 << 20), "SOFTGPU_TOGGLE_MS": "3000"}
    be_patient(site)
    layers = [str(PROGRAMS / "layers.py"), "ends", "36", str(go)]
    program = site.start(sys.executable, *layers, SOFTGPU_COPY_BANDWIDTH="0")
    program.wait_iterations(1)
    image = folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", "cow")
    assert "GPUs write into the image's own pages" in log_of(site)
    assert 0 < inventory(site, image)["window"]["in_turns"] < 22
    site.run("phos-gpu", "verify", str(image))
    for file in (go, Path(f"{go}.end"), Path(f"{go}.over")):
        file.touch()
    assert program.wait_result() == "1"


def test_a_wrong_guess_is_found_in_what_the_gpu_wrote(site: Site, folder: Path) -> None:
    """What comes to the image's own pages is compared apart from being copied, and before the image is whole."""
    # It is between two iterations then, and goes on with kernels in its window. In the midst of one it would perhaps
    # fill memory first, nobody lies about that, and wait until it is saved, with all the rest.
    options = ("--iterations", "12", "--iteration-seconds", "2")
    expected = uninterrupted(site, "mlp", *options)
    lies = site.folder / "lies"
    lies.touch()
    site.environment |= {"LYING_PHOSD": str(lies), "SOFTGPU_COPY_BANDWIDTH": str(2 << 20)}
    held = held_copies(site)
    site.serve("tests.integration.lying_phosd", **held)
    program = site.example("mlp", *options)
    wait_until(lambda: analysed(site, program), "the analysis of its kernels")
    program.wait_iterations(program.iterations() + 1)
    words = ["phos-gpu", "checkpoint", str(program.pid), str(folder / "image"), "--leave-running", "--protocol", "cow"]
    hold = Path(held["SOFTGPU_COPY_HOLD"])
    hold.touch()  # not all is saved before the program computes again
    with ThreadPoolExecutor(1) as beside:
        checkpoint = beside.submit(site.run, *words)
        wait_until(lambda: " is attached: " in log_of(site) or checkpoint.done(), "the window")
        hold.unlink()
        checkpoint.result()
    assert "GPUs write into the image's own pages" in log_of(site)
    assert "GPU memory changed before it was saved" in log_of(site)
    states = [job["state"] for job in site.status()["jobs"] if job["kind"] == "dump"]
    assert states == ["mispredicted", "committed"]
    site.run("phos-gpu", "verify", str(folder / "image"))
    assert program.wait_result() == expected


def test_an_image_that_fails_while_it_is_compared_is_let_go_after_that(site: Site, folder: Path) -> None:
    expected = uninterrupted(site, "mlp", *EXAMPLES["mlp"])
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(8 << 20)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="full at the merge,patient")
    daemon = site.daemon_pid()
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    words = ["phos-gpu", "checkpoint", str(program.pid), str(folder / "image"), "--leave-running", "--protocol", "cow"]
    done = site.run(*words, check=False)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert "GPUs write into the image's own pages" in log_of(site)
    assert program.wait_result() == expected
    assert site.daemon_pid() == daemon, "phosd lives"
    site.wait_no_gpu_memory()


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_a_damaged_chunk_is_found_where_it_has_arrived(site: Site, folder: Path, how: str) -> None:
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = folder / "image"
    image.mkdir()
    site.dump(program, image)
    data = max(image.glob("phos-data-*.raw"), key=lambda path: path.stat().st_size)
    with open(data, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    result = site.restore(image, check=False, PHOS_RESTORE=how)
    assert result.returncode != 0
    assert "is damaged: its hash is not the one written" in log_of(site)
    wait_until(lambda: not program.alive(), "its end")


def test_without_room_for_all_the_dump_says_so_and_the_program_runs_on(site: Site) -> None:
    expected = uninterrupted(site, "mlp", *EXAMPLES["mlp"])
    place = site.folder / "small"
    mount(place, "always", "4m")
    try:
        program = site.example("mlp", *EXAMPLES["mlp"])
        program.wait_iterations(5)
        (place / "image").mkdir()
        result = site.dump(program, place / "image", check=False)
        assert result.returncode != 0
        assert not list((place / "image").glob("phos-*"))
        assert program.wait_result() == expected
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
