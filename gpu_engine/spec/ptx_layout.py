"""Parameter layouts from PTX text, for modules of which nothing else could be read. Data flow is ptx_flow's."""

from __future__ import annotations

import re

from phos.gpu_engine.spec.descriptor import Parameter
from phos.gpu_engine.spec.errors import SpecError

MAX_PARAMETER_BYTES = 1 << 16

# Strings as well: names of files may look like the beginning of a comment, and no parameter has a string.
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$%][\w$]*)\s*(\(([^()]*)\))?")
_PARAMETER = re.compile(
    r"""\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?
        \.(?P<type>[busf]\d+|pred|texref|samplerref|surfref)
        (?:\s+\.ptr(?:\s+\.(?:const|global|local|shared|generic|param))?(?:\s+\.align\s+\d+)?)?
        \s+[A-Za-z_$%][\w$]*\s*(?:\[\s*(?P<count>\d+)\s*\])?\s*""",
    re.VERBOSE,
)
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def is_ptx(text: bytes) -> bool:
    """Whether this looks like PTX: the directive that has to come first is there."""
    return b".version" in text[: 1 << 16]


def parameter_base(capability: int) -> int:
    """Where the parameter block begins in constant bank 0, bytes; read from cubins that CUDA 13.0's ptxas wrote.

    It counts for parameters that are aligned to more than 16 bytes, like tensor maps: their place in the *bank* is
    aligned, so that their offset in the block differs between architectures.
    """
    if capability >= 100:
        return 0x380
    return 0x210 if capability >= 90 else 0x160 if capability >= 70 else 0x140


def layouts(text: str, capability: int) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each kernel in a PTX module once compiled for a GPU of this capability.

    PTX ISA, "Kernel Function Parameters". Raises SpecError.
    """
    base = parameter_base(capability)
    return {
        match.group(1): _parameters(match.group(1), match.group(3) or "", base)
        for match in _ENTRY.finditer(_COMMENT.sub(" ", text))
    }


def _parameters(kernel: str, text: str, base: int) -> tuple[Parameter, ...]:
    found = []
    offset = 0
    for declared in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAMETER.fullmatch(declared)
        if match is None:
            raise SpecError(
                f'PTX declares a parameter of kernel {kernel} in a form that is not known: "{declared[:80]}".'
            )
        unit = _BYTES.get(match["type"].lstrip("busf"), 8)  # references to textures and surfaces are handles
        size = unit * int(match["count"] or 1)
        align = max(int(match["align"] or unit), 1)
        offset = -(-(base + offset) // align) * align - base
        if offset + size > MAX_PARAMETER_BYTES:
            raise SpecError(f"PTX declares more than {MAX_PARAMETER_BYTES} bytes of parameters for kernel {kernel}.")
        found.append(Parameter(offset, size))
        offset += size
    return tuple(found)
