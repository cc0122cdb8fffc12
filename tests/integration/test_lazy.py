"""Lazy restores: the processes compute while their memory is still being loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gpu_engine.errors import DaemonUnavailable
from phos.gpu_engine.installation import examples_folder, launcher
from phos.gpu_engine.touch_order import read_beside, write_beside
from phos.images.reader import Image
from tests.integration.site import PATIENCE, Program, Site, become_reaper, wait_until, words
from tests.windows.lazily import LazyRun

EXAMPLES = {
    "mlp": ("--iterations", "400", "--iteration-seconds", "0.05"),
    "pointer_chase": ("--iterations", "400", "--iteration-seconds", "0.05"),
    "struct_argument": ("--iterations", "400", "--iteration-seconds", "0.05"),
    "device_pointer": ("--iterations", "400", "--iteration-seconds", "0.05"),
    "stencil": ("--iterations", "400", "--iteration-seconds", "0.05"),
}

SLOW = str(2 << 20)
"""Bytes per second that phosd's copies reach, so that the application meets with memory that is not there yet."""


def restores(site: Site) -> list[dict[str, Any]]:
    """phosd's, the last one last; none where it does not run (anybody's first command starts it)."""
    try:
        return [job for job in site.status()["jobs"] if job["kind"] == "restore"]
    except DaemonUnavailable:
        return []


def restore_job(site: Site) -> dict[str, Any]:
    """The last restore, as phosd shows it."""
    return restores(site)[-1]


def attached(site: Site, earlier: int = 0) -> bool:
    """Whether a restore beside so many earlier ones has let its program compute."""
    return any(phase["name"] == "attach" for job in restores(site)[earlier:] for phase in job["phases"])


def computing(site: Site, earlier: int = 0) -> bool:
    """Whether the program of such a restore has met with its window, whatever became of it."""
    jobs = restores(site)[earlier:]
    return any(job.get("window", {}).get("calls", 0) > 0 or job["state"] == "mispredicted" for job in jobs)


@contextmanager
def held(site: Site, until: Callable[[Site, int], bool] = computing) -> Iterator[None]:
    """A block that restores; no copy of the phosd that :func:`slowly` makes ends before the program computes.

    ``until`` says when it does. A program that waits for a sign from the test can be no more than attached.
    """
    earlier = len(restores(site))
    hold = Path(site.environment["SOFTGPU_COPY_HOLD"])
    hold.touch()

    def let_go() -> None:
        try:
            wait_until(lambda: until(site, earlier), "the program to compute again")
        finally:
            hold.unlink()

    with ThreadPoolExecutor(1) as executor:
        letting_go = executor.submit(let_go)
        try:
            yield
        finally:
            letting_go.result()


def analysed(site: Site, program: Program) -> bool:
    """Whether all is known of a program's kernels that ever will be."""
    found = [process for process in site.status()["processes"] if process["pid"] == program.pid]
    return any((p["kernels"] > 0 or p["modules"] == 0) and p["kernels_pending"] == 0 for p in found)


def dump_at(site: Site, program: Program, iterations: int = 5) -> Path:
    """A checkpoint that ends the program."""
    program.wait_iterations(iterations)
    wait_until(lambda: analysed(site, program), "the analysis of its kernels")
    image = site.image()
    site.dump(program, image)
    return image


def dumped_asleep(site: Site) -> tuple[Program, Path, str]:
    """A program that was dumped between two iterations, and launches a kernel next; the image; what it is to print."""
    options = ("--iterations", "60")
    expected = site.reference("device_pointer", *options)
    program = site.example("device_pointer", *options, "--iteration-seconds", "2")
    program.wait_iterations(1)
    wait_until(lambda: analysed(site, program), "the analysis of its kernels")
    return program, dump_at(site, program, program.iterations() + 1), expected


def slowly(site: Site, bandwidth: str = SLOW) -> None:
    """A new phosd whose copies are slow."""
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = bandwidth
    site.environment["SOFTGPU_COPY_HOLD"] = str(site.folder / "copies-held")


