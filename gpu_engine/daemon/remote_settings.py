"""What phosd shares with other hosts: nothing, unless PHOS_LISTEN says where and PHOS_SHARE what, with a secret."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine.errors import UsageError
from phos.images.errors import ImageError
from phos.images.remote_wire import DEFAULT_KEY, read_key, refuse_host

VARIABLES = ("PHOS_LISTEN", "PHOS_SHARE", "PHOS_REMOTE_KEY", "PHOS_PIN_LIMIT")
"""What phosd takes from the configuration file when it starts."""


def key_file(environment: Mapping[str, str]) -> Path:
    """Where the shared secret is."""
    return Path(environment.get("PHOS_REMOTE_KEY", "") or DEFAULT_KEY)


@dataclass(frozen=True)
class RemoteSettings:
    """Where to listen, the secret, and the folders that are shared, without links in their paths."""

    host: str
    port: int
    key: bytes
    shares: tuple[Path, ...]

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> RemoteSettings | None:
        """None if nothing is to be shared.

        Raises:
            UsageError: what is said has no meaning, or would share without a secret.
        """
        listen = environment.get("PHOS_LISTEN", "")
        if not listen:
            return None
        host, colon, port = listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            refuse_host(host)
            fits = bool(colon and host) and port.isdecimal() and 0 < int(port) < 65536
        except ValueError:
            fits = False
        if not fits:
            raise UsageError(f"PHOS_LISTEN={listen} is no address: ADDRESS:PORT, 10.0.0.1:7070 for example.")
        folders = [Path(folder) for folder in environment.get("PHOS_SHARE", "").split(":") if folder]
        if not folders:
            raise UsageError("PHOS_LISTEN is set, but PHOS_SHARE names no folder whose images are to be shared.")
        for folder in folders:
            if not folder.is_absolute() or os.path.realpath(folder) == "/":
                raise UsageError(f"PHOS_SHARE: {folder} cannot be shared: name folders by absolute paths, but not all.")
        try:
            key = read_key(key_file(environment))
        except ImageError as error:
            raise UsageError(f"Images are not shared without a secret. {error}") from error
        return RemoteSettings(host, int(port), key, tuple(Path(os.path.realpath(folder)) for folder in folders))
