"""Where the frontend's own descriptors are: out of the way, but never at the price of a table that has to grow."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_nobody_waits_for_the_table_to_grow(tmp_path: Path) -> None:
    program = tmp_path / "cases"
    sources = [ROOT / "tests/unit/descriptor_cases.c", ROOT / "frontend/descriptors.c"]
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'frontend'}", "-o", str(program)]
    subprocess.run([*command, *map(str, sources)], check=True)
    # By way of a shell, which has few descriptors: a child's table is as large as its parent's highest one asks for,
    # and the tests' own process may have hundreds.
    said = subprocess.run(["sh", "-c", '"$0"; exit', program], capture_output=True, text=True, check=True).stdout
    first, near, after, high, grown, moved, stays = map(int, said.split())
    assert first < 512, "the system starts programs with a small table"
    assert 2 < near < first
    assert after == first
    assert high >= 512
    assert grown > high
    assert moved
    assert stays
