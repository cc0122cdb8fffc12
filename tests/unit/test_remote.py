"""Images over TCP: what arrives, and what is shared."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from phos.cli.remote_image import remove
from phos.gen import phos_image_pb2 as pb
from phos.gen import remote_pb2
from phos.gpu_engine.daemon.remote_server import _Shared
from phos.gpu_engine.touch_order import ORDER_MOST
from phos.images import formats, remote, remote_wire
from phos.images.errors import ImageError
from phos.images.formats import digest
from phos.images.reader import Image
from phos.images.remote import Link, Links, RemoteImage, fetch_description
from tests.unit.image_sets import CONTENT, CRIU_FILES, aligned, write_small
from tests.unit.remote_peers import KEY, Host


def fetched(host: Host, key_file: Path, folder: Path, image: str = "image") -> Path:
    folder.mkdir()
    fetch_description(host.address(image), key_file, folder)
    return folder


def content_of(image: Image | RemoteImage) -> dict[tuple[bytes, int], bytes]:
    found = {}
    for key, table in image.blocks.items():
        pieces = []
        for extent in table.extents():
            with aligned(bytes(extent.length)) as view:
                image.read_into(extent, view)
                pieces.append(bytes(view))
        found[key] = b"".join(pieces)
    return found


# What arrives.


def test_what_is_to_last_is_on_stable_storage_before_it_passes_for_an_image(
    host: Host, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done: list[str] = []
    sync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def linked(old: Path, new: Path) -> None:
        done.append(f"{Path(old).name} is {Path(new).name}")
        link(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    fetch_description(host.address("image"), key_file, here, lasting=True)
    back = done.index("phos-commit.img.tmp is phos-commit.img")
    names = {path.name for path in here.iterdir()} - {formats.COMMIT_FILE} | {formats.COMMIT_TEMPORARY}
    assert sorted(done[:back]) == sorted([*names, "here"])
    assert done[back + 1 :] == ["here"]


@pytest.mark.parametrize("name", [formats.COMMIT_FILE, formats.COMMIT_TEMPORARY, "phos-remote.json", "core-7.img"])
def test_what_somebody_else_has_made_meanwhile_stays_his(host: Host, key_file: Path, tmp_path: Path, name: str) -> None:
    """The directory was empty when it was named; connecting takes a while, and so do copies."""
    here = tmp_path / "here"
    here.mkdir()
    (here / name).write_text("another's")
    made: list[Path] = []
    if name in {path.name for path in fetched(host, key_file, tmp_path / "whole").iterdir()} | {
        formats.COMMIT_TEMPORARY
    }:
        with pytest.raises(FileExistsError):
            fetch_description(host.address("image"), key_file, here, made=made)
    else:
        fetch_description(host.address("image"), key_file, here, made=made)
    remove(made, here)
    assert [path.name for path in here.iterdir()] == [name]
    assert (here / name).read_text() == "another's"


def test_an_image_arrives_as_it_is(host: Host, key_file: Path, tmp_path: Path) -> None:
    here = fetched(host, key_file, tmp_path / "here")
    for name, content in CRIU_FILES.items():
        assert (here / name).read_bytes() == content
    assert Image.open(here).verify() != []  # for itself it is no image: it has no data
    directory = os.open(here, os.O_RDONLY)
    try:
        image = RemoteImage.open(directory)
    finally:
        os.close(directory)
    assert image is not None
    assert content_of(image) == {key: b"".join(chunks) for key, chunks in CONTENT.items()}
    image.close()


def test_what_is_wrong_with_an_image_is_said_whatever_its_folder_is_called(key_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    (folder / "image").mkdir(parents=True)
    (folder / "image" / formats.INVENTORY_FILE).touch()
    host = Host(folder)
    try:
        with pytest.raises(ImageError, match="is incomplete: it has no commit record"):
            fetched(host, key_file, tmp_path / "here")
    finally:
        host.server.stop()


def test_an_image_may_have_more_files_than_may_be_open(
    host: Host, key_file: Path, tmp_path: Path, shared: Path
) -> None:
    """Each thread of each process has one."""
    names = {f"core-{number}.img": f"{number}".encode() for number in range(1000, 1400)}
    many = shared / "many"
    write_small(many, others=names)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, most[1]))
    try:
        here = fetched(host, key_file, tmp_path / "here", "many")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert {name: (here / name).read_bytes() for name in names} == names


def test_a_host_that_has_fallen_silent_is_asked_no_more(
    host: Host, key_file: Path, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the files, and of the pieces of a large one, would be waited for as long as the first."""
    write_small(shared / "many", others={f"core-{number}.img": b"core" for number in range(1000, 1200)})
    monkeypatch.setattr(remote_wire, "ANSWER_SECONDS", 0.2)
    over = threading.Event()
    asked = []
    send = _Shared.send

    def silent(image: _Shared, connection: socket.socket, request: remote_pb2.Read) -> None:
        if request.file == formats.COMMIT_FILE:
            send(image, connection, request)
            return
        asked.append(request.file)
        over.wait(20)
        raise OSError

    monkeypatch.setattr(_Shared, "send", silent)
    try:
        with pytest.raises(ImageError, match=r"the connection was lost while .* was read: no answer for"):
            fetched(host, key_file, tmp_path / "here", "many")
    finally:
        over.set()
    assert 0 < len(asked) <= remote.COPY_THREADS


