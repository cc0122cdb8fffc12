"""What CRIU will open, or bind, in the file system that restored tasks share with others.

    files.img             a message for each open or mapped file: of a regular one its name, its size and how it is
                          open; of a Unix socket the path that it is bound to

CRIU restores a file that is open for writing only if it is as long as it was, unless it is open to be appended to; and
it binds a socket only if there is the folder. What is in a mount namespace that CRIU restores is not looked at: it is
in the image, or in places of its own. Facts are those of CRIU 4.1.1: should_check_size() and validate_file() in
criu/files-reg.c, open_unixsk_standalone() and bind_on_deleted() in criu/sk-unix.c.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from typing import Any, NamedTuple

from phos.images import criu_files, criu_remaps


class Owner(NamedTuple):
    """Of a file."""

    uid: int
    gid: int


def written_files(directory: int) -> dict[str, int]:
    """The size that each file must have that a task writes to, and only writes to, by path; an open image directory.

    Not of one that has lost its name, which is another file's by now, or nobody's.

    Raises:
        ImageError: the image is damaged.
        OSError: it is not there, or cannot be read.
    """
    from pycriu.images.fdinfo_pb2 import REG

    found = {}
    nameless = {remap.orig_id for remap in criu_remaps.remaps(directory, linked=True)}
    for entry in _entries(directory):
        if (
            entry.id in nameless
            or entry.type != REG
            or not entry.reg.HasField("size")
            or entry.reg.mnt_id != -1
            or entry.reg.ext
        ):
            continue
        if entry.reg.flags & os.O_ACCMODE == os.O_WRONLY:
            found[criu_files.path_in(entry.reg.name)] = entry.reg.size
    return found


def socket_folders(directory: int) -> dict[str, Owner]:
    """The folders in which sockets are bound, and whose those are; an open image directory.

    Not of a socket whose name was gone: CRIU makes its folder for as long as it needs it.

    Raises: as :func:`written_files`.
    """
    from pycriu.images.fdinfo_pb2 import UNIXSK

    found = {}
    for entry in _entries(directory):
        if entry.type != UNIXSK or entry.usk.mnt_id != -1 or entry.usk.deleted:
            continue
        path = os.fsdecode(entry.usk.name.split(b"\0")[0])  # of an abstract one it begins with that
        if path:
            path = posixpath.normpath(posixpath.join(criu_files.path_in(entry.usk.name_dir), path))
        if path.startswith("/"):
            found[posixpath.dirname(path)] = Owner(entry.usk.file_perms.uid, entry.usk.file_perms.gid)
    return found


def _entries(directory: int) -> Iterator[Any]:
    from pycriu.images.fdinfo_pb2 import file_entry

    for body in criu_files.messages(directory, "files.img", "FILES", linked=True):
        yield criu_files.parse(file_entry, body, "files.img")
