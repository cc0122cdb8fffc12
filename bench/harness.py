"""What every benchmark shares: its options, the description of the machine, statistics, and the result files.

A result is one JSON file and one readable table, named <date>-<gpu>-<benchmark>. Rows carry a key; a second run on the
same day replaces the rows it measured again and keeps the others, so that a benchmark can be run in parts.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import machine
import process

GB = 1_000_000_000

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""What PyTorch's allocator is told; in each record of a run that it was set for."""
HUGE = "huge"
HUGE_BYTES = 128 << 30
WORK = Path("/tmp/phos-bench")
WORK_MARK = ".phos-bench"
"""In a folder for reports and logs: it may be emptied."""
# An installation keeps no results: they go where the caller stands.
RESULTS = process.ROOT / "bench" / "results" if (process.ROOT / "pyproject.toml").exists() else Path("bench-results")


def options(description: str, *, budget: float = 500.0) -> argparse.ArgumentParser:
    """Return the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("nvidia", "software"), default="nvidia", help="(%(default)s)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes on the software GPU: shows that the script works, measures nothing",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="how often each measurement is made")
    parser.add_argument(
        "--budget",
        type=float,
        default=budget,
        metavar="S",
        help="begin no further measurement after S seconds (%(default)s)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where results go (%(default)s)")
    parser.add_argument(
        "--work",
        type=Path,
        default=WORK,
        metavar="DIR",
        help="for reports and logs, emptied first: new, empty or an earlier benchmark's (%(default)s)",
    )
    return parser


def sizes(text: str) -> list[int]:
    """Parse a list of sizes in GB."""
    return [int(float(part) * GB) for part in text.split(",")]


def words(text: str) -> list[str]:
    """Parse a list of words."""
    return [word for word in text.split(",") if word]


def refuse_unknown(
    parser: argparse.ArgumentParser, chosen: Iterable[str], known: Iterable[str], separator: str = ", "
) -> None:
    """Say which of the names chosen there is not, and end."""
    if unknown := set(chosen) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from: {separator.join(known)}")


def prepare(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, choose the software GPU for smoke runs, and make the folders."""
    chosen = parser.parse_args()
    foreign = chosen.work != WORK and os.path.lexists(chosen.work) and not (chosen.work / WORK_MARK).exists()
    if foreign and (not chosen.work.is_dir() or any(chosen.work.iterdir())):
        parser.error(f"--work {chosen.work} would be emptied, and no benchmark has made it: name another folder")
    if chosen.smoke:
        chosen.device = "software"
    chosen.started = time.monotonic()
    if str(getattr(chosen, "image", "")) == HUGE:
        chosen.image = machine.huge_tmpfs(HUGE_BYTES)
        chosen.images_in = "a tmpfs with huge pages"
    shutil.rmtree(chosen.work, ignore_errors=True)
    chosen.work.mkdir(parents=True)
    (chosen.work / WORK_MARK).touch()
    process.adopt_orphans()
    # `timeout` ends a benchmark with SIGTERM: leave by way of every `finally`, so that no program keeps the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["PHOS_DEVICE"] = chosen.device  # for phosd, whichever command starts it
    if chosen.smoke and "PHOS_SOCKET" not in os.environ:
        os.environ["PHOS_SOCKET"] = str(chosen.work / "phosd.sock")  # away from a phosd that serves somebody
        atexit.register(process.stop_daemon)
    return chosen


def add_image_option(parser: argparse.ArgumentParser, default: str = "/dev/shm") -> None:
    """Add --image: where a benchmark's images go."""
    more = f"'{HUGE}': a tmpfs with huge pages, mounted for this"
    parser.add_argument("--image", type=Path, default=Path(default), metavar="DIR", help=f"(%(default)s); {more}")


def add_settle_option(parser: argparse.ArgumentParser) -> None:
    """Add --settle: how long a benchmark waits until phosd has analysed a program's kernels."""
    parser.add_argument(
        "--settle", type=float, default=40.0, metavar="S", help="wait for the analysis of kernels at most (%(default)s)"
    )


def time_left(chosen: argparse.Namespace) -> float:
    """Return the seconds of the budget that are left."""
    return float(chosen.budget - (time.monotonic() - chosen.started))


