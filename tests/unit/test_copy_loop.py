"""The native copy loop (gpu_engine/copy_loop.c) under the copier: what it copies, says and leaves behind.

Each test is a round of copy_rounds.py in a process of its own, on the software GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.unit.softgpu_host import needs_softgpu

ROOT = Path(__file__).resolve().parents[2]


def play(folder: Path, name: str, *cases: Sequence[object], **settings: str) -> None:
    """A round of copy_rounds.py, on two GPUs, with the arguments of each case in turn."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",
        "SOFTGPU_MACHINE": folder.name,
        "SOFTGPU_DEVICES": "2",
        # What has been compared is memory for the next: else half of the time goes to the clearing of pages.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
        **settings,
    }
    command = [sys.executable, "-m", "tests.unit.copy_rounds", name, str(folder), *map(json.dumps, cases or [[]])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "RIGHT\n"), done.stdout + done.stderr


@needs_softgpu
def test_files_do_not_overwrite_what_was_read_into_a_slot(tmp_path: Path) -> None:
    play(tmp_path, "load_between_slots")
