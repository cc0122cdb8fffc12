"""Running a disassembler (disassembler.py finds it)."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.sass_elf import function_indices

TIME_LIMIT = 120.0
"""Seconds for one run."""


def disassemble(image: bytes, functions: Collection[str], disassembler: Path, time_limit: float = TIME_LIMIT) -> str:
    """The machine code of the functions named, as text. Names that the cubin does not have are left out.

    Raises:
        SpecError: the disassembler cannot be started, fails, takes longer than ``time_limit`` seconds, or the image is
            no cubin.
    """
    indices = function_indices(image, set(functions))
    if not indices:
        return ""
    with tempfile.NamedTemporaryFile(prefix="phos-", suffix=".cubin") as file:
        file.write(image)
        file.flush()
        texts = []
        # Some thousand indices fit on a command line; far fewer are asked for at once in practice.
        for start in range(0, len(indices), 1000):
            chosen = ",".join(map(str, indices[start : start + 1000]))
            texts.append(_run([str(disassembler), "-c", "-fun", chosen, file.name], disassembler, time_limit))
    return "".join(texts)


def _run(command: list[str], disassembler: Path, time_limit: float) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=time_limit, check=False)
    except subprocess.TimeoutExpired:
        raise SpecError(f"The disassembler {disassembler} did not finish within {time_limit:g} s.") from None
    except OSError as error:
        raise SpecError(f"The disassembler {disassembler} cannot be started: {error.strerror}.") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"it ended with status {done.returncode}"
        raise SpecError(f"The disassembler {disassembler} failed: {reason}")
    return done.stdout.decode(errors="replace")
