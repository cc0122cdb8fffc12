"""Kernels are analysed while their program computes: no checkpoint and no restore waits for that."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from phos.gpu_engine.cow.dump import DESCRIBE_SECONDS
from phos.gpu_engine.spec import table
from phos.gpu_engine.spec.descriptor import Source
from phos.images.reader import Image
from tests.integration.site import Program, Site, wait_until
from tests.integration.test_lazy import analysed as all_is_known
from tests.integration.test_lazy import held

SLOW_WORKER = """
import os, sys, time
from pathlib import Path
if "phos.gpu_engine.spec.worker" in getattr(sys, "orig_argv", ()):
    from phos.gpu_engine.spec import analysis
    within = analysis.describe_within
    def slow(*arguments, **more):
        log = Path(os.environ["PHOS_TEST_SITE"]) / "analyses"
        with open(log, "a") as file:
            file.write("x")
        while not (Path(os.environ["PHOS_TEST_SITE"]) / "analyse").exists():
            time.sleep(0.02)
        return within(*arguments, **more)
    analysis.describe_within = slow
"""
"""The analysis of modules stands still until the file `analyse` is there."""

KERNELS = 3
"""At least so many kernels has the example."""


@pytest.fixture
def analysed(site: Site) -> Site:
    """A site with a cache of its own, and with a slow analysis."""
    (site.folder / "custom").mkdir()
    (site.folder / "custom" / "sitecustomize.py").write_text(SLOW_WORKER)
    site.environment["PYTHONPATH"] = f"{site.folder / 'custom'}:{site.environment.get('PYTHONPATH', '')}"
    site.environment["PHOS_CACHE"] = str(site.folder / "cache")
    serve(site)
    return site


def serve(site: Site) -> None:
    """A new phosd, whose analysis is slow."""
    site.serve("phos.gpu_engine.daemon")


def start(site: Site) -> Program:
    program = site.example("mlp", "--iterations", "400", "--iteration-seconds", "0.05")
    program.wait_iterations(3)
    return program


def wait_described(site: Site, program: Program) -> None:
    """Wait until the kernels that a program has told of are analysed."""
    wait_until(lambda: list((site.folder / "cache").glob("*.json")) != [], "the first descriptors")
    wait_until(lambda: all_is_known(site, program), "the analysis of all")


def go_on(site: Site) -> None:
    (site.folder / "analyse").touch()


def phosd_log(site: Site) -> str:
    return (site.folder / "run" / "phosd.log").read_text()


def when_logged(site: Site, sentence: str) -> float:
    """The time of day at which phosd said so, in seconds."""
    line = next(line for line in phosd_log(site).splitlines() if sentence in line)
    found = re.search(r"(\d+):(\d+):(\d+)[,.](\d+)", line)
    assert found is not None, line
    hours, minutes, seconds, fraction = found.groups()
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{fraction}")


def described(image: Path) -> list[Source]:
    """Where the descriptors in an image come from."""
    [process] = Image.open(image).inventory.processes
    return [found.source for _, _, found in table.unpack(process.access_table)]


def names_all(image: Path) -> bool:
    """Whether a process restored from it need not tell what it may launch."""
    [process] = Image.open(image).inventory.processes
    return process.access_table_whole


def all_of_code(image: Path) -> bool:
    found = described(image)
    return len(found) >= KERNELS and set(found) == {Source.PTX}


def test_a_first_checkpoint_finds_kernels_described(analysed: Site) -> None:
    go_on(analysed)
    program = start(analysed)
    wait_described(analysed, program)
    image = analysed.image()
    analysed.dump(program, image)
    assert all_of_code(image)
    assert names_all(image)
    assert "analysis was not done" not in phosd_log(analysed)


def test_a_lazy_restore_begins_with_what_the_image_names(analysed: Site) -> None:
    """Another phosd, and no analysis: the process tells of its kernels while it computes, and no call waits for all."""
    go_on(analysed)
    program = start(analysed)
    wait_described(analysed, program)
    first = analysed.image("first")
    analysed.dump(program, first)
    assert names_all(first)
    (analysed.folder / "analyse").unlink()
    shutil.rmtree(analysed.folder / "cache")
    analysed.environment["SOFTGPU_COPY_BANDWIDTH"] = str(2 << 20)
    serve(analysed)
    analysed.restore(first, PHOS_RESTORE="lazy")
    program.wait_progress(2)
    wait_until((analysed.folder / "analyses").exists, "the process to tell of its kernels")
    wait_until(lambda: "while loading:" in phosd_log(analysed), "the end of the loading")
    assert re.findall(r"while loading: .*\banything (\d+)", phosd_log(analysed)) == ["0"]
    second = analysed.image("second")
    analysed.dump(program, second, PHOS_PROTOCOL="stop")
    assert all_of_code(second)
    assert not names_all(second)  # what it has told of is not analysed, so that there may be more than the image says


@pytest.mark.parametrize("leave", [True, False])
def test_no_checkpoint_waits_for_an_analysis(analysed: Site, leave: bool) -> None:
    program = start(analysed)
    wait_until((analysed.folder / "analyses").exists, "the analysis to begin, before anybody asks for it")
    image = analysed.image()
    analysed.dump(program, image, *(["--leave-running"] if leave else []), PHOS_PROTOCOL="stop")
    assert described(image) == []
    assert not names_all(image)
    times = {said: when_logged(analysed, f"{image}: {said}") for said in ("CRIU has ended", "committed")}
    assert times["committed"] - times["CRIU has ended"] < DESCRIBE_SECONDS
    assert Image.open(image).inventory.total_seconds < 30


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_what_is_analysed_after_the_kill_is_known_to_a_later_phosd(analysed: Site, mode: str) -> None:
    """The image knows nothing of its kernels, their modules were in no file, and phosd is another one."""
    program = start(analysed)
    wait_until((analysed.folder / "analyses").exists, "the analysis to begin")
    first = analysed.image("first")
    analysed.dump(program, first)
    assert described(first) == []
    serve(analysed)
    assert list((analysed.folder / "cache" / "modules").iterdir()) != []
    go_on(analysed)
    analysed.restore(first, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
    program.wait_progress(5)
    wait_described(analysed, program)
    second = analysed.image("second")
    analysed.dump(program, second)
    assert all_of_code(second)


def test_the_analysis_goes_on_after_the_kill(analysed: Site) -> None:
    program = start(analysed)
    wait_until((analysed.folder / "analyses").exists, "the analysis to begin")
    image = analysed.image()
    analysed.dump(program, image)
    go_on(analysed)
    wait_until(lambda: list((analysed.folder / "cache").glob("*.json")) != [], "descriptors of a process that is gone")
    assert not program.alive()


def test_a_lazy_restore_names_what_waited_for_everything(analysed: Site) -> None:
    """Of a kernel whose code nobody has looked at, nothing but its arguments is known."""
    program = start(analysed)
    image = analysed.image()
    analysed.dump(program, image)
    analysed.environment["SOFTGPU_COPY_BANDWIDTH"] = str(2 << 20)
    analysed.environment["SOFTGPU_COPY_HOLD"] = str(analysed.folder / "copies-held")
    serve(analysed)
    with held(analysed):
        analysed.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY="fast")
    program.wait_progress(2)
    wait_until(lambda: "while loading:" in phosd_log(analysed), "the end of the loading")
    named = re.findall(r": (\w+) may touch anything, as far as is known", phosd_log(analysed))
    assert len(named) == 1
    assert not named[0].startswith("cu")  # a kernel, and not the call that launched it
