"""Where the GPUs of an image are to come: what ``phos-gpu restore --gpu`` and ``PHOS_RESTORE_GPUS`` say."""

from __future__ import annotations

import re

from phos.gpu_engine.errors import UsageError

_MOVE = re.compile(r"([0-9]{1,9})=([0-9]{1,9}|GPU-[0-9a-fA-F-]*)")


def read_moves(text: str) -> dict[int, str]:
    """OLD=NEW,...: the image's GPU → the number here, the UUID, or how it begins. What there is, gpus.py knows.

    Raises:
        UsageError: it has no meaning.
    """
    said: dict[int, str] = {}
    for word in filter(None, text.split(",")):
        if (found := _MOVE.fullmatch(word)) is None:
            raise UsageError(
                f"{word!r} says of no GPU where it comes. It is OLD=NEW, as 0=1: a number of the image's ('phos-gpu "
                "inspect'), and one of phosd's or its UUID ('phos-gpu status')."
            )
        if int(found[1]) in said:
            raise UsageError(f"{text} says twice where the image's GPU {found[1]} comes.")
        said[int(found[1])] = found[2]
    return said
