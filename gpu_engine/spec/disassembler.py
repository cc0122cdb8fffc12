"""Finding a disassembler. It is optional: without one there is one source of descriptors less.

``nvdisasm`` comes with the CUDA toolkit and, what matters more, inside the Triton package that every PyTorch for CUDA
brings along. Imports nothing of the analysis: what is kept of modules is found by this too, and mostly nothing else is
needed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

SETTING = "PHOS_NVDISASM"
"""Environment: the disassembler to use; empty for none."""

_NAME = "nvdisasm"


def identity() -> str:
    """Which disassembler there is, if any: what was found with another, or without, is worth another try."""
    found = find_disassembler()
    if found is None:
        return ""
    about = found.stat()
    return f"{found} {about.st_size} {about.st_mtime_ns}"


def find_disassembler() -> Path | None:
    """The disassembler to use, or None: $PHOS_NVDISASM if set; else from PATH, $CUDA_HOME, Triton, /usr/local/cuda."""
    setting = os.environ.get(SETTING)
    if setting is not None:
        return Path(setting) if setting and _usable(Path(setting)) else None
    return next((path for path in _candidates() if _usable(path)), None)


def _usable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _candidates() -> Iterable[Path]:
    on_path = shutil.which(_NAME)
    if on_path is not None:
        yield Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            yield Path(home) / "bin" / _NAME
    try:
        triton = importlib.util.find_spec("triton")  # does not import it, which takes seconds
    except (ImportError, ValueError):
        triton = None
    if triton is not None:
        for folder in triton.submodule_search_locations or ():
            yield Path(folder) / "backends" / "nvidia" / "bin" / _NAME
    yield Path("/usr/local/cuda/bin") / _NAME
