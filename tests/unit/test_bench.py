"""The machinery of the benchmarks: statistics, result files, and programs that go through the real CRIU."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import correctness
import harness
import machine
import process
from process import ProcessError, Program

ROOT = process.ROOT
CRIU = shutil.which(process.CRIU) or str(ROOT / "build" / "criu" / "criu")
needs_criu = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(CRIU), reason="needs root and CRIU")

TICKER = """
import sys
sys.path.insert(0, {examples!r})
from report import Report, parser
options = parser("A program without a GPU.", iterations=60).parse_args()
report = Report(options)
for iteration in range(options.iterations):
    report.step(iteration * 7919)
report.result()
"""


@pytest.fixture
def ticker(tmp_path: Path) -> Program:
    """Return a program that prints iterations and uses no GPU, not yet started."""
    script = tmp_path / "ticker.py"
    script.write_text(TICKER.format(examples=str(ROOT / "examples")))
    return Program([sys.executable, str(script), "--iteration-seconds", "0.02"], tmp_path, "none", frontend=False)


@pytest.fixture(autouse=True)
def _no_software_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "software_gpu_folder", lambda: Path("/nonexistent"))


def test_pairs_are_compared_one_by_one() -> None:
    """A drift that hits both of a pair alike does not count; one wild pair does not either."""
    without, with_ = [10.0, 20.0, 30.0, 40.0, 50.0], [10.1, 20.2, 30.3, 40.4, 100.0]
    assert harness.paired_percent(without, with_).percent == pytest.approx(1.0)
    few = harness.paired_percent([10.0, 10.0], [10.0, 12.0])
    assert (few.percent, few.spread) == pytest.approx((10.0, 10.0))
    assert (few.low, few.high) == pytest.approx((0.0, 20.0))


@pytest.mark.parametrize(("count", "first"), [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6), (60, 22), (400, 180)])
def test_the_median_is_known_as_well_as_the_sign_test_says(count: int, first: int) -> None:
    """The ranks are those of the tables of the sign test, two-sided, 5 %."""
    values = [float(value) for value in range(1, count + 1)]
    assert harness.median_interval(values[::-1]) == (first, count + 1 - first)


def test_a_table_shows_numbers_short_and_words_whole() -> None:
    """Three digits, yes and no, Markdown."""
    text = harness.table(["a", "b"], [[1234.5, True], [0.012345, "x"]])
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| 1234 | yes |", "| 0.0123 | x |"]


def options(folder: Path) -> argparse.Namespace:
    """Return the options that Results reads."""
    return argparse.Namespace(device="software", smoke=True, results=folder)


def test_a_second_run_of_one_commit_adds_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are replaced by key and kept otherwise; another commit begins anew."""
    monkeypatch.setenv("PHOS_COMMIT", "one")
    first = harness.Results(options(tmp_path), "name", "Title")
    first.add("a", value=1.0)
    first.add("b", value=2.0)
    second = harness.Results(options(tmp_path), "name", "Title")
    second.add("b", value=3.0)
    second.finish()
    stored = json.loads(second.path.read_text())
    assert [(row["key"], row["value"]) for row in stored["rows"]] == [("a", 1.0), ("b", 3.0)]
    assert stored["environment"]["commit"] == "one"
    assert "| b | 3 |" in second.path.with_suffix(".md").read_text()
    second.summary["different"] = 1
    second.note("No time left.")
    third = harness.Results(options(tmp_path), "name", "Title")
    third.begin_anew()
    third.finish()
    assert (third.rows, third.summary, third.notes) == ({}, {}, [])
    assert "No time left." not in third.path.with_suffix(".md").read_text()
    monkeypatch.setenv("PHOS_COMMIT", "two")
    assert harness.Results(options(tmp_path), "name", "Title").rows == {}


