"""What was written is what is read, however it was cut up; and it takes no more space than it must."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.errors import ImageError
from phos.images.files import lives_in_memory
from phos.images.reader import EXTENT_LIMIT, Image
from phos.images.writer import ImageWriter
from tests.unit.image_sets import (
    CHUNK,
    CONTENT,
    SESSION,
    aligned,
    forbids_skips,
    inventory_of,
    page,
    read_block,
    skip,
    write_small,
)

FEW = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def memory_folder() -> Path:
    """A folder in tmpfs."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        skip("no writable /dev/shm")
    return folder


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """An empty directory, on the disk and in tmpfs."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
            yield Path(name)


@pytest.mark.parametrize("direct", [None, False, True])
def test_small_image_comes_back(folder, direct):
    write_small(folder / "i", direct=direct)
    with Image.open(folder / "i", direct=direct) as image:
        assert {key: read_block(image, key) for key in image.blocks} == {k: b"".join(c) for k, c in CONTENT.items()}
        assert image.verify() == []


def test_direct_is_used_on_a_disk_and_not_in_memory(folder):
    fd = os.open(folder, os.O_RDONLY)
    in_memory = lives_in_memory(fd)
    os.close(fd)
    write_small(folder / "i")
    with Image.open(folder / "i") as image:
        if not in_memory and not image.inventory.data.direct:
            skip("the disk's file system does not take O_DIRECT")
        assert image.inventory.data.direct == (not in_memory)


def test_zero_chunks_take_no_space_and_empty_data_files_go_away(tmp_path):
    write_small(tmp_path / "i")
    with Image.open(tmp_path / "i") as image:
        data = image.inventory.data
        assert (data.total_bytes, data.written_bytes, data.zero_bytes) == (9 * CHUNK, 5 * CHUNK, 4 * CHUNK)
        assert data.stripes == 2
        assert [e.stripe for e in image.extents((SESSION, 1))] == [0, None, 0]
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "i").glob("phos-data-*")}
    assert sizes == {"phos-data-0.raw": 3 * CHUNK, "phos-data-2.raw": 2 * CHUNK}


def test_record_holds_criu_images_but_not_its_logs(tmp_path):
    write_small(tmp_path / "i")
    with Image.open(tmp_path / "i") as image:
        names = [f.name for f in image.record.files if f.origin == pb.File.CRIU]
        assert names == ["core-100.img", "empty.img", "inventory.img", "pages-1.img"]


block_contents = st.lists(st.one_of(st.just(None), st.integers(0, 3)), min_size=0, max_size=12)


@FEW
@given(
    blocks=st.lists(st.tuples(block_contents, st.integers(0, CHUNK - 1)), min_size=1, max_size=5),
    stripes=st.integers(1, 4),
    direct=st.sampled_from([None, False, True]),
    seed=st.integers(0, 1 << 30),
)
def test_any_blocks_cuts_and_stripes(blocks, stripes, direct, seed):
    """Blocks of data and zeros with any tail, cut into calls anyhow, written in any order by a thread per stripe."""
    rng = random.Random(seed)
    content = {}
    for number, (chunks, tail) in enumerate(blocks):
        whole = b"".join(bytes(CHUNK) if c is None else page(c) for c in chunks)
        content[(SESSION, number)] = whole + rng.randbytes(tail)
    calls = []
    for key, data in content.items():
        at = 0
        while at < len(data):
            length = rng.randint(1, 5) * CHUNK
            calls.append((key, at, data[at : at + length]))
            at += length
    rng.shuffle(calls)
    with tempfile.TemporaryDirectory() as name:
        fd = os.open(name, os.O_RDONLY)
        failures = []
        with ImageWriter(fd, stripes=stripes, chunk_size=CHUNK, direct=direct) as writer:

            def work(stripe):
                try:
                    for key, at, data in calls[stripe::stripes]:
                        with aligned(data) as view:
                            writer.write(stripe, key, at, view)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(stripes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []
            writer.commit(inventory_of({key: len(data) for key, data in content.items()}))
        os.close(fd)
        with Image.open(name, direct=direct) as image:
            assert {key: read_block(image, key) for key in image.blocks} == content
            assert image.verify() == []
            data = image.inventory.data
            assert data.written_bytes + data.zero_bytes == data.total_bytes == sum(map(len, content.values()))


def test_hashes_that_are_known_are_believed(tmp_path):
    """Nothing is hashed again: neither the chunk whose hash is wrong, which shows later, nor the zeros."""
    key = (SESSION, 1)
    hashes = [chunk_hash(memoryview(page(1))), zero_hash(CHUNK), chunk_hash(memoryview(page(4)))]
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        with aligned(page(1) + page(2) + page(3)) as view:
            writer.write(0, key, 0, view, hashes)
        writer.commit(inventory_of({key: 3 * CHUNK}))
    os.close(fd)
    with Image.open(tmp_path) as image:
        good, zero, bad = image.extents(key)
        assert [good.stripe, zero.stripe, bad.stripe] == [0, None, 0]
        buffer = bytearray(CHUNK)
        image.read_into(good, memoryview(buffer))
        assert buffer == page(1)
        image.read_into(zero, memoryview(buffer))
        assert buffer == bytes(CHUNK)
        with pytest.raises(ImageError, match="damaged"):
            image.read_into(bad, memoryview(buffer))


def test_a_chunk_written_again_is_replaced(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=2, chunk_size=CHUNK) as writer:
        key = (SESSION, 1)
        for stripe, at, data in [
            (0, 0, page(1) + page(2) + page(3) + page(4)),
            (1, 1, page(5)),
            (1, 2, bytes(CHUNK)),
            (0, 1, page(6)),
        ]:
            with aligned(data) as view:
                writer.write(stripe, key, at * CHUNK, view)
        writer.commit(inventory_of({key: 4 * CHUNK}))
    os.close(fd)
    with Image.open(tmp_path) as image:
        assert read_block(image, key) == page(1) + page(6) + bytes(CHUNK) + page(4)
        assert image.verify() == []


def test_many_threads_on_one_stripe_take_turns(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK, direct=False) as writer:

        def work(first):
            for i in range(first, 64, 8):
                with aligned(page(i)) as view:
                    writer.write(0, (SESSION, 1), i * CHUNK, view)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.bytes_written == 64 * CHUNK
        writer.commit(inventory_of({(SESSION, 1): 64 * CHUNK}))
    os.close(fd)
    with Image.open(tmp_path) as image:
        assert read_block(image, (SESSION, 1)) == b"".join(page(i) for i in range(64))


def test_extents_are_merged_up_to_the_limit(tmp_path):
    chunk = 1 << 20
    fd = os.open(tmp_path, os.O_RDONLY)
    with aligned(random.Random(1).randbytes(chunk)) as view, ImageWriter(fd, stripes=1, chunk_size=chunk) as writer:
        for i in range(40):
            writer.write(0, (SESSION, 1), i * chunk, view)
        writer.commit(inventory_of({(SESSION, 1): 40 * chunk}))
    os.close(fd)
    with Image.open(tmp_path) as image:
        assert [(e.offset, e.length) for e in image.extents((SESSION, 1))] == [
            (0, EXTENT_LIMIT),
            (EXTENT_LIMIT, 8 * chunk),
        ]
        assert all(len(e.hashes) == e.length // chunk for e in image.extents((SESSION, 1)))


def test_unaligned_memory_falls_back_to_the_page_cache(tmp_path):
    data = page(1) + page(2)
    fd = os.open(tmp_path, os.O_RDONLY)
    with aligned(b"x" + data) as view, ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        writer.write(0, (SESSION, 1), 0, view[1:])
        writer.commit(inventory_of({(SESSION, 1): len(data)}))
    os.close(fd)
    with Image.open(tmp_path) as image, aligned(bytes(3 * CHUNK)) as view:
        (extent,) = image.extents((SESSION, 1))
        image.read_into(extent, view[1:])
        assert view[1 : 1 + len(data)] == data


def test_a_process_without_blocks_makes_an_image_too(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    inventory = pb.Inventory(protocol="stop")
    inventory.processes.add(pid=5, executable="/bin/alone", under_frontend=False)
    with ImageWriter(fd, stripes=4) as writer:
        writer.commit(inventory)
    os.close(fd)
    with Image.open(tmp_path) as image:
        assert image.blocks == {}
        assert image.inventory.processes[0].executable == "/bin/alone"
        assert image.verify() == []


def test_a_shared_block_is_stored_once_under_its_owner(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    inventory = inventory_of({(SESSION, 9): CHUNK})
    other = inventory.processes.add(pid=200, session=b"o" * 16, under_frontend=True)
    other.blocks.add(block=1, size=CHUNK, owner_session=SESSION, owner_block=9, shared=True)
    with aligned(page(1)) as view, ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        writer.write(0, (SESSION, 9), 0, view)
        writer.commit(inventory)
    os.close(fd)
    with Image.open(tmp_path) as image:
        assert list(image.blocks) == [(SESSION, 9)]


@pytest.mark.parametrize(
    "sizes,complaint",
    [
        ({(SESSION, 1): 3 * CHUNK}, "ends at byte"),
        ({(SESSION, 1): CHUNK}, "goes on at byte"),
        ({(SESSION, 1): 2 * CHUNK, (SESSION, 2): CHUNK}, "block 2 of session"),
        ({}, "which no process of the inventory has"),
    ],
)
def test_commit_refuses_data_that_does_not_match_the_inventory(tmp_path, sizes, complaint):
    fd = os.open(tmp_path, os.O_RDONLY)
    with aligned(page(1) + page(2)) as view, ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        writer.write(0, (SESSION, 1), 0, view)
        with pytest.raises(ImageError, match=complaint):
            writer.commit(inventory_of(sizes))
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_commit_does_not_change_the_callers_inventory(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    inventory = pb.Inventory(protocol="stop")
    before = inventory.SerializeToString()
    with ImageWriter(fd, stripes=1) as writer:
        writer.commit(inventory)
    os.close(fd)
    assert inventory.SerializeToString() == before


@FEW
@given(st.binary(max_size=200), st.sampled_from(formats.FORMATS), st.integers(0, 40))
def test_parser_answers_garbage_with_an_image_error(garbage, format_, keep):
    """Any bytes, with or without a proper beginning, are parsed or refused with a sentence; nothing else comes out."""
    raw = (formats.frame_header(format_) + garbage) if keep % 2 else garbage
    complaint = "some.img"
    try:
        formats.parse_file(raw, "some.img")
    except ImageError as error:
        complaint = str(error)
    assert "some.img" in complaint


def test_decoding_names_magic_and_entries(tmp_path):
    write_small(tmp_path / "i")
    for format_ in formats.FORMATS:
        decoded = formats.decode((tmp_path / "i" / format_.file).read_bytes(), format_.file)
        assert decoded["magic"] == format_.name
        assert decoded["entries"]
    tables = formats.decode((tmp_path / "i" / formats.CHUNKS_FILE).read_bytes(), "")["entries"]
    assert tables[0]["runs"][0]["hashes"] == [chunk_hash(memoryview(page(i))).hex() for i in (1, 2)]


def test_magics_differ_from_each_other_and_fit_crius_framing():
    assert len({f.magic for f in formats.FORMATS}) == len({f.file for f in formats.FORMATS}) == len(formats.FORMATS)
    assert formats.frame_header(formats.INVENTORY)[:4] == (0x54564319).to_bytes(4, "little")


def test_json_of_our_messages_can_be_turned_back(tmp_path):
    write_small(tmp_path / "i")
    for format_ in formats.FORMATS:
        raw = (tmp_path / "i" / format_.file).read_bytes()
        handler = formats.CritHandler(format_)
        entries = handler.load(io.BytesIO(raw[8:]))
        assert json.loads(json.dumps(entries)) == entries
        assert handler.dumps(entries) == raw[8:]
        assert handler.count(io.BytesIO(raw[8:])) == len(entries)


def test_crit_knows_our_files(tmp_path):
    """With CRIU's own pycriu, where install.sh has put it."""
    pycriu = pytest.importorskip("pycriu") if not forbids_skips() else importlib.import_module("pycriu")
    assert formats.register_with_pycriu()
    write_small(tmp_path / "i")
    for format_ in formats.FORMATS:
        path = tmp_path / "i" / format_.file
        with path.open("rb") as file:
            decoded = pycriu.images.load(file)
        assert decoded == formats.decode(path.read_bytes(), "")
        with path.open("rb") as file:
            assert pycriu.images.info(file)["count"] == len(decoded["entries"])
        assert pycriu.images.dumps(decoded) == path.read_bytes()


