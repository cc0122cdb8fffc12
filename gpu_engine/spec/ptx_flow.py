"""Access descriptors from PTX: which parameters of a kernel reach a load, a store, an atomic (DESIGN §5).

The text is parsed (ptx_instrument), each function becomes a list of steps (ptx_compile, ptx_memory), and for each
kernel a fixpoint says what its registers may hold (ptx_solve, ptx_objects, ptx_values). What is not understood is
answered with too much rather than too little; it is a guess all the same, for one reason above all: integers that a
program turns into pointers by arithmetic of its own.

Source of what instructions do: NVIDIA, "PTX ISA" 9.0, "Instruction Set" and "Abstracting the ABI".
"""

from __future__ import annotations

from collections.abc import Callable

from phos.gpu_engine.ptx_instrument.parser import parse
from phos.gpu_engine.ptx_instrument.statements import Directive, Function, Module, Variable
from phos.gpu_engine.spec.descriptor import (
    ADDRESS_BYTES,
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    Access,
    AccessDescriptor,
    Field,
    FieldKind,
    Parameter,
    Source,
    with_tables,
)
from phos.gpu_engine.spec.ptx_compile import Compiler
from phos.gpu_engine.spec.ptx_solve import HARMLESS, Instance, Solver, TooHard
from phos.gpu_engine.spec.ptx_steps import Code, Declared, Kind
from phos.gpu_engine.spec.ptx_values import Anywhere, Bytes

BOTH = Access.READ | Access.WRITE
SAME_EVERYWHERE = 16
"""How far a parameter that is aligned to more bytes lies behind the one before it depends on the GPU (ptx_layout)."""


Check = Callable[[], None]
"""Called again and again during long work; what it raises ends the work."""


def describe(text: str) -> dict[str, AccessDescriptor]:
    """The descriptor of every kernel in a PTX text, by the kernel's name. Raises PtxError if it cannot be read."""
    kernels = Kernels(text, _go_on)
    return {name: kernels.describe(name, _go_on) for name in kernels.names}


def _go_on() -> None:
    pass


class Kernels:
    """The kernels of a PTX text, of which each is described by itself."""

    def __init__(self, text: str, check: Check) -> None:
        """Read the text, all of it: what calls through pointers lead to may be anywhere. Raises PtxError."""
        module = parse(text, check)
        bodies = {function.name: function for function in module.functions if function.body is not None}
        globals_, externals = _globals(module)
        self._layouts = {name: _layout(function) for name, function in bodies.items()}
        self._codes: dict[str, Code] = {}
        taken: set[str] = _named_by_variables(module, globals_)
        for name, function in bodies.items():
            check()
            compiler = Compiler(function, self._layouts[name], globals_)
            self._codes[name] = compiler.compile()
            taken |= compiler.functions_named
        for alias, target in _aliases(module):
            if target in self._codes:
                self._codes.setdefault(alias, self._codes[target])
        self.names = [name for name, function in bodies.items() if function.kernel]
        device = self._codes.keys() - set(self.names)
        self._taken = frozenset(name for name in taken if name in device)
        self._closed = not externals - HARMLESS

    def describe(self, name: str, check: Check) -> AccessDescriptor:
        """The descriptor of one of them."""
        layout = self._layouts[name]
        parameters = tuple(Parameter(declared.offset, declared.size) for declared in layout)
        solver = _Solver(name, self._codes, self._taken, closed=self._closed)
        solver.check = check
        try:
            solver.run()
        except TooHard:
            scans = [Field(p.offset, p.size, BOTH, FieldKind.SCAN) for p in parameters if p.size >= ADDRESS_BYTES]
            return AccessDescriptor(name, parameters, tuple(scans), BOTH, Source.PTX)
        maps, elsewhere = _tensor_maps(solver)
        found = _fields(solver)
        for field in found:
            if field.kind is FieldKind.SCAN and any(_packed(declared, field) for declared in layout):
                elsewhere |= field.access
        fields, indirect = with_tables([*found, *maps], solver.tables, solver.indirect | elsewhere)
        return AccessDescriptor(name, parameters, fields, indirect, Source.PTX)


class _Solver(Solver):
    """Asks before each function whether to go on."""

    check: Check = staticmethod(_go_on)

    def _run(self, instance: Instance) -> None:
        self.check()
        super()._run(instance)


def _globals(module: Module) -> tuple[dict[str, Declared], frozenset[str]]:
    """What the module's names stand for, and the functions that it lacks."""
    found: dict[str, Declared] = {}
    kinds = {".shared": Kind.SHARED, ".local": Kind.LOCAL}
    defined: set[str] = set()
    declared: set[str] = set()
    for item in module.items:
        if isinstance(item, Function):
            found[item.name] = Declared(Kind.FUNCTION, item.name)
            (declared if item.body is None else defined).add(item.name)
        elif isinstance(item, Variable) and item.space != ".reg":
            for declarator in item.declarators:
                found[declarator.name] = Declared(kinds.get(item.space, Kind.VARIABLE), declarator.name)
    for alias, _ in _aliases(module):
        found[alias] = Declared(Kind.FUNCTION, alias)
        defined.add(alias)
    return found, frozenset(declared - defined)


