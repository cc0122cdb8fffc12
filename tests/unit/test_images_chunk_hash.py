"""The hash of chunks, against its formula in other words."""

from __future__ import annotations

import random
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from phos.images.chunk_hash import chunk_hash, zero_hash

KEYS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
MASK = (1 << 64) - 1
HALF = (1 << 32) - 1


def formula(data: bytes) -> bytes:
    sums = [0, 0]
    for j, (word,) in enumerate(struct.iter_unpack("<Q", data + bytes(-len(data) % 8)), 1):
        for which, key in enumerate(KEYS):
            mixed = word ^ (j * key & MASK)
            plain = word if which == 0 else (word >> 32) | (word & HALF) << 32
            sums[which] += plain + (mixed & HALF) * (mixed >> 32)
    return struct.pack("<2Q", *(total & MASK for total in sums))


@given(st.binary(max_size=600), st.integers(0, 7))
@settings(max_examples=200)
def test_the_hash_is_its_formula_whatever_the_length_and_place(data: bytes, shift: int) -> None:
    memory = memoryview(bytearray(bytes(shift) + data + b"not part of it"))
    assert chunk_hash(memory[shift : shift + len(data)]) == formula(data)


def test_so_it_is_for_a_long_piece() -> None:
    data = random.Random(3).randbytes((1 << 18) + 5)
    assert chunk_hash(memoryview(data)) == formula(data)


def test_memory_that_may_only_be_read_has_the_same_hash() -> None:
    assert chunk_hash(memoryview(b"x" * 99)) == chunk_hash(memoryview(bytearray(b"x" * 99)))


@given(st.integers(0, 4095), st.integers(0, 63), st.integers(0, 2**32))
@settings(max_examples=60)
def test_any_changed_bit_changes_both_sums(word: int, bit: int, seed: int) -> None:
    data = bytearray(random.Random(seed).randbytes(4096 * 8))
    before = chunk_hash(memoryview(data))
    data[8 * word + bit // 8] ^= 1 << bit % 8
    after = chunk_hash(memoryview(data))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_neighbouring_words_may_not_change_places() -> None:
    one, other = (chunk_hash(memoryview(struct.pack("<2Q", *words))) for words in ((1, 2), (2, 1)))
    assert one[:8] != other[:8]
    assert one[8:] != other[8:]


def test_zeros_are_known_by_their_hash() -> None:
    for length in (0, 1, 8, 4096, (1 << 20) + 3):
        assert zero_hash(length) == zero_hash(length) == formula(bytes(length))
