"""From a module's bytes to access descriptors: the best source for each kernel (descriptor.py lists them).

A source that fails for a kernel, or that contradicts the parameter layout, is passed over with a sentence in the log;
the next one takes its place. The layout alone is always a valid, if wasteful, descriptor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType

from phos.gpu_engine.spec import cubin, modules, ptx_layout
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Parameter, from_layout
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer
from phos.gpu_engine.spec.modules import Unit

log = logging.getLogger(__name__)

Layouts = dict[str, tuple[Parameter, ...]]
Descriptors = dict[str, AccessDescriptor]
Progress = Callable[[Descriptors], None]


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
    wanted = None if kernels is None else set(kernels)
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
        if not layouts:
            continue
        quick = {name: _from_name(name, parameters) for name, parameters in layouts.items()}
        if progress is not None:
            progress(quick)
        found.update(_best(unit, layouts, quick, progress))
    return found


def _layouts(unit: Unit, wanted: Collection[str] | None) -> Layouts:
    """Cubins first: they are what runs. PTX is uncompressed only for kernels that they do not have."""
    found: Layouts = {}
    for image in unit.cubins():
        names = cubin.kernels(image) if wanted is None else wanted
        found.update(cubin.layouts(image, names))
    if not found or (wanted is not None and not unit.cubins() and wanted - found.keys()):
        text = unit.ptx()
        if text is not None:
            layouts = ptx_layout.layouts(text)
            found.update({name: layouts[name] for name in layouts if wanted is None or name in wanted})
    return found


def _from_name(kernel: str, parameters: tuple[Parameter, ...]) -> AccessDescriptor:
    names = _optional("names")
    if names is not None:
        try:
            found: AccessDescriptor | None = names.describe(kernel, parameters)
        except SpecError:
            found = None  # not mangled, or beyond us: common, and not worth a line
        if found is not None:
            return found
    return from_layout(kernel, parameters)


def _best(unit: Unit, layouts: Layouts, quick: Descriptors, progress: Progress | None) -> Descriptors:
    found = dict(quick)
    missing = set(layouts)
    for source in _sources(unit):
        if not missing:
            break
        try:
            offered = source(missing)
        except Exception as error:
            # Whatever goes wrong in a source must cost no more than that source.
            if not isinstance(error, SpecError):
                log.warning("A source of descriptors failed; the next one is asked.", exc_info=True)
            else:
                log.warning("A source of descriptors failed; the next one is asked. %s", error)
            continue
        better: Descriptors = {}
        for name in sorted(missing & offered.keys()):
            if _plausible(offered[name], layouts[name]):
                better[name] = offered[name]
            else:
                log.warning("What %s says of kernel %s contradicts its layout.", offered[name].source.name, name)
        if progress is not None and better:
            progress(better)
        found.update(better)
        missing -= better.keys()
    return found


def _sources(unit: Unit) -> Iterator[Callable[[Collection[str]], Mapping[str, AccessDescriptor]]]:
    """The data-flow sources for a unit, best first. PTX of another architecture may stem from other source lines."""
    from_ptx, from_sass = _optional("ptx_flow"), _optional("sass_flow")

    def ptx(kernels: Collection[str]) -> Mapping[str, AccessDescriptor]:
        text = unit.ptx()
        return {} if text is None or from_ptx is None else from_ptx.describe(text)

    def sass(kernels: Collection[str]) -> Mapping[str, AccessDescriptor]:
        found: Descriptors = {}
        for image in unit.cubins():
            if from_sass is not None:
                found.update(from_sass.describe(image, kernels))
        return found

    yield from (ptx, sass) if unit.ptx_matches else (sass, ptx)


def _plausible(found: AccessDescriptor, parameters: tuple[Parameter, ...]) -> bool:
    end = max((p.offset + p.size for p in parameters), default=0)
    return found.parameters == parameters and all(
        field.offset >= 0 and field.size > 0 and field.offset + field.size <= end for field in found.fields
    )


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
    usable = []
    for name in ("names", "ptx_flow", "sass_flow"):
        module = _optional(name)
        if module is not None:
            describe_tools = getattr(module, "tools", None)
            usable.append(f"{name}:{describe_tools()}" if describe_tools is not None else name)
    return " ".join(usable)


def kernels(image: Buffer, capability: int) -> list[str]:
    """The names of all kernels in a module that a GPU of this capability would run. Raises SpecError."""
    return [name for unit in modules.units(image, capability) for name in _layouts(unit, None)]
