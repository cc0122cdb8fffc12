"""What tests of the frontend share: phosd's place, played by the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.frontend_fake import FakePhosd


@pytest.fixture
def phosd() -> Iterator[FakePhosd]:
    with FakePhosd() as daemon:
        yield daemon
