"""Audits: what calls were predicted to write, against what they wrote (DESIGN §5; docs/speculation.md).

Memory is compared by the hashes of its chunks, before a call and after it. A chunk that changed and was not predicted
is a *wrong guess*; one that was predicted and did not change is *over-traced*. A kernel that writes what was there
already changes nothing: over-tracing is somewhat overestimated, and wrong guesses may be missed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phos.gpu_engine.spec.descriptor import AccessDescriptor, Source

SCHEMA = 1
"""Version of :meth:`Audit.report`."""

EXAMPLES_KEPT = 8
"""Wrong guesses described for each kernel; all are counted."""

PLACES_NAMED = 16
"""Places described for each wrong guess."""

KERNELS_KEPT = 20000
"""A program that makes kernels without end must not fill phosd's memory."""


class Kind(enum.IntEnum):
    """What a call was; as in wire.proto, AuditBegin.Kind."""

    UNKNOWN = 0
    KERNEL = 1
    GRAPH = 2
    CALL = 3


@dataclass(frozen=True, order=True)
class Range:
    """A part of a block; bytes."""

    block: int
    offset: int
    size: int


@dataclass(frozen=True)
class Launch:
    """A call that is about to be made."""

    kernel: str
    module: int
    source: str
    """Of its descriptor: ptx, sass, name, layout, library, graph, call or unknown."""
    library: str
    """The library's function that it is made in."""
    anything: bool
    """It may write anywhere."""
    predicted: tuple[Range, ...]
    """What it may write; sorted, no two overlap."""
    arguments: bytes


@dataclass(frozen=True)
class Place:
    """What lies where a call wrote and was not predicted to; bytes, addresses as the process has them."""

    address: int
    allocation: int
    size: int
    entry_point: str


def source_of(kind: int, source: int, library: str) -> str:
    """The name of a descriptor's source, for the report."""
    if kind == Kind.GRAPH:
        return "graph"
    if kind == Kind.CALL:
        return "call"
    if kind != Kind.KERNEL:
        return "unknown"
    if library:
        return "library"
    return Source(source).name.lower() if source in list(Source) else "unknown"


@dataclass
class Comparison:
    """One call's chunks: written, predicted, and where they differ."""

    written: int = 0
    predicted: int = 0
    unchanged: int = 0
    predicted_bytes: int = 0
    unchanged_bytes: int = 0
    wrong: list[Range] = field(default_factory=list)
    """Neighbours merged."""
    wrong_chunks: int = 0


BlockHashes = Mapping[int, Sequence[bytes]]
"""By block, one hash for each of its chunks."""


