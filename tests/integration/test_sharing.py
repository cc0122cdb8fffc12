"""Memory shared between processes stays shared through detach, dump and restore."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.site import PATIENCE, Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "shared_memory.py"
SHARES = Path(__file__).parents[2] / "bench" / "programs" / "shares_by_the_driver.py"


def wait_exported(handle: Path) -> None:
    """Until an owner has written its handle."""
    wait_until(lambda: handle.exists() and handle.stat().st_size == 64, "the handle")


def test_shared_buffer_survives_dump_kill_and_restore(site: Site) -> None:
    program = site.until_awaited(sys.executable, str(PROGRAM), "parent", "1000", str(site.folder / "handle"))
    program.wait_iterations(10)
    image = site.image()
    site.dump(program, image)
    summary = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert len(summary["processes"]) == 2
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == "2000"
    site.wait_no_gpu_memory()


def test_shared_buffer_survives_generations_that_run_on(site: Site) -> None:
    program = site.until_awaited(sys.executable, str(PROGRAM), "parent", "1000", str(site.folder / "handle"))
    program.wait_iterations(5)
    for generation in range(3):
        site.dump(program, site.image(f"generation-{generation}"), "--leave-running")
        program.wait_progress(3)
    assert program.wait_result() == "2000"


def test_memory_that_somebody_outside_the_tree_maps_is_refused(site: Site) -> None:
    """He would not stand still while it is saved."""
    handle = site.folder / "handle"
    owner = site.start(sys.executable, str(PROGRAM), "alone", "5000", str(handle))
    wait_exported(handle)
    guest = site.start(sys.executable, str(PROGRAM), "child", "5000", str(handle))
    owner.wait_iterations(3)
    for number, (program, said) in enumerate(
        [(owner, f"Process {guest.pid} "), (guest, "belongs to a process outside the tree")]
    ):
        image = site.image(f"image-{number}")
        done = site.dump(program, image, "--leave-running", check=False)
        assert done.returncode != 0
        assert said in done.stderr + (image / "dump.log").read_text()
        assert "Dump their common ancestor" in done.stderr + (image / "dump.log").read_text()
        assert not list(image.glob("phos-*"))
    owner.wait_progress()


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_nobody_outside_is_handed_memory_that_is_being_saved(site: Site, protocol: str) -> None:
    """He waits until it has been."""
    site.environment |= {"SOFTGPU_TOGGLE_MS": "500", "SOFTGPU_COPY_BANDWIDTH": str(8 << 20)}
    handle, log = site.folder / "handle", site.folder / "run" / "phosd.log"
    site.run("phosd", "--ensure")
    owner = site.start(sys.executable, str(PROGRAM), "alone", "30", str(handle), SOFTGPU_COPY_BANDWIDTH="0")
    wait_exported(handle)
    image = site.image()
    dump = site.begin_dump(owner, image, "--leave-running", PHOS_PROTOCOL=protocol)
    wait_until(lambda: "are detached" in log.read_text(), "the dump to begin")
    site.start(sys.executable, str(PROGRAM), "child", "30", str(handle), SOFTGPU_COPY_BANDWIDTH="0")
    assert dump.wait(PATIENCE) == 0, site.errors(image / "dump.log")
    assert [job["state"] for job in site.status()["jobs"]] == ["committed"]
    site.run("phos-gpu", "verify", str(image))
    assert owner.wait_result() == "60"


def test_what_has_been_freed_is_nobody_s(site: Site) -> None:
    """A guest that keeps it open is in nobody's way."""
    handle, freed = site.folder / "handle", site.folder / "handle.freed"
    owner = site.start(sys.executable, str(PROGRAM), "leaves", "30", str(handle))
    wait_exported(handle)
    guest = site.start(sys.executable, str(PROGRAM), "keeps", "30", str(handle))
    wait_until(freed.exists, "the memory to be freed")
    site.dump(owner, site.image(), "--leave-running")
    handle.with_suffix(".over").touch()
    guest.process.kill()
    assert owner.wait_result() == "0"


def test_shared_host_memory_of_the_driver_s_is_refused_as_long_as_there_is_any(site: Site) -> None:
    """The driver would save it and then fail to restore it, with which the processes would be lost."""
    base = site.folder / "program"
    program = site.start(sys.executable, str(PROGRAM.with_name("shared_host_memory.py")), str(base))
    program.wait_iterations(3)
    for number, protocol in enumerate(["stop", "cow"]):
        image = site.image(f"refused-{number}")
        done = site.dump(program, image, "--leave-running", check=False, PHOS_PROTOCOL=protocol)
        assert done.returncode != 0
        assert "NCCL_CUMEM_HOST_ENABLE=0" in done.stderr
        assert not list(image.glob("phos-*"))
        program.wait_progress(3)
    base.with_suffix(".freed-when").touch()
    wait_until(lambda: "FREED" in program.lines(), "the memory to be freed")
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    program.wait_progress(3)
    base.with_suffix(".over").touch()
    assert program.wait_result() == "0"


# CUDA IPC with a process outside PhOS, with one under it whose memory is left to the driver; a pool's handle.
@pytest.mark.parametrize(
    ("how", "owner_under", "carried", "refused"),
    [
        ("ipc", False, "1", ["guest"]),
        ("ipc", True, "0", ["owner", "guest"]),
        ("pool", True, "1", ["owner", "guest"]),
    ],
    ids=["ipc-outside", "ipc-not-carried", "pool"],
)
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_what_the_driver_shares_by_itself_is_refused_as_long_as_there_is_any(
    site: Site, how: str, owner_under: bool, carried: str, refused: list[str], protocol: str
) -> None:
    """The driver would save it, and not restore the guest; an owner would come back with memory of its own."""
    base, script = site.folder / "shared", str(SHARES)
    owner = site.start(sys.executable, script, how, "owner", str(base), under=owner_under, PHOS_CARRY_DEVICE=carried)
    guest = site.start(sys.executable, script, how, "guest", str(base), PHOS_CARRY_DEVICE=carried)
    programs = {"owner": owner, "guest": guest}
    for program in programs.values():
        program.wait_iterations(3)
    for name in refused:
        image = site.image(f"refused-{name}")
        done = site.dump(programs[name], image, "--leave-running", check=False, PHOS_PROTOCOL=protocol)
        assert done.returncode != 0
        assert "close it before, or start all of them with phos-gpu run" in done.stderr
        assert not list(image.glob("phos-*"))
        programs[name].wait_progress(3)
    base.with_suffix(".freed-when").touch()
    for name in refused:
        wait_until(lambda name=name: "FREED" in programs[name].lines(), "the memory to be let go")  # type: ignore[misc]
        image = site.image(f"image-{name}")
        site.dump(programs[name], image, PHOS_PROTOCOL=protocol)
        site.restore(image)
        programs[name].wait_progress(3)
    base.with_suffix(".over").touch()
    assert [program.wait_result() for program in programs.values()] == ["0", "0"]


def test_what_the_driver_shares_cannot_be_restored_on_the_software_gpu_either(site: Site) -> None:
    """So that the refusal above is seen to be needed: without the frontend nothing refuses, and the process is lost."""
    base, script = site.folder / "shared", str(SHARES)
    site.start(sys.executable, script, "ipc", "owner", str(base), under=False)
    guest = site.start(sys.executable, script, "ipc", "guest", str(base), under=False)
    guest.wait_iterations(3)
    # Whether the dump fails depends on who is first: the program ends when it meets the error.
    site.dump(guest, site.image(), "--leave-running", check=False)
    wait_until(lambda: not guest.alive(), "its end")
    assert "memory or pools were shared with other processes" in guest.output.read_text()
