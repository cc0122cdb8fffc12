"""PhOS for programs: checkpoints that a program asks for itself, at the moment that suits it.

    import phos

    for step, batch in enumerate(loader):
        if step % 100 == 0:
            phos.checkpoint(f"checkpoints/{step}")
        train(batch)

In a program that ``phos-gpu run`` has not started, it does nothing but warn once. The work is done by libphos.so, which
is in the process already, and by phosd: importing this loads nothing, and asking takes microseconds (docs/sdk.md).
"""

from __future__ import annotations

import os
import sys

# Beside a program there is only this file (lib/phos/sdk); where PhOS itself is installed, its parts are found as well.
if not os.path.isdir(os.path.join(__path__[0], "gpu_engine")):
    __path__ += [
        place
        for place in (os.path.join(entry or ".", "phos") for entry in sys.path)
        if os.path.isdir(os.path.join(place, "gpu_engine"))
    ]

__all__ = ["Busy", "Checkpoint", "checkpoint"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

# include/phos.h.
_OK, _NOT_UNDER, _NO_CUDA, _NO_DAEMON, _BUSY, _INVALID, _UNKNOWN, _TIMEOUT = range(8)
_END_AFTERWARDS = 1
_ASKS_AGAIN = 4  # frontend/sdk.c: wait for checkpoints of this process that others make
_PENDING, _COMMITTED, _FAILED, _RESTORED = range(4)

_WHY = {
    _NOT_UNDER: "this program was not started by 'phos-gpu run'",
    _NO_CUDA: "this process does not use CUDA yet, or was forked after it did",
    _NO_DAEMON: "phosd does not answer ('phosd --ensure' starts it)",
    _BUSY: "a checkpoint of this process is in progress",
    _UNKNOWN: "the request is too long ago",
}

_SLICE_MS = 100
"""How long one call of the library may wait: between calls Python handles signals such as Ctrl-C."""


class Busy(RuntimeError):
    """A checkpoint of this process is in progress, and ``if_busy="error"`` was asked for."""


class Checkpoint:
    """A checkpoint that was asked for. May be used from any thread.

    directory  where the image goes, as it was named.
    skipped    nothing was asked for: not under PhOS, or busy with ``if_busy="skip"``; ``error`` says which.
    """

    def __init__(self, directory: str, library: _Library | None, number: int, error: str | None = None) -> None:
        """Use :func:`checkpoint`."""
        self.directory = directory
        self.skipped = number == 0
        self._library = library
        self._number = number
        self._error = error
        self._state = _PENDING if number else _FAILED
        self._seconds: float | None = None
        self._stall: float | None = None

    def _look(self, timeout_ms: int) -> bool:
        if self._state == _PENDING and self._library is not None:
            code, result = self._library.result(self._number, timeout_ms)
            if code == _UNKNOWN:
                self._state, self._error = _FAILED, f"No result is known: {_WHY[code]}."
            elif code == _OK:
                self._seconds, self._stall = result.seconds, result.stall
                self._error = result.error.decode(errors="replace") or None
                self._state = result.state
        return self._state != _PENDING

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint has ended, for ``timeout`` seconds at most. Returns :attr:`done`; never raises."""
        left = float("inf") if timeout is None else max(0.0, timeout) * 1000  # ms, counted in slices: clocks may jump
        while True:
            part = min(left, _SLICE_MS)
            if self._look(int(part + 0.999)) or left <= part:
                return self._state != _PENDING
            left -= part

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._look(0)

    @property
    def committed(self) -> bool:
        """Whether the image is whole."""
        self._look(0)
        return self._state == _COMMITTED

    @property
    def restored(self) -> bool:
        """Whether this process comes from the image: a checkpoint returns twice, as fork() does."""
        self._look(0)
        return self._state == _RESTORED

    @property
    def error(self) -> str | None:
        """Why there is no image: a sentence. None while it is in progress, and if nothing failed."""
        self._look(0)
        return self._error

    @property
    def seconds(self) -> float | None:
        """Until the image was whole; None unless :attr:`committed`."""
        return self._seconds if self.committed else None

    @property
    def stall(self) -> float | None:
        """For how many seconds the process stood still; None unless :attr:`committed`."""
        return self._stall if self.committed else None

    def __repr__(self) -> str:
        state = ("in progress", "committed", "failed", "restored")[self._state if self.done else _PENDING]
        return f"<phos.Checkpoint {self.directory!r}: {'skipped' if self.skipped else state}>"


def checkpoint(
    directory: str | os.PathLike[str],
    protocol: str | None = "cow",
    leave_running: bool = True,
    if_busy: str = "wait",
) -> Checkpoint:
    """Ask for a checkpoint of this process, its children and their GPU memory; returns at once.

    directory      where the image goes; made if it is missing, and must be empty.
    protocol       "cow": the program computes on while its GPU memory is saved; "stop": it stands still until that is
                   done; None: as PHOS_PROTOCOL or the configuration file of phosd's machine say.
    leave_running  False: the process ends once the image is whole.
    if_busy        while a checkpoint of this process is in progress: "wait" for it, then ask; "skip"; or "error".

    What fails later is told by the :class:`Checkpoint`, and the program runs on as before.

    Raises:
        Busy: as asked for.
        ValueError: an argument has no meaning.
    """
    name = os.fsdecode(directory)
    if if_busy not in ("wait", "skip", "error"):
        raise ValueError(f"if_busy={if_busy!r}: there are 'wait', 'skip' and 'error'.")
    if not name or "\0" in name:
        raise ValueError(f"{name!r} is no directory.")
    if protocol not in (None, "stop", "cow"):
        raise ValueError(f"protocol={protocol!r}: there are 'cow' and 'stop'.")
    library = _library()
    if library is None:
        return _nothing(name, _NOT_UNDER)
    flags = (0 if leave_running else _END_AFTERWARDS) | (_ASKS_AGAIN if if_busy == "wait" else 0)
    while True:
        code, number = library.request(name, protocol, flags)
        if code == _OK:
            return Checkpoint(name, library, number)
        if code == _INVALID:
            raise ValueError(f"{name!r} is no path that an image could have.")
        if code != _BUSY:
            return _nothing(name, code)
        if if_busy == "error":
            raise Busy(f"{_WHY[_BUSY]}; wait for it, or ask with if_busy='wait' or 'skip'.".capitalize())
        if if_busy == "skip":
            return Checkpoint(name, None, 0, f"Skipped: {_WHY[_BUSY]}.")
        library.result(number, _SLICE_MS)


_warned: set[int] = set()
"""Reasons for doing nothing that were given already. Two threads may both give one."""


def _nothing(directory: str, code: int) -> Checkpoint:
    if code not in _warned:
        import warnings

        _warned.add(code)
        warnings.warn(f"phos.checkpoint does nothing: {_WHY[code]}.", RuntimeWarning, stacklevel=3, source=None)
    return Checkpoint(directory, None, 0, f"Nothing was done: {_WHY[code]}.")


class _Library:
    """The two functions of libphos.so."""

    def __init__(self) -> None:
        """Raises AttributeError if the process has no libphos.so."""
        import ctypes

        class Result(ctypes.Structure):
            _fields_ = (
                ("size", ctypes.c_uint32),
                ("state", ctypes.c_uint32),
                ("seconds", ctypes.c_double),
                ("stall", ctypes.c_double),
                ("error", ctypes.c_char * 1024),
            )

        self._ctypes = ctypes
        self._result_type = Result
        process = ctypes.CDLL(None)  # whatever is loaded; the library is preloaded
        self._request = process.phos_checkpoint_request
        self._request.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)]
        self._result = process.phos_checkpoint_result
        self._result.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.POINTER(Result)]

    def request(self, directory: str, protocol: str | None, flags: int) -> tuple[int, int]:
        """phos_checkpoint_request: (code, number of the request made or in progress)."""
        number = self._ctypes.c_uint64()
        words = None if protocol is None else protocol.encode()
        code: int = self._request(os.fsencode(directory), words, flags, self._ctypes.byref(number))
        return code, number.value

    def result(self, number: int, timeout_ms: int) -> tuple[int, _Result]:
        """phos_checkpoint_result: (code, result)."""
        found: _Result = self._result_type()  # type: ignore[assignment]
        found.size = self._ctypes.sizeof(found)
        code: int = self._result(number, timeout_ms, self._ctypes.byref(found))
        return code, found


if TYPE_CHECKING:

    class _Result(ctypes.Structure):
        size: int
        state: int
        seconds: float
        stall: float
        error: bytes


_loaded: _Library | None = None
"""Set once; two threads may both make one, and either will do."""


def _library() -> _Library | None:
    global _loaded
    if _loaded is None:
        try:
            _loaded = _Library()
        except (AttributeError, ImportError, OSError):
            return None
    return _loaded