def test_a_result_names_the_commit_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the clone that the benchmark's script is in, if there is another installed."""
    monkeypatch.delenv("PHOS_COMMIT", raising=False)
    home = tmp_path / "lib" / "phos"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "phos-gpu").write_text("#!/bin/sh\n")
    (home / "bin" / "phos-gpu").chmod(0o755)
    (tmp_path / "phos-gpu").symlink_to(home / "bin" / "phos-gpu")
    monkeypatch.setattr(harness.process, "PHOS_GPU", str(tmp_path / "phos-gpu"))
    (home / "commit").write_text("f" * 40 + " with changes\n")
    assert harness._commit() == "f" * 40 + " with changes"


def test_a_result_of_a_changed_clone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit alone would claim what it did not measure; other results and pages are no part of that."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x")
        done = subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.delenv("PHOS_COMMIT", raising=False)
    monkeypatch.setattr(harness.process, "PHOS_GPU", "nothing-of-this-name")
    monkeypatch.setattr(harness.process, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("bench/results/x.md", "docs/y.md", "frontend.c")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    said = []
    for file in files:
        file.write_text("changed")
        said.append(harness._commit().removeprefix(git("rev-parse", "HEAD")))
    assert said == ["", "", " with changes"]


def test_a_folder_that_no_benchmark_has_made_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--work is emptied at the start."""
    (tmp_path / "thesis").touch()
    monkeypatch.setattr(sys, "argv", ["bench", "--smoke", "--work", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        harness.prepare(harness.options("Nothing."))
    assert ended.value.code == 2
    assert (tmp_path / "thesis").exists()


@pytest.mark.parametrize("part", ["page-lock", "copy-load", "trace-restore8"])
def test_a_part_that_fails_fails_all_of_them(tmp_path: Path, part: str) -> None:
    """run_gpu.sh goes on with the next part, and says so in the end."""
    home = tmp_path / "lib" / "phos"
    for program in ("bin/phos-gpu", "venv/bin/python", "bin/mount"):  # /run is left as it is
        (home / program).parent.mkdir(parents=True, exist_ok=True)
        (home / program).write_text("#!/bin/sh\nexit 3\n")
        (home / program).chmod(0o755)
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("results"))
    environment = {"PATH": f"{home}/bin:{os.environ['PATH']}", "PHOS_GPU_LOGS": str(tmp_path / "logs")}
    environment |= {"PHOS_BENCH_PYTHON": str(home / "venv" / "bin" / "python")}
    command = [tmp_path / "bench" / "run_gpu.sh", "-", part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"PART {part}: failed with status 3" in done.stdout
    assert done.returncode == 1


def test_a_run_that_was_not_identical_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that goes on where it was would make of 2 of 3 in the end 3 of 3."""
    bench = object.__new__(correctness.Bench)
    bench.chosen = argparse.Namespace(repeats=3, smoke=True, budget=100.0, started=time.monotonic())
    bench.results, bench.variants = harness.Results(options(tmp_path), "correctness", "Title"), {"a": []}
    bench.results.add("run 1", identical=False)

    def interrupted(number: int, _variant: str) -> None:
        bench.results.add(f"run {number}", identical=True)

    monkeypatch.setattr(bench, "interrupted", interrupted)
    with pytest.raises(SystemExit):
        bench.run()
    assert bench.results.summary["bit-identical"] == "2 of 3 runs"


def test_results_are_copied_to_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is given back keeps nothing but $OUT."""
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    results = harness.Results(options(tmp_path), "name", "Title")
    results.add("a", value=1)
    results.finish()
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md"}


def test_the_disk_rate_leaves_nothing_behind(tmp_path: Path) -> None:
    """Both directions are measured, and the files are gone."""
    try:
        write, read = machine.disk_rate(tmp_path, 32 << 20, 2)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert write > 1e6
    assert read > 1e6
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_begins_anew_when_reset() -> None:
    """The peak of this process falls back to what it holds now."""
    large = bytearray(os.urandom(1)) * (64 << 20)
    before = machine.peak_resident(os.getpid())
    del large
    machine.reset_peak(os.getpid())
    assert before - machine.peak_resident(os.getpid()) > 48 << 20


def test_waiting_for_a_program_that_ended_names_it(ticker: Program) -> None:
    """No time-out is sat out, and its last lines are in the message."""
    ticker.start()
    ticker.wait_for("^ITERATION 2 ")
    os.kill(ticker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ProcessError, match=r"ended before it printed 'NEVER'.*ITERATION"):
        ticker.wait_for("NEVER", 60)
    assert time.monotonic() - began < 10
    ticker.kill()
    assert not os.path.exists(f"/proc/{ticker.pid}")


def test_a_failing_command_shows_its_status_and_output() -> None:
    """What the command said is what one needs to know."""
    with pytest.raises(ProcessError, match=r"failed with status 3:\nno luck"):
        process.command(["sh", "-c", "echo no luck >&2; exit 3"], 10)


def test_keys_are_found_at_any_depth() -> None:
    """The JSON of inspect may move them."""
    tree: Any = {"a": [{"b": 1}, {"timings": [2]}]}
    assert process.find_key(tree, "timings") == [2]
    assert process.find_key(tree, "c") is None


@needs_criu
@pytest.mark.root
def test_a_program_goes_through_criu_and_back(
    ticker: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Dump and kill, restore, dump and run on, kill, restore again: the lines are those of one life."""
    monkeypatch.setattr(process, "CRIU", CRIU)
    request.addfinalizer(lambda: ctypes.CDLL(None).prctl(36, 0, 0, 0, 0))  # PR_SET_CHILD_SUBREAPER, undone
    process.adopt_orphans()
    ticker.start()
    ticker.wait_for("^ITERATION 3 ")
    for number, leave_running in enumerate((False, True)):
        folder = tmp_path / f"image{number}"
        folder.mkdir()
        process.criu_dump(ticker, folder, leave_running=leave_running, plugin=False)
        assert ticker.alive() == leave_running
        if leave_running:
            ticker.wait_iterations(3)
            ticker.kill()
        returned, _ = process.criu_restore(ticker, folder, plugin=False)
        assert returned > 0
        ticker.wait_iterations(2)
    lines = list(dict.fromkeys(ticker.finish()))
    assert [line.split()[1] for line in lines[:-1]] == [str(number) for number in range(1, 61)]


BENCHMARK = """
import os, signal, sys, time
def tidy(number, frame):
    time.sleep(1)
    print("tidied up", flush=True)
    os._exit(3)
signal.signal(signal.SIGINT, tidy)
signal.signal(signal.SIGTERM, tidy)
print("at work", flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(60)
"""


@pytest.fixture
def benchmark(tmp_path: Path) -> dict[str, str]:
    """The environment of a `phos-gpu bench` that has one benchmark, which takes a while to end what it has begun."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "harness.py").touch()
    (tmp_path / "bench" / "soak.py").write_text(BENCHMARK)
    return {**os.environ, "PHOS_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("everybody", [True, False], ids=["group", "alone"])
def test_a_benchmark_that_is_interrupted_may_tidy_up(
    benchmark: dict[str, str], number: signal.Signals, everybody: bool
) -> None:
    """Sent to the whole process group, as by a terminal, or to the command alone."""
    command = [sys.executable, "-m", "phos.cli", "bench", "soak"]
    with subprocess.Popen(command, env=benchmark, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "at work\n"
        (os.killpg if everybody else os.kill)(run.pid, number)
        try:
            assert run.communicate(timeout=30) == ("tidied up\n", None)
            assert run.returncode == 3
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def test_a_benchmark_s_end_by_a_signal_is_the_command_s(benchmark: dict[str, str]) -> None:
    command = [sys.executable, "-m", "phos.cli", "bench", "soak", str(int(signal.SIGKILL))]
    assert subprocess.run(command, env=benchmark, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL
