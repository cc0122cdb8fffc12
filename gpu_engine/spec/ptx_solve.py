"""The fixpoint: what every register of a kernel and of the functions it calls may hold, and what is done with it.

Flow-insensitive: the steps are run, in the text's order, until nothing changes. (PTX comes from compilers in static
single assignment form, so little is lost.) A function is analysed once for each place that calls it, and for all
recursive or very many calls together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_objects import POINTER_BYTES, Object, everything
from phos.gpu_engine.spec.ptx_steps import (
    Add,
    Call,
    Code,
    Combine,
    Declared,
    Fill,
    Formal,
    Indirect,
    Kind,
    Load,
    MadeMap,
    Mix,
    Move,
    MultiplyAdd,
    Narrow,
    Pack,
    Raise,
    Scramble,
    Space,
    Store,
    Strengthen,
    Subtract,
    Tensor,
    Touch,
)
from phos.gpu_engine.spec.ptx_values import (
    DISTANCE,
    EMPTY,
    LASTING,
    LOADED,
    MINUS,
    OFFSET,
    POINTER,
    RAISED,
    STRONG,
    WEAK,
    Anywhere,
    Atom,
    Bytes,
    Loaded,
    Place,
    Raised,
    Value,
    assembled,
    combined,
    completed,
    computed,
    demoted,
    join,
    moved,
    narrowed,
    negated,
    runs,
    strong,
    union,
)

READ, WRITE = Access.READ, Access.WRITE
BOTH = READ | WRITE

HARMLESS = frozenset(("vprintf", "__assertfail", "free", "malloc"))
"""Functions of the driver that touch none of the application's allocations."""

MAXIMUM_INSTANCES = 500
MAXIMUM_ROUNDS = 60
MAXIMUM_DEPTH = 40
"""Calls followed at once; deeper ones wait for the next round."""


class TooHard(Exception):
    """The analysis does not come to an end within our limits."""


def _strengthened(value: Value) -> Iterator[tuple[Atom, int]]:
    """What the program says is an address. If it was computed in a way not followed here, it may be any."""
    known = any(role & POINTER for role in value.values())
    for atom, role in value.items():
        whole = isinstance(atom, Bytes) and atom.size >= POINTER_BYTES
        if role & POINTER or (whole and not known):
            yield atom, STRONG | role & MINUS
        else:
            yield atom, role
    if value and not known:
        yield LOADED, STRONG


def _in_table(atom: Atom) -> bool:
    return isinstance(atom, Loaded) and atom.table is not None


def _short(value: Value) -> set[Atom]:
    """Of what may be a pointer as a whole, that of which fewer bits are left: distances are computed in 32, too."""
    return {atom for atom, role in value.items() if role == OFFSET and isinstance(atom, Bytes) and atom.size >= 8}


class Instance:
    """A function as one place calls it."""

    def __init__(self, code: Code, objects: list[int]) -> None:
        self.code = code
        self.objects = objects
        self.registers: list[Value] = [{} for _ in range(code.registers)]
        self.variables: dict[int, int] = {}
        """Objects of calls' parameter variables, by the register that stands for the address."""
        for register, number, offset in code.addresses:
            self.registers[register][Place(objects[number], offset)] = STRONG
            if offset == 0 and code.objects[number].kind is Kind.LOCAL:
                self.variables[register] = objects[number]
        self.fresh = True


