"""Twin kernels: what a launch touches that no guess named, found where it happens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.site import Program, Site, wait_until
from tests.integration.test_lazy import (
    EXAMPLES,
    analysed,
    attached,
    dump_at,
    held,
    restore_job,
    restores,
    slowly,
    start_liar,
)

pytestmark = pytest.mark.timeout(300)

SLOW = str(2 << 20)
"""Bytes per second of phosd's copies: windows last for seconds."""
HELD = "64K"
"""Fewer bytes than this are not held: hashes, which come from the GPU before the window is opened."""
LONG = ("--iterations", "400", "--iteration-seconds", "0.05")
READER = Path(__file__).parent / "programs" / "reader.py"
BUFFERS = 24


@pytest.fixture
def liar(site: Site) -> Path:
    """A phosd that says that no kernel touches anything, as long as this file exists, and whose kernels have twins."""
    lies = site.folder / "lies"
    lies.touch()
    site.environment |= {"LYING_PHOSD": str(lies), "PHOS_TWINS": "on"}
    return lies


def window_of(site: Site, image: Path) -> dict[str, int]:
    """What an image says of its window."""
    said: dict[str, int] = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)["window"]
    return said


def attached_again(site: Site) -> bool:
    """Whether what the last dump stopped runs again."""
    return any(phase["name"] == "attach" for job in dumps(site)[-1:] for phase in job["phases"])


@contextmanager
def copies_held(site: Site, until: Callable[[], None]) -> Iterator[None]:
    """A block in which no copy of phosd's ends before ``until`` returns, which runs beside it.

    phosd was started with SOFTGPU_COPY_HOLD in its environment; the program does without.
    """
    hold = Path(site.environment["SOFTGPU_COPY_HOLD"])
    hold.touch()

    def let_go() -> None:
        try:
            until()
        finally:
            hold.unlink()

    with ThreadPoolExecutor(1) as executor:
        letting_go = executor.submit(let_go)
        yield
        letting_go.result()


def has_twins(program: Program) -> bool:
    """Whether it has been sent twins: it maps what they report to."""
    return "phos-twins" in Path(f"/proc/{program.pid}/maps").read_text()


def dumped_with_twins(site: Site, program: Program) -> Path:
    """Dump a program that runs on, in a window in which it has twins; see :func:`copies_held`."""
    program.wait_iterations(3)
    wait_until(lambda: analysed(site, program), "the analysis of its kernels")
    image = site.image()
    with copies_held(site, lambda: wait_until(lambda: has_twins(program), "twins")):
        site.dump(program, image, "--leave-running", PHOS_PROTOCOL="cow")
    return image


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_checkpoint_with_twins(site: Site, name: str) -> None:
    """Guesses are right: twins compute what their kernels compute, and the image is the one that it was."""
    quickly = {"SOFTGPU_COPY_BANDWIDTH": "0", "SOFTGPU_COPY_HOLD": ""}
    site.environment |= {"PHOS_TWINS": "on", "SOFTGPU_COPY_BANDWIDTH": str(1 << 20)}  # once let go, that takes seconds
    site.environment |= {"SOFTGPU_COPY_HOLD": str(site.folder / "hold"), "SOFTGPU_COPY_HOLD_BYTES": HELD}
    expected = site.reference(name, *LONG[:2])
    site.run("phosd", "--ensure")
    program = site.example(name, *LONG, **quickly)
    image = dumped_with_twins(site, program)
    assert program.wait_result() == expected
    counts = window_of(site, image)
    assert counts["twin_kernels"] > 0
    assert counts["violations"] == 0
    if counts["anything"] == 0:
        assert counts["twins"] > 0
    site.gone(program)
    site.restore(image)
    assert program.wait_result() == expected


