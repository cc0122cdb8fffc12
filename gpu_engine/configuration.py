"""The configuration file: defaults for those environment variables that choose how a checkpoint is made.

It is read where a checkpoint begins (``criu dump`` through the launcher, ``phos-gpu checkpoint``), so a change holds
for the next one; what phosd pins and shares (daemon/remote_settings.py), when phosd starts. What the environment says
comes first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from phos.gpu_engine.errors import UsageError

DEFAULT_PATH = Path("/etc/phos/phos.toml")

PROTOCOLS = ("stop", "cow")

KEYS: Mapping[str, tuple[str, tuple[type, ...], str]] = {
    "protocol": ("PHOS_PROTOCOL", (str,), '"stop" or "cow"'),
    "cow-pool": ("PHOS_COW_POOL", (str, int), 'a size such as "2G"'),
    "validate": ("PHOS_VALIDATE", (bool,), "true or false"),
    "listen": ("PHOS_LISTEN", (str,), 'an address such as "10.0.0.1:7070"'),
    "share": ("PHOS_SHARE", (str,), "folders with colons between them"),
    "remote-key": ("PHOS_REMOTE_KEY", (str,), "a file"),
    "pin-limit": ("PHOS_PIN_LIMIT", (str, int), 'a size such as "64G"'),
    "prioritise": ("PHOS_PRIORITISE", (bool,), "true or false"),
}
"""Key in the file → the variable that it stands for, the types it may have, and those in words."""

SIZES = ("cow-pool", "pin-limit")


def read(path: Path | None = None) -> dict[str, str]:
    """The variables that the file sets. ``path``: else PHOS_CONFIG, else /etc/phos/phos.toml, which may be missing.

    Raises:
        UsageError: the file named cannot be read, is not TOML, or has a key or value without a meaning.
    """
    named = path or (Path(os.environ["PHOS_CONFIG"]) if os.environ.get("PHOS_CONFIG") else None)
    place = named or DEFAULT_PATH
    try:
        text = place.read_text()
    except FileNotFoundError:
        if named is None:
            return {}
        raise UsageError(f"There is no configuration file {place}, which PHOS_CONFIG names.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The configuration file {place} cannot be read: {error}.") from error
    found: dict[str, str] = {}
    for key, value in _parse(place, text).items():
        if key not in KEYS:
            raise UsageError(f"{place} has the key '{key}', which means nothing. There are: {', '.join(KEYS)}.")
        variable, types, words = KEYS[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UsageError(f"{place}: {key} must be {words}.")
        if key == "protocol" and value not in PROTOCOLS:
            raise UsageError(f"{place}: {key} must be {words}.")
        if key in SIZES:
            from phos.gpu_engine.cow.settings import size_of  # here, because that loads more than all of this

            size_of(f"{place}: {key}", str(value))  # who uses it would name a variable that nobody has set
        found[variable] = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return found


def _parse(place: Path, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found]  # the same, before it was part of Python
        except ModuleNotFoundError:
            raise UsageError(f"To read {place}, Python 3.10 needs the package tomli: pip install tomli.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The configuration file {place} is not TOML: {error}.") from error


def fill_environment(variables: Collection[str] | None = None) -> None:
    """Set those variables of this process that the file sets and the environment does not; ``variables``: only these.

    Raises:
        UsageError: as for :func:`read`.
    """
    for variable, value in read().items():
        if not os.environ.get(variable) and (variables is None or variable in variables):
            os.environ[variable] = value
