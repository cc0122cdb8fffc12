"""The speculator and its worker: answers, deadlines, crashes, and that the worker ends when its phosd does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from spec_build import SCALE, THROUGH, ZSTD, host_program

from phos.gpu_engine.spec import frames, table
from phos.gpu_engine.spec.descriptor import Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.speculator import FileSource, Speculator

ROOT = Path(__file__).resolve().parents[2]
ONE, TWO = b"1" * 16, b"2" * 16
PATIENCE = 60.0
"""Seconds: for a machine that is busy with other things."""

# Put in the worker's way by the tests: modules that crash or hang whoever analyses them.
CUSTOMISE = """
import ctypes, os, sys, time
if "phos.gpu_engine.spec.worker" in " ".join(sys.orig_argv):
    from phos.gpu_engine.spec import analysis
    real = analysis.describe_within
    def describe(image, capability, kernels, seconds, *more):
        image = bytes(image)
        if image.startswith(b"CRASH"):
            os.kill(os.getpid(), 11)
        if image.startswith(b"EXIT"):
            os._exit(3)
        if image.startswith(b"PRINT"):
            print("careless")
        if image.startswith(b"MEMORY"):
            bytearray(1 << 40)
        if image.startswith((b"HANG", b"PARTLY")):
            if image.startswith(b"PARTLY"):
                real(image[6:], capability, kernels, seconds, *more)
            # Holds the interpreter lock, as a library that loops for ever may.
            ctypes.PyDLL(None).sleep(1000)
        if image.startswith(b"SLOW"):
            found, *_ = real(image[4:], capability, kernels, seconds, *more)
            first = min(kernels)
            return analysis.Described(found, set(kernels) - {first}, set())
        if image.startswith(b"NEVER"):
            found, *_ = real(image[5:], capability, kernels, seconds, *more)
            return analysis.Described(found, set(kernels), set())
        return real(image[5:] if image.startswith(b"PRINT") else image, capability, kernels, seconds, *more)
    analysis.describe_within = describe
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "sitecustomize.py").write_text(CUSTOMISE)
    monkeypatch.syspath_prepend(str(tmp_path / "custom"))
    monkeypatch.setenv("PHOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PHOS_NVDISASM", "")


@pytest.fixture
def speculator() -> Iterator[Speculator]:
    made = Speculator(90, module_seconds=PATIENCE, lanes=1)
    yield made
    made.close()


def sources(packed: bytes) -> dict[tuple[int, int], Source]:
    return {(module, hashed): found.source for module, hashed, found in table.unpack(packed)}


def key(module: int, name: str) -> tuple[int, int]:
    return module, table.name_hash(name)


def workers_left() -> list[psutil.Process]:
    """The workers that still run, or that nobody has waited for."""

    def is_worker(child: psutil.Process) -> bool:
        return child.status() == psutil.STATUS_ZOMBIE or "phos.gpu_engine.spec.worker" in child.cmdline()

    return [child for child in psutil.Process().children() if is_worker(child)]


