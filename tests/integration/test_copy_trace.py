"""A concurrent checkpoint that says when each piece was copied, and the table that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.dumped import LAYERS_SUM, Dumped
from tests.integration.site import Site, wait_until
from tests.integration.test_stop_protocol import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]


def test_each_piece_is_in_the_trace(site: Site) -> None:
    folder = site.folder / "traces"
    folder.mkdir()
    site.environment["PHOS_TRACE_COPIES"] = str(folder)
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = site.image()
    began = time.monotonic()
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", "cow")
    program.wait_result()
    (file,) = folder.iterdir()
    trace = json.loads(file.read_text())
    assert trace["image"] == str(image)
    assert began < trace["began"] < time.monotonic()
    for _, asked, taken, landed, saved, pieces in trace["steps"]:
        assert 0 <= asked <= taken <= landed <= saved
        assert pieces
        assert {kind for _, kind, _ in pieces} <= {"place", "shadow", "zeros"}
    pieces = [piece for step in trace["steps"] for piece in step[5]]
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert sum(size for size, _, _ in pieces) == said["gpu_data"]["total_bytes"]
    command = [sys.executable, str(ROOT / "bench" / "copy_trace.py"), "--bin", "1000", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    header, row = ([word.strip() for word in line.strip("|").split("|")] for line in (shown[2], shown[4]))
    counted = dict(zip(header, row, strict=True))
    assert int(counted["pieces"]) + int(counted["zeros"]) == len(pieces)


def written(folder: Path) -> list[dict[str, Any]]:
    """The traces that are complete, the oldest first."""
    texts = [path.read_text() for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)]
    return [json.loads(text) for text in texts if text.endswith("}")]


def test_so_are_those_of_a_stopped_program_and_of_its_restores(site: Site) -> None:
    folder = site.folder / "traces"
    folder.mkdir()
    site.environment["PHOS_TRACE_COPIES"] = str(folder)
    dumped = Dumped(site, site.folder)
    assert dumped.restore("eager") == LAYERS_SUM
    assert dumped.restore("lazy") == LAYERS_SUM
    total = json.loads(site.run("phos-gpu", "inspect", "--json", str(dumped.image)).stdout)["gpu_data"]["total_bytes"]
    wait_until(lambda: len(written(folder)) == 3, "the lazy restore's, which is written when all has come")
    kinds = []
    for trace in written(folder):
        pieces = [piece for step in trace["steps"] for piece in step[5]]
        assert trace["image"] == str(dumped.image)
        assert sum(size for size, _, _ in pieces) == total
        kinds.append({kind for _, kind, _ in pieces} - {"zeros"})
    assert kinds == [{"place"}, {"file"}, {"file"}]


def test_a_folder_that_is_not_there_fails_no_checkpoint(site: Site) -> None:
    site.environment["PHOS_TRACE_COPIES"] = str(site.folder / "nowhere")
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image = site.image()
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", "cow")
    site.run("phos-gpu", "verify", str(image))
