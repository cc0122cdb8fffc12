"""phos-can-fill: where the plugin brings memory in a restore, and where CRIU has to (criu_plugin/can_fill.c)."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pycriu import images

from phos.gpu_engine.installation import frontend_library
from tests.unit.machine_fills import memory_is_filled

PAGES = 8
MAGIC = {"pagemap": "PAGEMAP", "mm": "MM"}
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
PRIVATE, NORESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x4000

pytestmark = pytest.mark.skipif(not memory_is_filled(), reason="this machine has CRIU bring all memory")


def write(folder: Path, kind: str, entries: list[dict[str, Any]]) -> None:
    with (folder / f"{kind}-7.img").open("wb") as file:
        images.dump({"magic": MAGIC[kind], "entries": entries}, file)


def mapping(size: int, prot: int, flags: int) -> dict[str, Any]:
    start = 1 << 40
    return {
        "start": start,
        "end": start + size,
        "pgoff": 0,
        "shmid": 0,
        "prot": prot,
        "flags": flags,
        "status": 513,
        "fd": -1,
    }


def write_mappings(folder: Path, *mappings: dict[str, Any]) -> None:
    names = ("start_code", "end_code", "start_data", "end_data", "start_stack", "start_brk", "brk")
    names = (*(f"mm_{name}" for name in names), "mm_arg_start", "mm_arg_end", "mm_env_start", "mm_env_end")
    entry = {**dict.fromkeys(names, 4096), "exe_file_id": 1, "mm_saved_auxv": [1, 2], "vmas": list(mappings)}
    write(folder, "mm", [entry])


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder in memory with all that is looked at."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    write(folder, "pagemap", [{"pages_id": 1}, {"vaddr": 1 << 40, "nr_pages": PAGES, "flags": "PE_LAZY | PE_PRESENT"}])
    (folder / "pages-1.img").write_bytes(b"x" * PAGES * 4096)
    write_mappings(folder, mapping(PAGES * 4096, READ | WRITE, PRIVATE), mapping(4096, READ, PRIVATE))
    yield folder
    subprocess.run(["umount", str(folder)], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(folder)


def ask(image: Path, work: Path | None = None, *before: str, **changes: str) -> str:
    """Why not; empty if it can. ``before``: words before the program's."""
    program = frontend_library().with_name("phos-can-fill")
    done = subprocess.run(
        [*before, str(program), str(image), str(work or image)],
        env={**os.environ, "PHOS_FILL_THREADS": "", **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == bool(done.stdout), done
    return done.stdout


def test_it_can(image: Path, tmp_path: Path) -> None:
    assert ask(image) == ""
    assert ask(image, tmp_path) == ""
    assert ask(image, PHOS_FILL_THREADS="3") == ""


def test_it_is_switched_off(image: Path) -> None:
    assert "PHOS_FILL_THREADS" in ask(image, PHOS_FILL_THREADS="0")


def second_process(image: Path) -> None:
    shutil.copy(image / "pagemap-7.img", image / "pagemap-8.img")


def sparse(image: Path) -> None:
    with (image / "pages-1.img").open("r+b") as file:
        file.truncate(0)
        file.truncate(PAGES * 4096)


def elsewhere(image: Path) -> None:
    (image / "pages-1.img").rename(image / "there")
    (image / "pages-1.img").symlink_to("there")


def eager(image: Path) -> None:
    write(image, "pagemap", [{"pages_id": 1}, {"vaddr": 1 << 40, "nr_pages": PAGES, "flags": "PE_PRESENT"}])


def ancient(image: Path) -> None:
    write(image, "pagemap", [{"pages_id": 1}, {"vaddr": 1 << 40, "nr_pages": PAGES}])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (second_process, "parents"),
        (sparse, "holes"),
        (elsewhere, "is none"),
        (eager, "nothing"),
        (ancient, "nothing"),
        (lambda image: (image / "pagemap-7.img").unlink(), "no memory"),
        (lambda image: (image / "mm-7.img").unlink(), "is none"),
        (lambda image: (image / "mm-7.img").write_bytes(b"nonsense"), "not understood"),
        (lambda image: (image / "userns-9.img").touch(), "user namespace"),
        (lambda image: (image / "parent").symlink_to("../before"), "another image"),
        (lambda image: (image / "lazy-pages.socket").touch(), "listen"),
    ],
)
def test_criu_has_to(image: Path, change: Callable[[Path], object], why: str) -> None:
    change(image)
    assert why in ask(image)


def test_a_socket_that_a_server_has_left_is_in_nobody_s_way(image: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(image / "lazy-pages.socket"))
        assert "listen" in ask(image)  # it is about to
        server.listen()
        assert "listen" in ask(image)
    # In a network of its own: a server that listens in another folder is not told apart.
    assert not ask(image, None, "unshare", "--net")


def test_no_server_can_listen_where_nothing_can_be_written(image: Path) -> None:
    subprocess.run(["mount", "--bind", "-o", "ro", str(image), str(image)], check=True)
    assert "listen" in ask(image)


def test_an_image_on_a_disk_is_left_to_criu(image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "image"
    shutil.copytree(image, copy)
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(copy)], capture_output=True, text=True, check=True).stdout
    assert ("memory" in ask(copy)) == (kind.strip() != "tmpfs")


@pytest.mark.parametrize(
    ("reserved", "fills"),
    [
        (mapping(1 << 46, 0, PRIVATE), False),
        (mapping(1 << 46, READ, PRIVATE), False),
        (mapping(1 << 46, 0, PRIVATE | NORESERVE), True),
        (mapping(1 << 46, READ | WRITE, PRIVATE), True),  # the kernel has granted it before
        (mapping(1 << 46, 0, mmap.MAP_SHARED), True),
        (mapping(1 << 24, 0, PRIVATE), True),
    ],
)
def test_addresses_that_were_only_reserved_count_as_memory(image: Path, reserved: dict[str, Any], fills: bool) -> None:
    overcommit = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    write_mappings(image, mapping(PAGES * 4096, READ | WRITE, PRIVATE), reserved)
    assert (ask(image) == "") == (fills or overcommit == "1")
