"""Processes without the frontend: the driver alone saves them, and nothing keeps their threads from calling it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from tests.integration.site import Program, Site, Toggles, software_gpu_folder, wait_until, words

POLLS = Path(__file__).parents[1] / "gpu" / "programs" / "polls.py"
STENCIL = POLLS.parents[3] / "examples" / "stencil.py"
OPTIONS = ("--size", "32", "--iterations", "400", "--iteration-seconds", "0.04")  # phosd has to be started first


def polling(site: Site, **changes: str) -> Program:
    """A program whose threads crash if they run while it is checkpointed."""
    program = site.until_awaited(sys.executable, str(POLLS), *OPTIONS, "--until", under=False, **changes)
    program.wait_iterations(5)
    return program


@pytest.fixture
def expected(site: Site) -> str:
    return site.reference("stencil", *OPTIONS[:4], small=False)


@pytest.mark.parametrize("lazily", [False, True])
def test_one_that_polls_is_dumped_and_restored(site: Site, expected: str, lazily: bool) -> None:
    """Twice from one image; lazily the driver's thread meets pages of the CPU's memory that are not there yet."""
    program = polling(site)
    image = site.image()
    site.dump(program, image)
    assert "was not started under 'phos-gpu run'" in (image / "dump.log").read_text()
    site.run("phos-gpu", "verify", str(image))
    for time in range(2):
        if lazily:
            pages = site.background("criu", "lazy-pages", "-D", str(image), "-o", "lazy-pages.log")
            wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
            site.restore(image, "--lazy-pages")
            assert pages.wait(60) == 0
        else:
            site.restore(image)
        program.wait_progress()
        if not time:
            os.kill(program.pid, signal.SIGKILL)
            site.gone(program)
    assert program.wait_result() == expected


def test_one_that_polls_runs_on_through_dumps(site: Site, expected: str) -> None:
    program = polling(site)
    for number in range(3):
        image = site.image(f"image-{number}")
        site.dump(program, image, "--leave-running")
        program.wait_progress()
    assert program.wait_result() == expected


def test_one_that_polls_is_stopped_and_goes_on(site: Site, expected: str) -> None:
    program = polling(site)
    assert site.begin_dump(program, site.image(), "--leave-stopped").wait() == 0
    wait_until(lambda: Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait_result() == expected


def test_one_that_is_stopped_with_a_lock_of_the_driver_s(site: Site, expected: str) -> None:
    """Nearly always one of its threads holds what the driver's own thread needs to save it, and to bring it back."""
    program = polling(site, SOFTGPU_POLL_US="5000")
    for number in range(5):
        image = site.image(f"image-{number}")
        site.dump(program, image, *(["--leave-running"] if number < 4 else []))
        if number < 4:
            program.wait_progress()
    site.restore(image)
    assert program.wait_result() == expected


def test_one_whose_threads_stay_in_the_driver_is_not_saved(site: Site, expected: str) -> None:
    """CRIU's log says so, and the program goes on."""
    program = polling(site, SOFTGPU_POLL_US="30000000")
    image = site.image()
    assert site.dump(program, image, "--leave-running", check=False).returncode != 0
    assert f"threads of process {program.pid} do not leave the driver" in (image / "dump.log").read_text()
    assert program.wait_result() == expected


