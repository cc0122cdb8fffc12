"""Integration tests: the real CRIU, real processes, real files, the software GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import xdist
from xdist.scheduler import LoadScopeScheduling

from tests.integration.site import Site, become_reaper

TOGETHER = ("test_install.py",)
"""Files whose tests share what takes a minute to make, and so a worker. All others go to whichever worker is free."""


class Scheduling(LoadScopeScheduling):
    """As xdist's ``load``, but for :data:`TOGETHER`. Its own ``loadgroup`` does nothing under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith(TOGETHER) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """See xdist's documentation of this hook."""
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all workers of this run of pytest, and of no other: programs may have changed since."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if xdist.is_xdist_worker(request) else base) / "references"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def site(tmp_path: Path, references: Path) -> Iterator[Site]:
    """A private PhOS; after the test nothing of it runs."""
    if os.geteuid() != 0:
        pytest.fail("the integration tests need root, because CRIU does")
    # Socket paths are limited to 107 bytes; pytest's own folders are longer than half of that.
    become_reaper()
    made = Site(tmp_path, references=references)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def open_site(references: Path) -> Iterator[Site]:
    """A site that other users get into: pytest's folders are for one user, and each pytest that starts sees to that."""
    with tempfile.TemporaryDirectory(prefix="phos-test-", dir="/tmp") as name:
        os.chmod(name, 0o711)
        become_reaper()
        made = Site(Path(name), references=references)
        try:
            yield made
        finally:
            made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With what fails goes what its programs and its phosd said last: their files are gone by the time one looks."""
    report = yield
    made = getattr(item, "funcargs", {}).get("site")
    if report.when == "call" and report.failed and isinstance(made, Site):
        for path in [*(program.output for program in made.programs), made.folder / "run" / "phosd.log"]:
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                report.sections.append((f"the end of {path.name}", "\n".join(lines[-15:])))
    return report
