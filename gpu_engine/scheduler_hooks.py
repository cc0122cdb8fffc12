"""The kernel's hooks for performance events in its scheduler, switched on before CRIU needs them.

CRIU stops a task at the end of its own code by a hardware breakpoint (ptrace_set_breakpoint() in compel), which is a
performance event of that task. Before the first event of any task the kernel patches its scheduler, and waits until
every processor has come past it (account_event() in kernel/events/core.c: static_branch_enable(), synchronize_rcu()):
10 to 50 ms, in which all of CRIU's tasks stand still. A second after the last event has gone it switches them off. So
phosd has one, which counts nothing, while CRIU is at work. CRIU's own stays with its task: it is a program's first
checkpoint, and its restore, that would wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import threading

log = logging.getLogger(__name__)

_CALL = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
"""perf_event_open(2), which libc has no function for."""

_SOFTWARE, _DUMMY = 1, 9  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY
_DISABLED, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 0, 1 << 5, 1 << 6  # for which nobody needs a privilege
_CLOSE_ON_EXEC = 8

_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
"""struct perf_event_attr of linux/perf_event.h, as it was at first: type, size, config, ..., flags, ..."""

_libc = ctypes.CDLL(None, use_errno=True)


class SchedulerHooks:
    """They are on from soon after this is made until :meth:`close`, if the kernel lets us."""

    def __init__(self) -> None:
        """Waits for nothing."""
        self._event = -1
        self._opening: threading.Thread | None = threading.Thread(target=self._open, daemon=True, name="perf-event")
        try:
            self._opening.start()
        except RuntimeError:  # there can be no more threads; CRIU does it, then
            self._opening = None

    def close(self) -> None:
        """CRIU has done its part, or failed."""
        if self._opening is not None:
            self._opening.join()
            self._opening = None
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def _open(self) -> None:
        if _CALL is None:
            return
        flags = _DISABLED | _EXCLUDE_KERNEL | _EXCLUDE_HV
        attributes = ctypes.create_string_buffer(
            _ATTRIBUTES.pack(_SOFTWARE, _ATTRIBUTES.size, _DUMMY, 0, 0, 0, flags, 0, 0, 0)
        )
        # Of our first thread, which does not end before us, on any processor, in no group.
        self._event = _libc.syscall(_CALL, attributes, os.getpid(), -1, -1, _CLOSE_ON_EXEC)
        if self._event < 0:
            log.debug("No performance event: %s", os.strerror(ctypes.get_errno()))
