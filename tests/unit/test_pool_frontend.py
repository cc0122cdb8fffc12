"""What the frontend does for pools: new names for sessions, and holds that are for a process of another namespace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from phos.gen import wire_pb2 as wire
from tests.unit.frontend_fake import FakePhosd, built, process_start, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

HOLDING = """
start()
p = ok(cu.cuMemAlloc(17 << 20))
fill(p, 3 << 20, 7)
say("ready")
heard()
assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
say("same")
"""

EXPORTING = """
start()
p = ok(cu.cuMemAlloc(17 << 20))
handle = ok(cu.cuIpcGetMemHandle(p))
say("ready")
heard()
result = cu.cuIpcOpenMemHandle(handle, 1)
say(int(result[0]))
"""

NOW = bytes(range(16))
SPACE = os.stat("/proc/self/ns/pid").st_ino


class RenamingPhosd(FakePhosd):
    """Gives each session the name NOW when it attaches."""

    def welcome(self, hello: wire.Hello) -> wire.Welcome:
        welcome = super().welcome(hello)
        if hello.state == wire.DETACHED:
            welcome.session.add(old=hello.session, now=NOW)
        return welcome


@pytest.fixture
def phosd() -> Iterator[RenamingPhosd]:
    daemon = RenamingPhosd()
    yield daemon
    daemon.stop()


def test_a_session_has_its_new_name_and_hold_from_then_on(phosd: RenamingPhosd) -> None:
    with program(phosd, HOLDING) as (app, session):
        app.line()
        former = session.number
        phosd.toggle(session)
        phosd.sessions[NOW] = session
        session.number = NOW
        # Detached again, it looks for the hold of its new name: toggle() makes that, and waits until it is gone.
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        time.sleep(0.2)
        assert phosd.arrivals.empty(), "the hold of the new name was not seen"
        assert not phosd.attach(session).error
        assert not phosd.open(session).error
        assert session.hellos[-1].session == NOW != former
        app.tell()
        assert app.line() == "same"
        app.finish()


def test_memory_that_was_exported_under_the_old_name_is_known_as_its_own(phosd: RenamingPhosd) -> None:
    """Opening a process's own handle is refused (error 201), by the driver as by us: not that nobody knows it."""
    with program(phosd, EXPORTING) as (app, session):
        app.line()
        phosd.toggle(session)
        app.tell()
        assert app.line() == "201"
        app.finish()


@pytest.mark.parametrize(
    ("phosd_space", "held_space", "waits"),
    [(SPACE, SPACE, True), (SPACE, SPACE + 1, False), (SPACE + 1, SPACE, True), (0, 0, True)],
    ids=["ours", "another process's", "from another namespace than phosd's", "an older phosd's"],
)
def test_a_hold_holds_only_who_it_is_for(phosd_space: int, held_space: int, waits: bool) -> None:
    with FakePhosd() as phosd, program(phosd, HOLDING) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        link = phosd.folder / "hold" / session.number.hex()
        aside = phosd.folder / "aside"
        spaces = f":{phosd_space}:{held_space}" if phosd_space else ""
        aside.symlink_to(f"{os.getpid()}:{process_start(os.getpid())}{spaces}")
        aside.rename(link)
        if waits:
            time.sleep(0.3)
            assert phosd.arrivals.empty()
            link.unlink()
        eventually(lambda: not phosd.arrivals.empty())
        assert phosd.arrival() is session
        assert not phosd.give(session).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "same"
        app.finish()
