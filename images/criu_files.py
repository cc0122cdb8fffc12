"""CRIU's own image files: a header of two magic numbers, then messages, each behind its length.

criu_pages.py, criu_mappings.py and criu_remaps.py change some of them. Names are those of files in a directory that is
given as an open descriptor: whoever owns it may put links there, which are not followed where something is changed.
Facts are those of CRIU 4.1.1 (criu/include/magic.h, criu/protobuf.c).
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from google.protobuf.message import DecodeError

from phos.images.errors import ImageError
from phos.images.files import open_regular
from phos.images.formats import IMG_COMMON, split_frames

_U32 = struct.Struct("<I")
_MAGICS = struct.Struct("<II")


def header(magic: str) -> bytes:
    """How a file of that kind begins ("MM", "PAGEMAP": names of pycriu.images.magic)."""
    from pycriu.images.magic import by_name

    return _MAGICS.pack(IMG_COMMON, by_name[magic])


def messages(directory: int, name: str, magic: str, *, linked: bool = False) -> list[bytes]:
    """The messages in a file of CRIU's; ImageError if it is none of that kind, or cut off.

    ``linked``: it may be a link to one, as in an image that is restored, which is CRIU's to follow as well.
    """
    opened = io.FileIO(open_regular(directory, name)) if linked else open_file(directory, name, "r")
    with opened as file, naming(name):
        raw = file.readall()
    if raw[:8] != header(magic):
        raise ImageError(f"{name} does not begin as an image of CRIU's of the kind {magic}")
    return [body for _, body in split_frames(raw, name)]


def framed(body: bytes) -> bytes:
    """A message as it is in a file."""
    return _U32.pack(len(body)) + body


def parse(kind: Any, body: bytes, name: str) -> Any:
    """A message of CRIU's; ImageError if it cannot be decoded."""
    try:
        message = kind.FromString(body)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise ImageError(f"{name} is damaged: a message in it cannot be decoded ({error})") from None
    if not message.IsInitialized():
        raise ImageError(f"{name} is damaged: a message in it lacks fields that CRIU always writes")
    return message


def only(directory: int, name: str, magic: str, kind: Any) -> Any:
    """The message in a file that must hold one."""
    bodies = messages(directory, name, magic)
    if len(bodies) != 1:
        raise ImageError(f"{name} holds {len(bodies)} messages instead of one")
    return parse(kind, bodies[0], name)


def path_in(message: str | bytes) -> str:
    """A path in a message. CRIU writes names of files as they are, and protobuf gives bytes where they are no UTF-8."""
    return os.fsdecode(message)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """An OSError inside it names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, name) from error


def open_file(directory: int, name: str, mode: str) -> io.FileIO:
    """A file without a buffer, in the directory itself: not what a link of its owner's points to."""
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    return io.FileIO(name, mode, opener=lambda path, flags: os.open(path, flags | more, 0o600, dir_fd=directory))


def new_file(directory: int, name: str, stack: ExitStack) -> io.FileIO:
    """A new file, which the end of the stack removes unless it has got another name by then."""
    file = open_file(directory, name, "x+")

    def remove() -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    stack.callback(remove)
    return file


def write(file: io.FileIO, data: bytes) -> None:
    """Write all of it, where the file is."""
    view = memoryview(data)
    while view:
        view = view[os.write(file.fileno(), view) :]


def replace(directory: int, name: str, magic: str, bodies: Iterable[bytes]) -> None:
    """Put other messages into a file that there is, all at once."""
    with suppress(FileNotFoundError):
        os.unlink(f"{name}.new", dir_fd=directory)  # of a phosd that was killed
    with ExitStack() as stack:
        file = stack.enter_context(new_file(directory, f"{name}.new", stack))
        with naming(f"{name}.new"):
            write(file, header(magic) + b"".join(map(framed, bodies)))
            os.fchmod(file.fileno(), stat.S_IMODE(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode))
        os.rename(f"{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory)
