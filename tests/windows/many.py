"""Thousands of random runs: batches, each with a seed of its own and a process of its own, several at a time.

A batch that fails is named with its seed and leaves its folder; the others go on. What was run can be recorded
(``--record FILE.md``): the records are kept in a JSON file beside it, and the page is made from them, anew by
``python -m tests.windows.many FILE.md``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.windows.builds import ROOT, Sanitizer, Wrong, build

BATCH_SECONDS = 3600.0
DONE = {"windows": "images ", "lazy restores": "restores "}
"""By name of what is run: how the counts begin that say how many were brought to an end."""

HIDDEN = ("call_ns", "wait_ns", "open_ns")
"""Counts that say nothing on a machine that does something else as well."""


@dataclass
class Kind:
    """What is run many times."""

    module: str
    name: str
    option: str
    """That says how many runs a batch has."""
    batch: int
    prefix: tuple[str, ...] = ()
    """What each batch is started with."""


@dataclass
class Batch:
    """One seed."""

    seed: int
    runs: int
    seconds: float = 0.0
    failure: str = ""
    met: dict[str, int] = field(default_factory=dict)


def options(parser: argparse.ArgumentParser, kind: Kind) -> None:
    """Add the options that both kinds have."""
    parser.add_argument(kind.option, dest="runs", type=int, default=kind.batch, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first batch; each further has the next"
    )
    parser.add_argument("--batch", type=int, default=kind.batch, metavar="N", help="runs with one seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="batches at a time (%(default)s)")
    parser.add_argument("--sanitize", default="", help="thread or address,undefined: as --build was built")
    parser.add_argument("--build", type=Path, default=ROOT / "build", metavar="DIR", help="of a sanitizer")
    parser.add_argument("--seconds", type=float, default=1e9, metavar="S", help="begin no further batch after so long")
    parser.add_argument("--record", type=Path, metavar="FILE.md", help="add what was run to this page")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # of a batch: where its counts go
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)  # of a batch: already built


def one(chosen: argparse.Namespace, run: Callable[[Path, Counter[str]], None]) -> int:
    """A batch: ``run`` gets a folder, which stays if it fails, and counts what it meets with."""
    met: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="random-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    failure = ""
    try:
        run(folder, met)
    except (AssertionError, Exception) as error:
        failure = f"{type(error).__name__}: {error}"
        print(f"WRONG: {failure}\nleft: {folder}", file=sys.stderr)
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    chosen.report.write_text(json.dumps({"failure": failure, "met": met}))
    return 1 if failure else 0


def many(chosen: argparse.Namespace, kind: Kind, passed: Sequence[str]) -> int:
    """All batches; ``passed`` are the kind's own options. Returns the exit status."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="random-programs-") as name:
        folder = Path(name)
        sanitizer = Sanitizer(chosen.sanitize, folder, chosen.build.resolve())
        if chosen.sanitize:
            sanitizer.check_build()
        program = build(folder, *sanitizer.flags)
        counts = [min(chosen.batch, chosen.runs - at) for at in range(0, chosen.runs, chosen.batch)]
        batches = [Batch(chosen.seed + i, runs) for i, runs in enumerate(counts)]

        running: set[int] = set()

        def run(batch: Batch) -> Batch:
            if time.monotonic() - start > chosen.seconds:
                batch.runs = 0
                return batch
            report = folder / f"{batch.seed}.json"
            words = [*kind.prefix, sys.executable, "-m", kind.module, kind.option, str(batch.runs)]
            words += ["--seed", str(batch.seed), "--report", str(report), "--program", str(program), *passed]
            begun = time.monotonic()
            if chosen.sanitize:
                words += ["--sanitize", chosen.sanitize, "--build", str(chosen.build.resolve())]
            with open(folder / f"{batch.seed}.log", "wb") as log:
                child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                running.add(child.pid)
                try:
                    status = f"it ended with {child.wait(BATCH_SECONDS)}"
                except subprocess.TimeoutExpired:
                    status = f"it did not end within {BATCH_SECONDS:.0f} s"
                    _end({child.pid})
                running.discard(child.pid)
            batch.seconds = time.monotonic() - begun
            said = (folder / f"{batch.seed}.log").read_text(errors="replace")[-4000:]
            found: dict[str, Any] = {"failure": f"{status}: {said}", "met": {}}
            if report.exists():
                found = json.loads(report.read_text())
            batch.failure, batch.met = found["failure"], found["met"]
            return batch

        met: Counter[str] = Counter()
        # Ended early, it leaves no process behind.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(_end(running)))
        with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
            for batch in pool.map(run, batches):
                if not batch.runs:
                    continue
                met.update(batch.met)
                word = f"FAILED: {batch.failure}" if batch.failure else "right"
                print(f"seed {batch.seed}, {batch.runs} {kind.name}, {batch.seconds:.0f} s: {word}", flush=True)
    print(summary(met))
    batches = [batch for batch in batches if batch.runs]
    failed = [batch for batch in batches if batch.failure]
    record = Record(
        what=kind.name,
        runs=sum(batch.runs for batch in batches),
        seeds=(batches[0].seed, batches[-1].seed),
        batch=chosen.batch,
        jobs=chosen.jobs,
        sanitizer=chosen.sanitize,
        commit=commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=f"Linux {platform.release()}, {os.cpu_count()} cores",
        seconds=time.monotonic() - start,
        command=command_line(kind),
        failures=[{"seed": batch.seed, "runs": batch.runs, "what": batch.failure[:1500]} for batch in failed],
        met={name: value for name, value in sorted(met.items()) if name not in HIDDEN},
    )
    print(record.line())
    if chosen.record:
        write(chosen.record, record)
    return 1 if failed else 0


