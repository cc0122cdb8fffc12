"""What a signal does to the program that a command has started."""

from __future__ import annotations

import os
import signal

from phos.cli.launched import Launched
from phos.gpu_engine.interruption import Interruption
from tests.unit.waiting import eventually

INSIDE = "trap 'echo undone; exit 5' TERM; echo began; while :; do sleep 0.1; done"


def test_a_signal_reaches_what_nsenter_starts() -> None:
    """nsenter itself would end by it, and leave CRIU to nobody."""
    launched = Launched()
    launched.start(["sh", "-c", 'sh -c "$INSIDE" & wait $!'], {"INSIDE": INSIDE}, entered=True)
    eventually(lambda: "began" in launched.said(), "its child")
    os.kill(os.getpid(), signal.SIGTERM)
    assert launched.wait() == 5
    launched.close()
    assert launched.said().split() == ["began", "undone"]
    assert launched.interrupted == signal.SIGTERM


def test_a_signal_that_comes_late_does_what_it_is_to_do_then() -> None:
    launched, late = Launched(), []
    launched.start(["true"], {})
    assert launched.wait() == 0
    launched.when_late = lambda: late.append("late")
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGINT)
    launched.close()
    assert late == ["late"]
    assert launched.interrupted == signal.SIGHUP


def test_an_interruption_is_heeded_until_it_is_too_late() -> None:
    done: list[str] = []
    early, late = Interruption(), Interruption()
    assert early.ask()
    assert early.ask()
    early.on_asked(lambda: done.append("early"))
    late.on_asked(lambda: done.append("late"))
    late.settle()
    assert not late.ask()
    assert early.asked
    assert not late.asked
    assert done == ["early"]
