"""Past the frontend and through it again, in a running program: bench/programs/bypass.py."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, Program, built

PROGRAMS = Path(__file__).resolve().parents[2] / "bench" / "programs"

PROGRAM = f"""
    sys.path.insert(0, {str(PROGRAMS)!r})
    from bypass import Bypass
    start()
    stream = ok(cu.cuStreamCreate(0))
    ok(cu.cuStreamSynchronize(stream))
    bypass = Bypass()
    for past in (True, False):
        assert bypass.set(past) == len(bypass.pointers) > 100
        say("READY")
        heard()
        ok(cu.cuStreamSynchronize(stream))
        say("DONE")
"""


@built
def test_a_call_past_the_frontend_does_not_wait_at_its_gate() -> None:
    """And one that goes through it again does, until the gate opens."""
    with FakePhosd() as phosd:
        program = Program(phosd, PROGRAM)
        try:
            session = phosd.arrival()
            for past in (True, False):
                assert program.line() == "READY"
                assert not phosd.quiesce(session).error
                program.tell()
                if past:
                    assert program.line() == "DONE"
                else:
                    with pytest.raises(queue.Empty):
                        program.line(0.3)
                assert not phosd.open(session).error
                if not past:
                    assert program.line() == "DONE"
            program.finish()
        finally:
            program.kill()
