#!/usr/bin/env python3
"""A server brought back from an image in memory with a request waiting: eager, lazy, from a pool, and by the peer.

For each size: a decoder in the shape of a Llama is started, answers requests, and an image of it is made while it waits
for the next one. Then it is restored in every way, that request already there: from the restore command to the first
kernel, to the first token, to the last byte of GPU data; how fast data came; how much of it on demand, and how long
calls waited. The peer is the driver's own checkpoint with the same CRIU. Each answer must be, token by token, that of
the process that nothing interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
import restore_runs
import restore_tables
from harness import GB, Results
from restore_bench import RestoreBench
from restore_runs import POOLS, VARIANTS, Answer, Pool, Restored, Server, Unavailable

SYSTEMS = (*VARIANTS, *POOLS, "peer")


class Bench(RestoreBench):
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__(chosen, Results(chosen, "restore", "A server restored with a request waiting"))
        self.measured: list[str] = []
        """The keys of this run's rows: there may be those of an earlier one of the same day and commit."""

    def label(self, size: int) -> str:
        """Return what all rows of a size begin with."""
        return restore_tables.label({"bytes": size, "models": self.chosen.models})

    def size(self, size: int) -> None:
        """Measure everything at one size."""
        chosen = self.chosen
        label = self.label(size)
        needed = size + restore_runs.PROGRAM_BYTES
        if not chosen.smoke and (reason := restore_runs.host_room(chosen, needed)):
            self.results.note(f"{label}: not measured, {reason}.")
            return
        server = Server(chosen, size, models=chosen.models)
        folder = restore_runs.image_folder(chosen, "phos")
        began = time.monotonic()
        try:
            server.start()
            started = time.monotonic() - began
            seconds, expected = server.image(folder)
            restored = Restored(chosen, server, folder, expected)
            self.results.add(
                f"{label} running",
                system="running",
                bytes=size,
                models=chosen.models,
                weights_gb=server.weights / GB,
                gpu_gb=restored.total_bytes / GB,
                data_gb=restored.data_bytes / GB,
                image_gb=process.folder_size(folder) / GB,
                start_s=started,
                checkpoint_s=seconds,
                kernels_pending=server.kernels_pending,
                tokens_equal=True,
                # Of a process that was not interrupted: from the moment it saw the request.
                **expected.since(expected.received),
            )
            self.ours(size, restored)
        finally:
            server.program.kill()
            shutil.rmtree(folder, ignore_errors=True)
        if "peer" in chosen.systems:
            self.attempt(f"{label} peer", lambda: self.peer(size, expected))

    def ours(self, size: int, restored: Restored) -> None:
        """Restore in all ways of ours, those that were asked for."""
        label, wanted = self.label(size), self.chosen.systems
        for name in VARIANTS:
            if name in wanted and "pinned" not in name:
                self.attempt(f"{label} {name}", lambda name=name: self.variant(size, restored, name))
        for name in POOLS:
            if name in wanted:
                self.attempt(f"{label} {name}", lambda name=name: self.pooled(size, restored, name))
        pinned = [name for name in VARIANTS if name in wanted and "pinned" in name]
        if pinned:
            self.attempt(f"{label} pinned", lambda: self.pinned(size, restored, pinned))

    def variant(self, size: int, restored: Restored, name: str) -> None:
        """Restore in one of the ways of `phos-gpu restore`."""
        self.several(size, name, lambda: restored.variant(name))

    def pooled(self, size: int, restored: Restored, system: str) -> None:
        """Take from a pool of one of the kinds."""
        self.several(size, system, lambda: self.take(restored, system))

    def take(self, restored: Restored, system: str) -> dict[str, Any]:
        """Park a process and take it."""
        with Pool(restored, system) as pool:
            row = pool.take()
            return {
                **row,
                "park_s": pool.ready_s,
                "parked_gpu_gb": pool.gpu_bytes / GB,
                "parked_gb": pool.host_bytes / GB,
            }

    def pinned(self, size: int, restored: Restored, names: list[str]) -> None:
        """The same from an image that phosd holds pinned."""
        seconds = restored.pin()
        try:
            for name in names:
                self.several(size, name, lambda name=name: {**restored.variant(name), "pin_s": seconds})
        finally:
            restored.unpin()

    def peer(self, size: int, expected: Answer) -> None:
        """The peer once: it takes long, and its times hardly vary."""
        chosen = self.chosen
        # The process holds its GPU's data in host memory, and its image in memory is as large again.
        alone = False
        if not chosen.smoke:
            if reason := restore_runs.host_room(chosen, size + restore_runs.PROGRAM_BYTES):
                raise Unavailable(reason)
            reason = restore_runs.host_room(chosen, 2 * size + restore_runs.PROGRAM_BYTES)
            alone = bool(reason)
            if alone:
                self.results.note(f"{self.label(size)} peer: the driver's part alone, without CRIU: {reason}.")
            # What it took on an H100: what cannot end in time is not begun.
            if harness.time_left(chosen) < 10 + size / GB * (0.6 if alone else 2.2):
                raise Unavailable("no time left")
        server = Server(chosen, size, frontend=False, models=chosen.models, name="peer").start()
        folder = restore_runs.image_folder(chosen, "peer")
        try:
            self.add(size, "peer", [restore_runs.peer(chosen, server, folder, expected, alone=alone)])
        finally:
            server.program.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, size: int, name: str, runs: list[dict[str, Any]]) -> None:
        """Store the medians of one way, and each run."""
        row = restore_runs.medians(runs)
        if name != "peer" and "data_gb_s" in row:
            row["percent_of_copy"] = 100 * row["data_gb_s"] / self.results.summary[restore_runs.COPY_RATE]
        key = f"{self.label(size)} {name}"
        self.measured.append(key)
        self.results.add(key, system=name, bytes=size, models=self.chosen.models, runs=len(runs), **row, each=runs)

    def copies(self) -> None:
        """Measure copies again; what this run's rows say they are percent of is the higher rate."""
        try:
            most = restore_runs.measure_copies(self.chosen, self.results, again=True)
        except (process.ProcessError, subprocess.TimeoutExpired) as error:
            self.results.note(f"Copies could not be measured again: {str(error).splitlines()[0]}")
            return
        for row in (self.results.rows[key] for key in self.measured):
            if "percent_of_copy" in row:
                row["percent_of_copy"] = 100 * row["data_gb_s"] / most

    def run(self) -> None:
        """Measure every size."""
        chosen = self.chosen
        restore_runs.prepare_machine(chosen, self.results, max(chosen.sizes))
        for size in sorted(chosen.sizes):
            self.attempt(self.label(size), lambda size=size: self.size(size))
        process.stop_daemon()
        self.copies()  # whatever time is left: what has been measured is judged by it
        restore_tables.summarise(self.results)
        self.results.finish(restore_tables.tables(self.results))
        self.end("The answer was not that of the process left alone")


def systems(text: str) -> list[str]:
    """Parse a list of ways to restore; they have commas in their names, so semicolons separate them."""
    return [word.strip() for word in text.split(";") if word.strip()]


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "")
    parser.add_argument("--sizes", type=harness.sizes, metavar="GB,...", help="of the weights (8,32,64)")
    parser.add_argument("--systems", type=systems, default=list(SYSTEMS), metavar="S;...", help="; ".join(SYSTEMS))
    parser.add_argument(
        "--models",
        type=int,
        default=1,
        metavar="N",
        help="a server that holds N models, of which the request is for the one that was made last (%(default)s)",
    )
    restore_runs.add_options(parser)
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.systems, SYSTEMS, "; ")
    restore_runs.settle_options(chosen)
    chosen.sizes = chosen.sizes or (harness.sizes("0.016") if chosen.smoke else harness.sizes("8,32,64"))
    Bench(chosen).run()


if __name__ == "__main__":
    main()
