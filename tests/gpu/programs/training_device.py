"""Where a program of PyTorch's computes: on its GPU, or, where it finds none, on the CPU beside memory of a GPU's.

So its processes, files and connections can be dumped and restored on the software GPU as well, on which PyTorch itself
does not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from torch import Tensor

BESIDE_BYTES = 4 << 20


@contextmanager
def training_device() -> Iterator[tuple[torch.device, str, Callable[[Tensor], None]]]:
    """The device, what it is, and what is to be called with some numbers in each iteration.

    Those of the iteration before must be in the GPU's memory then, if they were put there.
    """
    if torch.cuda.is_available():
        yield torch.device("cuda"), torch.cuda.get_device_name(), lambda _: None
        return
    if os.environ.get("PHOS_DEVICE") == "nvidia":
        raise SystemExit("PyTorch finds no GPU, although there is one")
    from cuda_program import Buffer, Device

    with Device() as device:
        buffer, before = Buffer(BESIDE_BYTES), bytes(BESIDE_BYTES)
        buffer.upload(before)

        def beside(numbers: Tensor) -> None:
            nonlocal before
            if buffer.download() != before:
                raise SystemExit("the GPU's memory is not what it was")
            raw = numbers.detach().contiguous().view(torch.uint8).numpy().tobytes()
            before = (raw * -(-BESIDE_BYTES // len(raw)))[:BESIDE_BYTES]
            buffer.upload(before)

        yield torch.device("cpu"), f"the CPU beside {device.describe()}", beside
        buffer.close()