@pytest.mark.parametrize("mode", ["strict", "fast"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_computes_on(site: Site, name: str, mode: str) -> None:
    expected = site.reference(name, *EXAMPLES[name][:2])
    program = site.example(name, *EXAMPLES[name])
    image = dump_at(site, program)
    slowly(site)
    with held(site):
        site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
    assert program.wait_result() == expected
    counts = restore_job(site)["window"]
    assert counts["calls"] > 0


def test_criu_lazy_pages_make_the_gpu_lazy_too(site: Site) -> None:
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    slowly(site)
    pages = site.background("criu", "lazy-pages", "-D", str(image), "-o", "lazy-pages.log")
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    with held(site):
        site.restore(image, "--lazy-pages")
    assert program.wait_result() == expected
    assert pages.wait() == 0
    assert restore_job(site)["mode"] == "lazy"


def test_phos_gpu_restore_lazy_starts_and_supervises_both(site: Site) -> None:
    # It is stopped while it sleeps, and a launch comes next. Behind a copy, which waits for its memory as well,
    # no kernel might be seen any more.
    program, image, expected = dumped_asleep(site)
    slowly(site)
    with held(site):
        said = json.loads(site.run("phos-gpu", "restore", "--lazy", "--json", str(image)).stdout)
    assert program.wait_result() == expected
    assert said["mode"] == "lazy"
    assert 0 < said["first_kernel"] <= said["seconds"]
    assert 0 < said["last_byte"] <= said["seconds"]
    assert said["waits"] > 0, "it computed while data came: all of what its first kernel touches, here"
    assert said["waited"] > 0
    assert not (image / "lazy-pages.socket").exists()


@pytest.fixture
def liar(site: Site) -> Path:
    """A phosd that says that no kernel touches anything, as long as this file exists."""
    lies = site.folder / "lies"
    lies.touch()
    site.environment["LYING_PHOSD"] = str(lies)
    return lies


def start_liar(site: Site, bandwidth: str = SLOW) -> None:
    """In place of the phosd that runs, and with slow copies."""
    slowly(site, bandwidth)
    site.serve("tests.integration.lying_phosd")


def test_a_wrong_guess_faults_and_the_image_is_restored_eagerly(site: Site, liar: Path) -> None:
    """The program is stopped while it sleeps, and what it does next is a launch.

    A copy would come with its guess, and wait until it has its memory: by the launch behind it all may be there.
    """
    program, image, expected = dumped_asleep(site)
    start_liar(site)
    with held(site):
        restored = site.restore(image, PHOS_RESTORE="lazy")
    assert "restoring once more, eagerly" in restored.stderr
    assert "no guess named" in restored.stderr
    named = re.search(r"Kernels launched last, the newest first: (\w+)", restored.stderr)
    assert named is not None, restored.stderr
    sources = [(examples_folder() / name).read_text() for name in ("device_pointer.py", "cuda_program.py")]
    assert any(f"__global__ void {named[1]}(" in source for source in sources)
    assert program.wait_result() == expected
    modes = [(job["mode"], job["state"]) for job in site.status()["jobs"] if job["kind"] == "restore"]
    assert modes == [("lazy", "mispredicted"), ("eager", "attached")]


def test_after_a_wrong_guess_phos_gpu_restores_eagerly_as_well(site: Site, liar: Path) -> None:
    """Its `criu lazy-pages` has ended with the processes by then."""
    program, image, expected = dumped_asleep(site)
    start_liar(site)
    with held(site):
        said = json.loads(site.run("phos-gpu", "restore", "--lazy", "--json", str(image)).stdout)
    assert said["mode"] == "eager"
    assert program.wait_result() == expected
    modes = [(job["mode"], job["state"]) for job in restores(site)]
    assert modes == [("lazy", "mispredicted"), ("eager", "attached")]


LAYERS = 24
LAYERS_SUM = LAYERS * (LAYERS + 1) // 2
LAYERS_PROGRAM = Path(__file__).parent / "programs" / "layers.py"


class Layers:
    """The program of programs/layers.py, dumped before it touches its memory."""

    def __init__(self, site: Site, action: str) -> None:
        self.site = site
        self.go = site.folder / "go"
        self.program = site.start(sys.executable, str(LAYERS_PROGRAM), action, str(LAYERS), str(self.go))
        self.image = dump_at(site, self.program, 1)
        self.output = self.program.output.read_bytes()
        slowly(site, str(20 << 20))

    def begin(self, detached: bool = True, **changes: str) -> subprocess.Popen[bytes]:
        """Restore lazily, and return as soon as the program has been attached."""
        words = ["criu", "restore", "--lib", "phos", "-D", str(self.image), "-o", "restore.log", "-v4"]
        if detached:
            words.append("-d")
        with held(self.site, attached):
            return self.site.background(*words, PHOS_RESTORE="lazy", **changes)

    def go_on(self) -> None:
        self.go.touch()

    def restore_again(self) -> None:
        """Eagerly, with the output as it was, by a phosd whose copies are fast."""
        self.program.output.write_bytes(self.output)
        self.site.environment["SOFTGPU_COPY_BANDWIDTH"] = "0"
        self.site.stop_phosd(check=False)
        self.site.restore(self.image)


@pytest.mark.parametrize("mode", ["strict", "fast"])
@pytest.mark.parametrize("action,expected", [("sum", LAYERS_SUM), ("free", None), ("export", LAYERS)])
def test_memory_that_is_not_there_yet(site: Site, action: str, expected: int | None, mode: str) -> None:
    layers = Layers(site, action)
    criu = layers.begin(PHOS_LAZY=mode)
    layers.go_on()
    if expected is None:
        expected = sum(1000 + i if i % 2 == 0 else i + 1 for i in range(LAYERS))
    assert layers.program.wait_result() == str(expected)
    assert criu.wait() == 0
    if action == "sum":
        assert restore_job(site)["window"]["on_demand"] > 0


def test_what_one_restore_asks_for_does_not_hold_for_the_next(site: Site) -> None:
    """The first one starts phosd."""
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    slowly(site)
    opened = []
    for changes in ({"PHOS_LAZY": "fast"}, {}):
        with held(site):
            site.restore(image, PHOS_RESTORE="lazy", **changes)
        wait_until(lambda: restore_job(site)["state"] == "attached", "the end of the restore")
        opened.append(restore_job(site)["window"]["opened"])
        os.kill(program.pid, signal.SIGKILL)
        site.gone(program)
    assert opened[0] == 0
    assert opened[1] > 0  # what is strict has no access before


def test_a_program_may_end_before_its_memory_is_there(site: Site) -> None:
    layers = Layers(site, "exit")
    criu = layers.begin()
    layers.go_on()
    wait_until(lambda: not layers.program.alive(), "the end of the program")
    assert criu.wait() == 0
    job = restore_job(site)
    assert job["state"] == "attached"
    assert job["bytes_done"] < job["bytes_total"]
    site.wait_no_gpu_memory()


def test_a_checkpoint_waits_until_all_is_there(site: Site) -> None:
    layers = Layers(site, "wait")
    criu = layers.begin()
    second = site.image("second")
    assert restore_job(site)["bytes_done"] < restore_job(site)["bytes_total"]
    site.dump(layers.program, second)
    assert criu.wait() == 0
    job = next(job for job in site.status()["jobs"] if job["kind"] == "restore")
    assert job["bytes_done"] == job["bytes_total"]
    site.restore(second)
    layers.go_on()
    Path(f"{layers.go}.end").touch()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def test_a_program_that_is_stopped_keeps_no_restore_from_being_done(site: Site) -> None:
    layers = Layers(site, "wait")
    criu = layers.begin()
    assert restore_job(site)["bytes_done"] < restore_job(site)["bytes_total"]
    os.kill(layers.program.pid, signal.SIGSTOP)
    assert criu.wait(PATIENCE) == 0
    wait_until(lambda: restore_job(site)["state"] == "attached", "the end of the restore")
    assert psutil.Process(layers.program.pid).status() == psutil.STATUS_STOPPED
    os.kill(layers.program.pid, signal.SIGCONT)
    second = site.image("second")
    site.dump(layers.program, second)
    site.restore(second)
    layers.go_on()
    Path(f"{layers.go}.end").touch()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def test_what_is_being_restored_is_not_restored_again(site: Site) -> None:
    layers = Layers(site, "sum")
    criu = layers.begin()
    refused = site.restore(layers.image, check=False, PHOS_RESTORE="lazy")
    assert refused.returncode != 0
    assert "is being restored already" in site.errors(layers.image / "restore.log")
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)
    assert criu.wait() == 0


@pytest.mark.parametrize("detached", [True, False])
def test_phosd_dies_in_the_middle(site: Site, detached: bool) -> None:
    """With -d whoever is first ends the process, the command or itself; without, nobody but itself."""
    layers = Layers(site, "sum")
    criu = layers.begin(detached=detached)
    os.kill(site.daemon_pid(), signal.SIGKILL)
    wait_until(lambda: not layers.program.alive(), "the end of the program")
    criu.wait()
    if detached:
        assert criu.returncode != 0
    else:
        assert any("still being restored" in line for line in layers.program.lines())
    assert layers.program.result() is None
    layers.restore_again()
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def test_phosd_dies_before_a_process_knows_that_its_memory_is_still_coming(site: Site) -> None:
    """Not -d: then nobody ends the process, and the next phosd must not hand it what was not loaded."""
    layers = Layers(site, "sum")
    Path(site.environment["SOFTGPU_COPY_HOLD"]).touch()
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="killed while attaching")
    words = ["criu", "restore", "--lib", "phos", "-D", str(layers.image), "-o", "restore.log", "-v4"]
    criu = site.background(*words, PHOS_RESTORE="lazy")
    layers.go_on()
    criu.wait()  # for the end of the process
    assert any("the GPU memory of this process is lost" in line for line in layers.program.lines())
    assert layers.program.result() is None


