"""``python -m phos.gpu_engine.spec FILE``: print the access descriptors of the kernels in a module."""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
from collections import Counter

import click
from rich.console import Console
from rich.table import Table

from phos.gpu_engine.spec import analysis
from phos.gpu_engine.spec.cache import encode
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind
from phos.gpu_engine.spec.errors import SpecError

LETTERS = {Access.NONE: "-", Access.READ: "r", Access.WRITE: "w", Access.READ | Access.WRITE: "rw"}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--kernel", "kernels", multiple=True, help="Only kernels with this in their (mangled) name; may be repeated."
)
@click.option("--capability", default=0, help="The GPU's, as 90 for 9.0; else the newest architecture in the file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each kernel and line.")
@click.option("--verbose", is_flag=True, help="Say why a better source was not used.")
def main(file: str, kernels: tuple[str, ...], capability: int, as_json: bool, verbose: bool) -> None:
    """Print what is known of the kernels in FILE: a cubin, PTX, a fat binary, or a program or library with GPU code."""
    logging.basicConfig(level=logging.WARNING if verbose else logging.ERROR, format="%(message)s")
    try:
        found = _describe(file, capability, kernels)
    except SpecError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        for item in found:
            print(json.dumps(_plain(item)))
        return
    _print_table(found)


def _describe(file: str, capability: int, parts: tuple[str, ...]) -> list[AccessDescriptor]:
    with open(file, "rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            raise SpecError(f"{file} is empty.")
        image = memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
    wanted = None
    if parts:
        wanted = [name for name in analysis.kernels(image, capability) if any(part in name for part in parts)]
        if not wanted:
            raise SpecError(f"No kernel in {file} has {' or '.join(parts)} in its name.")
    return list(analysis.describe(image, capability, wanted).values())


def _plain(found: AccessDescriptor) -> dict[str, object]:
    kernel, parameters, *_ = encode(found)
    return {
        "kernel": kernel,
        "source": found.source.name.lower(),
        "parameters": [{"offset": offset, "size": size} for offset, size in parameters],
        "fields": [
            {"offset": f.offset, "size": f.size, "access": LETTERS[f.access], "kind": f.kind.name.lower()}
            for f in found.fields
        ],
        "indirect": LETTERS[found.indirect],
        "guessed": found.guessed,
    }


def _print_table(found: list[AccessDescriptor]) -> None:
    table = Table("kernel", "source", "parameters", "through them", "indirect")
    for item in found:
        sizes = " ".join(str(parameter.size) for parameter in item.parameters)
        table.add_row(item.kernel, item.source.name, sizes, _fields(item.fields), LETTERS[item.indirect])
    # Names are looked for by people and by tools: as long as they are, unless this is a terminal.
    console = Console(width=None if sys.stdout.isatty() else 1 << 16, markup=False, emoji=False)
    console.print(table)
    sources = Counter(item.source.name for item in found)
    counts = ", ".join(f"{count} from {name}" for name, count in sorted(sources.items()))
    console.print(f"{len(found)} kernels: {counts or 'none'}. Fields are offset:size, access; * scanned, # tensor map.")


def _fields(fields: tuple[Field, ...]) -> str:
    marks = {FieldKind.POINTER: "", FieldKind.SCAN: "*", FieldKind.TENSOR_MAP: "#", FieldKind.TABLE: "@"}
    return "  ".join(f"{f.offset}:{f.size}{marks[f.kind]} {LETTERS[f.access]}" for f in fields)


if __name__ == "__main__":
    main()
