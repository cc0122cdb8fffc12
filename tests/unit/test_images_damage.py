"""No damage goes unnoticed: whatever is cut off, flipped, removed or swapped, the reader or verify says so, by name."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from phos.cli.guard_policy import is_whole
from phos.gen import phos_image_pb2 as pb
from phos.images import formats, reader
from phos.images.errors import ImageError, ImageUnreadable
from phos.images.reader import Image
from phos.images.remote import MARKER, RemoteImage
from tests.unit.image_sets import ADDRESS, CHUNK, CRIU_FILES, PEER, SESSION, aligned, page, read_block, write_small

OURS = ["phos-chunks.img", "phos-commit.img", "phos-data-0.raw", "phos-data-2.raw", "phos-inventory.img"]
ALL = OURS + sorted(CRIU_FILES)
FULL = [name for name in ALL if name != "empty.img"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "i"
    write_small(directory)
    return directory


@pytest.fixture
def copy(original, tmp_path):
    """A copy of the image that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def found(directory: Path) -> list[str]:
    """Every problem that opening or verifying finds; also checks that `open` refuses what it alone can know."""
    try:
        with Image.open_damaged(directory) as image:
            problems = image.problems
            everything = image.verify()
    except ImageError as error:
        with pytest.raises(ImageError):
            Image.open(directory)
        return error.problems
    if problems:
        with pytest.raises(ImageError) as refusal:
            Image.open(directory)
        assert refusal.value.problems == problems
    return everything


def assert_blamed(directory: Path, name: str) -> None:
    problems = found(directory)
    assert problems, f"damage of {name} went unnoticed"
    assert any(name in p for p in problems), problems


@pytest.mark.parametrize("name", ["phos-chunks.img", "phos-commit.img", "phos-inventory.img"])
def test_what_cannot_be_read_is_not_whole_and_not_empty(copy, name, monkeypatch):
    """A broken disk, or permissions: the file is there, of the right size."""
    read = Image.read_file

    def failing(image, wanted):
        if wanted == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(image, wanted)

    monkeypatch.setattr(Image, "read_file", failing)
    assert f"{copy / name} cannot be read: {os.strerror(errno.EIO)}" in found(copy)
    with pytest.raises(ImageUnreadable):
        Image.open(copy)


def test_a_file_that_goes_while_the_image_is_open_is_missed(copy):
    with Image.open(copy) as image:
        (copy / "phos-data-0.raw").unlink()
        assert image.verify() == [f"{copy / 'phos-data-0.raw'} is missing"]


def test_the_original_is_whole(original):
    assert found(original) == []
    assert sorted(p.name for p in original.iterdir() if p.name in ALL) == sorted(ALL)


