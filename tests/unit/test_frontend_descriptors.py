"""The frontend's own descriptors: out of the way, never at the price of a larger table; and if none are left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.waiting import eventually

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]


def test_nobody_waits_for_the_table_to_grow(tmp_path: Path) -> None:
    program = tmp_path / "cases"
    sources = [ROOT / "tests/unit/descriptor_cases.c", ROOT / "frontend/descriptors.c"]
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'frontend'}", "-o", str(program)]
    subprocess.run([*command, *map(str, sources)], check=True)
    # By way of a shell, which has few descriptors: a child's table is as large as its parent's highest one asks for,
    # and the tests' own process may have hundreds.
    said = subprocess.run(["sh", "-c", '"$0"; exit', program], capture_output=True, text=True, check=True).stdout
    first, near, after, high, grown, moved, stays = map(int, said.split())
    assert first < 512, "the system starts programs with a small table"
    assert 2 < near < first
    assert after == first
    assert high >= 512
    assert grown > high
    assert moved
    assert stays


FULL = """
import resource
start()
pieces = [ok(cu.cuMemAlloc(17 << 20)) for _ in range(5)]  # a block each
for i, p in enumerate(pieces):
    fill(p, 1 << 20, i + 1)
say("ready")
hard = int(heard())
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
def same():
    return all(read(p, 1 << 20) == bytes([i + 1]) * (1 << 20) for i, p in enumerate(pieces))
"""


@built
def test_a_program_without_a_free_descriptor_gets_its_memory_back(phosd: FakePhosd) -> None:
    body = (
        FULL
        + """
say("full")
heard()
assert same()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
say("same")
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: len(session.blocks) == 5)
        app.tell("1024")
        assert app.line() == "full"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "same"
        app.finish()


@built
def test_a_program_that_may_open_too_little_is_not_detached(phosd: FakePhosd) -> None:
    body = (
        FULL
        + """
for _ in range(5):
    os.close(files.pop())
say("full")
heard()
assert same()
for file in files:
    os.close(file)
say("free")
heard()
assert same()
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: len(session.blocks) == 5)
        app.tell("256")
        assert app.line() == "full"
        assert not phosd.quiesce(session).error
        assert "too many files are open" in phosd.detach(session).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "free"
        phosd.toggle(session)
        app.tell()
        app.finish()


@built
def test_a_child_forked_before_the_memory_is_back_has_the_programs_limit(phosd: FakePhosd) -> None:
    """It may be lifted for the descriptors that come: for the whole process, and so for a child."""
    body = """
    import resource
    start()
    p = ok(cu.cuMemAlloc(17 << 20))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    say("ready")
    heard()
    lifted, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = os.fork()
    if child == 0:
        os._exit(resource.getrlimit(resource.RLIMIT_NOFILE) != (256, hard))
    say(lifted > 256, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    heard()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        (phosd.folder / "hold" / session.number.hex()).unlink()
        assert phosd.arrival() is session
        app.tell()
        assert app.line() == "True 0"
        assert not phosd.give(session).error
        assert not phosd.open(session).error
        app.tell()
        app.finish()
