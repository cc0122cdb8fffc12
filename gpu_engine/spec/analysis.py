"""From a module's bytes to access descriptors: the best source for each kernel (descriptor.py lists them).

A source that fails for a kernel, or that contradicts the parameter layout, is passed over with a sentence in the log;
the next one takes its place. The layout alone is always a valid, if wasteful, descriptor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.spec import cubin, modules, names, ptx_layout
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Parameter, from_layout
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer
from phos.gpu_engine.spec.modules import Unit

log = logging.getLogger(__name__)

Layouts = dict[str, tuple[Parameter, ...]]
Descriptors = dict[str, AccessDescriptor]
Progress = Callable[[Descriptors], None]
_Source = Callable[[Collection[str]], Iterator[Mapping[str, AccessDescriptor]]]

SASS_KERNELS = 8
"""How many kernels are disassembled at once: each may take a second."""


class Described(NamedTuple):
    """What is known of kernels, and how far to rely on it that there is no more."""

    found: Descriptors
    later: set[str]
    """Kernels there was no time for."""
    unsure: set[str]
    """Kernels of which a source might say more another time: it failed, and that may not be the module's fault."""


def describe(
    image: Buffer, capability: int, kernels: Collection[str] | None, progress: Progress | None = None
) -> Descriptors:
    """Descriptors of the kernels named, from the best source for each; kernels that the module lacks are left out.

    Arguments:
        image: a module as the driver is given it.
        capability: of the GPU, as 90 for 9.0; 0 takes the newest architecture in the module.
        kernels: names as the module spells them (mangled); None for all.
        progress: called with what is known before the slow sources are asked, and with what each of them adds.

    Raises:
        SpecError: the image is no module, or malformed. Errors of a single source or unit are logged only.
    """
    return describe_within(image, capability, kernels, math.inf, progress).found


def describe_within(
    image: Buffer, capability: int, kernels: Collection[str] | None, seconds: float, progress: Progress | None = None
) -> Described:
    """The same, and the kernels of which more could be found out: those not done after so many seconds, for example.

    The time is looked at between steps, of which each can take a few seconds.
    """
    deadline = time.monotonic() + seconds
    wanted = None if kernels is None else set(kernels)
    known: list[tuple[Unit, Layouts]] = []
    found: Descriptors = {}
    for unit in modules.units(image, capability):
        if wanted is not None and not wanted:
            break
        try:
            layouts = _layouts(unit, wanted)
        except SpecError as error:
            log.warning("A part of a module is passed over. %s", error)
            continue
        if wanted is not None:
            wanted -= layouts.keys()
        if layouts:
            known.append((unit, layouts))
            quick = {name: _from_name(name, parameters) for name, parameters in layouts.items()}
            found.update(quick)
            if progress is not None:
                progress(quick)
    all_found = Described(found, set(), set())
    for unit, layouts in known:
        _improve(all_found, unit, layouts, deadline, progress)
    return all_found


def _layouts(unit: Unit, wanted: Collection[str] | None) -> Layouts:
    """Cubins first: they are what runs. PTX is uncompressed only for kernels that they do not have."""
    found: Layouts = {}
    for image in unit.cubins():
        names = cubin.kernels(image) if wanted is None else wanted
        found.update(cubin.layouts(image, names))
    if not found or (wanted is not None and not unit.cubins() and wanted - found.keys()):
        text = unit.ptx()
        if text is not None:
            layouts = ptx_layout.layouts(text, unit.runs_on)
            found.update({name: layouts[name] for name in layouts if wanted is None or name in wanted})
    return found


def _from_name(kernel: str, parameters: tuple[Parameter, ...]) -> AccessDescriptor:
    try:
        return names.describe(kernel, parameters)
    except SpecError:
        return from_layout(kernel, parameters)  # not mangled, or beyond us: common, and not worth a line


