"""Where phosd's socket and the files beside it are."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from phos.gpu_engine.errors import NotPermitted, UsageError

SYSTEM_SOCKET = Path("/run/phos/phosd.sock")
PATH_BYTES = 107
"""Most of a socket's path: struct sockaddr_un has 108, the last of them zero."""

TEMPORARY = Path("/tmp")

FOLDER_MODE = 0o755


def socket_path() -> Path:
    """``PHOS_SOCKET``, or the system's phosd, or (for other users, when root runs none) one's own.

    Raises:
        NotPermitted: one's own place is in somebody else's hands, or nobody but root can look for the system's.
        UsageError: ``PHOS_SOCKET`` is no absolute path.
    """
    named = os.environ.get("PHOS_SOCKET")
    if named:
        if not os.path.isabs(named):
            raise UsageError(f"PHOS_SOCKET={named} is no absolute path: programs stand in several directories.")
        return Path(named)
    if os.geteuid() == 0 or _mode(SYSTEM_SOCKET):
        return SYSTEM_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else _own(TEMPORARY / f"phos-{os.geteuid()}")
    return folder / "phos" / "phosd.sock"


def _mode(socket: Path) -> int:
    """What is there, as ``st_mode`` tells, or 0 for nothing: asked once, as another phosd may just be replacing it.

    Raises:
        NotPermitted: that cannot be seen.
    """
    try:
        return socket.stat().st_mode
    except PermissionError as error:
        raise NotPermitted(
            f"User {os.geteuid()} may not enter the folder {socket.parent} of phosd's socket. Have whoever owns it let "
            f"everybody in (chmod 755 {socket.parent}), or name another place (PHOS_SOCKET)."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return 0


def _own(folder: Path) -> Path:
    """A folder where everybody may make one of that name, and then pose as our phosd.

    Raises:
        NotPermitted: somebody else did, or may write there.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return folder
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotPermitted(
            f"{folder} is no directory that user {os.geteuid()} alone may write to, so phosd is not sought there. Have "
            "it removed, or name another place for phosd's socket (PHOS_SOCKET, XDG_RUNTIME_DIR)."
        )
    return folder


def refuse_unfit(socket: Path) -> None:
    """
    Raises:
        UsageError: no socket can have that path, something else has it, or the keeper's cannot have the one beside it.
        NotPermitted: it cannot be seen whether something has it.
    """
    size = max(len(os.fsencode(path)) for path in (socket, keeper_socket(socket)))
    if size > PATH_BYTES:
        raise UsageError(
            f"The path of phosd's socket, {socket}, is {size - PATH_BYTES} bytes too long: Linux takes {PATH_BYTES} "
            "for that and for the keeper's socket beside it. Name a shorter one (PHOS_SOCKET)."
        )
    mode = _mode(socket)
    if mode and not stat.S_ISSOCK(mode):
        raise UsageError(f"{socket} is no socket, and phosd does not replace it. Remove it, or name another place.")


def make_folder(socket: Path) -> None:
    """The folder of phosd's socket, where everybody finds it, whatever the umask is; those above it alike.

    Raises:
        UsageError: it cannot be made, or is none.
    """
    try:
        for folder in reversed((socket.parent, *socket.parent.parents)):
            if not folder.exists():
                with suppress(FileExistsError):  # somebody else has made it meanwhile
                    folder.mkdir(FOLDER_MODE)
                    folder.chmod(FOLDER_MODE)
        socket.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder {socket.parent} for phosd's socket cannot be made: {error.strerror}. Name another place "
            "(PHOS_SOCKET)."
        ) from error


def hold_folder(socket: Path) -> Path:
    """Holds: links that tell a detached frontend to wait without touching the socket (see holds.py)."""
    return socket.parent / "hold"


def custody_folder(socket: Path) -> Path:
    """Which directories of users are root's at present (see custody.py)."""
    return socket.parent / "custody"


def keeper_socket(socket: Path) -> Path:
    """The keeper's socket beside phosd's."""
    return socket.parent / "keeper.sock"


def lock_file(socket: Path) -> Path:
    """Locked by the one phosd that may serve the folder, from its start to its end."""
    return socket.parent / "phosd.lock"


def log_file(socket: Path) -> Path:
    """phosd's log when it was started on demand."""
    return socket.parent / "phosd.log"