@pytest.mark.parametrize("damage", ["altered", "cut off"])
def test_the_image_is_damaged_in_the_middle(site: Site, damage: str) -> None:
    layers = Layers(site, "sum")
    criu = layers.begin()
    kept = {}
    for file in layers.image.glob("phos-data-*.raw"):
        kept[file] = file.read_bytes()
        with open(file, "r+b") as data:
            if damage == "altered":
                data.write(b"\xff" * len(kept[file]))
            else:
                data.truncate(4096)
    wait_until(lambda: not layers.program.alive(), "the end of the program")
    assert criu.wait() != 0
    job = restore_job(site)
    assert job["state"] == "failed"
    assert "is damaged" in job["error"] or "cannot be read" in job["error"]
    assert layers.program.result() is None
    for file, content in kept.items():
        file.write_bytes(content)
    layers.restore_again()
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def test_criu_lazy_pages_dies_in_the_middle(site: Site) -> None:
    layers = Layers(site, "ballast")
    log = site.folder / "run" / "phosd.log"
    restore = site.background("phos-gpu", "restore", "--lazy", str(layers.image), PHOS_FILL_THREADS="0")
    servers: list[psutil.Process] = []

    def is_there() -> bool:
        servers[:] = [p for p in site.processes() if "lazy-pages" in words(p) and "criu" in " ".join(words(p)[:4])]
        return bool(servers)

    # It has most of a GiB to bring, which takes a quarter of a second; to look for it then may take as long.
    wait_until(is_there, "the server")
    wait_until(lambda: log.exists() and "the driver's part of" in log.read_text(), "the process to be put together")
    killed = []
    for server in servers:
        with suppress(psutil.NoSuchProcess):  # a part of the script that becomes the server
            server.kill()
            killed.append(server)
    assert killed, "it has ended"
    layers.go_on()
    status = restore.wait()
    wait_until(lambda: not layers.program.alive(), "the end of the program")
    assert status != 0
    assert layers.program.result() is None
    layers.restore_again()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def criu_without_lazy_pages(site: Site, first: str = ":") -> Path:
    """A CRIU whose server of pages ends with 3 at once; everything else of it comes after a command of the shell's."""
    other = site.folder / "criu"
    other.write_text(f'#!/bin/sh\n[ "$1" != lazy-pages ] || exit 3\n{first}\nPHOS_CRIU= exec {launcher("criu")} "$@"\n')
    other.chmod(0o755)
    return other


