"""A few instructions of machine code, written for what they show, and what a kernel of them does."""

from __future__ import annotations

from phos.gpu_engine.spec import sass_flow
from phos.gpu_engine.spec.descriptor import Parameter
from phos.gpu_engine.spec.sass_state import Layout
from phos.gpu_engine.spec.sass_text import parse
from tests.unit.spec_access import Expected, as_expected


def flow(
    code: str,
    *parameters: Parameter,
    architecture: int = 90,
    slots: dict[int, str] | None = None,
    name: str = "k",
    base: int = 0x210,
) -> Expected:
    """What a kernel of these instructions does."""
    lines = [
        line if line.endswith(":") else f"/*{16 * n:04x}*/ {line} ;"
        for n, line in enumerate(line.strip() for line in code.splitlines() if line.strip())
    ]
    text = f'.target sm_{architecture}\n.section .text.{name},"ax",@progbits\n{name}:\n' + "\n".join(lines)
    size = max((p.offset + p.size for p in parameters), default=0)
    layouts = {name: (tuple(parameters), Layout(base, size, architecture))}
    return as_expected(sass_flow.describe_listing(parse(text), layouts, slots or {})[name])


P0, P1, P2 = Parameter(0, 8), Parameter(8, 8), Parameter(16, 8)
