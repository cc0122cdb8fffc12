"""Bad input: each gets a sentence and a nonzero exit, and a running application runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine.errors import ExitStatus
from phos.gpu_engine.installation import launcher
from phos.images.reader import Image
from tests.integration.site import Program, Site, Toggles, wait_until

ENDLESS = ("--iterations", "100000", "--iteration-seconds", "0.01")
SHORT = ("--iterations", "400", "--iteration-seconds", "0.04")


def endless(site: Site, **changes: str) -> Program:
    """A program that would run for minutes."""
    program = site.example("stencil", *ENDLESS, **changes)
    program.wait_iterations(3)
    return program


def dumped(site: Site) -> tuple[Program, Path, str]:
    """A dumped and killed program, its image, and the result it has to reach."""
    expected = site.reference("stencil", *SHORT[:2])
    program = site.example("stencil", *SHORT)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    return program, image, expected


# Checkpoint.


def test_no_such_process(site: Site) -> None:
    result = site.run("phos-gpu", "checkpoint", "4194000", str(site.folder / "new"), check=False)
    assert result.returncode == ExitStatus.NO_PROCESS
    assert "no process 4194000" in result.stderr


def test_not_a_cuda_process(site: Site) -> None:
    program = site.start("sleep", "60", under=False)
    result = site.run("phos-gpu", "checkpoint", str(program.pid), str(site.folder / "new"), check=False)
    assert result.returncode == ExitStatus.NO_PROCESS
    assert "no CUDA context" in result.stderr
    assert program.alive()


def test_a_process_that_has_ended(site: Site) -> None:
    program = site.start("true", under=False)
    wait_until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_ZOMBIE, "the end of the program")
    result = site.run("phos-gpu", "checkpoint", str(program.pid), str(site.folder / "new"), check=False)
    assert result.returncode == ExitStatus.NO_PROCESS
    assert result.stderr == f"phos-gpu checkpoint: Process {program.pid} has ended.\n"


ADOPTS = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as the first process of a container, it gets every orphan
subprocess.run([sys.argv[1], "--ensure"], check=True)
print("READY", flush=True)
time.sleep(1000)
"""


def test_tree_that_holds_phosd(site: Site) -> None:
    program = site.start(sys.executable, "-c", ADOPTS, str(launcher("phosd")), under=False)
    wait_until(lambda: program.lines() == ["READY"], "phosd")
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert f"phosd itself (process {site.daemon_pid()}) is in the process tree" in (image / "dump.log").read_text()
    assert program.alive()


def test_a_level_that_criu_s_log_has_not(site: Site) -> None:
    """By a dump and by a restore."""
    program = endless(site)
    image = site.image()
    told = {"PHOS_CRIU_VERBOSITY": "loud"}
    result = site.run("phos-gpu", "checkpoint", str(program.pid), str(image), check=False, **told)
    assert result.returncode == ExitStatus.USAGE
    assert "PHOS_CRIU_VERBOSITY=loud in the environment is no level of CRIU's log" in result.stderr
    program.wait_progress()
    site.dump(program, image)
    result = site.run("phos-gpu", "restore", str(image), check=False, **told)
    assert result.returncode == ExitStatus.USAGE
    assert "PHOS_CRIU_VERBOSITY=loud" in result.stderr
    assert not program.alive()


def test_plain_process_goes_through_criu_alone(site: Site) -> None:
    program = site.start("sleep", "1000", under=False)
    image = site.image()
    site.dump(program, image)
    assert not list(image.glob("phos-*"))
    site.restore(image)
    wait_until(program.alive, "the restored sleep")


def test_plain_criu_restores_what_has_no_gpu_part(site: Site) -> None:
    program = site.start("sleep", "1000", under=False)
    image = site.image()
    site.dump(program, image)
    site.run("criu", "restore", "-d", "-D", str(image), "-o", "restore.log", "-v4")
    wait_until(program.alive, "the restored sleep")


