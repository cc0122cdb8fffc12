"""Files that tasks use by a name that is gone, in CRIU's images.

    files.img             a message for each file: its id, and a regular file's name
    remap-fpath.img       for a file whose name is gone the id of another one that it is restored from

A file that has another name CRIU keeps by one more link in the same directory, link_remap.<id> (LINKED). Where the
other name is known, the file is simply restored by that. Facts are those of CRIU 4.1.1: create_link_remap(),
dump_linked_remap() and open_path() in criu/files-reg.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phos.images import criu_files
from phos.images.errors import ImageError

FILES = "files.img"
REMAPS = "remap-fpath.img"


@dataclass
class Replaced:
    """What became of the files that CRIU would restore by a link.

    links  paths of the links that are not needed any more.
    left   the names of files for which there was no other, and the paths of their links.
    """

    links: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def remaps(directory: int, *, linked: bool = False) -> list[Any]:
    """What REMAPS in an open directory says of files whose names are gone; nothing, if CRIU has made none.

    ``linked``: see :func:`~phos.images.criu_files.messages`.

    Raises: as :func:`name_again`.
    """
    from pycriu.images.remap_file_path_pb2 import remap_file_path_entry

    try:
        bodies = criu_files.messages(directory, REMAPS, "REMAP_FPATH", linked=linked)
    except FileNotFoundError:
        return []
    return [criu_files.parse(remap_file_path_entry, body, REMAPS) for body in bodies]


def name_again(directory: int, name_for: Callable[[str], str]) -> Replaced:
    """Have files restored by another name than the one that is gone, in CRIU's images in an open directory.

    name_for  of a link's path the path of the same file that is to be used; empty: there is none.

    CRIU must have finished. Either image is replaced as a whole; nothing is synced.

    Raises:
        ImageError: an image is damaged.
        OSError: CRIU wrote its images elsewhere; a file cannot be read or written; it names the file.
    """
    from pycriu.images.remap_file_path_pb2 import LINKED

    replaced = Replaced()
    found = remaps(directory)
    linked = {remap.orig_id: remap.remap_id for remap in found if remap.remap_type == LINKED}
    if not linked:
        return replaced
    named = _name_files(directory, name_for, linked, replaced)
    if named:
        kept = [remap.SerializeToString() for remap in found if remap.orig_id not in named]
        criu_files.replace(directory, REMAPS, "REMAP_FPATH", kept)
    return replaced


def _name_files(
    directory: int, name_for: Callable[[str], str], linked: Mapping[int, int], replaced: Replaced
) -> set[int]:
    """Change names in files.img. Returns the ids of the files that need no link any more."""
    from pycriu.images.fdinfo_pb2 import REG, file_entry

    bodies = criu_files.messages(directory, FILES, "FILES")
    files = {}
    for number, body in enumerate(bodies):
        entry = criu_files.parse(file_entry, body, FILES)
        if entry.type == REG:
            files[entry.id] = (number, entry)
    for wanted in {*linked, *linked.values()} - files.keys():
        raise ImageError(f"{REMAPS} names file {wanted}, which {FILES} lacks")
    named = set()
    for file, link in linked.items():
        number, entry = files[file]
        path = criu_files.path_in(files[link][1].reg.name)
        if not (name := name_for(path)):
            replaced.left[criu_files.path_in(entry.reg.name)] = path
            continue
        named.add(file)
        replaced.links.append(path)
        entry.reg.name = name
        bodies[number] = entry.SerializeToString()
    without = {files[linked[file]][0] for file in named}
    if named:
        kept = [body for number, body in enumerate(bodies) if number not in without]
        criu_files.replace(directory, FILES, "FILES", kept)
    return named
