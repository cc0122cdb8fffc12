"""``phos-gpu demo`` on the software GPU: what it prints, what it returns, and that nothing of it stays."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phos.cli.demo import PACE, pace
from phos.gpu_engine.installation import launcher
from tests.integration.site import PATIENCE, Site, wait_until, words

pytestmark = pytest.mark.root

ROW = r"^│ (\w+) +" + r"│ +([\d.]+) " * 6 + "│$"

STEPS = (
    "Start phosd",
    "Run the program without interruption",
    "Start it again",
    "criu dump --lib phos",
    "phos-gpu inspect",
    "phos-gpu verify",
    "criu restore --lib phos",
    "Let it compute to its end",
)


def demo(site: Site, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with a temporary folder inside the site's."""
    folder = site.folder / "tmp"
    folder.mkdir(exist_ok=True)
    return site.run("phos-gpu", "demo", "--device", "software", *options, check=False, TMPDIR=str(folder), **changes)


def test_half_of_the_iterations_outlast_the_begin_of_a_dump() -> None:
    assert pace(0.4, 40) == PACE
    assert pace(27.0, 40) * 20 >= 27.0


def left(site: Site) -> list[Path]:
    """What demos have kept."""
    return list((site.folder / "tmp").iterdir())


@pytest.mark.parametrize("example", ["mlp", "stencil"])
def test_it_shows_every_step_and_the_same_result(site: Site, example: str) -> None:
    done = demo(site, "--example", example)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^(\d)\. (.*) \.\.\. (\d+\.\d\d) s$", done.stdout, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(STEPS) + 1)), done.stdout
    for (_, text, _), expected in zip(steps, STEPS, strict=True):
        assert text.startswith(expected)
    assert (found := re.search(r"it had done (\d+) of 40 iterations", done.stdout))
    assert 20 <= int(found[1]) < 40
    assert re.search(r"^   Complete  yes", done.stdout, re.M)
    last = done.stdout.splitlines()[-1]
    assert (same := re.fullmatch(r"Both runs end with the same result, ([0-9a-f]{16}): nothing was lost\.", last))
    assert site.reference(example, "--iterations", "40", small=False) == same[1]
    assert left(site) == []
    assert site.processes() == []


def test_a_program_that_takes_too_long_is_said_to(site: Site) -> None:
    """For example with more iterations than it can do in the time that a demo has."""
    code = "from phos.cli import demo, main; demo.PROGRAM_SECONDS = 2; main.main(['demo', '--iterations', '1000000'])"
    environment = {
        **site.environment,
        "TMPDIR": str(site.folder),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "phos-gpu demo: A program of the demo has not ended within 2 s.\n")
    assert re.fullmatch(r"Kept: (.*)", done.stdout.splitlines()[-1])
    assert site.processes() == []


@pytest.mark.serial  # it measures: beside other programs one may be faster while it is checkpointed than before
@pytest.mark.timeout(240)
def test_it_compares_the_protocols(site: Site) -> None:
    done = demo(site, "--protocol", "both", "--iterations", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^(\d+)\. (.*) \.\.\. (\d+\.\d\d) s$", done.stdout, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, 2 + 2 * 5 + 1)), done.stdout
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in re.findall(ROW, done.stdout, re.M)}
    assert list(rows) == ["stop", "cow"], done.stdout
    for before, during, after, stall, pause, seconds in rows.values():
        assert 0 < during < before
        assert after > 0
        assert 0 < stall < pause + 0.1
        assert pause < seconds
    assert re.search(r"ends with the same result, [0-9a-f]{16}; every image is whole\.$", done.stdout.strip())
    assert left(site) == []


@pytest.mark.parametrize("iterations", [100, 4])
def test_one_protocol_alone(site: Site, iterations: int) -> None:
    """However few iterations there are, the program is still there when it is dumped."""
    done = demo(site, "--protocol", "cow", "--iterations", str(iterations), "--example", "pointer_chase")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[0] for row in re.findall(ROW, done.stdout, re.M)] == ["cow"]