def in_a_long_window(site: Site, name: str, *arguments: str, **environment: str) -> tuple[Program, dict[str, int]]:
    """A program of those for twins, whose own copies are quick and phosd's are held; and what its window counts."""
    site.environment |= {"PHOS_TWINS": "on", "SOFTGPU_COPY_BANDWIDTH": str(32 << 20)}
    site.environment |= {"SOFTGPU_COPY_HOLD": str(site.folder / "hold"), "SOFTGPU_COPY_HOLD_BYTES": HELD}
    site.run("phosd", "--ensure")
    quickly = {"SOFTGPU_COPY_BANDWIDTH": "0", "SOFTGPU_COPY_HOLD": "", **environment}
    program = site.start(sys.executable, str(READER.with_name(name)), *arguments, **quickly)
    return program, window_of(site, dumped_with_twins(site, program))


@pytest.mark.parametrize(("blocks", "twins"), [(100, True), (200, False)])
def test_no_twin_of_blocks_that_may_wait_for_each_other(site: Site, blocks: int, twins: bool) -> None:
    """Of 132 multiprocessors each holds two blocks of the kernel and one of its twin: 200 would not run at a time."""
    _, counts = in_a_long_window(site, "persistent.py", str(blocks), SOFTGPU_REGISTERS=str(2 * 1024 * 16))
    assert counts["twin_kernels"] == 1
    assert (counts["twins"] > 0) == twins


def test_contexts_in_which_twins_were_launched_may_end_in_the_window(site: Site) -> None:
    """The events behind those twins end with them, and nobody may ask for these any more."""
    program, counts = in_a_long_window(site, "ends_contexts.py")
    assert counts["twins"] > 0
    program.wait_iterations(program.iterations() + 3)


@pytest.mark.parametrize("kind", ["own", "primary"])
def test_the_context_in_which_twins_found_their_tables_may_end_in_the_window(site: Site, kind: str) -> None:
    """Host memory is the GPU's as long as the context lives that it was registered in; twins of others need it, too."""
    program, counts = in_a_long_window(site, "leaves_a_context.py", kind)
    assert counts["twins"] > 10
    program.wait_iterations(program.iterations() + 3)


def test_a_twin_uses_the_variable_of_the_module_that_is_loaded_now(site: Site) -> None:
    """One that was unloaded may have had the same handles, and its variables elsewhere."""
    program, counts = in_a_long_window(site, "reloads.py", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=4096")
    assert counts["twins"] > 10
    program.wait_iterations(program.iterations() + 3)


ASLEEP = 3
"""Seconds between two iterations: longer than a dump takes from its command to the quiesce, even on a slow machine."""


@pytest.mark.parametrize(
    ("name", "size"), [("struct_argument", "1500000"), ("pointer_chase", "19"), ("device_pointer", "1500000")]
)
def test_a_checkpoint_whose_guesses_are_wrong(site: Site, liar: Path, name: str, size: str) -> None:
    """The program is stopped while it sleeps; what it does next is the launch of which nothing was guessed.

    No copy of phosd's ends before it has been made.
    """
    options = ("--size", size, "--iterations", "6")
    expected = site.reference(name, *options)
    site.run("phosd", "--ensure")
    start_liar(site, "0")
    program = site.example(name, *options, "--iteration-seconds", str(ASLEEP), SOFTGPU_COPY_HOLD="")
    program.wait_iterations(1)
    wait_until(lambda: analysed(site, program), "the analysis of its kernels")
    program.wait_iterations(program.iterations() + 1)
    image = site.image()
    seen = program.iterations()

    def launched() -> None:
        wait_until(lambda: attached_again(site), "the window")
        wait_until(lambda: program.iterations() > seen, "its next launch")

    with copies_held(site, launched):
        site.dump(program, image, "--leave-running", PHOS_PROTOCOL="cow", PHOS_VALIDATE="off")
    wrong, right = dumps(site)
    assert (wrong["state"], right["state"]) == ("mispredicted", "committed")  # made anew, with the world stopped
    assert "that no guess named: " in wrong["error"]
    assert re.search(r"\w+ writes to 0x[0-9a-f]+ \(line \d+ of its PTX\)", wrong["error"])
    assert program.wait_result() == expected
    site.gone(program)
    site.restore(image, PHOS_RESTORE="eager")
    assert program.wait_result() == expected


def with_twins(site: Site, earlier: int) -> bool:
    """Whether the program of a restore beside so many earlier ones has twins."""
    return any(job["window"].get("twin_kernels", 0) > 0 for job in restores(site)[earlier:])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_lazy_restore_with_twins(site: Site, name: str) -> None:
    expected = site.reference(name, *EXAMPLES[name][:2])
    program = site.example(name, *EXAMPLES[name])
    image = dump_at(site, program)
    slowly(site, str(1 << 20))
    with held(site, with_twins):
        site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY="fast")
    assert program.wait_result() == expected
    counts = restore_job(site)["window"]
    assert counts["twin_kernels"] > 0
    assert counts["violations"] == 0


