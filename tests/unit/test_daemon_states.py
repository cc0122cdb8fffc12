"""The life of a session: every change of state, and any order of events."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phos.gen import wire_pb2
from phos.gpu_engine.daemon.states import _NEXT, SessionState, StateMachine
from phos.gpu_engine.errors import CheckpointFailed, ProtocolError
from tests.unit.session_fake import NUMBER, Frontend, MiB, block, memory_map


def test_every_change_of_state_is_legal_or_refused() -> None:
    for before in SessionState:
        for after in SessionState:
            machine = StateMachine(before)
            if after in _NEXT[before]:
                machine.to(after)
                assert machine.state is after
            else:
                with pytest.raises(ProtocolError, match=f"from {before.value} to {after.value}"):
                    machine.to(after)
                assert machine.state is before


def test_the_end_is_final() -> None:
    machine = StateMachine(SessionState.RUNNING)
    waiting = threading.Thread(target=machine.wait_for, args=(SessionState.DETACHED,), kwargs={"timeout": 30})
    waiting.start()
    machine.end()
    waiting.join(5)
    assert not waiting.is_alive()
    machine.adopt(SessionState.RETURNING)
    assert machine.state is SessionState.ENDED


class SessionLife(RuleBasedStateMachine):
    """Any order of what phosd asks and what a frontend does: the session stays in step with it and loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend: Frontend
        self.gate = "open"
        self.blocks: set[int] = set()
        self.next = 1

    @initialize()
    def start(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.frontend = Frontend(Path(self.folder.name))
        self.frontend.connect()
        self.null = os.open(os.devnull, os.O_RDONLY)

    @property
    def state(self) -> SessionState:
        return self.frontend.session.machine.state

    @precondition(lambda self: self.gate == "open")
    @rule()
    def allocate(self) -> None:
        self.frontend.send((self.null,), block_added=block(self.next))
        self.blocks.add(self.next)
        self.next += 1
        self.frontend.settle()

    @precondition(lambda self: self.gate == "open" and self.blocks)
    @rule()
    def free(self) -> None:
        self.frontend.send(block_removed=wire_pb2.BlockRemoved(block=self.blocks.pop()))
        self.frontend.settle()

    @precondition(lambda self: self.gate == "open")
    @rule(refuse=st.booleans())
    def quiesce(self, refuse: bool) -> None:
        done = wire_pb2.QuiesceDone(error="a thread did not leave" if refuse else "")
        thread = self.frontend.in_background("quiesce", quiesce_done=done)
        try:
            self.frontend.session.quiesce(1.0, 1.0)
            assert not refuse
            self.gate = "quiesced"
        except CheckpointFailed:
            assert refuse
        thread.join()

    @precondition(lambda self: self.gate == "quiesced")
    @rule()
    def open(self) -> None:
        thread = self.frontend.in_background("open", done=wire_pb2.Done())
        self.frontend.session.open()
        thread.join()
        self.gate = "open"

    @precondition(lambda self: self.gate == "quiesced")
    @rule(refuse=st.booleans())
    def detach(self, refuse: bool) -> None:
        memory = memory_map(blocks=[wire_pb2.MemoryMap.Block(block=n, size=2 * MiB) for n in sorted(self.blocks)])
        done = wire_pb2.DetachDone(error="no memory for the map" if refuse else "")

        def serve() -> None:
            self.frontend.answer("detach", detach_done=done, descriptors=(memory,))
            if not refuse:
                self.frontend.close()  # which phosd waits for

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            detached = self.frontend.session.detach(reduce_stack=True, huge_pages=True, copy_threads=True)
            assert {b.number for b in detached.blocks} == self.blocks
            self.gate = "detached"
        except CheckpointFailed:
            assert refuse
        thread.join()
        os.close(memory)

    @precondition(lambda self: self.gate == "detached")
    @rule()
    def attach(self) -> None:
        session = self.frontend.session
        session.allow_attach()
        session.machine.to(SessionState.ATTACHING)
        self.frontend.connect(wire_pb2.DETACHED)

        def serve() -> None:
            if self.blocks:
                self.frontend.answer("attach_blocks")
            self.frontend.answer("attach", attach_done=wire_pb2.AttachDone())
            self.frontend.answer("open", done=wire_pb2.Done())

        thread = threading.Thread(target=serve)
        thread.start()
        session.attach()
        thread.join()
        session.machine.to(SessionState.RUNNING)
        self.gate = "open"

    @precondition(lambda self: self.gate in ("open", "quiesced"))
    @rule()
    def reconnect(self) -> None:
        """phosd's server adopts what the frontend says when it comes back."""
        self.frontend.close()
        self.frontend.connect(blocks=len(self.blocks))
        self.frontend.session.machine.adopt(SessionState.RUNNING)
        for number in self.blocks:
            self.frontend.send((self.null,), block_added=block(number))
        self.frontend.settle()
        self.gate = "open"

    @invariant()
    def in_step(self) -> None:
        if not hasattr(self, "frontend"):
            return
        expected = {"open": SessionState.RUNNING, "quiesced": SessionState.QUIESCED, "detached": SessionState.DETACHED}
        assert self.state is expected[self.gate]
        assert {b.key[1] for b in self.frontend.session.own_blocks()} == self.blocks
        holds = list(self.frontend.session._holds._folder.iterdir())
        assert bool(holds) == (self.gate == "detached")

    def teardown(self) -> None:
        if hasattr(self, "frontend"):
            self.frontend.close()
            self.frontend.broker.drop_session(NUMBER)
            os.close(self.null)
            self.folder.cleanup()


TestSessionLife = SessionLife.TestCase
TestSessionLife.settings = settings(max_examples=200, stateful_step_count=25)
