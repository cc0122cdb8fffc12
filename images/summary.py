"""What a person, or a program, wants to know about an image: collected here, rendered by cli/inspect.py.

`summarise` returns plain JSON-ready objects. Their schema is in docs/image-format.md and changes only by addition;
SCHEMA counts up if a field is ever removed or changes its meaning.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from datetime import datetime, timezone
from typing import Any

from google.protobuf.message import DecodeError

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.reader import Image
from phos.images.table import block_key

SCHEMA = 1
LARGEST = 10  # buffers listed unless all are asked for

_STATS_MOST = 1 << 20  # more than CRIU has to say of one dump

# Upper bounds of the size classes; the last class is open.
_SIZE_CLASSES = (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)


def summarise(image: Image, *, all_buffers: bool = False) -> dict[str, Any]:
    """The summary of an image opened with `Image.open` or `Image.open_damaged`."""
    inventory = image.inventory
    buffers = sorted(_buffers(inventory), key=lambda b: (-b["size"], b["pid"], b["address"]))
    return {
        "schema": SCHEMA,
        "path": str(image.path),
        "complete": not image.problems,
        "problems": list(image.problems),
        "format_version": image.record.format_version,
        "image_id": image.record.image_id.hex(),
        "created": _when(inventory.created_ns),
        "committed": _when(image.record.committed_ns),
        "protocol": inventory.protocol,
        "device_kind": inventory.device_kind,
        "reducers": list(inventory.reducers),
        "versions": {
            "phos": inventory.phos_version,
            "criu": inventory.criu_version,
            "cuda": cuda_version(inventory.driver_version),
            "driver": inventory.driver_release,
        },
        "host": {
            "name": inventory.host.name,
            "kernel": inventory.host.kernel,
            "machine": inventory.host.machine,
            "distribution": inventory.host.distribution,
            "cpus": inventory.host.cpus,
            "memory": inventory.host.memory,
        },
        "gpus": _gpus(inventory),
        "processes": [_process(p) for p in inventory.processes],
        "gpu_data": _gpu_data(image, buffers),
        "buffers": buffers if all_buffers else buffers[:LARGEST],
        "sharing": _sharing(inventory),
        "saved_by": {
            "phos": {"bytes": inventory.data.total_bytes, "stored_bytes": inventory.data.written_bytes},
            "driver": _saved_by_driver(inventory),
            "residue": [
                {"pid": process.pid, "file": r.file, "size": r.size, "path": r.path}
                for process in inventory.processes
                for r in process.residues
            ],
            "named_memory": [{"file": m.file, "size": m.size, "names": list(m.names)} for m in inventory.named_memory],
            "criu": _criu(image),
        },
        "timings": _timings(image),
        "window": dict(sorted(inventory.window.items())),
        "validated": inventory.validated,
        "order": {
            "chunks": sum(len(t.chunks) for t in inventory.order),
            "blocks": len({(t.session, t.block) for t in inventory.order}),
        },
        "files": [{"name": f.name, "size": f.size, "origin": _origin(f.origin)} for f in image.record.files],
    }


def cuda_version(number: int) -> str:
    """13000 → '13.0'; '' for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _when(nanoseconds: int) -> str | None:
    """ISO 8601 in UTC, to the millisecond; None for 0 or a time no calendar holds."""
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return None
    return moment.isoformat(timespec="milliseconds") if nanoseconds else None


def _origin(origin: int) -> str:
    names: dict[int, str] = {pb.File.PHOS: "phos", pb.File.PHOS_DATA: "phos-data", pb.File.CRIU: "criu"}
    return names.get(origin, "unknown")


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    if len(raw) != 16:
        return text
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _gpus(inventory: pb.Inventory) -> list[dict[str, Any]]:
    count: Counter[int] = Counter()
    size: Counter[int] = Counter()
    seen = set()
    for process in inventory.processes:
        for block in process.blocks:
            key = block_key(process, block)
            if key not in seen:
                seen.add(key)
                count[block.device] += 1
                size[block.device] += block.size
    return [
        {
            "ordinal": g.ordinal,
            "uuid": _uuid(g.uuid),
            "name": g.name,
            "compute_capability": f"{g.major}.{g.minor}",
            "memory": g.memory,
            "bus_id": g.bus_id,
            "blocks": count[g.ordinal],
            "block_bytes": size[g.ordinal],
        }
        for g in inventory.gpus
    ]


def _process(process: pb.Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent_pid": process.parent_pid,
        "executable": process.executable,
        "command_line": list(process.command_line),
        "under_frontend": process.under_frontend,
        "session": process.session.hex(),
        "devices": list(process.devices),
        "blocks": len(process.blocks),
        "block_bytes": sum(b.size for b in process.blocks),
        "buffers": len(process.allocations),
        "buffer_bytes": sum(a.size for a in process.allocations),
        "pinned": len(process.host_allocations),
        "pinned_bytes": sum(a.size for a in process.host_allocations),
        "modules": len(process.modules),
        "uncarried": [{"kind": u.kind, "count": u.count, "bytes": u.bytes} for u in process.uncarried],
    }


