"""Where this installation's native code is. Knows nothing but places, so that everything can ask it."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def _home() -> str:
    if named := os.environ.get("PHOS_HOME"):
        return named
    installed = os.path.dirname(sys.prefix)
    if os.path.exists(f"{installed}/lib/libphos.so") and os.path.isdir(f"{installed}/bin"):
        return installed
    return f"{os.path.dirname(os.path.dirname(os.path.realpath(__file__)))}/build"


def launcher(name: str) -> str:
    """The launcher ``criu``, ``phosd`` or ``phos-gpu``. Imports nothing: who asks may be in a hurry."""
    place = _home()
    installed = f"{place}/bin/{name}"
    return installed if os.path.exists(installed) else f"{os.path.dirname(place)}/packaging/{name}"


def home() -> Path:
    """The folder that holds lib/, softgpu/, plugin/ and criu/: the prefix's lib/phos, or build/ in a clone."""
    from pathlib import Path

    return Path(_home())


def chunks_library() -> Path:
    """libphos_chunks.so: hashing and appending of chunks, the tables shared with frontends. It may not be built."""
    return home() / "lib" / "libphos_chunks.so"
