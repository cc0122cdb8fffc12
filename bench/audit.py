#!/usr/bin/env python3
"""How often the guesses of what kernels write are right, by the source of the guess: audits of many programs.

Each program runs once under `phos-gpu audit` (docs/speculation.md). A program that takes too long is ended, and what
was found up to then counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import ProcessError

EXAMPLES = ("mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil")
MODELS = ("conv", "transformer", "gpt", "lstm", "unet", "embedding")
TESTED = (
    ("PyTorch's libraries", "pytorch_libraries", "torch"),
    ("Transformers", "transformers_generate", "torch", "transformers"),
    ("Numba", "numba_program", "numba_cuda"),
    ("Triton's own tensor maps", "triton_maps", "torch", "triton"),
)
"""Name, program of tests/gpu, and the modules it needs."""

COUNTS = ("launches", "audited", "wrong_launches", "anything", "written_chunks", "predicted_chunks", "wrong_chunks",
          "over_traced_chunks", "predicted_bytes", "over_traced_bytes")  # fmt: skip

LEAST_SECONDS = 8.0
"""With less time left no program is begun."""

END_SECONDS = 20.0
"""How long a program may take to end when it is told to."""


@dataclass
class Audited:
    """A program to be audited."""

    name: str
    command: list[str]
    needs: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


def programs(chosen: argparse.Namespace) -> list[Audited]:
    """All programs, the most telling first."""
    run = process.python_program

    def rodinia(label: str, code: str, *parts: str, **environment: str) -> Audited:
        scale = "1" if chosen.device == "software" else "4"
        command = run(process.PROGRAMS / "audited_rodinia.py", "--code", code, "--scale", scale, *parts)
        return Audited(f"Rodinia-like, {label}", command, environment=environment)

    def torch(models: str, modes: str, *options: str) -> Audited:
        label = " ".join(["PyTorch", models, modes.replace(",", " and "), *(option.strip("-") for option in options)])
        command = run(process.PROGRAMS / "audited_torch.py", models, modes, *options)
        return Audited(label, command, ("torch",))

    iterations = "2" if chosen.smoke else "4"
    examples = [
        Audited(f"example {name}", run(process.EXAMPLES / f"{name}.py", "--iterations", iterations))
        for name in EXAMPLES
    ]
    if chosen.smoke:
        return [*examples[1:3], rodinia("PTX", "ptx", "bfs", "lud")]
    compiled = [torch(model, mode, "--compile") for model, mode in (("mlp", "train"), ("transformer", "infer"))]
    return [
        rodinia("PTX", "ptx"),
        *(torch(model, "train,infer") for model in MODELS),
        Audited("Triton", run(process.PROGRAMS / "audited_triton.py"), ("torch", "triton")),
        Audited("CuPy", run(process.PROGRAMS / "audited_cupy.py"), ("cupy",)),
        *(
            Audited(name, run(process.TEST_PROGRAMS / f"{program}.py", "--iterations", iterations), needs)
            for name, program, *needs in TESTED
        ),
        rodinia("machine code", "cubin"),
        torch("mlp,transformer", "infer", "--graph"),
        *examples,
        *(compiled if chosen.compile else ()),
        rodinia("machine code, no disassembler", "cubin", PHOS_NVDISASM=""),
    ]


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "audit", "Predicted and actual writes of kernels")
        self.setting: dict[str, str] = {}
        self.failed = False

    def audit(self, program: Audited) -> dict[str, Any]:
        """Run one program; return the audit's report. Raises ProcessError without one."""
        output = self.chosen.work / "audit.json"
        output.unlink(missing_ok=True)
        if program.environment != self.setting:  # what concerns phosd counts when it is started
            process.stop_daemon()
            self.setting = program.environment
        words = [process.PHOS_GPU, "audit", "--device", self.chosen.device, "--output", str(output)]
        words += ["--limit-launches", str(self.chosen.first), "--every", str(self.chosen.every)]
        words += ["--patience", str(self.chosen.patience), "--"]
        log = self.chosen.work / f"audit-{re.sub(r'[^a-z0-9]+', '-', program.name.lower())}.log"
        late = False
        with open(log, "wb") as file:
            child = subprocess.Popen(
                [*words, *program.command],
                env={**os.environ, **program.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            try:
                child.wait(min(self.chosen.seconds, max(10.0, harness.time_left(self.chosen))))
            except subprocess.TimeoutExpired:
                late = True
                child.send_signal(signal.SIGTERM)  # it ends the program, and reports what there is
                try:
                    child.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        if not output.exists():
            raise ProcessError(log.read_text(errors="replace")[-2000:])
        report: dict[str, Any] = json.loads(output.read_text())
        report["late"] = late
        report["log"] = log.read_text(errors="replace")[-1000:]
        return report

    def measure(self, program: Audited) -> None:
        """Audit one program and store a row for each source of its descriptors."""
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.results.note(f"{program.name} was left out: there is no {missing[0]} for this Python.")
            return
        start = time.monotonic()
        print(f"[{time.strftime('%H:%M:%S')}] {program.name}", flush=True)
        try:
            report = self.audit(program)
        except ProcessError as error:
            self.failed = True
            self.results.note(f"{program.name} could not be audited: {' '.join(str(error).split())[-300:]}")
            return
        seconds = time.monotonic() - start
        last = " ".join(report["log"].split())[-300:]
        if report["late"]:
            self.results.note(
                f"{program.name} was ended after {seconds:.0f} s; it had waited {report['analysis_seconds']:.0f} s "
                "for the analysis of its kernels; what it did until then counts."
            )
        elif report["status"]:
            self.failed = True
            self.results.note(f"{program.name} ended with status {report['status']}: {last}")
        if not report["kernels"]:
            self.results.note(f"{program.name}: no call that writes to GPU memory was seen. Its last words: {last}")
        for source in sorted({kernel["source"] for kernel in report["kernels"]}):
            mine = [kernel for kernel in report["kernels"] if kernel["source"] == source]
            wrong = [kernel for kernel in mine if kernel["wrong_launches"]]
            totals = {name: sum(kernel[name] for kernel in mine) for name in COUNTS}
            self.results.add(
                f"{program.name}: {source}",
                program=program.name,
                source=source,
                kernels=len(mine),
                kernels_wrong=len(wrong),
                **totals,
                seconds=seconds,
                analysis_seconds=report["analysis_seconds"],
                names=[kernel["kernel"] for kernel in mine],
                wrong_names=[kernel["kernel"] for kernel in wrong],
                wrong=[{"kernel": kernel["kernel"], "wrong": kernel["wrong"]} for kernel in wrong],
                skipped=_added(kernel["skipped"] for kernel in mine),
            )

    def run(self) -> None:
        """Audit as many programs as the time allows, and say which are left out.

        Raises:
            SystemExit: ``--only`` names no program, or one of them failed.
        """
        known = programs(self.chosen)
        parts = [part.strip().lower() for part in self.chosen.only.split(",") if part.strip()]
        wanted = [p for p in known if not parts or any(part in p.name.lower() for part in parts)]
        if not wanted:
            names = "; ".join(program.name for program in known)
            raise SystemExit(f"--only {self.chosen.only}: no program has that in its name. There are: {names}.")
        without_time = []
        for program in wanted:
            if harness.time_left(self.chosen) < LEAST_SECONDS:
                without_time.append(program.name)
            else:
                self.measure(program)
        if without_time:
            self.results.note(f"There was no time left for: {'; '.join(without_time)}. --only begins with them.")
        rows = list(self.results.rows.values())
        for source, total in by_source(rows).items():
            self.results.summary[f"success, {source}"] = total["success"]
        self.results.finish([source_table(rows), "", program_table(rows), "", *wrong_list(rows)])
        if self.setting:
            process.stop_daemon()
        if self.failed or not rows:
            raise SystemExit(1)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            total[name] = total.get(name, 0) + value
    return total


def by_source(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add the programs up. A kernel that several programs launch counts once, and as wrong if it was in one of them."""
    found: dict[str, dict[str, Any]] = {}
    for source in sorted({row["source"] for row in rows}):
        mine = [row for row in rows if row["source"] == source]
        names = {name for row in mine for name in row["names"]}
        wrong = {name for row in mine for name in row["wrong_names"]}
        total: dict[str, Any] = {name: sum(row[name] for row in mine) for name in COUNTS}
        total |= {"kernels": len(names), "kernels_wrong": len(wrong)}
        total["success"] = 1 - total["wrong_launches"] / total["audited"] if total["audited"] else 0.0
        total["over_traced"] = total["over_traced_bytes"] / (total["predicted_bytes"] or 1)
        found[source] = total
    return found


def source_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Success by source of the descriptor, as in the paper's Table 4."""
    columns = ["descriptors from", "kernels", "wrong", "launches", "audited", "wrong", "success %", "over-traced %"]
    lines = [
        [source, t["kernels"], t["kernels_wrong"], t["launches"], t["audited"], t["wrong_launches"],
         f"{100 * t['success']:.2f}", f"{100 * t['over_traced']:.1f}"]
        for source, t in by_source(rows).items()
    ]  # fmt: skip
    return harness.table(columns, lines)


def program_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each program and source."""
    columns = ["program", "source", "kernels", "wrong", "launches", "audited", "wrong", "anywhere", "over-traced %"]
    lines = []
    for row in rows:
        traced = 100 * row["over_traced_bytes"] / (row["predicted_bytes"] or 1)
        numbers = [row[name] for name in ("kernels", "kernels_wrong", "launches", "audited", "wrong_launches")]
        lines.append([row["program"], row["source"], *numbers, row["anything"], f"{traced:.1f}"])
    return harness.table(columns, lines)


def wrong_list(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every kernel of which a guess was wrong."""
    return [
        f"- wrong ({row['source']}), {row['program']}: `{kernel['kernel']}`" for row in rows for kernel in row["wrong"]
    ]


def main() -> None:
    """Parse the options and run."""
    parser = harness.options(__doc__.splitlines()[0] if __doc__ else "", budget=210.0)
    parser.add_argument("--first", type=int, default=3, metavar="N", help="launches of a kernel audited (%(default)s)")
    parser.add_argument("--every", type=int, default=100, metavar="M", help="and each M-th after them (%(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, metavar="S", help="for each program (%(default)s)")
    parser.add_argument(
        "--patience",
        type=int,
        default=10,
        metavar="S",
        help="that a program may wait for the analysis of its kernels (%(default)s); 0: until it is done",
    )
    parser.add_argument("--compile", action="store_true", help="also what torch.compile makes: takes minutes")
    parser.add_argument("--only", default="", metavar="PARTS", help="programs whose name has one of these, in any case")
    Bench(harness.prepare(parser)).run()


if __name__ == "__main__":
    main()
