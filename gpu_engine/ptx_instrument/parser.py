"""PTX text to a Module (PTX ISA, "Syntax", "Directives", "Instruction Statements").

A descent without backtracking. Blocks are kept on a stack of our own, so no text can make Python's overflow.
"""

from __future__ import annotations

from collections.abc import Callable

from phos.gpu_engine.ptx_instrument.cursor import Cursor
from phos.gpu_engine.ptx_instrument.errors import PtxError
from phos.gpu_engine.ptx_instrument.lexer import DIRECTIVE, END, NUMBER, STRING, WORD, Tokens
from phos.gpu_engine.ptx_instrument.statements import (
    TYPE_BYTES,
    VECTOR_LENGTH,
    Block,
    Declarator,
    Directive,
    Function,
    Instruction,
    Item,
    Label,
    Module,
    Prototype,
    Section,
    Statement,
    Targets,
    Variable,
)

_LINKAGE = frozenset((".visible", ".extern", ".weak", ".common"))
_SPACES = frozenset((".reg", ".sreg", ".local", ".shared", ".global", ".const", ".param", ".tex"))
_BARE = frozenset((".version", ".target", ".address_size", ".file", ".loc"))
"""Directives that no semicolon ends."""
_TARGETS = frozenset((".branchtargets", ".calltargets"))
_HEADER_STOP = ("{", ";")
OLDEST, NEWEST = (1, 0), (99, 9)


def parse(text: str, check: Callable[[], None] | None = None) -> Module:
    """The module that a text holds. Raises PtxError: the first thing in it that is not PTX, with its line.

    ``check`` is called again and again meanwhile; what it raises ends the work.
    """
    text = text.rstrip("\0")
    return _Parser(Tokens(text, check)).module(check)