def _buffers(inventory: pb.Inventory) -> list[dict[str, Any]]:
    found = []
    for process in inventory.processes:
        devices = {b.block: b.device for b in process.blocks}
        for a in process.allocations:
            found.append(
                {
                    "pid": process.pid,
                    "address": a.address,
                    "size": a.size,
                    "block": a.block,
                    "offset": a.offset,
                    "device": devices.get(a.block),
                    "entry_point": a.entry_point,
                }
            )
    return found


def _gpu_data(image: Image, buffers: list[dict[str, Any]]) -> dict[str, Any]:
    data = image.inventory.data
    counts = [0] * (len(_SIZE_CLASSES) + 1)
    sizes = [0] * (len(_SIZE_CLASSES) + 1)
    for buffer in buffers:
        i = sum(buffer["size"] > bound for bound in _SIZE_CLASSES)
        counts[i] += 1
        sizes[i] += buffer["size"]
    return {
        "total_bytes": data.total_bytes,
        "written_bytes": data.written_bytes,
        "zero_bytes": data.zero_bytes,
        "parent_bytes": data.parent_bytes,
        "chunk_size": data.chunk_size,
        "stripes": data.stripes,
        "direct": data.direct,
        "blocks": len(image.blocks),
        "buffers": len(buffers),
        "buffer_bytes": sum(sizes),
        "by_size": [
            {"up_to": bound, "buffers": count, "bytes": size}
            for bound, count, size in zip([*_SIZE_CLASSES, None], counts, sizes, strict=True)
        ],
    }


def _sharing(inventory: pb.Inventory) -> list[dict[str, Any]]:
    """Blocks that more than one process of the image has mapped, or that are marked as shared with one outside it."""
    who: dict[formats.BlockKey, list[int]] = {}
    sizes: dict[formats.BlockKey, int] = {}
    marked = set()
    for process in inventory.processes:
        for block in process.blocks:
            key = block_key(process, block)
            who.setdefault(key, []).append(process.pid)
            sizes[key] = block.size
            if block.shared or block.owner_session:
                marked.add(key)
    return [
        {"session": key[0].hex(), "block": key[1], "size": sizes[key], "pids": sorted(set(pids))}
        for key, pids in sorted(who.items())
        if len(set(pids)) > 1 or key in marked
    ]


def _saved_by_driver(inventory: pb.Inventory) -> list[dict[str, Any]]:
    """Per process what the driver copied into the process's memory; `kind` 'everything' (bytes unknown, None) for a
    process that was not under the frontend."""
    found: list[dict[str, Any]] = []
    for process in inventory.processes:
        if not process.under_frontend:
            found.append({"pid": process.pid, "kind": "everything", "count": None, "bytes": None})
        for u in process.uncarried:
            found.append({"pid": process.pid, "kind": u.kind, "count": u.count, "bytes": u.bytes})
    return found


def _criu(image: Image) -> dict[str, Any]:
    files = [f for f in image.record.files if f.origin == pb.File.CRIU]
    out: dict[str, Any] = {
        "files": len(files),
        "bytes": sum(f.size for f in files),
        "pages_bytes": sum(f.size for f in files if f.name.startswith("pages-")),
        "freezing_seconds": None,
        "frozen_seconds": None,
        "memory_dump_seconds": None,
        "memory_write_seconds": None,
    }
    stats = read_criu_stats(image)
    if stats is not None:
        out["freezing_seconds"] = stats.freezing_time / 1e6
        out["frozen_seconds"] = stats.frozen_time / 1e6
        out["memory_dump_seconds"] = stats.memdump_time / 1e6
        out["memory_write_seconds"] = stats.memwrite_time / 1e6
    return out


def read_criu_stats(image: Image) -> pb.CriuDumpStats | None:
    """CRIU's own figures of the dump (`stats-dump`); None if they are not there or not readable: they are optional."""
    try:
        raw = image.read_file(formats.CRIU_STATS_FILE, _STATS_MOST)
        common, magic, size = struct.unpack_from("<III", raw)
        if (common, magic) != (formats.IMG_SERVICE, formats.STATS_MAGIC) or len(raw) < 12 + size:
            return None
        stats = pb.CriuStats()
        stats.ParseFromString(raw[12 : 12 + size])
    except (OSError, struct.error, DecodeError):
        return None
    return stats.dump if stats.HasField("dump") else None


def _timings(image: Image) -> dict[str, Any]:
    """The phases; what those that ran one after the other leave of the whole is `unaccounted_seconds`."""
    total = _finite(image.inventory.total_seconds)
    phases = [_timing(t) for t in image.inventory.timings]
    accounted = sum(p["seconds"] for p in phases if not p["concurrent"])
    return {
        "phases": phases,
        "total_seconds": total or None,
        "unaccounted_seconds": total - accounted if total else None,
        "commit": [_timing(t) for t in image.record.timings],
    }


def _finite(seconds: float) -> float:
    """An image is input, and JSON has no other numbers."""
    return seconds if math.isfinite(seconds) else 0.0


def _timing(timing: pb.Timing) -> dict[str, Any]:
    return {"phase": timing.phase, "seconds": _finite(timing.seconds), "concurrent": timing.concurrent}
