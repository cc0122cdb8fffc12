"""The driver's own memcpy() while a process is detached: by several threads, and its own again afterwards."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, Program, built, program
from tests.unit.test_frontend_residue import BODY, RESIDUE, attach, check, detach, driver
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

several_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")


def toggle(app: Program) -> None:
    """The driver's checkpoint and restore, one after the other."""
    driver(app, "checkpoint")
    driver(app, "restore")


def helpers(app: Program) -> int:
    """How many threads of the program help to copy."""
    names = []
    for task in Path(f"/proc/{app.process.pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    assert names
    return names.count("phos-memcpy")


def read_only(pid: int) -> dict[str, bytes]:
    """What a process has of the driver that nobody may write to, by address and protection."""
    found = {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, protection, *_, path = [*line.split(None, 5), ""][:7]
            if "libcuda.so" in line and protection[1] == "-":
                begin, end = (int(x, 16) for x in where.split("-"))
                memory.seek(begin)
                found[f"{where} {protection} {path}"] = memory.read(end - begin)
    return found


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> set[int]:
    """Which words of eight bytes differ."""
    assert one.keys() == other.keys(), "protections have changed"
    return {
        at // 8
        for where, data in one.items()
        if data != other[where]
        for at in range(len(data))
        if data[at] != other[where][at]
    }


@several_cpus
def test_several_threads_copy_what_the_driver_saves_and_restores(phosd: FakePhosd) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        for _ in range(3):
            detach(phosd, session)
            driver(app, "checkpoint")
            eventually(lambda: not helpers(app))  # CRIU would dump them
            driver(app, "restore")
            assert attach(phosd, session).residue_shared == 2 * RESIDUE
            check(app)
        eventually(lambda: not helpers(app))
        app.finish()


def test_the_driver_has_its_own_again_once_attached(phosd: FakePhosd) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        before = read_only(app.process.pid)
        assert before
        for toggled in (True, False):
            detach(phosd, session)
            assert len(differing(before, read_only(app.process.pid))) == 1, "one slot, in pages that stay read-only"
            if toggled:
                toggle(app)
            attach(phosd, session)
            assert not differing(before, read_only(app.process.pid))
            check(app)
        app.finish()


def test_the_driver_copies_by_itself_where_it_is_told_to(phosd: FakePhosd) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        before = read_only(app.process.pid)
        detach(phosd, session)
        toggle(app)
        attach(phosd, session)
        assert phosd.quiesce(session).error == ""
        assert phosd.detach(session, copy_threads=False).error == ""
        assert not differing(before, read_only(app.process.pid))
        toggle(app)
        assert attach(phosd, session).residue_shared == 0
        check(app)
        app.finish()


def test_one_cpu_copies_alone(phosd: FakePhosd) -> None:
    pinned = f"import os\nos.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\n"
    with program(phosd, pinned + BODY) as (app, session):
        assert app.line() == "ready"
        detach(phosd, session)
        toggle(app)
        assert attach(phosd, session).residue_shared == 0
        check(app)
        app.finish()


CHILD = BODY.replace(
    '    if word == "fork":',
    """
    if word == "child":
        import signal
        if not (child := os.fork()):
            signal.pause()
            os._exit(0)
        say(str(child))
    if word == "fork":""",
)


def test_in_a_child_of_a_detached_process_the_driver_has_its_own(phosd: FakePhosd) -> None:
    with program(phosd, CHILD) as (app, session):
        assert app.line() == "ready"
        before = read_only(app.process.pid)
        detach(phosd, session)
        driver(app, "checkpoint")
        app.tell("child")
        child = int(app.line())
        eventually(lambda: not differing(before, read_only(child)))  # it may not have begun
        assert len(differing(before, read_only(app.process.pid))) == 1
        driver(app, "restore")
        attach(phosd, session)
        check(app)
        os.kill(child, signal.SIGKILL)
        app.finish()
