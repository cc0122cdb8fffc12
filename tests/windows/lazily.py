"""Random programs, dumped by CRIU and restored lazily again and again, memory arriving in random order.

``python -m tests.windows.lazily --restores 500`` runs as many as wanted, as root. The program knows what must be in its
memory (program.c), and compares in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.integration.site import Program, Site, become_reaper, wait_until
from tests.windows.windows import HERE, Wrong, build, summary

BANDWIDTHS = ("30M", "100M", "400M")


class LazyRun:
    """A site, and a program in it that is restored over and over."""

    def __init__(self, folder: Path, seed: int, rare: int = 0) -> None:
        """``rare``: one operation in so many writes where no argument says; then only strict restores can be right."""
        self.rare = rare
        self.random = random.Random(seed)
        self.met: Counter[str] = Counter()
        self.site = Site(folder, {"PHOS_PREFETCH": "random", "NO_FORK": "1"})
        self.executable = str(build(folder))
        self._programs = seed * 1000

    def start(self) -> Program:
        """A new program."""
        self._programs += 1
        self.met["programs"] += 1
        numbers = (self._programs, self.random.randint(1, 4), 48, 150, self.rare)
        program = self.site.start(self.executable, str(HERE / "kernels.ptx"), *map(str, numbers))
        wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program to begin")
        return program

    def end(self, program: Program) -> None:
        """It compares all of its memory with what must be in it."""
        os.kill(program.pid, signal.SIGUSR1)
        wait_until(lambda: not program.alive(), "the end of the program")
        if "GOOD" not in program.lines():
            raise Wrong(f"the program was harmed: {program.lines()[-10:]}")

    def restore(self, program: Program, number: int) -> None:
        """Dump it, restore it lazily, let it run."""
        image = self.site.image(f"image-{number}")
        time.sleep(self.random.random() * 0.2)
        if self.random.random() < 0.2:
            self.site.run("phosd", "--stop", check=False)
            self.site.environment["SOFTGPU_COPY_BANDWIDTH"] = self.random.choice(BANDWIDTHS)
        self.site.dump(program, image, PHOS_PROTOCOL="stop")
        mode = "strict" if self.rare else self.random.choice(("strict", "fast"))
        self.site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
        if not program.alive() or "BAD" in "".join(program.lines()):
            raise Wrong(f"the program was harmed: {program.lines()[-10:]}")
        job: dict[str, Any] = self.site.status()["jobs"][-1]
        self.met[f"restores {mode} {job['mode']} {job['state']}"] += 1
        for name, value in job["window"].items():
            if name != "first_launch_ns":
                self.met[name] += value
        shutil.rmtree(image)

    def run(self, restores: int, *, per_program: int = 6, say: bool = False) -> None:
        """So many restores; each program has a few of them."""
        program: Program | None = None
        for number in range(restores):
            program = program or self.start()
            self.restore(program, number)
            if self.random.random() < 1 / per_program or number == restores - 1:
                self.end(program)
                program = None
            if say and number % 10 == 9:
                print(number + 1, summary(self.met), flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--rare", type=int, default=0, help="one operation in so many writes where no argument says")
    chosen = parser.parse_args()
    become_reaper()
    folder = Path(tempfile.mkdtemp(prefix="lazily-"))
    print(f"seed {chosen.seed}, {folder}", flush=True)
    made = LazyRun(folder, chosen.seed, chosen.rare)
    try:
        made.run(chosen.restores, say=True)
        print(summary(made.met))
    except AssertionError as error:
        print(f"WRONG: {error}\nleft: {folder}")
        return 1
    finally:
        made.site.close()
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
