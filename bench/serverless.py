#!/usr/bin/env python3
"""One request to a function that does not run yet, end to end, as in figure 9 of the paper.

The request is there when the function is started: cold (Python, PyTorch, the model's weights made on the GPU), or from
an image in memory, by the driver's checkpoint with CRIU, eagerly, lazily, or from a pool. It ends with the last token
of the answer, which must be the same every time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
import restore_runs
import restore_tables
from harness import GB, Results
from restore_bench import RestoreBench
from restore_runs import Answer, Pool, Restored, Server, Unavailable

SYSTEMS = ("cold", "peer", "eager", "lazy", "pool")


class Bench(RestoreBench):
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        super().__init__(chosen, Results(chosen, "serverless", "One request to a function that has to be started"))

    def size(self, size: int) -> None:
        """Measure every way to start, at one size."""
        chosen = self.chosen
        label = restore_tables.size_text(size)
        if not chosen.smoke and (reason := restore_runs.host_room(chosen, size + restore_runs.PROGRAM_BYTES)):
            self.results.note(f"{label}: not measured, {reason}.")
            return
        server = Server(chosen, size)
        folder = restore_runs.image_folder(chosen, "serverless")
        try:
            server.start()
            _, expected = server.image(folder)
            restored = Restored(chosen, server, folder, expected)
            # The first lazy restore writes the order of first use beside the image.
            self.attempt(f"{label} first lazy restore", lambda: self.learn(restored))
            work: dict[str, Callable[[], dict[str, Any]]] = {
                "eager": lambda: restored.variant("eager"),
                "lazy": lambda: restored.variant("lazy"),
                "pool": lambda: self.take(restored),
            }
            for name, way in work.items():
                if name in chosen.systems:
                    self.attempt(f"{label} {name}", lambda name=name, way=way: self.several(size, name, way))
        finally:
            server.program.kill()
            shutil.rmtree(folder, ignore_errors=True)
        if "cold" in chosen.systems:
            self.attempt(f"{label} cold", lambda: self.several(size, "cold", lambda: self.cold(size, expected)))
        if "peer" in chosen.systems:
            self.attempt(f"{label} peer", lambda: self.peer(size, expected))

    def learn(self, restored: Restored) -> None:
        """Restore lazily once, unmeasured."""
        if {"lazy", "pool"} & set(self.chosen.systems):
            restored.variant("lazy")

    def take(self, restored: Restored) -> dict[str, Any]:
        """Park a process and take it."""
        with Pool(restored) as pool:
            return pool.take()

    def cold(self, size: int, expected: Answer) -> dict[str, Any]:
        """Start the program itself, without the frontend; its first request is the one that the others answer."""
        server = Server(self.chosen, size, frontend=False, name="cold", options=["--first", str(expected.number)])
        server.prepare()
        server.ask(expected.number)
        try:
            began = time.time()
            server.program.start()
            ready = float(server.program.wait_for("^READY", 300).split()[2])
            answer = server.answer(expected.number)
        finally:
            server.program.kill()
        return {**answer.since(began), "tokens_equal": answer.tokens == expected.tokens, "ready_s": ready - began}

    def peer(self, size: int, expected: Answer) -> None:
        """The peer once."""
        chosen = self.chosen
        if not chosen.smoke:
            if reason := restore_runs.host_room(chosen, 2 * size + restore_runs.PROGRAM_BYTES):
                raise Unavailable(reason)
            if harness.time_left(chosen) < 10 + size / GB * 2.2:
                raise Unavailable("no time left")
        server = Server(chosen, size, frontend=False, name="peer").start()
        folder = restore_runs.image_folder(chosen, "peer")
        try:
            self.add(size, "peer", [restore_runs.peer(chosen, server, folder, expected, alone=False)])
        finally:
            server.program.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, size: int, name: str, runs: list[dict[str, Any]]) -> None:
        """Store the medians of one way, and each run."""
        key = f"{restore_tables.size_text(size)} {name}"
        self.results.add(
            key,
            system=name,
            bytes=size,
            runs=len(runs),
            **restore_runs.medians(runs),
            each=runs,
            tokens=self.chosen.tokens,
        )

    def run(self) -> None:
        """Measure every size."""
        chosen = self.chosen
        restore_runs.prepare_machine(chosen, self.results, max(chosen.sizes))
        for size in sorted(chosen.sizes):
            self.attempt(restore_tables.size_text(size), lambda size=size: self.size(size))
        process.stop_daemon()
        self.results.note(
            "cold: the weights are made on the GPU, not read from files, which favours it; all that Python reads is in "
            "the page cache."
        )
        self.results.finish(self.tables())
        self.end("The answer was not the same")

    def tables(self) -> list[str]:
        """Return the comparison, and where the time went."""
        rows = list(self.results.rows.values())
        ends = {(row["bytes"], row["system"]): row["last_token_s"] for row in rows}
        cells = []
        for row in rows:
            cold, peer = (ends.get((row["bytes"], system)) for system in ("cold", "peer"))
            own = row["last_token_s"]
            line = [row["key"], row.get("ready_s", ""), row["first_kernel_s"], row["first_token_s"], own]
            cells.append(
                [*line, cold / own if cold else "", peer / own if peer else "", row["tokens_equal"], row["runs"]]
            )
        columns = ["", "model built", "first kernel", "first token", "end of the request"]
        columns += ["times as fast as cold", "times as fast as the peer", "same tokens", "runs"]
        text = ["Seconds from the command that starts it, the request being there; medians.", ""]
        return [*text, harness.table(columns, cells), "", *restore_tables.phases(rows)]


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=300)
    parser.add_argument("--sizes", type=harness.sizes, metavar="GB,...", help="of the weights (8,32)")
    parser.add_argument(
        "--systems", type=harness.words, default=list(SYSTEMS), metavar="S,...", help=", ".join(SYSTEMS)
    )
    restore_runs.add_options(parser)
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.systems, SYSTEMS)
    restore_runs.settle_options(chosen)
    chosen.sizes = chosen.sizes or (harness.sizes("0.016") if chosen.smoke else harness.sizes("8,32"))
    Bench(chosen).run()


if __name__ == "__main__":
    main()