def _improve(known: Described, unit: Unit, layouts: Layouts, deadline: float, progress: Progress | None) -> None:
    """Put what the data-flow sources say of a unit's kernels into what is known."""
    missing = set(layouts)
    unsure = False
    for source in _sources(unit):
        try:
            for offered in source(frozenset(missing)):
                better = _fitting(offered, layouts, missing)
                if progress is not None and better:
                    progress(better)
                known.found.update(better)
                missing -= better.keys()
                if not missing:
                    return
                if time.monotonic() > deadline:
                    known.later.update(missing)
                    return
        except PtxError as error:
            log.warning("A source of descriptors failed; the next one is asked. %s", error)
        except PhosError as error:
            # A disassembler fails because of the code, or because memory or room for its files was short for a moment.
            unsure = True
            log.warning("A source of descriptors failed; the next one is asked. %s", error)
        except Exception as error:
            # Whatever goes wrong in a source must cost no more than that source.
            unsure = unsure or isinstance(error, OSError | MemoryError)
            log.warning("A source of descriptors failed; the next one is asked.", exc_info=True)
    if unsure:
        known.unsure.update(missing)


def _sources(unit: Unit) -> list[_Source]:
    """The data-flow sources for a unit, best first. PTX of another architecture may stem from other source lines."""
    from_ptx, from_sass = _optional("ptx_flow"), _optional("sass_flow")

    def ptx(kernels: Collection[str]) -> Iterator[Mapping[str, AccessDescriptor]]:
        text = unit.ptx()
        if text is not None and from_ptx is not None:
            yield _flow(from_ptx.describe, text)

    def sass(kernels: Collection[str]) -> Iterator[Mapping[str, AccessDescriptor]]:
        if from_sass is None or from_sass.find_disassembler() is None:
            return
        ordered = sorted(kernels)
        for image in unit.cubins():
            # In parts, so that what takes too long costs only what is left.
            for start in range(0, len(ordered), SASS_KERNELS):
                yield from_sass.describe(image, ordered[start : start + SASS_KERNELS])

    return [ptx, sass] if unit.ptx_matches else [sass, ptx]


@lru_cache(maxsize=4)
def _flow(describe_text: Callable[[str], Descriptors], text: str) -> Descriptors:
    """PTX is read as a whole, and its kernels are often asked for one after another."""
    return describe_text(text)


def _fitting(offered: Mapping[str, AccessDescriptor], layouts: Layouts, missing: Collection[str]) -> Descriptors:
    """Those of the descriptors offered that fit the kernels' layouts, moved to the offsets that these have."""
    fitting: Descriptors = {}
    for name in sorted(offered.keys() & set(missing)):
        moved = _moved(offered[name], layouts[name])
        if moved is None:
            log.warning("What %s says of kernel %s contradicts its layout.", offered[name].source.name, name)
        else:
            fitting[name] = moved
    return fitting


def _moved(found: AccessDescriptor, parameters: tuple[Parameter, ...]) -> AccessDescriptor | None:
    """A descriptor with its fields where the parameters really are; None if it speaks of other parameters.

    PTX does not tell the offsets of parameters that are aligned to more than 16 bytes (see ptx_layout).
    """
    if [p.size for p in found.parameters] != [p.size for p in parameters]:
        return None
    moves = {
        byte: real.offset - told.offset
        for told, real in zip(found.parameters, parameters, strict=True)
        for byte in range(told.offset, told.offset + told.size)
    }
    fields = []
    for field in found.fields:
        # A field may span parameters, if it still does where they really are.
        first, last = moves.get(field.offset), moves.get(field.offset + field.size - 1)
        if first is None or first != last or field.size <= 0:
            return None
        fields.append(replace(field, offset=field.offset + first))
    return replace(found, parameters=parameters, fields=tuple(fields))


def _optional(name: str) -> ModuleType | None:
    """A source of descriptors. SASS needs a disassembler's Python side that not everybody has installed."""
    import importlib

    try:
        return importlib.import_module(f"phos.gpu_engine.spec.{name}")
    except ImportError:
        return None
    except Exception:
        log.warning("The source of descriptors %s cannot be used.", name, exc_info=True)
        return None


def tools() -> str:
    """Which optional sources can be used here: what was found without one is worth another try once it is there."""
    usable = [name for name in ("ptx_flow", "sass_flow") if _optional(name) is not None]
    from_sass = _optional("sass_flow")
    disassembler: Path | None = None if from_sass is None else from_sass.find_disassembler()
    if disassembler is not None:
        about = disassembler.stat()
        usable.append(f"{disassembler} {about.st_size} {about.st_mtime_ns}")
    return " ".join(usable)


def kernels(image: Buffer, capability: int) -> list[str]:
    """The names of all kernels in a module that a GPU of this capability would run. Raises SpecError."""
    return [name for unit in modules.units(image, capability) for name in _layouts(unit, None)]