RESTORED = r"^│ (\w+) +" + r"│ +([\d.]+) " * 3 + r"│ +([^│]+?) │ +([^│]+?) │ +([^│]+?) │ +([^│]+?) │$"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["eager", "lazy", "pool"])
def test_it_measures_restores(site: Site, mode: str) -> None:
    done = demo(site, "--restore", mode)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^(\d+)\. (.*) \.\.\. (\d+\.\d\d) s$", done.stdout, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1)), done.stdout
    ((found, *times, memory, on_demand, waits, waited),) = re.findall(RESTORED, done.stdout, re.M)
    kernel, iteration, last_byte = (float(seconds) for seconds in times)
    assert found == mode
    assert 0 < kernel <= iteration  # they are printed in milliseconds: an iteration may fit into what is left of one
    assert memory == "8.0 MiB"
    if mode == "eager":
        assert last_byte < kernel + 0.002  # the gate opens when all is there
        assert (on_demand, waits, waited) == ("-", "-", "-")
    else:
        assert last_byte > 1.5  # 8 MiB at 4 MiB a second
        assert int(waits) == 0 or float(waited) > 0
    assert re.search(r"the program ends with the same result, [0-9a-f]{16}\.$", done.stdout.strip())
    assert left(site) == []


def test_one_demonstration_at_a_time(site: Site) -> None:
    done = demo(site, "--restore", "lazy", "--protocol", "cow")
    assert done.returncode == 2
    assert "choose one" in done.stderr
    assert site.processes() == []


def phosd_of(site: Site) -> list[int]:
    return [process.pid for process in site.processes() if "phos.gpu_engine.daemon" in words(process)]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_all_that_it_has_started(site: Site, number: signal.Signals, step: int) -> None:
    """At its begin, while phosd starts, and with a program that computes."""
    folder = site.folder / "tmp"
    folder.mkdir()
    with subprocess.Popen(
        [str(launcher("phos-gpu")), "demo", "--device", "software", "--iterations", "4000"],
        env={**site.environment, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        # Beside it may lie, for a moment, the file by which Python finds out whether it can write there.
        made: list[Path] = []
        wait_until(lambda: made.extend(folder.glob("phos-demo-*")) or made != [], "its folder")  # type: ignore[func-returns-value]
        if step:
            wait_until(lambda: bool(phosd_of(site)), "its phosd")
        if step > 1:
            wait_until((made[0] / "whole.log").exists, "its program")
        running.send_signal(number)
        output, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + number, output + errors
    assert errors == "phos-gpu demo: Interrupted: what it had started is ended.\n"
    assert left(site) == []
    assert site.processes() == []


@pytest.mark.parametrize("options", [(), ("--restore", "eager")], ids=" ".join)
def test_a_dump_that_comes_late_finds_something_left_to_do(site: Site, options: tuple[str, ...]) -> None:
    """On a machine that has become busy since phosd was started, by which the program's pace goes."""
    slow = site.folder / "criu"
    slow.write_text(f'#!/bin/sh\ncase " $* " in *" dump "*) sleep 3 ;; esac\nPHOS_CRIU= exec {launcher("criu")} "$@"\n')
    slow.chmod(0o755)
    done = demo(site, "--iterations", "8", *options, PHOS_CRIU=str(slow))
    assert done.returncode == 0, done.stdout + done.stderr
    assert left(site) == []


def test_it_leaves_no_zombie_to_a_parent_that_does_not_reap(site: Site) -> None:
    """As in a container whose first process is the user's own program."""
    folder = site.folder / "tmp"
    folder.mkdir()
    script = (
        "import ctypes, subprocess, sys\n"
        "import psutil\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here, and stay\n"
        "done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, capture_output=True, text=True)\n"
        "assert done.returncode == 0, done.stdout + done.stderr\n"
        "left = [(child.name(), child.status()) for child in psutil.Process().children(recursive=True)]\n"
        "assert not left, left\n"
    )
    command = [str(launcher("phos-gpu")), "demo", "--device", "software"]
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        env={**site.environment, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [(), ("--protocol", "stop"), ("--restore", "eager")], ids=" ".join)
def test_it_shows_what_criu_says_when_it_fails(site: Site, options: tuple[str, ...]) -> None:
    """Its complaints are in dump.log, and must reach the user."""
    broken = site.folder / "criu"
    broken.write_text(
        "#!/bin/sh\n"
        "for word; do case $previous in -D) folder=$word ;; -o) log=$word ;; esac; previous=$word; done\n"
        'echo "(00.000001) Error (criu/plugin.c:1): no plugin today" >"$folder/$log"\n'
        "exit 1\n"
    )
    broken.chmod(0o755)
    done = demo(site, *options, PHOS_CRIU=str(broken))
    assert done.returncode != 0
    assert "Error (criu/plugin.c:1): no plugin today" in done.stderr
    (kept,) = left(site)
    assert f"Kept: {kept}" in done.stdout
    assert site.processes() == []
