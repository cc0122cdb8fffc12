#!/usr/bin/env python3
"""Turn `cuda_api.def`, the one list of driver entry points, into what is built from it.

`gen_api.py --output FOLDER` writes `phos_api.h` (prototypes, the table of real pointers, names) and `phos_hooks.inc`
(one wrapper an entry point) into FOLDER; `--docs FILE` writes the page `docs/driver-api.md`, and `--check` sees that it
is up to date. A file is rewritten only if its content changed. Other generators import `parse`.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Entry points with code of their own behind the gate: the generated wrapper calls serve_<name>() in the file named
# here instead of the driver. A spelling for the per-thread default stream is served by the same function, which then
# gets CU_STREAM_PER_THREAD in place of stream 0, unless it is listed itself.
SERVED: dict[str, tuple[str, ...]] = {
    "memory.c": (
        "cuMemAlloc_v2",
        "cuMemAllocPitch_v2",
        "cuMemFree_v2",
        "cuMemGetInfo_v2",
    ),
    "query.c": (
        "cuMemGetAddressRange_v2",
        "cuPointerGetAttribute",
        "cuPointerGetAttributes",
    ),
    "vmm.c": (
        "cuMemCreate",
        "cuMemRelease",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemSetAccess",
        "cuMemGetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemRetainAllocationHandle",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMulticastBindMem",
        "cuMulticastBindAddr",
        "cuMemMapArrayAsync",
    ),
    "pool.c": (
        "cuMemAllocAsync",
        "cuMemAllocFromPoolAsync",
        "cuMemFreeAsync",
    ),
    "pool_handle.c": (
        "cuMemPoolCreate",
        "cuMemPoolDestroy",
        "cuMemPoolTrimTo",
        "cuMemPoolSetAttribute",
        "cuMemPoolGetAttribute",
        "cuMemPoolSetAccess",
        "cuMemPoolImportFromShareableHandle",
    ),
    "host.c": (
        "cuMemHostAlloc",
        "cuMemAllocHost_v2",
        "cuMemFreeHost",
        "cuMemHostRegister_v2",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuMemHostGetFlags",
    ),
    "ipc.c": (
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuIpcOpenMemHandle",
        "cuIpcCloseMemHandle",
        "cuIpcGetEventHandle",
    ),
    "module.c": (
        "cuModuleLoad",
        "cuModuleLoadData",
        "cuModuleLoadDataEx",
        "cuModuleLoadFatBinary",
        "cuLibraryLoadData",
        "cuLibraryLoadFromFile",
        "cuLinkComplete",
    ),
    "functions.c": (
        "cuModuleGetFunction",
        "cuModuleEnumerateFunctions",
        "cuModuleUnload",
        "cuLibraryGetKernel",
        "cuLibraryEnumerateKernels",
        "cuLibraryGetModule",
        "cuLibraryUnload",
        "cuKernelGetFunction",
    ),
    "graphs.c": (
        "cuGraphInstantiate",
        "cuGraphInstantiate_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphInstantiateWithParams",
        "cuGraphInstantiateWithParams_ptsz",
        "cuGraphExecDestroy",
        "cuGraphExecUpdate",
        "cuGraphExecUpdate_v2",
        "cuGraphExecKernelNodeSetParams",
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphExecMemsetNodeSetParams",
        "cuGraphExecBatchMemOpNodeSetParams",
        "cuGraphExecChildGraphNodeSetParams",
        "cuGraphExecNodeSetParams",
        "cuGraphNodeSetEnabled",
        "cuGraphDestroy",
        "cuGraphDestroyNode",
    ),
    "tensor_maps.c": (
        "cuTensorMapEncodeTiled",
        "cuTensorMapEncodeIm2col",
        "cuTensorMapEncodeIm2colWide",
        "cuTensorMapReplaceAddress",
    ),
    "track.c": (
        "cuCtxCreate_v4",
        "cuCtxCreate_v3",
        "cuCtxCreate_v2",
        "cuCtxCreate",
        "cuCtxDestroy_v2",
        "cuCtxDestroy",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxReset_v2",
        "cuDevicePrimaryCtxReset",
        "cuCtxFromGreenCtx",
        "cuCtxEnablePeerAccess",
        "cuCtxDisablePeerAccess",
        "cuStreamBeginCapture_v2",
        "cuStreamBeginCapture",
        "cuStreamBeginCaptureToGraph",
        "cuStreamEndCapture",
        "cuStreamDestroy_v2",
        "cuStreamDestroy",
    ),
    "uncarried.c": (
        "cuMemAllocManaged",
        "cuArrayCreate_v2",
        "cuArrayCreate",
        "cuArray3DCreate_v2",
        "cuArray3DCreate",
        "cuMipmappedArrayCreate",
        "cuArrayDestroy",
        "cuMipmappedArrayDestroy",
        "cuImportExternalMemory",
        "cuDestroyExternalMemory",
        "cuMulticastCreate",
        "cuGraphAddMemAllocNode",
        "cuGraphAddNode_v2",
        "cuGraphAddNode",
    ),
}

# Entry points that read or write device memory, by the file with their touch_<name>(), which works out what they touch.
# In the window of a concurrent checkpoint the wrapper calls it, and window.c, before the driver.
TOUCHED: dict[str, tuple[str, ...]] = {
    "touch_copy.c": (
        "cuMemcpy",
        "cuMemcpyAsync",
        "cuMemcpyPeer",
        "cuMemcpyPeerAsync",
        "cuMemcpyHtoD_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoH_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoD_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoA_v2",
        "cuMemcpyAtoD_v2",
        "cuMemcpyHtoA_v2",
        "cuMemcpyHtoAAsync_v2",
        "cuMemcpyAtoH_v2",
        "cuMemcpyAtoHAsync_v2",
        "cuMemcpyAtoA_v2",
        "cuMemcpyHtoD",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoH",
        "cuMemcpyDtoHAsync",
        "cuMemcpyDtoD",
        "cuMemcpyDtoDAsync",
        "cuMemcpyDtoA",
        "cuMemcpyAtoD",
        "cuMemcpyHtoA",
        "cuMemcpyHtoAAsync",
        "cuMemcpyAtoH",
        "cuMemcpyAtoHAsync",
        "cuMemcpyAtoA",
        "cuMemcpy2D_v2",
        "cuMemcpy2DUnaligned_v2",
        "cuMemcpy2DAsync_v2",
        "cuMemcpy3D_v2",
        "cuMemcpy3DAsync_v2",
        "cuMemcpy2D",
        "cuMemcpy2DUnaligned",
        "cuMemcpy2DAsync",
        "cuMemcpy3D",
        "cuMemcpy3DAsync",
        "cuMemcpy3DPeer",
        "cuMemcpy3DPeerAsync",
        "cuMemcpyBatchAsync",
        "cuMemcpyBatchAsync_v2",
        "cuMemcpy3DBatchAsync",
        "cuMemcpy3DBatchAsync_v2",
        "cuMemBatchDecompressAsync",
    ),
    "touch_set.c": (
        "cuMemsetD8_v2",
        "cuMemsetD16_v2",
        "cuMemsetD32_v2",
        "cuMemsetD2D8_v2",
        "cuMemsetD2D16_v2",
        "cuMemsetD2D32_v2",
        "cuMemsetD8Async",
        "cuMemsetD16Async",
        "cuMemsetD32Async",
        "cuMemsetD2D8Async",
        "cuMemsetD2D16Async",
        "cuMemsetD2D32Async",
        "cuMemsetD8",
        "cuMemsetD16",
        "cuMemsetD32",
        "cuMemsetD2D8",
        "cuMemsetD2D16",
        "cuMemsetD2D32",
        "cuStreamWriteValue32",
        "cuStreamWriteValue32_v2",
        "cuStreamWriteValue64",
        "cuStreamWriteValue64_v2",
        "cuStreamWaitValue32",
        "cuStreamWaitValue32_v2",
        "cuStreamWaitValue64",
        "cuStreamWaitValue64_v2",
        "cuStreamBatchMemOp",
        "cuStreamBatchMemOp_v2",
        "cuMemDiscardBatchAsync",
        "cuMemDiscardAndPrefetchBatchAsync",
    ),
    "touch_launch.c": (
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchCooperativeKernel",
        "cuLaunchCooperativeKernelMultiDevice",
        "cuLaunch",
        "cuLaunchGrid",
        "cuLaunchGridAsync",
        "cuGraphLaunch",
    ),
}

# Launches that may be made of a kernel's twin instead (twins_launch.c).
TWINNED = {"cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"}

# These never pass the gate: they change nothing, and an application asks for them before cuInit.
UNGATED_SERVED = {"cuInit", "cuGetProcAddress", "cuGetProcAddress_v2"}
# Never wrapped: pure ones, the driver's private tables, and what only a checkpointing tool calls, on other processes.
PASSED_SPECIAL = {"cuGetExportTable"}


@dataclass(frozen=True)
class Entry:
    """One row of the list: one exported symbol of the driver."""

    symbol: str
    name: str  # as asked for at cuGetProcAddress
    since: int  # CUDA version that introduced this form, 1000 * major + 10 * minor
    stream: str  # default stream: "legacy", "ptsz", "ptds", or "-" where it does not matter
    effect: str
    parameters: tuple[tuple[str, str], ...]  # (type, name)

    @property
    def declaration(self) -> str:
        """The parameter list in C."""
        return ", ".join(f"{kind} {name}".replace("* ", "*") for kind, name in self.parameters) or "void"

    @property
    def arguments(self) -> str:
        return ", ".join(name for _, name in self.parameters)

    @property
    def base(self) -> str:
        """The symbol without its per-thread-default-stream suffix."""
        return re.sub(r"_(ptsz|ptds)$", "", self.symbol)

    @property
    def hooked(self) -> bool:
        if self.symbol in UNGATED_SERVED:
            return True
        return self.effect not in ("pure", "special")


def _parameter(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)(\w+)", text.strip())
    if match is None or not match[1].strip():
        raise ValueError(f"cannot tell type from name in {text!r}")
    return re.sub(r"\s*\*", " *", match[1].strip()).replace("* *", "**"), match[2]


def parse(path: Path) -> list[Entry]:
    """Read the list. Raises ValueError with the line number where a row is malformed or a symbol comes twice."""
    entries: list[Entry] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(" | ")]
        if len(fields) != 6:
            raise ValueError(f"{path.name}, line {number}: {len(fields)} columns, expected 6")
        symbol, name, since, stream, effect, parameters = fields
        if symbol in seen:
            raise ValueError(f"{path.name}, line {number}: {symbol} comes twice")
        seen.add(symbol)
        try:
            parsed = () if parameters == "void" else tuple(_parameter(p) for p in parameters.split(","))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        entries.append(Entry(symbol, name, int(since), stream, effect, parsed))
    return entries


BANNER = "/* Generated by frontend/gen_api.py from frontend/cuda_api.def. */\n"


def header(entries: list[Entry]) -> str:
    """phos_api.h: the driver's types under their exact spellings, the table of real pointers, serve_ prototypes."""
    names = sorted({e.symbol for e in entries} | {e.name for e in entries})
    served = {name for group in SERVED.values() for name in group} | UNGATED_SERVED
    out = [BANNER, "#pragma once\n#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n\n"]
    out.append(
        "/* cuda.h renames entry points by macro (cuMemAlloc to cuMemAlloc_v2 ...); here every name means itself. */\n"
    )
    out += [f"#undef {name}\n" for name in names]
    out.append("\nenum phos_api {\n")
    out += [f"    API_{e.symbol},\n" for e in entries]
    out.append("    PHOS_API_COUNT\n};\n\n")
    out.append(
        "/* The driver's own functions. Every slot is callable once phos_resolve_bind() succeeded: what this driver\n"
        " * lacks answers CUDA_ERROR_NOT_SUPPORTED. */\n"
        "union phos_real {\n    void *slot[PHOS_API_COUNT];\n    struct {\n"
    )
    out += [f"        CUresult (*{e.symbol})({e.declaration});\n" for e in entries]
    out.append("    };\n};\nextern union phos_real phos_real;\n\n")
    out.append(
        "struct phos_api_row {\n    const char *symbol, *name;\n    int since;\n"
        "    char stream; /* 'l'egacy, 'p'er-thread, '-' where it does not matter */\n"
        "    void *wrapper; /* NULL: not hooked */\n};\n"
        "extern const struct phos_api_row phos_api_rows[PHOS_API_COUNT];\n"
        "/* Indices of phos_api_rows in the order of their symbols, for binary search. */\n"
        "extern const unsigned short phos_api_by_symbol[PHOS_API_COUNT];\n\n"
    )
    done: set[str] = set()
    for entry in entries:
        for name in (entry.base, entry.symbol):
            if name in served and name not in done:
                prototype = next(e for e in entries if e.symbol == name)
                out.append(f"CUresult serve_{name}({prototype.declaration});\n")
                done.add(name)
    missing = served - done
    if missing:
        raise ValueError(f"served, but not in the list: {', '.join(sorted(missing))}")
    touched = {name for group in TOUCHED.values() for name in group}
    if touched & served:
        raise ValueError(f"served, and touched as well: {', '.join(sorted(touched & served))}")
    out.append("\n/* What a call touches. */\nstruct phos_touches;\n")
    for name in sorted(touched):
        found = next((e for e in entries if e.symbol == name), None)
        if found is None:
            raise ValueError(f"touched, but not in the list: {name}")
        out.append(f"void touch_{name}(struct phos_touches *touches, {found.declaration});\n")
    return "".join(out)


