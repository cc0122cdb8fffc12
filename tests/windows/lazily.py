"""Random programs, dumped by CRIU and restored lazily again and again, memory arriving in random order.

``python -m tests.windows.lazily --restores 500 --jobs 2`` runs as many as wanted (many.py), as root. The program knows
what must be in its memory (program.c), and compares in the end. The commands' part is played here: each would start a
Python of its own, which takes longer than what they do.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from phos.gpu_engine.daemon import client
from phos.gpu_engine.installation import application_environment, launcher
from tests.integration.site import Program, Site, become_reaper, reap, wait_until
from tests.windows import many
from tests.windows.builds import HERE, PATIENCE, ROOT, Sanitizer, Wrong, build, gpus, start_phosd
from tests.windows.many import Kind

BANDWIDTHS = ("30M", "100M", "400M")
MEGABYTES = 16
KIND = Kind(
    "tests.windows.lazily",
    "lazy restores",
    "--restores",
    batch=25,
    # CRIU restores under the same pid: nobody else may have taken it meanwhile.
    prefix=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
)

ASK_LAYOUT = 'self=$1; . "${self%/*}/layout.sh"; find_criu && echo "$loader:$home_criu:$criu:$plugins"'


class LazyRun:
    """A site, and a program in it that is restored over and over."""

    def __init__(
        self, folder: Path, seed: int, rare: int = 0, *, sanitize: str = "", executable: Path | None = None
    ) -> None:
        """``rare``: one operation in so many writes where no argument says; then only strict restores can be right."""
        self.rare = rare
        self.random = random.Random(seed)
        self.met: Counter[str] = Counter()
        self.site = Site(folder, {"PHOS_PREFETCH": "random", "NO_FORK": "1", "SOFTGPU_DEVICES": str(gpus(seed))})
        self.socket = folder / "run" / "phosd.sock"
        self.sanitizer = Sanitizer(sanitize, folder)
        self.executable = str(executable or build(folder, *self.sanitizer.flags))
        self._programs = seed * 1000
        self._phosd = self._start_phosd()
        self._criu, self._plugins = _criu()

    def _start_phosd(self) -> subprocess.Popen[bytes]:
        log = self.site.folder / "phosd.log"
        return start_phosd("phos.gpu_engine.daemon", self.socket, log, self.site.environment, self.sanitizer)

    def start(self) -> Program:
        """A new program."""
        self._programs += 1
        self.met["programs"] += 1
        self.met["programs on two GPUs"] += self.site.environment["SOFTGPU_DEVICES"] == "2"
        numbers = (self._programs, self.random.randint(1, 4), MEGABYTES, 150, self.rare)
        environment = {**application_environment("software", self.socket), **self.sanitizer.program()}
        words = [*self.sanitizer.prefix, self.executable, str(HERE / "kernels.ptx"), *map(str, numbers)]
        program = self.site.start(*words, under=False, **environment)
        wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program to begin")
        return program

    def end(self, program: Program) -> None:
        """It compares all of its memory with what must be in it."""
        os.kill(program.pid, signal.SIGUSR1)
        wait_until(lambda: not program.alive(), "the end of the program")
        self.sanitizer.complain()
        if "GOOD" not in program.lines():
            raise Wrong(f"the program was harmed: {program.lines()[-10:]}")

    def restore(self, program: Program, number: int) -> None:
        """Dump it, restore it lazily, let it run."""
        image = self.site.image(f"image-{number}")
        time.sleep(self.random.random() * 0.2)
        if self.random.random() < 0.2:
            client.shutdown(self.socket)
            self._phosd.wait(PATIENCE)
            self.site.environment["SOFTGPU_COPY_BANDWIDTH"] = self.random.choice(BANDWIDTHS)
            self._phosd = self._start_phosd()
        self._run_criu("dump", image, "-t", str(program.pid), "--timeout", "600", PHOS_PROTOCOL="stop")
        self._wait(image, "committed", restore=False)
        self.site.gone(program)
        mode = "strict" if self.rare else self.random.choice(("strict", "fast"))
        self._run_criu("restore", image, "-d", PHOS_RESTORE="lazy", PHOS_LAZY=mode)
        self._wait(image, "attached", restore=True)
        if not program.alive() or "BAD" in "".join(program.lines()):
            raise Wrong(f"the program was harmed: {program.lines()[-10:]}")
        job = client.status(self.socket).jobs[-1]
        self.met[f"restores {mode} {job.mode} {job.state}"] += 1
        for name, value in job.window.items():
            if name != "first_launch_ns":
                self.met[name] += value
        self.sanitizer.complain()
        shutil.rmtree(image)

    def _run_criu(self, verb: str, image: Path, *words: str, **changes: str) -> None:
        command = [*self._criu, verb, "--libdir", self._plugins, "-D", str(image), "-o", f"{verb}.log", "-v4", *words]
        done = subprocess.run(
            command,
            env={**self.site.environment, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        reap()
        if done.returncode != 0:
            raise Wrong(f"criu {verb}: {done.returncode}, {done.stderr} {self.site.errors(image / f'{verb}.log')}")

    def _wait(self, image: Path, wanted: str, *, restore: bool) -> None:
        state = client.wait_image(image, restore=restore, timeout=PATIENCE, path=self.socket)
        if state.state != wanted or state.error:
            raise Wrong(f"the image is {state.state}, not {wanted}: {state.error}")

    def run(self, restores: int, *, per_program: int = 6) -> None:
        """So many restores; each program has a few of them."""
        program: Program | None = None
        for number in range(restores):
            program = program or self.start()
            self.restore(program, number)
            if self.random.random() < 1 / per_program or number == restores - 1:
                self.end(program)
                program = None

    def close(self) -> None:
        """End everything."""
        self.site.close()
        self._phosd.wait(PATIENCE)
        self.sanitizer.complain()


def _criu() -> tuple[list[str], str]:
    """How CRIU is started without the launcher, and the plugin's folder: as the launcher finds them."""
    path = launcher("criu")
    path = path if path.exists() else ROOT / "packaging" / "criu"  # PHOS_HOME may name a sanitizer's build
    asked = subprocess.run(["sh", "-c", ASK_LAYOUT, "sh", str(path)], capture_output=True, text=True, check=True)
    loader, folder, criu, plugins = asked.stdout.strip().split(":")
    if loader:
        return [loader, "--library-path", f"{folder}/lib", "--argv0", "criu", criu], plugins
    return [criu], plugins


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    many.options(parser, KIND)
    parser.add_argument("--rare", type=int, default=0, help="one operation in so many writes where no argument says")
    chosen = parser.parse_args()
    if chosen.report is None:
        return many.many(chosen, KIND, ["--rare", str(chosen.rare)])

    def run(folder: Path, met: Counter[str]) -> None:
        become_reaper()
        options: dict[str, Any] = {"sanitize": chosen.sanitize, "executable": chosen.program}
        made = LazyRun(folder, chosen.seed, chosen.rare, **options)
        made.met = met
        try:
            made.run(chosen.runs)
        finally:
            made.close()

    return many.one(chosen, run)


if __name__ == "__main__":
    sys.exit(main())
