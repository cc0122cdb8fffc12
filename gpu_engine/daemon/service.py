"""What a service manager is told of phosd: the protocol of sd_notify(3), which is one datagram a message."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


class Service:
    """The manager that has started phosd, if one has. Keeper and CRIU do not inherit its address."""

    def __init__(self) -> None:
        path = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path

    def tell(self, state: str) -> None:
        """``READY=1`` or ``STOPPING=1``; nothing fails because nobody listens."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.settimeout(1.0)
                manager.sendto(state.encode(), self._address)
        except OSError as error:
            log.warning("The service manager was not told %s: %s", state, error)
