"""Integration tests: the real CRIU, real processes, real files, the software GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.site import Site, become_reaper


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A private PhOS; after the test nothing of it runs."""
    if os.geteuid() != 0:
        pytest.fail("the integration tests need root, because CRIU does")
    # Socket paths are limited to 107 bytes; pytest's own folders are longer than half of that.
    become_reaper()
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()