def blocked_signals(program: Program) -> int:
    """The first thread's."""
    return int(Path(f"/proc/{program.pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_one_whose_threads_ask_without_a_pause(site: Site) -> None:
    """CRIU stops them anywhere: with the lock, while they wait for it, and where a thread begins or ends."""
    spins = site.folder / "spins"
    subprocess.run(["gcc", "-O2", "-pthread", "-o", spins, POLLS.with_name("spins.c"), "-ldl"], check=True)
    command = (str(spins), "--iterations", "60", "--until")
    expected = site.until_awaited(*command, under=False).wait_result()
    program = site.until_awaited(*command, under=False, SOFTGPU_POLL_US="20")
    program.wait_iterations(2)
    for number in range(6):
        image = site.image(f"image-{number}")
        site.dump(program, image, *(["--leave-running"] if number < 5 else []))
        if number < 5:
            assert blocked_signals(program) == 0
    site.restore(image)
    assert blocked_signals(program) == 0
    assert program.wait_result() == expected


@pytest.mark.parametrize("fault", ["checkpoint-fail:1", "restore-oom:1"])
def test_the_driver_refuses_and_one_that_polls_goes_on(site: Site, expected: str, fault: str) -> None:
    """It is not checkpointed; or it comes back later, when there is room, and stands still until then."""
    program = polling(site, SOFTGPU_FAULTS=fault)
    result = site.dump(program, site.image(), "--leave-running", check=False)
    assert (result.returncode != 0) == fault.startswith("checkpoint")
    assert program.wait_result() == expected


def test_the_driver_does_not_bring_one_back_that_ends_at_that(site: Site) -> None:
    """At the first call, most likely before CRIU has ended. The image is whole all the same."""
    program = polling(site, SOFTGPU_FAULTS="restore-fail:1")
    image = site.image()
    result = site.dump(program, image, "--leave-running", check=False)
    assert result.returncode == 1
    assert f"rocess {program.pid}" in result.stderr
    site.run("phos-gpu", "verify", str(image))
    site.gone(program)


@pytest.mark.parametrize("option", ["leave-running", "action-script"])
def test_a_configuration_file_keeps_one_that_polls_and_it_goes_on(site: Site, expected: str, option: str) -> None:
    """Nothing on CRIU's command line says so."""
    program = polling(site)
    script = site.folder / "fails"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    settings = site.folder / "criu.conf"
    settings.write_text(f"{option}{f' {script}' if option == 'action-script' else ''}\n")
    result = site.begin_dump(program, site.image(), CRIU_CONFIG_FILE=str(settings)).wait(60)
    assert (result != 0) == (option == "action-script")
    program.wait_progress()
    assert program.wait_result() == expected


def test_a_script_keeps_one_that_polls_and_it_goes_on(site: Site, expected: str) -> None:
    """CRIU does not say so before it lets the tasks go."""
    program = polling(site)
    script = site.folder / "fails"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    result = site.dump(program, site.image(), "--action-script", str(script), check=False)
    assert result.returncode != 0
    assert program.wait_result() == expected


def test_criu_fails_and_one_that_polls_goes_on(site: Site, expected: str) -> None:
    """After everything was saved: CRIU carries no userfaultfd, and finds it when it looks at open files."""
    wrapper = site.folder / "with_userfaultfd.py"
    wrapper.write_text(
        "import ctypes, runpy, sys\n"
        "ctypes.CDLL(None).syscall(323, 1)  # userfaultfd(UFFD_USER_MODE_ONLY)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    program = site.until_awaited(sys.executable, str(wrapper), str(POLLS), *OPTIONS, "--until", under=False)
    program.wait_iterations(5)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "userfaultfd" in (image / "dump.log").read_text()
    program.wait_progress()
    assert program.wait_result() == expected


BOTH = """
python=$1 stencil=$2 polls=$3
shift 3
"$python" "$stencil" "$@" &
env -u LD_PRELOAD "$python" "$polls" "$@" &
wait
"""


@pytest.mark.parametrize("protocol", ["cow", "stop"])
def test_beside_one_under_the_frontend(site: Site, expected: str, protocol: str) -> None:
    """Through two dumps that leave both running, and a restore of a third."""
    words = (sys.executable, str(STENCIL), str(POLLS), *OPTIONS, "--until")
    program = site.until_awaited("sh", "-c", BOTH, "sh", *words)
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    for number in range(2):
        image = site.image(f"image-{number}")
        site.dump(program, image, "--leave-running", PHOS_PROTOCOL=protocol)
        program.wait_progress()
    shown = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert sorted(process["under_frontend"] for process in shown["processes"]) == [False, True]
    image = site.image()
    site.dump(program, image, PHOS_PROTOCOL=protocol)
    site.restore(image)
    program.wait_end()
    assert program.lines().count(f"RESULT {expected}") == 2, program.lines()[-10:]


ASKS = """
import sys
from cuda.bindings import driver
driver.cuInit(0)
print(driver.cuCheckpointProcessGetState(int(sys.argv[1]))[1].name)
"""


def state(site: Site, pid: int) -> str:
    """What the driver says of a process."""
    environment = {**site.environment, "LD_LIBRARY_PATH": str(software_gpu_folder())}
    command = [sys.executable, "-c", ASKS, str(pid)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


TWO = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(sys.argv[1:]) for _ in range(2)]]"


def test_phosd_is_killed_while_the_driver_saves_those_that_poll(site: Site, expected: str) -> None:
    """CRIU holds their threads until another phosd has brought back the one and unlocked the other."""
    toggles = Toggles(site, "checkpoint")
    command = (sys.executable, "-c", TWO, sys.executable, str(POLLS), *OPTIONS, "--until")
    program = site.until_awaited(*command, under=False, **toggles.environment)
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    dump = site.begin_dump(program, site.image(), "--leave-running")
    wait_until(lambda: any(site.folder.glob("toggles.checkpoint.*")), "the driver to save one")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    toggles.let_go()
    assert dump.wait(60) != 0
    program.wait_end()
    assert program.lines().count(f"RESULT {expected}") == 2, program.lines()[-10:]


def test_two_that_poll_are_restored(site: Site, expected: str) -> None:
    """Both stand still until the driver has brought back both."""
    command = (sys.executable, "-c", TWO, sys.executable, str(POLLS), *OPTIONS, "--until")
    program = site.until_awaited(*command, under=False)
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    program.wait_end()
    assert program.lines().count(f"RESULT {expected}") == 2, program.lines()[-10:]


def test_phosd_is_killed_before_the_driver_saves_one_that_polls(site: Site, expected: str) -> None:
    """It is locked, and the driver still checkpoints one under the frontend."""
    toggles = Toggles(site, "checkpoint")
    with_toggles = BOTH.replace("env -u LD_PRELOAD", "env -u LD_PRELOAD -u SOFTGPU_TOGGLE_HOLD")
    words = (sys.executable, str(STENCIL), str(POLLS), *OPTIONS, "--until")
    program = site.until_awaited("sh", "-c", with_toggles, "sh", *words, **toggles.environment)
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    dump = site.begin_dump(program, site.image(), "--leave-running")
    wait_until(lambda: any(site.folder.glob("toggles.checkpoint.*")), "the driver's checkpoint")
    stranger = next(p.pid for p in psutil.Process(program.pid).children() if str(POLLS) in p.cmdline())
    wait_until(lambda: state(site, stranger).endswith("LOCKED"), "the lock")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    toggles.let_go()
    assert dump.wait(60) != 0
    program.wait_end()
    assert program.lines().count(f"RESULT {expected}") == 2, program.lines()[-10:]


def test_the_driver_does_not_bring_one_back_and_nothing_runs_on(site: Site) -> None:
    """Neither does the other, which is back; and CRIU's log says why."""
    command = (sys.executable, "-c", TWO, sys.executable, str(POLLS), *OPTIONS, "--until")
    program = site.until_awaited(*command, under=False, SOFTGPU_FAULTS="restore-fail:1")
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    image = site.image()
    site.dump(program, image)
    result = site.restore(image, check=False)
    assert result.returncode != 0
    assert "The driver could not restore process" in (image / "restore.log").read_text()
    wait_until(lambda: not program.alive(), "their end")
    assert [job["state"] for job in site.status()["jobs"] if job["kind"] == "restore"] == ["failed"]


@pytest.mark.parametrize(
    "altered", ["criu killed", "criu killed,slow take", "criu killed late", "criu killed,no thread to restore"]
)
def test_criu_is_killed_while_it_restores_one(site: Site, expected: str, altered: str) -> None:
    """Its end lets the process go before the driver's part is back: that follows, as of one that runs."""
    program = site.until_awaited(sys.executable, str(STENCIL), *OPTIONS, "--until", under=False)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    site.stop_phosd()
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD=altered)
    words = ["criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log", "-v4"]
    assert site.background(*words).wait(60) != 0
    wait_until(lambda: [job["state"] for job in site.status()["jobs"]] == ["attached"], "the restore to end well")
    assert program.wait_result() == expected


def test_phosd_is_killed_when_all_is_saved_and_one_that_polls_goes_on(site: Site, expected: str) -> None:
    toggles = Toggles(site, "checkpoint")
    program = polling(site, **toggles.environment)
    image = site.image()
    dump = site.begin_dump(program, image, "--leave-running")
    toggles.wait(program.pid)
    criu = [
        p for p in site.processes() if any(w.endswith("bin/criu") for w in words(p)) and "python" not in words(p)[0]
    ]
    for process in criu:
        process.suspend()
    toggles.let_go()
    wait_until(lambda: state(site, program.pid).endswith("CHECKPOINTED"), "the driver to save it")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    for process in criu:
        process.resume()
    assert dump.wait(60) != 0
    program.wait_progress()
    assert program.wait_result() == expected


def test_a_plugin_that_has_nothing_saved_makes_no_image(site: Site, expected: str) -> None:
    """One of another version. The program, which was only locked, goes on."""
    site.run("phosd", "--ensure")
    program = polling(site)
    image = site.image()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(site.environment["PHOS_SOCKET"])

        def ask(**body: Any) -> wire_pb2.Envelope:
            directory = [os.open(image, os.O_RDONLY)] if "dump_begin" in body else []
            wire.send(connection, wire_pb2.Envelope(id=1, **body), directory)
            wire.close_all(directory)
            answer = wire.receive(connection)
            assert answer
            return answer[0]

        strangers = ask(dump_begin=wire_pb2.DumpBegin(pid=program.pid, criu_pid=os.getpid())).strangers
        assert [task.pid for task in strangers.alone] == [program.pid]
        assert str(strangers.alone[0].thread) in os.listdir(f"/proc/{program.pid}/task")
        begun = wire.receive(connection)
        assert begun
        assert (begun[0].done.error, begun[0].done.gpu_part) == ("", True)
        assert "is none that the driver alone" in ask(task_runs=wire_pb2.TaskRuns(pids=[1])).done.error
        assert "has not had the driver save process" in ask(dump_end=wire_pb2.DumpEnd()).done.error
    assert program.wait_result() == expected
    assert not (image / "phos-commit.img").exists()
