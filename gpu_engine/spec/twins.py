"""Twins of the kernels of a module (ptx_instrument/twin.py), in the form in which frontends take them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.ptx_instrument.twin import Twin, make
from phos.gpu_engine.spec import modules
from phos.gpu_engine.spec.fatbin import Buffer

log = logging.getLogger(__name__)

TEXT_MOST = 8 << 20
"""Characters of PTX. More would take the driver longer to compile than a window lasts."""


@dataclass(frozen=True)
class TwinFile:
    """The twins of one part of a module."""

    file: str
    """What goes to the frontend (message Twins of wire.proto); empty if there are none."""
    kernels: tuple[str, ...]
    left_out: dict[str, str]
    """Kernels without a twin, and why."""


def files(image: Buffer, capability: int, wanted: Collection[str], *, reads: bool) -> Iterator[TwinFile]:
    """The twins of those of a module's kernels that are wanted, as far as it has PTX of the code that runs.

    Arguments:
        capability: of the GPU, as 90 for 9.0.
        reads: check loads too.

    Raises:
        SpecError: the image is no module.
    """
    for unit in modules.units(image, capability):
        if not unit.ptx_matches:
            continue
        try:
            text = unit.ptx()
            if text is None or len(text) > TEXT_MOST:
                continue
            twin = make(text, reads=reads, wanted=wanted)
        except PhosError as error:
            log.warning("A part of a module has no twins. %s", error)
            continue
        if twin.kernels or twin.left_out:
            yield TwinFile(_file(twin) if twin.kernels else "", tuple(sorted(twin.kernels)), twin.left_out)


def _file(twin: Twin) -> str:
    lines = [
        "\t".join([name, *(f"{index}:{variable}" for index, variable in variables)])
        for name, variables in sorted(twin.kernels.items())
    ]
    return twin.text + "\0" + "\n".join(lines) + "\n"
