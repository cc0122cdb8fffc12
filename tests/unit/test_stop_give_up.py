"""A checkpoint is given up: in which order processes go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from phos.gpu_engine.stop.dump import StopDump


def test_who_was_only_quiesced_goes_on_before_anybody_is_brought_back() -> None:
    """And nobody is brought back later because it does not answer."""
    done: list[str] = []

    def open_gates(but: set[bytes]) -> Callable[[], list[str]]:
        done.append(f"open all but {sorted(but)}")
        return lambda: done.append("opened") or ["one gate is stuck"]  # type: ignore[func-returns-value]

    dump: Any = StopDump.__new__(StopDump)
    dump._cancelled = threading.Event()
    dump._tree = SimpleNamespace(detached={b"a": None}, open_gates=open_gates)
    dump.shared_files = SimpleNamespace(give_up=lambda: done.append("copy no more"))
    dump._copying = SimpleNamespace(join=lambda: done.append("copies end"))
    dump._return_blocks = lambda: done.append("return blocks")
    dump._bring_back = lambda: done.append("bring back") or ""
    dump._withdraw = done.append
    dump._give_up("it failed")
    assert done == [
        "copy no more",
        "open all but [b'a']",
        "copies end",
        "return blocks",
        "bring back",
        "opened",
        "it failed Then: one gate is stuck",
    ]
