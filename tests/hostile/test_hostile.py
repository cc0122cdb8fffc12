"""Programs that misbehave, under the frontend, while they are quiesced, detached and attached without pause.

Each is one C file here and must end with 0 by itself: exactly as it does without the frontend.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from pathlib import Path

import pytest

from tests.unit.frontend_fake import LIBPHOS, SOFTGPU, FakePhosd, Session, environment_for

HERE = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in HERE.glob("*.c"))
SECONDS = os.environ.get("HOSTILE_SECONDS", "1.5")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (LIBPHOS.exists() and (SOFTGPU / "libcuda.so.1").exists()), reason="not built"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def _build(folder: Path, name: str) -> Path:
    program = folder / name
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["gcc", *flags, "-o", program, HERE / f"{name}.c", "-ldl"], check=True)
    return program


class Toggler(threading.Thread):
    """Toggles whoever says hello, as often as it can, until told to stop. Frontends that go away are let go."""

    def __init__(self, phosd: FakePhosd) -> None:
        super().__init__(daemon=True)
        self.phosd = phosd
        self.stopping = threading.Event()
        self.toggles = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                session = self.phosd.arrival(0.05)
            except queue.Empty:
                continue
            while not self.stopping.is_set():
                assert session.connection is not None
                try:
                    if session.connection.ended.is_set():
                        break
                    if not self._toggle(session):
                        break
                    self.toggles += 1
                except (OSError, queue.Empty, AssertionError, ValueError):
                    break  # it ended, or closed our socket, in the middle
                self.stopping.wait(0.005)

    def _toggle(self, session: Session) -> bool:
        """Whether it can be toggled again."""
        phosd = self.phosd
        for step in (lambda one: phosd.quiesce(one, 2000), phosd.detach, phosd.attach, phosd.open):
            error: str = step(session).error
            if "exiting" in error:
                return False
            if error:
                self.errors.append(error)
        return True


@pytest.mark.parametrize("toggled", [False, True], ids=["alone", "toggled"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile(folder: Path, name: str, toggled: bool) -> None:
    if name == "close_everything" and toggled:
        pytest.skip("it closes the connection on which it would be toggled")
    program = _build(folder, name)
    with FakePhosd() as phosd:
        toggler = Toggler(phosd)
        if toggled:
            toggler.start()
        environment = environment_for(phosd.path) | {"HOSTILE_SECONDS": SECONDS}
        done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=False)
        toggler.stopping.set()
        if toggled:
            toggler.join(40)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not toggler.errors
        if toggled and name != "exec_chain":
            assert toggler.toggles > 0
