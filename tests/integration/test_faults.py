"""Faults of the driver and of phosd, one at a time, through the real CRIU.

Each gets a sentence and a nonzero exit; the application computes on correctly wherever it was running before (after a
failed restore nothing of it runs); no image that claims to be whole, no GPU memory and no process is left; and phosd is
fit for the next job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.site import Program, Site, wait_until, words

BLOCKS = """
# GPU memory in many shapes, checked all the time; every word of it is known, so nothing can go wrong unseen.
import argparse, sys, threading, time
from cuda.bindings import driver as cuda

def check(answer):
    if int(answer[0]):
        print("ERROR", answer[0].name, flush=True)
        sys.exit(3)
    return answer[1] if len(answer) == 2 else answer[1:]

p = argparse.ArgumentParser()
p.add_argument("--blocks", type=int, default=4)
p.add_argument("--size", type=int, default=2 << 20)
p.add_argument("--devices", type=int, default=1)
p.add_argument("--threads", type=int, default=1)
p.add_argument("--iterations", type=int, default=100000)
p.add_argument("--seconds", type=float, default=0.02)
p.add_argument("--served", action="store_true")  # by cuMemAlloc; else each has physical memory of its own
o = p.parse_args()
check(cuda.cuInit(0))
contexts = [check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(d)))) for d in range(o.devices)]

def allocate(device):
    if o.served:
        return int(check(cuda.cuMemAlloc(o.size)))
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    access = cuda.CUmemAccessDesc()
    access.location = properties.location
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    at = int(check(cuda.cuMemAddressReserve(o.size, 0, 0, 0)))
    handle = check(cuda.cuMemCreate(o.size, properties, 0))
    check(cuda.cuMemMap(at, o.size, 0, handle, 0))
    check(cuda.cuMemSetAccess(at, o.size, [access], 1))
    check(cuda.cuMemRelease(handle))
    return at

