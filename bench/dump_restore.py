#!/usr/bin/env python3
"""Whole dumps and whole restores of a program with gigabytes of buffers: PhOS against NVIDIA's driver checkpoint.

For each size and place, in one run: PhOS (`criu dump --lib phos`, `criu restore -d --lib phos`) and the peer (the
driver's own checkpoint of the process, then the same CRIU without a plugin; back in the opposite order). The copy
bandwidth of the GPU and the sequential rate of the disk, before and after, are measured beside them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
import machine
import process
from harness import GB, Results
from process import ProcessError, Program

HOST_RESERVE = 6 << 30  # left free for everybody else
PLACES = ("memory", "huge", "disk")
SYSTEMS = ("phos", "peer")
# Stop-the-world: all of these pass before the application runs again (of the dump, those that the image records).
STALL_PHASES = ("quiesce", "detach", "driver checkpoint", "CRIU freeze and dump", "driver restore", "attach")


def rate(size: float, seconds: float) -> float:
    """Return GB a second; 0 if the time is not known."""
    return size / seconds / GB if seconds > 0 else 0.0


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "dump-restore", "Whole dump and restore, PhOS and the driver's own checkpoint")
        self.places = {"memory": chosen.memory_folder, "disk": chosen.disk_folder}
        if "huge" in chosen.places:
            self.places["huge"] = machine.huge_tmpfs(chosen.touch_gib << 30)
        self.disk_rates: dict[str, list[float]] = {"write": [], "read": []}
        # The peer takes a minute and its times hardly vary: once is enough for it, unless told otherwise.
        self.repeats = {"phos": chosen.repeats or (1 if chosen.smoke else 3), "peer": chosen.repeats or 1}

    def machine(self, largest: int) -> None:
        """Measure what the machine can do by itself."""
        chosen = self.chosen
        if not chosen.smoke:
            # For an image there, and for what the peer's process holds. Onto a disk phosd writes past the page cache.
            held = 0 if set(chosen.places) == {"disk"} and "peer" not in chosen.systems else 2 * largest
            wanted = min(held + (16 << 30), chosen.touch_gib << 30)
            seconds = machine.touch_memory(wanted)
            machine.enlarge_tmpfs(self.places["memory"], chosen.touch_gib << 30)
            self.results.environment["memory_gib"] = round(machine.meminfo("MemTotal") / 2**30, 1)
            print(f"Touched {wanted >> 30} GiB of host memory in {seconds:.1f} s.", flush=True)
        size = 1 << 20 if chosen.smoke else 256 << 20
        down, up = machine.copy_bandwidth(chosen.device, size)
        self.results.summary["copy device to pinned host, GB/s"] = down / GB
        self.results.summary["copy pinned host to device, GB/s"] = up / GB

    def disk(self) -> None:
        """Measure the disk's sequential rates; the best counts, of this time and of those before in this run."""
        size = 32 << 20 if self.chosen.smoke else self.chosen.disk_gib << 30
        for writers in (1, 4):
            try:
                rates = machine.disk_rate(self.places["disk"], size, writers)
            except OSError as error:
                self.results.note(f"The rate of {self.places['disk']} could not be measured: {error}.")
                return
            for each, rate in zip(self.disk_rates.values(), rates, strict=True):
                each.append(rate / GB)
        for name, each in self.disk_rates.items():
            self.results.summary[f"disk, sequential {name}, GB/s"] = max(each)
            self.results.summary[f"disk, sequential {name}, each time"] = ", ".join(map(harness.show, each))
        self.results.note(
            f"The disk's sequential rates: {size / GB:.3g} GB each time, past the page cache (O_DIRECT), by one and by "
            "four at once, before and, if there was time, after everything else."
        )

    def program(self, size: int, *, frontend: bool) -> Program:
        """Start the program and wait until its buffers are filled and it computes."""
        work = self.chosen.work
        script = process.PROGRAMS / "buffers.py" if self.chosen.smoke else process.EXAMPLES / "pytorch_buffers.py"
        # 512 MB a buffer, as a large model's layers have, but at least eight.
        options = ["--bytes", str(size), "--buffers", str(max(8, size // (GB // 2)))]
        options += ["--check-file", str(work / "check")]
        (work / "check").unlink(missing_ok=True)
        program = Program(
            process.python_program(script, *options),
            work,
            self.chosen.device,
            frontend,
            name="phos" if frontend else "peer",
        )
        program.start().wait_for("^READY", 300)
        program.wait_iterations(20)
        return program

    def check(self, program: Program) -> bool:
        """Let the program compare every word with what it must be."""
        start = len(program.lines())
        (self.chosen.work / "check").touch()
        return program.wait_for("^CHECK", 300, after=start).startswith("CHECK ok")

    def image(self, place: str) -> Path:
        """Return an empty folder for an image."""
        folder = Path(self.places[place]) / "phos-bench-image"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def forget(self, place: str) -> None:
        """Let the next restore read the disk, if the image is there."""
        if place == "disk" and not machine.drop_page_cache():
            self.results.note("The page cache could not be dropped: restores from disk may have read from it.")

    def room(self, place: str, size: int, *, peer: bool) -> str:
        """Say why an image of this size does not fit; empty if it does."""
        free = shutil.disk_usage(self.places[place]).free
        if free < size + GB:
            return f"the image needs {size / GB:.0f} GB and {self.places[place]} has {free / GB:.0f} GB free"
        if self.chosen.smoke:
            return ""
        # Memory: an image in /dev/shm, and with the peer the process holds its GPU's data in host memory as well.
        needed = (size if place != "disk" else 0) + (size if peer else 3 << 30)
        # Memory may still be growing: what counts is what the machine was told it has.
        available = max(machine.meminfo("MemAvailable"), (self.chosen.touch_gib << 30)) - HOST_RESERVE
        if needed > available:
            return f"it needs {needed / GB:.0f} GB of host memory and {available / GB:.0f} GB are there"
        return ""

    def phos(self, size: int, place: str) -> dict[str, Any]:
        """One dump, kill and restore with PhOS."""
        folder = self.image(place)
        program = self.program(size, frontend=True)
        try:
            daemon = process.daemon_pid()
            machine.reset_peak(daemon)
            dump = process.criu_dump(program, folder)
            phases = process.timings(folder)
            stored = process.folder_size(folder)
            peak = machine.peak_resident(daemon)
            self.forget(place)
            returned, computing = process.criu_restore(program, folder)
            back = process.restore_timings()
            peak = max(peak, machine.peak_resident(daemon))
            right = self.check(program)
        finally:
            program.kill()
            shutil.rmtree(folder, ignore_errors=True)
        data = phases.get("GPU data", 0.0)
        return {
            "dump_s": dump,
            "restore_computing_s": computing,
            "restore_returned_s": returned,
            "data_right": right,
            "image_gb": stored / GB,
            "dump_data_gb_s": rate(size, data),
            "restore_data_gb_s": rate(size, back.get("GPU data", 0.0)),
            "phosd_peak_gb": peak / GB,
            "phases": phases,
            "restore_phases": back,
        }

    def peer(self, size: int, place: str, *, driver_only: bool) -> dict[str, Any]:
        """One dump, kill and restore with the driver and CRIU; or the driver's part alone, without a kill."""
        folder = self.image(place)
        program = self.program(size, frontend=False)
        try:
            start = time.perf_counter()
            steps = driver_checkpoint.suspend(program.pid)
            dump = time.perf_counter() - start
            restore, stored = 0.0, 0
            if not driver_only:
                steps["CRIU dump"] = process.criu_dump(program, folder, plugin=False)
                dump = time.perf_counter() - start
                stored = process.folder_size(folder)
                self.forget(place)
            lines = len(program.lines())
            start = time.perf_counter()
            if not driver_only:
                steps["CRIU restore"], _ = process.criu_restore(program, folder, plugin=False)
            steps.update(driver_checkpoint.resume(program.pid))
            returned = time.perf_counter() - start
            process.wait_until(lambda: len(program.lines()) > lines, 60, "the peer's program to compute")
            restore = time.perf_counter() - start
            right = self.check(program)
        finally:
            program.kill()
            shutil.rmtree(folder, ignore_errors=True)
        return {
            "dump_s": dump,
            "restore_computing_s": restore,
            "restore_returned_s": returned,
            "data_right": right,
            "image_gb": stored / GB,
            "phases": steps,
        }

    def measure(self, system: str, size: int, place: str) -> None:
        """Measure one system at one size and place, and store the medians."""
        label = f"{size / GB:g} GB" if size >= GB else f"{size / 1e6:g} MB"
        key = f"{system} {label} {place}"
        reason = self.room(place, size, peer=system == "peer")
        driver_only = bool(reason) and system == "peer"
        if reason and not driver_only:
            self.results.note(f"{key}: not measured, {reason}.")
            return
        if driver_only:
            if place == "disk":
                return  # the driver's part has nothing to do with the place: measured once, for memory
            self.results.note(f"{key}: the driver's part alone, without CRIU: {reason}.")
        # What it took on an H100 with a disk of 1 GB/s, with room to spare: what cannot end in time is not begun.
        expected = 0.0 if self.chosen.smoke else 15 + size / GB * (2.5 if system == "peer" or place == "disk" else 0.6)
        if harness.time_left(self.chosen) < expected:
            self.results.note(f"{key}: not measured, no time left.")
            return
        runs: list[dict[str, Any]] = []
        began = time.monotonic()
        for _ in range(self.repeats[system]):
            took = (time.monotonic() - began) / max(1, len(runs))
            if runs and harness.time_left(self.chosen) < 1.2 * took:
                break
            runs.append(self.peer(size, place, driver_only=driver_only) if system == "peer" else self.phos(size, place))
        row: dict[str, Any] = {"system": system, "size": label, "bytes": size, "place": place, "runs": len(runs)}
        row["driver_only"] = driver_only
        for name, value in runs[0].items():
            if isinstance(value, bool):
                row[name] = all(run[name] for run in runs)
            elif isinstance(value, float | int):
                row[name] = harness.median(run[name] for run in runs)
        for kind in ("phases", "restore_phases"):
            if kind in runs[0]:
                row[kind] = {
                    phase: harness.median(run[kind].get(phase, 0.0) for run in runs) for phase in runs[0][kind]
                }
        row["each"] = runs
        self.results.add(key, **row)

    def run(self) -> None:
        """Measure everything that was asked for, smallest first, while there is time."""
        chosen = self.chosen
        sizes = sorted(chosen.sizes)
        self.machine(sizes[-1])
        began = time.monotonic()
        if "disk" in chosen.places:
            self.disk()
        took = time.monotonic() - began
        if "peer" in chosen.systems:
            driver_checkpoint.start_driver(chosen.device)
        failures = 0
        for size in sizes:
            for place in chosen.places:
                for system in chosen.systems:
                    try:
                        self.measure(system, size, place)
                    except (ProcessError, driver_checkpoint.DriverCheckpointError) as error:
                        failures += 1
                        print(error, file=sys.stderr, flush=True)
                        self.results.note(f"{system} {size / GB:g} GB {place}: failed. {str(error).splitlines()[0]}")
        if "disk" in chosen.places and harness.time_left(chosen) > 1.5 * took:
            self.disk()
        self.results.finish(self.tables())
        wrong = [row["key"] for row in self.results.rows.values() if not row["data_right"]]
        if wrong:
            print(f"The data was not right after a restore: {', '.join(wrong)}.", file=sys.stderr)
        if wrong or failures:
            raise SystemExit(1)

    def tables(self) -> list[str]:
        """Return the comparison, the rates, and where the time went."""
        rows = list(self.results.rows.values())
        by_key = {(row["system"], row["size"], row["place"]): row for row in rows}
        compared, rates = [], []
        summary = self.results.summary
        for row in rows:
            if row["system"] != "phos":
                continue
            peer = by_key.get(("peer", row["size"], row["place"]))
            cells = [row["size"], row["place"], row["dump_s"], row["restore_computing_s"], row["restore_returned_s"]]
            if peer:
                note = " (driver only)" if peer["driver_only"] else ""
                cells += [f"{peer['dump_s']:.2f}{note}", f"{peer['restore_computing_s']:.2f}{note}"]
                cells += [peer["dump_s"] / row["dump_s"], peer["restore_computing_s"] / row["restore_computing_s"]]
            compared.append([*cells, *[""] * (9 - len(cells)), row["data_right"]])
            disk = row["place"] == "disk"
            limit = summary.get("disk, sequential write, GB/s" if disk else "copy device to pinned host, GB/s", 0)
            back = summary.get("disk, sequential read, GB/s" if disk else "copy pinned host to device, GB/s", 0)
            down, up = row["dump_data_gb_s"], row["restore_data_gb_s"]
            rates.append([row["size"], row["place"], down, 100 * down / limit if limit else ""])
            rates[-1] += [up, 100 * up / back if back else "", row["phosd_peak_gb"], row["image_gb"]]
        text = [
            "Seconds, medians. A restore ends when the program has computed its next iteration.",
            "",
            harness.table(
                [
                    *("size", "image in", "PhOS dump", "PhOS restore", "command returned"),
                    *("peer dump", "peer restore", "dump, times as fast", "restore, times as fast", "data right"),
                ],
                compared,
            ),
            "",
            "GB/s while GPU data is copied, and percent of what the machine does by itself (copies, or the disk).",
            "",
            harness.table(
                ["size", "image in", "dump", "%", "restore", "%", "phosd's peak resident GB", "image GB"], rates
            ),
            "",
            "Where the dump's time went, seconds:",
            "",
        ]
        for system in ("phos", "peer"):
            chosen = [row for row in rows if row["system"] == system]
            phases = list(dict.fromkeys(phase for row in chosen for phase in row["phases"]))
            if phases:
                cells = [[row["key"], *(row["phases"].get(phase, "") for phase in phases)] for row in chosen]
                text += [harness.table(["", *phases], cells), ""]
        chosen = [row for row in rows if "restore_phases" in row]
        phases = list(dict.fromkeys(phase for row in chosen for phase in row["restore_phases"]))
        if phases:
            cells = [[row["key"], *(row["restore_phases"].get(phase, "") for phase in phases)] for row in chosen]
            text += ["Where the restore's time went, seconds:", "", harness.table(["", *phases], cells), ""]
        return text


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "")
    parser.add_argument("--sizes", type=harness.sizes, metavar="GB,...", help="of the buffers (8,32,64)")
    parser.add_argument(
        "--places",
        type=harness.words,
        metavar="P,...",
        help="memory, huge (pages), disk (all; --smoke: all but huge)",
    )
    parser.add_argument("--systems", type=harness.words, default=SYSTEMS, metavar="S,...", help="phos, peer (both)")
    parser.add_argument("--memory-folder", type=Path, default=Path("/dev/shm"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--disk-folder", type=Path, default=Path("/var/tmp"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--touch-gib", type=int, default=112, metavar="N", help="host memory to touch before timing")
    parser.add_argument(
        "--disk-gib", type=int, default=6, metavar="N", help="written each time to measure the disk (%(default)s)"
    )
    chosen = harness.prepare(parser)
    chosen.sizes = chosen.sizes or ([8_000_000] if chosen.smoke else harness.sizes("8,32,64"))
    chosen.places = chosen.places or ["memory", *([] if chosen.smoke else ["huge"]), "disk"]
    harness.refuse_unknown(parser, chosen.places, PLACES)
    harness.refuse_unknown(parser, chosen.systems, SYSTEMS)
    Bench(chosen).run()


if __name__ == "__main__":
    main()
