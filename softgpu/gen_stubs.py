#!/usr/bin/env python3
"""Generate the software GPU's exported symbols from the list of driver entry points.

Reads ``frontend/cuda_api.def`` and the C files of ``softgpu/`` and writes two files:

``softgpu_impl.h``
    a prototype ``CUresult softgpu_<symbol>(...)`` for every entry point, so that the compiler checks each
    implementation against the list;
``softgpu_api.inc``
    the exported function of every entry point, and the table behind cuGetProcAddress.

An entry point counts as implemented when a C file defines ``softgpu_<symbol>`` at the start of a line. A per-thread
default stream spelling (``_ptsz``, ``_ptds``) uses the plain one's implementation; an older version uses a newer one's
when their parameters are the same. Everything else answers CUDA_ERROR_NOT_SUPPORTED.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

DEFINITION = re.compile(r"^CUresult softgpu_(cu\w+)\(", re.MULTILINE)

# Usable before cuInit, and in a forked child.
ANYTIME = {
    "cuInit",
    "cuDriverGetVersion",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuGetErrorString",
    "cuGetErrorName",
    "cuGetExportTable",
}
UNGATED_EFFECTS = {"pure", "special", "init"}

# They look at memory of the GPU, and no lock of the driver's keeps them from it (bench/ungated.py).
POLLS = {"cuStreamQuery", "cuEventQuery"}


@dataclass(frozen=True)
class Entry:
    """One line of cuda_api.def."""

    symbol: str
    name: str
    version: int
    stream: str
    effect: str
    parameters: tuple[tuple[str, str], ...]  # (declaration, name)

    @property
    def declaration(self) -> str:
        return ", ".join(text for text, _ in self.parameters) or "void"

    @property
    def arguments(self) -> str:
        return ", ".join(name for _, name in self.parameters)

    @property
    def shape(self) -> str:
        """The parameter types in one spelling, to find versions that differ in name only."""
        types = [re.sub(r"\w+$", "", text.replace("*", " * ")) for text, _ in self.parameters]
        plain = [re.sub(r"\b(CUdevice|CUcontext)_v\d\b", r"\1", text) for text in types]
        plain = [text.replace("CUdeviceptr_v2", "CUdeviceptr") for text in plain]
        return "|".join(" ".join(text.split()) for text in plain)


def parse_parameters(text: str) -> tuple[tuple[str, str], ...]:
    """Split ``int *a, void **b`` into declarations and names."""
    if text.strip() == "void":
        return ()
    found = []
    for part in text.split(","):
        declaration = part.strip()
        match = re.search(r"(\w+)$", declaration)
        if match is None:
            raise ValueError(f"parameter without a name: {declaration!r}")
        found.append((declaration, match.group(1)))
    return tuple(found)


def read_list(path: Path) -> list[Entry]:
    """Read cuda_api.def. Raises ValueError with the line's number for a line that is not six columns."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = [column.strip() for column in line.split("|")]
        if len(columns) != 6:
            raise ValueError(f"{path}:{number}: expected 6 columns, found {len(columns)}")
        symbol, name, version, stream, effect, parameters = columns
        entries.append(Entry(symbol, name, int(version), stream, effect, parse_parameters(parameters)))
    return entries