def test_plain_criu_refuses_what_has_a_gpu_part(site: Site) -> None:
    """It would bring back processes whose GPU memory is nowhere."""
    program, image, expected = dumped(site)
    result = site.run("criu", "restore", "-d", "-D", str(image), "-o", "plain.log", "-v4", check=False)
    assert result.returncode != 0
    assert "Missing required plugin: phos" in (image / "plain.log").read_text()
    assert "--lib phos" in site.errors(image / "plain.log")
    wait_until(lambda: not program.alive(), "its end")
    site.restore(image)
    assert program.wait_result() == expected


def test_plain_criu_refuses_what_the_driver_saved(site: Site) -> None:
    """Without the frontend the driver puts GPU memory into the pages of the process; phosd brings it back."""
    program = site.example("stencil", *ENDLESS, under=False)
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    result = site.run("criu", "restore", "-d", "-D", str(image), "-o", "plain.log", "-v4", check=False)
    assert result.returncode != 0
    assert "Missing required plugin: phos" in (image / "plain.log").read_text()


@pytest.mark.parametrize("under", [True, False])
def test_what_is_left_of_an_image_without_its_gpu_part_is_refused(site: Site, under: bool) -> None:
    """As a checkpoint leaves it that fails after CRIU's part: it is no process without a GPU."""
    program = site.example("stencil", *ENDLESS, under=under)
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    for file in image.glob("phos-*"):
        file.unlink()
    computed = program.iterations()
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert f"The image in {image} lacks its GPU part" in (image / "restore.log").read_text()
    assert not program.alive()
    assert program.iterations() == computed


def test_image_directory_not_empty(site: Site) -> None:
    program = endless(site)
    image = site.image()
    (image / "something").write_text("else")
    result = site.run("phos-gpu", "checkpoint", str(program.pid), str(image), check=False)
    assert result.returncode == ExitStatus.USAGE
    assert "not empty" in result.stderr
    program.wait_progress()


@pytest.mark.parametrize("change", ["owner", "mode"])
def test_image_directory_that_others_may_write_to(site: Site, change: str) -> None:
    """A link that they put there would lead what CRIU writes as root to any file."""
    program = endless(site)
    image = site.image()
    if change == "owner":
        os.chown(image, 65534, 65534)
    else:
        image.chmod(0o777)
    for command in (
        ["checkpoint", "--leave-running", str(program.pid), str(image)],
        ["guard", "--images", str(image), "x"],
    ):
        result = site.run("phos-gpu", *command, check=False)
        assert result.returncode == ExitStatus.USAGE
        assert f"Others than root may write to {image}" in result.stderr
    assert not list(image.iterdir())
    program.wait_progress()


def test_image_directory_holds_an_image_already(site: Site) -> None:
    program = endless(site)
    image = site.image()
    site.dump(program, image, "--leave-running")
    before = {path.name: path.read_bytes() for path in image.glob("phos-*")}
    result = site.dump(program, image, "--leave-running", check=False)
    assert result.returncode != 0
    assert {path.name: path.read_bytes() for path in image.glob("phos-*")} == before
    program.wait_progress()


def test_missing_image_directory_for_dump(site: Site) -> None:
    program = endless(site)
    result = site.dump(program, site.folder / "absent", check=False)
    assert result.returncode != 0
    program.wait_progress()


