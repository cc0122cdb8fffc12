"""What a person may choose for restores, from phosd's environment or from CRIU's for one restore."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phos.gpu_engine.errors import UsageError

ORDERS = ("recorded", "allocation", "random")


@dataclass(frozen=True)
class LazySettings:
    """How a lazy restore is made.

    strict  nothing can be accessed before all of its block's data is there: a wrong guess faults. Else a call waits for
            the chunks that it is thought to touch, and a wrong guess goes unseen.
    order   in which chunks come that nobody waits for: recorded (as the program first used them), allocation, random.
    """

    strict: bool = True
    order: str = "recorded"

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> LazySettings:
        """What PHOS_LAZY and PHOS_PREFETCH say; ``environment`` stands for the process's own.

        Raises:
            UsageError: one of them has no meaning.
        """
        values = os.environ if environment is None else environment
        return LazySettings().changed(lazy=values.get("PHOS_LAZY", ""), order=values.get("PHOS_PREFETCH", ""))

    def changed(self, *, lazy: str = "", order: str = "") -> LazySettings:
        """These settings with those replaced that are not empty.

        Raises:
            UsageError: one of them has no meaning.
        """
        made = self
        if lazy:
            if lazy not in ("strict", "fast"):
                raise UsageError(f"PHOS_LAZY={lazy} is neither strict nor fast.")
            made = replace(made, strict=lazy == "strict")
        if order:
            if order not in ORDERS:
                raise UsageError(f"PHOS_PREFETCH={order}: choose one of {', '.join(ORDERS)}.")
            made = replace(made, order=order)
        return made