class _Parser(Cursor):
    def module(self, check: Callable[[], None] | None = None) -> Module:
        items: list[Item] = []
        while self.kinds[self.at] != END:
            if check is not None:
                check()
            if not self.accept(";"):
                items.append(self._item())
        module = Module(self.tokens.text, items)
        self._check_head(module)
        return module

    def _check_head(self, module: Module) -> None:
        """A module begins with a version and a target (PTX ISA, "PTX Module Directives")."""
        heads = [item.name for item in module.items[:2] if isinstance(item, Directive)]
        if heads != [".version", ".target"]:
            raise PtxError(1, "a PTX text begins with .version and .target.")
        for item in module.items:
            if isinstance(item, Directive) and item.name in (".version", ".target") and not item.arguments:
                raise PtxError(self.tokens.line(item.start), f"{item.name} says nothing.")
        try:
            good = OLDEST <= module.version <= NEWEST
        except ValueError:
            good = False
        if not good:
            raise PtxError(self.tokens.line(module.items[0].start), "this is not a PTX version.")

    def _item(self) -> Item:
        start = self.start
        linkage: tuple[str, ...] = ()
        while self.texts[self.at] in _LINKAGE and self.kinds[self.at] == DIRECTIVE:
            linkage += (self.texts[self.at],)
            self.at += 1
        text = self.texts[self.at]
        if self.kinds[self.at] != DIRECTIVE:
            self.fail(f"a directive is missing before {self.found()}.")
        if text in (".entry", ".func"):
            return self._function(start, linkage)
        if text in _SPACES:
            return self._variable(start, linkage, ended=True)
        if linkage:
            self.fail(f"{linkage[-1]} must stand before a function or a variable, not before {self.found()}.")
        if text == ".section":
            return self._section()
        return self._directive()

    # Functions

    def _function(self, start: int, linkage: tuple[str, ...]) -> Function:
        kernel = self.texts[self.at] == ".entry"
        self.at += 1
        attributes: tuple[str, ...] = ()
        while self.texts[self.at] == ".attribute":
            attributes += self._attribute()
        results = self._parameters() if self.texts[self.at] == "(" else ()
        name = self.word("a function's name")
        parameters = self._parameters() if self.texts[self.at] == "(" else ()
        directives = []
        while self.kinds[self.at] == DIRECTIVE:
            directives.append(self._header_directive())
        body = None
        if self.texts[self.at] == "{":
            body = self._body()
        elif not self.accept(";"):
            self.fail(f"the body of {name} is missing before {self.found()}.")
        return Function(
            start, self.end, linkage, kernel, attributes, name, results, parameters, tuple(directives), body
        )

    def _header_directive(self) -> Directive:
        """``.maxntid 1, 2, 3`` between a function's parameters and its body; only ``.pragma`` has a semicolon."""
        start, name = self.start, self.texts[self.at]
        self.at += 1
        first = self.at
        kinds, texts = self.kinds, self.texts
        while kinds[self.at] in (NUMBER, STRING) or texts[self.at] in (",", "(", ")"):
            self.at += 1
        arguments = tuple(texts[first : self.at])
        end = self.end
        ended = name == ".pragma" and self.accept(";")
        return Directive(start, self.end if ended else end, name, arguments, ended)

    def _parameters(self) -> tuple[Variable, ...]:
        self.expect("(")
        result = []
        if not self.accept(")"):
            while True:
                result.append(self._variable(self.start, (), ended=False))
                if self.accept(")"):
                    break
                self.expect(",")
        return tuple(result)

    def _attribute(self) -> tuple[str, ...]:
        """``.attribute(…)`` as tokens."""
        first = self.at
        self.at += 1
        self.expect("(")
        self.balanced((")",))
        self.at += 1
        return tuple(self.texts[first : self.at])

    # Variables

    def _variable(self, start: int, linkage: tuple[str, ...], *, ended: bool) -> Variable:
        space = self.take(DIRECTIVE, "a state space")
        if space not in _SPACES:
            self.fail(f"{space!r} is not a state space.", self.at - 1)
        type_ = vector = ""
        alignment = None
        attributes: tuple[str, ...] = ()
        while self.kinds[self.at] == DIRECTIVE:
            text = self.texts[self.at]
            if text == ".attribute":
                attributes += self._attribute()
                continue
            self.at += 1
            if text == ".ptr":
                attributes += (text, *self._pointer())
            elif text == ".align":
                alignment = self.number("an alignment")
                if alignment & (alignment - 1) or not 0 < alignment <= 1 << 20:
                    self.fail(f"{alignment} is not an alignment: it must be a power of two.", self.at - 1)
            elif text in VECTOR_LENGTH:
                vector = text
            elif text in TYPE_BYTES and not type_:
                type_ = text
            elif text in (".managed", ".unified"):
                attributes += (text,)
            elif type_:
                self.fail(f"{text!r} has no place in a declaration.", self.at - 1)
            else:
                type_ = text
        if not type_:
            self.fail(f"a type is missing before {self.found()}.")
        declarators = [self._declarator()]
        while ended and self.accept(","):
            declarators.append(self._declarator())
        if ended:
            self.expect(";")
        made = Variable(start, self.end, linkage, space, type_, vector, alignment, attributes, tuple(declarators))
        for declarator in declarators:
            if len(declarator.sizes) == 1:
                size = made.element_bytes
                self.elements[declarator.name] = size if self.elements.get(declarator.name, size) == size else 0
        return made

    def _pointer(self) -> tuple[str, ...]:
        """What follows ``.ptr``: a space and an alignment, both optional."""
        first = self.at
        while self.texts[self.at] in (".const", ".global", ".local", ".shared", ".param"):
            self.at += 1
        if self.texts[self.at] == ".align":
            self.at += 1
            self.number("an alignment")
        return tuple(self.texts[first : self.at])

    def _declarator(self) -> Declarator:
        name = self.word("a name")
        count = None
        sizes: list[int | None] = []
        initial: tuple[str, ...] = ()
        if self.accept("<"):
            count = self.number("a count")
            self.expect(">")
        while self.accept("["):
            sizes.append(None if self.texts[self.at] == "]" else self.number("an array's size"))
            self.expect("]")
        if self.accept("="):
            initial = self.balanced((",", ";"))
            if not initial:
                self.fail(f"the value of {name} is missing.")
        return Declarator(name, count, tuple(sizes), initial)

    # Bodies

    def _body(self) -> Block:
        start = self.start
        self.expect("{")
        outer: list[tuple[int, list[Statement]]] = []
        statements: list[Statement] = []
        kinds, texts, starts = self.kinds, self.texts, self.starts
        while True:
            at = self.at
            kind, text = kinds[at], texts[at]
            if kind == WORD:
                if texts[at + 1] == ":":
                    statements.append(self._label())
                else:
                    statements.append(self._instruction(starts[at], ""))
            elif kind == DIRECTIVE:
                statements.append(self._body_directive())
            elif text == "@":
                self.at += 1
                sign = "!" if self.accept("!") else ""
                statements.append(self._instruction(starts[at], sign + self.word("a predicate")))
            elif text == "{":
                self.at += 1
                outer.append((start, statements))
                start, statements = starts[at], []
            elif text == "}":
                self.at += 1
                block = Block(start, self.end, statements)
                if not outer:
                    return block
                start, statements = outer.pop()
                statements.append(block)
            elif text == ";":
                self.at += 1
            else:
                self.fail(f"a statement is missing before {self.found()}.")

    def _instruction(self, start: int, guard: str) -> Instruction:
        opcode = self.word("an instruction")
        operands = () if self.texts[self.at] == ";" else self.operands()
        if self.texts[self.at] != ";":
            self.fail(f"';' is missing before {self.found()}.")
        self.at += 1
        return Instruction(start, self.starts[self.at - 1] + 1, guard, opcode, operands)

    def _label(self) -> Statement:
        start, name = self.start, self.texts[self.at]
        self.at += 2
        directive = self.texts[self.at]
        if directive in _TARGETS:
            self.at += 1
            names = [self.word("a label")]
            while self.accept(","):
                names.append(self.word("a label"))
            self.expect(";")
            return Targets(start, self.end, name, directive, tuple(names))
        if directive == ".callprototype":
            self.at += 1
            results = self._parameters() if self.texts[self.at] == "(" else ()
            if self.texts[self.at] != "(":
                self.word("'_'")
            parameters = self._parameters() if self.texts[self.at] == "(" else ()
            directives = []
            while self.kinds[self.at] == DIRECTIVE:
                directives.append(self._header_directive())
            self.expect(";")
            return Prototype(start, self.end, name, results, parameters, tuple(directives))
        return Label(start, self.end, name)

    def _body_directive(self) -> Statement:
        start, text = self.start, self.texts[self.at]
        linkage: tuple[str, ...] = ()
        while self.texts[self.at] in _LINKAGE:
            linkage += (self.texts[self.at],)
            self.at += 1
        if self.texts[self.at] in _SPACES:
            return self._variable(start, linkage, ended=True)
        if linkage:
            self.fail(f"{linkage[-1]} must stand before a variable, not before {self.found()}.")
        if text == ".section":
            return self._section()
        return self._directive()

    # Everything else

    def _directive(self) -> Directive:
        start, name = self.start, self.texts[self.at]
        self.at += 1
        if name in _BARE:
            arguments = self._bare_arguments(name)
            return Directive(start, self.end, name, arguments, False)
        arguments = self.balanced((";",))
        self.expect(";")
        return Directive(start, self.end, name, arguments, True)

    def _bare_arguments(self, name: str) -> tuple[str, ...]:
        """What follows a directive that nothing ends; only ``.loc`` and ``.file`` may go on after the first values."""
        first = self.at
        if name == ".loc":
            for _ in range(3):
                self.number("a position in the source")
        elif name == ".file":
            self.number("a file's number")
            self.take(STRING, "a file's name")
        else:
            self._value()
        while self.accept(","):
            self._value()
            if name == ".loc" and self.texts[self.at - 1] == "function_name":
                self.word("a label")
                if self.accept("+"):
                    self.number("an offset")
            elif name == ".loc" and self.texts[self.at - 1] == "inlined_at":
                for _ in range(3):
                    self.number("a position in the source")
        return tuple(self.texts[first : self.at])

    def _value(self) -> None:
        if self.kinds[self.at] not in (WORD, NUMBER):
            self.fail(f"a value is missing before {self.found()}.")
        self.at += 1

    def _section(self) -> Section:
        start = self.start
        self.at += 1
        if self.kinds[self.at] not in (WORD, DIRECTIVE):
            self.fail(f"a section's name is missing before {self.found()}.")
        name = self.texts[self.at]
        self.at += 1
        self.expect("{")
        tokens = self.balanced(("}",))
        self.expect("}")
        return Section(start, self.end, name, tokens)
