"""Types of a function's parameters from its mangled name: as much of the Itanium C++ ABI, chapter 5.1, as kernels need.

The tree says what speculation asks about: what is a pointer, and whether what it points to is const. Names are kept
by their last part only. Whatever is not understood raises SpecError; a wrong tree would be worse than none.
"""

from __future__ import annotations

from collections.abc import Callable

from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.mangled_text import MAX_NAME, Text
from phos.gpu_engine.spec.mangled_types import (
    BUILTIN_BYTES,
    Array,
    Builtin,
    Code,
    Expansion,
    Named,
    Pack,
    Qualified,
    Type,
    Unknown,
    expand,
    pointer_to,
)

MAX_DEPTH = 120

STANDARD = {"a": "allocator", "b": "basic_string", "s": "string", "i": "istream", "o": "ostream", "d": "iostream"}
# Codes of operators, by the number of operands they have in expressions.
UNARY = frozenset(("ps", "ng", "ad", "de", "co", "nt", "pp", "mm", "dl", "da", "te", "sz", "az", "tw", "nx", "sP"))
BINARY = frozenset(
    "pl mi ml dv rm an or eo aS pL mI mL dV rM aN oR eO ls rs lS rS eq ne lt gt le ge ss aa oo cm pm pt ix".split(" ")  # noqa: SIM905
)
FUNCTION_PREFIXES = ("Do", "DO", "Dw", "Dx")
OPERATORS = UNARY | BINARY | {"nw", "na", "aw", "cl", "qu"}


UNKNOWN = Unknown()
CODE = Code()


def parameter_types(name: str) -> list[Type]:
    """The types of the parameters of the function with this mangled name, packs expanded. Raises SpecError."""
    if not name.startswith("_Z"):
        raise SpecError("The name is not mangled.")
    if len(name) > MAX_NAME:
        raise SpecError(f"The mangled name has {len(name)} characters; names of up to {MAX_NAME} are read.")
    parser = _Parser(name)
    parser.take("_Z")
    types = parser.encoding()
    if parser.rest() and not parser.rest().startswith("."):
        raise parser.lost()
    if types is None:
        raise SpecError("The name is that of a variable.")
    flat: list[Type] = []
    for found in types:
        expand(found, flat)
    return [] if len(flat) == 1 and isinstance(flat[0], Builtin) and flat[0].code == "v" else flat


