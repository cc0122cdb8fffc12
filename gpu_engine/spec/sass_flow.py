"""Access descriptors from machine code, for kernels that come without PTX (PyTorch's own, for example).

A disassembler prints the code; it is walked with abstract values that say from which words of the parameter block an
address was made (:mod:`.sass_value`, :mod:`.sass_walk`); what reaches a load, a store or an atomic becomes a field
(:mod:`.sass_fields`). Where the code cannot be followed, everything may be read and written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from phos.gpu_engine.spec import cubin, names
from phos.gpu_engine.spec.descriptor import (
    ADDRESS_BYTES,
    Access,
    AccessDescriptor,
    Field,
    FieldKind,
    Parameter,
    Source,
    with_tables,
)
from phos.gpu_engine.spec.disassembler import SETTING, find_disassembler
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.sass_disassembly import disassemble
from phos.gpu_engine.spec.sass_elf import address_slots
from phos.gpu_engine.spec.sass_fields import fields, resolve
from phos.gpu_engine.spec.sass_state import Kernel, Layout
from phos.gpu_engine.spec.sass_text import Listing, parse
from phos.gpu_engine.spec.sass_walk import CannotFollowError, Program, Walk, program

log = logging.getLogger(__name__)

_ROUNDS = 4
"""How often functions called from what was disassembled are disassembled as well."""


def describe(image: bytes, kernels: Collection[str], disassembler: Path | None = None) -> dict[str, AccessDescriptor]:
    """The descriptors of the kernels named; those that the cubin does not have are left out.

    Raises:
        SpecError: there is no disassembler, it fails, or the image is no cubin.
    """
    image = bytes(image)
    infos = cubin.infos(image, kernels)
    if not infos:
        return {}
    tool = disassembler or find_disassembler()
    if tool is None:
        raise SpecError(f"There is no nvdisasm: set {SETTING}, or install the CUDA toolkit or Triton.")
    slots = address_slots(image)
    listing = _listing(image, infos.keys(), slots, tool)
    architecture = listing.architecture or cubin.architecture(image)
    layouts = {name: (info.parameters, Layout(info.base, info.size, architecture)) for name, info in infos.items()}
    return describe_listing(listing, layouts, slots)


def describe_listing(
    listing: Listing,
    layouts: Mapping[str, tuple[tuple[Parameter, ...], Layout]],
    slots: Mapping[int, str],
) -> dict[str, AccessDescriptor]:
    """The same from a listing, the kernels' layouts, and the symbols whose addresses stand in constant bank 4."""
    code = program(listing)
    return {
        name: _describe_one(code, name, parameters, layout, slots)
        for name, (parameters, layout) in layouts.items()
        if name in listing.sections
    }


def _describe_one(
    code: Program, name: str, parameters: tuple[Parameter, ...], layout: Layout, slots: Mapping[int, str]
) -> AccessDescriptor:
    kernel = Kernel(layout)
    if any(p.offset + p.size > layout.size for p in parameters):
        # Or parameters would pass for words of the driver's, and the kernel for one that touches nothing.
        log.info("Kernel %s may read and write anything it is given: its code does not say where that lies.", name)
        return anything(name, parameters)
    try:
        Walk(code, kernel, slots).run(name)
    except CannotFollowError as reason:
        log.info("Kernel %s may read and write anything it is given: %s.", name, reason)
        return anything(name, parameters)
    found = resolve(kernel, parameters, _declared(name, parameters))
    laid, more = fields(found, parameters, name)
    laid, indirect = with_tables(laid, found.tables, found.indirect | kernel.indirect | more)
    return AccessDescriptor(name, parameters, laid, indirect, Source.SASS)


def _declared(name: str, parameters: tuple[Parameter, ...]) -> dict[int, Access]:
    """What the kernel's name says may be done through each of its parameters that is a pointer."""
    try:
        found = names.describe(name, parameters)
    except SpecError:
        return {}
    return {field.offset: field.access for field in found.fields if field.kind == FieldKind.POINTER}


def anything(name: str, parameters: tuple[Parameter, ...]) -> AccessDescriptor:
    """The descriptor of a kernel whose code cannot be followed: it reads and writes whatever its arguments point to.

    That it goes on from there to memory that no argument names is possible, but rare, and whoever relies on the guess
    checks it. To wait for everything at each launch of such a kernel would stop the world.
    """
    both = Access.READ | Access.WRITE
    scans = tuple(Field(p.offset, p.size, both, FieldKind.SCAN) for p in parameters if p.size >= ADDRESS_BYTES)
    return AccessDescriptor(name, parameters, scans, Access.NONE, Source.SASS, guessed=True)


def _listing(image: bytes, kernels: Collection[str], slots: Mapping[int, str], tool: Path) -> Listing:
    """The kernels' code with that of the functions they call, as far as the cubin has it."""
    here = {symbol.name for symbol in cubin.symbols(image) if symbol.section.startswith(cubin.TEXT_PREFIX)}
    listing = parse(disassemble(image, kernels, tool))
    for _ in range(_ROUNDS):
        called = program(listing).unresolved
        if any(i.name == "CALL" and "ABS" in i.modifiers for s in listing.sections.values() for i in s.instructions):
            called |= set(slots.values())
        missing = (called & here) - listing.sections.keys()
        if not missing:
            break
        more = parse(disassemble(image, missing, tool))
        new = {name: section for name, section in more.sections.items() if name not in listing.sections}
        if not new:
            break
        listing.sections.update(new)
    return listing
