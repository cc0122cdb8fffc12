#!/usr/bin/env python3
"""Compile ``content_hash.cu`` to ``content_hash.ptx`` with NVRTC; ``--check`` says whether the file is up to date.

The PTX is for every GPU and driver that PhOS runs on: its version is lowered to the oldest that has all it uses.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "gpu_engine"
PTX_VERSION = "7.0"
ARCHITECTURE = "compute_75"


def compile_ptx() -> str:
    """The PTX text.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    from cuda.bindings import nvrtc

    source = (FOLDER / "content_hash.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"content_hash.cu", 0, [], [])
    options = [f"--gpu-architecture={ARCHITECTURE}".encode()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    body = text.decode().rstrip("\0")
    body = re.sub(r"^//.*\n", "", body, flags=re.M).lstrip()
    body = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", body, flags=re.M)
    return "// Generated from content_hash.cu by make_content_hash.py.\n" + body


def main() -> int:
    """Exit status 1: the file is not what would be written."""
    target = FOLDER / "content_hash.ptx"
    text = compile_ptx()
    if "--check" in sys.argv[1:]:
        return 0 if target.read_text() == text else 1
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
