"""Twin kernels: a module's kernels once more, with a check before each access (paper §4.1, DESIGN §5).

A twin computes what its kernel computes, and takes one parameter more, the last: where the launch was guessed to
touch memory (frontend/twin_table.h). Before each store, atomic operation and bulk copy to global memory, and where
loads count before each load too, its address is compared with the first ranges of the launch, which are in registers;
what is in none of them goes to a function (twin_check.py) that knows the rest.

A module's variables are the original's: a twin is given their addresses behind its ranges. Kernels that use textures,
tensor maps, functions by address, or anything that is not known here have no twin.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from phos.gpu_engine.ptx_instrument import twin_table as table
from phos.gpu_engine.ptx_instrument.operands import (
    Address,
    Complement,
    Group,
    Immediate,
    Name,
    Operand,
    Pair,
    Vector,
)
from phos.gpu_engine.ptx_instrument.parser import parse
from phos.gpu_engine.ptx_instrument.printer import Edits
from phos.gpu_engine.ptx_instrument.statements import (
    Directive,
    Function,
    Instruction,
    Item,
    Module,
    Node,
    Section,
    Variable,
)
from phos.gpu_engine.ptx_instrument.twin_access import Reach, Unsuited
from phos.gpu_engine.ptx_instrument.twin_check import check_function
from phos.gpu_engine.ptx_instrument.twin_survey import Names, Survey, statements, survey
from phos.gpu_engine.spec.descriptor import Access

OLDEST = (7, 7)
"""The version of PTX in which a kernel's parameters have generic addresses (cvta.param)."""
OLDEST_TARGET = 70
INLINE = 4
"""Ranges that are compared in place, at most: as many as a kernel can have pointers among its first parameters."""


@dataclass(frozen=True)
class Twin:
    """The twins of a module's kernels."""

    text: str
    """PTX; empty if no kernel has a twin."""
    kernels: dict[str, tuple[tuple[int, str], ...]]
    """Kernels with a twin, under their own names, and the module variables that a launch has to give the addresses of:
    (index among the addresses, name)."""
    left_out: dict[str, str]
    """Kernels without, and why."""


def make(text: str, *, reads: bool, wanted: Collection[str] | None = None) -> Twin:
    """The twins of the kernels of a PTX text.

    Arguments:
        reads: check loads too, for a restore; else only what writes.
        wanted: kernels by name; None for all.

    Raises:
        PtxError: the text cannot be read.
    """
    module = parse(text)
    return _Maker(module, reads).make(wanted)


