"""`phos-gpu inspect`, `verify` and `wait`: what they say, their JSON and their exit statuses."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from phos.cli.inspect import inspect
from phos.cli.text import size_text
from phos.cli.verify import verify
from phos.cli.wait import wait
from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed
from phos.images import formats
from phos.images.reader import Image
from phos.images.summary import summarise
from phos.images.writer import ImageWriter
from tests.unit.image_sets import ADDRESS, CHUNK, CRIU_FILES, PEER, SESSION, aligned, inventory_of, page, write_small


def run(command, *arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def rich_inventory() -> pb.Inventory:
    """An inventory in which every field of the summary has something to show."""
    inventory = inventory_of({(SESSION, 1): 4 * CHUNK, (SESSION, 2): 3 * CHUNK, (PEER, 1): 2 * CHUNK})
    inventory.device_kind = "software"
    inventory.driver_release = "580.159.04"
    inventory.created_ns = 1_700_000_000_123_000_000
    inventory.total_seconds = 1.5
    inventory.reducers.append("stack-limit")
    inventory.host.name = "workstation"
    inventory.host.kernel = "6.18.0"
    inventory.host.cpus = 16
    inventory.gpus.add(ordinal=0, uuid=bytes(range(16)), name="PhOS Software GPU", major=9, memory=4 << 30)
    for phase, seconds, concurrent in [
        ("quiesce", 0.25, False),
        ("copy GPU data", 3.0, True),
        ("CRIU dump", 1.0, False),
    ]:
        inventory.timings.add(phase=phase, seconds=seconds, concurrent=concurrent)
    inventory.window["calls"] = 12
    inventory.window["call_ns"] = 3400
    inventory.validated = True
    first, second = inventory.processes
    first.command_line.extend(["python3", "train.py", "--note=\x1b[31mred"])
    first.uncarried.add(kind="managed", count=2, bytes=1 << 20)
    first.host_allocations.add(address=1 << 40, size=3 << 20, entry_point="cuMemHostAlloc")
    first.modules.add(entry_point="cuLibraryLoadData", size=100)
    second.blocks.add(block=7, size=3 * CHUNK, owner_session=SESSION, owner_block=2, shared=True)
    inventory.processes.add(pid=300, executable="/opt/plain", under_frontend=False)
    return inventory


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "i"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    with ImageWriter(fd, stripes=2, chunk_size=CHUNK) as writer:
        for stripe, key, data in [
            (0, (SESSION, 1), page(1) + bytes(CHUNK) + page(2) + page(3)),
            (1, (SESSION, 2), bytes(3 * CHUNK)),
            (1, (PEER, 1), page(4) + page(5)),
        ]:
            with aligned(data) as view:
                writer.write(stripe, key, 0, view)
        for name, content in CRIU_FILES.items():
            (directory / name).write_bytes(content)
        stats = pb.CriuStats(
            dump=pb.CriuDumpStats(freezing_time=1500, frozen_time=250_000, pages_lazy=3)
        ).SerializeToString()
        head = struct.pack("<III", formats.IMG_SERVICE, formats.STATS_MAGIC, len(stats))
        (directory / "stats-dump").write_bytes(head + stats)
        writer.commit(rich_inventory())
    os.close(fd)
    return directory


def shape(value):
    """The names and types of a JSON object, without its values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