def read_definitions(folder: Path) -> set[str]:
    """The symbols that the C files of the folder implement. Raises ValueError if two files define the same one."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.c")):
        for symbol in DEFINITION.findall(path.read_text()):
            if symbol in found:
                raise ValueError(f"softgpu_{symbol} is defined in {found[symbol].name} and in {path.name}")
            found[symbol] = path
    return set(found)


def implementation(entry: Entry, entries: list[Entry], defined: set[str]) -> str | None:
    """The implementation that serves an entry point, or None."""
    plain = re.sub(r"_pt[sd][sz]$", "", entry.symbol)
    for symbol in (entry.symbol, plain):
        if symbol in defined:
            return symbol
    for other in entries:
        if other.name == entry.name and other.symbol in defined and other.shape == entry.shape:
            return other.symbol
    return None


def wrapper(index: int, entry: Entry, target: str | None) -> str:
    """The exported function of one entry point."""
    if target is None:
        # Every parameter is unused: a cast each keeps -Wextra quiet.
        unused = " ".join(f"(void)({name});" for _, name in entry.parameters)
        body = (
            f"    {unused}\n    return sg_unsupported({index});" if unused else f"    return sg_unsupported({index});"
        )
    elif entry.symbol in ANYTIME:
        body = f"    return softgpu_{target}({entry.arguments});"
    else:
        gated = "false" if entry.effect in UNGATED_EFFECTS else "true"
        per_thread = "true" if entry.stream in ("ptsz", "ptds") else "false"
        crashes = "true" if entry.name in POLLS else ""
        if entry.effect == "query":  # a thread's own stream is made when it is first asked about
            stream = entry.arguments.partition(",")[0]
            crashes = f"{stream} == CU_STREAM_PER_THREAD" + (f" || !{stream}" if entry.stream == "ptsz" else "")
        if crashes:
            gated = "false"
        call = f"sg_leave({gated}, softgpu_{target}({entry.arguments}))"
        body = f"    CUresult result_ = sg_enter({index}, {gated}, {per_thread});\n"
        if crashes:
            body += (
                f"    bool polls = {crashes};\n"
                f"    if (result_ == CUDA_SUCCESS) {{\n"
                f"        if (polls)\n"
                f"            sg_poll_begin({index});\n"
                f"        result_ = {call};\n"
                f"        if (polls)\n"
                f"            sg_poll_end();\n"
                f"    }}\n"
            )
        else:
            body += f"    if (result_ == CUDA_SUCCESS)\n        result_ = {call};\n"
        body += "    return result_;"
    # The exported name is an alias, so that the table below holds this library's own function even where a preloaded
    # library defines the same name.
    return (
        f"static CUresult entry_{entry.symbol}({entry.declaration})\n{{\n{body}\n}}\n"
        f'SG_EXPORT CUresult {entry.symbol}({entry.declaration}) __attribute__((alias("entry_{entry.symbol}")));\n'
    )


def generate(entries: list[Entry], defined: set[str]) -> tuple[str, str]:
    """Return the text of softgpu_impl.h and of softgpu_api.inc."""
    unknown = defined - {entry.symbol for entry in entries}
    if unknown:
        raise ValueError(f"not in cuda_api.def: {', '.join(sorted(unknown))}")
    note = "/* Generated by softgpu/gen_stubs.py from frontend/cuda_api.def: do not edit. */\n"
    header = [note, "#ifndef SOFTGPU_IMPL_H\n#define SOFTGPU_IMPL_H\n"]
    for entry in entries:
        header.append(f"CUresult softgpu_{entry.symbol}({entry.declaration});\n")
    header.append("#endif\n")
    body = [note]
    table = ["const struct sg_entry sg_entries[] = {\n"]
    for index, entry in enumerate(entries):
        target = implementation(entry, entries, defined)
        body.append(wrapper(index, entry, target))
        stream = {
            "legacy": "SG_STREAM_LEGACY",
            "ptsz": "SG_STREAM_PTSZ",
            "ptds": "SG_STREAM_PTSZ",
            "-": "SG_STREAM_ANY",
        }
        table.append(
            f'    {{"{entry.name}", "{entry.symbol}", {entry.version}, {stream[entry.stream]}, '
            f"{'true' if target else 'false'}, (void (*)(void))entry_{entry.symbol}}},\n"
        )
    table.append("};\nconst unsigned sg_entry_count = sizeof(sg_entries) / sizeof(sg_entries[0]);\n")
    return "".join(header), "\n".join(body) + "\n" + "".join(table)


def write_if_changed(path: Path, text: str) -> None:
    """Keep the time stamp of a file whose text is the same, so that make does not rebuild."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main() -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", type=Path, default=here.parent / "frontend" / "cuda_api.def")
    parser.add_argument("--sources", type=Path, default=here)
    parser.add_argument("--output", type=Path, default=here.parent / "build" / "gen")
    parser.add_argument("--missing", action="store_true", help="print the names of entry points without implementation")
    options = parser.parse_args()
    try:
        entries = read_list(options.list)
        defined = read_definitions(options.sources)
        if options.missing:
            for entry in entries:
                if implementation(entry, entries, defined) is None:
                    print(entry.symbol)
            return 0
        header, body = generate(entries, defined)
    except (OSError, ValueError) as error:
        print(f"gen_stubs: {error}", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    write_if_changed(options.output / "softgpu_impl.h", header)
    write_if_changed(options.output / "softgpu_api.inc", body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
