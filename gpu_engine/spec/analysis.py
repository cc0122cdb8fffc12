"""From a module's bytes to access descriptors: the best source for each kernel (descriptor.py lists them).

A source that fails for a kernel, or that contradicts the parameter layout, is passed over with a sentence in the log;
the next one takes its place. The layout alone is always a valid, if wasteful, descriptor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.spec import cubin, modules, names, ptx_flow, ptx_layout, sass_flow
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Parameter, from_layout
from phos.gpu_engine.spec.disassembler import find_disassembler
from phos.gpu_engine.spec.effort import Effort, OutOfTime
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer
from phos.gpu_engine.spec.modules import Unit

log = logging.getLogger(__name__)

Layouts = dict[str, tuple[Parameter, ...]]
Descriptors = dict[str, AccessDescriptor]
Progress = Callable[[Descriptors], None]
Hard = int | str
"""A part of a module, by its number, whose PTX takes too long to read; or a kernel, by its name, to be followed."""
Check = Callable[[], None]
_Source = Callable[[Collection[str]], Iterator[Mapping[str, AccessDescriptor]]]

PTX_MOST = 64 << 20
"""Characters of a PTX text that are read: they take some ten seconds, and 2 GB."""
PTX_SECONDS = 10.0
"""Processor time to read a PTX text; one that takes longer is not read again. Debug builds have some 10 MB of it."""
KERNEL_SECONDS = 10.0
"""Processor time for the data flow over one kernel's PTX; the next source is asked for a kernel that takes longer."""
TELL_SECONDS = 1.0
"""Descriptors that are quick to find are told of so often."""
TEXTS_KEPT = 2
"""PTX texts kept as they were read, as a module's kernels are often asked for one after another."""
SASS_KERNELS = 8
"""How many kernels are disassembled at once: each may take a second, or many in a debug build."""
SASS_SECONDS = 5.0
"""Were they slower, as in a debug build, the next ones come one at a time."""


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
    image: Buffer,
    capability: int,
    kernels: Collection[str] | None,
    seconds: float,
    progress: Progress | None = None,
    hard: set[Hard] | None = None,
) -> Described:
    """The same, and the kernels of which more could be found out: those not done after so many seconds, for example.

    The time is looked at between steps, of which each can take a few seconds. One is always made.

    Arguments:
        hard: what takes too long as PTX, which is not tried then; what proves to be such is added, and ``progress``
            called, with nothing if need be.
    """
    turn = _Turn(time.monotonic() + seconds, math.isfinite(seconds), progress, set() if hard is None else hard)
    wanted = None if kernels is None else set(kernels)
    known: list[tuple[int, Unit, Layouts]] = []
    found: Descriptors = {}
    for number, unit in enumerate(modules.units(image, capability)):
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
            known.append((number, unit, layouts))
            quick = {name: _from_name(name, parameters) for name, parameters in layouts.items()}
            found.update(quick)
            turn.tell(quick)
    described = Described(found, set(), set())
    for index, (number, unit, layouts) in enumerate(known):
        if index and turn.over:
            described.later.update(layouts)
        else:
            _improve(described, number, unit, layouts, turn)
    return described


@dataclass(frozen=True)
class _Turn:
    """One call of describe_within."""

    deadline: float
    bounded: bool
    progress: Progress | None
    hard: set[Hard]

    @property
    def over(self) -> bool:
        """Whether it is another module's turn."""
        return time.monotonic() > self.deadline

    def effort(self, seconds: float) -> Effort:
        """Up to so many seconds of processor time, unless there is no limit at all."""
        return Effort(seconds, self.deadline) if self.bounded else Effort()

    def too_hard(self, what: Hard) -> None:
        """It is not to be tried again. Said at once: what follows may take this process down."""
        self.hard.add(what)
        self.tell({})

    def tell(self, found: Descriptors) -> None:
        """Say what has been found."""
        if self.progress is not None:
            self.progress(found)


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


