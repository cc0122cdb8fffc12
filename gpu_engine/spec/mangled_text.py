"""The text of a mangled name, read from left to right, and what in it is characters only: numbers, identifiers."""

from __future__ import annotations

from phos.gpu_engine.spec.errors import SpecError

MAX_NAME = 1 << 16


class Text:
    """A mangled name and how far it has been read. What does not fit raises SpecError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def rest(self) -> str:
        return self.text[self.at :]

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def accept(self, expected: str) -> bool:
        if self.text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False

    def take(self, expected: str) -> None:
        if not self.accept(expected):
            raise self.lost()

    def lost(self) -> SpecError:
        return SpecError(f'The mangled name is not understood from "{self.text[self.at : self.at + 24]}" on.')

    def number(self) -> int:
        start = self.at
        while self.peek().isdecimal() and self.peek().isascii() and self.at - start < 9:
            self.at += 1
        if start == self.at:
            raise self.lost()
        return int(self.text[start : self.at])

    def sequence_number(self, digits: str) -> int:
        """``_`` is 0, ``0_`` is 1, and so on, in base 10 or 36."""
        value = 0
        if self.accept("_"):
            return 0
        while (digit := digits.find(self.peek() or "?")) >= 0:
            value = value * len(digits) + digit
            self.at += 1
            if value > MAX_NAME:
                raise self.lost()
        self.take("_")
        return value + 1

    def source_name(self) -> str:
        length = self.number()
        name = self.text[self.at : self.at + length]
        if len(name) != length or length == 0:
            raise self.lost()
        self.at += length
        return name

    def discriminator(self) -> None:
        if self.accept("__"):
            self.number()
            self.take("_")
        elif self.peek() == "_" and self.peek(2)[1:].isdecimal():
            self.at += 2
