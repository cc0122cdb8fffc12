"""What tests of pools have in common: programs, their images, the commands, and what is waited for."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.integration.site import Program, Site, wait_until

LONG = ("--iterations", "400", "--iteration-seconds", "0.1")
"""Of a program that lives longer than several commands take."""

MLP = ("--iterations", "400", "--iteration-seconds", "0.02")

LAYERS = 24
LAYERS_SUM = LAYERS * (LAYERS + 1) // 2
LAYERS_PROGRAM = Path(__file__).parent / "programs" / "layers.py"


def dump_at(site: Site, program: Program, iterations: int = 5) -> Path:
    """A checkpoint that ends the program."""
    program.wait_iterations(iterations)
    image = site.image()
    site.dump(program, image)
    return image


def layers_image(site: Site, action: str = "sum", layers: int = LAYERS) -> tuple[Program, Path, Path]:
    """A program with 96 MiB that nothing has touched, and its image; it acts when the file is made."""
    go = site.folder / "go"
    program = site.start(sys.executable, str(LAYERS_PROGRAM), action, str(layers), str(go))
    program.wait_iterations(1)
    image = site.image()
    site.dump(program, image)
    return program, image, go


def create(site: Site, image: Path, size: int, *options: str) -> dict[str, Any]:
    """``phos-gpu pool create``."""
    words = ("phos-gpu", "pool", "create", str(image), "--size", str(size), "--json", *options)
    made: dict[str, Any] = json.loads(site.run(*words).stdout)
    return made


def take(site: Site, name: str, *options: str) -> dict[str, Any]:
    """``phos-gpu pool take``."""
    taken: dict[str, Any] = json.loads(site.run("phos-gpu", "pool", "take", name, "--json", *options).stdout)
    return taken


def pool(site: Site) -> dict[str, Any]:
    """The only pool."""
    (found,) = json.loads(site.run("phos-gpu", "pool", "list", "--json").stdout)["pools"]
    return dict(found)


def full(site: Site, size: int) -> dict[str, Any]:
    """Wait until so many are parked."""
    wait_until(lambda: sum(p["state"] == "parked" for p in pool(site)["parked"]) >= size, f"{size} parked processes")
    return pool(site)


def ended(site: Site, taken: dict[str, Any]) -> None:
    """Let what was taken come to its end, and wait for that."""
    for program in site.programs:
        program.let_end()
    wait_until(lambda: not any(map(psutil.pid_exists, taken["pids"])), f"the end of processes {taken['pids']}")


def results(program: Program) -> list[str]:
    """All results that are in a file to which several processes write."""
    return [line.split()[1] for line in program.lines() if line.startswith("RESULT")]


def wardens(site: Site) -> list[int]:
    """The first processes of the pid namespaces that were made."""
    found = []
    for process in site.processes():
        with suppress(psutil.NoSuchProcess):  # it has ended just now
            if process.name() == "phos-pool":
                found.append(process.pid)
    return found
