"""A writer that fails or dies leaves nothing that opens, and what it can clean up it cleans up."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from phos.images.errors import ImageError
from phos.images.files import run_in_threads
from phos.images.reader import Image
from phos.images.writer import ImageWriter
from tests.unit.append_replaced import Write
from tests.unit.image_sets import CHUNK, SESSION, aligned, inventory_of, ours, page, write_small

KEY = (SESSION, 1)


@pytest.fixture
def directory(tmp_path):
    """An empty directory, open."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def write_pages(writer: ImageWriter, count: int) -> None:
    for i in range(count):
        with aligned(page(i)) as view:
            writer.write(0, KEY, i * CHUNK, view)


# ------------------------------------------------------------------------------------------------ refused directories


def test_directory_with_a_whole_image_is_refused_and_left_alone(tmp_path):
    write_small(tmp_path / "i")
    fd = os.open(tmp_path / "i", os.O_RDONLY)
    with pytest.raises(ImageError, match="holds another image"):
        ImageWriter(fd, stripes=1)
    os.close(fd)
    with Image.open(tmp_path / "i") as image:
        assert image.verify() == []


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_of_crius_is_not_left_out(tmp_path, directory, kind):
    """CRIU wrote through somebody's link: what it wrote is elsewhere, and the image would lack it."""
    if kind == "link":
        (tmp_path / "core-7.img").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(b"core")
    else:
        os.mkfifo(tmp_path / "core-7.img")
    with ImageWriter(directory, stripes=1) as writer:
        write_pages(writer, 1)
        with pytest.raises(ImageError, match=r"core-7\.img is no regular file"):
            writer.commit(inventory_of({KEY: CHUNK}))
    assert not ours(tmp_path)


def test_directory_with_remains_is_refused(tmp_path, directory):
    (tmp_path / "phos-data-3.raw").write_bytes(b"x")
    with pytest.raises(ImageError, match=r"is not empty.*phos-data-3\.raw"):
        ImageWriter(directory, stripes=1)
    assert ours(tmp_path) == ["phos-data-3.raw"]


def test_directory_with_a_criu_image_is_refused(tmp_path, directory):
    (tmp_path / "inventory.img").write_bytes(b"x")
    with pytest.raises(ImageError, match="made by CRIU"):
        ImageWriter(directory, stripes=1)


def test_second_writer_in_one_directory_is_refused(tmp_path, directory):
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as first:
        with pytest.raises(ImageError, match="is not empty"):
            ImageWriter(directory, stripes=1)
        write_pages(first, 2)
        first.commit(inventory_of({KEY: 2 * CHUNK}))
    with Image.open(tmp_path) as image:
        assert image.verify() == []


def test_directory_that_cannot_be_written_to(tmp_path):
    fd = os.open("/proc/self", os.O_RDONLY)
    with pytest.raises(ImageError, match="cannot be written"):
        ImageWriter(fd, stripes=1)
    os.close(fd)


# ------------------------------------------------------------------------------------------------------------ aborting


def test_leaving_without_commit_removes_ours_and_keeps_crius(tmp_path, directory):
    with ImageWriter(directory, stripes=3, chunk_size=CHUNK) as writer:
        write_pages(writer, 3)
        (tmp_path / "pages-1.img").write_bytes(b"CRIU's")
        assert ours(tmp_path) != []
    assert [p.name for p in tmp_path.iterdir()] == ["pages-1.img"]


def test_an_exception_in_the_block_removes_ours(tmp_path, directory):
    def fail(writer):
        with writer:
            write_pages(writer, 1)
            raise RuntimeError("the daemon's")

    with pytest.raises(RuntimeError, match="the daemon's"):
        fail(ImageWriter(directory, stripes=1, chunk_size=CHUNK))
    assert list(tmp_path.iterdir()) == []


def test_abort_after_commit_keeps_the_image(tmp_path, directory):
    writer = ImageWriter(directory, stripes=1, chunk_size=CHUNK)
    write_pages(writer, 1)
    writer.commit(inventory_of({KEY: CHUNK}))
    writer.abort()
    with Image.open(tmp_path) as image:
        assert image.verify() == []


def test_writing_after_the_end_is_refused(directory):
    writer = ImageWriter(directory, stripes=1, chunk_size=CHUNK)
    writer.abort()
    with pytest.raises(ImageError, match="takes no more data"):
        write_pages(writer, 1)
    with pytest.raises(ImageError, match="takes no more data"):
        writer.commit(inventory_of({}))


