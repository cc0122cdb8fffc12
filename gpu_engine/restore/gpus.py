"""This machine's GPUs for an image: which takes the place of which, and whether they have room."""

from __future__ import annotations

import time
from collections.abc import Iterable

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.errors import RestoreFailed

MEMORY_PATIENCE = 1.0
"""Seconds without more GPU memory becoming free after which there is too little."""


def match_gpus(wanted: list[pb.Gpu], present: list[driver.Gpu]) -> tuple[dict[int, int], dict[str, str]]:
    """Which GPU here takes the place of which GPU of the image.

    Returns (image ordinal → ordinal here, old UUID → new UUID for the driver; empty when all are the same).

    Raises:
        RestoreFailed: too few GPUs, or of another model.
    """
    by_uuid = {gpu.uuid: gpu for gpu in present}
    names = [driver.format_uuid(gpu.uuid) for gpu in wanted]
    if all(name in by_uuid for name in names):
        return {old.ordinal: by_uuid[name].ordinal for old, name in zip(wanted, names, strict=True)}, {}
    if len(wanted) > len(present):
        raise RestoreFailed(
            f"The image needs {len(wanted)} GPU(s), this machine shows {len(present)}. "
            "Restore on a machine with as many, or make more visible (CUDA_VISIBLE_DEVICES)."
        )
    ordinals: dict[int, int] = {}
    pairs: dict[str, str] = {}
    free = list(present)
    # Whoever is still there stays where it is; only then may others take what is left.
    for old, name in sorted(zip(wanted, names, strict=True), key=lambda pair: pair[1] not in by_uuid):
        same = [g for g in free if g.name == old.name and g.compute_capability == (old.major, old.minor)]
        if not same:
            raise RestoreFailed(
                f"The image was made on {old.name} (compute capability {old.major}.{old.minor}); this machine has "
                f"{', '.join(sorted({gpu.name for gpu in free})) or 'no further GPU'}. "
                "The driver restores only onto the same model."
            )
        chosen = next((g for g in same if g.uuid == name), same[0])
        free.remove(chosen)
        ordinals[old.ordinal] = chosen.ordinal
        pairs[name] = chosen.uuid
    for gpu in free:  # the driver's list must name every visible GPU (DESIGN §2)
        pairs.setdefault(gpu.uuid, gpu.uuid)
    return ordinals, pairs


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
                "End what else uses that GPU (nvidia-smi shows it) and restore again."
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
