"""PTX text to tokens (PTX ISA, "Syntax": source format, comments, identifiers, constants).

A word is an identifier with whatever is joined to it by ``.`` or ``::``: a register, a vector's component, a whole
opcode with its modifiers. A number carries no sign. One regular expression does it all: two megabytes of text are half
a million tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import islice

from phos.gpu_engine.ptx_instrument.errors import PtxError

WORD, DIRECTIVE, NUMBER, STRING, SYMBOL, END = 1, 2, 3, 4, 5, 0
_STRAY = 6

_CHECKED = 1 << 16
"""So many tokens are cut before whoever waits is asked whether to go on."""

_TOKEN = re.compile(
    r"""
      \s+ | //[^\n]* | /\*(?:[^*]|\*(?!/))*\*/
    | ( [A-Za-z_$%][\w$]* (?:(?:\.|::)[\w$]+)* )
    | ( \.[A-Za-z_][\w$]* (?:::[\w$]+)* )
    | ( 0[fF][0-9A-Fa-f]{8}(?![\w$]) | 0[dD][0-9A-Fa-f]{16}(?![\w$]) | 0[xX][0-9A-Fa-f]+U? | 0[bB][01]+U?
      | (?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ | \d+U? )
    | ( "(?:[^"\\\n]|\\.)*" )
    | ( (?!/\*)[\[\]{}()<>,;:=+\-|!@*/%&^~?] )
    | ( \S )
    """,
    re.VERBOSE | re.ASCII,
)


class Tokens:
    """A text cut into tokens: their kinds, texts and starts (characters from the text's start), an END token last."""

    def __init__(self, text: str, check: Callable[[], None] | None = None) -> None:
        """Cut ``text``. Raises PtxError at the first character that begins no token, and what ``check`` raises."""
        self.text = text
        self.kinds: list[int] = []
        self.texts: list[str] = []
        self.starts: list[int] = []
        kinds, texts, starts = self.kinds.append, self.texts.append, self.starts.append
        matches = _TOKEN.finditer(text)
        while part := list(islice(matches, _CHECKED)):
            if check is not None:
                check()
            for match in part:
                kind = match.lastindex
                if kind is None:
                    continue
                if kind == _STRAY:
                    self._stray(match.start())
                kinds(kind)
                texts(match.group())
                starts(match.start())
        kinds(END)
        texts("")
        starts(len(text))

    def _stray(self, start: int) -> None:
        here = self.text[start]
        sentence = f"the character {here!r} has no place in PTX."
        if here == '"':
            sentence = "a string has no end."
        elif here == "/":
            sentence = "a comment has no end."
        raise PtxError(self.line(start), sentence)

    @cached_property
    def _newlines(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.text)]

    def line(self, start: int) -> int:
        """The line, counted from 1, of the character at ``start``."""
        return bisect_right(self._newlines, start - 1) + 1
