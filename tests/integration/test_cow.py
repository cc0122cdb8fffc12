"""Concurrent checkpoints: the image is the state at *t1*, whatever the application does while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.site import Program, Site

EXAMPLES = {
    "mlp": ("--iterations", "400", "--iteration-seconds", "0.03"),
    "pointer_chase": ("--iterations", "400", "--iteration-seconds", "0.03"),
    "struct_argument": ("--iterations", "400", "--iteration-seconds", "0.03"),
    "device_pointer": ("--iterations", "400", "--iteration-seconds", "0.03"),
    "stencil": ("--iterations", "400", "--iteration-seconds", "0.03"),
}

SLOW = str(24 << 20)
"""Bytes per second that phosd's copies reach, so that the application meets with memory that is not saved yet."""


def inventory(site: Site, image: Path) -> dict[str, Any]:
    """What ``phos-gpu inspect --json`` says."""
    found: dict[str, Any] = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    return found


def dump_concurrently(site: Site, program: Program, name: str = "image", **changes: str) -> Path:
    """A cow checkpoint of a program that runs on; its output as it was at *t1* is kept in the image."""
    image = site.image(name)
    script = site.folder / f"{name}-post-dump"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || cp {program.output} {image}/output\n')
    script.chmod(0o755)
    site.dump(
        program, image, "--leave-running", "--action-script", str(script), check=True, PHOS_PROTOCOL="cow", **changes
    )
    return image


def restore_at(site: Site, program: Program, image: Path) -> None:
    """Bring back the program of an image, with its output as it was."""
    program.process.wait()
    program.output.write_bytes((image / "output").read_bytes())
    assert program.result() is None
    site.restore(image)


@pytest.mark.parametrize("pool", ["2G", "16M", "0"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_image_is_the_state_at_t1(site: Site, name: str, pool: str) -> None:
    expected = site.reference(name, *EXAMPLES[name][:2])
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = SLOW
    site.environment["PHOS_COW_POOL"] = pool
    program = site.example(name, *EXAMPLES[name])
    program.wait_iterations(5)
    image = dump_concurrently(site, program)
    assert program.wait_result() == expected
    site.run("phos-gpu", "verify", str(image))
    said = inventory(site, image)
    assert said["protocol"] == "cow"
    restore_at(site, program, image)
    assert program.wait_result() == expected
