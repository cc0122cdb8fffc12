"""The one exception of speculation: something cannot be read, and the sentence says what."""

from __future__ import annotations

from phos.gpu_engine.errors import PhosError


class SpecError(PhosError):
    """A module, a name or a table does not have the form it should have. Only guesses are lost by it."""
