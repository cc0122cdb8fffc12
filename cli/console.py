"""Tables and colours; what is done when nobody reads them any more is decided in one place (main.py)."""

from __future__ import annotations

import sys

from rich.console import Console as RichConsole

WIDTH = 1 << 16
"""Of a file or a pipe, which has none, though COLUMNS (set by readline for a program's children) may say 80: no path is
cut in two."""


class Console(RichConsole):
    """rich's, which would end the program with a status of its own.

    Text is text: rich's own takes what is in brackets for a style, and the names of programs and directories are
    anybody's. A style is asked for by :class:`rich.text.Text`.
    """

    def __init__(self, *, highlight: bool = True, soft_wrap: bool = False, stderr: bool = False) -> None:
        bounded = (sys.stderr if stderr else sys.stdout).isatty()
        super().__init__(
            markup=False,
            emoji=False,
            highlight=highlight,
            soft_wrap=soft_wrap,
            stderr=stderr,
            width=None if bounded else WIDTH,
        )

    def on_broken_pipe(self) -> None:
        """
        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError
