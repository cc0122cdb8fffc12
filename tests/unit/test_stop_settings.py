"""What phosd's environment says of every checkpoint."""

from __future__ import annotations

import itertools

import pytest

from phos.gpu_engine.errors import UsageError
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.stop.tree import try_seconds


def test_settings_without_meaning_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment() == Settings()
    for text in ("soon", "-1", "0", "nan", "1e9"):
        monkeypatch.setenv("PHOS_QUIESCE_SECONDS", text)
        with pytest.raises(UsageError, match="PHOS_QUIESCE_SECONDS"):
            Settings.from_environment()
    monkeypatch.setenv("PHOS_QUIESCE_SECONDS", "2.5")
    monkeypatch.setenv("PHOS_REDUCERS", "none")
    none = Settings(quiesce_timeout=2.5, reduce_stack=False, huge_pages=False, residue=False, copy_threads=False)
    assert Settings.from_environment() == none


@pytest.mark.parametrize("text", ["stack", "stack-limit,hugepages", "none,stack-limit", "stack-limit,"])
def test_unknown_reducers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PHOS_REDUCERS", text)
    names = "stack-limit, huge-pages, residue, copy-threads"
    with pytest.raises(UsageError, match=rf"PHOS_REDUCERS=.*is no reducer.*{names} with"):
        Settings.from_environment()


def test_reducers_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, chosen in (("huge-pages", ["huge-pages"]), (" stack-limit , huge-pages", ["stack-limit", "huge-pages"])):
        monkeypatch.setenv("PHOS_REDUCERS", text)
        assert Settings.from_environment().reducers() == chosen
    for text in ("", "none"):
        monkeypatch.setenv("PHOS_REDUCERS", text)
        assert Settings.from_environment().reducers() == []
    monkeypatch.delenv("PHOS_REDUCERS")
    assert Settings.from_environment().reducers() == ["stack-limit", "huge-pages", "residue", "copy-threads"]


def test_size_of_the_first_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().residue_bytes == 0
    monkeypatch.setenv("PHOS_RESIDUE_BYTES", "256M")
    assert Settings.from_environment().residue_bytes == 256 << 20
    monkeypatch.setenv("PHOS_RESIDUE_BYTES", "much")
    with pytest.raises(UsageError, match="PHOS_RESIDUE_BYTES=much is no size"):
        Settings.from_environment()


@pytest.mark.parametrize("total", [0.1, 0.5, 1.0, 2.0, 60.0, 3600.0])
def test_tries_to_quiesce_grow_and_take_as_long_as_was_chosen(total: float) -> None:
    tries = list(try_seconds(total))
    assert sum(tries) == pytest.approx(total)
    assert tries[0] < 0.5
    assert all(first < second for first, second in itertools.pairwise(tries))
    assert tries[-1] >= total / 4  # work that takes so long is waited for
