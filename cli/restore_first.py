"""``phos-gpu restore``: CRIU is started before anything slow is imported.

Somebody waits for the process, and a tenth of a second of that would be Python's, reading the command line's parts. So
a command line that is understood at once is begun by __main__.py, with this module alone; any other one by restore.py.
An image that is bad then makes CRIU fail, because phosd looks at it first; what is wrong with it restore.py finds
meanwhile, and says.
"""

import fcntl
import os
import signal
import time

from phos.cli.launched import ENDING, Launched
from phos.images import native

COMMIT_FILE = "phos-commit.img"  # images/formats.py; tests/unit/test_cli_restore.py compares
RESTORE_LOG, PAGES_LOG, PAGES_SOCKET = "restore.log", "lazy-pages.log", "lazy-pages.socket"
TERMINALS_FILE = "tty-info.img"
"""CRIU's, in an image of processes that had a terminal open: it gives them that of its standard input."""
VERBOSITY = "2"
"""Errors and warnings. CRIU writes its log line by line while the processes are frozen: at 4 that takes a quarter of
the time for which they are, with the image in memory, and more than half on a disk."""
LEVELS = ("0", "1", "2", "3", "4")


def verbosity() -> str:
    """CRIU's option for how much it logs.

    Raises:
        ValueError: the environment does not say it so that CRIU understands it.
    """
    level = os.environ.get("PHOS_CRIU_VERBOSITY", VERBOSITY)
    if level not in LEVELS:
        raise ValueError(f"PHOS_CRIU_VERBOSITY={level} in the environment is no level of CRIU's log: 0 to 4.")
    return f"-v{level}"


LOCK_SECONDS = 1.0
"""For so long a server that ends may still have the directory."""


class Occupied(OSError):
    """Another lazy restore has the directory."""


def lock(directory: str) -> int:
    """A descriptor with which an image directory is this lazy restore's, as long as anybody has it open.

    The pages come by a socket of one name in that directory: a second server would be in the first one's way.

    Raises:
        Occupied: it is another's.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise Occupied(error.errno, error.strerror, directory) from error
            time.sleep(0.01)
        except OSError:
            return descriptor  # the file system has no locks of directories


TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


def private_folder() -> str:
    """A new folder for CRIU's log and the socket of the pages, where images lie on what is not to be written to.

    tempfile would be slow to import.

    Raises:
        OSError: no place for it can be written to, either.
    """
    refused: OSError | None = None
    for place in (os.environ.get("TMPDIR") or TEMPORARY[0], *TEMPORARY):
        folder = os.path.join(os.path.abspath(place), f"phos-restore-{os.urandom(8).hex()}")
        try:
            os.mkdir(folder, 0o700)
            return folder
        except OSError as error:
            refused = refused or error
    assert refused is not None
    raise refused


class Begun(Launched):
    """CRIU at work on a restore."""

    def __init__(self, directory: str, lazy: bool, gpus: str = "") -> None:
        """Start it; ``lazy``: and ``criu lazy-pages`` at its side, for which its plugin waits. ``gpus``: OLD=NEW,...

        Raises:
            Occupied: another lazy restore has the directory.
            OSError: it cannot be started; ``filename`` is what is in the way, if it is a file.
            ValueError: as :func:`verbosity`.
        """
        super().__init__()
        log_level = verbosity()
        self.began, self.began_at = time.perf_counter(), time.time()
        self.pages = 0
        """The pid of ``criu lazy-pages``, a child that somebody else has to wait for."""
        self._lock = lock(directory) if lazy else -1  # until this process and that one have ended
        self.work = directory
        """Where the logs are, and the socket."""
        self._private = False
        criu, changes = native.launcher("criu"), {"PHOS_RESTORE": os.environ.get("PHOS_RESTORE", "")}
        if gpus:
            changes["PHOS_RESTORE_GPUS"] = gpus
        words = ["--restore-detached", "--shell-job", "--file-locks"]
        # Until there is somebody to end what is started here: a server that is left would keep the directory for ever.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            places = ["-D", directory]
            if not os.access(directory, os.W_OK):
                self.work, self._private = private_folder(), True
                places += ["-W", self.work]
            self._remove(RESTORE_LOG)  # what an earlier restore failed of is not why this one does
            if lazy:
                self._remove(PAGES_LOG)
                self._remove(PAGES_SOCKET)  # of one that was killed
                os.set_inheritable(self._lock, True)
                starter = {"PHOS_LAZY_STARTER": str(os.getpid())}  # without whom it is not to wait for CRIU
                self.pages = self.start_beside([criu, "lazy-pages", *places, "-o", PAGES_LOG, "-v2"], starter)
                os.set_inheritable(self._lock, False)
                changes |= {"PHOS_RESTORE": "lazy", "PHOS_LAZY_PAGES": str(self.pages)}
                words.append("--lazy-pages")
            words += ["--lib", "phos", *places, "-o", RESTORE_LOG, log_level]
            terminal = os.path.exists(f"{directory}/{TERMINALS_FILE}") and os.isatty(0)
            self.start([criu, "restore", *words], changes, terminal=terminal)
        except OSError:
            if self.pages:  # nobody would watch it
                os.kill(self.pages, signal.SIGKILL)
                os.waitpid(self.pages, 0)
            if lazy:  # whoever tries again would take it for another's
                os.close(self._lock)
            self.tidy()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def _remove(self, name: str) -> None:
        """Remove what an earlier restore has left."""
        try:
            os.unlink(os.path.join(self.work, name))
        except FileNotFoundError:
            pass

    def log(self, name: str) -> str:
        """Where the log of that name is, which somebody is told of: it stays."""
        self._private = False
        return os.path.join(self.work, name)

    def tidy(self) -> None:
        """Remove the folder of its own, if it has one; to be called once nobody works there any more."""
        if self._private:
            import shutil  # here, because of those that are restored elsewhere none waits for it

            shutil.rmtree(self.work, ignore_errors=True)


def understand(words: list[str]) -> tuple[str, bool] | None:
    """(image directory, lazy) of a command line that restores an image at this host; None: anything else."""
    if words[:1] != ["restore"]:
        return None
    images = [word for word in words[1:] if word not in ("--lazy", "--json")]
    if len(images) != 1 or images[0].startswith("-") or not os.path.isfile(f"{images[0]}/{COMMIT_FILE}"):
        return None
    return images[0], "--lazy" in words


def begin(words: list[str]) -> Begun | None:
    """Begin what the command line asks for, if that is understood at once."""
    wanted = understand(words)
    if wanted is None:
        return None
    try:
        return Begun(*wanted)
    except (OSError, ValueError):
        return None  # restore.py will meet with it again, and say so
