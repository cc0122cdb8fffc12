"""CRIU for phos-gpu's own commands: image directories, dumps, and what a person needs to know of a failure."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from phos.cli.launched import Launched
from phos.cli.restore_first import verbosity
from phos.gpu_engine.errors import NoSuchProcess, Unsupported, UsageError
from phos.gpu_engine.installation import launcher

DUMP_LOG = "dump.log"

_NOISE = re.compile(r"RLIMIT|Warn |Unable to detach from")
"""The last is said of tasks that phosd's refusal has left alone: CRIU had not come to them."""
_NO_RIGHTS = "CRIU needs to have the CAP_SYS_ADMIN"
"""CRIU's words to who has not the rights of root, or root itself in a container."""
_HEAD = re.compile(r"^(\([\d.]+\))?\s*(\d+:)?\s*(Error: (?=phos: ))?")
"""Of a line in CRIU's log: time (from -v3 on), process, and for the plugin's lines a word that they are errors."""


def image_directory(path: Path, *, create: bool) -> Path:
    """The image directory, made if asked: for its owner alone, as what is in it is the memory of processes.

    Raises:
        UsageError: it is missing, not a directory, or (to be written to) not empty, or others may put links into it.
    """
    if create:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(f"{path} is there, and is no directory: name another for the image.") from error
        except OSError as error:
            raise UsageError(f"The image directory {path} cannot be made: {error.strerror}.") from error
        refuse_foreign(path)
        if any(path.iterdir()):
            raise UsageError(f"{path} is not empty. Name a new directory, or remove the image that is in it.")
    elif not os.path.isdir(path):  # Path.is_dir() raises an error if the name is too long
        raise UsageError(f"There is no image directory {path}.")
    return path


def refuse_foreign(directory: Path) -> None:
    """What root writes there, CRIU's files for one, would go wherever a link in it leads.

    Raises:
        UsageError: this is root, and others may write to the directory.
    """
    status = directory.stat()
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid)
    if os.geteuid() == 0 and (status.st_uid or others):
        raise UsageError(
            f"Others than root may write to {directory}, and lead what root writes there to any file: name a directory "
            "that there is not yet, or one of root's alone."
        )


def needs_shell_job(pid: int) -> bool:
    """Whether CRIU must be told --shell-job: a process of the tree has a terminal open, or its session's leader is not
    in the tree.

    Raises:
        NoSuchProcess: there is no such process.
    """
    tree = tree_of(pid)
    try:
        return os.getsid(pid) not in tree or bool(terminals(tree))
    except ProcessLookupError as error:
        raise NoSuchProcess(f"There is no process {pid}.") from error


def tree_of(pid: int) -> set[int]:
    """A process and all below it.

    Raises:
        NoSuchProcess: there is no such process.
    """
    import psutil  # here, because a restore needs it not, and would wait for it

    from phos.gpu_engine.daemon import permissions

    try:
        return set(permissions.tree_of(pid))
    except psutil.NoSuchProcess as error:
        raise NoSuchProcess(f"There is no process {pid}.") from error


def terminals(tree: Collection[int]) -> set[str]:
    """The pseudo terminals that processes have open, but for those whose other end one of them has."""
    opened = set()
    for pid in tree:
        with suppress(OSError):  # it has ended, or is not ours to look at
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    opened.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    if opened & {"/dev/ptmx", "/dev/pts/ptmx"}:
        return set()
    return {name for name in opened if name.startswith("/dev/pts/")}


def run_dump(arguments: list[str], directory: Path, beside: int | None = None) -> tuple[int, str, int]:
    """Run ``criu dump`` with its log in the image directory.

    ``beside``: a process in whose namespaces it is run.

    Returns:
        Its exit status, the errors in its log and from phosd, and the signal that it was interrupted by, or 0.

    Raises:
        UsageError: the environment asks for a log that CRIU does not have. Unsupported: as :func:`errors`.
    """
    try:
        log_level = verbosity()
    except ValueError as error:
        raise UsageError(str(error)) from error
    words = ["dump", *arguments, "--lib", "phos", "-D", str(directory), "-o", DUMP_LOG, log_level]
    command = [str(launcher("criu")), *words]
    if beside is not None:
        command = ["nsenter", "--target", str(beside), "--pid", "--mount", "--", *command]
    dump = Launched()
    dump.start(command, {}, entered=beside is not None)
    try:
        status = dump.wait()
        return status, errors(status, dump.said(), directory / DUMP_LOG), dump.interrupted
    finally:
        dump.close()


def named_log(log: Path | str) -> str:
    """A line that names CRIU's log, if it has written one."""
    return f"\nCRIU's log: {log}" if os.path.exists(log) else ""


def errors(status: int, said: str, log: Path) -> str:
    """What went wrong in a CRIU that ended with ``status``: by its log, and by what it and its launcher wrote.

    Raises:
        Unsupported: the caller has not the rights of root.
    """
    if status != 0 and _NO_RIGHTS in said:
        raise Unsupported(
            "This needs the rights of root, because CRIU does (CAP_SYS_ADMIN). Run it with sudo; in a container, one "
            "that was started with --privileged."
        )
    lines = [line for line in said.splitlines() if line.strip()]
    if status != 0 and log.exists():
        found = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        lines = [_HEAD.sub("", line) for line in found if not _NOISE.search(line)][:8] + lines
    return "\n".join(dict.fromkeys(lines))  # the launcher says again what phosd said to the plugin