SCHEMA = {
    "schema": "int",
    "path": "str",
    "complete": "bool",
    "problems": [],
    "format_version": "int",
    "image_id": "str",
    "created": "str",
    "committed": "str",
    "protocol": "str",
    "device_kind": "str",
    "reducers": ["str"],
    "versions": {"phos": "str", "criu": "str", "cuda": "str", "driver": "str"},
    "host": {
        "name": "str",
        "kernel": "str",
        "machine": "str",
        "distribution": "str",
        "cpus": "int",
        "memory": "int",
    },
    "gpus": [
        {
            "ordinal": "int",
            "uuid": "str",
            "name": "str",
            "compute_capability": "str",
            "memory": "int",
            "bus_id": "str",
            "blocks": "int",
            "block_bytes": "int",
        }
    ],
    "processes": [
        {
            "pid": "int",
            "parent_pid": "int",
            "executable": "str",
            "command_line": ["str"],
            "under_frontend": "bool",
            "session": "str",
            "devices": [],
            "blocks": "int",
            "block_bytes": "int",
            "buffers": "int",
            "buffer_bytes": "int",
            "pinned": "int",
            "pinned_bytes": "int",
            "modules": "int",
            "uncarried": [{"kind": "str", "count": "int", "bytes": "int"}],
        }
    ],
    "gpu_data": {
        "total_bytes": "int",
        "written_bytes": "int",
        "zero_bytes": "int",
        "parent_bytes": "int",
        "chunk_size": "int",
        "stripes": "int",
        "direct": "bool",
        "blocks": "int",
        "buffers": "int",
        "buffer_bytes": "int",
        "by_size": [{"up_to": "int", "buffers": "int", "bytes": "int"}],
    },
    "buffers": [
        {
            "pid": "int",
            "address": "int",
            "size": "int",
            "block": "int",
            "offset": "int",
            "device": "int",
            "entry_point": "str",
        }
    ],
    "sharing": [{"session": "str", "block": "int", "size": "int", "pids": ["int"]}],
    "saved_by": {
        "phos": {"bytes": "int", "stored_bytes": "int"},
        "driver": [{"pid": "int", "kind": "str", "count": "int", "bytes": "int"}],
        "residue": [],
        "named_memory": [],
        "criu": {
            "files": "int",
            "bytes": "int",
            "pages_bytes": "int",
            "freezing_seconds": "float",
            "frozen_seconds": "float",
            "memory_dump_seconds": "float",
            "memory_write_seconds": "float",
        },
    },
    "timings": {
        "phases": [{"phase": "str", "seconds": "float", "concurrent": "bool"}],
        "total_seconds": "float",
        "unaccounted_seconds": "float",
        "commit": [{"phase": "str", "seconds": "float", "concurrent": "bool"}],
    },
    "window": {"calls": "int", "call_ns": "int"},
    "validated": "bool",
    "order": {"chunks": "int", "blocks": "int"},
    "files": [{"name": "str", "size": "int", "origin": "str"}],
}


def test_json_schema_is_the_published_one(image):
    """Programs read this. A field may be added here; one that goes or changes its type needs a new SCHEMA number."""
    result = run(inspect, "--json", image)
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert shape(summary) == SCHEMA
    assert summary["schema"] == 1
    assert summary["window"] == {"calls": 12, "call_ns": 3400}
    assert summary["validated"] is True


def test_json_figures(image):
    summary = json.loads(run(inspect, "--json", image).stdout)
    assert summary["created"] == "2023-11-14T22:13:20.123+00:00"
    assert summary["gpu_data"]["total_bytes"] == 9 * CHUNK
    assert summary["gpu_data"]["written_bytes"] == 5 * CHUNK
    assert summary["gpu_data"]["zero_bytes"] == 4 * CHUNK
    assert summary["gpus"][0]["block_bytes"] == 9 * CHUNK  # a shared block counts once
    assert summary["gpus"][0]["uuid"] == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert summary["versions"]["cuda"] == "13.0"
    assert summary["timings"]["unaccounted_seconds"] == pytest.approx(0.25)
    assert summary["sharing"] == [{"session": SESSION.hex(), "block": 2, "size": 3 * CHUNK, "pids": [100, 101]}]
    assert summary["saved_by"]["driver"] == [
        {"pid": 100, "kind": "managed", "count": 2, "bytes": 1 << 20},
        {"pid": 300, "kind": "everything", "count": None, "bytes": None},
    ]
    criu = summary["saved_by"]["criu"]
    assert criu["pages_bytes"] == len(CRIU_FILES["pages-1.img"])
    assert criu["bytes"] == sum(map(len, CRIU_FILES.values()))
    assert (criu["freezing_seconds"], criu["frozen_seconds"]) == (0.0015, 0.25)
    assert sum(c["buffers"] for c in summary["gpu_data"]["by_size"]) == 3
    assert {f["origin"] for f in summary["files"]} == {"phos", "phos-data", "criu"}


def test_summary_for_people(image):
    result = run(inspect, image)
    assert result.exit_code == 0
    for text in (
        "yes, committed",
        "workstation, Linux 6.18.0",
        "PhOS Software GPU",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "python3 train.py --note=\\x1b[31mred",
        "not under the frontend",
        "36.0 KiB in 3 blocks: 20.0 KiB stored (56 %) in 2 data files, 16.0 KiB are zeros",
        "2 × managed of process 100, inside CRIU's pages",
        "all GPU memory of process 300",
        "100, 101",
        "unaccounted",
        "beside the others",
        "frozen for 250.0 ms",
    ):
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 160