def worker_of(speculator: Speculator) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE
    while not (workers := list(speculator._workers.values())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return psutil.Process(workers[0].pid)


def known_sources(speculator: Speculator, session: bytes) -> set[tuple[int, str]]:
    return set(speculator.descriptors(session))


def test_modules_in_files_and_in_memory(speculator: Speculator, tmp_path: Path) -> None:
    program = host_program(ZSTD)
    (tmp_path / "program").write_bytes(program)
    speculator.add_kernels(ONE, 1, [SCALE])  # told of before its module
    speculator.add_module(ONE, 1, ZSTD)
    speculator.add_module(ONE, 2, FileSource(str(tmp_path / "program"), program.index(ZSTD)))
    speculator.add_module(ONE, 3, FileSource(str(tmp_path / "program"), program.index(ZSTD), len(ZSTD)))
    speculator.add_module(ONE, 4, FileSource(str(tmp_path / "program")))
    for module in (2, 3, 4):
        speculator.add_kernels(ONE, module, [THROUGH])
    packed = speculator.table(ONE, PATIENCE)
    assert set(sources(packed)) == {key(1, SCALE), key(2, THROUGH), key(3, THROUGH), key(4, THROUGH)}
    assert speculator.unfinished(ONE) == []
    assert known_sources(speculator, ONE) == {(1, SCALE), (2, THROUGH), (3, THROUGH), (4, THROUGH)}
    assert speculator.table(ONE, 0) == packed
    assert speculator.table(TWO, 0) == table.pack(())


def test_kernels_may_come_later(speculator: Speculator) -> None:
    speculator.add_module(ONE, 1, ZSTD)
    assert speculator.table(ONE, PATIENCE) == table.pack(())
    speculator.add_kernels(ONE, 1, [SCALE])
    assert set(sources(speculator.table(ONE, PATIENCE))) == {key(1, SCALE)}
    speculator.add_kernels(ONE, 1, [THROUGH, SCALE])
    assert set(sources(speculator.table(ONE, PATIENCE))) == {key(1, SCALE), key(1, THROUGH)}


def test_all_is_there_when_every_module_has_come_and_is_analysed(speculator: Speculator) -> None:
    assert speculator.complete(ONE)  # it has asked for nothing
    speculator.add_kernels(ONE, 7, [SCALE])
    assert not speculator.pending(ONE)  # nothing can be done about it yet
    assert not speculator.complete(ONE)
    speculator.add_module(ONE, 7, ZSTD)
    speculator.table(ONE, PATIENCE)
    assert speculator.complete(ONE)
    assert speculator.complete(TWO)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (b"hello", "no module"),
        (b"CRASH", "signal 11"),
        (b"EXIT", "status 3"),
        (b"MEMORY", "MemoryError"),
        (FileSource("/does/not/exist"), "No such file"),
        (FileSource("/dev/zero"), "no regular file"),
        (FileSource("/proc/self/exe", 1 << 60), "offset"),
        (FileSource("/etc/hostname", 0), "no module"),
    ],
    ids=str,
)
def test_a_bad_module_costs_only_itself(
    speculator: Speculator, caplog: pytest.LogCaptureFixture, module: bytes | FileSource, why: str
) -> None:
    speculator.add_module(ONE, 1, module)
    speculator.add_kernels(ONE, 1, [SCALE])
    speculator.add_module(ONE, 2, ZSTD)
    speculator.add_kernels(ONE, 2, [SCALE])
    assert set(sources(speculator.table(ONE, PATIENCE))) == {key(2, SCALE)}
    assert speculator.unfinished(ONE) == [(1, SCALE)]
    assert why in caplog.text


def test_prints_do_not_end_up_among_messages(speculator: Speculator) -> None:
    speculator.add_module(ONE, 1, b"PRINT" + ZSTD)
    speculator.add_kernels(ONE, 1, [SCALE])
    assert set(sources(speculator.table(ONE, PATIENCE))) == {key(1, SCALE)}


def test_a_module_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    speculator = Speculator(90, module_seconds=6)  # in which a worker certainly starts, and comes to where it hangs
    try:
        speculator.add_module(ONE, 1, b"HANG")
        speculator.add_kernels(ONE, 1, [SCALE])
        speculator.add_module(ONE, 2, b"PARTLY" + ZSTD)
        speculator.add_kernels(ONE, 2, [THROUGH])
        speculator.add_module(ONE, 3, ZSTD)
        speculator.add_kernels(ONE, 3, [SCALE])
        assert set(sources(speculator.table(ONE, PATIENCE))) == {key(2, THROUGH), key(3, SCALE)}
        assert caplog.text.count("longer than 6 s") == 2
    finally:
        speculator.close()


@pytest.mark.parametrize("kind", [b"SLOW", b"NEVER"])
def test_kernels_without_time_have_another_turn_if_that_helps(speculator: Speculator, kind: bytes) -> None:
    speculator.add_module(ONE, 1, kind + ZSTD)
    speculator.add_kernels(ONE, 1, [SCALE, THROUGH])
    assert set(sources(speculator.table(ONE, PATIENCE))) == {key(1, SCALE), key(1, THROUGH)}
    assert speculator.unfinished(ONE) == []


def test_a_table_is_there_in_time_and_says_what_is_missing(
    speculator: Speculator, caplog: pytest.LogCaptureFixture
) -> None:
    speculator.add_module(ONE, 1, b"HANG")
    speculator.add_kernels(ONE, 1, [SCALE])
    worker_of(speculator)
    speculator.add_module(ONE, 2, ZSTD)
    speculator.add_kernels(ONE, 2, [THROUGH])
    began = time.monotonic()
    assert speculator.table(ONE, 0.3) == table.pack(())
    assert time.monotonic() - began < 5
    assert speculator.unfinished(ONE) == [(1, SCALE), (2, THROUGH)]
    assert f"{SCALE} of module 1, {THROUGH} of module 2" in caplog.text


