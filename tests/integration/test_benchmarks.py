"""Every benchmark script runs from end to end on the software GPU, and its result files say what they must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.site import Site

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.root, pytest.mark.serial]


def smoke(site: Site, script: str, *options: str) -> dict[str, Any]:
    """Run a benchmark in smoke mode; return its one JSON file, decoded."""
    results, work = site.folder / "results", site.folder / "work"
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--smoke", "--results", str(results)]
    done = subprocess.run(
        [*command, "--work", str(work), *options],
        env={
            **site.environment,
            "PHOS_BENCH_CRIU": str(launcher("criu")),
            "PHOS_BENCH_PHOS_GPU": str(launcher("phos-gpu")),
            "PHOS_COMMIT": "0" * 40,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (stored,) = results.glob("*-smoke-*.json")
    assert stored.with_suffix(".md").exists()
    content: dict[str, Any] = json.loads(stored.read_text())
    assert content["environment"]["commit"] == "0" * 40
    assert content["environment"]["kernel"]
    return content


def test_dump_restore(site: Site) -> None:
    """PhOS and the driver's own checkpoint both bring every word back."""
    folder = str(site.folder)
    content = smoke(site, "dump_restore", "--memory-folder", folder, "--disk-folder", folder)
    rows = {(row["system"], row["place"]): row for row in content["rows"]}
    assert set(rows) == {(system, place) for system in ("phos", "peer") for place in ("memory", "disk")}
    assert all(row["data_right"] for row in rows.values())
    phases = rows["phos", "memory"]["phases"]
    assert {"quiesce", "detach", "driver checkpoint", "CRIU freeze and dump", "GPU data"} <= set(phases)
    assert {"lock", "checkpoint", "CRIU dump", "CRIU restore", "restore", "unlock"} == set(
        rows["peer", "disk"]["phases"]
    )


def test_steady_state(site: Site) -> None:
    """Launches and allocations are measured in pairs."""
    rows = {row["key"]: row for row in smoke(site, "steady_state")["rows"]}
    for key in (
        "launch, submission",
        "launch, until done",
        "cuMemAlloc 512 B",
        "cuMemFree 1 MiB",
        "cuMemAlloc 64 KiB, many",
    ):
        assert rows[key]["pairs"] == 1
        assert rows[key]["without"] > 0
        assert rows[key]["with_frontend"] > 0


def test_correctness(site: Site) -> None:
    """Runs interrupted at random moments are identical to the one left alone."""
    content = smoke(site, "correctness", "--image", str(site.folder))
    assert content["summary"]["bit-identical"] == "2 of 2 runs"


def test_toggle(site: Site) -> None:
    """Each setting of the reducers is measured, and the stall holds at least the time in which CRIU had it frozen."""
    rows = smoke(site, "toggle", "--image", str(site.folder))["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["stall_s"] >= row["CRIU freeze and dump"] > 0