def test_largest_ten_or_all_buffers(tmp_path):
    sizes = {(SESSION, n): n * CHUNK for n in range(1, 15)}
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        for key, size in sizes.items():
            with aligned(bytes(size)) as view:
                writer.write(0, key, 0, view)
        writer.commit(inventory_of(sizes))
    os.close(fd)
    assert [b["block"] for b in json.loads(run(inspect, "--json", tmp_path).stdout)["buffers"]] == list(
        range(14, 4, -1)
    )
    assert len(json.loads(run(inspect, "--json", "--buffers", tmp_path).stdout)["buffers"]) == 14
    assert f"{ADDRESS + (1 << 32):#x}" not in run(inspect, tmp_path).stdout
    assert f"{ADDRESS + (1 << 32):#x}" in run(inspect, "--buffers", tmp_path).stdout


@pytest.mark.parametrize("format_", formats.FORMATS)
def test_decode_prints_any_of_our_files(image, format_):
    result = run(inspect, "--decode", image / format_.file)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["magic"] == format_.name


@pytest.mark.parametrize("name", ["pages-1.img", "nothing.img", "."])
def test_decode_refuses_what_is_not_ours(image, name):
    result = run(inspect, "--decode", image / name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("phos-gpu inspect: ")


def test_decode_reads_no_data_file_as_a_whole(tmp_path, monkeypatch):
    """It may be larger than the machine's memory."""
    huge = tmp_path / "phos-data-0.raw"
    huge.touch()
    os.truncate(huge, 1 << 40)
    result = run(inspect, "--decode", huge)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "magic" in result.stderr
    huge.write_bytes(formats.frame_header(formats.CHUNKS))
    os.truncate(huge, 1 << 40)
    result = run(inspect, "--decode", huge)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "PhOS writes no such file" in result.stderr


def test_what_an_image_says_does_not_reach_a_terminal_as_it_is(tmp_path):
    """An image is input, and may be somebody else's."""
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "\x1b[2Jname.img").write_bytes(b"x")
    write_small(tmp_path / "i")
    (tmp_path / "i" / "\x1b[2Jname.img").unlink()
    for command in (inspect, verify):
        result = run(command, tmp_path / "i")
        assert result.exit_code == 1
        assert "\x1b" not in result.stdout + result.stderr
        assert "\\x1b[2Jname" in result.stdout + result.stderr