def test_forgetting_a_session_breaks_its_analysis_off(speculator: Speculator) -> None:
    speculator.add_module(ONE, 1, b"HANG")
    speculator.add_kernels(ONE, 1, [SCALE])
    worker_of(speculator)
    speculator.add_module(TWO, 1, ZSTD)
    speculator.add_kernels(TWO, 1, [SCALE])
    speculator.forget(ONE)
    assert set(sources(speculator.table(TWO, PATIENCE))) == {key(1, SCALE)}
    assert speculator.table(ONE, 0) == table.pack(())


def test_what_somebody_waits_for_comes_first() -> None:
    speculator = Speculator(90, module_seconds=8, lanes=1)
    try:
        speculator.add_module(ONE, 1, b"HANG")
        speculator.add_kernels(ONE, 1, [SCALE])
        worker_of(speculator)
        for number in range(2, 12):
            speculator.add_module(ONE, number, b"HANG%d" % number)
            speculator.add_kernels(ONE, number, [SCALE])
        speculator.add_module(TWO, 1, ZSTD)
        speculator.add_kernels(TWO, 1, [SCALE])
        assert set(sources(speculator.table(TWO, PATIENCE))) == {key(1, SCALE)}
        assert len(speculator.unfinished(ONE)) == 11
    finally:
        speculator.close()


def test_results_are_cached_between_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    packed = []
    for _ in range(2):
        speculator = Speculator(90)
        speculator.add_module(ONE, 1, ZSTD)
        speculator.add_kernels(ONE, 1, [SCALE])
        packed.append(speculator.table(ONE, PATIENCE))
        speculator.close()
        kept = list((tmp_path / "cache").iterdir())
        assert len(kept) == 1
    assert packed[0] == packed[1] != table.pack(())


def test_the_worker_is_gentle_and_inherits_nothing(speculator: Speculator) -> None:
    with socket.socket() as listening:
        listening.set_inheritable(True)
        speculator.add_module(ONE, 1, ZSTD)
        speculator.add_kernels(ONE, 1, [SCALE])
        speculator.table(ONE, PATIENCE)
        worker = worker_of(speculator)
        assert worker.nice() in (5, 19)  # as it was waited for
        targets = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")]
        assert not [target for target in targets if target.startswith("socket:")]
        assert len(targets) == 5  # 0, 1, 2 and the two pipes
        assert not [item.path for item in worker.memory_maps() if "libcuda" in item.path or "libphos" in item.path]


