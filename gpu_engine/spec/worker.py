"""Analyses modules for phosd: ``python -m phos.gpu_engine.spec.worker PARENT``, started by worker_link.py.

It reads requests from its standard input and answers on its standard output (frames.py), one module at a time, at low
priority. Its input is what applications load, so it expects to crash: phosd starts another one. It ends with phosd.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import resource
import signal
import stat
import sys
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from phos.gpu_engine.spec import disassembler, fatbin, frames
from phos.gpu_engine.spec.cache import Cache, encode
from phos.gpu_engine.spec.descriptor import Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer
from phos.gpu_engine.spec.identity import FileIdentity
from phos.gpu_engine.spec.worker_link import NICE

if TYPE_CHECKING:
    from phos.gpu_engine.spec import analysis

log = logging.getLogger(__name__)

MEMORY_LIMIT = 8 << 30
"""Bytes of address space. A module may be a part of a library of 2 GB, which is mapped as a whole."""
PR_SET_PDEATHSIG = 1
FUSE_SUPER_MAGIC = 0x65735546


def main() -> None:
    parent = int(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    incoming, outgoing = _private_pipes()
    _restrain(parent)
    requests: queue.SimpleQueue[frames.Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(incoming, requests), daemon=True).start()
    cache = Cache()
    while True:
        header, body = requests.get()
        # The default action of SIGALRM ends the process even inside a library that does not let Python run.
        signal.alarm(int(header.get("limit", 60)) + 5)
        _serve(header, body, cache, outgoing)
        signal.alarm(0)


def _private_pipes() -> tuple[int, int]:
    """Move the pipes away from descriptors 0 and 1, where a library's careless print would write into messages."""
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing


def _restrain(parent: int) -> None:
    # Sent when the *thread* that started us ends; in phosd that one lives as long as its speculator.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it ended before we asked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at phosd's terminal: phosd decides
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def _read(incoming: int, requests: queue.SimpleQueue[frames.Message]) -> None:
    """Take requests from the pipe, so that its end is noticed also during an analysis."""
    assembler = frames.Assembler()
    try:
        while piece := os.read(incoming, 1 << 20):
            for message in assembler.feed(piece):
                requests.put(message)
    finally:
        os._exit(0)


def _serve(header: dict[str, Any], body: bytes, cache: Cache, outgoing: int) -> None:
    def answer(stage: str, found: analysis.Descriptors, later: Collection[str] = (), error: str = "") -> None:
        encoded = [encode(item) for item in found.values()]
        reply = {"id": header["id"], "stage": stage, "descriptors": encoded, "later": sorted(later), "error": error}
        for part in frames.pack(reply):
            _write(outgoing, part)

    try:
        with _image(header, body) as (image, user):
            if "twins" in header:
                _answer_twins(image, header, outgoing)
                return
            answer("done", *_analyse(image, header, cache, lambda partly: answer("partly", partly), user))
    except (SpecError, OSError) as error:
        answer("done", {}, error=str(error))
    except Exception as error:
        log.warning("The analysis of a module failed.", exc_info=True)
        answer("done", {}, error=f"The analysis failed: {type(error).__name__} {error}.")


def _answer_twins(image: Buffer, header: dict[str, Any], outgoing: int) -> None:
    """An answer for each part of the module that has PTX, and a last one."""
    from phos.gpu_engine.spec import twins

    for made in twins.files(image, int(header["capability"]), set(header["kernels"]), reads=bool(header["reads"])):
        reply = {"id": header["id"], "stage": "partly", "file": made.file, "left_out": made.left_out}
        for part in frames.pack(reply):
            _write(outgoing, part)
    for part in frames.pack({"id": header["id"], "stage": "done"}):
        _write(outgoing, part)


def _analyse(
    image: Buffer, header: dict[str, Any], cache: Cache, progress: analysis.Progress, user: int | None
) -> tuple[analysis.Descriptors, set[str]]:
    """What is known of the kernels asked for, and those of which more could be found out another time.

    ``user``: for whom it is kept; None: for everybody.
    """
    kernels, capability = set(header["kernels"]), int(header["capability"])
    key = cache.key(image, capability, disassembler.identity(), user=user)
    known, kept_hard = cache.load(key)
    hard = set(kept_hard)
    wanted = kernels - known.keys()
    later: set[str] = set()
    if wanted:
        from phos.gpu_engine.spec import analysis  # takes half of the start; mostly, all that is wanted is kept

        def keep(partly: analysis.Descriptors) -> None:
            if partly:
                progress(partly)
            # Kept at once, in case that the next kernel takes this process down with it.
            final = {name: item for name, item in partly.items() if item.source in (Source.PTX, Source.SASS)}
            if final or hard != kept_hard:
                known.update(final)
                cache.store(key, known.values(), hard)

        seconds = float(header["seconds"])
        found, later, unsure = analysis.describe_within(image, capability, wanted, seconds, keep, hard)
        known.update(found)
        if found.keys() - later - unsure:
            cache.store(key, [item for name, item in known.items() if name not in later | unsure], hard)
    return {name: known[name] for name in kernels & known.keys()}, later


@contextlib.contextmanager
def _image(header: dict[str, Any], body: bytes) -> Iterator[tuple[Buffer, int | None]]:
    """The module's bytes: those sent along, or a part of a file, which is mapped and not read.

    And whose they are: the user's that has loaded them, or nobody's (None), if they cannot be but root's.
    """
    user: int | None = int(header.get("user", -1))
    if "path" not in header:
        yield body, user
        return
    path, offset, size = str(header["path"]), int(header["offset"]), int(header["size"])
    # The path is an application's: it may be a pipe that never delivers, or a terminal.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise SpecError(f"{path} is no regular file.")
        if not 0 <= offset < about.st_size:
            raise SpecError(f"{path} has {about.st_size} bytes; a module was said to be at offset {offset}.")
        if not header.get("kept") and _is_roots(descriptor, about):
            user = None
        mapping = mmap.mmap(descriptor, about.st_size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    view = memoryview(mapping)
    if header.get("file") and not FileIdentity.unpacked(header["file"]).is_of(about, view):
        raise SpecError("The file is not the one any more that the process has loaded.")
    view = view[offset:]
    if size:
        view = view[:size]
    if fatbin.is_container(view):
        view = view[: fatbin.container_size(view)]
    yield view, user
    # The mapping goes with its last view: descriptors of a failed analysis may still be held by a traceback.


def _is_roots(descriptor: int, about: os.stat_result) -> bool:
    """Whether nobody but root can have written a file, nor writes it while it is read."""
    if about.st_uid != 0 or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    filesystem = (ctypes.c_long * 32)()  # struct statfs begins with the type
    # What runs a file system in user space says whose its files are.
    return ctypes.CDLL(None).fstatfs(descriptor, filesystem) == 0 and filesystem[0] != FUSE_SUPER_MAGIC


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
