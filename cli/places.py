"""Where the parts of PhOS are that are not Python: installed, beside the environment; in a clone, under build/."""

from __future__ import annotations

import sys
from pathlib import Path

import phos

CLONE = Path(phos.__file__).resolve().parent.parent


def home() -> Path | None:
    """PREFIX/lib/phos, if this Python is the environment in it; None in a clone."""
    folder = Path(sys.prefix).parent
    return folder if folder.name == "phos" and (folder / "bin" / "layout.sh").exists() else None


def _part(*parts: str) -> Path:
    return (home() or CLONE / "build").joinpath(*parts)


def frontend() -> Path:
    """The library that `phos-gpu run` preloads."""
    return _part("lib", "libphos.so")


def software_gpu() -> Path:
    """The folder that, first in LD_LIBRARY_PATH, makes a program use the software GPU."""
    return _part("softgpu")


def plugin() -> Path:
    """The plugin for CRIU; nothing else is in its folder."""
    return _part("plugin", "phos_plugin.so")


def examples() -> Path:
    """The folder of example programs."""
    installed = home()
    return (installed or CLONE) / "examples"


def launcher(name: str) -> Path:
    """One of the commands that find everything by their own place: criu, phos-gpu, phosd."""
    installed = home()
    return (installed / "bin" if installed else CLONE / "packaging") / name