def test_a_worker_has_the_lowest_priority_until_somebody_waits(speculator: Speculator) -> None:
    speculator.add_module(ONE, 1, b"HANG")
    speculator.add_kernels(ONE, 1, [SCALE])
    worker = worker_of(speculator)

    def becomes(nice: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while worker.nice() != nice:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    becomes(19)
    if os.geteuid() != 0:
        return  # nobody else may raise it again
    waiting = threading.Thread(target=speculator.table, args=(ONE, 3))
    waiting.start()
    becomes(5)
    waiting.join()
    becomes(19)
    speculator.hurry(ONE, 1)
    becomes(5)
    becomes(19)


def test_several_modules_are_analysed_at_once() -> None:
    speculator = Speculator(90, module_seconds=PATIENCE, lanes=3)
    try:
        for number in (1, 2):
            speculator.add_module(ONE, number, b"HANG%d" % number)
            speculator.add_kernels(ONE, number, [SCALE])
        speculator.add_module(TWO, 1, ZSTD)
        speculator.add_kernels(TWO, 1, [SCALE])
        assert set(sources(speculator.table(TWO, PATIENCE / 2))) == {key(1, SCALE)}
        assert speculator.unfinished(ONE) == [(1, SCALE), (2, SCALE)]
        assert len(speculator._workers) <= 3
    finally:
        speculator.close()
    assert not workers_left()


def test_what_is_still_to_be_done_for_a_process_that_was_killed_is_done(speculator: Speculator) -> None:
    """And is at hand when it comes back from its image with the same modules: not so those that it has no more."""
    speculator.add_module(ONE, 1, b"HANG")  # keeps the only lane busy
    speculator.add_kernels(ONE, 1, [SCALE])
    worker_of(speculator)
    for number in (1, 2):
        speculator.add_module(TWO, number, ZSTD)
        speculator.add_kernels(TWO, number, [SCALE, THROUGH])
    speculator.forget(TWO, finish=True)
    speculator.forget(ONE)
    deadline = time.monotonic() + PATIENCE
    while speculator.unfinished(TWO):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert speculator.table(TWO, 0) == table.pack(())
    speculator.add_module(TWO, 1, ZSTD)
    speculator.add_module(TWO, 2, b"hello")  # it was restored from an earlier image, and went on differently
    assert set(sources(speculator.table(TWO, 0))) == {key(1, SCALE), key(1, THROUGH)}


def test_only_the_last_of_the_killed_are_remembered(speculator: Speculator) -> None:
    sessions = [bytes([number]) * 16 for number in range(6)]
    for session in sessions:
        speculator.add_module(session, 1, ZSTD)
        speculator.add_kernels(session, 1, [SCALE])
        speculator.table(session, PATIENCE)
        speculator.forget(session, finish=True)
    assert [bool(speculator.descriptors(session)) for session in sessions] == [False] * 2 + [True] * 4


def test_a_module_can_be_read_after_its_process_and_its_file_have_gone(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"x" * 4096 + ZSTD)
    speculator = Speculator(90)
    try:
        speculator.add_module(ONE, 1, FileSource.of(str(path), 4096))
        speculator.add_module(ONE, 2, FileSource.of(str(path), 4096, len(ZSTD)))
        path.unlink()
        for number in (1, 2):
            speculator.add_kernels(ONE, number, [SCALE])
        assert set(sources(speculator.table(ONE, PATIENCE))) == {key(1, SCALE), key(2, SCALE)}
    finally:
        speculator.close()


def test_an_idle_worker_goes_and_comes_back() -> None:
    speculator = Speculator(90, idle_seconds=0.1)
    try:
        for module in (1, 2):
            speculator.add_module(ONE, module, ZSTD)
            speculator.add_kernels(ONE, module, [SCALE])
            assert key(module, SCALE) in sources(speculator.table(ONE, PATIENCE))
            deadline = time.monotonic() + PATIENCE
            while speculator._workers:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        speculator.close()
    assert not workers_left()


def test_closing_ends_a_busy_worker_at_once() -> None:
    speculator = Speculator(90)
    speculator.add_module(ONE, 1, b"HANG")
    speculator.add_kernels(ONE, 1, [SCALE])
    worker = worker_of(speculator)
    waiting = threading.Thread(target=speculator.table, args=(ONE, PATIENCE))
    waiting.start()
    began = time.monotonic()
    speculator.close()
    waiting.join()
    assert time.monotonic() - began < 10
    assert not worker.is_running()


@pytest.mark.parametrize("module", ["HANG", "hello"])
def test_the_worker_ends_with_its_phosd(module: str) -> None:
    """Also when that is killed, and whether the worker is busy or idle."""
    program = (
        "import sys, time\n"
        "from phos.gpu_engine.spec.speculator import Speculator\n"
        "speculator = Speculator(90)\n"
        f"speculator.add_module(b'1' * 16, 1, {module.encode()!r})\n"
        f"speculator.add_kernels(b'1' * 16, 1, ['k'])\n"
        "speculator.table(b'1' * 16, 1)\n"
        "print(list(speculator._workers.values())[0].pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([sys.path[0], str(ROOT), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        worker = psutil.Process(int(daemon.stdout.readline()))
        daemon.send_signal(signal.SIGKILL)
    worker.wait(PATIENCE)


def test_messages_survive_any_cut() -> None:
    first, second = {"id": 1, "text": "é"}, {"id": 2}
    stream = b"".join([*frames.pack(first, b"body"), *frames.pack(second)])
    for cut in range(len(stream) + 1):
        assembler = frames.Assembler()
        found = assembler.feed(stream[:cut]) + assembler.feed(stream[cut:])
        assert found == [(first, b"body"), (second, b"")]


@pytest.mark.parametrize(
    "stream",
    [
        frames.SIZES.pack(frames.MAX_HEADER + 1, 0),
        frames.SIZES.pack(0, frames.MAX_BODY + 1),
        frames.SIZES.pack(2, 0) + b"[]",
        frames.SIZES.pack(2, 0) + b"{{",
    ],
)
def test_nonsense_on_the_pipe_is_refused(stream: bytes) -> None:
    with pytest.raises(SpecError):
        frames.Assembler().feed(stream)
