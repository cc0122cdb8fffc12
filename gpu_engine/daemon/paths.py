"""Where phosd's socket and the files beside it are."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_SOCKET = Path("/run/phos/phosd.sock")


def socket_path() -> Path:
    """``PHOS_SOCKET``, or the system's phosd, or (for other users, when root runs none) one's own."""
    named = os.environ.get("PHOS_SOCKET")
    if named:
        return Path(named)
    if os.geteuid() == 0 or SYSTEM_SOCKET.exists():
        return SYSTEM_SOCKET
    return Path(os.environ.get("XDG_RUNTIME_DIR", f"/tmp/phos-{os.geteuid()}")) / "phos" / "phosd.sock"


def hold_folder(socket: Path) -> Path:
    """Holds: links that tell a detached frontend to wait without touching the socket (see holds.py)."""
    return socket.parent / "hold"


def keeper_socket(socket: Path) -> Path:
    """The keeper's socket beside phosd's."""
    return socket.parent / "keeper.sock"


def log_file(socket: Path) -> Path:
    """phosd's log when it was started on demand."""
    return socket.parent / "phosd.log"