def _explicit(entry: Entry) -> str:
    """The arguments, the per-thread default stream spelt out."""
    arguments = [name for _, name in entry.parameters]
    if entry.stream == "ptsz":
        for i, (kind, name) in enumerate(entry.parameters):
            if kind.strip() == "CUstream":
                arguments[i] = f"phos_per_thread({name})"
                break
    return ", ".join(arguments)


def _call(entry: Entry, served: set[str]) -> str:
    if entry.base not in served:
        return f"phos_real.{entry.symbol}({entry.arguments})"
    if entry.symbol in served:
        return f"serve_{entry.symbol}({entry.arguments})"
    return f"serve_{entry.base}({_explicit(entry)})"


def _traced(entry: Entry) -> str:
    """The function behind the wrapper of an entry point in TOUCHED, for a traced gate."""
    per_thread = "true" if entry.stream in ("ptsz", "ptds") else "false"
    call = f"phos_real.{entry.symbol}({entry.arguments})"
    if entry.base in TWINNED:
        twin = f"twin_{entry.base}(&touches_, phos_real.{entry.symbol}, {entry.arguments})"
        call = f"phos_twin_wanted(&touches_) ? {twin} : {call}"
    return (
        f"static __attribute__((noinline, cold)) CUresult traced_{entry.symbol}({entry.declaration})\n{{\n"
        f'    HOOK_TRACED(touch_{entry.base}(&touches_, {_explicit(entry)}), {per_thread}, "{entry.symbol}",\n'
        f"                {call});\n}}\n\n"
    )