def test_full_disk_leaves_the_program_running_and_no_image(site: Site) -> None:
    program = endless(site)
    small = site.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], check=True)
    try:
        image = small / "image"
        image.mkdir()
        result = site.dump(program, image, "-o", str(site.folder / "full.log"), "-W", str(site.folder), check=False)
        assert result.returncode != 0
        assert not (image / "phos-commit.img").exists()
        program.wait_progress()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_criu_fails_after_the_gpu_was_detached(site: Site, tmp_path: Path) -> None:
    """A descriptor that CRIU cannot dump: it notices long after phosd has checkpointed the GPU side."""
    wrapper = tmp_path / "with_io_uring.py"
    wrapper.write_text(
        "import ctypes, runpy, sys\n"
        "parameters = ctypes.create_string_buffer(120)\n"
        "keep = ctypes.CDLL(None).syscall(425, 1, parameters)  # io_uring_setup\n"
        "assert keep >= 0\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, sys.argv[0].rpartition('/')[0])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    from phos.gpu_engine.installation import examples_folder

    program = site.start(
        sys.executable, str(wrapper), str(examples_folder() / "stencil.py"), *ENDLESS, PHOS_IO_URING="on"
    )
    program.wait_iterations(3)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    program.wait_progress()
    assert not (image / "phos-commit.img").exists()
    wait_until(lambda: site.status()["jobs"][-1]["state"] == "failed", "the job's end")
    assert "CRIU failed" in site.status()["jobs"][-1]["error"]


def test_second_checkpoint_while_one_is_in_progress_is_refused(site: Site) -> None:
    toggles = Toggles(site, "checkpoint")
    program = endless(site, **toggles.environment)
    first = site.background(*_dump_words(program, site.image("first")))
    toggles.wait(program.pid)
    second = site.dump(program, site.image("second"), "--leave-running", check=False)
    assert second.returncode != 0
    assert "another checkpoint" in (site.folder / "second" / "dump.log").read_text()
    toggles.let_go()
    assert first.wait(60) == 0
    program.wait_progress()


def _dump_words(program: Program, image: Path) -> list[str]:
    return [
        "criu", "dump", "--lib", "phos", "--leave-running",
        "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4",
    ]  # fmt: skip


def test_why_criu_is_refused_a_connection_is_in_its_log(site: Site) -> None:
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="full house")
    program = endless(site)
    image = site.image()
    assert site.dump(program, image, check=False).returncode != 0
    assert "There are too many of you." in (image / "dump.log").read_text()
    program.wait_progress()


