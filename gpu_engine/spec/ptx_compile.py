"""A function's statements to the steps of the data-flow analysis (see ptx_steps)."""

from __future__ import annotations

from phos.gpu_engine.ptx_instrument.operands import (
    Address,
    Complement,
    Group,
    Immediate,
    Name,
    Operand,
    Pair,
    Vector,
    integer,
)
from phos.gpu_engine.ptx_instrument.statements import Block, Function, Instruction, Statement, Targets, Variable
from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_memory import memory_steps
from phos.gpu_engine.spec.ptx_opcodes import KEEP, NOTHING, Opcode, opcode
from phos.gpu_engine.spec.ptx_steps import (
    Add,
    Call,
    Code,
    Combine,
    Declared,
    Formal,
    Indirect,
    Kind,
    Mix,
    Move,
    MultiplyAdd,
    Narrow,
    Pack,
    Raise,
    Scramble,
    Space,
    Step,
    Strengthen,
    Subtract,
    Touch,
)

BOTH = Access.READ | Access.WRITE

HALF_BITS = 32
"""Bits of half an address."""

_BARRIER = dict.fromkeys(("%envreg1", "%envreg2"), Declared(Kind.VARIABLE, "the driver's barrier"))
"""The halves of the address at which the blocks of a cooperative launch wait for each other: memory of the driver's."""

UPPER_ADDRESS_BITS = 0xFFFF00000000
"""Those by which addresses of one allocation hardly differ, below those that may hold marks."""