class _Maker:
    def __init__(self, module: Module, reads: bool) -> None:
        self.module = module
        self.known = Names(module)
        self.surveys = {
            function.name: survey(function, self.known, reads)
            for function in module.functions
            if function.body is not None
        }
        self.lines = _Lines(module.text)
        stem = "phos"
        while stem in module.text:
            stem += "x"
        self.stem = stem
        self.edits = Edits(module)
        self.sites = 0
        self.values = 0
        self.order: list[str] = []  # variables, in the order of their addresses
        self.passes: set[str] = set()  # functions that are handed the launch

    def make(self, wanted: Collection[str] | None) -> Twin:
        kernels: dict[str, set[str]] = {}  # and what they call, and so on
        left_out: dict[str, str] = {}
        for name, found in self.surveys.items():
            if not found.function.kernel or (wanted is not None and name not in wanted):
                continue
            try:
                kernels[name] = self._suited(found)
            except Unsuited as why:
                left_out[name] = str(why)
        if not kernels:
            return Twin("", {}, left_out)
        kept = set(kernels).union(*kernels.values())
        self._see_who_passes(kept)
        for item in self.module.items:
            self._item(item, kept)
        for name in kept & self.surveys.keys():
            self._function(self.surveys[name])
        first = next(item for item in self.module.items if isinstance(item, Function) and item.name in kept)
        self.edits.before(Node(first.start, first.start), check_function(self._name("check")))
        used = {
            name: tuple(sorted((self.order.index(v), v) for v in self._all(callees | {name})))
            for name, callees in kernels.items()
        }
        return Twin(self.edits.text().rstrip("\0"), used, left_out)

    def _all(self, functions: Iterable[str]) -> set[str]:
        found: set[str] = set()
        return found.union(*(self.surveys[name].variables for name in functions if name in self.surveys))

    def _name(self, what: str) -> str:
        return f"__{self.stem}_{what}"

    def _register(self, what: str) -> str:
        return f"%{self.stem}_{what}"

    # Who has a twin

    def _suited(self, kernel: Survey) -> set[str]:
        """The functions that a kernel may call. Raises Unsuited."""
        self._check_module()
        reached: set[str] = set()
        queue = [kernel.function.name]
        while queue:
            found = self.surveys.get(queue.pop())
            if found is None:
                continue
            if found.unsuited:
                where = "" if found is kernel else f" (in {found.function.name})"
                raise Unsuited(found.unsuited + where)
            queue += found.callees - reached
            reached |= found.callees
        if kernel.function.name in reached or any(
            self.surveys[name].function.kernel for name in reached if name in self.surveys
        ):
            raise Unsuited("a kernel is called as a function")
        size = 0
        for variable in kernel.function.parameters:
            alignment = variable.natural_alignment if not variable.pointer else variable.element_bytes
            size = -(-size // alignment) * alignment + variable.bytes(variable.declarators[0])
        if size + 8 + table.LAUNCH_BYTES > table.PARAMETER_BYTES_MOST:
            raise Unsuited("it has too many parameters")
        variables = self._all(reached | {kernel.function.name})
        new = sorted(variables - set(self.order))
        if len(self.order) + len(new) > table.VARIABLES:
            raise Unsuited("its module has too many variables")
        self.order += new
        return reached

    def _check_module(self) -> None:
        target = re.match(r"sm_(\d+)", self.module.target)
        if target is None or int(target[1]) < OLDEST_TARGET:
            raise Unsuited(f"its PTX is for {self.module.target}")
        size = [
            item.arguments for item in self.module.items if isinstance(item, Directive) and item.name == ".address_size"
        ]
        if size != [("64",)]:
            raise Unsuited("its addresses do not have 64 bits")

    def _see_who_passes(self, kept: set[str]) -> None:
        """A function is handed the launch if it, or a function that it calls, has something to check or to look up."""
        needs = {n for n in kept & self.surveys.keys() if self.surveys[n].reaches or self.surveys[n].variables}
        while True:
            more = {n for n in kept & self.surveys.keys() if self.surveys[n].callees & needs} - needs
            if not more:
                break
            needs |= more
        self.passes = {name for name in needs if not self.surveys[name].function.kernel}

    # Editing

    def _item(self, item: Item, kept: set[str]) -> None:
        """Drop what no twin needs, and what tells a debugger of lines."""
        if isinstance(item, Function):
            if item.name not in kept:
                self.edits.replace(item, "")
            elif item.body is None and item.name in self.passes:
                self._add_parameter(item, f".param .b64 {self._name('launch')}")
        elif isinstance(item, Variable):
            own = all(d.name not in self.known.variables or self.known.own(d.name) for d in item.declarators)
            if not own:
                self.edits.replace(item, "")
        elif isinstance(item, Section) or (isinstance(item, Directive) and item.name in (".file", ".loc", ".alias")):
            self.edits.replace(item, "")
        elif isinstance(item, Directive) and item.name == ".version" and self.module.version < OLDEST:
            self.edits.replace(item, ".version {}.{}".format(*OLDEST))
        elif isinstance(item, Directive) and item.name == ".target" and "debug" in item.arguments:
            self.edits.replace(item, f".target {' '.join(item.arguments).replace(' , debug', '')}")

    def _function(self, found: Survey) -> None:
        function = found.function
        assert function.body is not None
        for statement in statements(function):
            if isinstance(statement, Section) or (isinstance(statement, Directive) and statement.name == ".loc"):
                self.edits.replace(statement, "")
        if function.kernel:
            self._add_parameter(function, f".param .align 8 .b8 {self._name('launch')}[{table.LAUNCH_BYTES}]")
        elif function.name in self.passes:
            self._add_parameter(function, f".param .b64 {self._name('launch')}")
        inline = 0
        if function.kernel:
            pointers = sum(v.bytes(v.declarators[0]) // 8 for v in function.parameters)
            inline = min(INLINE, max(1, pointers))
        for instruction, reach in found.reaches:
            self._check(instruction, reach, inline)
        first_value = self.values
        rewritten: set[int] = set()
        for instruction in (*found.named, *found.constants, *(i for i, name in found.calls if name in self.passes)):
            if instruction.start not in rewritten:
                rewritten.add(instruction.start)
                self._rewrite(instruction)
        if function.kernel or function.name in self.passes:
            self.edits.inside(function.body, self._prologue(function, inline, range(first_value, self.values)))

    def _add_parameter(self, function: Function, declaration: str) -> None:
        if function.parameters:
            last = function.parameters[-1]
            self.edits.after(last, f",\n\t{declaration}")
            return
        end = function.body.start if function.body is not None else function.end
        kind = r"\.entry\s+" if function.kernel else r"\.func\b.*?"
        head = re.match(
            rf".*?{kind}({re.escape(function.name)})(?![\w$])(\s*\(\s*\))?",
            self.module.text[function.start : end],
            re.DOTALL,
        )
        assert head is not None  # or the parser had not found it
        place = Node(function.start + head.start(1), function.start + head.end(0))
        self.edits.replace(place, f"{function.name}({declaration})")

    def _prologue(self, function: Function, inline: int, values: range) -> str:
        launch, parameter = self._register("launch"), self._name("launch")
        lines = [
            f".reg .pred {self._register('p')};",
            f".reg .b64 {launch}, {self._register('a')}, {self._register('d')}, {self._register('e')};",
        ]
        if values:
            lines.append(".reg .b64 " + ", ".join(self._register(f"v{n}") for n in values) + ";")
        if not function.kernel:
            lines.append(f"ld.param.b64 {launch}, [{parameter}];")
        else:
            lines += [f"mov.b64 {launch}, {parameter};", f"cvta.param.u64 {launch}, {launch};"]
        for index in range(inline):
            begin, size = self._register(f"b{index}"), self._register(f"n{index}")
            at = table.LAUNCH_RANGE + 16 * index
            lines += [
                f".reg .b64 {begin}, {size};",
                f"ld.param.b64 {begin}, [{parameter}+{at}];",
                f"ld.param.b64 {size}, [{parameter}+{at + 8}];",
            ]
        return "\n\t" + "\n\t".join(lines) + "\n"

    def _check(self, instruction: Instruction, reach: Reach, inline: int) -> None:
        """Put the check of one access before its instruction."""
        guard = instruction.guard
        against = (guard[1:] if guard.startswith("!") else f"!{guard}") if guard else ""
        site = self.lines.at(instruction.start) << 1 | bool(reach.access & Access.WRITE)
        address = self._register("a")
        base = reach.address.text
        lines = [
            f"add.u64 {address}, {base}, {reach.address.offset};"
            if reach.address.offset
            else f"mov.b64 {address}, {base};"
        ]
        lines += self._compare(address, site, against, inline)
        if reach.length is not None:
            length = self._register("e")
            lines.append(
                f"mov.b64 {length}, {reach.length};"
                if isinstance(reach.length, Immediate)
                else f"cvt.u64.u32 {length}, {reach.length};"
            )
            lines += [f"add.u64 {address}, {address}, {length};", f"add.u64 {address}, {address}, -1;"]
            lines += self._compare(address, site, against, inline)
        self.edits.before(instruction, "\n\t".join(lines) + "\n\t")

    def _compare(self, address: str, site: int, against: str, inline: int) -> list[str]:
        """``against``: a predicate under which the access is not made."""
        self.sites += 1
        label, p, distance = f"${self.stem}_{self.sites}", self._register("p"), self._register("d")
        lines = []
        for index in range(inline):
            lines.append(f"sub.u64 {distance}, {address}, {self._register(f'b{index}')};")
            other = against if index == 0 else p
            how = f"setp.lt.or.u64 {p}" if other else f"setp.lt.u64 {p}"
            lines.append(f"{how}, {distance}, {self._register(f'n{index}')}{', ' + other if other else ''};")
        if inline:
            lines.append(f"@{p} bra {label};")
        elif against:
            lines.append(f"@{against} bra {label};")
        name = self._name("check")
        lines += [
            f"{{ .param .b64 {name}_0; .param .b64 {name}_1; .param .b32 {name}_2;",
            f"st.param.b64 [{name}_0], {self._register('launch')};",
            f"st.param.b64 [{name}_1], {address};",
            f"st.param.b32 [{name}_2], {site};",
            f"call {name}, ({name}_0, {name}_1, {name}_2); }}",
            f"{label}:",
        ]
        return lines

    def _rewrite(self, instruction: Instruction) -> None:
        """Variables become what the launch says that their addresses are, and calls hand the launch on."""
        before: list[str] = []
        base, *words = instruction.opcode.split(".")
        operands = tuple(self._operand(operand, False, before) for operand in instruction.operands)
        opcode = instruction.opcode
        if "const" in words:
            # Through its generic address, and constant memory has one, it is read as global memory is.
            opcode = "mov.b64" if base == "cvta" else opcode.replace(".const", ".global")
        guard = f"@{instruction.guard} " if instruction.guard else ""
        end = ""
        if base == "call":
            at = 1 if isinstance(operands[0], Group) else 0
            target = operands[at]
            if isinstance(target, Name) and target.text in self.passes:
                handed = f"{self._name('handed')}"
                before.append(f"{{ .param .b64 {handed}; st.param.b64 [{handed}], {self._register('launch')};")
                end = " }"
                rest = operands[at + 1] if len(operands) > at + 1 else Group(())
                assert isinstance(rest, Group)
                operands = (*operands[: at + 1], Group((*rest.members, Name(handed))))
        text = f"{guard}{opcode} {', '.join(map(str, operands))};{end}"
        self.edits.replace(instruction, "\n\t".join([*before, text]))

    def _operand(self, operand: Operand, in_address: bool, before: list[str]) -> Operand:
        """An operand without names of variables; ``before`` gets the instructions that look their addresses up."""
        if isinstance(operand, Name):
            if operand.text not in self.order:
                return operand
            value = self._register(f"v{self.values}")
            self.values += 1
            at = table.LAUNCH_VARIABLE + 8 * self.order.index(operand.text)
            before.append(f"ld.b64 {value}, [{self._register('launch')}+{at}];")
            if operand.offset and not in_address:
                before.append(f"add.u64 {value}, {value}, {operand.offset};")
            return Name(value, operand.offset if in_address else 0)
        if isinstance(operand, Address):
            return Address(tuple(self._operand(part, True, before) for part in operand.inner))
        if isinstance(operand, Vector):
            return Vector(tuple(self._operand(part, False, before) for part in operand.elements))
        if isinstance(operand, Group):
            return Group(tuple(self._operand(part, False, before) for part in operand.members))
        if isinstance(operand, Pair):
            return Pair(self._operand(operand.first, False, before), self._operand(operand.second, False, before))
        if isinstance(operand, Complement):
            return Complement(operand.sign, self._operand(operand.operand, False, before))
        return operand


class _Lines:
    """From a place in a text to its line."""

    def __init__(self, text: str) -> None:
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def at(self, place: int) -> int:
        return bisect_left(self._newlines, place) + 1
