#!/usr/bin/env python3
"""Where the stall of a dump that leaves its program running goes: PhOS's phases, CRIU's own figures, and CRIU's log.

For each setting of the toggle reducers, and with the tasks' pages copied by CRIU instead of phosd, it prints the median
of the phases that make up the stall, what CRIU counts (stats-dump: freezing, frozen, dumping and writing memory), how
much memory its images hold, with --gaps the longest gaps in CRIU's log and how long it waits for its code in a task to
reach a breakpoint, and whose memory the pages are (from the program's smaps just before the dump). "unaccounted" is
what the phases leave of the stall.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import Program
from toggle import Heartbeat

ALL = "stack-limit,huge-pages,residue,copy-threads"

# Of phosd's environment, and of the program's.
VARIANTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "none": ({"PHOS_REDUCERS": "none"}, {}),
    "stack-limit, huge-pages": ({"PHOS_REDUCERS": "stack-limit,huge-pages"}, {}),
    "all": ({"PHOS_REDUCERS": ALL}, {}),
    "all, pages copied by CRIU": ({"PHOS_REDUCERS": ALL, "PHOS_CPU_PAGES": "off"}, {}),
    "all, 1 connection": ({"PHOS_REDUCERS": ALL}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
}
STATISTICS = ("freezing_seconds", "frozen_seconds", "memory_dump_seconds", "memory_write_seconds")
STALLING = (
    "quiesce",
    "detach",
    "driver checkpoint",
    "CRIU freeze and dump",
    "wait for GPU data",
    "wait for residue",
    "driver restore",
    "attach",
)
STAMP = re.compile(r"^\(([\d.]+)\)\s*(.*)")
GAPS = 8
FORGOTTEN_SECONDS = 1.5
"""After so long the kernel has switched off what it had switched on for the breakpoints of a program that has ended."""


def gaps(log: Path, count: int = GAPS) -> list[tuple[float, float, str]]:
    """Return the longest waits in a log of CRIU's: (seconds, when, what was said before), the longest first.

    What happens before the tasks are seized is none of the stall, and left out.
    """
    found: list[tuple[float, float, str]] = []
    before: tuple[float, str] | None = None
    for line in log.read_text(errors="replace").splitlines():
        match = STAMP.match(line)
        if match is None:
            continue
        now = float(match[1])
        if before is not None:
            found.append((now - before[0], before[0], before[1]))
        before = (now, match[2][:100])
    return sorted(found, reverse=True)[:count]


def trapped_after(log: Path) -> float:
    """Return the seconds until CRIU's code in the first task has come to its end, a breakpoint (compel)."""
    text = log.read_text(errors="replace")
    found = [
        re.search(rf"^\(([\d.]+)\)\s*{what}", text, re.MULTILINE)
        for what in (r"Waiting for \d+ to trap", r"\d+ was trapped")
    ]
    return float(found[1][1]) - float(found[0][1]) if found[0] and found[1] else 0.0


def owner(path: str) -> str:
    """Whose a mapping is, by the name that smaps gives it."""
    if not path:
        return "anonymous (malloc arenas, stacks of threads)"
    if path.startswith("["):
        return path
    if ".so" in path or path.endswith(".residue"):
        return re.sub(r"[-.]?\d[\d.]*", "", Path(path).name)
    return "other files"


