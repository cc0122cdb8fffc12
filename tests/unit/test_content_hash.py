"""The content hash on the software GPU is the CPU's, and its PTX is what its source makes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.content_hash import bytes_to_copy
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash

ROOT = Path(__file__).resolve().parents[2]

SIZES = st.lists(st.sampled_from([65536, 1 << 20, CHUNK_BYTES, CHUNK_BYTES + 65536, 3 * CHUNK_BYTES]), max_size=6)


@given(SIZES, st.randoms(use_true_random=False))
def test_what_is_zeros_by_its_hash_is_not_to_be_copied(sizes: list[int], chance: Random) -> None:
    blocks = [Block((bytes(16), number), size, 0, -1) for number, size in enumerate(sizes)]
    chunks = [min(CHUNK_BYTES, size - at) for size in sizes for at in range(0, size, CHUNK_BYTES)]
    zeros = [chance.random() < 0.5 for _ in chunks]
    hashes = [zero_hash(size) if zero else b"x" * 16 for size, zero in zip(chunks, zeros, strict=True)]
    assert bytes_to_copy(blocks, hashes) == sum(s for s, zero in zip(chunks, zeros, strict=True) if not zero)
    assert bytes_to_copy(blocks, None) == sum(sizes)


PROGRAM = r"""
import ctypes, os, random, sys
from phos.gpu_engine.installation import load_driver
load_driver("software")
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.content_hash import ContentHasher, chunk_count
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import hash_memory

driver.initialise()
context = driver.context(0)
seed = random.Random(5)
blocks, mapped = [], MappedBlocks()
for number, size in enumerate((2 << 20, 4 << 20, 6 << 20, 10 << 20, 2 << 20)):
    blocks.append(Block((bytes(16), number), size, 0, context.create_block(size)))
mapped.add(blocks)
expected = []
for block in blocks:
    memory = (ctypes.c_char * block.size).from_address(mapped[block.key].address)
    if block.key[1] != 4:  # the last is zeros
        memory.raw = seed.randbytes(block.size)
    for at in range(0, block.size, CHUNK_BYTES):
        expected.append(hash_memory(ctypes.addressof(memory) + at, min(CHUNK_BYTES, block.size - at)))
hasher = ContentHasher()
for turn in range(2):
    found = hasher.hash(blocks, mapped)
    assert len(found) == sum(chunk_count(block.size) for block in blocks)
    assert found == expected, (turn, [i for i in range(len(found)) if found[i] != expected[i]])
some = hasher.hash([blocks[3], blocks[0]], mapped)
assert some == expected[4:7] + expected[:1], some
assert hasher.hash([], mapped) == []
mapped.close()
print("SAME")
"""


def test_gpu_and_cpu_agree(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOFTGPU_MACHINE": tmp_path.name}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "SAME\n", done.stdout + done.stderr


def test_the_ptx_is_what_the_source_makes() -> None:
    if importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("no cuda-python")
    probe = "from cuda.bindings import nvrtc; print(nvrtc.nvrtcVersion()[1:])"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("no NVRTC")
    if found.stdout.strip() != "(13, 0)":
        pytest.skip(f"another NVRTC than the file was made with: {found.stdout.strip()}")
    script = ROOT / "packaging/make_content_hash.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + "run packaging/make_content_hash.py"
