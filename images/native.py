"""Where this installation's native code is. Knows nothing but places, so that everything can ask it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def home() -> Path:
    """The folder that holds lib/, softgpu/, plugin/ and criu/: the prefix's lib/phos, or build/ in a clone."""
    if named := os.environ.get("PHOS_HOME"):
        return Path(named)
    installed = Path(sys.prefix).parent
    if (installed / "lib" / "libphos.so").exists() and (installed / "bin").is_dir():
        return installed
    return Path(__file__).resolve().parents[1] / "build"


def chunks_library() -> Path:
    """libphos_chunks.so: hashing and appending of chunks, the tables shared with frontends. It may not be built."""
    return home() / "lib" / "libphos_chunks.so"
