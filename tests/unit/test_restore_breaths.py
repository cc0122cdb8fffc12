"""Which restores have their copies leave the copy engines to others, and when (gpu_engine/fill_loop.c says why)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.eager import EagerRestore
from phos.gpu_engine.restore.lazy import LazyRestore
from phos.gpu_engine.restore.pool import PooledRestore
from phos.gpu_engine.timeline import Timeline


class Plan:
    """What it was told last."""

    told: bool | None = None

    def breathe(self, wanted: bool) -> None:
        self.told = wanted


def restore_of_two(kind: type[Restore], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, bool | None]]:
    """A restore of two processes, as far as it brings them back; and what its plan had been told while it did."""
    made: Any = kind.__new__(kind)
    made.path, made.state, made.timeline = "image", "loading", Timeline()
    made._lock, made._breathing = threading.Lock(), threading.Lock()
    made._changed = threading.Condition(made._lock)
    made._residues = None
    made._revives, made._plan, made._waiting_for = False, (plan := Plan()), 2
    made._revived, made._computing, made._driver_ready, made._still = set(), set(), set(), set()
    made._gated_pids = {1, 2}
    made._over, made.running = threading.Event(), threading.Event()
    told: dict[int, bool | None] = {}
    made._revive = lambda pid: told.update({pid: plan.told})
    monkeypatch.setattr("phos.gpu_engine.restore.base.inner_pid", lambda pid: pid)
    return made, told


@pytest.mark.parametrize(
    ("kind", "between", "back", "one_computes"),
    [(EagerRestore, True, False, False), (LazyRestore, True, True, True), (PooledRestore, False, False, False)],
)
def test_copies_breathe_from_the_first_until_all_are_back(
    monkeypatch: pytest.MonkeyPatch, kind: type[Restore], between: bool, back: bool, one_computes: bool
) -> None:
    """Eagerly they attach when nothing is copied any more; lazily beside copies; in a pool they are back before."""
    made, told = restore_of_two(kind, monkeypatch)
    plan = made._plan
    made._settle_breathing()
    assert plan.told is False, "nobody is brought back yet"
    made._bring_back_driver_part(1)
    assert (told[1], plan.told) == (between, between), "the other is to come"
    made._bring_back_driver_part(2)
    assert (told[2], plan.told) == (between, back)
    made._computes(1)
    assert plan.told is one_computes
    made._computes(2)
    assert plan.told is False


def test_a_plan_that_comes_late_breathes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = restore_of_two(LazyRestore, monkeypatch)
    plan, made._plan = made._plan, None
    made._bring_back_driver_part(1)
    made._plan = plan
    made._settle_breathing()
    assert plan.told is True
