"""Appending chunks to a data file of an image: append.c, which native code that copies calls without Python."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Sequence
from typing import Any

from phos.images.chunk_hash import zero_hash
from phos.images.files import address_of
from phos.images.formats import HASH_SIZE
from phos.images.native import chunks_library

ZEROS = (1 << 64) - 1
"""PHOS_ZEROS of append.h: instead of a place, for a chunk of zeros, which takes no room."""


class StripeState(ctypes.Structure):
    """struct phos_stripe of append.h, which says what its fields are; a test compares them."""

    _fields_ = (
        ("descriptor", ctypes.c_int32),
        ("direct", ctypes.c_uint32),
        ("end", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
    )


@functools.cache
def _function() -> Any:
    function = ctypes.CDLL(str(chunks_library())).phos_append
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.POINTER(StripeState),
        ctypes.c_void_p,  # data
        ctypes.c_uint64,
        ctypes.c_int,  # known
        ctypes.c_void_p,  # hashes
        ctypes.c_void_p,  # places
        ctypes.c_char_p,  # hashes of zeros: of a whole chunk, of the last one
        ctypes.c_char_p,
    ]
    return function


def append(state: StripeState, data: memoryview, known: Sequence[bytes] | None) -> tuple[bytes, list[int]]:
    """Append contiguous bytes, whole chunks but for the last. ``known``: their hashes. Lets go of the interpreter lock.

    Returns the hash of every chunk, one behind the other, and the file offset of each, or ZEROS.

    Raises:
        OSError: libphos_chunks.so has not been built, or a write failed: then ``state.end`` is what it was, and
            ``state.missing`` says how many more bytes that write was to store.
        ValueError: not as many hashes as chunks.
    """
    size, chunk = data.nbytes, int(state.chunk)
    count = -(-size // chunk)
    if not count:
        return b"", []
    if data.readonly:  # ctypes gives no address of it. In pages of its own the copy is fit for O_DIRECT.
        copied = mmap.mmap(-1, size)
        copied[:] = data
        data = memoryview(copied)
    hashes: Any = ctypes.create_string_buffer(count * HASH_SIZE) if known is None else b"".join(known)
    if len(hashes) != count * HASH_SIZE:
        raise ValueError(f"{count} chunks have {count * HASH_SIZE} bytes of hashes, not {len(hashes)}")
    places = (ctypes.c_uint64 * count)()
    zeros, zero_tail = zero_hash(min(size, chunk)), zero_hash((size - 1) % chunk + 1)
    error = _function()(
        ctypes.byref(state), address_of(data), size, known is not None, hashes, places, zeros, zero_tail
    )
    if error:
        raise OSError(error, os.strerror(error))
    return bytes(hashes), list(places)
