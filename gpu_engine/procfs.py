"""What the kernel says of a process: /proc/PID/stat, read in one place (proc_pid_stat(5)), and its program."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Positions after the program's name, which may itself hold blanks and parentheses: field 3 of the manual is number 0.
_STATE = 0
_FLAGS = 6
_THREADS = 17
_START_TIME = 19
_START_CODE, _END_CODE, _START_STACK = 23, 24, 25
_ENV_END = 48

_PF_EXITING = 0x00000004
_PF_KTHREAD = 0x00200000

EXEC_SECONDS = 1.0
"""How long the kernel may take to give a program its environment: it reads it and its loader from a disk first."""

_WAIT4 = 61  # x86-64
_PID_LIMIT = 1 << 22

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), 96 bytes


def _fields(pid: int) -> list[str]:
    """The fields after the program's name; none when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # also ESRCH: it ended between opening and reading
        return []
    return stat.rpartition(")")[2].split()


def state(pid: int) -> str:
    """One letter (R, S, D, T, t, Z, X, ...); empty when there is no such process."""
    fields = _fields(pid)
    return fields[_STATE] if fields else ""


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie does not count, unless it is only the main thread that has ended."""
    fields = _fields(pid)
    return bool(fields) and _lives(fields)


def _lives(fields: Sequence[str]) -> bool:
    return fields[_STATE] != "X" and (fields[_STATE] != "Z" or int(fields[_THREADS]) > 1)


def has_ended(pid: int, pidfd: int = -1) -> bool:
    """Whether a process is known to have ended: not merely that nobody can look, for want of a descriptor.

    ``pidfd``: of this very process, if there is one.
    """
    if pidfd >= 0:
        poll = select.poll()  # not select(): descriptor numbers go far beyond its 1024
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    fields = _fields(pid)
    return bool(fields) and not _lives(fields)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal (T) or by whoever traces it (t)."""
    return state(pid) in ("T", "t")


def _status(status: Path, name: str) -> list[str]:
    """The words of one line of a process's (or thread's) status file; none when there is no such process or line."""
    try:
        for line in status.read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.split()[1:]
    except OSError:
        pass
    return []


def process_of(number: int) -> int:
    """The process that has this pid, or a thread with it, by our numbers; 0 if there is none. A zombie has its pid."""
    words = _status(Path(f"/proc/{number}/status"), "Tgid")
    return int(words[0]) if words else 0


def tracer(pid: int) -> int:
    """Who traces a process, by our number; 0 if nobody does, or there is no such process."""
    words = _status(Path(f"/proc/{pid}/status"), "TracerPid")
    return int(words[0]) if words else 0


def traces(tracer_pid: int, pid: int) -> bool:
    """Whether one process traces a thread of another; False when that has ended."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = _status(task / "status", "TracerPid")
            if words and int(words[0]) == tracer_pid:
                return True
    return False


def is_ending(pid: int) -> bool:
    """Whether a thread of a process ends, or is about to by SIGKILL: that of all of them may take a while.

    False when there is no such process.
    """
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pending = _status(task / "status", "SigPnd")
            if pending and int(pending[0], 16) >> (signal.SIGKILL - 1) & 1:
                return True
            fields = _fields(int(task.name))  # the thread's own
            if len(fields) > _FLAGS and int(fields[_FLAGS]) & _PF_EXITING:
                return True
    return False


def ignores(pid: int, signal: int) -> bool:
    """Whether a process has the kernel drop a signal: it will not end by it. False when there is no such process."""
    words = _status(Path(f"/proc/{pid}/status"), "SigIgn")
    return bool(words) and bool(int(words[0], 16) >> (signal - 1) & 1)


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that are in RAM and no file's; 0 when there is no such process."""
    words = _status(Path(f"/proc/{pid}/status"), "RssAnon")
    return int(words[0]) << 10 if words else 0


