"""The hash of a chunk of GPU data: 128 bits that a GPU can compute as well (chunk_hash.c says how)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from phos.images.files import address_of
from phos.images.native import chunks_library

_zero_hashes: dict[int, bytes] = {}  # benign race: two threads store the same value


@functools.cache
def _function() -> Any:
    function = ctypes.CDLL(str(chunks_library())).phos_chunk_hash
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    return function


def hash_memory(address: int, size: int) -> bytes:
    """The hash of ``size`` bytes at an address: two little-endian 64-bit sums. Lets go of the interpreter lock.

    Raises:
        OSError: libphos_chunks.so has not been built.
    """
    sums = (ctypes.c_uint64 * 2)()
    _function()(address, size, sums)
    return bytes(sums)


def chunk_hash(data: memoryview) -> bytes:
    """The hash of contiguous memory; see :func:`hash_memory`."""
    if data.readonly or not data.nbytes:  # ctypes gives no address of it
        copied = ctypes.create_string_buffer(data.tobytes())
        return hash_memory(ctypes.addressof(copied), data.nbytes)
    return hash_memory(address_of(data), data.nbytes)


def zero_hash(length: int) -> bytes:
    """The hash of ``length`` zero bytes, remembered."""
    known = _zero_hashes.get(length)
    if known is None:
        if len(_zero_hashes) > 4096:
            _zero_hashes.clear()
        known = _zero_hashes[length] = chunk_hash(memoryview(bytearray(length)))
    return known