def test_a_wrong_guess_waits_for_its_data(site: Site, liar: Path) -> None:
    """In a restore that is not strict, and in which nothing is waited for before a launch."""
    del site.environment["PHOS_TWINS"]  # they are there without being asked for
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = "0"
    go = site.folder / "go"
    program = site.start(sys.executable, str(READER), str(BUFFERS), str(go))
    image = dump_at(site, program, 1)
    start_liar(site, str(10 << 20))
    with held(site, attached):
        criu = site.background(
            *("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4"),
            PHOS_RESTORE="lazy",
            PHOS_LAZY="fast",
        )
    wait_until(lambda: restoring(site).get("twin_kernels", 0) > 0, "twins")
    job = restore_job(site)
    assert job["bytes_done"] < job["bytes_total"]
    go.touch()
    assert program.wait_result() == str(1000 + BUFFERS * (BUFFERS + 1) // 2)
    assert criu.wait() == 0
    counts = restore_job(site)["window"]
    assert counts["twins"] == BUFFERS
    assert counts["violations"] > 0
    assert "guesses were wrong, and their kernels waited: add " in (site.folder / "run" / "phosd.log").read_text()


def test_a_lazy_restore_without_a_thread_for_twins_waits_for_all_data(site: Site, liar: Path) -> None:
    """Nothing would find a wrong guess then: the program goes on as after a restore that is not lazy."""
    del site.environment["PHOS_TWINS"]
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = "0"
    go = site.folder / "go"
    program = site.start(sys.executable, str(READER), str(BUFFERS), str(go))
    image = dump_at(site, program, 1)
    site.environment["LYING_PHOSD_TWINS"] = "cannot start"
    start_liar(site, str(10 << 20))
    go.touch()
    site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY="fast")
    assert program.wait_result() == str(1000 + BUFFERS * (BUFFERS + 1) // 2)
    assert "its kernels have no twins" in (site.folder / "run" / "phosd.log").read_text()


def dumps(site: Site) -> list[dict[str, Any]]:
    """phosd's dumps, the last one last."""
    return [job for job in site.status()["jobs"] if job["kind"] == "dump"]


def restoring(site: Site) -> dict[str, int]:
    """What the restore that is under way has met with; nothing if there is none yet."""
    jobs = [job for job in site.status()["jobs"] if job["kind"] == "restore"]
    return dict(jobs[-1]["window"]) if jobs else {}


def test_without_twins(site: Site) -> None:
    site.environment["PHOS_TWINS"] = "off"
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    slowly(site, str(1 << 20))
    with held(site):
        site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY="fast")
    program.wait_result()
    assert "twin_kernels" not in restore_job(site)["window"]


def test_a_setting_without_a_meaning(site: Site) -> None:
    site.environment["PHOS_TWINS"] = "perhaps"
    site.run("phosd", "--ensure")
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(1)
    done = site.dump(program, site.image(), "--leave-running", check=False)
    assert done.returncode != 0
    assert "PHOS_TWINS=perhaps is neither on nor off" in done.stdout + done.stderr + Site.errors(
        site.folder / "image" / "dump.log"
    )
    program.wait_progress()
