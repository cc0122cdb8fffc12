"""Random programs in windows of concurrent checkpoints; ``python -m tests.windows.windows`` runs any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.windows.builds import Wrong
from tests.windows.windows import Options, workshop


@pytest.mark.timeout(400)
def test_images_are_the_memory_of_t1(tmp_path: Path) -> None:
    """Launches, copies, graphs, allocations and frees in several threads and streams; some processes end meanwhile."""
    with workshop(tmp_path, Options(seed=1, exits=2.0, nap=600)) as made:
        made.run(70)
        met = made.met
    assert met["images committed"] == 70
    for name in ("programs on two GPUs", "shadowed", "waits", "stream_waits", "anything", "exits in the window"):
        assert met[name] > 0, f"{name}: {met}"


@pytest.mark.timeout(300)
def test_wrong_guesses_leave_no_image_and_no_harm(tmp_path: Path) -> None:
    """No kernel is said to write anything. What it wrote too early is found; what it did not is right."""
    with workshop(tmp_path, Options(seed=2, lies=1.0, exits=0.0, per_program=5, bandwidth="40M")) as made:
        made.run(10)  # the program compares its memory at its end
        met = made.met
    assert met["images committed"] + met["images mispredicted"] == 10
    assert met["images mispredicted"] > 3


@pytest.mark.timeout(300)
def test_a_race_in_the_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race detector looks, and what it says ends a run: a counter of all threads has nothing that guards it.

    The libraries are plain ones here, so the detector sees what they copy and not how they synchronise. Without threads
    that copy for the driver: of theirs it would report each address, for minutes.
    """
    monkeypatch.setenv("PHOS_REDUCERS", "stack-limit,huge-pages,residue")
    options = Options(seed=4, sanitize="thread", environment={"PLANT_RACE": "1"}, exits=0.0, per_program=1)
    with workshop(tmp_path, options) as made, pytest.raises(Wrong, match="ThreadSanitizer: data race"):
        made.run(4)
    assert any("operations" in path.read_text() for path in tmp_path.glob("sanitizer.*"))