def is_remains(pid: int) -> bool:
    """Whether a process has ended, and all its threads, and its parent or its tracer has yet to collect it."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return bool(threads) and all(state(int(thread)) in ("Z", "X", "") for thread in threads)


def waited_for(pid: int) -> int:
    """The process that ``pid`` sits in wait4(2) for, by the number that it knows it by; 0 if it does not."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return 0
    if not words or words[0] != str(_WAIT4):
        return 0
    number = int(words[1], 16)
    return number if number <= _PID_LIMIT else 0  # else -1 and the like: for any


def start_time(pid: int) -> int | None:
    """When it started, in clock ticks since boot: with the pid it names one process for ever. None if there is none."""
    fields = _fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else None


def program(pid: int) -> tuple[str, ...]:
    """Where the program of a process lies, which is another place after an execve(); nothing without a process, and the
    same of all to who may not trace it."""
    return tuple(_fields(pid)[_START_CODE : _START_STACK + 1])


def environment(pid: int) -> bytes:
    """What a process's program was started with, as /proc/PID/environ has it; nothing without a process.

    In the middle of an execve(), which closes descriptors before, that file is empty: it is waited for.
    """
    deadline = time.monotonic() + EXEC_SECONDS
    with suppress(OSError):
        while True:
            has_none_yet = _has_none_yet(_fields(pid))  # before it is read: it may get one in between
            found = Path(f"/proc/{pid}/environ").read_bytes()
            if found or not has_none_yet or time.monotonic() > deadline:
                return found
            time.sleep(0.001)
    return b""


def _has_none_yet(fields: Sequence[str]) -> bool:
    if len(fields) <= _ENV_END or fields[_STATE] in "ZX" or int(fields[_FLAGS]) & _PF_KTHREAD:
        return False
    return fields[_ENV_END] == "0"


