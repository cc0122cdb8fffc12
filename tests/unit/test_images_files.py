"""Parts of files: what is copied, what is left a hole, and their hashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.images.files import copy_segment, is_zero
from phos.images.formats import digest

PIECE = 1 << 20


@given(st.integers(1, 3 * PIECE), st.one_of(st.none(), st.integers(0, 3 * PIECE - 1)))
def test_one_byte_that_is_not_zero_is_seen(size: int, at: int | None) -> None:
    data = bytearray(size)
    if at is not None:
        data[at % size] = 1
    assert is_zero(memoryview(data)) == (at is None)


@pytest.mark.parametrize("at", [0, 1, 4093, 4094, PIECE - 1, PIECE, 3 * PIECE + 4])
def test_a_segment_is_copied_with_its_hash_and_zeros_take_no_space(tmp_path: Path, at: int) -> None:
    """One piece of four and a bit holds a byte; the file has no hole."""
    size = 4 * PIECE + 5
    content = bytearray(size)
    content[at] = 7
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content)
    with open(source, "rb") as read, open(target, "wb") as written:
        os.truncate(written.fileno(), size)
        offset = PIECE // 2
        expected = content[offset:]
        assert copy_segment(read.fileno(), written.fileno(), offset, len(expected)) == digest(bytes(expected))
    assert target.read_bytes() == (bytes(size) if at < offset else content)
    assert target.stat().st_blocks * 512 <= PIECE + 8192