class Compiler:
    """Turns one function into Code. ``globals_`` are the names of the whole module and what they stand for."""

    def __init__(self, function: Function, layout: list[Declared], globals_: dict[str, Declared]) -> None:
        self.code = Code(function.name)
        self._function = function
        self._globals = globals_
        self._scopes: list[dict[str, int | tuple[int, ...]]] = [{}]
        self._address_registers: dict[tuple[int, int], int] = {}
        self._global_objects: dict[str, int] = {}
        self._targets: dict[str, tuple[str, ...]] = {}
        self._numbers: dict[int, int] = {}
        """The largest number moved into each register that any was moved into."""
        self._scaled: dict[int, tuple[int, bool, int]] = {}
        """Of registers that were multiplied or divided by a number: of which, whether multiplied, and by how much."""
        self._site = 0
        self._shared: int | None = None
        self.functions_named: set[str] = set()
        """Functions whose address is taken."""
        for i, parameter in enumerate(function.parameters):
            declared = layout[i] if function.kernel else None
            self.code.parameters.append(self._formal(parameter, declared))
        self.code.results += [self._formal(result, None) for result in function.results]

    def compile(self) -> Code:
        """The whole body."""
        assert self._function.body is not None
        self._block(self._function.body)
        return self.code

    # Names

    def _formal(self, variable: Variable, declared: Declared | None) -> Formal:
        name = variable.declarators[0].name
        if variable.space == ".reg":
            register = self.register()
            self._scopes[-1][name] = register
            return Formal(None, register)
        number = self._object(declared or Declared(Kind.LOCAL, name))
        self._scopes[-1][name] = (number,)
        return Formal(number, self._address(number, 0))

    def register(self) -> int:
        """A new register."""
        self.code.registers += 1
        return self.code.registers - 1

    def _object(self, declared: Declared) -> int:
        self.code.objects.append(declared)
        return len(self.code.objects) - 1

    def _address(self, number: int, offset: int) -> int:
        """The register that stands for an object's address."""
        register = self._address_registers.get((number, offset))
        if register is None:
            register = self._address_registers[number, offset] = self.register()
            self.code.addresses.append((register, number, offset))
        return register

    def _declare(self, variable: Variable) -> None:
        scope = self._scopes[-1]
        for declarator in variable.declarators:
            if variable.space == ".reg":
                if declarator.count is not None:
                    # %r<5> declares five names; most are found by their first use (`_named`).
                    scope[f"{declarator.name}<"] = declarator.count
                else:
                    scope[declarator.name] = self.register()
                continue
            # Tables of functions may stand in a body as well.
            self.functions_named.update(declarator.initial)
            kind = {".shared": Kind.SHARED, ".global": Kind.VARIABLE, ".const": Kind.VARIABLE}.get(variable.space)
            scope[declarator.name] = (self._object(Declared(kind or Kind.LOCAL, declarator.name)),)

    def _named(self, name: str) -> int | tuple[int, ...]:
        """A register's number, or an object's in a tuple; register 0 for what is nowhere declared."""
        first = len(name.rstrip("0123456789"))
        for scope in reversed(self._scopes):
            found = scope.get(name)
            if found is not None:
                return found
            # %r12 is of %r<13> or of %r1<3>. A block's own %r<2> leaves %r5 to the blocks around it.
            for end in range(first, len(name)):
                count = scope.get(f"{name[:end]}<")
                if isinstance(count, int) and len(name) - end < 10 and int(name[end:]) < count:
                    register = scope[name] = self.register()
                    return register
        declared = self._globals.get(name, _BARRIER.get(name))
        if declared is None:
            return 0
        if name not in self._global_objects:
            self._global_objects[name] = self._object(declared)
        return (self._global_objects[name],)

    def use(self, operand: Operand) -> int:
        """The register that stands for an operand."""
        if isinstance(operand, Complement):
            return self.use(operand.operand)
        if not isinstance(operand, Name):
            return 0
        text = operand.text
        found = self._named(text)
        if found == 0 and "." in text:
            found = self._named(text.partition(".")[0])  # a component of a vector register
        if isinstance(found, int):
            return found
        declared = self.code.objects[found[0]]
        if declared.kind is Kind.FUNCTION:
            self.functions_named.add(declared.name)
        return self._address(found[0], operand.offset)

    def stack(self) -> int:
        """The register that stands for memory which the function takes from its own stack."""
        return self._address(self._object(Declared(Kind.LOCAL, "alloca")), 0)

    def shared(self) -> int:
        """The register that stands for an address in shared memory."""
        if self._shared is None:
            self._shared = self._address(self._object(Declared(Kind.SHARED, "")), 0)
        return self._shared

    def place(self, operand: Operand) -> tuple[int, int]:
        """An address operand as (register, number of bytes added)."""
        if isinstance(operand, Address):
            operand = operand.inner[0]
        if isinstance(operand, Name):
            found = self._named(operand.text)
            if isinstance(found, int):
                return self.use(operand), operand.offset
        return self.use(operand), 0

    def several(self, operand: Operand) -> tuple[int, ...]:
        """The registers of a vector, or of one operand."""
        if isinstance(operand, Vector | Group):
            return tuple(self.use(element) for element in operand[0])
        if isinstance(operand, Pair):
            return (self.use(operand.first),)
        return (self.use(operand),)

    def add(self, step: Step) -> None:
        """Append a step."""
        self.code.steps.append(step)

    # Statements

    def _block(self, outermost: Block) -> None:
        """Blocks are walked with a stack: their nesting is the text's, not ours."""
        stack: list[list[Statement]] = [self._enter(outermost)]
        while stack:
            if not stack[-1]:
                stack.pop()
                self._scopes.pop()
                continue
            statement = stack[-1].pop()
            if isinstance(statement, Instruction):
                self._instruction(statement)
            elif isinstance(statement, Variable):
                self._declare(statement)
            elif isinstance(statement, Block):
                stack.append(self._enter(statement))

    def _enter(self, block: Block) -> list[Statement]:
        self._scopes.append({})
        for statement in block.statements:
            if isinstance(statement, Targets):
                # Labels of other blocks may have the same name.
                self._targets[statement.label] = self._targets.get(statement.label, ()) + statement.names
                if statement.directive == ".calltargets":
                    self.functions_named.update(statement.names)
        return block.statements[::-1]

    def _instruction(self, instruction: Instruction) -> None:
        op, operands = opcode(instruction.opcode), instruction.operands
        if op.base == "call":
            self._call(operands)
        elif op.base in NOTHING or not operands:
            pass
        elif not memory_steps(self, op, operands):
            if any(isinstance(operand, Address) for operand in operands):
                for operand in operands:
                    if isinstance(operand, Address):
                        self.add(Touch(self.place(operand)[0], BOTH, op.space))
                self.add(Indirect(BOTH))
            else:
                self._compute(op, operands)

    def _compute(self, op: Opcode, operands: tuple[Operand, ...]) -> None:
        base, targets = op.base, self.several(operands[0])
        target, rest = targets[0], operands[1:]
        sources = tuple(register for operand in rest for register in self.several(operand))
        if base == "mov":
            if len(rest) == 1 and isinstance(rest[0], Immediate) and target:
                self._numbers[target] = max(integer(rest[0].number) or 0, self._numbers.get(target, 0))
            self._move(op, operands, targets, sources)
        elif not any(sources) or not any(targets):
            pass
        elif base == "cvta":
            if op.space in (Space.GLOBAL, Space.CONST):
                self.add(Strengthen(target, sources[0]))
            elif op.space is Space.SHARED and not op.has("to"):
                self.add(Move(target, (*sources, self.shared())))
            else:
                self.add(Move(target, sources))
        elif base == "mapa":
            self.add(Move(target, (*sources, self.shared()), None))
        elif base == "cvt":
            sizes = [4 if kind.startswith("f") else 8 if kind.endswith("64") else 4 for kind in op.types]
            self.add(Move(target, sources) if min(sizes, default=4) == 8 else Narrow(target, sources[0]))
        elif not op.integer and base not in ("selp", "slct"):  # slct's last type is that of what it chooses by
            pass  # nobody computes addresses in floating point, but they are moved in its registers
        elif whole := self._scaled_back(op, target, rest):
            self.add(Move(target, (whole,), None))
        elif base == "neg":
            self.add(Subtract(target, 0, sources[0], None))
        elif base in ("add", "addc", "sub", "subc") and len(rest) >= 2:
            number = integer(rest[1].number) if isinstance(rest[1], Immediate) else None
            left, right = self.use(rest[0]), self.use(rest[1])
            self.add((Add if base.startswith("add") else Subtract)(target, left, right, number))
        elif base in ("mad", "madc", "mad24", "sad", "fma") and len(rest) >= 3:
            raised = self._raised(op, rest)
            if raised:
                product = self.register()
                self.add(Raise(product, raised))
                self.add(Add(target, product, self.use(rest[2]), None))
            else:
                self.add(MultiplyAdd(target, sources[:2], self.use(rest[2])))
                self._turn(op, target, rest[:2])
        elif raised := self._raised(op, rest):
            self.add(Raise(target, raised))
        elif base in ("or", "xor", "bfi") and op.size == 8:
            self.add(Move(target, sources[:2], None))
            place = self._number(rest[2]) if base == "bfi" and len(rest) > 2 else 0
            if place is None or place >= HALF_BITS:
                moved = self.register()
                self.add(Raise(moved, self.use(rest[0])))
                self.add(Combine(target, (moved, self.use(rest[1]))))
            else:
                self.add(Combine(target, sources[:2]))
            if base == "xor":
                self._exclusive(target, rest[0], rest[1])
        elif base in KEEP:
            self.add(Move(target, sources, 0 if base == "selp" else None))
            if base in ("not", "abs"):  # ~x is -x - 1
                self.add(Subtract(target, 0, sources[0], None))
        elif base in ("shfl", "movmatrix"):
            self.add(Narrow(target, sources[0]))
        else:
            for each in targets:
                self.add(Mix(each, sources))
            if base in ("prmt", "brev"):
                self.add(Scramble(target, sources[:2], whole=False))
            if base in ("mul", "mul24"):
                self._turn(op, target, rest[:2])

    def _exclusive(self, target: int, left: Operand, right: Operand) -> None:
        """The target is an address with a key, or one without it: neither is among the arguments as it is."""
        if self.use(left) and self.use(right):
            self.add(Scramble(target, (self.use(left), self.use(right)), whole=True))
        for key, operand in ((left, right), (right, left)):
            number = self._number(key)
            if number is not None and number != -1 and number & UPPER_ADDRESS_BITS:
                self.add(Scramble(target, (self.use(operand),), whole=True))

    def _turn(self, op: Opcode, target: int, factors: tuple[Operand, ...]) -> None:
        """The target is a product, or has one added: what was subtracted is added, where a factor may be negative."""
        numbers = [integer(factor.number) for factor in factors if isinstance(factor, Immediate)]
        if not numbers or any(number is None or not 0 <= number < 1 << (8 * op.size - 1) for number in numbers):
            turned = self.register()
            for factor in factors:
                self.add(Subtract(turned, 0, self.use(factor), None))
            self.add(Mix(target, (turned,)))

    def _raised(self, op: Opcode, rest: tuple[Operand, ...]) -> int:
        """The register that a shift or a product moves into the upper half of 64 bits; 0 if it does no such thing."""
        if len(rest) < 2 or op.size < 8 or op.base not in ("shl", "mul", "mad", "madc"):
            return 0
        first, second = self._number(rest[0]), self._number(rest[1])
        if op.base == "shl":
            # By how much is mostly written there. If not, it may be the size of a word.
            return 0 if second is not None and second < HALF_BITS else self.use(rest[0])
        if second is not None and second >= 1 << HALF_BITS:
            return self.use(rest[0])
        return self.use(rest[1]) if first is not None and first >= 1 << HALF_BITS else 0

    def _scaled_back(self, op: Opcode, target: int, rest: tuple[Operand, ...]) -> int:
        """The register that a result is but for some bits: ``shl`` after ``shr``, ``mul`` after ``div``; ``bfe``.

        So tags are cut off above an address, and addresses aligned. Fewer bits than half of them are no address.
        """
        if op.base == "bfe" and len(rest) == 3 and self._number(rest[1]) == 0:
            return self.use(rest[0]) if op.size == 8 and (self._number(rest[2]) or 64) > HALF_BITS else 0
        number = self._number(rest[1]) if len(rest) == 2 and op.size == 8 else None
        if number is None or number <= 0 or op.base not in ("shl", "shr", "mul", "div") or op.has("hi"):
            return 0
        up = op.base in ("shl", "mul")
        if op.base in ("shl", "shr"):
            number = 1 << min(number, 64)
        source = self.use(rest[0])
        before, was_up, factor = self._scaled.get(source, (0, up, 0))
        self._scaled[target] = source, up, number
        return before if was_up != up and factor == number < 1 << HALF_BITS else 0

    def _number(self, operand: Operand) -> int | None:
        """The value of an operand, if that is known."""
        if isinstance(operand, Immediate):
            return integer(operand.number)
        return self._numbers.get(self.use(operand))

    def _move(
        self, op: Opcode, operands: tuple[Operand, ...], targets: tuple[int, ...], sources: tuple[int, ...]
    ) -> None:
        if len(operands) < 2:
            return
        if isinstance(operands[0], Vector):
            if isinstance(operands[1], Vector) or op.size == 16:
                # Halves of 128 bits are addresses' size; vectors are moved element by element.
                source = sources if len(sources) == len(targets) else sources[:1] * len(targets)
                for target, register in zip(targets, source, strict=True):
                    self.add(Move(target, (register,)))
            else:
                for target in targets:
                    self.add(Narrow(target, sources[0]))
        elif isinstance(operands[1], Vector):
            self.add(Move(targets[0], sources) if op.size == 16 else Pack(targets[0], sources))
        elif any(sources):
            self.add(Move(targets[0], sources))

    def _call(self, operands: tuple[Operand, ...]) -> None:
        """``call (results), name, (arguments), prototype or targets;`` with everything but the name optional."""
        groups: list[tuple[int, Group]] = [(i, part) for i, part in enumerate(operands) if isinstance(part, Group)]
        plain = [part for part in operands if isinstance(part, Name)]
        if not plain:
            return
        results = self.several(groups[0][1]) if groups and groups[0][0] == 0 else ()
        arguments = tuple(register for i, group in groups if i for register in self.several(group))
        callee = plain[0]
        self._site += 1
        found = self._named(callee.text)
        declared = self.code.objects[found[0]] if isinstance(found, tuple) else None
        if declared is not None and declared.kind is Kind.FUNCTION:
            self.add(Call(declared.name, 0, None, arguments, results, self._site))
            return
        among = self._targets.get(plain[-1].text) if len(plain) > 1 else None
        name = callee.text if found == 0 else ""
        self.add(Call(name, self.use(callee), among, arguments, results, self._site))
