"""Lazy restores: the processes compute while their memory is still being loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.installation import software_gpu_folder
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


def test_criu_lazy_pages_make_the_gpu_lazy_too(site: Site) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    slowly(site)
    pages = site.background("criu", "lazy-pages", "-D", str(image), "-o", "lazy-pages.log")
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    site.restore(image, "--lazy-pages")
    assert program.wait_result() == expected
    assert pages.wait() == 0
    assert restore_job(site)["mode"] == "lazy"


def test_phos_gpu_restore_lazy_starts_and_supervises_both(site: Site) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    slowly(site)
    said = json.loads(site.run("phos-gpu", "restore", "--lazy", "--json", str(image)).stdout)
    assert program.wait_result() == expected
    assert said["mode"] == "lazy"
    assert 0 < said["first_kernel"] <= said["last_byte"] <= said["seconds"]
    assert said["waits"] > 0
    assert said["waited"] > 0
    assert not (image / "lazy-pages.socket").exists()


@pytest.fixture
def liar(site: Site) -> Path:
    """A phosd that says that no kernel touches anything, as long as this file exists."""
    lies = site.folder / "lies"
    lies.touch()
    site.environment |= {"LYING_PHOSD": str(lies), "SOFTGPU_COPY_BANDWIDTH": SLOW}
    return lies


def start_liar(site: Site) -> None:
    """In place of the phosd that runs."""
    site.run("phosd", "--stop")
    socket = site.environment["PHOS_SOCKET"]
    environment = {
        **site.environment,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "LD_LIBRARY_PATH": str(software_gpu_folder()),
    }
    with open(site.folder / "liar.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.lying_phosd", "--socket", socket],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_until(lambda: site.run("phos-gpu", "status", check=False).returncode == 0, "phosd that lies")


def test_a_wrong_guess_faults_and_the_image_is_restored_eagerly(site: Site, liar: Path) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    image = dump_at(site, program)
    start_liar(site)
    restored = site.restore(image, PHOS_RESTORE="lazy")
    assert "restoring once more, eagerly" in restored.stderr
    assert "no guess named" in restored.stderr
    assert "Kernels launched last, the newest first: " in restored.stderr
    assert "product" in restored.stderr or "make_batch" in restored.stderr
    assert program.wait_result() == expected
    modes = [(job["mode"], job["state"]) for job in site.status()["jobs"] if job["kind"] == "restore"]
    assert modes == [("lazy", "mispredicted"), ("eager", "attached")]