def hooks(entries: list[Entry]) -> str:
    """phos_hooks.inc: one wrapper an entry point, the exported aliases, the version table."""
    served = {name for group in SERVED.values() for name in group}
    touched = {name for group in TOUCHED.values() for name in group}
    out = [BANNER]
    for e in entries:
        if not e.hooked:
            continue
        if e.base in touched:
            out.append(_traced(e))
        out.append(f"static CUresult hook_{e.symbol}({e.declaration})\n{{\n")
        if e.symbol in UNGATED_SERVED:
            out.append(f"    return serve_{e.symbol}({e.arguments});\n")
        elif e.base in served:
            nested = f"phos_real.{e.symbol}({e.arguments})"
            out.append(f"    HOOK_SERVE(API_{e.symbol}, {_call(e, served)}, {nested});\n")
        elif e.base in touched:
            traced = f"traced_{e.symbol}({e.arguments})"
            out.append(f"    HOOK_TOUCH(API_{e.symbol}, {_call(e, served)}, {traced});\n")
        else:
            out.append(f"    HOOK_PASS(API_{e.symbol}, {_call(e, served)});\n")
        out.append(f"}}\nHOOK_EXPORT({e.symbol}, ({e.declaration}));\n\n")
    out.append("const struct phos_api_row phos_api_rows[PHOS_API_COUNT] = {\n")
    for e in entries:
        letter = {"legacy": "l", "ptsz": "p", "ptds": "p", "-": "-"}[e.stream]
        wrapper = f"(void *)hook_{e.symbol}" if e.hooked else "NULL"
        out.append(f'    [API_{e.symbol}] = {{"{e.symbol}", "{e.name}", {e.since}, \'{letter}\', {wrapper}}},\n')
    out.append("};\n\nconst unsigned short phos_api_by_symbol[PHOS_API_COUNT] = {\n")
    out += [f"    API_{e.symbol},\n" for e in sorted(entries, key=lambda e: e.symbol.encode())]
    out.append("};\n")
    return "".join(out)