def resident(pid: int) -> int:
    """Bytes of a process's memory that are in RAM; 0 when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def readable(text: str) -> str:
    """A file name or an argument as protobuf takes it: what was not UTF-8 (lone surrogates here) becomes '?'."""
    return text.encode(errors="replace").decode()


def executable(pid: int) -> str:
    """The path of a process's program, for people; '?' when the link cannot be read."""
    try:
        return readable(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return "?"


def thread_names(pid: int) -> set[str]:
    """What all threads of a process are called; empty when there is no such process, or that cannot be told."""
    names = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                names.add(Path(f"/proc/{pid}/task/{thread}/comm").read_text(errors="replace").rstrip("\n"))
    except OSError:  # no descriptors are left, for example
        return set()
    return names


def file_open_in(pid: int, prefixes: tuple[str, ...]) -> str:
    """A file that a process has open or mapped, with a name that begins so; empty: there is none.

    Raises:
        OSError: it cannot be told, as of a process that has ended.
    """
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if (name := os.readlink(f"/proc/{pid}/fd/{descriptor}")).startswith(prefixes):
                return readable(name)
    return next((readable(name) for name in mapped_files(pid) if name.startswith(prefixes)), "")


class Mapping(NamedTuple):
    """A line of /proc/PID/maps, of a mapping that has a name (proc_pid_maps(5))."""

    permissions: str
    device: int
    inode: int
    name: str

    @property
    def shared_for_writing(self) -> bool:
        """Whether others see what is written there."""
        return self.permissions[1] == "w" and self.permissions[3] == "s"


def mappings(pid: int, beginning: str = "") -> list[Mapping]:
    """What a process has mapped that has a name which begins so.

    Raises:
        OSError: it cannot be told.
    """
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").split("\n"):
        if beginning not in line:  # most have to do with no file
            continue
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(beginning):
            major, _, minor = words[3].partition(":")
            found.append(Mapping(words[1], os.makedev(int(major, 16), int(minor, 16)), int(words[4]), words[5]))
    return found


def mapped_files(pid: int) -> set[str]:
    """The names of the files that a process has mapped.

    Raises:
        OSError: it cannot be told.
    """
    return {mapping.name for mapping in mappings(pid)}


FileId = tuple[int, int]
"""st_dev and st_ino of a file."""


def users_of(files: Set[FileId], *, but: Set[int] = frozenset(), writes: bool = False) -> dict[FileId, int]:
    """For each of these files that any process has open or mapped one that does; ``writes``: to write to it.

    Not this process, nor those of ``but``, nor any that we may not look at.
    """
    found: dict[FileId, int] = {}
    for entry in os.listdir("/proc") if files else ():
        if entry.isdigit() and int(entry) not in but and int(entry) != os.getpid():
            with suppress(OSError):  # it has ended
                for file in _used(int(entry), files - found.keys(), writes):
                    found[file] = int(entry)
    return found


def _used(pid: int, files: Set[FileId], writes: bool) -> Iterator[FileId]:
    for mapping in mappings(pid, "/"):
        if (mapping.device, mapping.inode) in files and (mapping.shared_for_writing or not writes):
            yield mapping.device, mapping.inode
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            status = os.stat(f"/proc/{pid}/fd/{descriptor}")
            if (file := (status.st_dev, status.st_ino)) in files:
                words = _status(Path(f"/proc/{pid}/fdinfo/{descriptor}"), "flags")
                if not writes or (words and int(words[0], 8) & os.O_ACCMODE != os.O_RDONLY):
                    yield file


def pid_namespace(pid: int) -> int:
    """The number of a process's pid namespace; 0 when it cannot be told."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def apart(pid: int) -> bool:
    """Whether a process has a pid namespace of its own, on our own file system: one that came from a pool.

    CRIU dumps such a process only from inside, where it looks as it did before.
    """
    if pid_namespace(pid) in (0, pid_namespace(os.getpid())):
        return False
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False


def _inner(status: Path) -> int:
    """The last number behind NSpid: what the process (or thread) is called in its own pid namespace."""
    words = _status(status, "NSpid")
    return int(words[-1]) if words else 0


def inner_pid(pid: int) -> int:
    """A process's pid in its own pid namespace, which is the one that CRIU restores; ``pid`` if it cannot be told."""
    return _inner(Path(f"/proc/{pid}/status")) or pid


def outer_pid(peer: int, pid: int) -> int:
    """Our number of the process that ``peer`` calls ``pid``; 0 if there is none (any more)."""
    namespace = pid_namespace(peer)
    if not namespace or namespace == pid_namespace(os.getpid()):
        return pid
    for name in os.listdir("/proc"):
        if name.isdigit() and _inner(Path(f"/proc/{name}/status")) == pid and pid_namespace(int(name)) == namespace:
            return int(name)
    return 0


def inner_thread(pid: int, thread: int) -> int:
    """What a thread of ``pid`` is called in that process's own pid namespace. ``thread`` may be that already."""
    inner = _inner(Path(f"/proc/{pid}/task/{thread}/status"))
    return inner or thread


def number_for(peer: int, pid: int, thread: int) -> int:
    """What ``peer`` calls a thread of process ``pid``, which calls it ``thread`` itself; 0 if it has no name for it.

    NSpid has the names of a thread in every pid namespace from ours down to its own; ``peer``'s is as deep as its own
    NSpid is long.
    """
    depth = len(_status(Path(f"/proc/{peer}/status"), "NSpid"))
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    for task in tasks:
        names = _status(Path(f"/proc/{pid}/task/{task}/status"), "NSpid")
        if names and int(names[-1]) == thread:
            return int(names[depth - 1]) if 0 < depth <= len(names) else 0
    return 0


def says_pages() -> bool:
    """Whether the kernel says which pages a process has (PAGEMAP_SCAN, Linux 6.7): tried on one of our own."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[0] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    # struct pm_scan_arg: size, flags, start, end, walk_end, vec, vec_len, max_pages, four masks.
    present = 1 << 3
    argument = struct.pack("12Q", 96, 0, address, address + mmap.PAGESIZE, 0, 0, 0, 0, 0, present, 0, present)
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
    except OSError:
        return False
    return True