WORDS = 256
buffers = []
for device, context in enumerate(contexts):
    check(cuda.cuCtxSetCurrent(context))
    for i in range(o.blocks):
        at = allocate(device)
        value = len(buffers) if len(buffers) < 64 else 0  # of thousands most are zeros: less to write
        if value or o.served:
            check(cuda.cuMemsetD32(at, value, o.size // 4 if o.served else WORDS))
        buffers.append([device, at, value])
lock = threading.Lock()
done = 0

def verify(buffer):
    device, at, value = buffer
    data = bytearray(4 * WORDS)
    check(cuda.cuMemcpyDtoH(data, at, len(data)))
    if bytes(data) != value.to_bytes(4, "little") * WORDS:
        print("WRONG", device, value, data[:8].hex(), flush=True)
        sys.exit(4)

def work(number):
    global done
    mine = buffers[number::o.threads]
    stream = None
    for i in range(o.iterations):
        buffer = mine[i % len(mine)]
        check(cuda.cuCtxSetCurrent(contexts[buffer[0]]))
        verify(buffer)
        buffer[2] = (buffer[2] * 1103515245 + 12345) & 0x7fffffff
        if o.threads > 1 and o.devices == 1:
            stream = stream or check(cuda.cuStreamCreate(1))
            check(cuda.cuMemsetD32Async(buffer[1], buffer[2], WORDS, stream))
            check(cuda.cuStreamSynchronize(stream))
        else:
            check(cuda.cuMemsetD32(buffer[1], buffer[2], WORDS))
        with lock:
            done += 1
            print("ITERATION", done, flush=True)
        time.sleep(o.seconds)

threads = [threading.Thread(target=work, args=(n,)) for n in range(o.threads)]
for t in threads:
    t.start()
for t in threads:
    t.join()
if done == o.threads * o.iterations:
    for buffer in buffers:
        check(cuda.cuCtxSetCurrent(contexts[buffer[0]]))
        verify(buffer)
    print("RESULT right", flush=True)
"""


def blocks(site: Site, *options: str, wait: bool = True, **changes: str) -> Program:
    """Start the program above."""
    script = site.folder / "blocks.py"
    script.write_text(BLOCKS)
    program = site.start(sys.executable, str(script), *options, under=True, **changes)
    if wait:
        program.wait_iterations(3)
    return program


def daemon(site: Site, **settings: str) -> None:
    """Start phosd with faults or settings of its own."""
    site.run("phosd", "--ensure", check=True, **settings)


def nothing_of_ours(image: Path) -> bool:
    return not list(image.glob("phos-*"))


def phosd_descriptors(site: Site) -> list[str]:
    """What phosd has open, but for what it opens for the question itself."""
    folder = Path(f"/proc/{site.daemon_pid()}/fd")
    found = []
    for entry in folder.iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            pass
    return found


def fit_for_the_next(site: Site, name: str = "next") -> None:
    """phosd checkpoints and restores another program after whatever happened."""
    program = blocks(site, "--blocks", "2", "--iterations", "40")
    image = site.image(name)
    site.dump(program, image)
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == "right"
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")


def end(site: Site, program: Program) -> None:
    """Kill a program that would run on; all its memory has to go."""
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free", 15)


# The driver fails while dumping.


@dataclass(frozen=True)
class Fault:
    """Where it strikes, and what has to be said of it."""

    said: str
    application: str = ""
    phosd: str = ""


# Copies fail later than phosd's successor, which has the same fault, needs for its own dump and restore.
DUMP_FAULTS = {
    "lock": Fault("cuCheckpointProcessLock", application="lock-timeout:1"),
    "checkpoint": Fault("cuCheckpointProcessCheckpoint", application="checkpoint-fail:1"),
    "phosd cannot import": Fault("cuMemImportFromShareableHandle", phosd="import-fail-at:1"),
    "phosd cannot map": Fault("cuMemMap", phosd="map-fail-at:2"),
    "phosd's context is lost": Fault("Copying GPU memory", phosd="copy-fail-at:8"),
    "a block has no descriptor": Fault("no descriptor", application="export-fail-at:2"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("lock", "kill"),
        ("checkpoint", "leave-running"),
        ("phosd cannot import", "kill"),
        ("phosd cannot map", "leave-running"),
        ("phosd's context is lost", "kill"),
        ("phosd's context is lost", "leave-running"),
        ("a block has no descriptor", "kill"),
    ],
)
def test_driver_fails_while_dumping(site: Site, name: str, mode: str) -> None:
    fault = DUMP_FAULTS[name]
    daemon(site, SOFTGPU_FAULTS=fault.phosd)
    program = blocks(site, "--blocks", "9", SOFTGPU_FAULTS=fault.application)
    image = site.image()
    result = site.dump(program, image, *(["--leave-running"] if mode == "leave-running" else []), check=False)
    assert result.returncode != 0
    assert fault.said in result.stderr + (image / "dump.log").read_text()
    program.wait_progress()
    assert nothing_of_ours(image)
    end(site, program)
    wait_until(lambda: "GPU context is lost" not in _log(site) or _renewed(site), "phosd's renewal")
    fit_for_the_next(site)


def _log(site: Site) -> str:
    return (site.folder / "run" / "phosd.log").read_text(errors="replace")


def _renewed(site: Site) -> bool:
    return _log(site).count("phosd serves") > 1


def test_application_survives_the_renewal_of_phosd(site: Site) -> None:
    """A bad copy costs phosd its context, so it becomes a new process; who was attached before can be dumped again."""
    daemon(site, SOFTGPU_FAULTS="copy-fail-at:7")
    program = blocks(site, "--blocks", "2", "--iterations", "200")
    site.dump(program, site.image("first"), "--leave-running")
    for number in range(4):
        result = site.dump(program, site.image(f"image-{number}"), "--leave-running", check=False)
        if result.returncode:
            break
    assert "Copying GPU memory" in result.stderr
    wait_until(lambda: _renewed(site), "phosd's renewal")
    program.wait_progress()
    image = site.image("after")
    site.dump(program, image)
    site.restore(image)
    assert program.wait_result() == "right"


# The driver fails while the processes come back.


def test_attach_is_tried_again(site: Site) -> None:
    daemon(site)
    program = blocks(site, "--blocks", "3", "--iterations", "120", SOFTGPU_FAULTS="import-fail-at:2")
    image = site.image()
    site.dump(program, image, "--leave-running")
    site.run("phos-gpu", "verify", str(image))
    assert program.wait_result() == "right"


def test_process_waits_for_gpu_memory(site: Site) -> None:
    program = blocks(site, "--iterations", "120", SOFTGPU_FAULTS="restore-oom:1")
    image = site.image()
    site.dump(program, image, "--leave-running")
    assert "waits for GPU memory" in _log(site)
    assert program.wait_result() == "right"


def test_driver_loses_the_process_but_the_image_is_whole(site: Site) -> None:
    program = blocks(site, SOFTGPU_FAULTS="restore-fail:1")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    assert result.returncode != 0
    assert "cuCheckpointProcessRestore" in result.stderr
    wait_until(lambda: not program.alive(), "the program to notice that its GPU is gone")
    assert any(line.startswith("ERROR") for line in program.lines()), program.lines()[-5:]
    site.run("phos-gpu", "verify", str(image))
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")
    fit_for_the_next(site)


# What never ends.


def test_gpu_work_that_never_ends(site: Site) -> None:
    daemon(site, PHOS_QUIESCE_SECONDS="2")
    program = blocks(site, "--iterations", "100000", SOFTGPU_FAULTS="hang-sync")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "did not answer 'quiesce'" in (image / "dump.log").read_text()
    assert nothing_of_ours(image)
    end(site, program)
    fit_for_the_next(site)


def test_driver_that_never_answers(site: Site) -> None:
    daemon(site, PHOS_CHECKPOINT_SECONDS="1", PHOS_RETURN_SECONDS="1")
    program = blocks(site, SOFTGPU_FAULTS="hang-control")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    said = (image / "dump.log").read_text()
    assert "does not answer" in said
    assert "phosd goes on trying" in said
    assert nothing_of_ours(image)
    end(site, program)
    fit_for_the_next(site)


def test_stopped_application_is_refused_and_unharmed(site: Site) -> None:
    program = blocks(site, "--iterations", "100")
    os.kill(program.pid, signal.SIGSTOP)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "is stopped" in (image / "dump.log").read_text()
    assert nothing_of_ours(image)
    os.kill(program.pid, signal.SIGCONT)
    program.wait_progress()
    again = site.image("again")
    site.dump(program, again)
    site.restore(again)
    assert program.wait_result() == "right"


def test_application_that_is_left_stopped_comes_back_when_it_is_continued(site: Site) -> None:
    program = blocks(site, "--iterations", "100")
    image = site.image()
    site.dump(program, image, "--leave-running", "--leave-stopped")
    site.run("phos-gpu", "verify", str(image))
    before = program.iterations()
    assert psutil.Process(program.pid).status() == psutil.STATUS_STOPPED
    time.sleep(0.3)
    assert program.iterations() == before
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait_result() == "right"


# Restore.


RESTORE_FAULTS = {
    "driver restore": Fault("cuCheckpointProcessRestore", application="restore-fail:1"),
    "attach": Fault("block", application="import-fail-at:1"),
    "no memory": Fault("cuMemCreate", phosd="alloc-oom-at:2"),
    "no descriptor": Fault("cuMemExportToShareableHandle", phosd="export-fail-at:2"),
    "phosd cannot map": Fault("cuMemMap", phosd="map-fail-at:2"),
    "phosd's context is lost": Fault("Loading GPU memory", phosd="copy-fail-at:2"),
}


@pytest.mark.parametrize("name", RESTORE_FAULTS)
def test_driver_fails_while_restoring(site: Site, name: str) -> None:
    fault = RESTORE_FAULTS[name]
    daemon(site)
    program = blocks(site, "--blocks", "3", SOFTGPU_FAULTS=fault.application)
    image = site.image()
    site.dump(program, image)
    if fault.phosd:
        site.run("phosd", "--stop")
        daemon(site, SOFTGPU_FAULTS=fault.phosd)
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert fault.said in result.stderr + (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "the end of what was restored")
    assert program.result() is None
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")
    site.run("phos-gpu", "verify", str(image))
    wait_until(lambda: "GPU context is lost" not in _log(site) or _renewed(site), "phosd's renewal")
    if fault.phosd:
        site.run("phosd", "--stop")
        daemon(site)
    fit_for_the_next(site)


def test_restored_process_that_is_killed_before_it_computes(site: Site) -> None:
    program = blocks(site, SOFTGPU_TOGGLE_MS="700")
    image = site.image()
    site.dump(program, image)
    restore = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(lambda: "Restore finished successfully" in _text(image / "restore.log"), "CRIU")
    os.kill(program.pid, signal.SIGKILL)
    assert restore.wait(30) != 0
    wait_until(lambda: not program.alive(), "its end")
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")
    assert "ended before its GPU state was back" in site.status()["jobs"][-1]["error"]
    fit_for_the_next(site)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def test_second_restore_of_an_image_that_is_being_restored(site: Site) -> None:
    program = blocks(site, "--iterations", "60", SOFTGPU_TOGGLE_MS="1000")
    image = site.image()
    site.dump(program, image)
    first = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(lambda: any(job["kind"] == "restore" for job in site.status()["jobs"]), "the first")
    second = site.run("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "second.log", check=False)
    assert second.returncode != 0
    said = (image / "second.log").read_text()
    assert "being restored already" in said or "still runs" in said
    assert first.wait(30) == 0
    assert program.wait_result() == "right"


def test_two_restores_at_the_same_time(site: Site) -> None:
    programs = [blocks(site, "--iterations", "60") for _ in range(2)]
    images = [site.image(f"image-{n}") for n in range(2)]
    for program, image in zip(programs, images, strict=True):
        site.dump(program, image)
    running = [
        site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4")
        for image in images
    ]
    assert [one.wait(60) for one in running] == [0, 0], [site.errors(i / "restore.log") for i in images]
    assert [program.wait_result() for program in programs] == ["right", "right"]


def test_restored_process_can_be_dumped_by_a_phosd_that_never_knew_it(site: Site) -> None:
    """The keeper's record follows the process to its new life."""
    program = blocks(site, "--iterations", "150")
    first = site.image("first")
    site.dump(program, first)
    site.restore(first)
    program.wait_progress()
    os.kill(site.daemon_pid(), signal.SIGKILL)
    daemon(site)
    program.wait_progress(10)
    second = site.image("second")
    site.dump(program, second)
    site.restore(second)
    assert program.wait_result() == "right"


# GPUs.


def test_fewer_gpus_and_another_model_are_refused(site: Site) -> None:
    site.environment["SOFTGPU_DEVICES"] = "2"
    program = blocks(site, "--devices", "2", "--iterations", "80")
    image = site.image()
    site.dump(program, image)
    site.run("phosd", "--stop")
    daemon(site, SOFTGPU_DEVICES="1")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "needs 2 GPU" in (image / "restore.log").read_text()
    assert not program.alive()
    site.run("phosd", "--stop")
    daemon(site, SOFTGPU_NAME="Another GPU")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "same model" in (image / "restore.log").read_text()
    site.run("phosd", "--stop")
    daemon(site)
    site.restore(image)
    assert program.wait_result() == "right"


# Shapes of applications.


def test_threads_and_streams(site: Site) -> None:
    program = blocks(site, "--served", "--threads", "8", "--blocks", "16", "--size", "65536", "--iterations", "100")
    for generation in range(2):
        program.wait_progress(20)
        image = site.image(f"image-{generation}")
        site.dump(program, image)
        site.restore(image)
    assert program.wait_result() == "right"


def test_more_than_a_thousand_blocks(site: Site) -> None:
    """More descriptors than select() and the usual soft limit take, in six packets. (3,000 work as well.)"""
    site.environment["SOFTGPU_MEMORY"] = "8G"
    options = ("--blocks", "1100", "--iterations", "200")
    program = blocks(site, *options)
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    assert program.wait_result() == "right"
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")


def test_two_trees_at_the_same_time(site: Site) -> None:
    programs = [blocks(site, "--iterations", "120") for _ in range(2)]
    images = [site.image(f"image-{n}") for n in range(2)]
    running = [
        site.background(
            "criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4"
        )
        for program, image in zip(programs, images, strict=True)
    ]
    assert [one.wait(60) for one in running] == [0, 0], [site.errors(i / "dump.log") for i in images]
    for program, image in zip(programs, images, strict=True):
        site.gone(program)
        site.run("phos-gpu", "verify", str(image))
        site.restore(image)
    assert [program.wait_result() for program in programs] == ["right", "right"]


FAMILY = """
import os, subprocess, sys, time
mode, script = sys.argv[1:3]
work = [sys.executable, script, "--iterations", "100000"]
child = subprocess.Popen(work, stdout=open("child.log", "wb"))
while True:
    time.sleep(0.01)
    if mode == "fork":
        if os.fork() == 0:
            time.sleep(0.005)
            os._exit(0)
        os.wait3(os.WNOHANG)
    elif mode == "spawn":
        subprocess.run(["true"])
    elif mode == "exec":
        pid = os.fork()
        if pid == 0:
            os.execv("/bin/sleep", ["sleep", "0.01"])
        os.waitpid(pid, 0)
    elif mode == "crash":
        if child.poll() is not None:
            child = subprocess.Popen(work, stdout=open("child.log", "wb"))
        elif os.path.exists("child.log") and open("child.log").read().count("ITERATION") > 5:
            child.kill()
            child.wait()
            child = subprocess.Popen(work, stdout=open("child.log", "wb"))
"""


@pytest.mark.parametrize("mode", ["fork", "spawn", "exec", "crash"])
def test_tree_that_changes_while_it_is_dumped(site: Site, mode: str) -> None:
    """Whatever CRIU makes of it: it succeeds with a whole image, or says no and the tree runs on."""
    (site.folder / "blocks.py").write_text(BLOCKS)
    (site.folder / "family.py").write_text(FAMILY)
    program = site.start(sys.executable, str(site.folder / "family.py"), mode, str(site.folder / "blocks.py"))
    log = site.folder / "child.log"
    wait_until(lambda: "ITERATION 3" in _text(log), "the child")
    for attempt in range(3):
        image = site.image(f"image-{attempt}")
        result = site.dump(program, image, "--leave-running", check=False)
        if result.returncode == 0 and list(image.glob("phos-*")):  # none: no child used CUDA at that moment
            site.run("phos-gpu", "verify", str(image))
        elif result.returncode != 0:
            assert not (image / "phos-commit.img").exists()
            assert "Error" in _text(image / "dump.log")
        assert program.alive()
        before = _text(log)
        wait_until(lambda before=before: _text(log) != before, "the child's progress")  # type: ignore[misc]
        assert "WRONG" not in _text(log)
        assert "ERROR" not in _text(log)
    for process in site.processes():
        if "family.py" in " ".join(words(process)):
            process.kill()
    for process in site.processes():
        if "blocks.py" in " ".join(words(process)):
            process.kill()
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")
    fit_for_the_next(site)


# The image's place.


@contextmanager
def small_disk(site: Site, kilobytes: int) -> Iterator[Path]:
    """A tmpfs of that size."""
    folder = site.folder / f"disk-{kilobytes}"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full_at_every_step(site: Site) -> None:
    """From too small for the reserve, over GPU data and CRIU's pages, to a few pages short at the commit."""
    program = blocks(site, "--served", "--size", str(4 << 20), "--iterations", "3000", "--seconds", "0.005")
    fitting = site.image("fitting")
    site.dump(program, fitting, "--leave-running")
    ours = sum(path.stat().st_blocks * 512 for path in fitting.glob("phos-*"))
    whole = ours + sum(path.stat().st_blocks * 512 for path in fitting.glob("*.img") if not path.match("phos-*"))
    before = phosd_descriptors(site)
    sizes = [64, 4096, ours // 1024 + 256, whole * 3 // 4096, whole // 1024 - 64, whole // 1024 - 16, whole // 1024 - 4]
    for size in sizes:
        with small_disk(site, size) as disk:
            image = disk / "image"
            image.mkdir()
            log = site.folder / f"{size}.log"
            result = site.dump(program, image, "-o", str(log), "-W", str(site.folder), check=False)
            if result.returncode == 0:  # compiled or mapped a little less this time
                pytest.fail(f"a disk of {size} KiB took an image of {whole >> 10} KiB")
            assert nothing_of_ours(image), (size, sorted(p.name for p in image.iterdir()))
            said = result.stderr + _text(log)
            assert "No space" in said or "is full" in said, [line for line in said.splitlines() if "Error" in line]
            program.wait_progress()
    wait_until(lambda: len(phosd_descriptors(site)) <= len(before), "phosd to close what it opened")
    with small_disk(site, whole // 1024 + 8192) as disk:
        image = disk / "image"
        image.mkdir()
        site.dump(program, image, "-o", str(site.folder / "last.log"), "-W", str(site.folder))
        site.restore(image, "-o", str(site.folder / "restore.log"), "-W", str(site.folder))
        program.wait_progress()
        end(site, program)


REMOVALS: dict[str, Callable[[Path], object]] = {
    "directory": lambda image: subprocess.run(["rm", "-rf", str(image)], check=True),
    "our files": lambda image: subprocess.run(f"rm {image}/phos-*", shell=True, check=True),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_image_is_removed_while_it_is_written(site: Site, what: str) -> None:
    program = blocks(site, SOFTGPU_TOGGLE_MS="500")
    image = site.image()
    logs = ["-o", str(site.folder / "dump.log"), "-W", str(site.folder)]
    dump = site.background("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-v4", *logs)
    wait_until(lambda: site.status()["processes"][0]["state"] == "detached", "the process to be detached")
    REMOVALS[what](image)
    status = dump.wait(60)
    if status != 0:
        program.wait_progress()
        end(site, program)
    else:
        site.run("phos-gpu", "verify", str(image))
    fit_for_the_next(site)


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_phosd_is_killed_in_a_dump_that_kills(site: Site, delay: float) -> None:
    """The application is killed only once its image is whole."""
    program = blocks(site, "--blocks", "8", SOFTGPU_TOGGLE_MS="200")
    image = site.image()
    pid = site.daemon_pid()
    dump = site.background(
        "criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4"
    )
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    dump.wait(60)
    whole = site.run("phos-gpu", "verify", str(image), check=False).returncode == 0
    program.process.poll()
    if program.alive():
        program.wait_progress()
        end(site, program)
    else:
        assert whole


# Nothing accumulates.


def test_descriptors_and_threads_of_phosd_do_not_grow(site: Site) -> None:
    program = blocks(site, "--iterations", "100000")
    site.dump(program, site.image("warm"), "--leave-running")

    def open_now() -> tuple[int, int]:
        return len(phosd_descriptors(site)), psutil.Process(site.daemon_pid()).num_threads()

    wait_until(lambda: site.status()["jobs"][-1]["state"] == "committed", "the end of the first")
    before = open_now()
    for number in range(3):
        image = site.image(f"image-{number}")
        site.dump(program, image, "--leave-running")
        program.wait_progress()
        failed = site.dump(program, image, "--leave-running", check=False)  # not empty
        assert failed.returncode != 0
        refused = site.restore(image, check=False)  # it still runs
        assert refused.returncode != 0
        program.wait_progress()
    wait_until(lambda: all(now <= then for now, then in zip(open_now(), before, strict=True)), "phosd to settle", 15)
