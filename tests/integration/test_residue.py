"""What the driver saves into the process's memory: in a file of its own instead of CRIU's pages, whatever happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.site import Program, Site, Toggles, wait_until

OPTIONS = ("--iterations", "400", "--iteration-seconds", "0.03")
LONG = ("--iterations", "500", *OPTIONS[2:])
RESIDUE = 12 << 20
SHARED_MEMORY = Path("/dev/shm/phos")


def session(site: Site, program: Program) -> str:
    [found] = [p["session"] for p in site.status()["processes"] if p["pid"] == program.pid]
    return str(found)


def files(number: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{number}-*.residue"))


def start(site: Site, options: tuple[str, ...] = OPTIONS, **changes: str) -> tuple[Program, str]:
    """A program at work, and its session."""
    program = site.example("stencil", *options, **changes)
    program.wait_iterations(5)
    return program, session(site, program)


def expected_result(site: Site) -> str:
    return site.reference("stencil", *OPTIONS[:2])


def page_bytes(image: Path) -> int:
    return sum(path.stat().st_size for path in image.glob("pages-*.img"))


def test_it_is_kept_out_of_the_pages_and_comes_back(site: Site) -> None:
    expected = site.reference("stencil", *LONG[:2])
    program, number = start(site, LONG)
    without, with_ = site.image("without"), site.image("with")
    site.dump(program, with_, "--leave-running")
    wait_until(lambda: not files(number), "the file to go")  # when the image is whole
    program.wait_progress()
    site.stop_phosd()
    site.dump(program, without, "--leave-running", PHOS_REDUCERS="stack-limit,huge-pages")
    assert not list(without.glob("phos-residue-*"))
    assert page_bytes(with_) < page_bytes(without) - RESIDUE * 3 // 4
    site.stop_phosd()
    program.wait_progress()
    image = site.image()
    site.dump(program, image)
    assert not files(number)
    assert [path.name for path in image.glob("phos-residue-*")] == ["phos-residue-0.raw"]
    site.run("phos-gpu", "verify", str(image))
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert "residue" in said["reducers"]
    assert "phos-residue-0.raw" in [file["name"] for file in said["files"]]
    site.restore(image)
    assert program.wait_result() == expected
    wait_until(lambda: not files(number), "the file to go")


def test_damaged_in_the_image_nothing_is_restored(site: Site) -> None:
    program, number = start(site)
    image = site.image()
    site.dump(program, image)
    with open(image / "phos-residue-0.raw", "r+b") as file:
        file.seek(RESIDUE)
        file.write(b"damage")
    refused = site.run("phos-gpu", "verify", str(image), check=False)
    assert refused.returncode == 1
    assert "phos-residue-0.raw is damaged" in refused.stdout
    failed = site.restore(image, check=False)
    assert failed.returncode != 0
    assert "phos-residue-0.raw is damaged" in failed.stderr + site.errors(image / "restore.log")
    wait_until(lambda: not program.alive(), "the end of what CRIU had restored")
    assert not files(number)


@pytest.mark.parametrize("reason", ["no room", "too small", "little to save"])
def test_without_a_file_the_driver_gets_ordinary_memory(site: Site, reason: str) -> None:
    expected = expected_result(site)
    if reason == "no room":
        site.environment["PHOS_RESIDUE_BYTES"] = "1T"
    elif reason == "too small":
        site.environment["PHOS_RESIDUE_BYTES"] = "4M"
    else:
        site.environment["SOFTGPU_RESIDUE"] = "4M"  # nobody looks at so little
    program, number = start(site)
    image = site.image()
    site.dump(program, image)
    assert not files(number)
    assert bool(list(image.glob("phos-residue-*"))) == (reason != "no room")
    site.restore(image)
    assert program.wait_result() == expected


def test_a_driver_that_writes_there_costs_a_second_attempt_and_no_image(site: Site) -> None:
    """The restore after the first attempt overwrites what it has read: that image must not be committed."""
    expected = expected_result(site)
    program, _ = start(site, SOFTGPU_FAULTS="residue-write")
    image = site.folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running")
    site.run("phos-gpu", "verify", str(image))
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert said["protocol"] in ("stop", "cow")
    assert program.wait_result() == expected
    second = site.image("second")
    program, _ = start(site, SOFTGPU_FAULTS="residue-write")
    site.dump(program, second)
    site.restore(second)
    assert program.wait_result() == expected


def test_phosd_killed_leaves_a_file_that_the_next_one_removes(site: Site) -> None:
    expected = expected_result(site)
    toggles = Toggles(site, "checkpoint")
    program, number = start(site, **toggles.environment)
    words = ["criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(site.image()), "-o", "dump.log"]
    dump = site.background(*words, "--leave-running")
    wait_until(lambda: bool(files(number)), "the file")
    toggles.wait(program.pid)
    os.kill(site.daemon_pid(), signal.SIGKILL)
    toggles.let_go()
    assert dump.wait(60) != 0
    assert program.wait_result() == expected
    site.run("phosd", "--ensure")
    assert not files(number)


def test_restored_twice_and_dumped_again(site: Site) -> None:
    expected = expected_result(site)
    program, number = start(site)
    image = site.image()
    site.dump(program, image)
    output = program.output.read_bytes()
    for generation in range(2):
        program.output.write_bytes(output)
        program.hold()
        site.restore(image)
        program.wait_progress()
        again = site.image(f"again-{generation}")
        site.dump(program, again)
        assert list(again.glob("phos-residue-*"))
        site.restore(again)
        assert program.wait_result() == expected
        site.gone(program)
    wait_until(lambda: not files(number), "the file to go")


def test_where_there_is_no_room_for_it_the_restore_says_so(site: Site) -> None:
    """In a container /dev/shm has 64 MiB, unless somebody asked for more."""
    program = site.example("stencil", "--iterations", "100000")
    program.wait_iterations(2)
    image = site.image()
    site.dump(program, image)
    site.stop_phosd()
    criu = shlex.join([str(launcher("criu")), "restore", "--lib", "phos", "-d", "-D", str(image)])
    within = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=8m tmpfs /dev/shm && {criu}"]
    done = subprocess.run(
        within, env=site.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert re.search(r"/dev/shm has no room for its [0-9]+ MB\. Remove what fills that", done.stderr), done.stderr