def private_pages(pid: int) -> dict[str, int]:
    """Return the bytes of private memory that CRIU has to write, by whose they are, most first."""
    total: Counter[str] = Counter()
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
        elif words[0] == "Anonymous:":
            total[owner(path)] += int(words[1]) * 1024
    return {name: size for name, size in total.most_common() if size >= 64 << 10}


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "criu-freeze", "Where the stall of a dump that leaves its program running goes")
        self.repeats = chosen.repeats or (1 if chosen.smoke else 3)

    def measure(self, key: str, daemon: dict[str, str], changes: dict[str, str]) -> None:
        """Dump a running program a few times under one setting."""
        chosen = self.chosen
        process.stop_daemon()  # it reads its settings when it starts
        os.environ.pop("PHOS_CPU_PAGES", None)
        os.environ.update(daemon)
        software = chosen.device == "software"
        script = process.PROGRAMS / "buffers.py" if software else process.EXAMPLES / "pytorch_buffers.py"
        size = chosen.bytes or (4_000_000 if software else 8_000_000_000)
        command = process.python_program(script, "--bytes", str(size), "--buffers", "16")
        if software:
            command += ["--host-bytes", str(chosen.host_bytes)]
        if chosen.shared_mib:
            command[2:2] = [str(process.PROGRAMS / "holds_shared_memory.py"), str(chosen.shared_mib)]
        environment = dict(changes)
        if software:
            environment["SOFTGPU_RESIDUE"] = os.environ.get("SOFTGPU_RESIDUE", "12M" if chosen.smoke else "400M")
        make = partial(Program, command, chosen.work, chosen.device, True, environment, name="frozen")
        program = make()
        runs: list[dict[str, float]] = []
        longest: list[tuple[float, float, str]] = []
        owners: dict[str, int] = {}
        try:
            program.start().wait_for("^READY", 300)
            for number in range(self.repeats):
                if chosen.first and number:
                    program.kill()
                    program = make()
                    time.sleep(FORGOTTEN_SECONDS)
                    program.start().wait_for("^READY", 300)
                program.wait_iterations(20)
                folder = Path(chosen.image) / "phos-criu-freeze"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                owners = private_pages(program.pid)
                heartbeat = Heartbeat(program)
                process.criu_dump(program, folder, leave_running=True)
                program.wait_iterations(5)
                runs.append({"stall_s": heartbeat.stop(), **self.parts(folder)})
                if chosen.gaps:
                    longest = gaps(folder / "dump.log")
                    runs[-1]["criu_trap_seconds"] = trapped_after(folder / "dump.log")
                if chosen.keep:
                    shutil.copy(folder / "dump.log", chosen.work / f"{len(runs)}-{re.sub(r'[ ,]+', '-', key)}.log")
                shutil.rmtree(folder)
        finally:
            program.kill()
        medians = {name: harness.median(run.get(name, 0.0) for run in runs) for name in runs[-1]}
        self.results.add(
            key,
            reducers=daemon["PHOS_REDUCERS"],
            shared_mib=chosen.shared_mib,
            first_dumps=chosen.first,
            dumps=len(runs),
            **medians,
            gaps=longest,
            private_bytes=owners,
        )
        for seconds, when, what in longest:
            print(f"    {seconds * 1e3:8.1f} ms after {when:8.3f} s: {what}", flush=True)
        for name, held in owners.items():
            print(f"    {held / 1e6:8.1f} MB private: {name}", flush=True)

    @staticmethod
    def parts(folder: Path) -> dict[str, float]:
        """Return the phases of a dump and CRIU's figures."""
        whole = process.inspect(folder)
        criu: dict[str, Any] = whole["saved_by"]["criu"]
        figures = {f"criu_{name}": float(criu[name] or 0.0) for name in STATISTICS}
        figures["criu_pages_mb"] = criu["pages_bytes"] / 1e6
        phases = process.timings(folder)
        known = sum(phases.get(name, 0.0) for name in STALLING)
        figures["unaccounted"] = max(0.0, phases.get("stall", known) - known)
        return {**phases, **figures}

    def run(self) -> None:
        """Measure every setting."""
        wanted = [key for key in VARIANTS if not self.chosen.only or key in self.chosen.only]
        harness.measure_each(self.chosen, self.results, wanted, lambda key: self.measure(key, *VARIANTS[key]))


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=240)
    parser.add_argument("--bytes", type=int, metavar="N", help="of the program's buffers (8 GB; software: 4 MB)")
    parser.add_argument(
        "--host-bytes", type=int, default=0, metavar="N", help="of the software GPU's program's own memory (none)"
    )
    parser.add_argument(
        "--shared-mib", type=int, default=0, metavar="N", help="of memory that the program shares without a name (none)"
    )
    parser.add_argument(
        "--first", action="store_true", help="measure a program's first dump only, each of a new program"
    )
    parser.add_argument("--image", type=Path, default=Path("/dev/shm"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="of the settings; may be repeated")
    parser.add_argument(
        "--gaps",
        action="store_true",
        help="show where CRIU's log, made as full as it gets, has gaps: takes time itself",
    )
    parser.add_argument("--keep", action="store_true", help="keep CRIU's logs in the work folder")
    chosen = harness.prepare(parser)
    if chosen.gaps:
        process.VERBOSITY = "4"
    Bench(chosen).run()


if __name__ == "__main__":
    main()
