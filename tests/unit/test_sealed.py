"""No process can shorten what phosd has mapped: phosd would die of SIGBUS."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.cow.chunk_table import ChunkTable, WindowTable
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.twins import Twins
from phos.gpu_engine.errors import ProtocolError
from phos.gpu_engine.spec.speculator import Speculator
from tests.unit.session_fake import NUMBER, Frontend, MiB, block, open_descriptors


def refuses(descriptor: int, size: int) -> bool:
    """Whether it cannot get that size."""
    try:
        os.ftruncate(descriptor, size)
    except PermissionError:
        return True
    return False


def test_what_is_shared_during_a_window_keeps_its_size() -> None:
    chunks = ChunkTable(4 * MiB, 50)
    window = WindowTable(3, [(1, 4 * MiB, 0)], [], 16, prioritise=True)
    twins = Twins(NUMBER, Speculator(), SimpleNamespace(loads=False), lambda *_: None)  # type: ignore[arg-type]
    for descriptor in (chunks.descriptor, window.descriptor, twins._descriptor):
        size = os.fstat(descriptor).st_size
        assert refuses(descriptor, 0)
        assert refuses(descriptor, size + 4096)
    chunks.close()
    window.close()
    os.close(twins._descriptor)


def test_memory_that_its_process_could_shorten_is_not_taken(tmp_path: Path) -> None:
    frontend = Frontend(tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frontend.session.connected(wire.Connection(ours), wire_pb2.Hello(session=NUMBER), {})  # type: ignore[arg-type]
    before = open_descriptors()
    loose = os.memfd_create("block", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 2 * MiB)
    short = sealed.make("block", MiB)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 2 * MiB)
    for descriptor in (loose, short, file):
        with pytest.raises(ProtocolError, match="could still shorten its memory"):
            frontend.session.handle(wire_pb2.Envelope(block_added=block(1)), [os.dup(descriptor)])
    assert frontend.session.own_blocks() == []
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, sealed.SEALS)
    frontend.session.handle(wire_pb2.Envelope(block_added=block(1)), [os.dup(loose)])
    assert len(frontend.session.own_blocks()) == 1
    frontend.broker.drop_session(NUMBER)
    for descriptor in (loose, short, file):
        os.close(descriptor)
    assert open_descriptors() == before
    ours.close()
    theirs.close()
