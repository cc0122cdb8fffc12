"""``phos-gpu restore``: criu restore with the plugin, progress, and one message when it fails."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from phos.cli.criu import errors, image_directory, named_log
from phos.cli.launched import Interrupted
from phos.cli.lazy_pages import HUNG_UP, LazyPages
from phos.cli.outcome import tell
from phos.cli.parameters import Place, gpu_option, json_option
from phos.cli.progress import ImageProgress
from phos.cli.refusal import refuse
from phos.cli.restore_first import PAGES_LOG, RESTORE_LOG, Begun, Occupied
from phos.cli.text import printable, size_text
from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import client, reach
from phos.gpu_engine.errors import DaemonUnavailable, ExitStatus, RestoreFailed, UsageError
from phos.gpu_engine.job_states import MISPREDICTED
from phos.images import native
from phos.images.errors import ImageError
from phos.images.reader import Image
from phos.images.source import SCHEME

GROWN = "PHOS_GROWN_FILES"
NO_TERMINAL = "Don't have tty to inherit session from"
"""CRIU's words where its standard input is no terminal, and who it restores had one."""

_SIZE = re.compile(r"File (.*) has bad size (\d+) \(expect (\d+)\)")
"""CRIU's words of a file that a process has open, or mapped."""

_MAPPED = re.compile(r"Can't open vma|Can't fixup VMA's fd")
"""What it says then if that file was mapped."""

END_SECONDS = 5.0
"""How long a process that was killed may take to end."""


@click.command()
@click.argument("image", type=Place())
@click.option(
    "--lazy", is_flag=True, help="Let the processes compute while their memory, CPU and GPU, is still coming."
)
@gpu_option()
@json_option()
@click.pass_obj
def restore(begun: Begun | None, image: str, lazy: bool, gpus: tuple[str, ...], as_json: bool) -> None:
    """Restore the processes in the directory IMAGE. They run in the background.

    IMAGE may be tcp://HOST:PORT/NAME: an image that phosd at another host shares.

    Returns when they compute again; with --lazy, when all of their memory is there as well.
    """
    if not image.startswith(SCHEME):
        _restore(image, image_directory(Path(image), create=False), lazy, gpus, as_json, begun)
        return
    from phos.cli.remote_image import fetched  # here, because other restores would wait for its network modules

    with ExitStack() as stack:
        began, began_at = time.perf_counter(), time.time()
        try:
            directory = stack.enter_context(fetched(image))
        except ImageError as error:
            refuse("restore", error, as_json, ExitStatus.FAILED)
        _restore(image, directory, lazy, gpus, as_json, None, (began, began_at))


def _restore(
    image: str,
    directory: Path,
    lazy: bool,
    gpus: tuple[str, ...],
    as_json: bool,
    begun: Begun | None,
    since: tuple[float, float] | None = None,
) -> None:
    """``begun``: by __main__.py, if it is. ``since``: when it began, if that was before anything here."""
    bad: ImageError | None = None
    pids: list[int] = []
    try:
        with Image.open_damaged(directory) as opened:
            if opened.problems and not _is_pinned(opened):
                raise ImageError(opened.problems[0], opened.problems)
            pids = [process.pid for process in opened.inventory.processes]
    except ImageError as error:
        bad = error
    if begun is None:
        if bad is not None:
            refuse("restore", bad, as_json, ExitStatus.FAILED)
        reach.ensure(without=reach.FOR_ONE_COMMAND)
        try:
            begun = Begun(str(directory), lazy, ",".join(gpus))
        except Occupied as error:
            raise RestoreFailed(
                f"Another restore brings memory from {image} at this moment ('phos-gpu status' shows it). Wait for it; "
                "several processes of one image at once are had from a pool."
            ) from error
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise RestoreFailed(_not_started(error)) from error
    try:
        _finish(begun, image, directory, lazy, as_json, bad, pids, since or (begun.began, begun.began_at))
    finally:
        begun.tidy()


def _not_started(error: OSError) -> str:
    """What to say of a CRIU that could not be started, and what to do about it, if that is known."""
    place = f"{error.filename}: " if error.filename else ""
    said = f"CRIU cannot be started: {place}{error.strerror}."
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return f"{said} There are too many processes, or there is too little memory."
    if error.filename == native.launcher("criu") and error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
        return f"{said} Run install.sh again."
    return said


def _finish(
    begun: Begun,
    image: str,
    directory: Path,
    lazy: bool,
    as_json: bool,
    bad: ImageError | None,
    pids: list[int],
    since: tuple[float, float],
) -> None:
    """Wait for what CRIU does, and say what has become of it. ``bad``: what is wrong with the image, if anything is."""
    began, began_at = since
    pages: LazyPages | None = None
    with ExitStack() as stack:
        stack.callback(begun.close)
        if lazy:
            pages = stack.enter_context(LazyPages(begun, lambda: _end_restored(directory, begun.began_at)))
        stack.enter_context(ImageProgress(directory, restore=True, quiet=as_json))
        status = begun.wait()
        if begun.interrupted:
            _interrupted(begun, status, image, directory)
        if status != 0 and bad is not None:
            refuse("restore", bad, as_json, ExitStatus.FAILED)
        if status != 0:
            reach.ensure(without=reach.FOR_ONE_COMMAND)
            said = errors(status, begun.said(), Path(begun.work, RESTORE_LOG))
            log = named_log(begun.log(RESTORE_LOG))
            why = f"{pages.error}\n" if pages is not None and pages.error and HUNG_UP not in pages.error else ""
            if NO_TERMINAL in said:
                why += "Its processes have a terminal open: run this command in one, with which they go on.\n"
            why += _of_files(said, directory)
            raise RestoreFailed(
                f"The image in {image} could not be restored; nothing of it was left running.\n{why}{said}{log}"
            )
    if begun.interrupted:
        _interrupted(begun, status, image, directory)
    if pages is not None and pages.error:
        left = ", ".join(str(pid) for pid in pids if procfs.is_alive(pid))
        became = f"Processes {left} cannot be relied upon: end them." if left else "What was restored has been ended."
        raise RestoreFailed(f"{pages.error} {became}\nIts log: {begun.log(PAGES_LOG)}")
    seconds = time.perf_counter() - began
    answer: dict[str, Any] = {"pids": pids, "image": image, "seconds": round(seconds, 4)}
    jobs: list[wire_pb2.Status.Job] = []
    if lazy:
        with suppress(DaemonUnavailable):  # phosd has ended since
            jobs = _jobs(directory, begun.began_at)
        answer |= _lazily(jobs[-1] if jobs else wire_pb2.Status.Job(), began_at)
    if as_json:
        tell(json.dumps(answer))
        return
    tell(f"Restored process {', '.join(map(str, pids))} from {printable(image)} ({seconds:.2f} s).")
    if lazy:
        _show(answer, jobs)