def test_abort_waits_for_the_write_in_progress(tmp_path, directory, replace_pwritev):
    """Else the descriptor could be closed, and reused, under the thread that writes to it."""
    writer = ImageWriter(directory, stripes=1, chunk_size=CHUNK, direct=False)
    inside, go_on, order = threading.Event(), threading.Event(), []

    def slow(*args):
        inside.set()
        go_on.wait(10)
        order.append("written")
        return os.pwritev(*args)

    replace_pwritev(slow)
    thread = threading.Thread(target=write_pages, args=(writer, 1))
    thread.start()
    assert inside.wait(10)

    def abort():
        writer.abort()
        order.append("aborted")

    aborting = threading.Thread(target=abort)
    aborting.start()
    time.sleep(0.05)
    go_on.set()
    thread.join(10)
    aborting.join(10)
    assert order == ["written", "aborted"]
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path, directory, replace_pwritev):
    replace_pwritev(lambda fd, pieces, offset: os.pwritev(fd, [pieces[0][: max(1, len(pieces[0]) // 3)]], offset))
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK, direct=False) as writer:
        with aligned(page(1) + page(2) + page(3)[:100]) as view:
            writer.write(0, KEY, 0, view)
        writer.commit(inventory_of({KEY: 2 * CHUNK + 100}))
    with Image.open(tmp_path) as image:
        assert image.verify() == []


@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fsync", "rename", "ftruncate", "preadv"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_any_failing_call_is_a_sentence_and_leaves_nothing(
    tmp_path, directory, monkeypatch, replace_pwritev, call, number
):
    """One call after the other fails, once; whichever it was, nothing of ours stays and CRIU's file does."""
    (tmp_path / "pages-1.img").write_bytes(page(1))
    real = getattr(os, call)
    failures = 0
    for nth in range(100):
        calls = 0

        def failing(*args, nth=nth, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth + 1:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        if call == "pwritev":
            replace_pwritev(failing)
        else:
            monkeypatch.setattr(os, call, failing)
        complaint = ""
        try:
            with ImageWriter(directory, stripes=2, chunk_size=CHUNK) as writer:
                write_pages(writer, 2)
                writer.commit(inventory_of({KEY: 2 * CHUNK}))
        except ImageError as error:
            complaint = str(error)
        monkeypatch.undo()
        replace_pwritev(None)
        if not complaint:
            break
        failures += 1
        assert str(tmp_path) in complaint
        assert ("quota" in complaint) == (number == errno.EDQUOT)
        assert [p.name for p in tmp_path.iterdir()] == ["pages-1.img"]
    assert failures
    with Image.open(tmp_path) as image:
        assert image.verify() == []


# ----------------------------------------------------------------------------------------------------------- disk full


@pytest.mark.parametrize("direct", [None, False])
def test_full_disk_while_writing_data(small_disk, direct):
    (small_disk / "pages-1.img").write_bytes(b"CRIU's")
    fd = os.open(small_disk, os.O_RDONLY)
    try:
        with ImageWriter(fd, stripes=1, chunk_size=CHUNK, direct=direct) as writer:
            with pytest.raises(ImageError) as refusal:
                write_pages(writer, 1000)
            assert ours(small_disk) != []
        sentence = str(refusal.value)
        full = f"the file system is full: {CHUNK} more bytes were needed, 0 are free"
        assert f"{small_disk}/phos-data-0.raw: {full}" in sentence
        assert "make room" in sentence
        assert ours(small_disk) == []
        assert (small_disk / "pages-1.img").read_bytes() == b"CRIU's"
        # and there is room again
        with ImageWriter(fd, stripes=1, chunk_size=CHUNK, direct=direct) as writer:
            write_pages(writer, 100)
            writer.commit(inventory_of({KEY: 100 * CHUNK}))
    finally:
        os.close(fd)
    with Image.open(small_disk) as image:
        assert image.verify() == []


def test_reserving_more_than_there_is_says_so_and_harms_nothing(small_disk):
    fd = os.open(small_disk, os.O_RDONLY)
    with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
        assert not writer.reserve(1 << 30)
        write_pages(writer, 100)
        writer.commit(inventory_of({KEY: 100 * CHUNK}))
    os.close(fd)
    with Image.open(small_disk) as image:
        assert image.verify() == []


def fill(path: Path) -> None:
    """Write to a file until the file system takes no more."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(page(1)):
            pass


def test_full_disk_while_committing(small_disk):
    fd = os.open(small_disk, os.O_RDONLY)
    try:
        with ImageWriter(fd, stripes=1, chunk_size=CHUNK) as writer:
            write_pages(writer, 10)
            fill(small_disk / "pages-1.img")
            with pytest.raises(ImageError, match="the file system is full"):
                writer.commit(inventory_of({KEY: 10 * CHUNK}))
        assert ours(small_disk) == []
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------------------------------------- death


def test_death_at_any_system_call_leaves_no_image_that_lies(tmp_path, replace_pwritev):
    """A child dies at its first, second, third… call that changes the file system, until one lives to the end.

    Whatever is there then either does not open, or it is the whole image.
    """
    outcomes = []
    for nth in range(200):
        place = tmp_path / str(nth)
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            try:
                die_at_call(nth, replace_pwritev)
                write_small(place)
            except BaseException:
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 9)
        complaint = ""
        try:
            with Image.open(place) as image:
                assert image.verify() == []
        except ImageError as error:
            complaint = str(error)
        outcomes.append(not complaint)
        if complaint:
            assert status == 9
            assert any(text in complaint for text in ("incomplete", "holds no image", "made without PhOS"))
        if status == 0:
            break
    assert outcomes[-1]
    assert outcomes.count(False) > 10
    assert outcomes == sorted(outcomes)  # once it opens, it stays so


def die_at_call(nth: int, replace_pwritev: Callable[[Write], None]) -> None:
    """Make this process die before its nth call of those that change a file."""
    calls = iter(range(1 << 30))

    def dying(real):
        def call(*args, **kwargs):
            if next(calls) == nth:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    replace_pwritev(dying(os.pwritev))
    for name in ("open", "pwrite", "fsync", "ftruncate", "unlink", "rename"):
        setattr(os, name, dying(getattr(os, name)))


WRITER = """
import sys
from pathlib import Path
from tests.unit.append_replaced import Write
from tests.unit.image_sets import write_small
print("ready", flush=True)
for i in range(100000):
    write_small(Path(sys.argv[1]) / str(i))
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.017, 0.029, 0.05])
def test_sigkill_at_a_random_moment(tmp_path, delay):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], env=environment, stdout=subprocess.PIPE, cwd=root
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    opened = 0
    places = sorted(tmp_path.iterdir(), key=lambda p: int(p.name))
    for place in places:
        try:
            with Image.open(place) as image:
                assert image.verify() == []
            opened += 1
        except ImageError:
            assert place == places[-1]  # all before it had been finished
    assert opened >= len(places) - 1


# --------------------------------------------------------------------------------------------------------------- leaks


def test_no_descriptor_is_left_open(tmp_path, directory):
    """After a commit, an abort, a refusal, a read, a failed open: as many descriptors as before."""
    before = os.listdir("/proc/self/fd")
    write_small(tmp_path / "whole")
    with Image.open(tmp_path / "whole") as image:
        assert image.verify() == []
    again = os.open(tmp_path / "whole", os.O_RDONLY)
    with pytest.raises(ImageError):
        ImageWriter(again, stripes=4)
    os.close(again)
    with ImageWriter(directory, stripes=4, chunk_size=CHUNK) as writer:
        write_pages(writer, 1)
    with ImageWriter(directory, stripes=4, chunk_size=CHUNK) as writer, pytest.raises(ImageError):
        writer.commit(inventory_of({KEY: CHUNK}))
    (tmp_path / "whole" / "phos-chunks.img").unlink()
    with pytest.raises(ImageError):
        Image.open(tmp_path / "whole")
    with pytest.raises(ImageError):
        Image.open(directory)
    assert os.listdir("/proc/self/fd") == before


def test_files_of_criu_are_not_all_open_at_once(tmp_path, directory):
    """There is one for each thread of each task, and phosd may open a few thousand."""
    for thread in range(200):
        (tmp_path / f"core-{thread}.img").write_bytes(page(thread))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, limits[1]))
    try:
        with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
            write_pages(writer, 1)
            writer.commit(inventory_of({KEY: CHUNK}))
        with Image.open(tmp_path) as image:
            assert image.verify() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ------------------------------------------------------------------------------------------------------- interruption


def test_who_interrupts_threads_waits_for_what_they_have_begun_and_no_more():
    begun = []

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def act(number: int) -> None:
        begun.append(number)
        if number == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)

    former = signal.signal(signal.SIGUSR1, interrupt)
    gc.disable()  # hypothesis is called at each collection, and Python loses what a handler raises in there
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_threads([partial(act, number) for number in range(50)], 2)
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, former)
    count = len(begun)
    assert count < 40
    time.sleep(0.2)
    assert len(begun) == count  # nobody is at work any more


def test_an_error_of_a_thread_keeps_nothing_but_itself() -> None:
    """It refers to the frames that it came through, and they to what an image is made of: none of them to it."""

    class Tables:
        """As an image's."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    def attempt() -> weakref.ref[Tables]:
        tables = Tables()
        with suppress(OSError):
            run_in_threads([fail] * 3)
        return weakref.ref(tables)

    gc.collect()
    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()
