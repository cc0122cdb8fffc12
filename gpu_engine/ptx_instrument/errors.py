"""What is wrong with a PTX text."""

from __future__ import annotations

from phos.gpu_engine.errors import PhosError


class PtxError(PhosError):
    """A text that is not PTX as it is understood here. ``line`` counts from 1; 0 where no line is to blame."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(f"line {line}: {sentence}" if line else sentence)
        self.line = line
        self.sentence = sentence
