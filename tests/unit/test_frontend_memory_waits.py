"""What the control thread does with memory of its own accord: it gives back what was freed, and tells what came."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, Program, built, program
from tests.unit.test_frontend_uncarried import whole, with_a_driver_of_its_own
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120)]

CASES = [
    "freed", "alone", "large", "again", "bounded", "short_of_memory", "nothing_kept", "no_control_thread", "gate",
    "bursts", "endless", "in_between", "rdma_is_refused_once",
    "freed_in_a_stream",
]  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_driver_of_its_own(tmp_path_factory.mktemp("waits"), "memory_waits")


@whole
@pytest.mark.parametrize("case", CASES)
def test_with_a_driver_that_counts(cases: Path, case: str) -> None:
    with tempfile.TemporaryDirectory(prefix="phos-test-") as folder:  # a socket's path may not be long
        environment = os.environ | {"PHOS_SOCKET": f"{folder}/phosd.sock"}
        done = subprocess.run([cases, case], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


FREES = """
start()
pieces = [ok(cu.cuMemAlloc(40 << 20)) for _ in range(20)]
say("ready")
heard()
for p in pieces:
    ok(cu.cuMemFree(p))
say("freed")
heard()
assert ok(cu.cuMemGetInfo())[0] > 0
"""


@built
def test_other_processes_get_freed_memory_soon(phosd: FakePhosd) -> None:
    body = """
    start()
    while True:
        say(ok(cu.cuMemGetInfo())[0])
        if not heard():
            break
    """
    with program(phosd, FREES, SOFTGPU_MEMORY="2G", PHOS_CACHE_BYTES="100M") as (app, session):
        app.line()
        eventually(lambda: len(session.blocks) == 20)
        with program(phosd, body, SOFTGPU_MEMORY="2G") as (other, _):
            before = int(other.line())
            app.tell()
            app.line()

            def more() -> bool:
                other.tell()
                return int(other.line()) >= before + (18 * 40 << 20)

            eventually(more)
            assert len(session.blocks) == 2
            other.finish()
        app.finish()


@built
@pytest.mark.parametrize("limit", ["100M", "0"])
def test_freed_memory_is_not_in_a_checkpoint_that_comes_at_once(phosd: FakePhosd, limit: str) -> None:
    with program(phosd, FREES, SOFTGPU_MEMORY="2G", PHOS_CACHE_BYTES=limit) as (app, session):
        app.line()
        app.tell()
        app.line()
        phosd.toggle(session)
        assert session.memory_map is not None
        assert not session.memory_map.blocks
        app.finish()


@built
def test_a_process_may_end_while_freed_memory_waits(phosd: FakePhosd) -> None:
    body = """
    import atexit
    start()
    pieces = [ok(cu.cuMemAlloc(40 << 20)) for _ in range(20)]
    def late():
        for p in pieces[10:]:
            cu.cuMemFree(p)
    atexit.register(late)
    for p in pieces[:10]:
        ok(cu.cuMemFree(p))
    say("freed")
    """
    for _ in range(5):  # 4 GB in all: the test's phosd keeps what it was told of, and nobody took back
        app = Program(phosd, body, SOFTGPU_MEMORY="8G", PHOS_CACHE_BYTES="100M")
        assert app.line() == "freed"
        app.finish()
        assert not app.stderr


@built
def test_the_child_of_a_process_that_has_just_freed_memory(phosd: FakePhosd) -> None:
    body = (
        FREES
        + """
if os.fork() == 0:
    os._exit(0 if int(cu.cuMemGetInfo()[0]) else 1)  # no driver in there, and nobody waits for ever
_, status = os.wait()
assert status == 0
say("parent")
"""
    )
    with program(phosd, body, SOFTGPU_MEMORY="2G", PHOS_CACHE_BYTES="100M") as (app, session):
        app.line()
        app.tell()
        app.line()
        app.tell()
        assert app.line() == "parent"
        eventually(lambda: len(session.blocks) <= 2)
        app.finish()
