"""Checkpoints that an application asks for itself (frontend/sdk.c).

The process that runs CRIU must not be a child of what it dumps, and a user's process may not do what CRIU does: phosd
starts ``phos-gpu checkpoint`` on the application's behalf, in the directory that the application has opened. A result
is remembered until its process ends, because the connection of the process ends with every checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import psutil

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.custody import custody
from phos.gpu_engine.daemon.jobs import SETTLED
from phos.gpu_engine.daemon.paths import custody_folder
from phos.gpu_engine.daemon.permissions import may_write, refuse_others, tree_of
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.errors import NO_THREAD, CheckpointFailed, NotPermitted, PhosError, Unsupported
from phos.gpu_engine.installation import launcher
from phos.images.files import describe_path
from phos.images.formats import COMMIT_FILE

log = logging.getLogger(__name__)

REMEMBERED = 16
"""Results kept of one process; it has one request at a time."""

POLL_SECONDS = 0.02
LOOK_SECONDS = 0.1
"""Between looks through all processes."""


class Requests:
    """Takes requests of frontends; each is worked on by a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting = limits.PerUser("checkpoints under way", limits.REQUESTS)
        self._lock = threading.Lock()  # guards _of
        self._of: WeakKeyDictionary[Session, dict[int, wire_pb2.CheckpointResult | None]] = WeakKeyDictionary()

    def take(
        self, session: Session, peer: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]
    ) -> bool:
        """One packet of a frontend; False if it is something else, and then the descriptors stay the caller's."""
        if envelope.WhichOneof("body") != "checkpoint_request":
            return False
        request = envelope.checkpoint_request
        directory = descriptors[0] if len(descriptors) == 1 else -1
        wire.close_all(descriptors[1:] if directory >= 0 else descriptors)
        with self._lock:
            known = self._of.setdefault(session, {})
            is_new = request.number not in known
            result = known.get(request.number)
            if is_new:
                known[request.number] = None
                for old in sorted(known)[:-REMEMBERED]:
                    del known[old]
        if is_new:
            try:
                self._begin(session, peer, request, directory)
            except PhosError as error:
                self._answer(session, wire_pb2.CheckpointResult(number=request.number, error=str(error)))
                if directory >= 0:
                    os.close(directory)
            return True
        if directory >= 0:
            os.close(directory)
        if result is not None:  # said before, over a connection that has ended
            session.tell(checkpoint_result=result)
        return True

    def _begin(
        self, session: Session, peer: wire.Connection, request: wire_pb2.CheckpointRequest, directory: int
    ) -> None:
        """
        Raises:
            PhosError: the user has too many, or there can be no thread; the directory is still the caller's.
        """
        self._waiting.take(peer.uid)
        try:
            threading.Thread(
                target=self._serve, args=(session, peer, request, directory), daemon=True, name="request"
            ).start()
        except RuntimeError as error:
            self._waiting.give_back(peer.uid)
            raise CheckpointFailed(NO_THREAD) from error

    def _serve(
        self, session: Session, peer: wire.Connection, request: wire_pb2.CheckpointRequest, directory: int
    ) -> None:
        result = wire_pb2.CheckpointResult(number=request.number)
        try:
            self._checkpoint(session, peer, request, directory, result)
        except (PhosError, OSError, psutil.Error) as error:
            result.error = wire.sentence(error)
            log.error("Process %d asked for a checkpoint: %s", session.pid, error)
        except Exception as error:
            result.error = wire.sentence(f"The checkpoint failed in an unforeseen way ({error!r}).")
            log.exception("Process %d asked for a checkpoint", session.pid)
        finally:
            if directory >= 0:
                os.close(directory)
            self._waiting.give_back(peer.uid)
        self._answer(session, result)

    def _answer(self, session: Session, result: wire_pb2.CheckpointResult) -> None:
        with self._lock:
            self._of.setdefault(session, {})[result.number] = result
        session.tell(checkpoint_result=result)

    def _checkpoint(
        self,
        session: Session,
        peer: wire.Connection,
        request: wire_pb2.CheckpointRequest,
        directory: int,
        result: wire_pb2.CheckpointResult,
    ) -> None:
        if directory < 0:
            raise CheckpointFailed(
                "The image directory is gone, or is root's, because phosd was killed while it wrote there."
            )
        if request.asked_before:  # an earlier phosd was, and has ended since
            while _at_work(session.pid, directory):
                time.sleep(LOOK_SECONDS)
            names = os.listdir(directory)
            if COMMIT_FILE in names:
                return
            if names:
                raise CheckpointFailed(
                    "phosd was restarted while the checkpoint was under way: there is no whole image."
                )
        self._refuse(session.pid, peer, directory)
        while request.wait and self._registry.claims.has(tree_of(session.pid)):
            time.sleep(POLL_SECONDS)
        if os.fstat(directory).st_nlink == 0:
            path = describe_path(directory).removesuffix(" (deleted)")
            raise CheckpointFailed(f"The image directory {path} has been removed since it was asked for.")
        with custody(directory, peer.uid, custody_folder(self._registry.path)) as image:
            try:
                said = self._run(session.pid, request, image, by_descriptor=peer.uid != 0)
            finally:
                # A command that was killed leaves phosd's own part to be undone.
                while self._registry.jobs.state(image, "dump", 0).state not in SETTLED:
                    time.sleep(POLL_SECONDS)
        result.seconds = said.get("seconds") or 0.0
        result.stall = said.get("stall") or 0.0
        result.warnings.extend(wire.sentence(warning, wire.WARNING_LIMIT) for warning in said.get("warnings", [])[:50])

    @staticmethod
    def _refuse(pid: int, peer: wire.Connection, directory: int) -> None:
        """What a user may not do through phosd, which runs as root.

        Raises:
            PhosError: the sentence that the application gets.
        """
        if os.geteuid() != 0:
            raise Unsupported("phosd does not run as root, and CRIU needs that: start phosd as root.")
        if not may_write(directory, peer.uid, peer.gid):
            raise NotPermitted(f"User {peer.uid} may not write to {describe_path(directory)}.")
        if peer.uid != 0:
            refuse_others(pid, peer.uid)
            if procfs.apart(pid):
                raise Unsupported(
                    f"Process {pid} came from a pool: only root can checkpoint it ('phos-gpu checkpoint')."
                )

    def _run(
        self, pid: int, request: wire_pb2.CheckpointRequest, directory: int, *, by_descriptor: bool
    ) -> dict[str, Any]:
        """Run ``phos-gpu checkpoint``. Returns what it printed.

        ``by_descriptor``: the directory's path must not be relied on, because its owner may let it lead elsewhere.

        Raises:
            CheckpointFailed: with what it said.
        """
        command = [str(launcher("phos-gpu")), "checkpoint", "--json"]
        command += [] if request.end else ["--leave-running"]
        command += ["--protocol", request.protocol] if request.protocol else []
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        environment |= {"PHOS_SOCKET": str(self._registry.path), "PYTHONSAFEPATH": "1"}
        options = {"POOL": request.cow.pool, "VALIDATE": request.cow.validate, "PRIORITISE": request.cow.prioritise}
        names = {"POOL": "PHOS_COW_POOL", "VALIDATE": "PHOS_VALIDATE", "PRIORITISE": "PHOS_PRIORITISE"}
        environment |= {names[option]: value for option, value in options.items() if value}
        # CRIU opens what it writes to by the name that it is given, so that has to be the descriptor's as well.
        image = f"/proc/{os.getpid()}/fd/{directory}" if by_descriptor else "."
        done = subprocess.run(
            [*command, str(pid), image],
            cwd=f"/proc/self/fd/{directory}",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            said = done.stderr.strip().removeprefix("phos-gpu checkpoint: ")
            said = _named(said, image, describe_path(directory))
            raise CheckpointFailed(said or f"'phos-gpu checkpoint' ended with status {done.returncode}.")
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed


def _at_work(pid: int, directory: int) -> bool:
    """Whether the command that an earlier phosd started still is: it outlives it, and makes the image with the next."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            if "checkpoint" not in words or str(pid) not in words or process.uids().effective != os.geteuid():
                continue
            if os.path.samestat(os.stat(f"/proc/{process.pid}/cwd"), os.fstat(directory)):
                return True
    return False


def _named(said: str, image: str, path: str) -> str:
    """What a command said that was given an image by another name, for somebody who knows the directory by its path."""
    if image != ".":
        return said.replace(image, path)
    said = said.replace("CRIU's log: ", f"CRIU's log: {path}/")
    return re.sub(r"(?<!\S)\.(?![^\s,:])", lambda _: path, said)  # a sentence's own end follows a word
