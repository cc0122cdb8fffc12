"""Regular files that a task has open to write to them, by CRIU's images.

    files.img             a message for each open or mapped file: of a regular one its name, its size and how it is open

CRIU restores such a file only if it is as long as it was, unless it is open to be appended to. Facts are those of
CRIU 4.1.1: should_check_size() and validate_file() in criu/files-reg.c.
"""

from __future__ import annotations

import os

from phos.images import criu_files


def written_files(directory: int) -> dict[str, int]:
    """The size that each file must have that a task writes to, and only writes to, by path; an open image directory.

    Not those of a mount namespace that CRIU restores: they are in the image, or in places of its own.

    Raises:
        ImageError: the image is damaged.
        OSError: it is not there, or cannot be read.
    """
    from pycriu.images.fdinfo_pb2 import REG, file_entry

    found = {}
    for body in criu_files.messages(directory, "files.img", "FILES"):
        entry = criu_files.parse(file_entry, body, "files.img")
        if entry.type != REG or not entry.reg.HasField("size") or entry.reg.mnt_id != -1 or entry.reg.ext:
            continue
        if entry.reg.flags & os.O_ACCMODE == os.O_WRONLY:
            found[entry.reg.name] = entry.reg.size
    return found