def _aliases(module: Module) -> list[tuple[str, str]]:
    """``.alias a, b;``: a is another name of b."""
    directives = [item for item in module.items if isinstance(item, Directive) and item.name == ".alias"]
    return [(item.arguments[0], item.arguments[-1]) for item in directives if item.arguments]


def _named_by_variables(module: Module, globals_: dict[str, Declared]) -> set[str]:
    """Functions whose addresses are in the module's variables: tables of virtual functions, and such."""
    tokens = {
        token for variable in module.variables for declarator in variable.declarators for token in declarator.initial
    }
    return {token for token in tokens if token in globals_ and globals_[token].kind is Kind.FUNCTION}


def _layout(function: Function) -> list[Declared]:
    """Where a kernel's parameters lie: each at the next multiple of its alignment."""
    result: list[Declared] = []
    parts: list[list[int]] = []
    offset = 0
    for variable in function.parameters:
        declarator = variable.declarators[0]
        # Beside `.ptr`, `.align` is what the pointer points to.
        alignment = variable.element_bytes if variable.pointer else variable.natural_alignment
        offset = -(-offset // alignment) * alignment
        if not parts or alignment > SAME_EVERYWHERE:
            parts.append([])
        parts[-1].append(len(result))
        size = variable.bytes(declarator)
        result.append(Declared(Kind.PARAMETER, declarator.name, offset, size, variable.pointer, alignment=alignment))
        offset += size
    for part in parts:
        around = result[part[0]].offset, result[part[-1]].offset + result[part[-1]].size
        for number in part:
            result[number] = result[number]._replace(around=around)
    return result


def _fields(solver: Solver) -> list[Field]:
    """What was found, as fields: a pointer inside a scanned range that does no less is left out."""
    scans: dict[tuple[int, int], Access] = {}
    pointers: dict[int, Access] = {}
    for atom, access in solver.touched.items():
        if isinstance(atom, Bytes) and atom.size == ADDRESS_BYTES:
            pointers[atom.offset] = pointers.get(atom.offset, Access.NONE) | access
        elif isinstance(atom, Bytes | Anywhere):
            # Pointers are taken to lie on multiples of their size, as compilers lay them out.
            first = -(-atom[0] // ADDRESS_BYTES) * ADDRESS_BYTES
            size = (atom[0] + atom[1]) // ADDRESS_BYTES * ADDRESS_BYTES - first
            if size == ADDRESS_BYTES:
                pointers[first] = pointers.get(first, Access.NONE) | access
            elif size > 0:
                scans[first, size] = scans.get((first, size), Access.NONE) | access
            else:
                pointers[atom[0]] = pointers.get(atom[0], Access.NONE) | access
    fields = [Field(first, size, access, FieldKind.SCAN) for (first, size), access in scans.items()]
    for offset, access in pointers.items():
        covered = [f for f in fields if f.offset <= offset and offset + ADDRESS_BYTES <= f.offset + f.size]
        if offset % ADDRESS_BYTES or not any(access & ~f.access == Access.NONE for f in covered):
            fields.append(Field(offset, ADDRESS_BYTES, access, FieldKind.POINTER))
    return fields


def _packed(declared: Declared, field: Field) -> bool:
    """Whether a scanned range is of a parameter whose addresses need not lie on multiples of their size."""
    inside = declared.offset < field.offset + field.size and field.offset < declared.offset + declared.size
    return inside and declared.size >= ADDRESS_BYTES and declared.alignment < ADDRESS_BYTES


def _tensor_maps(solver: Solver) -> tuple[list[Field], Access]:
    """Tensor maps among the parameters, and what is done through others.

    Where the index is computed, every place that could be one. A place outside of the parameter that is named lies in
    another one; but one of several is only where a loop over the maps would lead to if it did not end.
    """
    found: dict[int, Access] = {}
    elsewhere = Access.NONE
    for (number, at), access in solver.tensors.items():
        declared = solver.declared(number)
        offsets = [at] if at is not None else []
        if at is None:
            step = TENSOR_MAP_ALIGNMENT if declared.size % TENSOR_MAP_BYTES else TENSOR_MAP_BYTES
            offsets = list(range(0, declared.size - TENSOR_MAP_BYTES + 1, step))
            elsewhere |= access if not offsets else Access.NONE
        for offset in offsets:
            if 0 <= offset <= declared.size - TENSOR_MAP_BYTES:
                place = declared.offset + offset
                found[place] = found.get(place, Access.NONE) | access
            elif sum(other == number for other, _ in solver.tensors) == 1:
                place = declared.offset + offset
                if declared.around[0] <= place and place + TENSOR_MAP_BYTES <= declared.around[1]:
                    found[place] = found.get(place, Access.NONE) | access
                else:
                    elsewhere |= access
    maps = [Field(place, TENSOR_MAP_BYTES, access, FieldKind.TENSOR_MAP) for place, access in found.items()]
    return maps, elsewhere
