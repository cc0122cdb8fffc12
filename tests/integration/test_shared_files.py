"""What tasks share without a name that lasts, copied by phosd beside CRIU: the image is as if CRIU had copied it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.many_blocks import daemon, log_of, nothing_of_ours
from tests.integration.site import Program, Site, wait_until
from tests.integration.test_kills import criu_processes
from tests.page_scan import needs_page_scan

pytestmark = needs_page_scan

PROGRAM = Path(__file__).parent / "programs" / "shared_files.py"
MIB, PAGE = 1 << 20, 4096


def started(site: Site, go: Path, *options: str) -> Program:
    program = site.start(sys.executable, str(PROGRAM), str(site.folder), str(go), *options)
    wait_until(lambda: "READY" in program.lines(), "the program", 60)
    return program


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="phos-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def copied(site: Site) -> list[int]:
    """The bytes of each piece of shared memory that phosd copied."""
    return sorted(int(size) for size in re.findall(r"(\d+) bytes of shared memory \d+ were copied", log_of(site)))


def contents(image: Path, inodes: list[int]) -> dict[str, object]:
    """What CRIU's images hold of the program's shared memory, page by page, and of its files without a name."""
    from pycriu.images import images

    found: dict[str, object] = {}
    for inode in inodes:
        path = image / f"pagemap-shmem-{inode}.img"
        if path.exists():
            with open(path, "rb") as file:
                head, *entries = images.load(file)["entries"]
            with open(image / f"pages-{head['pages_id']}.img", "rb") as pages:
                at = [int(str(e["vaddr"]), 0) + n * PAGE for e in entries for n in range(e["nr_pages"])]
                found[path.name] = {address: pages.read(PAGE) for address in at}
                assert pages.read(1) == b""
    for path in image.glob("ghost-file-*.img"):
        with open(path, "rb") as file:
            head, *chunks = images.load(file)["entries"]
        assert head["ino"] in inodes
        found[f"ghost {head['ino']}"] = chunks
    return found


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_image_holds_what_criu_would_have_written(site: Site, in_memory: Path, place: str) -> None:
    """Both of one state: nothing is written in between. In memory there is room that was made before."""
    go = site.folder / "go"
    program = started(site, go, "still")
    inodes = [int(word) for line in program.lines() if line.startswith("INODES") for word in line.split()[1:]]
    held = []
    for who in ("off", "on"):
        if site.answers():
            site.stop_phosd()
        daemon(site, PHOS_CPU_PAGES=who)
        image = in_memory / who if place == "memory" else site.image(who)
        image.mkdir(exist_ok=True)
        site.dump(program, image, "--leave-running")
        site.run("phos-gpu", "verify", str(image))
        held.append(contents(image, inodes))
    assert copied(site)
    assert ("into room that had been made" in log_of(site)) == (place == "memory")
    assert len(held[0]) == 8
    assert held[0] == held[1]
    go.touch()
    assert program.wait_result() == "right"


@pytest.mark.parametrize("how", [(), ("--lazy",)], ids=["eager", "lazy"])
@pytest.mark.parametrize("who", ["phosd", "CRIU"])
def test_what_was_shared_is_restored_and_shared(site: Site, in_memory: Path, how: tuple[str, ...], who: str) -> None:
    daemon(site, PHOS_CPU_PAGES="on" if who == "phosd" else "off")
    go = site.folder / "go"
    program = started(site, go)
    image = in_memory / "image" if who == "phosd" else site.image()
    image.mkdir(exist_ok=True)
    site.dump(program, image)
    assert not list(image.glob("phos-pages-*"))
    if who == "phosd":  # the driver has some, too
        sizes = copied(site)
        assert f"{(7 + 3 + 2 + 6) * MIB + 77} bytes of files without a name were copied" in log_of(site)
        assert {0, 2 * MIB, 2 * MIB + PAGE, 5 * MIB + PAGE, 6 * MIB} <= set(sizes)
        roomy = re.findall(r"(?:shared memory \d+ were|(ghost)-file-\w+\.img was) copied.*into room", log_of(site))
        assert {"", "ghost"} == set(roomy), "what is large of both"
    else:
        assert not copied(site)
    site.gone(program)
    site.run("phos-gpu", "restore", *how, str(image))
    go.touch()
    assert program.wait_result() == "right"


def test_a_full_disk_leaves_the_program_running(site: Site) -> None:
    go = site.folder / "go"
    small = site.image("small")
    program = started(site, go)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60M", "tmpfs", str(small)], check=True)
    try:
        image = small / "image"
        image.mkdir()
        result = site.dump(program, image, "--leave-running", check=False)
        assert result.returncode != 0
        assert "No space left on device" in result.stderr
        assert not list(image.glob("phos-*"))
        assert not (image / "inventory.img").exists()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    go.touch()
    assert program.wait_result() == "right"


@pytest.mark.parametrize("killed", ["phosd", "CRIU", "the dump"])
def test_whoever_is_killed_meanwhile_leaves_the_program_running(site: Site, killed: str) -> None:
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="slow shared files")
    go, image = site.folder / "go", site.image()
    program = started(site, go)
    dump = site.begin_dump(program, image)
    # Not before: a CRIU that is killed while a task executes instructions of its leaves them to it.
    wait_until(lambda: "CRIU has ended" in log_of(site), "CRIU to wait for phosd, which copies")
    assert "shared memory is being copied" in log_of(site)
    if killed == "the dump":
        os.kill(dump.pid, signal.SIGINT)
    else:
        os.kill(site.daemon_pid() if killed == "phosd" else criu_processes(site)[0], signal.SIGKILL)
    assert dump.wait(60)
    if killed == "phosd":
        site.run("phosd", "--ensure")
    else:
        wait_until(lambda: nothing_of_ours(image), "phosd to withdraw the image")
    go.touch()
    assert program.wait_result() == "right"
    site.gone(program)
    assert site.restore(image, check=False).returncode


@pytest.mark.parametrize("body", ["take_memory", "take_range"])
def test_what_is_given_and_does_not_come(site: Site, body: str) -> None:
    """CRIU's plugin waits for no answer to it, and counts on phosd to copy it."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=f"cut {body}")
    go, image = site.folder / "go", site.image()
    program = started(site, go)
    assert site.dump(program, image, check=False).returncode != 0
    assert nothing_of_ours(image)
    site.dump(program, site.image("next"))
    site.gone(program)
    site.restore(site.folder / "next")
    go.touch()
    assert program.wait_result() == "right"


@pytest.mark.parametrize("what", ["no thread to copy pages", "no thread for shared files"])
def test_a_thread_less_is_no_image_less(site: Site, what: str) -> None:
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=what)
    go, image = site.folder / "go", site.image()
    program = started(site, go)
    site.dump(program, image)
    assert copied(site)
    site.gone(program)
    site.restore(image)
    go.touch()
    assert program.wait_result() == "right"
