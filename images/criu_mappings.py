"""Mappings that a task is restored without, left out of CRIU's image of it.

    pstree.img            a message for each task: its PID
    mm-<PID>.img          one message: what a task's memory is made of, a VMA each

A child that was forked after CUDA had been initialised has the driver's device files open and mapped, and no CUDA: the
driver answers it nothing and touches none of it. With a plugin that takes such mappings on CRIU notes where they are
(VMA_EXT_PLUGIN), and would open the device file in a restore to map it again, which the driver refuses. So they are not
restored: nothing is there that anybody could use. Facts are those of CRIU 4.1.1: handle_vma() in criu/proc_parse.c,
open_filemap() in criu/files-reg.c, criu/include/image.h.
"""

from __future__ import annotations

import mmap

from phos.images import criu_files
from phos.images.errors import ImageError

_VMA_EXT_PLUGIN = 1 << 27


def leave_out_device_mappings(directory: int) -> dict[int, int]:
    """Take the mappings that CRIU left to a plugin out of all images of tasks in a directory (an open descriptor).

    CRIU must have finished with the tasks. Returns of each task (the PID in CRIU's file names) how many there were. An
    image is replaced as a whole, or stays as it is; nothing is synced.

    Raises:
        ImageError: an image is damaged, or a mapping may have pages in another one.
        OSError: CRIU wrote its images elsewhere; a file cannot be read or written; it names the file.
    """
    from pycriu.images.mm_pb2 import mm_entry
    from pycriu.images.pstree_pb2 import pstree_entry

    left_out: dict[int, int] = {}
    for body in criu_files.messages(directory, "pstree.img", "PSTREE"):
        task = criu_files.parse(pstree_entry, body, "pstree.img").pid
        name = f"mm-{task}.img"
        try:
            memory = criu_files.only(directory, name, "MM", mm_entry)
        except FileNotFoundError:  # a zombie
            continue
        kept = [vma for vma in memory.vmas if not vma.status & _VMA_EXT_PLUGIN]
        if len(kept) == len(memory.vmas):
            continue
        if any(vma.flags & mmap.MAP_PRIVATE for vma in memory.vmas if vma.status & _VMA_EXT_PLUGIN):
            raise ImageError(f"{name}: a private mapping of a device may have pages of its own, which are not left out")
        left_out[task] = len(memory.vmas) - len(kept)
        del memory.vmas[:]
        memory.vmas.extend(kept)
        criu_files.replace(directory, name, "MM", [memory.SerializeToString()])
    return left_out
