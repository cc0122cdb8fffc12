"""What a person may choose for checkpoints by copy-on-write, from phosd's environment or for one checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phos.gpu_engine.errors import UsageError

DEFAULT_POOL_BYTES = 2 << 30
"""The paper's limit (section 5) for the memory that shadows take on each GPU."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.I)
_SWITCH = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class CowSettings:
    """How a checkpoint by copy-on-write is made.

    pool_bytes  GPU memory for shadows, on each GPU; 0: none, and who writes first waits until the old content is saved.
    validate    compare content hashes, and make the image anew stop-the-world where speculation was wrong.
    prioritise  let copies of the application go ahead of phosd's.
    """

    pool_bytes: int = DEFAULT_POOL_BYTES
    validate: bool = True
    prioritise: bool = True

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> CowSettings:
        """What PHOS_COW_POOL, PHOS_VALIDATE and PHOS_PRIORITISE say; ``environment`` stands for the process's own.

        Raises:
            UsageError: one of them has no meaning.
        """
        values = os.environ if environment is None else environment
        return CowSettings().changed(
            pool=values.get("PHOS_COW_POOL", ""),
            validate=values.get("PHOS_VALIDATE", ""),
            prioritise=values.get("PHOS_PRIORITISE", ""),
        )

    def changed(self, *, pool: str = "", validate: str = "", prioritise: str = "") -> CowSettings:
        """These settings with those replaced that are not empty: the fields of the message CowOptions.

        Raises:
            UsageError: one of them has no meaning.
        """
        made = self
        if pool:
            made = replace(made, pool_bytes=size_of("PHOS_COW_POOL", pool))
        if validate:
            made = replace(made, validate=_switch("PHOS_VALIDATE", validate))
        if prioritise:
            made = replace(made, prioritise=_switch("PHOS_PRIORITISE", prioritise))
        return made


def size_of(name: str, text: str) -> int:
    """A number of bytes with a suffix: 0, 4096, 256M, 1.5G (powers of 1024).

    Raises:
        UsageError: it is none; ``name`` is the setting's.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{name}={text} is no size: a number of bytes, with a suffix K, M, G or T if you like.")
    number, suffix = found.groups()
    scale = 1 << 10 * " KMGT".index(suffix.upper() or " ")
    return int(number) * scale if number.isdigit() else int(float(number) * scale)


def _switch(name: str, text: str) -> bool:
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise UsageError(f"{name}={text} is neither on nor off.") from None
