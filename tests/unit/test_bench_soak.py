"""What counts as growth in bench/soak.py."""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import soak

FLAT = [20.0] * 40


@pytest.mark.parametrize(
    ("values", "slack", "more"),
    [
        (FLAT, 0.0, False),
        ([float(n) for n in range(40)], 0.0, True),
        ([0.1 * n for n in range(40)], 2.0, False),  # 1 MB from quarter to quarter
        ([0.2 * n for n in range(40)], 2.0, True),
        ([5.0] * 5 + FLAT, 0.0, False),  # what is made once, in the first quarter
        ([20.0, 21.0] * 20, 0.0, False),
        ([*FLAT[:30], *[21.0] * 9, 20.0], 0.0, False),  # it came back
        ([*FLAT[:30], *[21.0] * 10], 0.0, True),
    ],
)
def test_what_has_grown(values: list[float], slack: float, more: bool) -> None:
    assert soak.grown(values, slack) is more


@pytest.mark.parametrize(("rounds", "told"), [(11, "not judged"), (12, "yes")])
def test_too_few_rounds_do_not_show_that_nothing_grows(tmp_path: Path, rounds: int, told: str) -> None:
    chosen = argparse.Namespace(device="software", smoke=True, results=tmp_path, image=tmp_path, repeats=None)
    bench = soak.Bench(chosen)
    bench.judge("cow", [{"round, s": float(number), "descriptors": float(number)} for number in range(rounds)])
    told_of = {key: row["grew"] for key, row in bench.results.rows.items()}
    assert told_of == {"cow, round, s": "not judged", "cow, descriptors": told}
    assert bool(bench.wrong) is (told == "yes")


def test_a_leak_of_this_process_is_seen() -> None:
    before = soak.figures(os.getpid())
    read, write = os.pipe()
    # A mapping of its own: malloc would serve it from what this process has freed and still holds.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(b"x" * len(kept))
        after = soak.figures(os.getpid())
    os.close(read)
    os.close(write)
    assert after["descriptors"] == before["descriptors"] + 2
    assert after["private MB"] > before["private MB"] + 50
    assert after["threads"] >= 1
    assert after["mappings"] > 10
