"""How long the calls of a socket may block."""

from __future__ import annotations

import socket
import struct


def limit(connection: socket.socket, *, receive: float | None = None, send: float | None = None) -> None:
    """How long receiving, and connecting and sending, may block; seconds, 0 for ever; longer: BlockingIOError."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        if seconds is not None:
            value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, option, value)
