"""How an image's data is loaded, by where it lies."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gpu_engine.restore.sources import manner
from phos.images import reader
from phos.images.reader import Image
from tests.unit.image_sets import write_small

SLOT = 4 << 20


@pytest.fixture
def image() -> Iterator[Image]:
    """An image in memory."""
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    write_small(folder)
    with Image.open(folder) as opened:
        yield opened
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("processors", "gpus", "threads", "expected"),
    [(16, 1, 15, 10), (16, 2, 15, 15), (16, 0, 15, 10), (16, 1, 4, 4), (2, 1, 2, 2), (4, 1, 3, 2), (64, 1, 16, 16)],
)
def test_as_many_workers_read_from_memory_as_fill_the_bus(
    image: Image, monkeypatch: pytest.MonkeyPatch, processors: int, gpus: int, threads: int, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    copier = SimpleNamespace(slot_bytes=SLOT, threads=threads)
    how = manner(image, copier, gpus)  # type: ignore[arg-type]
    assert (how.at_once, how.workers) == (SLOT, expected)


def test_all_workers_read_from_a_disk(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image.in_memory
    monkeypatch.setattr(reader, "lives_in_memory", lambda _: False)
    how = manner(image, SimpleNamespace(slot_bytes=SLOT, threads=15), 1)  # type: ignore[arg-type]
    assert (how.at_once, how.workers) == (SLOT, None)
