"""Driver calls, of which is said what came of them: for programs that must say the same with the frontend as without.

One line each, on standard output. Addresses, handles and all that is large are left out of it, as they differ from
process to process.
"""

from __future__ import annotations

import ctypes
from typing import Any

driver = ctypes.CDLL("libcuda.so.1")
# What calls write into, as arguments: `out`, `other`.
out, other = ctypes.byref(ctypes.create_string_buffer(256)), ctypes.byref(ctypes.create_string_buffer(256))


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a call of cuda-python's that must succeed."""
    if int(result[0]):
        raise AssertionError(f"driver error {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def called(name: str, *arguments: Any) -> int:
    """The answer to a call; integers are passed with 64 bits."""
    passed = [ctypes.c_uint64(a & (1 << 64) - 1) if isinstance(a, int) else a for a in arguments]
    code: int = getattr(driver, name)(*passed)
    return code


def written(size: int = 4) -> int:
    """The first ``size`` bytes of what a call wrote."""
    return int.from_bytes(out._obj.raw[:size], "little")


def tell(name: str, *arguments: Any, value: bool = False) -> None:
    """Make a call and say what came of it; ``value``: and the first four bytes that it wrote."""
    code = called(name, *arguments)
    said = written() if value and not code else ""
    print(name, *[a if isinstance(a, int) and 0 <= a < 4096 else "." for a in arguments], "->", code, said)
