"""What stays with the driver is counted with its size, and not any more once it is gone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import BUILD, CUDA_INCLUDE, ROOT

GENERATED = BUILD / "gen" / "phos_api.h"


@pytest.mark.timeout(60)
@pytest.mark.skipif(not ((CUDA_INCLUDE / "cuda.h").exists() and GENERATED.exists()), reason="not built")
def test_arrays_and_memory_nodes_are_counted_with_their_sizes(tmp_path: Path) -> None:
    program = tmp_path / "uncarried_counts"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    folders = [f"-I{ROOT / 'frontend'}", f"-I{GENERATED.parent}", "-isystem", str(CUDA_INCLUDE)]
    sources = [ROOT / "tests/unit/uncarried_counts.c", ROOT / "frontend/uncarried.c"]
    subprocess.run(["gcc", *flags, *folders, "-o", program, *sources], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


OBJECTS = [*sorted((BUILD / "obj/frontend").glob("*.o")), BUILD / "obj/gen/wire.pb-c.o"]


def with_a_driver_of_its_own(folder: Path, name: str) -> Path:
    """Build the whole frontend with the program tests/unit/NAME.c, which brings its driver along."""
    program = folder / name
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    folders = [f"-I{ROOT / 'frontend'}", f"-I{GENERATED.parent}", "-isystem", str(CUDA_INCLUDE)]
    source = ROOT / f"tests/unit/{name}.c"
    libraries = ["-l:libprotobuf-c.a", "-ldl"]
    subprocess.run(["gcc", *flags, *folders, "-o", program, source, *OBJECTS, *libraries], check=True)
    return program


def over_a_driver_of_its_own(folder: Path, name: str) -> None:
    """Build it and run it."""
    program = with_a_driver_of_its_own(folder, name)
    done = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


whole = pytest.mark.skipif(not ((CUDA_INCLUDE / "cuda.h").exists() and OBJECTS[-1].exists()), reason="not built")


@pytest.mark.timeout(60)
@whole
def test_memory_on_the_host_and_behind_the_drivers_objects(tmp_path: Path) -> None:
    """The one stays with the driver and is counted; the other must not be detached, for nothing could bind it again."""
    over_a_driver_of_its_own(tmp_path, "vmm_cases")


@pytest.mark.timeout(60)
@whole
def test_what_the_driver_serves_is_not_short_of_memory_that_we_keep(tmp_path: Path) -> None:
    """Arrays and the like, which the software GPU does not have."""
    over_a_driver_of_its_own(tmp_path, "shortage_cases")


@pytest.mark.timeout(60)
@whole
def test_a_capture_that_begins_between_two_calls_of_ours_is_not_spoilt(tmp_path: Path) -> None:
    """One that was there before has the call refused, as the driver would."""
    over_a_driver_of_its_own(tmp_path, "relaxed_cases")


@pytest.mark.timeout(60)
@whole
def test_captures_of_newer_kinds_are_known(tmp_path: Path) -> None:
    """What waits for work does so in another way meanwhile, and a checkpoint waits for their end."""
    over_a_driver_of_its_own(tmp_path, "capture_cases")


@pytest.mark.timeout(60)
@whole
def test_a_pool_is_shared_though_its_handle_was_that_of_one_being_destroyed(tmp_path: Path) -> None:
    """The call of another thread comes just between the driver's and what is done after it."""
    over_a_driver_of_its_own(tmp_path, "shared_pool_cases")