def compare(launch: Launch, before: BlockHashes, after: BlockHashes, chunk_bytes: int) -> Comparison:
    """Compare a call's prediction with what it changed. Blocks that are not in both were not there all the time."""
    result = Comparison()
    of_block: dict[int, list[Range]] = {}
    for predicted in launch.predicted:
        of_block.setdefault(predicted.block, []).append(predicted)
    for block in sorted(before.keys() & after.keys()):
        old, new = before[block], after[block]
        changed = set() if old == new else {i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
        whole = Range(block, 0, len(new) * chunk_bytes)
        bytes_in = bytes_by_chunk([whole] if launch.anything else of_block.get(block, ()), chunk_bytes)
        result.written += len(changed)
        result.predicted += len(bytes_in)
        result.predicted_bytes += sum(bytes_in.values())
        for chunk, count in bytes_in.items():
            if chunk not in changed:
                result.unchanged += 1
                result.unchanged_bytes += count
        missed = sorted(changed - bytes_in.keys())
        result.wrong_chunks += len(missed)
        result.wrong += merged(block, missed, chunk_bytes)
    return result


def bytes_by_chunk(ranges: Sequence[Range], chunk_bytes: int) -> dict[int, int]:
    """How many bytes of each chunk are in ``ranges``, of one block; chunks of which none is are left out."""
    found: dict[int, int] = {}
    for part in ranges:
        end = part.offset + part.size
        for chunk in range(part.offset // chunk_bytes, -(-end // chunk_bytes)):
            start = chunk * chunk_bytes
            inside = min(end, start + chunk_bytes) - max(part.offset, start)
            found[chunk] = found.get(chunk, 0) + inside
    return found


def merged(block: int, chunks: Sequence[int], chunk_bytes: int) -> list[Range]:
    """Sorted numbers of chunks as ranges, neighbours in one."""
    found: list[Range] = []
    for chunk in chunks:
        start = chunk * chunk_bytes
        if found and found[-1].offset + found[-1].size == start:
            found[-1] = Range(block, found[-1].offset, found[-1].size + chunk_bytes)
        else:
            found.append(Range(block, start, chunk_bytes))
    return found


def parameter_values(arguments: bytes, descriptor: AccessDescriptor | None) -> list[str]:
    """The arguments of a launch as hexadecimal numbers, one a parameter; without a descriptor, one every 8 bytes."""
    if descriptor is None:
        places = [(offset, min(8, len(arguments) - offset)) for offset in range(0, len(arguments), 8)]
    else:
        places = [(p.offset, p.size) for p in descriptor.parameters if p.offset + p.size <= len(arguments)]
    shown = []
    for offset, size in places:
        data = arguments[offset : offset + size]
        shown.append(f"{int.from_bytes(data, 'little'):#x}" if size <= 8 else f"bytes {data[:64].hex(' ', 8)}")
    return shown


@dataclass
class _Statistics:
    """One kernel under one source of its descriptor."""

    kernel: str
    source: str
    library: str
    module: int
    launches: int = 0
    audited: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    anything: int = 0
    written: int = 0
    predicted: int = 0
    unchanged: int = 0
    predicted_bytes: int = 0
    unchanged_bytes: int = 0
    wrong_launches: int = 0
    wrong_chunks: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "source": self.source,
            "library": self.library,
            "module": self.module,
            "launches": self.launches,
            "audited": self.audited,
            "skipped": self.skipped,
            "anything": self.anything,
            "written_chunks": self.written,
            "predicted_chunks": self.predicted,
            "wrong_launches": self.wrong_launches,
            "wrong_chunks": self.wrong_chunks,
            "over_traced_chunks": self.unchanged,
            "predicted_bytes": self.predicted_bytes,
            "over_traced_bytes": self.unchanged_bytes,
            "wrong": self.examples,
        }


class Audit:
    """One audit's statistics, of one or more processes. Any thread may call.

    Arguments:
        first: of each kernel so many launches are audited,
        every: and then each of so many; 0: none.
        chunk_bytes: granularity of the comparison.
        patience: seconds in all that its processes may wait for the analysis of kernels; 0: no limit.
    """

    def __init__(self, first: int, every: int, chunk_bytes: int, patience: float = 0) -> None:
        self.first = first
        self.every = every
        self.chunk_bytes = chunk_bytes
        self._lock = threading.Lock()  # guards the two below
        self._kernels: dict[tuple[str, str, str], _Statistics] = {}
        self._left_out = 0
        self._patience = patience
        self._waited = 0.0

    def patience(self, most: float) -> float:
        """How long a process may wait for analyses now, ``most`` seconds at most."""
        with self._lock:
            return min(most, max(0.0, self._patience - self._waited)) if self._patience else most

    def waited(self, seconds: float) -> None:
        """A process has waited so long for analyses."""
        with self._lock:
            self._waited += seconds

    def wanted(self, launch: Launch) -> bool:
        """Count a launch, and say whether it is one of those that are audited."""
        with self._lock:
            known = self._of(launch)
            if known is None:
                return False
            known.launches += 1
            if known.launches <= self.first:
                return True
            return self.every > 0 and (known.launches - self.first) % self.every == 0

    def skipped(self, launch: Launch, why: str) -> None:
        """A launch that was to be audited could not be."""
        with self._lock:
            known = self._of(launch)
            if known is not None:
                known.skipped[why] = known.skipped.get(why, 0) + 1

    def add(
        self,
        launch: Launch,
        result: Comparison,
        places: Sequence[Place] = (),
        descriptor: AccessDescriptor | None = None,
        pid: int = 0,
    ) -> None:
        """A launch has been compared; ``places`` belong to the first of ``result.wrong``, in order."""
        with self._lock:
            known = self._of(launch)
            if known is None:
                return
            known.audited += 1
            known.anything += launch.anything
            known.written += result.written
            known.predicted += result.predicted
            known.unchanged += result.unchanged
            known.predicted_bytes += result.predicted_bytes
            known.unchanged_bytes += result.unchanged_bytes
            known.wrong_launches += bool(result.wrong)
            known.wrong_chunks += result.wrong_chunks
            if result.wrong and len(known.examples) < EXAMPLES_KEPT:
                known.examples.append(_example(launch, known.launches, result, places, descriptor, pid))

    def _of(self, launch: Launch) -> _Statistics | None:
        key = (launch.kernel, launch.source, launch.library)
        known = self._kernels.get(key)
        if known is None:
            if len(self._kernels) >= KERNELS_KEPT:
                self._left_out += 1
                return None
            known = self._kernels[key] = _Statistics(launch.kernel, launch.source, launch.library, launch.module)
        return known

    def report(self) -> dict[str, Any]:
        """Everything, as JSON has it: ``kernels``, wrong ones first, and ``sources`` (:func:`by_source`)."""
        with self._lock:
            kernels = [known.report() for known in self._kernels.values()]
            left_out = self._left_out
            waited = self._waited
        kernels.sort(key=lambda k: (-k["wrong_launches"], k["source"], -k["launches"], k["kernel"]))
        return {
            "schema": SCHEMA,
            "chunk_bytes": self.chunk_bytes,
            "first": self.first,
            "every": self.every,
            "launches_left_out": left_out,
            "analysis_seconds": waited,
            "sources": by_source(kernels),
            "kernels": kernels,
        }


def _example(
    launch: Launch,
    number: int,
    result: Comparison,
    places: Sequence[Place],
    descriptor: AccessDescriptor | None,
    pid: int,
) -> dict[str, Any]:
    found = []
    for index, part in enumerate(result.wrong[:PLACES_NAMED]):
        entry: dict[str, Any] = {"block": part.block, "offset": part.offset, "size": part.size}
        if index < len(places) and places[index].address:
            place = places[index]
            entry["address"] = f"{place.address:#x}"
            if place.allocation:
                entry["allocation"] = f"{place.allocation:#x}"
                entry["allocation_size"] = place.size
                entry["entry_point"] = place.entry_point
        found.append(entry)
    return {
        "launch": number,
        "pid": pid,
        "parameters": parameter_values(launch.arguments, descriptor),
        "written": found,
        "more": max(0, len(result.wrong) - PLACES_NAMED),
    }


SOURCES = ("ptx", "sass", "name", "layout", "library", "graph", "call", "unknown")
"""In the order of the report."""


def by_source(kernels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Success by source of the descriptor, as the paper's Table 4 counts: of kernels, and of launches audited.

    A kernel succeeds if none of its audited launches wrote outside of what was predicted.
    """
    rows = []
    for source in SOURCES:
        mine = [kernel for kernel in kernels if kernel["source"] == source]
        if not mine:
            continue
        audited = [kernel for kernel in mine if kernel["audited"]]
        row: dict[str, Any] = {"source": source, "kernels": len(mine), "kernels_audited": len(audited)}
        row["kernels_wrong"] = sum(kernel["wrong_launches"] > 0 for kernel in mine)
        for name in ("launches", "audited", "wrong_launches", "anything", "written_chunks", "predicted_chunks"):
            row[name] = sum(kernel[name] for kernel in mine)
        for name in ("wrong_chunks", "over_traced_chunks", "predicted_bytes", "over_traced_bytes"):
            row[name] = sum(kernel[name] for kernel in mine)
        row["success"] = 1 - row["wrong_launches"] / row["audited"] if row["audited"] else None
        row["over_traced"] = row["over_traced_bytes"] / row["predicted_bytes"] if row["predicted_bytes"] else None
        rows.append(row)
    return rows