def _improve(known: Described, number: int, unit: Unit, layouts: Layouts, turn: _Turn) -> None:
    """Put what the data-flow sources say of a unit's kernels into what is known."""
    missing = set(layouts)
    unsure = False
    for source in _sources(number, unit, turn):
        try:
            for offered in source(frozenset(missing)):
                better = _fitting(offered, layouts, missing)
                if better:
                    turn.tell(better)
                known.found.update(better)
                missing -= better.keys()
                if not missing:
                    return
                if turn.over:
                    known.later.update(missing)
                    return
        except OutOfTime as error:
            if error.hard:
                turn.too_hard(number)
            unsure = unsure or not error.hard
            log.warning("The PTX of a part of a module is not read; the next source is asked. %s", error)
        except PtxError as error:
            log.warning("A source of descriptors failed; the next source is asked. %s", error)
        except PhosError as error:
            # A disassembler fails because of the code, or because memory or room for its files was short for a moment.
            unsure = True
            log.warning("A source of descriptors failed; the next source is asked. %s", error)
        except Exception as error:
            # Whatever goes wrong in a source must cost no more than that source.
            unsure = unsure or isinstance(error, OSError | MemoryError)
            log.warning("A source of descriptors failed; the next source is asked.", exc_info=True)
    if unsure:
        known.unsure.update(missing)


def _sources(number: int, unit: Unit, turn: _Turn) -> list[_Source]:
    """The data-flow sources for a unit, best first. PTX of another architecture may stem from other source lines."""

    def ptx(kernels: Collection[str]) -> Iterator[Mapping[str, AccessDescriptor]]:
        text = unit.ptx() if number not in turn.hard else None
        if text is not None:
            yield from _flow(_read(ptx_flow.Kernels, text, turn), kernels, turn)

    def sass(kernels: Collection[str]) -> Iterator[Mapping[str, AccessDescriptor]]:
        if find_disassembler() is None:
            return
        ordered = sorted(kernels)
        for image in unit.cubins():
            # In parts, so that what takes too long costs only what is left; of what is slow, small ones.
            left, count = ordered, SASS_KERNELS
            while left:
                began = time.monotonic()
                yield sass_flow.describe(image, left[:count])
                left = left[count:]
                count = SASS_KERNELS if time.monotonic() - began < SASS_SECONDS else 1

    return [ptx, sass] if unit.ptx_matches else [sass, ptx]


_texts: dict[tuple[object, str], ptx_flow.Kernels] = {}
"""Those that were read last, the last one last."""


def _read(make: Callable[[str, Check], ptx_flow.Kernels], text: str, turn: _Turn) -> ptx_flow.Kernels:
    """A PTX text, read.

    Raises:
        OutOfTime: it is too long. PtxError: it cannot be read.
    """
    if turn.bounded and len(text) > PTX_MOST:
        raise OutOfTime(hard=True)
    known = _texts.pop((make, text), None)
    if known is None:
        while len(_texts) >= TEXTS_KEPT:
            del _texts[next(iter(_texts))]
        known = make(text, turn.effort(PTX_SECONDS).check)
    _texts[make, text] = known
    return known


def _flow(text: ptx_flow.Kernels, kernels: Collection[str], turn: _Turn) -> Iterator[Descriptors]:
    """The descriptors of kernels, as they are found. A kernel that is too hard, or that we fail at, is left out.

    Raises:
        OutOfTime: the turn was over before one was found.
    """
    found: Descriptors = {}
    some = False
    told = time.monotonic()
    names = sorted(name for name in set(text.names) & set(kernels) if name not in turn.hard)
    for name in names:
        try:
            if turn.over and name != names[0]:
                raise OutOfTime(hard=False)
            found[name] = text.describe(name, turn.effort(KERNEL_SECONDS).check)
            some = True
        except OutOfTime as error:
            if error.hard:
                log.warning("The PTX of kernel %s is not followed; the next source is asked. %s", name, error)
                turn.too_hard(name)
                continue
            if not some:
                raise
            break
        except (OSError, MemoryError):
            raise
        except PhosError as error:
            log.warning("The PTX of kernel %s is not followed; the next source is asked. %s", name, error)
        except Exception:
            log.warning("The PTX of kernel %s is not followed; the next source is asked.", name, exc_info=True)
        if found and time.monotonic() - told > TELL_SECONDS:
            yield found
            found, told = {}, time.monotonic()
    if some:
        yield found


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


def kernels(image: Buffer, capability: int) -> list[str]:
    """The names of all kernels in a module that a GPU of this capability would run. Raises SpecError."""
    return [name for unit in modules.units(image, capability) for name in _layouts(unit, None)]