def measure_each(
    chosen: argparse.Namespace,
    results: Results,
    settings: Iterable[str],
    measure: Callable[[str], None],
    tables: Callable[[], Sequence[str]] = list,
) -> None:
    """Measure every setting for which there is time, and finish the results; what fails is noted, the others go on.

    ``tables`` makes what is shown of the results: all of them as one table, unless told otherwise.

    Raises:
        SystemExit: with status 1, at the end, if one of them failed.
    """
    failed = False
    for key in settings:
        if time_left(chosen) <= 0:
            results.note(f"{key}: no time left.")
            continue
        try:
            measure(key)
        except process.ProcessError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
            results.note(f"{key}: failed. {str(error).splitlines()[0]}")
    process.stop_daemon()
    results.finish(tables())
    if failed:
        raise SystemExit(1)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""


def _first_match(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found.group(1).strip() if found else ""


def environment(device: str) -> dict[str, Any]:
    """Describe machine and versions. What is not there is left empty, never guessed."""
    if device == "nvidia":
        query = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        gpu, driver, memory = [*[*query.splitlines(), ""][0].split(", "), "", "", ""][:3]
    else:
        gpu, driver, memory = "PhOS Software GPU", "", os.environ.get("SOFTGPU_MEMORY", "")
    versions = "import torch; print(torch.__version__, torch.version.cuda)"
    torch = _output(sys.executable, "-c", versions).split() if device == "nvidia" else []
    bindings = "import importlib.metadata as m; print(m.version('cuda-bindings'))"
    allocator = os.environ.get(ALLOCATOR)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device,
        "gpu": gpu,
        "gpu_memory": memory,
        "driver": driver,
        "cuda": torch[1] if len(torch) > 1 else "",
        "pytorch": torch[0] if torch else "",
        "cuda_bindings": _output(sys.executable, "-c", bindings),
        "criu": _first_line(_output(process.CRIU, "--version")),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _first_match(r"model name\s*:\s*(.*)", "/proc/cpuinfo"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_first_match(r"MemTotal:\s*(\d+)", "/proc/meminfo") or 0) / 2**20, 1),
        **({"allocator": allocator} if allocator else {}),
    }


def _commit() -> str:
    """Of what is measured: as whoever calls says, as install.sh has written down, else of the clone's history."""
    if given := os.environ.get("PHOS_COMMIT"):
        return given
    command = shutil.which(process.PHOS_GPU)
    if command:
        with suppress(OSError):
            return (Path(command).resolve().parents[1] / "commit").read_text().strip()
    git = ("git", "-C", str(process.ROOT))
    commit = _output(*git, "rev-parse", "HEAD")
    # As install.sh has it; other results, and what is written about them, are no changes of what is measured.
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs")
    return f"{commit} with changes" if changed else commit


def _first_line(text: str) -> str:
    return text.splitlines()[0].removeprefix("Version: ") if text else ""


