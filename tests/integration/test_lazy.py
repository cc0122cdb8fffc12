"""Lazy restores: the processes compute while their memory is still being loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.site import Program, Site, wait_until

EXAMPLES = {
    "mlp": ("--iterations", "60", "--iteration-seconds", "0.02"),
    "pointer_chase": ("--iterations", "60", "--iteration-seconds", "0.02"),
    "struct_argument": ("--iterations", "60", "--iteration-seconds", "0.02"),
    "device_pointer": ("--iterations", "60", "--iteration-seconds", "0.02"),
    "stencil": ("--iterations", "60", "--iteration-seconds", "0.02"),
}

SLOW = str(2 << 20)
"""Bytes per second that phosd's copies reach, so that the application meets with memory that is not there yet."""


def restore_job(site: Site) -> dict[str, Any]:
    """The last restore, as phosd shows it."""
    jobs: list[dict[str, Any]] = [job for job in site.status()["jobs"] if job["kind"] == "restore"]
    return jobs[-1]


def dump_at(site: Site, program: Program, iterations: int = 5, **changes: str) -> Path:
    """A checkpoint that ends the program."""
    program.wait_iterations(iterations)
    image = site.image()
    site.dump(program, image, **changes)
    return image


def slowly(site: Site, bandwidth: str = SLOW) -> None:
    """A new phosd whose copies are slow."""
    site.run("phosd", "--stop")
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = bandwidth


@pytest.mark.parametrize("mode", ["strict", "fast"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_computes_on(site: Site, name: str, mode: str) -> None:
    expected = site.example(name, *EXAMPLES[name][:2], under=False).wait_result()
    program = site.example(name, *EXAMPLES[name])
    image = dump_at(site, program)
    slowly(site)
    site.restore(image, PHOS_RESTORE="lazy", PHOS_LAZY=mode)
    assert program.wait_result() == expected
    counts = restore_job(site)["window"]
    assert counts["calls"] > 0
