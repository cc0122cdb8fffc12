"""What is known of the kernels of one session: told by its frontend and by its image, and told to its frontend."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import kernels, limits
from phos.gpu_engine.daemon.conversation import Conversation
from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.spec.speculator import Speculator
from phos.gpu_engine.spec.table import of_modules

log = logging.getLogger(__name__)

HURRY_SECONDS = 30.0
"""For how long the analysis of a process's kernels goes before others' once it is checkpointed or restored."""

DESCRIBE_SECONDS = 60.0
"""For how long a process that was restored lazily is told of descriptors that have been worked out since."""

LATER_SECONDS = 0.25
"""How often that is looked for."""

DESCRIBE_RESTORED_SECONDS = 0.05
"""How long a process that is restored lazily stands still for access descriptors that are being worked out. Without
one, a launch waits for all that its arguments point to."""


class SessionKernels:
    """The kernels of one session."""

    def __init__(self, session: bytes, conversation: Conversation, speculator: Speculator) -> None:
        self.told = 0  # names of kernels that have come since the process began to tell of them
        self.whole = False  # the image's table names every kernel that the process had asked for: it need not tell
        self._session = session
        self._conversation = conversation
        self._speculator = speculator
        self._of_image = b""  # a table of access descriptors
        self._modules: set[int] = set()
        self._names: set[int] = set()  # hashes of kernels' names: they may be told again
        self._names_bytes = 0
        self._of_moment: frozenset[int] | None = None  # the modules there were when it was last detached
        self._failed = False  # a module could not be taken
        self._incomplete = False  # there were more than are kept
        self._changing = threading.Lock()  # guards _ended; held while the speculator is told something
        self._ended = False

    def loaded(self, pid: int, uid: int, module: wire_pb2.ModuleLoaded, descriptors: list[int]) -> None:
        """The process has loaded a module. The descriptors stay the caller's."""
        if module.module not in self._modules:
            if len(self._modules) >= limits.MODULES:
                self._leave_out(f"more than {limits.MODULES} modules")
                return
            self._modules.add(module.module)
        with self._changing:
            if self._ended:
                return
            try:
                kernels.module_loaded(self._speculator, self._session, pid, uid, module, descriptors)
            except Exception as error:
                # Without its connection the process would make another and tell of it again, without end.
                where = module.path or "in memory"
                first, self._failed = not self._failed, True
                log.warning("A module of process %d (%s) is not analysed: %s", pid, where, error, exc_info=first)
                if module.module:
                    self._speculator.add_lost_module(self._session, module.module)

    def seen(self, names: wire_pb2.KernelsSeen) -> None:
        """Kernels that the process may launch."""
        kept = [name for name in names.kernel if self._keeps(hash((names.module, name)), len(name))]
        with self._changing:
            if not self._ended:
                kept_names = wire_pb2.KernelsSeen(module=names.module, kernel=kept)
                kernels.kernels_seen(self._speculator, self._session, kept_names)
        self.told += len(names.kernel)  # last: who waits for it asks the speculator then

    def end(self) -> None:
        """The process has ended, and is about to be forgotten: what is read after that would be kept for ever."""
        with self._changing:
            self._ended = True

    def _keeps(self, number: int, size: int) -> bool:
        if number in self._names:
            return True
        if self._names_bytes + size > limits.NAMES_BYTES:
            self._leave_out(f"more than {limits.NAMES_BYTES} bytes of kernels' names")
            return False
        self._names.add(number)
        self._names_bytes += size
        return True

    def _leave_out(self, what: str) -> None:
        """What is not kept is not analysed: launches of it are taken by their arguments' layout."""
        if not self._incomplete:
            log.warning("A process has told of %s: the rest is left out.", what)
        self._incomplete = True

    def restored(self, table: bytes, *, whole: bool = False) -> None:
        """What the process's image says of them."""
        self._of_image = table
        self.whole = self.whole or whole

    def hurry(self) -> None:
        """Somebody will soon want to know what they touch."""
        self._speculator.hurry(self._session, HURRY_SECONDS)

    def pending(self) -> bool:
        """Whether some are still being analysed."""
        return self._speculator.pending(self._session)

    def table(self) -> tuple[bytes, bool]:
        """What is known by now of what they touch, nobody being kept waiting for more; and whether that is all."""
        whole = (self.whole or self.told > 0) and not self._incomplete and self._speculator.complete(self._session)
        table = kernels.known_table(self._speculator, self._session, 0.0, self._of_image)
        if self._of_moment is not None and not self._modules <= self._of_moment:
            table = of_modules(table, self._of_moment)
        return table, whole

    def detached(self) -> None:
        """An image is made of the process as it is now.

        What it loads while that is written has no place in its table: the process that is restored may give the same
        number to another module, with a kernel of the same name.
        """
        self._of_moment = frozenset(self._modules)

    def describe(self, timeout: float) -> None:
        """Tell the frontend what they touch, waiting so many seconds for what is being worked out.

        Raises:
            PhosError: the frontend is not connected.
        """
        table = kernels.table_file(self._speculator, self._session, timeout, self._of_image)
        try:
            self._conversation.tell([table], access_table=wire_pb2.AccessTable())
        finally:
            os.close(table)

    def describe_restored(self) -> None:
        """As the image has it (numbers of modules survive a restore), and as it is known here."""
        self.hurry()
        self.describe(0.0 if self._of_image else DESCRIBE_RESTORED_SECONDS)

    def describe_later(self, going: Callable[[], bool]) -> None:
        """What was still being worked out when the process ran on, as it comes, as long as ``going`` says so."""
        deadline = time.monotonic() + DESCRIBE_SECONDS
        told = b""
        more = True
        with suppress(PhosError):  # it has ended, or is about to be dumped
            while more and going() and time.monotonic() < deadline:
                known = kernels.known_table(self._speculator, self._session, LATER_SECONDS, quiet=True)
                more = self.pending()
                if known != told:
                    self.describe(0.0)
                    told = known