def test_times_that_are_no_numbers_are_no_json(tmp_path):
    inventory = inventory_of({})
    inventory.total_seconds = math.nan
    inventory.timings.add(phase="dump", seconds=math.inf)
    (tmp_path / "i").mkdir()
    fd = os.open(tmp_path / "i", os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        writer.commit(inventory)
    os.close(fd)
    printed = run(inspect, "--json", tmp_path / "i").stdout
    decoded = run(inspect, "--decode", tmp_path / "i" / formats.INVENTORY_FILE).stdout

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(printed, parse_constant=refuse)["timings"]["total_seconds"] is None
    json.loads(decoded, parse_constant=refuse)


@pytest.mark.parametrize("names", [(), ("one",), ("one", "two")])
def test_shared_memory_is_shown_by_all_of_its_names(tmp_path, names):
    """One that has none is nothing that PhOS writes, but an image is input."""
    inventory = inventory_of({})
    inventory.named_memory.add(file=formats.named_memory_file(0), size=CHUNK, names=names)
    (tmp_path / "i").mkdir()
    fd = os.open(tmp_path / "i", os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        writer.commit(inventory)
    os.close(fd)
    result = run(inspect, tmp_path / "i")
    assert result.exit_code == 0
    assert f"shared memory {', '.join('/dev/shm/' + name for name in names)}, in phos-shared-0.raw" in result.stdout


@pytest.mark.parametrize("command", [inspect, verify])
def test_exit_status_of_what_is_no_image(command, tmp_path):
    (tmp_path / "inventory.img").write_bytes(b"x")
    for path, reason in [(tmp_path, "made without PhOS"), (tmp_path / "none", "there is no directory")]:
        result = run(command, path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert reason in result.stderr
        as_json = run(command, "--json", path)
        assert as_json.exit_code == 1
        answer = json.loads(as_json.stdout)
        assert answer["complete"] is False
        assert reason in answer["error"]


@pytest.mark.parametrize("command", [inspect, verify])
@pytest.mark.parametrize("arguments", [[], ["--nonsense", "x"], ["a", "b"]])
def test_exit_status_of_wrong_usage(command, arguments):
    assert run(command, *arguments).exit_code == 2


@pytest.fixture
def damaged(tmp_path):
    write_small(tmp_path / "i")
    for name in ("phos-data-0.raw", "pages-1.img"):
        raw = bytearray((tmp_path / "i" / name).read_bytes())
        raw[7] ^= 4
        (tmp_path / "i" / name).write_bytes(raw)
    (tmp_path / "i" / "core-100.img").unlink()
    return tmp_path / "i"


def test_inspect_shows_a_damaged_image_but_fails(damaged):
    result = run(inspect, damaged)
    assert result.exit_code == 1
    assert "NO: see the problems below" in result.stdout
    assert "program-0" in result.stdout
    assert f"phos-gpu inspect: {damaged}/core-100.img is missing" in result.stderr


def test_verify_lists_each_problem(damaged):
    result = run(verify, damaged)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert "core-100.img is missing" in lines[0]
    assert "phos-data-0.raw, byte 0: 4096 bytes of the buffer at" in lines[1]
    assert "pages-1.img is damaged" in lines[2]
    assert lines[3].startswith(f"{damaged}: 3 problems (")
    answer = json.loads(run(verify, "--json", damaged).stdout)
    assert answer["complete"] is False
    assert len(answer["problems"]) == 3


@pytest.mark.parametrize("threads", [1, 5])
def test_verify_of_a_whole_image(image, threads):
    result = run(verify, "--threads", threads, image)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{image}: whole (")
    answer = json.loads(run(verify, "--json", image).stdout)
    assert set(answer) == {"schema", "path", "complete", "problems", "bytes_checked", "seconds"}
    assert answer["complete"] is True
    assert answer["bytes_checked"] == 5 * CHUNK + sum(map(len, CRIU_FILES.values()))


def test_progress_counts_to_the_end(image):
    seen = []
    with Image.open(image) as opened:
        opened.verify(lambda done, total: seen.append((done, total)), threads=3)
    assert seen[0][0] == 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert len({total for _, total in seen}) == 1


def test_an_empty_inventory_can_be_shown(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=1) as writer:
        writer.commit(pb.Inventory())
    os.close(fd)
    assert run(inspect, tmp_path).exit_code == 0
    with Image.open(tmp_path) as opened:
        summary = summarise(opened)
    assert summary["timings"]["unaccounted_seconds"] is None
    assert summary["saved_by"]["criu"]["frozen_seconds"] is None


@pytest.mark.parametrize(
    "raw", [b"", b"short", struct.pack("<III", 1, 2, 3), struct.pack("<III", 0x55105940, 0x57093306, 99)]
)
def test_unreadable_statistics_of_crius_are_ignored(tmp_path, raw):
    write_small(tmp_path / "i")
    Path(tmp_path / "i" / "stats-dump").write_bytes(raw)
    assert run(inspect, tmp_path / "i").exit_code == 0


@pytest.mark.timeout(20)
def test_statistics_that_are_no_file_are_not_waited_for(tmp_path):
    write_small(tmp_path / "i")
    stats = tmp_path / "i" / "stats-dump"
    stats.unlink()
    os.mkfifo(stats)
    assert json.loads(run(inspect, "--json", tmp_path / "i").stdout)["saved_by"]["criu"]["frozen_seconds"] is None


@pytest.mark.parametrize(
    "size,text",
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_readable(size, text):
    assert size_text(size) == text


def test_wait_takes_an_image_that_phosd_has_not_made_for_whole_only_if_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = wire_pb2.ImageState(state="unknown", error="phosd knows of no such job for this directory.")
    monkeypatch.setattr(client, "wait_image", lambda *_, **__: unknown)
    write_small(tmp_path)
    assert run(wait, tmp_path).exit_code == 0
    (tmp_path / formats.COMMIT_FILE).write_bytes(b"")
    failed = run(wait, tmp_path).exception
    assert isinstance(failed, CheckpointFailed)
    assert "the writing did not finish" in str(failed)
    (tmp_path / formats.COMMIT_FILE).unlink()
    assert str(run(wait, tmp_path).exception) == unknown.error