def test_criu_lazy_pages_does_not_start(site: Site) -> None:
    layers = Layers(site, "sum")
    other = criu_without_lazy_pages(site)
    refused = site.run("phos-gpu", "restore", "--lazy", str(layers.image), check=False, PHOS_CRIU=str(other))
    assert refused.returncode != 0
    assert "criu lazy-pages failed with status 3 before all of the CPU's memory was there" in refused.stderr
    assert re.search(r"criu lazy-pages \(pid \d+\) has ended", refused.stderr)
    wait_until(lambda: not layers.program.alive(), "its end")
    site.wait_no_gpu_memory()
    layers.restore_again()
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)


def test_a_process_that_runs_already_survives_the_server_of_a_restore_that_is_refused(site: Site) -> None:
    """The restore is refused because the process runs; phosd's latest of that image is the one that brought it back."""
    layers = Layers(site, "sum")
    site.run("phos-gpu", "restore", str(layers.image))
    other = criu_without_lazy_pages(site, "sleep 1")
    refused = site.run("phos-gpu", "restore", "--lazy", str(layers.image), check=False, PHOS_CRIU=str(other))
    assert refused.returncode != 0
    assert "still runs as pid" in refused.stderr
    assert layers.program.alive()
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_processes_that_share_memory(site: Site, mode: str) -> None:
    program = site.until_awaited(
        sys.executable, str(LAYERS_PROGRAM.parent / "shared_memory.py"), "parent", "1000", str(site.folder / "handle")
    )
    image = dump_at(site, program, 10)
    slowly(site, str(1 << 20))
    with held(site):
        site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
    assert program.wait_result() == "2000"
    assert restore_job(site)["window"]["waits"] > 0


