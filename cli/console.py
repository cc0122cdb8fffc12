"""Tables and colours; what is done when nobody reads them any more is decided in one place (main.py)."""

from __future__ import annotations

from rich.console import Console as RichConsole


class Console(RichConsole):
    """rich's, which would end the program with a status of its own."""

    def on_broken_pipe(self) -> None:
        """
        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError
