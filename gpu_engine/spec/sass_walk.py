"""A walk over a kernel's machine code, branches, loops and calls included, until nothing new is learnt.

Functions are walked anew for every place that they are called from: compilers keep helpers (division, for example) that
are called with pointers here and numbers there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.sass_memory import touch
from phos.gpu_engine.spec.sass_state import Kernel, State
from phos.gpu_engine.spec.sass_step import step
from phos.gpu_engine.spec.sass_text import UNREADABLE, Instruction, Kind, Listing
from phos.gpu_engine.spec.sass_value import LOADED_WORD, NOT_THE_PROGRAMS, UNKNOWN, Origin, Word

MAX_DEPTH = 16
"""Calls within calls. Deeper ones are taken for recursion."""

MAX_STEPS = 1_000_000
"""Instructions carried out on behalf of one kernel; about twenty seconds."""

_ENDS = frozenset(("EXIT", "KILL", "RET", "BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"))
_FORKS = frozenset(("WARPSYNC", "BSSY", "BSYNC", "BMOV", "CALL", "BPT", UNREADABLE))

# Functions of the driver that kernels call. They touch none of the application's buffers but those named in the text
# that they print; `malloc`'s memory belongs to the driver.
_HARMLESS = frozenset(("vprintf", "__assertfail", "malloc", "free", "__cuda_syscall_assertfail", "__nv_save_fatal_pc"))

# sm_120 has no multicast: copies into another block's shared memory are left to the driver. They read from the address
# in the third argument.
_BULK_COPY = "__cuda_syscall_cp_async_bulk"
_BULK_SOURCE = 6

_RESULTS = (4, 5)
"""Registers in which functions return (CUDA's calling convention)."""

_NEVER_RETURN = frozenset(("__assertfail", "__cuda_syscall_assertfail"))


class CannotFollowError(Exception):
    """The code goes where it cannot be followed; the sentence says why."""


@dataclass
class Program:
    """The instructions of all sections in one row."""

    instructions: list[Instruction] = field(default_factory=list)
    next_of: list[int] = field(default_factory=list)
    """The position that follows; -1 at the end of a section."""
    target_of: list[tuple[int, ...]] = field(default_factory=list)
    """Positions of the labels that each names."""
    names: dict[str, int] = field(default_factory=dict)
    """Where sections and functions begin."""
    section_of: list[str] = field(default_factory=list)
    functions: dict[str, list[int]] = field(default_factory=dict)
    """Per section, where the functions in it begin."""
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    """Position by section and address."""
    leaders: set[int] = field(default_factory=set)
    unresolved: set[str] = field(default_factory=set)
    """Labels that are nowhere: functions in sections that were not disassembled, or the driver's."""


def program(listing: Listing) -> Program:
    """Lay out a listing as one row of instructions."""
    result = Program()
    bases = {}
    for section in listing.sections.values():
        bases[section.name] = len(result.instructions)
        result.instructions += section.instructions
        for label, position in section.labels.items():
            if label == section.name or label in section.functions:
                result.names[label] = bases[section.name] + position
        result.names.setdefault(section.name, bases[section.name])
    for section in listing.sections.values():
        base, count = bases[section.name], len(section.instructions)
        result.functions[section.name] = [
            base + section.labels[name]
            for name in sorted(section.functions)
            if section.labels.get(name, count) < count and not name.startswith("$__internal")
        ]
        for position, instruction in enumerate(section.instructions):
            result.places[section.name, instruction.address] = base + position
            result.next_of.append(base + position + 1 if position + 1 < count else -1)
            result.section_of.append(section.name)
            targets = []
            branches = instruction.name in _ENDS or instruction.name in _FORKS
            for label in instruction.targets if branches else ():
                at = section.labels.get(label)
                at = base + at if at is not None and at < count else result.names.get(label)
                if at is None:
                    result.unresolved.add(label)
                elif instruction.name != "RET":
                    targets.append(at)
            result.target_of.append(tuple(targets))
            result.leaders.update(targets)
            if branches:
                result.leaders.add(base + position + 1)
    result.leaders.update(result.names.values())
    return result


Context = tuple[int, ...]
Node = tuple[Context, int]


class Walk:
    """The walk over one kernel."""

    def __init__(self, code: Program, kernel: Kernel, slots: Mapping[int, str]) -> None:
        """``slots``: which symbol's address stands at which offset of constant bank 4."""
        self.code = code
        self.kernel = kernel
        self.slots = slots
        self.states: dict[Node, State] = {}
        self.waiting: dict[Node, bool] = {}
        self.queue: list[tuple[int, int, Context]] = []
        self.steps = 0
        self.reconvergence: dict[tuple[str, str], frozenset[int]] = {}
        for position, instruction in enumerate(code.instructions):
            kernel.has_tensors |= instruction.name.startswith("UTMA")
            if instruction.name == "BSSY" and instruction.operands:
                key = code.section_of[position], instruction.operands[0].text
                known = self.reconvergence.get(key, frozenset())
                self.reconvergence[key] = known | frozenset(code.target_of[position])

    def run(self, name: str) -> None:
        """Walk from a kernel's first instruction.

        Raises:
            CannotFollowError: a call or branch to a place that is not known, or too much to do.
        """
        if name not in self.code.names:
            raise CannotFollowError("its code is not in the disassembly")
        self._reach(((), self.code.names[name]), State())
        shared = self.kernel.shared
        while True:
            while self.queue:
                # In the order of the code: a loop settles before what follows it is walked. Calls first.
                _, position, context = heapq.heappop(self.queue)
                if self.waiting.pop((context, position), False):
                    self._block((context, position))
            if self.kernel.shared == shared:
                return
            # Something new was put into shared memory: every load from there may see it.
            shared = self.kernel.shared
            for node in self.states:
                self._wait(node)

    def _reach(self, node: Node, state: State) -> None:
        known = self.states.get(node)
        if known is None:
            self.states[node] = state.copy()
            self._wait(node)
        elif known.merge(state):
            self._wait(node)

    def _wait(self, node: Node) -> None:
        if node not in self.waiting:
            context, position = node
            self.waiting[node] = True
            heapq.heappush(self.queue, (-len(context), position, context))

    def _block(self, node: Node) -> None:
        context, position = node
        code = self.code
        state = self.states[node].copy()
        instructions, leaders = code.instructions, code.leaders
        while position >= 0:
            instruction = instructions[position]
            self.steps += 1
            after = code.next_of[position]
            name = instruction.name
            if name in _ENDS or name in _FORKS:
                for following in self._follow(instruction, position, after, context, state):
                    self._reach(following, state)
                return
            step(instruction, state, self.kernel)
            if after in leaders:
                self._reach((context, after), state)
                return
            position = after
        if self.steps > MAX_STEPS:
            raise CannotFollowError(f"it needs more than {MAX_STEPS} steps")

    def _follow(
        self, instruction: Instruction, position: int, after: int, context: Context, state: State
    ) -> list[Node]:
        """Where execution goes from an instruction that may branch."""
        if self.steps > MAX_STEPS:
            raise CannotFollowError(f"it needs more than {MAX_STEPS} steps")
        name = instruction.name
        if name == UNREADABLE:
            raise CannotFollowError(f"at {instruction.address:#x} is an instruction that cannot be read")
        if instruction.never:
            return self._nodes(context, (after,))
        if name == "CALL":
            following = self._call(instruction, position, after, context, state)
            return following if instruction.always else following + self._nodes(context, (after,))
        if name in ("RET", "EXIT", "KILL") or (name == "BPT" and "TRAP" in instruction.modifiers):
            following = self._return(instruction, position, context, state) if name == "RET" else []
            return following if instruction.always else following + self._nodes(context, (after,))
        targets = self.code.target_of[position]
        if name in _ENDS:
            if not targets:
                targets = self._anywhere(instruction, position)
            conditional = not instruction.always or any(o.kind == Kind.PREDICATE for o in instruction.operands)
            # DIV and CONV: it depends on where the warp's other threads are. What else there is may depend on anything.
            certain = instruction.modifiers in ((), ("U",))
            return self._nodes(context, (*targets, after) if conditional or not certain else targets)
        if instruction.operands and name in ("BSSY", "BSYNC", "BMOV"):
            return self._nodes(context, self._converge(instruction, position, after, state))
        step(instruction, state, self.kernel)
        return self._nodes(context, (after, *targets))  # WARPSYNC may go elsewhere

    def _converge(
        self, instruction: Instruction, position: int, after: int, state: State
    ) -> tuple[int, ...] | frozenset[int]:
        """``BSSY B0, `(.L)`` names the place where ``BSYNC B0`` goes on; ``BMOV`` saves and restores such places."""
        barrier = instruction.operands[0].text
        if instruction.name == "BSSY":
            known = state.barriers.get(barrier, frozenset())
            places = frozenset(self.code.target_of[position])
            state.barriers[barrier] = places if instruction.always else places | known
        elif instruction.name == "BSYNC":
            places = state.barriers.get(barrier, frozenset())
            # Without the barrier's being set before, this is where nobody waits.
            return places if places and instruction.always else places | {after}
        elif barrier.startswith("B"):
            state.barriers[barrier] = self.reconvergence.get((self.code.section_of[position], barrier), frozenset())
        else:
            step(instruction, state, self.kernel)
        return (after,)

    @staticmethod
    def _nodes(context: Context, positions: Iterable[int]) -> list[Node]:
        return [(context, position) for position in positions if position >= 0]

    def _anywhere(self, instruction: Instruction, position: int) -> tuple[int, ...]:
        raise CannotFollowError(f"at {instruction.address:#x} it branches to a place that is not known")

    def _return(self, instruction: Instruction, position: int, context: Context, state: State) -> list[Node]:
        if not context:
            raise CannotFollowError(f"at {instruction.address:#x} it returns from where nothing was called")
        back = context[-1]
        if "REL" in instruction.modifiers and instruction.operands and instruction.operands[0].kind == Kind.REGISTER:
            # The register holds the address in the caller's section, mostly that after the call.
            word = state.read(instruction.operands[0].register)
            caller = self.code.section_of[back] if back >= 0 else ""
            place = self.code.places.get((caller, word.offset)) if word.exact else None
            if place is not None and place in self.code.leaders:
                back = place
        return self._nodes(context[:-1], (back,))

    def _call(self, instruction: Instruction, position: int, after: int, context: Context, state: State) -> list[Node]:
        targets = self.code.target_of[position]
        register = next((o.register for o in instruction.operands if o.kind == Kind.REGISTER), -1)
        if register >= 0:
            targets, outside = self._through(instruction, position, state.read(register))
        elif targets and all(label.startswith(".L") for label in instruction.targets):
            # For sm_80 the assembler leaves nested loops by "calling" a place in the same function; nothing returns.
            # Where a register holds the address after the call, it is a function that has no name.
            if len(context) < MAX_DEPTH and self._comes_back(after, state):
                context = (*context, after)
            return self._nodes(context, targets)
        else:
            outside = set() if targets else set(instruction.targets) or {"?"}
        for symbol in outside:
            if symbol.startswith(_BULK_COPY) and "reduce" not in symbol:
                source = state.read(_BULK_SOURCE), state.read(_BULK_SOURCE + 1)
                touch(self.kernel, Access.READ, source, "tensor" in symbol)
                self.kernel.store_shared(LOADED_WORD)
            elif symbol not in _HARMLESS:
                raise CannotFollowError(f"at {instruction.address:#x} it calls {symbol}, which cannot be seen")
        following: list[Node] = []
        if targets:
            if len(context) >= MAX_DEPTH:
                raise CannotFollowError(f"at {instruction.address:#x} calls are nested more than {MAX_DEPTH} deep")
            following += self._nodes((*context, after), targets)
        if outside - _NEVER_RETURN:
            heap = NOT_THE_PROGRAMS if "malloc" in outside else UNKNOWN
            for result in _RESULTS:
                state.registers[result] = heap
            state.guarded.clear()  # it may have changed predicates
            state.tests.clear()
            state.comparisons.clear()
            following += self._nodes(context, (after,))
        return following

    def _comes_back(self, after: int, state: State) -> bool:
        if after < 0:
            return False
        address = self.code.instructions[after].address
        return any(word.exact and word.offset == address for word in state.registers.values())

    def _through(self, instruction: Instruction, position: int, word: Word) -> tuple[tuple[int, ...], set[str]]:
        """The functions that a register may point to: positions, and names of those that are not here."""
        targets: set[int] = set()
        outside: set[str] = set()
        places = {atom.place for atom in word.atoms if atom.origin == Origin.VARIABLE}
        if places and -1 not in places and all(place in self.slots for place in places):
            for symbol in (self.slots[place] for place in places):
                if symbol in self.code.names:
                    targets.add(self.code.names[symbol])
                else:
                    outside.add(symbol)
            return tuple(targets), outside
        # A pointer from a table. Within a section all functions that are called so are in the same section.
        candidates = self.code.functions.get(self.code.section_of[position], [])
        if "REL" not in instruction.modifiers or not candidates:
            raise CannotFollowError(f"at {instruction.address:#x} it calls through a pointer")
        return tuple(candidates), outside