class Solver:
    """The analysis of one kernel. ``codes``: the module's functions; ``taken``: those whose address is taken."""

    def __init__(self, kernel: str, codes: dict[str, Code], taken: frozenset[str], *, closed: bool) -> None:
        self._codes = codes
        self._taken = taken
        self._closed = closed
        self._objects: list[Object] = [Object(Declared(Kind.SHARED, "all shared memory"))]
        self._heap = self._new(Declared(Kind.VARIABLE, "heap"))
        self._shared_names: dict[tuple[Kind, str], int] = {}
        self._instances: dict[tuple[str, str, int], Instance] = {}
        self._active: set[int] = set()
        self._changed = False
        self._escaped: Value = {}
        self._unknown_called = False
        self._made_maps: set[Atom] = set()
        """What names memory that this kernel puts tensor maps into."""
        self._puts_addresses = False
        """Into those, so that it is known what they lead to."""
        self._through_memory: dict[Atom, Access] = {}
        """Access through tensor maps in memory, by what names that memory."""
        self._pointers: set[Atom] = set()
        """Eight bytes of parameters that were used as an address somewhere."""
        self.touched: dict[Atom, Access] = {}
        self.tensors: dict[tuple[int, int | None], Access] = {}
        """Access by (object, offset) of tensor maps among the parameters."""
        self.tables: dict[int, Access] = {}
        """Access through addresses in the memory that the eight bytes at this place of the parameter block name."""
        self.indirect = Access.NONE
        self._kernel = self._instance(codes[kernel], "", 0)

    def run(self) -> None:
        """Find the fixpoint. Raises TooHard."""
        for _ in range(MAXIMUM_ROUNDS):
            self._changed = False
            for instance in list(self._instances.values()):
                self._run(instance)
            if not self._changed:
                break
        else:
            raise TooHard
        for atom, access in self._through_memory.items():
            if not self._puts_addresses or atom not in self._made_maps:
                self.indirect |= access  # somebody else's, which names memory that nothing here knows
        if self._unknown_called:
            for atom, role in self._escaped.items():
                if role & POINTER:
                    self._record_atom(atom, BOTH)

    def declared(self, number: int) -> Declared:
        """What an object is."""
        return self._objects[number].declared

    def _new(self, declared: Declared) -> int:
        self._objects.append(Object(declared))
        return len(self._objects) - 1

    def _object(self, declared: Declared) -> int:
        """The number of an object. Shared memory is one; a variable or function is one; the rest is an instance's."""
        if declared.kind is Kind.SHARED:
            return 0
        if declared.kind in (Kind.VARIABLE, Kind.FUNCTION):
            key = (declared.kind, declared.name)
            if key not in self._shared_names:
                self._shared_names[key] = self._new(declared)
            return self._shared_names[key]
        return self._new(declared)

    def _instance(self, code: Code, caller: str, site: int) -> Instance:
        key = (code.name, caller, site)
        if key not in self._instances and len(self._instances) >= MAXIMUM_INSTANCES:
            key = (code.name, "", 0)
        if key not in self._instances:
            self._instances[key] = Instance(code, [self._object(declared) for declared in code.objects])
            self._changed = True
        return self._instances[key]

    # Values

    def _join(self, target: Value, atoms: Iterable[tuple[Atom, int]]) -> None:
        for atom, role in list(atoms):
            self._changed |= join(target, atom, role)

    def _set(self, instance: Instance, register: int, atoms: Iterable[tuple[Atom, int]]) -> None:
        if register:
            self._join(instance.registers[register], atoms)

    def _record_atom(self, atom: Atom, access: Access) -> None:
        if isinstance(atom, Loaded):
            if atom.table is None:
                self.indirect |= access
            else:
                self.tables[atom.table] = self.tables.get(atom.table, Access.NONE) | access
        elif not isinstance(atom, Place) and access & ~self.touched.get(atom, Access.NONE):
            self.touched[atom] = self.touched.get(atom, Access.NONE) | access
            self._certain(atom)

    def _certain(self, atom: Atom) -> None:
        if isinstance(atom, Bytes) and atom not in self._pointers:
            self._pointers.add(atom)
            self._changed = True

    def _pointed(self, value: Value) -> list[Atom]:
        """What an address may point into: its best atoms."""
        best = [atom for atom, role in value.items() if role & POINTER]
        if best:
            return best
        pieces = [atom for atom in value if isinstance(atom, Bytes)]
        rest: list[Atom] = [atom for atom in value if not isinstance(atom, Bytes | Raised | Loaded)]
        whole = [run for run in runs(pieces) if run.size >= POINTER_BYTES]
        rest += [run if run.size == POINTER_BYTES else Anywhere(*run) for run in whole]
        if not any(isinstance(atom, Place) for atom in rest) or any(isinstance(atom, Loaded) for atom in value):
            rest.append(LOADED)  # it was computed in a way not followed here: what an argument holds is no address then
        return rest

    def _access(self, value: Value, access: Access, space: Space) -> list[Atom]:
        """Record an access; gives the atoms whose memory it reaches."""
        if space is Space.SHARED:
            return [Place(0, None)]
        if space in (Space.LOCAL, Space.PARAM):
            places: list[Atom] = [atom for atom in value if isinstance(atom, Place)]
            wanted = Kind.LOCAL if space is Space.LOCAL else Kind.PARAMETER
            everywhere = [Place(i, None) for i, thing in enumerate(self._objects) if thing.declared.kind is wanted]
            return places or list[Atom](everywhere)
        atoms = self._pointed(value)
        for atom in atoms:
            self._record_atom(atom, access)
        return atoms

    def _read(self, atoms: list[Atom], number: int, size: int) -> Value:
        result: Value = {}
        for atom in atoms:
            if isinstance(atom, Place):
                offset = None if atom.offset is None else atom.offset + number
                sure = len(atoms) == 1
                for found, role in self._objects[atom.object].load(offset, size, sure=sure):
                    join(result, found, role)
            else:
                table = None
                if isinstance(atom, Bytes) and atom.size == POINTER_BYTES and atom.offset % POINTER_BYTES == 0:
                    table = atom.offset
                join(result, Loaded(table), WEAK if size >= POINTER_BYTES else OFFSET)
        return result

    def _write(self, atoms: list[Atom], number: int, size: int, value: Value) -> None:
        if not value:
            return
        for atom in atoms:
            followed = False
            if isinstance(atom, Place):
                offset = None if atom.offset is None else atom.offset + number
                thing = self._objects[atom.object]
                self._changed |= thing.store(offset, size, value)
                followed = thing.declared.kind in (Kind.LOCAL, Kind.SHARED)
            if not followed:
                union(self._escaped, value)

    # Steps

    def _run(self, instance: Instance) -> None:
        if id(instance) in self._active:
            return
        self._active.add(id(instance))
        instance.fresh = False
        values = instance.registers
        for step in instance.code.steps:
            if isinstance(step, Add):
                self._add(instance, step)
            elif isinstance(step, Load):
                atoms = self._access(values[step.address], READ, step.space)
                for i, target in enumerate(step.targets):
                    if target:
                        self._set(instance, target, self._read(atoms, step.number + i * step.size, step.size).items())
            elif isinstance(step, Store):
                atoms = self._access(values[step.address], step.access, step.space)
                for i, source in enumerate(step.sources):
                    self._write(atoms, step.number + i * step.size, step.size, values[source])
            elif isinstance(step, Move):
                for source in step.sources:
                    self._set(instance, step.target, moved(values[source], step.distance))
            elif isinstance(step, Mix):
                for source in step.sources:
                    self._set(instance, step.target, computed(values[source]))
            elif isinstance(step, MultiplyAdd):
                for source in step.factors:
                    self._set(instance, step.target, computed(values[source]))
                    if RAISED in values[step.addend]:
                        factor = dict(computed(values[source]))
                        self._set(instance, step.target, completed([factor, values[step.addend]]))
                self._set(instance, step.target, moved(values[step.addend], None))
            elif isinstance(step, Narrow):
                self._set(instance, step.target, narrowed(values[step.source]))
            elif isinstance(step, Strengthen):
                strong = list(_strengthened(values[step.source]))
                self._set(instance, step.target, strong)
                for atom, role in strong:
                    if role & STRONG == STRONG:
                        self._certain(atom)
            elif isinstance(step, Pack):
                self._set(instance, step.target, assembled([values[source] for source in step.sources]))
            elif isinstance(step, Combine):
                self._set(instance, step.target, combined([values[source] for source in step.sources]))
            elif isinstance(step, Scramble):
                self._scramble(instance, step)
            elif isinstance(step, Raise):
                if values[step.source]:
                    self._set(instance, step.target, [*computed(values[step.source]), (RAISED, OFFSET)])
            elif isinstance(step, Subtract):
                self._subtract(instance, step)
            elif isinstance(step, Call):
                self._call(instance, step)
            elif isinstance(step, Touch):
                self._access(values[step.address], step.access, step.space)
            elif isinstance(step, Tensor):
                self._tensor(values[step.address], step)
            elif isinstance(step, MadeMap):
                self._puts_addresses |= step.target != 0
                self._made_maps.update(atom for atom in self._pointed(values[step.address]) if isinstance(atom, Bytes))
            elif isinstance(step, Fill):
                self._changed |= self._objects[0].store(None, POINTER_BYTES, {LOADED: WEAK})
            elif isinstance(step, Indirect):
                self.indirect |= step.access
        self._active.discard(id(instance))

    def _add(self, instance: Instance, step: Add) -> None:
        left, right = instance.registers[step.left], instance.registers[step.right]
        if not right:
            self._set(instance, step.target, moved(left, step.number))
            return
        self._set(instance, step.target, moved(dict(demoted(left, right)), None))
        self._set(instance, step.target, moved(dict(demoted(right, left)), None))
        if RAISED in left or RAISED in right:
            self._set(instance, step.target, completed([left, right]))

    def _subtract(self, instance: Instance, step: Subtract) -> None:
        left, right = instance.registers[step.left], instance.registers[step.right]
        if not right:
            self._set(instance, step.target, moved(left, None if step.number is None else -step.number))
            return
        if _short(left) and _short(right) and not self._pointers.isdisjoint(_short(left) | _short(right)):
            left, right = ({a: r | WEAK if a in _short(v) else r for a, r in v.items()} for v in (left, right))
        # The distance of two pointers, added to the second, is the first again, and subtracted from the first, it is
        # the second: neither must pass for an index.
        kept = list(moved(dict(left), None))
        if strong(right) or any(role & POINTER and atom in self._pointers for atom, role in right.items()):
            kept = [(atom, role & LASTING | (DISTANCE if role & POINTER else OFFSET)) for atom, role in kept]
        elif strong(left) and any(role & WEAK for role in right.values()):
            kept = [(atom, role | (STRONG if role & POINTER else OFFSET)) for atom, role in kept]
        self._set(instance, step.target, kept)
        self._set(instance, step.target, negated(right))
        # Two arguments that nothing says are pointers may be all the same: neither is used but in their distance.
        if any(role & POINTER and isinstance(atom, Bytes) for atom, role in right.items()):
            both = [(atom, DISTANCE) for atom, role in left.items() if role & POINTER and isinstance(atom, Bytes)]
            self._set(instance, step.target, both)

    def _scramble(self, instance: Instance, step: Scramble) -> None:
        values = [instance.registers[source] for source in step.sources]
        if step.whole:
            whole = all(any(role & POINTER for role in value.values()) for value in values)
            if whole or any(role & POINTER and _in_table(atom) for value in values for atom, role in value.items()):
                self._set(instance, step.target, [(LOADED, WEAK)])
        elif any(isinstance(atom, Bytes) and atom.size < POINTER_BYTES for value in values for atom in value):
            self._set(instance, step.target, [(LOADED, OFFSET)])

    def _tensor(self, value: Value, step: Tensor) -> None:
        for atom in self._pointed(value):
            if isinstance(atom, Place) and self.declared(atom.object).kind is Kind.PARAMETER:
                key = (atom.object, None if atom.offset is None else atom.offset + step.number)
                self.tensors[key] = self.tensors.get(key, Access.NONE) | step.access
            else:
                self._record_atom(atom, READ)
                self._through_memory[atom] = self._through_memory.get(atom, Access.NONE) | step.access

    # Calls

    def _call(self, instance: Instance, call: Call) -> None:
        targets = self._targets(instance, call)
        for name in targets:
            code = self._codes.get(name)
            if code is not None:
                self._enter(instance, call, code)
            elif name not in HARMLESS:
                self._unknown(instance, call)
            elif name == "malloc":
                for result in call.results:
                    self._give(instance, result, {Place(self._heap, None): STRONG})

    def _targets(self, instance: Instance, call: Call) -> list[str]:
        if call.among is not None:
            return list(call.among)
        if call.name:
            return [call.name]
        names = set()
        known = True
        value = instance.registers[call.register]
        for atom in value:
            if isinstance(atom, Place) and self.declared(atom.object).kind is Kind.FUNCTION:
                names.add(self.declared(atom.object).name)
            else:
                known = False
        if not known or not names:
            # A pointer from memory: any function of this module whose address was ever taken, if there are no others.
            names |= self._taken
            if not self._closed or not self._taken:
                names.add("")
        return sorted(names)

    def _enter(self, instance: Instance, call: Call, code: Code) -> None:
        callee = self._instance(code, instance.code.name, call.site)
        before = self._changed
        self._changed = False
        for register, formal in zip(call.arguments, code.parameters, strict=False):
            self._copy(instance, register, callee, formal)
        news = self._changed or callee.fresh
        self._changed = self._changed or before
        if news and len(self._active) < MAXIMUM_DEPTH:
            self._run(callee)
        for register, formal in zip(call.results, code.results, strict=False):
            if formal.object is None:
                self._give(instance, register, callee.registers[formal.register])
                continue
            held = self._objects[callee.objects[formal.object]]
            place = instance.variables.get(register)
            if place is None:
                self._set(instance, register, list(held.load(0, POINTER_BYTES)))
            else:
                self._copy_object(held, self._objects[place])

    def _copy(self, instance: Instance, register: int, callee: Instance, formal: Formal) -> None:
        """Hand over one argument: a parameter variable's contents, or a register's value."""
        value = instance.registers[register]
        if formal.object is None:
            self._join(callee.registers[formal.register], list(value.items()))
            return
        target = self._objects[callee.objects[formal.object]]
        place = instance.variables.get(register)
        if place is None:
            # A register may hold addresses of things, which are handed over as they are.
            self._changed |= target.store(0, POINTER_BYTES, value)
        else:
            self._copy_object(self._objects[place], target)

    def _copy_object(self, source: Object, target: Object) -> None:
        for (offset, size), value in list(source.cells.items()):
            self._changed |= target.store(offset, size, value)
        self._changed |= target.store(None, POINTER_BYTES, source.scattered)

    def _give(self, instance: Instance, register: int, value: Value) -> None:
        """A result of a call."""
        place = instance.variables.get(register)
        if place is None:
            self._set(instance, register, list(value.items()))
        else:
            self._changed |= self._objects[place].store(0, POINTER_BYTES, value)

    def _unknown(self, instance: Instance, call: Call) -> None:
        """A function that nothing is known of: it reads and writes through whatever it can reach."""
        self._unknown_called = True
        self.indirect |= BOTH
        for argument in call.arguments:
            for value in everything(self._objects, instance.registers[argument]):
                for atom, role in list(value.items()):
                    if role & POINTER:
                        self._record_atom(atom, BOTH)
            for atom in instance.registers[argument] or EMPTY:
                if isinstance(atom, Place) and self.declared(atom.object).kind is Kind.LOCAL:
                    self._changed |= self._objects[atom.object].store(None, POINTER_BYTES, {LOADED: WEAK})
        for result in call.results:
            self._give(instance, result, {LOADED: WEAK})
