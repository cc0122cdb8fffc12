"""A place among the tokens, and the parts of the grammar that everything uses: lists, operands, constants."""

from __future__ import annotations

from typing import NoReturn

from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.ptx_instrument.lexer import END, NUMBER, SYMBOL, WORD, Tokens
from phos.gpu_engine.ptx_instrument.operands import (
    Address,
    Complement,
    Group,
    Immediate,
    Name,
    Operand,
    Pair,
    Vector,
    integer,
)

MAXIMUM_DEPTH = 64
"""Brackets within brackets: a limit of ours, far above what any compiler writes and far below Python's own."""

_BINARY = frozenset("+-*/%&^|<>=!?:")
_CLOSING = {"[": "]", "{": "}", "(": ")"}


class Cursor:
    """Reads tokens one after the other. Every method raises PtxError where the text is not what it reads."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.kinds, self.texts, self.starts = tokens.kinds, tokens.texts, tokens.starts
        self.at = 0
        self._names: dict[str, Name] = {}
        self.elements: dict[str, int] = {}
        """Bytes of an element, of arrays with one dimension; 0 if several of a name have others."""

    def fail(self, sentence: str, at: int | None = None) -> NoReturn:
        """Raise PtxError for the line of token ``at`` (default: the present one)."""
        raise PtxError(self.tokens.line(self.starts[self.at if at is None else at]), sentence)

    def found(self) -> str:
        """The present token, in words for an error."""
        return "the end of the text" if self.kinds[self.at] == END else repr(self.texts[self.at])

    @property
    def start(self) -> int:
        """Where the present token begins, in characters."""
        return self.starts[self.at]

    @property
    def end(self) -> int:
        """Where the token before the present one ends."""
        return self.starts[self.at - 1] + len(self.texts[self.at - 1]) if self.at else 0

    def accept(self, text: str) -> bool:
        """Pass over a token if it is ``text``."""
        if self.texts[self.at] == text and self.kinds[self.at] != END:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Pass over ``text``."""
        if not self.accept(text):
            self.fail(f"{text!r} is missing before {self.found()}.")

    def take(self, kind: int, what: str) -> str:
        """Pass over a token of a kind and return it; ``what`` names it in the error."""
        if self.kinds[self.at] != kind:
            self.fail(f"{what} is missing before {self.found()}.")
        self.at += 1
        return self.texts[self.at - 1]

    def word(self, what: str) -> str:
        """Pass over an identifier."""
        return self.take(WORD, what)

    def number(self, what: str) -> int:
        """Pass over an unsigned integer."""
        text = self.take(NUMBER, what)
        value = integer(text)
        if value is None:
            self.fail(f"{text!r} is not an integer.", self.at - 1)
        return value

    def balanced(self, stop: tuple[str, ...]) -> tuple[str, ...]:
        """Tokens up to one of ``stop`` outside all brackets, which stays."""
        first = self.at
        open_: list[str] = []
        while True:
            text, kind = self.texts[self.at], self.kinds[self.at]
            if kind == END:
                self.fail(f"{(open_ or [stop[0]])[-1]!r} is missing before the end of the text.")
            if kind == SYMBOL:
                if not open_ and text in stop:
                    return tuple(self.texts[first : self.at])
                if text in _CLOSING:
                    open_.append(_CLOSING[text])
                elif text in ")]}" and (not open_ or open_.pop() != text):
                    self.fail(f"{text!r} closes nothing.")
            self.at += 1

    def operands(self, depth: int = 0) -> tuple[Operand, ...]:
        """Operands between commas: one at least."""
        result = [self.operand(depth)]
        while self.accept(","):
            result.append(self.operand(depth))
        return tuple(result)

    def operand(self, depth: int = 0) -> Operand:
        """One operand."""
        text, kind = self.texts[self.at], self.kinds[self.at]
        if kind == WORD:
            following = self.texts[self.at + 1]
            if following in (",", ";", "]", "}", ")"):
                self.at += 1
                name = self._names.get(text)
                if name is None:
                    name = self._names[text] = Name(text)
                return name
            return self._name_with(depth)
        if kind == NUMBER or text in ("-", "+", "~"):
            return self._constant(depth)
        if kind != SYMBOL or depth >= MAXIMUM_DEPTH:
            self.fail(f"an operand is missing before {self.found()}.")
        self.at += 1
        if text == "[":
            inner = self.operands(depth + 1)
            self.expect("]")
            return Address(inner)
        if text == "{":
            elements = self.operands(depth + 1)
            self.expect("}")
            return Vector(elements)
        if text == "(":
            members = () if self.texts[self.at] == ")" else self.operands(depth + 1)
            self.expect(")")
            return Group(members)
        if text != "!":
            self.fail(f"an operand is missing before {text!r}.", self.at - 1)
        return Complement("!", self.operand(depth + 1))

    def _name_with(self, depth: int) -> Operand:
        """A name and what follows it: an index (PTX ISA, "Arrays as Operands"), an offset, a second result."""
        text = self.word("a name")
        offset = 0
        if self.accept("["):
            element = self.elements.get(text, 0)
            if not element:
                self.fail(f"nothing says how large an element of {text} is.")
            offset = self.number("an index") * element
            self.expect("]")
        while self.texts[self.at] in ("+", "-") and self.kinds[self.at] == SYMBOL:
            # `a+-8` is how compilers write a negative offset.
            negative = self.texts[self.at] == "-"
            self.at += 1
            if self.accept("-"):
                negative = not negative
            value = self.number("an offset")
            offset += -value if negative else value
        if self.accept("|"):
            if depth >= MAXIMUM_DEPTH:
                self.fail("too many results.")
            return Pair(Name(text, offset), self.operand(depth + 1))
        return Name(text, offset)

    def _constant(self, depth: int) -> Operand:
        """A number with its sign, a constant expression, or a register with a minus before it."""
        first = self.at
        sign = self.texts[self.at]
        while self.kinds[self.at] == SYMBOL and self.texts[self.at] in ("-", "+", "~"):
            self.at += 1
        if self.kinds[self.at] == WORD:
            if self.at != first + 1 or depth >= MAXIMUM_DEPTH:
                self.fail(f"a number is missing before {self.found()}.")
            return Complement(sign, self.operand(depth + 1))
        self.take(NUMBER, "a number")
        while self.kinds[self.at] == SYMBOL and self.texts[self.at] in _BINARY:
            self.at += 1
            self.take(NUMBER, "a number") if self.kinds[self.at] == NUMBER else None
        return Immediate("".join(self.texts[first : self.at]))
