"""Numbers and foreign text as people read them. Imports nothing, so that commands that must be quick can use it."""

from __future__ import annotations


def size_text(size: int) -> str:
    """'1.5 GiB': at most four digits, IEC units."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def printable(text: str) -> str:
    """Text from an image, fit for a terminal: an image is input, and may hold escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Likewise of sentences that may have several lines, and tell names of files or what CRIU has logged."""
    return "\n".join(map(printable, text.split("\n")))
