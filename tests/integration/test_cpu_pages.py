"""The tasks' own memory, copied by phosd beside CRIU: the image is as if CRIU had taken it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.many_blocks import daemon, log_of
from tests.integration.site import Program, Site, wait_until
from tests.page_scan import needs_page_scan

pytestmark = needs_page_scan

PAGE = 4096
PE_PRESENT = 4
PROGRAM = Path(__file__).parent / "programs" / "memory_shapes.py"


def started(site: Site, *options: str) -> Program:
    program = site.until_awaited(sys.executable, str(PROGRAM), *options)
    program.wait_iterations(2)
    return program


def copied(site: Site) -> dict[int, int]:
    """The bytes that phosd copied, by process."""
    found = re.findall(r"Process (\d+): (\d+) bytes of its pages were copied beside CRIU", log_of(site))
    return {int(pid): int(size) for pid, size in found}


def dumped_pages(image: Path, pid: int) -> Iterator[tuple[int, bytes]]:
    """Every page of a task that CRIU's images hold: its address and its bytes."""
    from pycriu.images import images

    with open(image / f"pagemap-{pid}.img", "rb") as file:
        head, *entries = images.load(file)["entries"]
    with open(image / f"pages-{head['pages_id']}.img", "rb") as pages:
        for entry in entries:
            assert entry["flags"] & PE_PRESENT, entry
            for number in range(entry["nr_pages"]):
                yield int(str(entry["vaddr"]), 0) + number * PAGE, pages.read(PAGE)
        assert pages.read(1) == b""


def private_pages(pid: int) -> set[int]:
    """The addresses of all pages of a process that belong to nobody else, from the kernel (proc_pid_pagemap(5))."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for line in maps:
            area, rights, *_ = line.split()
            if rights[3] != "p" or "[v" in line:
                continue
            start, end = (int(word, 16) for word in area.split("-"))
            pagemap.seek(start // PAGE * 8)
            raw = pagemap.read((end - start) // PAGE * 8)
            for number in range(len(raw) // 8):
                entry = int.from_bytes(raw[number * 8 : number * 8 + 8], "little")
                if entry >> 62 and not entry >> 61 & 1:  # in memory or swapped, and not the file's
                    found.add(start + number * PAGE)
    return found


@pytest.mark.parametrize("who", ["phosd", "CRIU"])
def test_the_image_holds_what_the_memory_holds(site: Site, who: str) -> None:
    daemon(site, PHOS_CPU_PAGES="on" if who == "phosd" else "off")
    program = started(site)
    image = site.image()
    site.dump(program, image, "--leave-running", "--leave-stopped")
    assert (copied(site).get(program.pid, 0) > 50 << 20) is (who == "phosd")
    assert not list(image.glob("phos-pages-*"))
    site.run("phos-gpu", "verify", str(image))
    pages = dict(dumped_pages(image, program.pid))
    missing = private_pages(program.pid) - set(pages)
    with open(f"/proc/{program.pid}/mem", "rb", buffering=0) as memory:

        def holds(address: int, page: bytes) -> bool:
            memory.seek(address)
            return memory.read(PAGE) == page

        assert all(holds(address, bytes(PAGE)) for address in missing)  # the kernel's page of zeros, which is nobody's
        changed = [address for address, page in pages.items() if not holds(address, page)]
    # Its threads were let go to be stopped by a signal: some may have come as far as into their next wait.
    assert len(changed) < 20
    areas = [(int(start, 16), int(size)) for start, size in re.findall(r"AREA (\w+) (\d+)", "\n".join(program.lines()))]
    assert len(areas) == 8
    assert not [hex(address) for address in changed for start, size in areas if start <= address < start + size]
    assert sum(start <= address < start + size for address in pages for start, size in areas) > 40 << 20 >> 12
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait_result() == "right"


@pytest.mark.parametrize("how", [(), ("--lazy",)], ids=["eager", "lazy"])
def test_what_was_copied_is_restored(site: Site, how: tuple[str, ...]) -> None:
    program = started(site)
    image = site.image()
    site.dump(program, image)
    assert copied(site)[program.pid] > 50 << 20
    site.run("phos-gpu", "restore", *how, str(image))
    assert program.wait_result() == "right"


def test_tasks_without_a_gpu_are_copied_as_well(site: Site) -> None:
    shell = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(PROGRAM)!r}, sys.argv[1]]))"
    program = site.until_awaited(sys.executable, "-c", shell)
    program.wait_iterations(2)
    image = site.image()
    site.dump(program, image)
    sizes = copied(site)
    assert len(sizes) == 2
    assert sizes[program.pid] < 50 << 20 < max(sizes.values())
    site.restore(image)
    assert program.wait_result() == "right"


def test_a_failed_dump_leaves_no_pages_behind(site: Site) -> None:
    program = started(site, "--undumpable")
    image = site.image()
    assert site.dump(program, image, check=False).returncode != 0
    assert not list(image.glob("phos-*"))
    assert not copied(site)
    assert program.wait_result() == "right"


def test_where_pages_do_not_become_files_here_criu_has_them(site: Site) -> None:
    """A chain of CRIU's own images: the launcher preloads nothing, and CRIU itself refuses on kernels without it."""
    program = started(site)
    image = site.image()
    site.dump(program, image, "--track-mem", "--leave-running", check=False)
    assert not copied(site)
    assert program.wait_result() == "right"


def test_what_lacks_pages_is_no_image(site: Site) -> None:
    """The file system is full before all are copied: CRIU's own files would look like a whole dump."""
    small = site.image("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=45M", "tmpfs", str(small)], check=True)
    try:
        program = started(site)
        image = small / "image"
        image.mkdir()
        result = site.dump(program, image, "--leave-running", check=False)
        assert result.returncode != 0
        assert "No space left on device" in result.stderr  # no room for it in CRIU's log, either
        assert not list(image.glob("phos-*"))
        assert not (image / "inventory.img").exists()
        assert program.wait_result() == "right"
        site.gone(program)
        assert site.restore(image, check=False).returncode != 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


UNNAMED = Path(__file__).parent / "programs" / "unnamed_memory.py"


def test_memory_that_is_a_file_without_a_name_is_there_again_and_shared(site: Site) -> None:
    go = site.folder / "go"
    program = site.start(sys.executable, str(UNNAMED), "/dev/shm", str(go), str(24 << 20))
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    site.dump(program, image)
    site.gone(program)
    site.restore(image)
    go.touch()
    assert program.wait_result() == "counts,same"
