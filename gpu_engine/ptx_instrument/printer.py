"""A Module as text again: in our own layout (`show`), or the text it was read from with insertions (`Edits`)."""

from __future__ import annotations

from phos.gpu_engine.ptx_instrument.operands import Operand
from phos.gpu_engine.ptx_instrument.statements import (
    Block,
    Directive,
    Function,
    Instruction,
    Item,
    Label,
    Module,
    Node,
    Prototype,
    Section,
    Statement,
    Targets,
    Variable,
)


def show(module: Module) -> str:
    """The module as text. Read again, it gives an equal module. Comments are lost."""
    return "\n".join(_item(item) for item in module.items) + "\n"


def show_statement(statement: Statement) -> str:
    """One statement of a body as text."""
    lines: list[str] = []
    _statement(statement, "", lines)
    return "\n".join(lines)


class Edits:
    """Insertions into the text of a module, beside its nodes; everything else stays as it was, comments too."""

    def __init__(self, module: Module) -> None:
        self._text = module.text
        self._edits: list[tuple[int, int, int, str]] = []

    def before(self, node: Node, text: str) -> None:
        """Put ``text`` before a node; of several, the first stands first."""
        self._edits.append((node.start, 1, node.start, text))

    def after(self, node: Node, text: str) -> None:
        """Put ``text`` after a node."""
        self._edits.append((node.end, 0, node.end, text))

    def replace(self, node: Node, text: str) -> None:
        """Put ``text`` in a node's place. Nothing else may be done inside the node."""
        self._edits.append((node.start, 2, node.end, text))

    def inside(self, block: Block, text: str) -> None:
        """Put ``text`` at the beginning of a block."""
        self._edits.append((block.start + 1, 0, block.start + 1, text))

    def text(self) -> str:
        """The text with all of it. Raises ValueError if two edits claim the same characters."""
        parts: list[str] = []
        at = 0
        for start, _, end, inserted in sorted(self._edits, key=lambda edit: edit[:2]):
            if start < at:
                raise ValueError(f"two edits claim the characters before {at}")
            parts += [self._text[at:start], inserted]
            at = end
        return "".join([*parts, self._text[at:]])


def _item(item: Item) -> str:
    if isinstance(item, Function):
        return _function(item)
    return show_statement(item)


def _function(function: Function) -> str:
    words = [*function.linkage, ".entry" if function.kernel else ".func", *function.attributes]
    if function.results:
        words.append(f"({_variables(function.results)})")
    head = f"{' '.join(words)} {function.name}({_variables(function.parameters)})"
    if not function.parameters:
        head = head[:-2] if function.kernel else head
    lines = [head, *(_directive(directive) for directive in function.directives)]
    if function.body is None:
        return "\n".join(lines) + ";"
    _statement(function.body, "", lines)
    return "\n".join(lines)


def _variables(variables: tuple[Variable, ...]) -> str:
    return ", ".join(_variable(variable) for variable in variables)


def _variable(variable: Variable) -> str:
    words = [*variable.linkage, variable.space]
    if variable.alignment is not None and not variable.pointer:
        words += [".align", str(variable.alignment)]
    kind = [word for word in (variable.vector, variable.type) if word]
    # `.attribute(…)` stands before the type, `.ptr` behind it.
    words += [*kind, *variable.attributes] if variable.pointer else [*variable.attributes, *kind]
    if variable.alignment is not None and variable.pointer:
        words += [".align", str(variable.alignment)]
    names = []
    for declarator in variable.declarators:
        name = declarator.name
        if declarator.count is not None:
            name += f"<{declarator.count}>"
        name += "".join("[]" if size is None else f"[{size}]" for size in declarator.sizes)
        if declarator.initial:
            name += " = " + " ".join(declarator.initial)
        names.append(name)
    return " ".join(words) + " " + ", ".join(names)


def _directive(directive: Directive) -> str:
    return " ".join((directive.name, *directive.arguments)) + (";" if directive.ended else "")


def _operands(operands: tuple[Operand, ...]) -> str:
    return ", ".join(map(str, operands))


def _statement(statement: Statement, indent: str, lines: list[str]) -> None:
    """Append a statement's lines. Nested blocks are walked with a stack: a text may nest them without limit."""
    stack: list[Statement | str] = [statement]
    while stack:
        now = stack.pop()
        if isinstance(now, str):
            indent = indent[:-1]
            lines.append(indent + now)
        elif isinstance(now, Block):
            lines.append(indent + "{")
            indent += "\t"
            stack.append("}")
            stack += reversed(now.statements)
        else:
            lines.append(indent + _line(now))


def _line(statement: Statement) -> str:
    if isinstance(statement, Instruction):
        guard = f"@{statement.guard} " if statement.guard else ""
        return f"{guard}{statement.opcode} {_operands(statement.operands)}".rstrip() + ";"
    if isinstance(statement, Label):
        return f"{statement.name}:"
    if isinstance(statement, Variable):
        return _variable(statement) + ";"
    if isinstance(statement, Directive):
        return _directive(statement)
    if isinstance(statement, Targets):
        return f"{statement.label}: {statement.directive} {', '.join(statement.names)};"
    if isinstance(statement, Section):
        return f".section {statement.name} {{ {' '.join(statement.tokens)} }}"
    if isinstance(statement, Prototype):
        results = f"({_variables(statement.results)}) " if statement.results else ""
        tail = "".join(" " + _directive(directive) for directive in statement.directives)
        return f"{statement.label}: .callprototype {results}_ ({_variables(statement.parameters)}){tail};"
    raise TypeError(f"{type(statement).__name__} is no line")