@pytest.mark.parametrize("name", FULL)
def test_truncated_anywhere(copy, name):
    raw = (copy / name).read_bytes()
    rng = random.Random(name)
    points = {0, 1, 4, 7, 8, 9, 12, len(raw) // 2, len(raw) - 1} | {rng.randrange(len(raw)) for _ in range(30)}
    for size in sorted(p for p in points if p < len(raw)):
        (copy / name).write_bytes(raw[:size])
        assert_blamed(copy, name)


@pytest.mark.parametrize("name", ALL)
def test_longer_than_it_was(copy, name):
    with (copy / name).open("ab") as file:
        file.write(b"\0")
    assert_blamed(copy, name)


@pytest.mark.parametrize("name", FULL)
def test_one_flipped_bit(copy, name):
    raw = bytearray((copy / name).read_bytes())
    rng = random.Random(name)
    # Every byte of the small files, a sample of the data.
    places = range(len(raw)) if len(raw) < 1000 else sorted({rng.randrange(len(raw)) for _ in range(150)})
    for at in places:
        bit = 1 << rng.randrange(8)
        raw[at] ^= bit
        (copy / name).write_bytes(raw)
        assert_blamed(copy, name)
        raw[at] ^= bit
    (copy / name).write_bytes(raw)
    assert found(copy) == []


@pytest.mark.parametrize("name", ALL)
def test_missing(copy, name):
    (copy / name).unlink()
    assert_blamed(copy, name)


@pytest.mark.parametrize("name", ALL)
def test_replaced_by_a_directory(copy, name):
    (copy / name).unlink()
    (copy / name).mkdir()
    assert_blamed(copy, name)


@pytest.mark.parametrize("first", FULL)
def test_swapped_with_another(copy, first):
    for second in FULL:
        if second != first:
            a, b = (copy / first).read_bytes(), (copy / second).read_bytes()
            (copy / first).write_bytes(b)
            (copy / second).write_bytes(a)
            # A bad commit record is all there is to say: nothing vouches for the other files.
            assert_blamed(copy, "phos-commit.img" if "phos-commit.img" in (first, second) else first)
            (copy / first).write_bytes(a)
            (copy / second).write_bytes(b)


@pytest.mark.parametrize("name", [n for n in OURS if n != "phos-commit.img"])
def test_taken_from_another_image(copy, tmp_path, name):
    """Another image of the very same data: its inventory differs by its id, its data do not differ at all."""
    write_small(tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, copy / name)
    if (tmp_path / "other" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes() and "inventory" not in name:
        assert found(copy) == []
    else:
        assert_blamed(copy, name)


def test_inventory_of_another_image_is_noticed(copy, tmp_path):
    write_small(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "phos-inventory.img", copy / "phos-inventory.img")
    assert_blamed(copy, "phos-inventory.img")


def test_all_problems_are_listed_not_the_first_alone(copy):
    (copy / "core-100.img").unlink()
    for name in ("phos-data-0.raw", "phos-data-2.raw", "pages-1.img"):
        raw = bytearray((copy / name).read_bytes())
        raw[10] ^= 1
        (copy / name).write_bytes(raw)
    problems = found(copy)
    assert len(problems) == 4
    for name in ("core-100.img", "phos-data-0.raw", "phos-data-2.raw", "pages-1.img"):
        assert sum(name in p for p in problems) == 1


def test_a_bad_chunk_names_file_offset_process_and_buffer(copy):
    with (copy / "phos-data-0.raw").open("r+b") as file:
        file.seek(CHUNK + 5)
        file.write(b"damage")
    with Image.open(copy) as image:
        with pytest.raises(ImageError) as refusal:
            read_block(image, (SESSION, 1))
        assert read_block(image, (PEER, 1)) == page(4) + page(5)
        (problem,) = image.verify()
    for text in (str(refusal.value), problem):
        assert f"{copy}/phos-data-0.raw, byte {CHUNK}:" in text
        assert f"buffer at {ADDRESS + (1 << 32):#x} of process 100 (program-0)" in text
        assert "damaged" in text


def test_data_that_vanishes_after_opening_is_an_image_error(copy):
    with Image.open(copy) as image:
        os.truncate(copy / "phos-data-0.raw", CHUNK)
        with pytest.raises(ImageError, match=r"phos-data-0\.raw.*cannot be read"):
            read_block(image, (SESSION, 1))


@pytest.mark.parametrize("name", ["core-999.img", "phos-data-9.raw", MARKER])
def test_a_file_that_does_not_belong_is_reported(copy, name):
    """With the last one a restore takes the data from another host."""
    (copy / name).write_bytes(b"of another dump")
    assert_blamed(copy, name)


def test_logs_and_statistics_may_change(copy):
    (copy / "dump.log").write_text("longer than it was\n" * 10)
    (copy / "restore.log").write_text("new")
    (copy / "stats-dump").unlink()
    assert found(copy) == []


# ------------------------------------------------------------------------------------------- what is no image at all


def refusal_of(directory) -> str:
    with pytest.raises(ImageError) as refusal:
        Image.open(directory)
    return str(refusal.value)


def test_an_order_may_just_be_written_beside_it(copy):
    """Or be left there by a phosd that was killed while it wrote."""
    (copy / formats.ORDER_TEMPORARY).write_bytes(b"half of it")
    assert found(copy) == []


def test_missing_directory(tmp_path):
    assert "there is no directory" in refusal_of(tmp_path / "nothing")


def test_not_a_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refusal_of(tmp_path / "file")


def test_a_descriptor_of_something_else(tmp_path):
    (tmp_path / "file").write_text("x")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    assert "is not a directory" in refusal_of(fd)
    os.close(fd)


def test_empty_directory(tmp_path):
    assert "holds no image (it is empty)" in refusal_of(tmp_path)


def test_foreign_directory(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    assert "holds no image" in refusal_of(tmp_path)


def test_criu_image_without_ours(tmp_path):
    (tmp_path / "inventory.img").write_bytes(b"x")
    assert "made without PhOS" in refusal_of(tmp_path)


def test_empty_commit_record(copy):
    (copy / "phos-commit.img").write_bytes(b"")
    assert "phos-commit.img is empty" in refusal_of(copy)


def test_commit_record_under_its_temporary_name_does_not_count(copy):
    (copy / "phos-commit.img").rename(copy / "phos-commit.img.tmp")
    assert "incomplete" in refusal_of(copy)


# ---------------------------------------------------------------------- damage with a commit record that vouches for it


def recommit(directory: Path, change) -> None:
    """Alter the commit record and seal it again, as a buggy or a newer writer would."""
    path = directory / "phos-commit.img"
    record = formats.parse_file(path.read_bytes(), "", formats.COMMIT)[0].record
    for file in record.files:
        if file.origin == pb.File.PHOS:
            raw = (directory / file.name).read_bytes()
            file.size = len(raw)
            file.hashes[:] = [formats.digest(raw)]
    change(record)
    head = formats.frame_file(formats.COMMIT, [pb.CommitEntry(record=record)])
    path.write_bytes(head + formats.frame(pb.CommitEntry(seal=formats.digest(head))))


def test_resealing_alone_changes_nothing(copy):
    recommit(copy, lambda record: None)
    assert found(copy) == []


@pytest.mark.parametrize("name", ["phos-data-00.raw", "phos-data-\u0660.raw", "phos-data-0.raw\n", "phos-data-+0.raw"])
def test_a_stripe_has_one_name(name):
    """Else one file would be checked, and another one loaded that has its number too."""
    assert formats.stripe_of(formats.data_file(10)) == 10
    assert formats.stripe_of(name) is None


def test_record_that_wants_a_hash_of_every_byte(copy, monkeypatch):
    """Of a file with holes that is a gigabyte long this would be more than there is memory for."""
    hashed = []
    digest = reader.digest
    monkeypatch.setattr(reader, "digest", lambda data: hashed.append(len(data)) or digest(data))

    def change(record):
        for file in record.files:
            file.segment_size = 1

    recommit(copy, change)
    assert any("phos-chunks.img is damaged" in problem for problem in found(copy))
    assert 1 not in hashed


def test_other_version(copy):
    def change(record):
        record.format_version = 99

    recommit(copy, change)
    assert "format version 99" in refusal_of(copy)
    with pytest.raises(ImageUnreadable):  # for all that we know it is whole: guard must not remove it
        Image.open(copy)
    assert is_whole(copy) is None


def test_record_that_reaches_outside_the_directory(copy):
    def change(record):
        record.files[0].name = "../secret"

    recommit(copy, change)
    assert "outside the image" in refusal_of(copy)


@pytest.mark.parametrize("name", ["a\0b", "\0"])
def test_record_with_a_name_that_no_file_has(copy, name):
    def change(record):
        record.files[0].name = name

    recommit(copy, change)
    assert "outside the image" in refusal_of(copy)


def test_record_with_data_that_passes_for_something_else(copy):
    """Whoever pins the data, or leaves it at its host, goes by what the record calls it."""

    def change(record):
        next(file for file in record.files if file.name == "phos-data-0.raw").origin = pb.File.CRIU

    recommit(copy, change)
    assert "reaches past the end of phos-data-0.raw" in refusal_of(copy)


@pytest.mark.parametrize("name", ["pages-1.img", "phos-data-0.raw"])
def test_record_with_a_size_that_no_file_has(copy, name):
    """It would be an offset that the kernel's calls do not take."""

    def change(record):
        file = next(file for file in record.files if file.name == name)
        file.size = (1 << 64) - 1
        file.segment_size = 1 << 63
        file.hashes[:] = [bytes(16)] * 2

    recommit(copy, change)
    with pytest.raises(ImageError, match=f"gives {name} more bytes than a file can have"):
        Image.open_damaged(copy)


def test_zeros_without_end_take_no_time_to_verify(copy):
    """They are stored nowhere: there is nothing to read, however many are claimed."""

    def change(tables):
        zeros = next(table for table in tables if all(run.kind == pb.Run.ZERO for run in table.runs))
        zeros.size = zeros.runs[0].length = 1 << 60

    change_tables(copy, change)
    with Image.open_damaged(copy) as image:
        looked = []
        verify = image._verify_extent
        image._verify_extent = lambda extent, memory: looked.append(extent) or verify(extent, memory)  # type: ignore
        assert image.verify()
    assert all(extent.stripe is not None for extent in looked)


def test_record_without_an_inventory(copy):
    def change(record):
        del record.files[:]

    recommit(copy, change)
    assert "does not name phos-inventory.img" in refusal_of(copy)


def change_tables(directory: Path, change) -> str:
    path = directory / "phos-chunks.img"
    tables = formats.parse_file(path.read_bytes(), "", formats.CHUNKS)
    change(tables)
    path.write_bytes(formats.frame_file(formats.CHUNKS, tables))
    recommit(directory, lambda record: None)
    return refusal_of(directory)


@pytest.mark.parametrize(
    "attribute,value,complaint",
    [
        ("length", CHUNK, "32 bytes of hashes for 1 chunks"),
        ("length", 3 * CHUNK, "32 bytes of hashes for 3 chunks"),
        ("offset", CHUNK, "is missing at bytes"),
        ("stripe", 7, "reaches past the end of phos-data-7.raw"),
        ("file_offset", 1 << 40, "reaches past the end of phos-data-0.raw"),
        ("file_offset", 12, "not a multiple of 4096"),
        ("hashes", b"short", "5 bytes of hashes"),
        ("kind", 0, "unknown kind"),
        ("kind", pb.Run.PARENT, "parent image"),
    ],
)
def test_impossible_chunk_tables(copy, attribute, value, complaint):
    def change(tables):
        setattr(tables[0].runs[0], attribute, value)

    assert complaint in change_tables(copy, change)


def test_table_that_no_process_refers_to(copy):
    extra = pb.BlockTable(session=b"x" * 16, chunk_size=CHUNK)
    assert "none in the inventory" in change_tables(copy, lambda tables: tables.append(extra))


def test_overlapping_runs(copy):
    def change(tables):
        tables[0].runs[1].offset = CHUNK

    assert "overlaps at bytes 4096 to 8192" in change_tables(copy, change)


def test_table_that_is_there_twice(copy):
    assert "is there twice" in change_tables(copy, lambda tables: tables.append(tables[0]))


def test_extent_larger_than_the_buffer_is_refused(original):
    with Image.open(original) as image, aligned(bytes(CHUNK)) as view:
        extent = next(image.extents((SESSION, 1)))
        with pytest.raises(ValueError, match="the buffer has 4096 bytes"):
            image.read_into(extent, view)


@pytest.mark.parametrize(
    "name", ["phos-commit.img", "phos-inventory.img", "phos-chunks.img", "pages-1.img", "phos-data-0.raw"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "endless"])
def test_what_is_no_regular_file_is_not_opened(copy, monkeypatch, name, kind):
    """Whose directory it is may have put it there, and root would wait for it, set it off or read it without end."""
    monkeypatch.setattr(reader, "METADATA_MOST", 1 << 20)
    (copy / name).unlink()
    if kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "device":
        (copy / name).symlink_to("/dev/zero")
    else:
        with open(copy / name, "wb") as file:
            file.truncate(1 << 40)
    assert_blamed(copy, name)


def test_an_image_without_a_marker_is_of_this_host(copy):
    assert marker_of(copy) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"address": 5, "key_file": "k", "only_data": false}', "[" * 60000, "\xff"],
    ids=["empty", "list", "object", "number", "nested", "no text"],
)
def test_a_marker_that_says_nothing_is_damaged(copy, content):
    (copy / MARKER).write_text(content, encoding="latin-1")
    with pytest.raises(ImageError, match=f"{MARKER} in the image directory is damaged"):
        marker_of(copy)


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_a_marker_that_is_no_file_is_neither_followed_nor_waited_for(copy, tmp_path, kind):
    if kind == "pipe":
        os.mkfifo(copy / MARKER)
    elif kind == "directory":
        (copy / MARKER).mkdir()
    else:
        (tmp_path / "elsewhere").write_text("{}")
        (copy / MARKER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match=MARKER):
        marker_of(copy)


def marker_of(directory: Path) -> RemoteImage | None:
    """What another host has, by a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return RemoteImage.open(descriptor)
    finally:
        os.close(descriptor)


def test_a_link_to_a_regular_file_is_followed(copy, tmp_path):
    (copy / "phos-inventory.img").rename(tmp_path / "elsewhere")
    (copy / "phos-inventory.img").symlink_to(tmp_path / "elsewhere")
    assert found(copy) == []
