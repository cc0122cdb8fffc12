"""Exceptions of the GPU engine and the exit status each one means at a command line.

Every message is a sentence that a person can act on: what failed, on which process, GPU or file, and what to do.
"""

from __future__ import annotations

from enum import IntEnum

CRIU_FAILED = "CRIU failed; its own log says why (dump.log, or what -o names, or the terminal)."
"""All that phosd knows where it had no part in the failure of a dump."""


INTERRUPTED = "It was interrupted."
"""Why a dump or a restore was ended that somebody asked phosd to end."""


class ExitStatus(IntEnum):
    """Exit statuses of ``phos-gpu`` and ``phosd``; docs/cli.md lists them for users."""

    OK = 0
    BAD_IMAGE = 1
    USAGE = 2
    NO_DAEMON = 3
    NO_PROCESS = 4
    NOT_PERMITTED = 5
    UNSUPPORTED = 6
    FAILED = 7


class PhosError(Exception):
    """Base of every error that PhOS reports to a person."""

    exit_status = ExitStatus.FAILED


class UsageError(PhosError):
    """A command line or an environment variable says something that has no meaning."""

    exit_status = ExitStatus.USAGE


class DaemonUnavailable(PhosError):
    """phosd is not running, could not be started, or went away during a request."""

    exit_status = ExitStatus.NO_DAEMON


class NoSuchProcess(PhosError):
    """The process named does not exist, or holds no CUDA context."""

    exit_status = ExitStatus.NO_PROCESS


class NotPermitted(PhosError):
    """The caller may not do this to that process or image."""

    exit_status = ExitStatus.NOT_PERMITTED


class Unsupported(PhosError):
    """The driver, the kernel, the GPU or CRIU cannot do what was asked."""

    exit_status = ExitStatus.UNSUPPORTED


class ProtocolError(PhosError):
    """A peer sent something that does not fit the control protocol (proto/wire.proto)."""


OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY, of :class:`DriverError`: what failed with it can be tried again."""

PASSING = frozenset({OUT_OF_MEMORY, 304, 999})
"""With CUDA_ERROR_OPERATING_SYSTEM and CUDA_ERROR_UNKNOWN, by which the driver says that there were no descriptors, for
example: such a failure is expected to pass."""


class DriverError(PhosError):
    """A call of the CUDA driver API failed.

    ``code`` is the CUresult as an integer, ``name`` its spelling in cuda.h, ``call`` the entry point.
    """

    def __init__(self, call: str, code: int, name: str, context: str = "") -> None:
        self.call = call
        self.code = code
        self.name = name
        detail = f" {context}" if context else ""
        super().__init__(f"The CUDA driver's {call}{detail} failed with error {code} ({name}).")


NO_THREAD = (
    "phosd can start no new thread: a limit on processes is reached (ulimit -u, the pids limit of a container or of "
    "phosd's unit). Raise it, or end some."
)


class CheckpointFailed(PhosError):
    """A checkpoint was given up; the processes have been brought back to where they were."""


class Mispredicted(CheckpointFailed):
    """A concurrent checkpoint cannot be right: something wrote to memory that no guess named. Stopping the world is."""


class MemoryLost(CheckpointFailed):
    """GPU memory that a process maps is held by nobody any more."""


class AttachRefused(PhosError):
    """A process could not map its memory, and nothing says that it could later."""


class Unresponsive(CheckpointFailed):
    """A process does not answer, and asking it again would not help: it is stopped, or has no time to run."""


class RestoreFailed(PhosError):
    """A restore was given up; nothing of it is left running."""
