"""Appending chunks to a data file (images/append.c): what lies where, and what is left when the file takes no more."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.images.append import ZEROS, StripeState, append
from phos.images.chunk_hash import chunk_hash
from phos.images.errors import ImageError
from phos.images.formats import ALIGNMENT, align_up
from phos.images.new_files import NewFiles
from phos.images.stripe import Stripe
from tests.unit.image_sets import SESSION, aligned, skip

CHUNK = 2 * ALIGNMENT
KEY = (SESSION, 1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def stripe(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stripe]:
    with stripe_in(tmp_path, request.param) as made:
        yield made


@contextmanager
def stripe_in(folder: Path, direct: bool) -> Iterator[Stripe]:
    """A data file in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    files = NewFiles(descriptor, lambda: 0)
    made = Stripe(0, files, CHUNK, itertools.count())
    try:
        made.create()
        if direct and not made.set_direct(True):
            skip("no O_DIRECT here")
        yield made
    finally:
        made.forget()
        files.close()
        os.close(descriptor)


def data_of(kinds: str, tail: int = 0) -> bytes:
    """A chunk for each letter: random bytes, or zeros for "0"; of the last one only ``tail`` bytes, if not 0."""
    whole = b"".join(
        bytes(CHUNK) if k == "0" else random.Random(k + str(i)).randbytes(CHUNK) for i, k in enumerate(kinds)
    )
    return whole[: len(whole) - CHUNK + tail] if tail else whole


def hashes_of(data: bytes) -> list[bytes]:
    return [chunk_hash(memoryview(data[at : at + CHUNK])) for at in range(0, len(data), CHUNK)]


def content(stripe: Stripe) -> bytes:
    """What would be in the image."""
    stripe.finish()
    return Path(f"/proc/self/fd/{stripe.fd}").read_bytes()


def expected(data: bytes, end: int) -> tuple[list[int], bytes]:
    """The places of chunks that are appended there, and what lies in the file from there on."""
    places, stored = [], b""
    for at in range(0, len(data), CHUNK):
        piece = data[at : at + CHUNK]
        places.append(end + len(stored) if any(piece) else ZEROS)
        stored += piece if any(piece) else b""
    return places, stored + bytes(align_up(len(stored)) - len(stored))


# ------------------------------------------------------------------------------------------------------ what lies where

KINDS = ["a", "0", "abc", "000", "a0b", "0a0", "ab00cd", "00ab0"]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("tail", [0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 7])
@pytest.mark.parametrize("kinds", KINDS)
def test_chunks_lie_one_behind_the_other_but_for_zeros(stripe: Stripe, kinds: str, tail: int, known: bool) -> None:
    data = data_of(kinds, tail)
    direct, stored, written = stripe.direct, b"", 0
    for _ in range(2):  # the second begins where the first ended
        with aligned(data) as view:
            hashes, places = append(stripe.state, view, hashes_of(data) if known else None)
        assert hashes == b"".join(hashes_of(data))
        there, more = expected(data, len(stored))
        assert places == there
        stored += more
        written += sum(len(data[i * CHUNK :][:CHUNK]) for i, place in enumerate(places) if place != ZEROS)
        assert (stripe.end, stripe.written, stripe.direct) == (len(stored), written, direct)
    assert content(stripe) == stored


def test_hashes_that_are_given_are_believed(stripe: Stripe) -> None:
    """Of memory that is known to hold zeros nothing is read, so it may hold anything."""
    data = data_of("ab")
    with aligned(data) as view:
        hashes, places = append(stripe.state, view, [hashes_of(bytes(CHUNK))[0], b"h" * 16])
    assert hashes[16:] == b"h" * 16
    assert places == [ZEROS, 0]
    assert content(stripe) == data[CHUNK:]


def test_nothing_can_be_appended(stripe: Stripe) -> None:
    assert append(stripe.state, memoryview(bytearray()), None) == (b"", [])
    assert stripe.end == 0


@pytest.mark.parametrize("count", [1, 3])
def test_hashes_must_be_as_many_as_chunks(stripe: Stripe, count: int) -> None:
    with aligned(data_of("ab")) as view, pytest.raises(ValueError, match="2 chunks have 32 bytes"):
        append(stripe.state, view, [b"h" * 16] * count)