def test_wrong_user(site: Site) -> None:
    program = endless(site)
    import socket

    from phos.gen import wire_pb2
    from phos.gpu_engine.daemon import wire

    image = site.image()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # an ordinary user asks phosd for root's process
        os.setgid(65534)
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = os.open("/tmp", os.O_RDONLY)
        try:
            connection.connect(site.environment["PHOS_SOCKET"])
            wire.send(connection, wire_pb2.Envelope(id=1, dump_begin=wire_pb2.DumpBegin(pid=program.pid)), [descriptor])
            answer = wire.receive(connection)
            os.write(write_end, (answer[0].done.error if answer else "no answer").encode())
        except OSError as error:
            os.write(write_end, f"not allowed to connect: {error}".encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as text:
        assert "may not checkpoint" in (said := text.read()) or "not allowed" in said
    assert not list(image.iterdir())
    program.wait_progress()


# Restore.


def test_restore_of_a_missing_directory(site: Site) -> None:
    result = site.run("phos-gpu", "restore", str(site.folder / "absent"), check=False)
    assert result.returncode == ExitStatus.USAGE
    assert "no image directory" in result.stderr


def test_restore_of_a_directory_that_is_no_image(site: Site) -> None:
    image = site.image()
    (image / "notes.txt").write_text("nothing")
    result = site.run("phos-gpu", "restore", str(image), check=False)
    assert result.returncode != 0
    assert str(image) in result.stderr


def _largest(image: Path, pattern: str) -> Path:
    return max(image.glob(pattern), key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no commit record": lambda image: (image / "phos-commit.img").unlink(),
    "truncated data": lambda image: os.truncate(_largest(image, "phos-data-*"), 4096),
    "missing data": lambda image: _largest(image, "phos-data-*").unlink(),
    "flipped bit in GPU data": lambda image: _flip(_largest(image, "phos-data-*")),
    "flipped bit in the inventory": lambda image: _flip(image / "phos-inventory.img"),
    "flipped bit in the chunk table": lambda image: _flip(image / "phos-chunks.img"),
    "truncated pages of CRIU": lambda image: os.truncate(_largest(image, "pages-*"), 4096),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_image_is_refused_and_leaves_nothing_running(site: Site, damage: str) -> None:
    program, image, _ = dumped(site)
    DAMAGE[damage](image)
    result = site.restore(image, check=False)
    assert result.returncode != 0
    wait_until(lambda: not program.alive(), "the end of what was restored")
    assert program.result() is None
    site.wait_no_gpu_memory()
    assert site.run("phos-gpu", "verify", str(image), check=False).returncode != 0


def test_restore_on_another_model(site: Site) -> None:
    program, image, expected = dumped(site)
    site.stop_phosd()
    site.run("phosd", "--ensure", SOFTGPU_NAME="Another GPU")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "same model" in (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "its end")
    del expected


def test_restore_with_too_little_memory(site: Site) -> None:
    program, image, _ = dumped(site)
    needed = sum(table.size for table in Image.open(image).blocks.values())
    site.stop_phosd()
    site.run("phosd", "--ensure", SOFTGPU_MEMORY=str(needed - 1))
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "free" in (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "its end")
    site.wait_no_gpu_memory()


def test_restore_while_the_process_still_runs(site: Site) -> None:
    program = endless(site)
    image = site.image()
    site.dump(program, image, "--leave-running")
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "still runs" in (image / "restore.log").read_text()
    program.wait_progress()


def test_copy_of_an_image_restores(site: Site) -> None:
    program, image, expected = dumped(site)
    moved = site.folder / "moved"
    shutil.copytree(image, moved)
    shutil.rmtree(image)
    site.restore(moved)
    assert program.wait_result() == expected


# The daemon.


def test_driver_without_the_checkpoint_api(site: Site) -> None:
    result = site.run("phosd", "--ensure", SOFTGPU_DRIVER_VERSION="12040", check=False)
    assert result.returncode != 0
    assert "Install driver 570 or later" in result.stderr


def test_status_without_a_daemon(site: Site) -> None:
    result = site.run("phos-gpu", "status", check=False)
    assert result.returncode == ExitStatus.NO_DAEMON
    assert "phosd --ensure" in result.stderr


def test_second_daemon_on_the_same_socket(site: Site) -> None:
    program = endless(site)
    result = site.run("phosd", check=False)
    assert result.returncode != 0
    assert "Another phosd already serves" in result.stderr
    program.wait_progress()


def test_unknown_device(site: Site) -> None:
    result = site.run("phos-gpu", "run", "--", "true", PHOS_DEVICE="quantum", check=False)
    assert result.returncode == ExitStatus.USAGE
    assert "'quantum' is no device" in result.stderr


def test_unknown_program(site: Site) -> None:
    result = site.run("phos-gpu", "run", "--", "no-such-program", check=False)
    assert result.returncode == ExitStatus.USAGE
    assert "no program 'no-such-program'" in result.stderr


@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_program_that_the_kernel_does_not_take_is_refused(site: Site, command: str) -> None:
    script = site.folder / "script"
    script.write_text("echo without a first line that says whose it is\n")
    script.chmod(0o755)
    result = site.run("phos-gpu", command, "--", str(script), check=False)
    assert result.returncode == 2
    assert f"{script} cannot be started: Exec format error." in result.stderr


def test_a_criu_that_does_nothing_has_not_succeeded(site: Site) -> None:
    """Not even where another one has, in the same directory."""
    program = endless(site)
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    done = site.dump(program, image, check=False, PHOS_CRIU="/bin/true")
    assert done.returncode == 1
    assert "phosd knows of nothing that it did" in done.stderr
    done = site.restore(image, check=False, PHOS_CRIU="/bin/true")
    assert done.returncode == 1
    assert "phosd knows of nothing that it did" in done.stderr
    done = site.run("phos-gpu", "restore", str(image), check=False, PHOS_CRIU="/bin/true")
    assert done.returncode == 7
    program.wait_progress()


def test_a_criu_that_does_nothing_has_not_dumped_what_has_no_gpu(site: Site) -> None:
    program = site.start("sleep", "60", under=False)
    image = site.image()
    assert site.dump(program, image, "--leave-running").returncode == 0
    assert site.dump(program, image, "--leave-running", check=False, PHOS_CRIU="/bin/true").returncode == 1
    assert program.alive()
    program.process.terminate()
