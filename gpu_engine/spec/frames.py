"""Messages between phosd and its analysis worker: sizes (u32, u64), a JSON object, raw bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

from phos.gpu_engine.spec.errors import SpecError

SIZES = struct.Struct("<IQ")
MAX_HEADER = 64 << 20
MAX_BODY = 2 << 30

Message = tuple[dict[str, Any], bytes]


def pack(header: dict[str, Any], body: bytes = b"") -> list[bytes]:
    """The parts of one message, to be written one after another."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return [SIZES.pack(len(text), len(body)) + text, body]


class Assembler:
    """Puts messages together from whatever pieces a pipe delivers."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that this piece completes. Raises SpecError if the other side speaks nonsense."""
        self._data += piece
        whole = []
        while len(self._data) >= SIZES.size:
            header_size, body_size = SIZES.unpack_from(self._data)
            if header_size > MAX_HEADER or body_size > MAX_BODY:
                raise SpecError("The other side of the analysis pipe sends no messages of the form that was agreed.")
            end = SIZES.size + header_size + body_size
            if len(self._data) < end:
                break
            text = bytes(self._data[SIZES.size : SIZES.size + header_size])
            body = bytes(self._data[SIZES.size + header_size : end])
            del self._data[:end]
            try:
                header = json.loads(text)
            except ValueError:
                raise SpecError("The other side of the analysis pipe sends something else than JSON.") from None
            if not isinstance(header, dict):
                raise SpecError("The other side of the analysis pipe sends JSON that is no object.")
            whole.append((header, body))
        return whole