def test_a_directory_without_the_marker_is_not_remote(shared: Path) -> None:
    directory = os.open(shared / "image", os.O_RDONLY)
    try:
        assert RemoteImage.open(directory) is None
    finally:
        os.close(directory)


def opened(here: Path) -> RemoteImage:
    directory = os.open(here, os.O_RDONLY)
    try:
        image = RemoteImage.open(directory)
    finally:
        os.close(directory)
    assert image is not None
    return image


def test_damaged_data_is_noticed_where_it_arrives(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    file = shared / "image" / "phos-data-0.raw"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(ImageError, match=r"phos-data-0.raw, byte 0: .* are damaged"):
        content_of(image)
    file.write_bytes(b"")
    with pytest.raises(ImageError, match=r"phos-data-0\.raw is cut off: it has 0 bytes"):
        content_of(image)
    file.unlink()
    with pytest.raises(ImageError, match=r"phos-data-0\.raw cannot be read: No such file"):
        content_of(image)
    image.close()


@pytest.mark.parametrize("name", ["pages-1.img", formats.CHUNKS_FILE, formats.INVENTORY_FILE])
def test_a_damaged_description_is_noticed(host: Host, key_file: Path, shared: Path, tmp_path: Path, name: str) -> None:
    file = shared / "image" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ImageError, match="damaged"):
        fetched(host, key_file, tmp_path / "here")