def _of_files(said: str, directory: Path) -> str:
    """What to do about a file whose size is another one than at the dump, if CRIU has said that of one."""
    size = _SIZE.search(said)
    if size is None:
        return ""
    if _MAPPED.search(said):
        return (
            "A file that they have mapped, a library mostly, is another one than at the dump: an update of its "
            "package, or of PhOS, has replaced it. Put the former one back.\n"
        )
    if int(size[2]) <= int(size[3]) or os.environ.get(GROWN) == "cut" or f"/{size[1]}" not in _written(directory):
        return ""
    return (
        f"A file that they write to has grown since the dump. With {GROWN}=cut in this command's environment it gets "
        "the length that it had, and what came since is kept beside it.\n"
    )


def _written(directory: Path) -> Collection[str]:
    """The files that the processes of an image only write to."""
    from phos.images.criu_open_files import written_files  # here, because other restores need it not

    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return written_files(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ImageError):
        return ()


def _interrupted(begun: Begun, status: int, image: str, directory: Path) -> NoReturn:
    """The launcher has ended what it had begun; what was quicker than the signal is ended here.

    ``status``: the launcher's. If it failed, the processes of phosd's latest job may be somebody else's.
    """
    if status == 0:
        with suppress(DaemonUnavailable):
            _end_restored(directory, begun.began_at)
    raise Interrupted(begun.interrupted, f"Interrupted: nothing of {image} was left running.")


def _end_restored(directory: Path, since: float) -> None:
    """End the processes of the restore that began after ``since``: those with CUDA, and what is above and below them.

    Raises:
        DaemonUnavailable: nobody says which they are.
    """
    import psutil  # here, because other restores need it not, and would wait for it

    ids = {path.name for path in directory.glob("core-*.img")}
    ended = []
    for pid in [pid for job in _jobs(directory, since)[-1:] for pid in job.pids]:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while (above := process.parent()) is not None and f"core-{above.pid}.img" in ids:
                process = above
            for one in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
                    ended.append(one)
    psutil.wait_procs(ended, END_SECONDS)


def _is_pinned(image: Image) -> bool:
    """Whether phosd has its data in memory: then its files may be gone. phosd itself will see to the rest."""
    with suppress(DaemonUnavailable):
        return any(pinned.image_id == image.record.image_id for pinned in client.status().pinned)
    return False


def _jobs(directory: Path, since: float) -> list[wire_pb2.Status.Job]:
    """phosd's restores from a directory that began after ``since``: after one with a wrong guess there is another.

    The processes of an earlier one run on, and so do those that somebody takes from a pool of the image meanwhile.
    """
    path = client.image_name(directory)
    of_image = [job for job in client.status().jobs if job.kind == "restore" and job.image == path]
    return [job for job in of_image if job.mode != "pool" and job.since >= since]


def _lazily(job: wire_pb2.Status.Job, began_at: float) -> dict[str, Any]:
    """First kernel and last byte in seconds since ``began_at``, and how long calls waited."""
    window = dict(job.window)
    data = [phase.start + phase.seconds for phase in job.phases if phase.name == "GPU data"]
    first = window.get("first_launch_ns", 0)
    return {
        "mode": job.mode,
        "first_kernel": round(first / 1e9 - began_at, 4) if first else None,
        "last_byte": round(job.since + data[-1] - began_at, 4) if data else None,
        "bytes": job.bytes_total,
        "on_demand_bytes": window.get("on_demand_bytes", 0),
        "waits": window.get("waits", 0) + window.get("anything", 0),
        "waited": round(window.get("wait_ns", 0) / 1e9, 4),
    }


def _show(said: dict[str, Any], jobs: list[wire_pb2.Status.Job]) -> None:
    if not said["mode"]:
        return  # nobody knows
    if said["mode"] != "lazy":
        if any(job.state == MISPREDICTED for job in jobs):
            click.echo("A guess was wrong while memory was still coming: it was restored once more, eagerly.")
        else:
            click.echo("It was restored eagerly: the image has chunks of another size than this PhOS makes.")
        return
    first, last = said["first_kernel"], said["last_byte"]
    click.echo(
        f"First kernel after {f'{first:.2f} s' if first is not None else 'all memory was there'}, "
        f"last byte of {size_text(said['bytes'])} after {last:.2f} s; {size_text(said['on_demand_bytes'])} on demand; "
        f"{said['waits']} calls waited, {said['waited']:.3f} s in all."
    )