class _Parser(Text):
    """Recursive descent over the grammar of section 5.1; methods are named after its productions."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.substitutions: list[Type] = []
        self.scope: tuple[Type, ...] = ()  # what T_, T0_, ... stand for

    def add(self, found: Type) -> Type:
        self.substitutions.append(found)
        return found

    # Names.

    def encoding(self) -> list[Type] | None:
        """A function's parameters, or None for a variable. Leaves off before an ``E``, a ``.`` or the end."""
        outer, self.scope = self.scope, ()
        name = self.name()
        if self.peek() in ("", "E", "."):
            self.scope = outer
            return None
        if isinstance(name, Named) and name.arguments is not None:
            self.scope = name.arguments
            if not name.typed:
                self.type()  # what it returns
        types = []
        while self.peek() not in ("", "E", "."):
            types.append(self.type())
        self.scope = outer
        if not types:
            raise self.lost()
        return types

    def name(self) -> Type:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SpecError("The mangled name is nested too deeply.")
        try:
            if self.peek() == "N":
                return self.nested_name()
            if self.peek() == "Z":
                return self.local_name()
            if self.peek() == "S" and self.peek(2) != "St":
                return self.template(self.substitution(), substituted=True)
            self.accept("St")
            return self.template(self.unqualified_name(), substituted=False)
        finally:
            self.depth -= 1

    def template(self, name: Type, *, substituted: bool) -> Type:
        """A name with the template arguments that may follow it."""
        if self.peek() != "I":
            return name
        if not substituted:
            self.add(name)
        return self.instance(name)

    def instance(self, name: Type) -> Type:
        arguments = self.template_args()
        return Named(name.name, arguments, name.typed) if isinstance(name, Named) else UNKNOWN

    def nested_name(self) -> Type:
        self.take("N")
        while self.peek() in ("r", "V", "K"):
            self.at += 1
        if self.peek() in ("R", "O"):
            self.at += 1
        current: Type | None = None
        while not self.accept("E"):
            fresh = True
            if self.peek() == "I":
                if current is None:
                    raise self.lost()
                current = self.instance(current)
            elif self.accept("St"):
                current, fresh = Named("std"), False
            elif self.peek() == "S":
                current, fresh = self.substitution(), False
            elif self.peek() == "T":
                current = self.template_param()
            elif self.peek(2) in ("Dt", "DT"):
                current = self.decltype()
            elif self.accept("M"):
                fresh = False  # the initialiser of a member: a scope of no consequence
            else:
                current = self.unqualified_name()
            # The whole is no prefix of anything; if it is a type, whoever reads types adds it.
            if fresh and self.peek() != "E" and current is not None:
                self.add(current)
        if current is None:
            raise self.lost()
        return current

    def local_name(self) -> Type:
        self.take("Z")
        self.encoding()
        self.take("E")
        if self.accept("s"):
            self.discriminator()
            return UNKNOWN
        if self.accept("d"):
            self.sequence_number("0123456789")
        found = self.name()
        self.discriminator()
        return found

    def unqualified_name(self) -> Type:
        self.accept("L")  # internal linkage
        found = self._unqualified_name()
        while self.accept("B"):
            self.source_name()
        return found

    def _unqualified_name(self) -> Type:
        if self.peek().isdecimal():
            return Named(self.source_name())
        if self.peek() in ("C", "D") and self.peek(2)[1:] in ("0", "1", "2", "3", "4", "5"):
            self.at += 2
            return Named("", typed=True)
        if self.accept("Ut"):
            self.sequence_number("0123456789")
            return Named("")
        if self.accept("Ul"):
            outer, self.scope = self.scope, ()  # T_ is a generic lambda's own
            while not self.accept("E"):
                self.type()
            self.scope = outer
            self.sequence_number("0123456789")
            return Named("")
        if self.accept("cv"):
            self.type()
            return Named("", typed=True)
        if self.accept("li"):
            return Named(self.source_name())
        if self.peek(2) in OPERATORS:
            self.at += 2
            return Named("operator")
        raise self.lost()

    def substitution(self) -> Type:
        self.take("S")
        if self.peek() in STANDARD:
            name = STANDARD[self.peek()]
            self.at += 1
            found: Type = Named(name)
            while self.accept("B"):
                self.source_name()
            return found
        index = self.sequence_number("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        if index >= len(self.substitutions):
            raise self.lost()
        return self.substitutions[index]

    def template_param(self) -> Type:
        self.take("T")
        if self.accept("L"):  # of an outer level: generic lambdas
            self.sequence_number("0123456789")
            self.sequence_number("0123456789")
            return UNKNOWN
        index = self.sequence_number("0123456789")
        return self.scope[index] if index < len(self.scope) else UNKNOWN

    def template_args(self) -> tuple[Type, ...]:
        self.take("I")
        arguments = []
        while not self.accept("E"):
            arguments.append(self.template_arg())
        return tuple(arguments)

    def template_arg(self) -> Type:
        if self.accept("X"):
            self.expression()
            self.take("E")
            return UNKNOWN
        if self.peek() == "L":
            self.literal()
            return UNKNOWN
        if self.accept("J"):
            items = []
            while not self.accept("E"):
                items.append(self.template_arg())
            return Pack(tuple(items))
        return self.type()

    # Types.

    def type(self) -> Type:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SpecError("The mangled name is nested too deeply.")
        try:
            return self._type()
        finally:
            self.depth -= 1

    def _type(self) -> Type:
        first, two = self.peek(), self.peek(2)
        if first in ("r", "V", "K"):
            const = False
            while (qualifier := self.peek()) in ("r", "V", "K"):
                const |= qualifier == "K"
                self.at += 1
            if self.peek() == "F" or self.peek(2) in FUNCTION_PREFIXES:
                return self.function_type()  # the qualifiers are a member function's own
            return self.add(Qualified(const, self.type()))
        if first in ("P", "R", "O"):
            self.at += 1
            return self.add(pointer_to(self.type(), first != "P"))
        if first in ("C", "G"):
            self.at += 1
            self.type()
            return self.add(Named("complex"))
        if first == "F" or two in FUNCTION_PREFIXES:
            return self.function_type()
        if first == "A":
            return self.array_type()
        if first == "M":
            self.at += 1
            self.type()
            self.type()
            return self.add(CODE)
        if first == "T":
            return self.template_type()
        if first == "D":
            return self.d_type(two)
        if first == "U" and two not in ("Ut", "Ul"):
            self.at += 1
            self.source_name()
            if self.peek() == "I":
                self.template_args()
            return self.add(self.type())
        if first == "u":
            self.at += 1
            found: Type = Named(self.source_name())
            if self.peek() == "I":
                found = self.instance(found)
            return self.add(found)
        if first == "S" and two != "St":
            found = self.substitution()
            return self.add(self.instance(found)) if self.peek() == "I" else found
        if first in BUILTIN_BYTES:
            self.at += 1
            return Builtin(first)
        return self.add(self.name())

    def function_type(self) -> Type:
        while self.peek() == "D":
            if self.accept("DO"):
                self.expression()
                self.take("E")
            elif self.accept("Dw"):
                while not self.accept("E"):
                    self.type()
            else:
                self.at += 2
        self.take("F")
        self.accept("Y")
        while not self.accept("E"):
            if self.peek(2) in ("RE", "OE"):
                self.at += 1
            else:
                self.type()
        return self.add(CODE)

    def array_type(self) -> Type:
        self.take("A")
        if self.peek().isdecimal():
            self.number()
        elif self.peek() != "_":
            self.expression()
        self.take("_")
        return self.add(Array(self.type()))

    def template_type(self) -> Type:
        if self.peek(2) in ("Ts", "Tu", "Te"):
            self.at += 2
            return self.add(self.name())
        found = self.add(self.template_param())
        return self.add(self.instance(found)) if self.peek() == "I" else found

    def d_type(self, two: str) -> Type:
        if two in ("Dt", "DT"):
            return self.add(self.decltype())
        if self.accept("Dp"):
            return self.add(Expansion(self.type()))
        if self.accept("DF"):
            bits = self.number()
            if not self.accept("_"):
                self.at += 1  # DF16b and DF32x
            return Named(f"float{bits}")
        if self.accept("Dv"):
            self.number()
            self.take("_")
            self.type()
            return self.add(Named("vector"))
        if two in BUILTIN_BYTES:
            self.at += 2
            return Builtin(two)
        raise self.lost()

    def decltype(self) -> Type:
        self.at += 2
        self.expression()
        self.take("E")
        return UNKNOWN

    # Expressions: read over, for what comes after them.

    def expression(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SpecError("The mangled name is nested too deeply.")
        try:
            self._expression()
        finally:
            self.depth -= 1

    def _expression(self) -> None:
        two = self.peek(2)
        if two[:1] == "L":
            self.literal()
        elif two[:1] == "T":
            self.template_param()
        elif two in ("fp", "fL"):
            self.at += 2
            if two == "fL":
                self.number()
                self.take("p")
            while self.peek() in ("r", "V", "K"):
                self.at += 1
            self.sequence_number("0123456789")
        elif two in ("st", "at", "ti"):
            self.at += 2
            self.type()
        elif two == "sZ":
            self.at += 2
            if self.peek() == "T":
                self.template_param()
            else:
                self.expression()
        elif two == "sp":
            self.at += 2
            self.expression()
        elif two in ("cl", "il"):
            self.at += 2
            self.until_end(self.expression)
        elif two == "tl":
            self.at += 2
            self.type()
            self.until_end(self.expression)
        elif two == "cv":
            self.at += 2
            self.type()
            if self.accept("_"):
                self.until_end(self.expression)
            else:
                self.expression()
        elif two in ("dc", "sc", "cc", "rc"):
            self.at += 2
            self.type()
            self.expression()
        elif two == "qu":
            self.at += 2
            for _ in range(3):
                self.expression()
        elif two in BINARY and two != "pt":
            self.at += 2
            self.expression()
            self.expression()
        elif two in UNARY:
            self.at += 2
            self.accept("_")
            self.expression()
        elif two in ("dt", "pt"):
            self.at += 2
            self.expression()
            self.unresolved_name()
        else:
            self.unresolved_name()

    def until_end(self, item: Callable[[], None]) -> None:
        while not self.accept("E"):
            item()

    def unresolved_name(self) -> None:
        self.accept("gs")
        if not self.accept("sr"):
            self.base_unresolved_name()
        elif self.accept("N"):
            self.type()
            while not self.accept("E"):
                self.simple_id()
            self.base_unresolved_name()
        elif self.peek().isdecimal():
            while not self.accept("E"):
                self.simple_id()
            self.base_unresolved_name()
        else:
            self.type()
            self.base_unresolved_name()

    def simple_id(self) -> None:
        self.source_name()
        if self.peek() == "I":
            self.template_args()

    def base_unresolved_name(self) -> None:
        if self.accept("on"):
            self._unqualified_name()
            if self.peek() == "I":
                self.template_args()
        else:
            self.simple_id()

    def literal(self) -> None:
        self.take("L")
        if self.accept("_Z") or self.peek() == "Z":
            self.accept("Z")
            self.encoding()
        else:
            self.type()
            while self.peek() and self.peek() in "0123456789abcdefn_":
                self.at += 1
        self.take("E")