class Results:
    """The rows of one benchmark, written out after each so that nothing is lost when time runs out."""

    def __init__(self, chosen: argparse.Namespace, name: str, title: str) -> None:
        self.title = title
        self.environment = environment(chosen.device)
        if hasattr(chosen, "images_in"):
            self.environment["images_in"] = chosen.images_in
            name, self.title = f"{name}-{HUGE}", f"{title}, images in {chosen.images_in}"
        self.notes: list[str] = []
        gpu = re.sub(r"[^a-z0-9]+", "-", self.environment["gpu"].lower().removeprefix("nvidia ")).strip("-")
        kind = "smoke" if chosen.smoke else (gpu or "unknown")
        day = self.environment["date"][:10]
        chosen.results.mkdir(parents=True, exist_ok=True)
        self.path: Path = chosen.results / f"{day}-{kind}-{name}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored["environment"]["commit"] == self.environment["commit"]:
                self.rows = {row["key"]: row for row in stored["rows"]}
                self.summary = stored["summary"]
                self.notes = stored["notes"]

    def begin_anew(self) -> None:
        """Forget what an earlier run has left, its sentences too: of one that counts what happens in a row."""
        self.rows, self.summary, self.notes = {}, {}, []

    def add(self, key: str, **values: Any) -> None:
        """Store a row, in place of an earlier one with this key, and write the files."""
        self.rows[key] = {"key": key, **values}
        shown = " ".join(
            f"{name}={show(value)}" for name, value in values.items() if not isinstance(value, dict | list)
        )
        print(f"[{time.strftime('%H:%M:%S')}] {key}: {shown}", flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Add a sentence under the table, once."""
        print(text, flush=True)
        if text not in self.notes:
            self.notes.append(text)
        self.write()

    def write(self, tables: Iterable[str] = ()) -> None:
        """Write the JSON file and the table."""
        content = {
            "benchmark": self.title,
            "environment": self.environment,
            "summary": self.summary,
            "notes": self.notes,
            "rows": list(self.rows.values()),
        }
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.rename(self.path)
        text = [f"# {self.title}", "", self.machine(), ""]
        text += [*tables] or [self.default_table()]
        if self.summary:
            text += ["", *(f"- {name}: {show(value)}" for name, value in self.summary.items())]
        text += ["", *(f"- {note}" for note in self.notes)]
        self.path.with_suffix(".md").write_text("\n".join(text).rstrip() + "\n")

    def machine(self) -> str:
        """Return the sentence that says where this was measured."""
        e = self.environment
        parts = [
            e["gpu"] or "no GPU",
            f"driver {e['driver']}" if e["driver"] else "",
            f"CUDA {e['cuda']}" if e["cuda"] else "",
        ]
        parts += [f"PyTorch {e['pytorch']}" if e["pytorch"] else "", f"CRIU {e['criu']}" if e["criu"] else "no CRIU"]
        parts += [f"Linux {e['kernel']}", f"{e['cpu']}, {e['cores']} cores, {e['memory_gib']} GiB"]
        commit = e["commit"][:12] + e["commit"][40:]
        return f"{', '.join(part for part in parts if part)}; {e['date']}, commit {commit or 'unknown'}."

    def default_table(self) -> str:
        """Return all rows as one table: a column for each value that is not itself a table."""
        columns: list[str] = []
        for row in self.rows.values():
            columns += [
                name for name, value in row.items() if name not in columns and not isinstance(value, dict | list)
            ]
        return table(columns, [[row.get(name, "") for name in columns] for row in self.rows.values()])

    def finish(self, tables: Sequence[str] = ()) -> None:
        """Write the files a last time, print the table, and name the files."""
        self.write(tables)
        print(self.path.with_suffix(".md").read_text())
        out = os.environ.get("OUT")
        if out:
            for path in (self.path, self.path.with_suffix(".md")):
                if path.parent.resolve() != Path(out).resolve():  # --results may name it
                    shutil.copy(path, out)
        print(f"Wrote {self.path} and {self.path.with_suffix('.md').name}")


def show(value: Any) -> str:
    """Return a number with three or four significant digits; anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0:
            return "0"
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(show(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def recorded(path: Path, environment: Mapping[str, Any]) -> str:
    """Return what a table in docs/ calls a recorded run: its day and commit, with a link, and the GPU."""
    # A file that names a commit was measured before it was committed, at what became that commit.
    named = re.search(r"-([0-9a-f]{7})$", path.stem)
    commit = named.group(1) if named else environment["commit"][:7]
    gpu = environment["gpu"].split()[1]
    return f"[{environment['date'][5:10]} {commit}](../bench/results/{path.stem}.md), {gpu}"


def median(values: Iterable[float]) -> float:
    """Return the median; 0 for nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else 0.0


class Paired(NamedTuple):
    """How much larger the second of each pair was, in percent."""

    percent: float
    """The median over the pairs."""
    low: float
    """The median is between `low` and `high` with a confidence of 95 %; see median_interval()."""
    high: float
    spread: float
    """Half the distance between the quartiles: what one pair is worth."""


def paired_percent(without: Sequence[float], with_: Sequence[float]) -> Paired:
    """Compare measurements made in pairs, one right after the other."""
    percents = sorted(100.0 * (b / a - 1.0) for a, b in zip(without, with_, strict=True))
    low, high = median_interval(percents)
    quarters = statistics.quantiles(percents, n=4) if len(percents) >= 4 else [percents[0], 0.0, percents[-1]]
    return Paired(median(percents), low, high, (quarters[2] - quarters[0]) / 2)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return between which two of the values the median lies with a confidence of 95 %.

    The interval of the sign test, which holds however the values are distributed: each is as likely above the true
    median as below it, so as many are below as show heads of so many coins. The interval goes from the (k+1)th value to
    the (k+1)th from the end, with the largest k for which k heads or fewer come in at most 2.5 % of all cases. Of fewer
    than six values even the whole range is not worth 95 %, and is returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    heads, below = 0, 1  # how many of the 2**count outcomes have so few heads
    while 40 * below <= 2**count:
        heads += 1
        below += math.comb(count, heads)
    last = max(0, heads - 1)
    return ordered[last], ordered[count - 1 - last]