TREATMENT = {
    "served": "served by the frontend itself",
    "traced": "passes the gate, then goes to the driver; in the window of a concurrent checkpoint, what it touches is "
    "worked out first",
    "gated": "passes the gate, then goes to the driver",
    "passed": "goes straight to the driver",
}


def docs_page(entries: list[Entry]) -> str:
    """docs/driver-api.md: what happens to each entry point."""
    served = {name for group in SERVED.values() for name in group} | UNGATED_SERVED
    where = {name: file for table in (SERVED, TOUCHED) for file, group in table.items() for name in group}
    kinds: dict[str, list[Entry]] = {"served": [], "traced": [], "gated": [], "passed": []}
    for e in entries:
        kind = "served" if e.base in served else "traced" if e.base in where else "gated" if e.hooked else "passed"
        kinds[kind].append(e)
    out = [
        "# The driver's entry points under the frontend\n\n",
        "Generated from `frontend/cuda_api.def` by `frontend/gen_api.py`; do not edit. ",
        f"CUDA 13.0 has {len(entries)} entry points, every spelling counted.\n\n",
        "| | entry points | what happens |\n| --- | ---: | --- |\n",
    ]
    out += [f"| {kind} | {len(rows)} | {TREATMENT[kind]} |\n" for kind, rows in kinds.items()]
    out.append("\nAn entry point that is not listed (a newer driver's) goes straight to the driver.\n")
    for kind in ("served", "traced"):
        out.append(f"\n## {kind.capitalize()}\n\n| entry point | since CUDA | code |\n| --- | --- | --- |\n")
        for e in kinds[kind]:
            since = f"{e.since // 1000}.{e.since % 1000 // 10}"
            out.append(f"| `{e.symbol}` | {since} | `frontend/{where.get(e.base, 'resolve.c')}` |\n")
    for kind in ("gated", "passed"):
        out.append(f"\n## {kind.capitalize()}\n\n" + ", ".join(f"`{e.symbol}`" for e in kinds[kind]) + "\n")
    return "".join(out)


def write(path: Path, text: str) -> None:
    """Write `text` unless the file already holds it, so that nothing is rebuilt for nothing."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """See the module's docstring. Exit status 1: the list is malformed, or (--check) the page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for phos_api.h and phos_hooks.inc")
    parser.add_argument("--docs", type=Path, help="write the page to this file")
    parser.add_argument("--check", action="store_true", help="fail if docs/driver-api.md is not what would be written")
    arguments = parser.parse_args()
    try:
        entries = parse(ROOT / "frontend" / "cuda_api.def")
        if arguments.output:
            write(arguments.output / "phos_api.h", header(entries))
            write(arguments.output / "phos_hooks.inc", hooks(entries))
        if arguments.docs:
            write(arguments.docs, docs_page(entries))
        page = ROOT / "docs" / "driver-api.md"
        if arguments.check and (not page.exists() or page.read_text() != docs_page(entries)):
            raise ValueError("docs/driver-api.md is out of date: run `make docs`")
    except ValueError as error:
        print(f"gen_api.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