def test_an_incomplete_image_is_said_to_be_so(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    (shared / "image" / formats.COMMIT_FILE).unlink()
    with pytest.raises(ImageError, match="is incomplete"):
        fetched(host, key_file, tmp_path / "here")


def test_what_a_fetch_that_was_killed_has_left_is_no_image(
    host: Host, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have their sizes, and nothing checks CRIU's when they are restored."""

    copy = remote._copy_segment

    def killed(links: Links, name: str, *where: Any) -> None:
        if name in CRIU_FILES:
            raise KeyboardInterrupt
        copy(links, name, *where)

    monkeypatch.setattr(remote, "_copy_segment", killed)
    here = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        fetched(host, key_file, here)
    assert (here / "pages-1.img").stat().st_size == len(CRIU_FILES["pages-1.img"])
    with pytest.raises(ImageError, match="is incomplete"):
        Image.open(here)


def test_an_image_that_was_replaced_is_another_one(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    shutil.rmtree(shared / "image")
    (shared / "image").mkdir()
    write_small(shared / "image")
    with pytest.raises(ImageError, match="is another image by now"):
        content_of(image)
    image.close()


def test_idle_connections_that_were_closed_are_made_anew(host: Host, key_file: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    first = content_of(image)
    for link in image._links._idle:
        link._socket.shutdown(socket.SHUT_RDWR)
    assert content_of(image) == first
    host.server.stop()
    for link in image._links._idle:
        link._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ImageError, match="cannot be reached: Connection refused"):
        content_of(image)
    image.close()


def test_several_threads_read_at_once(host: Host, key_file: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(content_of(image))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(content == found[0] for content in found)
    image.close()


def copy(links: Links, file: pb.File, target: int) -> None:
    for job in remote._copies(links, file):
        job(target)


def test_files_of_the_driver_come_with_their_hashes_checked(
    host: Host, key_file: Path, shared: Path, tmp_path: Path
) -> None:
    """As residues are; a small file stands for one."""
    content = os.urandom(10000) + bytes(8192)
    (shared / "image" / "phos-residue-0.raw").write_bytes(content)
    links = Links(host.address(), KEY)
    file = pb.File(name="phos-residue-0.raw", size=len(content), segment_size=4096)
    file.hashes.extend(digest(content[at : at + 4096]) for at in range(0, len(content), 4096))
    with pytest.raises(ImageError, match="the image has no file"):  # its commit record does not name it
        copy(links, file, -1)
    with pytest.raises(ImageError, match="lacks hashes"):
        remote._copies(links, pb.File(name="x", size=1))
    name = "pages-1.img"
    content = CRIU_FILES[name]
    file = pb.File(name=name, size=len(content), segment_size=4096)
    file.hashes.extend(digest(content[at : at + 4096]) for at in range(0, len(content), 4096))
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    copy(links, file, target)
    assert (tmp_path / "target").read_bytes() == content
    file.hashes[-1] = bytes(16)
    with pytest.raises(ImageError, match=r"pages-1.img: bytes 4096 to 8192 are damaged"):
        copy(links, file, target)
    os.close(target)
    links.close()


# What is shared.


@pytest.mark.parametrize(
    "image", ["", "nothing", "..", "../outside", "image/../../outside", "a\0b", "x" * 2000, "file"]
)
def test_nothing_else_is_shared(host: Host, shared: Path, tmp_path: Path, image: str) -> None:
    (tmp_path / "outside").mkdir()
    write_small(tmp_path / "outside")
    (shared / "file").write_text("")
    with pytest.raises(ImageError, match="shares no image"):
        Link(host.address(image), KEY)


def test_links_do_not_lead_out_of_what_is_shared(host: Host, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    write_small(tmp_path / "outside")
    (shared / "link").symlink_to(tmp_path / "outside")
    (shared / "inside").symlink_to(shared / "image")
    for name in ("link", str(tmp_path / "outside")):
        with pytest.raises(ImageError, match="shares no image"):
            Link(host.address(name), KEY)
    for name in ("inside", str(shared / "image"), "image/../image"):
        Link(host.address(name), KEY).close()


@pytest.mark.parametrize("file", ["dump.log", "../image/core-100.img", "/etc/passwd", "", "phos-data-9.raw"])
def test_only_files_of_the_image_are_read(host: Host, file: str) -> None:
    link = Link(host.address(), KEY)
    with pytest.raises(ImageError, match="has no file"):
        link.read_into(file, 0, memoryview(bytearray(1)))
    link.read_into("core-100.img", 0, memoryview(bytearray(1)))  # the connection goes on
    link.close()


@pytest.mark.parametrize("offset,length", [(0, 501), (500, 1), (2**63, 1), (2**64 - 1, 2), (0, 2**64 - 1)])
def test_nothing_is_read_past_the_end(host: Host, offset: int, length: int) -> None:
    link = Link(host.address(), KEY)
    request = remote_pb2.Request(read=remote_pb2.Read(file="core-100.img", offset=offset, length=length))
    with pytest.raises(ImageError, match=r"core-100\.img has 500 bytes"):
        link._ask(request)
    link.close()


def test_a_link_in_the_place_of_a_file_is_not_followed(host: Host, shared: Path, tmp_path: Path) -> None:
    link = Link(host.address(), KEY)
    (tmp_path / "outside").write_bytes(bytes(500))
    (shared / "image" / "core-100.img").unlink()
    (shared / "image" / "core-100.img").symlink_to(tmp_path / "outside")
    with pytest.raises(ImageError, match=r"core-100\.img cannot be read"):
        link.read_into("core-100.img", 0, memoryview(bytearray(1)))
    link.close()


@pytest.mark.parametrize("kind", ["link", "pipe", "large"])
def test_what_is_no_order_in_its_place_is_not_read(
    host: Host, key_file: Path, shared: Path, tmp_path: Path, kind: str
) -> None:
    """A link may lead to what nobody shares, a pipe is waited for without end, a file with holes fills the memory."""
    (tmp_path / "outside").write_text("a secret")
    order = shared / "image" / formats.ORDER_FILE
    order.unlink(missing_ok=True)
    if kind == "link":
        order.symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(order)
    else:
        with open(order, "wb") as file:
            file.truncate(ORDER_MOST + 1)
    here = fetched(host, key_file, tmp_path / "here")
    assert not (here / formats.ORDER_FILE).exists()
    Image.open(here).close()