def test_memory_that_may_only_be_read_can_be_appended(stripe: Stripe) -> None:
    data, direct = data_of("a0b", 100), stripe.direct
    append(stripe.state, memoryview(data), None)
    assert stripe.direct == direct
    assert content(stripe) == expected(data, 0)[1]


def test_there_may_be_more_pieces_than_one_call_takes(stripe: Stripe) -> None:
    data = data_of("a0" * 1100 + "b", 77)
    direct = stripe.direct
    with aligned(data) as view:
        _, places = append(stripe.state, view, None)
    assert places == expected(data, 0)[0]
    assert stripe.direct == direct
    assert content(stripe) == expected(data, 0)[1]


def test_runs_are_of_neighbouring_chunks_of_one_kind(stripe: Stripe) -> None:
    data = data_of("ab00cd0", 50)
    hashes = hashes_of(data)
    with aligned(data) as view:
        stripe.append(KEY, 10 * CHUNK, view, None)
    assert [(r.offset // CHUNK, r.length, r.kind, r.file_offset, r.hashes, r.sequence) for r in stripe.runs] == [
        (10, 2 * CHUNK, pb.Run.DATA, 0, b"".join(hashes[:2]), 0),
        (12, 2 * CHUNK, pb.Run.ZERO, 0, b"", 1),
        (14, 2 * CHUNK, pb.Run.DATA, 2 * CHUNK, b"".join(hashes[4:6]), 2),
        (16, 50, pb.Run.ZERO, 0, b"", 3),
    ]
    assert stripe.zero == 2 * CHUNK + 50


def test_chunks_that_are_no_neighbours_in_the_file_are_runs_of_their_own(stripe: Stripe) -> None:
    """So it is when what is recorded was appended in several calls."""
    stripe.record(KEY, 0, 3 * CHUNK - 9, bytes(range(48)), [0, 2 * CHUNK, 3 * CHUNK])
    assert [(r.offset, r.length, r.file_offset, r.hashes) for r in stripe.runs] == [
        (0, CHUNK, 0, bytes(range(16))),
        (CHUNK, 2 * CHUNK - 9, 2 * CHUNK, bytes(range(16, 48))),
    ]


def test_the_structure_is_that_of_the_header() -> None:
    header = (ROOT / "images" / "append.h").read_text()
    (body,) = re.findall(r"struct phos_stripe \{(.*?)\};", header, re.DOTALL)
    types = {ctypes.c_int32: "int32_t", ctypes.c_uint32: "uint32_t", ctypes.c_uint64: "uint64_t"}
    assert re.findall(r"(\w+_t) (\w+);", body) == [(types[field[1]], field[0]) for field in StripeState._fields_]


# ------------------------------------------------------------------------------------------------- what the kernel sees


def test_the_disk_sees_one_request_and_memory_one_for_each_chunk(stripe: Stripe, replace_pwritev) -> None:
    calls = []

    def watched(fd: int, pieces: list[memoryview], offset: int) -> int:
        calls.append((offset // ALIGNMENT, [len(p) // ALIGNMENT for p in pieces]))
        return os.pwritev(fd, pieces, offset)

    replace_pwritev(watched)
    direct = stripe.direct
    with aligned(data_of("ab0cd", ALIGNMENT + 1)) as view:
        append(stripe.state, view, None)
    if direct:  # the end of the last chunk is padded elsewhere
        assert calls == [(0, [4, 3]), (7, [1])]
    else:
        assert calls == [(0, [2]), (2, [2]), (4, [2]), (6, [1])]


@pytest.mark.parametrize("most", [1, 1000, ALIGNMENT, 3 * ALIGNMENT])
def test_short_writes_are_continued(stripe: Stripe, replace_pwritev, most: int) -> None:
    """On O_DIRECT too: the kernel then refuses what does not begin at a sector, which turns it off."""

    def short(fd: int, pieces: list[memoryview], offset: int) -> int:
        page = b"".join(pieces)[:most]
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT and offset % ALIGNMENT:
            raise OSError(errno.EINVAL, "")
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            return os.pwritev(fd, [page], offset)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    replace_pwritev(short)
    data = data_of("ab0cd", ALIGNMENT + 1)
    direct = stripe.direct
    with aligned(data) as view:
        append(stripe.state, view, None)
    replace_pwritev(None)
    assert stripe.direct == (direct and most % ALIGNMENT == 0)
    assert content(stripe) == expected(data, 0)[1]


def test_an_interrupted_write_is_repeated(stripe: Stripe, replace_pwritev) -> None:
    interrupted = iter([True, True, False, True, False, False, False])

    def write(fd: int, pieces: list[memoryview], offset: int) -> int:
        if next(interrupted):
            raise OSError(errno.EINTR, "")
        return os.pwritev(fd, pieces, offset)

    replace_pwritev(write)
    data, direct = data_of("a0b", 9), stripe.direct
    with aligned(data) as view:
        append(stripe.state, view, None)
    assert stripe.direct == direct
    assert content(stripe) == expected(data, 0)[1]


def test_what_o_direct_does_not_take_goes_through_memory(stripe: Stripe, replace_pwritev) -> None:
    def write(fd: int, pieces: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return os.pwritev(fd, pieces, offset)

    replace_pwritev(write)
    data = data_of("ab0c", 5)
    with aligned(b"x" + data) as view:
        append(stripe.state, view[1:], None)
    assert not stripe.direct
    assert not fcntl.fcntl(stripe.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert content(stripe) == expected(data, 0)[1]


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("number", [0, errno.EIO, errno.EDQUOT, errno.EINVAL])
def test_after_a_failure_the_end_is_what_it_was(tmp_path: Path, replace_pwritev, number: int) -> None:
    """0: the file took no bytes. EINVAL: without O_DIRECT it is a failure like others."""
    with stripe_in(tmp_path, False) as stripe:
        first, second = data_of("a"), data_of("xyz", 100)
        with aligned(first) as view:
            stripe.append(KEY, 0, view, None)
        runs = list(stripe.runs)

        def write(fd: int, pieces: list[memoryview], offset: int) -> int:
            if offset >= 2 * CHUNK + 50:
                if number:
                    raise OSError(number, "")
                return 0
            return os.pwritev(fd, [pieces[0][: 2 * CHUNK + 50 - offset]], offset)

        replace_pwritev(write)
        with aligned(second) as view:
            with pytest.raises(OSError) as failure:
                append(stripe.state, view, None)
            assert failure.value.errno == (number or errno.EIO)
            assert (stripe.end, stripe.written, stripe.state.missing) == (CHUNK, 2 * CHUNK, CHUNK - 50)
            with pytest.raises(ImageError, match=rf"{tmp_path}/phos-data-0.raw.*\b{CHUNK - 50} (more )?bytes"):
                stripe.append(KEY, CHUNK, view, None)
            assert stripe.runs == runs
            replace_pwritev(None)
            stripe.append(KEY, CHUNK, view, None)
        assert content(stripe) == first + expected(second, CHUNK)[1]


@pytest.mark.parametrize("direct", [False, True])
def test_a_full_disk_leaves_the_end_and_can_be_used_again(small_disk: Path, direct: bool) -> None:
    other = small_disk / "other"
    other.write_bytes(bytes(range(256)) * 4096)
    with stripe_in(small_disk, direct) as stripe:
        stored = data_of("abc")
        with aligned(stored) as view:
            append(stripe.state, view, None)
        more = data_of("d" * (1 << 20 >> 13) + "efg", 33)  # in tmpfs and ext4 alike less than 1 MiB is left
        with aligned(more) as view:
            with pytest.raises(OSError) as failure:
                append(stripe.state, view, None)
            assert failure.value.errno == errno.ENOSPC
            assert stripe.end == len(stored)
            assert 0 < stripe.state.missing <= len(more)
            other.unlink()
            _, places = append(stripe.state, view, None)
        assert places == expected(more, len(stored))[0]
        assert content(stripe) == stored + expected(more, len(stored))[1]
