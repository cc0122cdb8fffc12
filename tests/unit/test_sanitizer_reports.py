"""Which reports of a sanitizer end a run of random programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.windows.builds import RACE_OF_A_LIE, THREADS_LEFT, Sanitizer, Wrong

RACE = "WARNING: ThreadSanitizer: data race (pid=1)\n  #3 sg_copy_run softgpu/copy.c:132\nSUMMARY: data race\n"
LEAK = "WARNING: ThreadSanitizer: thread leak (pid=1)\n  #1 main /t/tests/windows/program.c:491\nSUMMARY: thread leak\n"
TORN = "WARNING: ThreadSanitizer: thread leak (pid=1)\n  Thread T16 (tid=2, finished) created by main thread at:\n"
OTHER = "WARNING: ThreadSanitizer: data race (pid=1)\n  #0 phos_gate_enter frontend/gate.c:1\nSUMMARY: data race\n"
ORDER = "WARNING: ThreadSanitizer: lock-order-inversion (pid=1)\n  #3 sg_copy_run softgpu/copy.c:132\n"


@pytest.mark.parametrize("said", [RACE, LEAK, RACE + LEAK + RACE, LEAK + TORN])
def test_what_is_expected_ends_nothing(tmp_path: Path, said: str) -> None:
    file = tmp_path / "sanitizer.1"
    file.write_text(said)
    Sanitizer("thread", tmp_path).complain(RACE_OF_A_LIE, THREADS_LEFT)
    assert not file.exists()


@pytest.mark.parametrize(
    "said", ["", "==1==ERROR: AddressSanitizer: heap-use-after-free", OTHER, RACE + ORDER, LEAK, TORN]
)
def test_anything_else_does(tmp_path: Path, said: str) -> None:
    (tmp_path / "sanitizer.1").write_text(said)
    with pytest.raises(Wrong, match=r"sanitizer\.1"):
        Sanitizer("thread", tmp_path).complain(RACE_OF_A_LIE)