@pytest.mark.parametrize("direct", [None, False])
def test_reserved_room_that_is_not_used_is_given_back(folder, direct):
    fd = os.open(folder, os.O_RDONLY)
    with ImageWriter(fd, stripes=2, chunk_size=CHUNK, direct=direct) as writer:
        assert writer.reserve(64 << 20)
        assert sum(path.stat().st_blocks * 512 for path in folder.glob("phos-data-*")) >= 64 << 20
        with aligned(page(1) + page(2)) as view:
            writer.write(1, (SESSION, 1), 0, view)
        writer.commit(inventory_of({(SESSION, 1): 2 * CHUNK}))
    os.close(fd)
    data = folder / "phos-data-1.raw"
    assert (data.stat().st_size, data.stat().st_blocks * 512) == (2 * CHUNK, 2 * CHUNK)
    assert not (folder / "phos-data-0.raw").exists()
    with Image.open(folder) as image:
        assert read_block(image, (SESSION, 1)) == page(1) + page(2)


def test_reserving_goes_on_beside_writing(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with ImageWriter(fd, stripes=2, chunk_size=CHUNK) as writer:
        thread = threading.Thread(target=writer.reserve, args=(256 << 20,))
        thread.start()
        for i in range(100):
            with aligned(page(i)) as view:
                writer.write(i % 2, (SESSION, 1), i * CHUNK, view)
        writer.commit(inventory_of({(SESSION, 1): 100 * CHUNK}))
        thread.join()
    os.close(fd)
    # and not 256 MiB; the file system may count a block of its own
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.glob("phos-data-*")) < 110 * CHUNK
    with Image.open(tmp_path) as image:
        assert read_block(image, (SESSION, 1)) == b"".join(page(i) for i in range(100))