def _end(batches: set[int]) -> int:
    """End batches and all that they have started."""
    for pid in list(batches):
        try:
            tree = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        except psutil.Error:
            continue
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
    return 143


def summary(met: Counter[str]) -> str:
    """One line."""
    return ", ".join(f"{name} {value}" for name, value in sorted(met.items()))


# Records.


@dataclass
class Record:
    """One command's runs."""

    what: str
    runs: int
    seeds: tuple[int, int]
    batch: int
    jobs: int
    sanitizer: str
    commit: str
    date: str
    machine: str
    seconds: float
    command: str
    failures: list[dict[str, Any]]
    met: dict[str, int]

    def line(self) -> str:
        """A sentence."""
        build = f"-fsanitize={self.sanitizer}" if self.sanitizer else "plain"
        return (
            f"{self.runs} {self.what} ({build}), seeds {self.seeds[0]} to {self.seeds[1]}, {self.seconds:.0f} s, "
            f"commit {self.commit}: {len(self.failures)} batches failed"
        )


def commit() -> str:
    """Of the tree that runs, and whether it was changed since."""
    if named := os.environ.get("PHOS_COMMIT"):
        return named
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    parts = ["frontend", "gpu_engine", "images", "softgpu", "criu_plugin", "proto", "tests/windows"]
    changed = subprocess.run([*git, "status", "--porcelain", "--", *parts], capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")


def command_line(kind: Kind) -> str:
    """As it can be given again."""
    words = sys.argv[1:]
    if "--record" in words:
        at = words.index("--record")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", "-m", kind.module, *words])


def write(page: Path, record: Record) -> None:
    """Add a record and make the page anew. A command that was run before, at the same commit, is replaced."""
    store = page.with_suffix(".json")
    folder = os.open(page.parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # several commands may end at the same time; until the descriptor is closed
    try:
        _write(page, store, record)
    finally:
        os.close(folder)


def _write(page: Path, store: Path, record: Record) -> None:
    if page.exists() and not store.exists():
        raise Wrong(f"{page} has records whose file {store} is not here: it would lose them; record to another page")
    records = [Record(**stored) for stored in json.loads(store.read_text())["records"]] if store.exists() else []
    same = [old for old in records if (old.command, old.commit) == (record.command, record.commit)]
    records = [old for old in records if old not in same] + [record]
    _store(page, store, records)


def _store(page: Path, store: Path, records: list[Record]) -> None:
    for record in records:
        # A batch that fails ends there: what was to follow was not run.
        record.runs = sum(value for name, value in record.met.items() if name.startswith(DONE[record.what]))
        for failure in record.failures:
            failure["what"] = re.sub(r"/(tmp|dev/shm)/[^/\s]+/", "", failure["what"])
    records.sort(key=lambda r: (r.what, r.sanitizer, r.date))
    store.write_text(json.dumps({"records": [asdict(r) for r in records]}, indent=1) + "\n")
    page.write_text(page_text(records))


def page_text(records: Sequence[Record]) -> str:
    """The page, in Markdown."""
    text = [
        "# Random programs on the software GPU",
        "",
        "Made by `--record` of the commands below, on machines that were shared with other work. A command",
        "may end before it has done all that it names (`--seconds`). A batch has one seed; a failed batch is one in",
        "which something was not as it must be, and it ends there; runs are those that came to their end.",
        "",
        "| what | runs | build | seeds | runs a seed | failed batches | minutes | commit | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in records:
        seeds = f"{r.seeds[0]} to {r.seeds[1]}"
        text.append(
            f"| {r.what} | {r.runs} | {r.sanitizer + ' sanitizer' if r.sanitizer else 'plain'} | {seeds} | {r.batch} "
            f"| {len(r.failures)} | {r.seconds / 60:.1f} | {r.commit} | {r.date[:16]} |"
        )
    for r in records:
        text += ["", f"## {r.runs} {r.what}, {r.sanitizer + ' sanitizer' if r.sanitizer else 'plain'}, {r.commit}"]
        text += ["", f"`{r.command}`, {r.jobs} at a time, {r.machine}", ""]
        text += [f"- {name}: {value:,}" for name, value in r.met.items()]
        for failure in r.failures:
            what = " ".join(failure["what"].split())[:600]
            text.append(f"- **failed**, seed {failure['seed']}: {what}")
    return "\n".join(text) + "\n"


__all__ = ["Batch", "Kind", "Record", "Wrong", "many", "one", "options", "page_text", "summary", "write"]

if __name__ == "__main__":
    named = Path(sys.argv[1])
    kept = json.loads(named.with_suffix(".json").read_text())["records"]
    _store(named, named.with_suffix(".json"), [Record(**stored) for stored in kept])
