"""What images/append.c does when pwritev(2) does something else than usual."""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phos.images import append
from phos.images.mapping import view_of
from tests.unit.image_sets import skip

ROOT = Path(__file__).resolve().parents[2]

Write = Callable[[int, list[memoryview], int], int]
"""os.pwritev, or something like it."""


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_CALL = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.POINTER(_Piece), ctypes.c_int, ctypes.c_long)


def build(folder: Path) -> Path:
    """The library that replaces libphos_chunks.so for :func:`replaceable`."""
    if shutil.which("gcc") is None:
        skip("no C compiler")
    made = folder / "append_replaced.so"
    names = ["tests/unit/append_replaced.c", "images/chunk_hash.c"]
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-o", made, *(ROOT / name for name in names)], check=True)
    return made


@contextmanager
def replaceable(library: Path) -> Iterator[Callable[[Write | None], None]]:
    """Gives a function that says what is called instead of pwritev() from now on; None: nothing else."""
    variable = ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), "phos_test_pwritev")
    kept: list[object] = []  # what C calls

    def replace(write: Write | None) -> None:
        if write is None:
            variable.value = None
            return

        def call(descriptor: int, pieces: ctypes.Array[_Piece], count: int, offset: int) -> int:
            try:
                return write(descriptor, [view_of(pieces[i].base, pieces[i].length) for i in range(count)], offset)
            except OSError as error:
                return -(error.errno or errno.EIO)

        function = _CALL(call)
        kept.append(function)
        variable.value = ctypes.cast(function, ctypes.c_void_p).value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append, "chunks_library", lambda: library)
        append._function.cache_clear()
        try:
            yield replace
        finally:
            variable.value = None
            append._function.cache_clear()