def test_a_lazy_restore_learns_in_which_order_memory_is_touched(site: Site) -> None:
    layers = Layers(site, "sum")
    criu = layers.begin(PHOS_LAZY="fast")
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS_SUM)
    assert criu.wait() == 0
    directory = os.open(layers.image, os.O_RDONLY)
    try:
        with Image.open(directory) as image:
            wait_until(lambda: read_beside(directory, image.inventory.image_id) != [], "the order to be written down")
            order = read_beside(directory, image.inventory.image_id)
            newest = max(block for _, block in image.blocks)
            chunks = sum(-(-table.size // table.chunk_size) for table in image.blocks.values())
    finally:
        os.close(directory)
    assert order[0][0][1] == newest  # the program begins with its last buffer
    assert [key[1] for key, _ in order] == sorted((key[1] for key, _ in order), reverse=True)
    assert 0 < len(order) <= chunks  # it is written down as long as memory is coming
    site.run("phos-gpu", "verify", str(layers.image))


def test_what_was_touched_first_is_loaded_first_the_next_time(site: Site) -> None:
    layers = Layers(site, "last")
    criu = layers.begin(PHOS_LAZY="fast")
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS)
    assert criu.wait() == 0
    first = restore_job(site)
    assert first["window"]["waits"] > 0  # nobody knew that the last buffer would be wanted first

    layers.program.output.write_bytes(layers.output)
    layers.go.unlink()
    wait_until(
        lambda: not layers.program.alive() and site.gpu_memory() == 0, "the end of the program and of its copies"
    )
    criu = layers.begin(PHOS_LAZY="fast")
    wait_until(lambda: 4 * restore_job(site)["bytes_done"] >= first["bytes_total"], "a quarter of the memory")
    layers.go_on()
    assert layers.program.wait_result() == str(LAYERS)
    assert criu.wait() == 0
    second = restore_job(site)["window"]
    assert (second["waits"], second["on_demand"]) == (0, 0)


def test_what_was_learnt_before_is_not_forgotten_for_a_shorter_look(site: Site) -> None:
    """By a phosd that has not seen the program before; its window ends with the first chunk that it touches."""
    layers = Layers(site, "last")
    directory = os.open(layers.image, os.O_RDONLY)
    try:
        with Image.open(directory) as image:
            number, tables = image.inventory.image_id, image.blocks
            before = [(k, n) for k, table in tables.items() for n in range(-(-table.size // table.chunk_size))]
        assert write_beside(directory, number, before)
        criu = layers.begin(PHOS_LAZY="fast")
        layers.go_on()
        assert layers.program.wait_result() == str(LAYERS)
        assert criu.wait() == 0
        wait_until(lambda: read_beside(directory, number) != before, "what was touched to be written down")
        after = read_beside(directory, number)
    finally:
        os.close(directory)
    assert before.index(after[0]) > 0  # the program has touched its last buffer
    assert sorted(after) == sorted(before)


def test_random_programs(tmp_path: Path) -> None:
    """More of them: python -m tests.windows.lazily --restores 500."""
    become_reaper()
    made = LazyRun(tmp_path, seed=11)
    try:
        made.run(5)
    finally:
        made.site.close()
    assert sum(count for name, count in made.met.items() if "lazy attached" in name) == 5


def test_the_image_of_a_concurrent_checkpoint_has_the_order(site: Site) -> None:
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(3)
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(8 << 20)
    image = site.image()
    site.dump(program, image, "--leave-running", PHOS_PROTOCOL="cow")
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert said["order"]["chunks"] > 0
    assert said["order"]["blocks"] > 0
