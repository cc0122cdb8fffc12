"""This machine's GPUs for an image: which takes the place of which, and whether they have room."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.errors import RestoreFailed

MEMORY_PATIENCE = 1.0
"""Seconds without more GPU memory becoming free after which there is too little."""


def match_gpus(
    wanted: list[pb.Gpu], present: list[driver.Gpu], asked: Mapping[int, str] | None = None
) -> tuple[dict[int, int], dict[str, str]]:
    """Which GPU here takes the place of which GPU of the image.

    ``asked`` as gpu_moves.py reads it. Without it whoever is still there stays where it is.

    Returns (image ordinal → ordinal here, old UUID → new UUID for the driver; empty when all are the same).

    Raises:
        RestoreFailed: too few GPUs, of another model, or not those that were asked for.
    """
    by_uuid = {gpu.uuid: gpu for gpu in present}
    names = [driver.format_uuid(gpu.uuid) for gpu in wanted]
    chosen = _asked_for(wanted, present, asked or {})
    if not chosen and all(name in by_uuid for name in names):
        return {old.ordinal: by_uuid[name].ordinal for old, name in zip(wanted, names, strict=True)}, {}
    if len(wanted) > len(present):
        raise RestoreFailed(
            f"The image needs {len(wanted)} GPU(s), this machine shows {len(present)}. "
            "Restore on a machine with as many, or make more visible (CUDA_VISIBLE_DEVICES)."
        )
    ordinals: dict[int, int] = {}
    pairs: dict[str, str] = {}
    taken = {gpu.uuid for gpu in chosen.values()}
    free = list(present)
    # First what was asked for. Who is still there stays, and only then may others take what is left.
    for old, name in sorted(
        zip(wanted, names, strict=True),
        key=lambda pair: (pair[0].ordinal not in chosen, pair[1] not in by_uuid or pair[1] in taken),
    ):
        among = [chosen[old.ordinal]] if old.ordinal in chosen else free
        same = [g for g in among if g.name == old.name and g.compute_capability == (old.major, old.minor)]
        if not same:
            raise RestoreFailed(
                f"The image was made on {old.name} (compute capability {old.major}.{old.minor}); this machine has "
                f"{', '.join(sorted({gpu.name for gpu in among})) or 'no further GPU'}. "
                "The driver restores only onto the same model."
            )
        here = next((g for g in same if g.uuid == name), same[0])
        free.remove(here)
        ordinals[old.ordinal] = here.ordinal
        pairs[name] = here.uuid
    # The driver's list must name every visible GPU (DESIGN §2), also those that no process of the image knows.
    for gpu in sorted((gpu for gpu in present if gpu.uuid not in pairs), key=lambda gpu: gpu not in free):
        same = [other for other in free if other.name == gpu.name]
        if same:
            left = gpu if gpu in same else same[0]
            free.remove(left)
            pairs[gpu.uuid] = left.uuid
    return ordinals, pairs if any(old != new for old, new in pairs.items()) else {}


def _asked_for(wanted: list[pb.Gpu], present: list[driver.Gpu], asked: Mapping[int, str]) -> dict[int, driver.Gpu]:
    """The image's ordinal → the GPU here that was asked for in its place.

    Raises:
        RestoreFailed: there is none of these numbers and names, or one would take the place of two.
    """
    chosen: dict[int, driver.Gpu] = {}
    for number, name in asked.items():
        if number not in {gpu.ordinal for gpu in wanted}:
            raise RestoreFailed(
                f"The image has no GPU {number} that could come to {name}; "
                f"it has {', '.join(str(gpu.ordinal) for gpu in wanted) or 'none'} ('phos-gpu inspect' shows them)."
            )
        if name.isdecimal():
            found = [gpu for gpu in present if gpu.ordinal == int(name)]
        else:
            found = [gpu for gpu in present if gpu.uuid.lower().startswith(name.lower())]
        if len(found) != 1:
            raise RestoreFailed(
                f"There {'are several GPUs' if found else 'is no GPU'} {name} here for the image's GPU {number}. "
                f"phosd has {', '.join(f'{gpu.ordinal} ({gpu.uuid})' for gpu in present) or 'none'}."
            )
        if found[0] in chosen.values():
            raise RestoreFailed(f"GPU {found[0].ordinal} is to take the place of two of the image's GPUs.")
        chosen[number] = found[0]
    return chosen


def require_room(blocks: Iterable[Block]) -> None:
    """See to it that the GPUs have memory for all of these; what others are just giving back is waited for.

    Raises:
        RestoreFailed: there is too little.
    """
    needed: dict[int, int] = {}
    for block in blocks:
        needed[block.device] = needed.get(block.device, 0) + block.size
    for device, size in needed.items():
        if size > (free := _wait_for_memory(device, size)):
            raise RestoreFailed(
                f"The image needs {size / 1e9:.2f} GB on GPU {device}, which has {free / 1e9:.2f} GB free. "
                "End what else uses that GPU (nvidia-smi shows it) and restore again, or onto another GPU "
                "(phos-gpu restore --gpu OLD=NEW)."
            )


def _wait_for_memory(device: int, size: int) -> int:
    """Bytes free on a GPU; as long as others are letting go of theirs and ``size`` is not reached, wait.

    What a process held that was killed a moment ago, by the dump for example, comes free piece by piece.
    """
    context = driver.context(device)
    free, grew = context.free_memory(), time.monotonic()
    while free < size and time.monotonic() - grew < MEMORY_PATIENCE:
        time.sleep(0.02)
        now = context.free_memory()
        if now > free:
            grew = time.monotonic()
        free = now
    return free
