"""What a function does that its twin must know of: accesses, calls, module variables; or why it can have no twin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from phos.gpu_engine.ptx_instrument.operands import Address, Group, Name, Operand, names
from phos.gpu_engine.ptx_instrument.statements import (
    Block,
    Directive,
    Function,
    Instruction,
    Module,
    Statement,
    Variable,
)
from phos.gpu_engine.ptx_instrument.twin_access import Reach, Unsuited, reaches
from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_solve import HARMLESS


@dataclass
class Survey:
    """One function."""

    function: Function
    reaches: list[tuple[Instruction, Reach]] = field(default_factory=list)
    calls: list[tuple[Instruction, str]] = field(default_factory=list)
    """Direct calls of functions of the module."""
    named: list[Instruction] = field(default_factory=list)
    """Instructions that name a module variable."""
    variables: set[str] = field(default_factory=set)
    constants: list[Instruction] = field(default_factory=list)
    """Instructions on the module's constant memory."""
    callees: set[str] = field(default_factory=set)
    unsuited: str = ""


class Names:
    """The names of a module."""

    def __init__(self, module: Module) -> None:
        self.variables = {
            declarator.name: item
            for item in module.variables
            if item.space in (".global", ".const")
            for declarator in item.declarators
        }
        self.numbered = _numbered(self.variables)
        self.functions = {function.name for function in module.functions}
        self.defined = {function.name for function in module.functions if function.body is not None}
        self.aliases = {
            item.arguments[0]
            for item in module.items
            if isinstance(item, Directive) and item.name == ".alias" and item.arguments
        }

    def own(self, name: str) -> bool:
        """Is this variable the compiler's, so that a twin may have its own copy? Nobody else writes to it."""
        initial = any(d.initial for d in self.variables[name].declarators if d.name == name)
        return initial and name.startswith(("__cudart_", "__unnamed_", "$str"))

    def opaque(self, name: str) -> bool:
        """Is it a texture, a sampler or a surface?"""
        return self.variables[name].type in (".texref", ".samplerref", ".surfref")


def _numbered(names_: Iterable[str]) -> set[str]:
    """The declarations, as in ``%r<5>``, that names like these could be from."""
    stems = ((name, name.rstrip("0123456789")) for name in names_)
    return {f"{stem}<" for name, stem in stems if stem != name}


def statements(function: Function) -> Iterator[Statement]:
    """All statements of a function, those of inner blocks too, in the text's order."""
    stack: list[Statement] = [function.body] if function.body is not None else []
    while stack:
        now = stack.pop()
        if isinstance(now, Block):
            stack += reversed(now.statements)
        else:
            yield now


def survey(function: Function, known: Names, reads: bool) -> Survey:
    """Look through a function. ``reads``: do loads count as well as stores?"""
    found = Survey(function)
    local: set[str] = set()
    registers: set[str] = set()
    try:
        for variable in (*function.parameters, *function.results):
            # A function's parameters may be registers, and then hold addresses.
            kept = registers if variable.space == ".reg" else local
            kept.update(declarator.name for declarator in variable.declarators)
        for statement in statements(function):
            if isinstance(statement, Variable):
                names_ = {declarator.name for declarator in statement.declarators}
                if names_ & (known.variables.keys() | known.functions):
                    raise Unsuited("it declares names of the module's again")
                if statement.space == ".reg":
                    registers.update(d.name if d.count is None else f"{d.name}<" for d in statement.declarators)
                else:
                    local |= names_
            elif isinstance(statement, Instruction):
                _instruction(found, statement, known, local, reads)
        # Blocks have names of their own, and an address in a register may be named like a variable elsewhere.
        if registers & (local | _numbered(local) | known.numbered):
            raise Unsuited("it has registers and variables of the same name")
    except Unsuited as why:
        found.unsuited = str(why)
    return found


def _instruction(found: Survey, instruction: Instruction, known: Names, local: set[str], reads: bool) -> None:
    operands = instruction.operands
    base, *words = instruction.opcode.split(".")
    if base == "call":
        operands = _call(found, instruction, known)
    named = {name.text for operand in operands for name in names(operand)}
    if used := named & known.variables.keys():
        if any(known.opaque(name) for name in used):
            raise Unsuited("it uses textures or surfaces")
        if any(not known.own(name) for name in used):
            found.named.append(instruction)
            found.variables |= {name for name in used if not known.own(name)}
    if "const" in words:
        found.constants.append(instruction)
    for reach in reaches(instruction) if base != "call" else ():
        if not reads and not reach.access & Access.WRITE:
            continue
        if reach.address.text in known.variables or reach.address.text in local:
            continue  # the driver saves modules' variables; the rest is a thread's own
        found.reaches.append((instruction, reach))


def _call(found: Survey, instruction: Instruction, known: Names) -> tuple[Operand, ...]:
    """The operands of a call without the function. Raises Unsuited for one that may reach anything."""
    operands = instruction.operands
    at = 1 if operands and isinstance(operands[0], Group) else 0
    target = operands[at] if at < len(operands) else None
    if not isinstance(target, Name) or target.offset or len(operands) > at + 2:
        raise Unsuited("it calls functions by address")
    if target.text in known.aliases:
        raise Unsuited("it calls a function by another name")
    if target.text in known.defined:
        found.calls.append((instruction, target.text))
        found.callees.add(target.text)
    elif target.text in HARMLESS:
        found.callees.add(target.text)
    elif target.text in known.functions:
        raise Unsuited(f"it calls {target.text}, which is not in the module")
    else:
        raise Unsuited("it calls functions by address")
    rest = operands[:at] + operands[at + 1 :]
    if any(isinstance(operand, Address) for operand in rest):
        raise Unsuited("it calls functions by address")
    return rest
