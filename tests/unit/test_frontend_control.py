"""The control thread: phosd that comes late, dies, is started again; forks; shared memory; modules."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.spec.identity import FileIdentity
from tests.unit.frontend_fake import FakePhosd, Program, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]


HOLDING = """
start()
p = [ok(cu.cuMemAlloc(17 << 20)) for _ in range(5)]  # large enough for a block each
for i, q in enumerate(p):
    fill(q, 3 << 20, i + 1)
say("ready")
heard()
assert all(read(q, 3 << 20) == bytes([i + 1]) * (3 << 20) for i, q in enumerate(p))
say("same")
"""


def test_hello_says_who_and_what(phosd: FakePhosd) -> None:
    with program(phosd, HOLDING) as (app, session):
        app.line()
        hello = session.hellos[0]
        assert len(hello.session) == 16
        assert hello.protocol == 1
        assert hello.pid == app.process.pid
        assert hello.state == wire.OPEN
        assert hello.executable == os.path.realpath(sys.executable)
        assert hello.driver_version == 13000
        assert [(d.ordinal, len(d.uuid)) for d in hello.devices] == [(0, 16)]
        app.tell()
        app.finish()


def test_phosd_that_comes_late_learns_everything(tmp_path: Path) -> None:
    app = Program(tmp_path / "phosd.sock", HOLDING)
    try:
        assert app.line() == "ready"
        assert not [d for d in app.descriptors() if d.startswith("socket:")]
        with FakePhosd(tmp_path) as phosd:
            session = phosd.arrival()
            assert session.hellos[0].blocks == 5
            eventually(lambda: len(session.blocks) == 5)
            assert all(b.descriptor >= 0 for b in session.blocks.values())
            phosd.toggle(session)
            app.tell()
            assert app.line() == "same"
            app.finish()
    finally:
        app.kill()


def test_phosd_dies_and_another_takes_over(tmp_path: Path) -> None:
    first = FakePhosd(tmp_path)
    with program(first, HOLDING) as (app, session):
        app.line()
        number = session.number
        eventually(lambda: len(session.blocks) == 5)
        first.toggle(session)  # the handles are imported ones from now on
        kept = dict(session.blocks)
        first.stop()
        with FakePhosd(tmp_path) as second:
            again = second.arrival()
            assert again.number == number
            eventually(lambda: len(again.blocks) == 5)
            assert {n: b.size for n, b in again.blocks.items()} == {n: b.size for n, b in kept.items()}
            assert all(b.lost == (b.descriptor < 0) for b in again.blocks.values())
            for n, b in again.blocks.items():
                if b.lost:
                    b.descriptor = kept[n].descriptor  # its keeper process has it
            second.toggle(again)
            app.tell()
            assert app.line() == "same"
            app.finish()


def test_phosd_that_dies_after_quiesce_leaves_the_application_running(phosd: FakePhosd) -> None:
    with program(phosd, HOLDING) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        phosd.stop()
        app.tell()
        assert app.line() == "same"
        app.finish()


def test_a_new_phosd_is_started_when_the_holder_is_dead(tmp_path: Path) -> None:
    """The hold names a phosd that is gone: the frontend starts the command it was given, without our preloads."""
    first = FakePhosd(tmp_path)
    script = tmp_path / "started.py"
    script.write_text(
        "import os, sys\n"
        f"path = {str(tmp_path / 'started')!r}\n"
        "open(path + '.new', 'w').write(repr((os.environ.get('LD_PRELOAD'), os.environ.get('LD_LIBRARY_PATH'),\n"
        "    sorted(os.listdir('/proc/self/fd')), os.getsid(0) == os.getpid() or os.getpgid(0) != os.getppid())))\n"
        "os.rename(path + '.new', path)\n"
    )
    settings = {
        "PHOS_DAEMON_COMMAND": f"{sys.executable} {script}",
        "PHOS_DAEMON_LIBRARY_PATH": "/somewhere/lib",
    }
    with program(first, HOLDING, **settings) as (app, session):
        app.line()
        assert not first.quiesce(session).error
        assert not first.detach(session).error
        hold = tmp_path / "hold" / session.number.hex()
        dead = os.fork()
        if dead == 0:
            os._exit(0)
        os.waitpid(dead, 0)
        kept = dict(session.blocks)
        (tmp_path / "new").symlink_to(f"{dead}:12345")
        os.replace(tmp_path / "new", hold)  # there is no moment without a hold
        first.stop()
        eventually((tmp_path / "started").exists, seconds=15)
        preload, libraries, descriptors, alone = eval((tmp_path / "started").read_text())  # noqa: S307
        assert preload is None
        assert libraries == "/somewhere/lib"
        assert len(descriptors) <= 5  # the three standard ones, the file it writes, the folder it lists
        assert alone
        hold.unlink()
        with FakePhosd(tmp_path) as second:
            again = second.arrival()
            assert again.hellos[-1].state == wire.DETACHED
            assert not second.give(again, {n: b.descriptor for n, b in kept.items()}).error
            assert not second.open(again).error
            app.tell()
            assert app.line() == "same"
            app.finish()


def test_fork_after_cu_init_leaves_parent_and_child_alone(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(3 << 20))
    fill(p, 3 << 20, 1)
    time.sleep(0.3)
    child = os.fork()
    if child == 0:
        sockets = [d for d in descriptors().values() if d.startswith("socket:")]
        cu.cuMemAlloc(100)
        cu.cuCtxSynchronize()
        os._exit(len(sockets))
    assert os.waitpid(child, 0)[1] == 0
    say("ready")
    heard()
    assert read(p, 3 << 20) == bytes([1]) * (3 << 20)
    say("same")
    """
    with program(phosd, body) as (app, session):
        app.line()
        phosd.toggle(session)
        app.tell()
        assert app.line() == "same"
        app.finish()
        assert len(phosd.sessions) == 1


def test_a_forked_child_keeps_none_of_the_descriptors_that_the_frontend_holds_just_then(
    phosd: FakePhosd, tmp_path: Path
) -> None:
    body = """
    start()
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    s = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamWaitValue32(s, flag, 1, 0))
    waiting = threading.Thread(target=cu.cuStreamSynchronize, args=(s,))
    waiting.start()
    say("waiting")
    name = heard()
    child = os.fork()
    if child == 0:
        os._exit(sum(path == name for path in descriptors().values()))
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ctypes.memset(flag, 1, 1)
    waiting.join()
    """
    memory = tmp_path / "memory"
    memory.write_bytes(b"as good as a GPU's")
    with program(phosd, body) as (app, session), memory.open() as file:
        assert app.line() == "waiting"
        connection = session.connection
        assert connection is not None
        # What comes while the gate is closing is kept for later, and with it its descriptor.
        connection.send(wire.Envelope(id=1, quiesce=wire.Quiesce(timeout_ms=60000)))
        connection.send(wire.Envelope(attach_blocks=wire.AttachBlocks(block=[1 << 40])), [file.fileno()])
        eventually(lambda: str(memory) in app.descriptors())
        app.tell(str(memory))
        assert app.line() == "0"
        envelope, _ = connection.replies.get(timeout=30)
        assert not envelope.quiesce_done.error
        eventually(lambda: str(memory) not in app.descriptors())
        assert not phosd.open(session).error
        app.finish()


def test_a_child_forked_while_the_frontend_connects_has_no_socket_of_it(tmp_path: Path) -> None:
    """phosd would see no end of the connection while the child lives, and CRIU a peer outside the tree."""
    body = """
    def sockets():
        return sum(path.startswith("socket:") for path in descriptors().values())
    start()
    while not sockets():
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        os._exit(sockets())
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    path = tmp_path / "phosd.sock"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        listener.bind(str(path))
        listener.listen(0)
        other.connect(str(path))  # until this is accepted, there is no room for another
        app = Program(path, body)
        try:
            assert app.line() == "0"
            listener.close()
            app.finish()
        finally:
            app.kill()


def test_fork_before_cu_init_makes_two_sessions(phosd: FakePhosd) -> None:
    body = """
    child = os.fork()
    start()
    p = ok(cu.cuMemAlloc(3 << 20))
    fill(p, 3 << 20, 1)
    time.sleep(0.3)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say("done")
    """
    with program(phosd, body) as (app, _):
        phosd.arrival()
        assert app.line() == "done"
        app.finish()
        assert len(phosd.sessions) == 2


def test_exported_memory_travels_as_a_token_and_survives(phosd: FakePhosd) -> None:
    exporter = """
    import socket
    start()
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.requestedHandleTypes = FD
    unit = 2 << 20
    handle = ok(cu.cuMemCreate(unit, prop, 0))
    address = int(ok(cu.cuMemAddressReserve(unit, 0, 0, 0)))
    ok(cu.cuMemMap(address, unit, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location = prop.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(address, unit, [access], 1))
    fill(address, unit, 5)
    ok(cu.cuCtxSynchronize())
    token = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
    assert os.readlink("/proc/self/fd/%d" % int(token)).startswith("/memfd:phos-memory")
    small = ok(cu.cuMemAlloc(1000)); other = ok(cu.cuMemAlloc(1000))
    fill(other, 1000, 6)
    ok(cu.cuCtxSynchronize())
    say(os.getpid(), int(token), bytes(ok(cu.cuIpcGetMemHandle(other)).reserved).hex())
    heard()
    say(read(address, 4)[0], read(other, 4)[0])
    heard()
    """
    importer = """
    start()
    pid, fd, legacy = heard().split()
    FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    token = os.open("/proc/%s/fd/%s" % (pid, fd), os.O_RDONLY)
    handle = ok(cu.cuMemImportFromShareableHandle(token, FD))
    os.close(token)
    unit = 2 << 20
    address = int(ok(cu.cuMemAddressReserve(unit, 0, 0, 0)))
    ok(cu.cuMemMap(address, unit, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(address, unit, [access], 1))
    h = cu.CUipcMemHandle()
    h.reserved = bytes.fromhex(legacy)
    other = int(ok(cu.cuIpcOpenMemHandle(h, 1)))
    assert read(address, unit) == bytes([5]) * unit and read(other, 1000) == bytes([6]) * 1000
    say("imported")
    heard()
    assert read(address, unit) == bytes([5]) * unit and read(other, 1000) == bytes([6]) * 1000
    fill(address, unit, 7); fill(other, 1000, 8)
    ok(cu.cuCtxSynchronize())
    say("written")
    heard()
    ok(cu.cuIpcCloseMemHandle(other))
    ok(cu.cuMemUnmap(address, unit)); ok(cu.cuMemRelease(handle))
    say("freed")
    heard()
    """
    with program(phosd, exporter) as (one, first), program(phosd, importer) as (two, second):
        two.tell(one.line())
        assert two.line() == "imported"
        eventually(lambda: len(second.blocks) == 2)
        assert {b.owner_session for b in second.blocks.values()} == {first.number}
        for session in (first, second):
            assert not phosd.quiesce(session).error
        for session in (first, second):
            assert not phosd.detach(session).error
        for session in (second, first):
            given = {
                n: first.blocks[b.owner_block].descriptor if b.owner_block else b.descriptor
                for n, b in session.blocks.items()
            }
            assert not phosd.attach(session, given).error
            assert not phosd.open(session).error
        two.tell()
        assert two.line() == "written"
        one.tell()
        assert one.line() == "7 8"
        two.tell()
        assert two.line() == "freed"
        eventually(lambda: not second.blocks)  # a process that ended might not have told: phosd sees the end
        two.tell()
        two.finish()
        one.tell()
        one.finish()


@pytest.mark.parametrize("handle", ["cuMemExportToShareableHandle", "cuIpcGetMemHandle"])
def test_memory_is_exported_when_phosd_has_said_that_it_holds_it(phosd: FakePhosd, handle: str) -> None:
    """Whoever gets the handle asks over another connection, of which phosd may read sooner than of this one."""
    exporter = f"""
    start()
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.requestedHandleTypes = FD
    block = ok(cu.cuMemCreate(2 << 20, prop, 0))
    plain = ok(cu.cuMemAlloc(1000))
    heard()
    if {handle!r} == "cuIpcGetMemHandle":
        ok(cu.cuIpcGetMemHandle(plain))
    else:
        token = int(ok(cu.cuMemExportToShareableHandle(block, FD, 0)))
        assert os.readlink("/proc/self/fd/%d" % token).startswith("/memfd:phos-memory")
    say("exported")
    """
    phosd.questions = queue.Queue()
    with program(phosd, exporter) as (app, session):
        eventually(lambda: len(session.blocks) == 2)
        app.tell()
        question = phosd.questions.get(timeout=30)
        assert question.token_resolve.session == session.number
        assert question.token_resolve.block in session.blocks
        with pytest.raises(queue.Empty):
            app.lines.get(timeout=0.3)
        assert session.connection is not None
        session.connection.resolve(question)
        assert app.line() == "exported"
        app.finish()


def test_an_import_does_not_wait_for_a_phosd_that_is_not_there(phosd: FakePhosd) -> None:
    """A question that nobody answers takes seconds by itself: it is not asked again and again."""
    body = """
    import time
    start()
    handle = cu.CUipcMemHandle()
    handle.reserved = bytes.fromhex(heard())
    began = time.monotonic()
    error, _ = cu.cuIpcOpenMemHandle(handle, 1)
    assert error == cu.CUresult.CUDA_ERROR_INVALID_VALUE, error
    say(time.monotonic() - began)
    """
    exporter = """
    start()
    say(bytes(ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(1000)))).reserved).hex())
    """
    with program(phosd, exporter) as (app, _):
        handle = app.line()
    with program(phosd, body) as (app, session):
        phosd.stop()
        assert session.connection is not None
        session.connection.close()
        time.sleep(0.5)
        app.tell(handle)
        assert float(app.line(60)) < 15
        app.finish()


IMPORTER = """
start()
handle = cu.CUipcMemHandle()
handle.reserved = bytes.fromhex(heard())
error, _ = cu.cuIpcOpenMemHandle(handle, 1)
say(error.name)
"""


def test_an_import_waits_for_as_long_as_phosd_says_that_it_will_come(phosd: FakePhosd) -> None:
    """The memory is being saved, or restored; it is asked for once."""
    exporter = """
    start()
    say(bytes(ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(1000)))).reserved).hex())
    heard()
    """
    with program(phosd, exporter) as (owner, _), program(phosd, IMPORTER) as (app, session):
        handle = owner.line()
        phosd.questions = queue.Queue()
        app.tell(handle)
        question = phosd.questions.get(timeout=30)
        assert session.connection is not None
        for _ in range(8):
            time.sleep(1)
            coming = wire.TokenResolved(coming=True)
            session.connection.send(wire.Envelope(id=question.id, token_resolved=coming))
        assert app.lines.empty()
        assert phosd.questions.empty()
        session.connection.resolve(question)
        assert app.line() == "CUDA_SUCCESS"
        owner.tell()
        owner.finish()
        app.finish()


PTX = r"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
"""


def test_modules_are_recorded(phosd: FakePhosd, tmp_path: Path) -> None:
    path = tmp_path / "module.ptx"
    path.write_text(PTX)
    body = f"""
    start()
    text = {PTX!r}.encode() + b"\\0"
    for _ in range(2):
        ok(cu.cuModuleLoadData(text))
    ok(cu.cuModuleLoad({str(path)!r}.encode()))
    say("ready")
    heard()
    """
    with program(phosd, body) as (app, session):
        app.line()
        eventually(lambda: len(session.modules) == 2)
        copy, file = session.modules
        assert copy == ("cuModuleLoadData", "", 0, len(PTX) + 1, PTX.encode() + b"\0")
        assert file == ("cuModuleLoad", str(path), 0, len(PTX), b"")
        app.tell()
        app.finish()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
@pytest.mark.parametrize("linked", [True, False])
def test_files_of_modules_are_named_so_that_no_others_are_taken_for_them(
    phosd: FakePhosd, tmp_path: Path, linked: bool
) -> None:
    """By the build ID that is mapped; by what the file system says; after a restore without what another host has."""
    (tmp_path / "library.c").write_text(f"const char text[] = {json.dumps(PTX)};\n")
    build_id = bytes(range(1, 21))
    option = f"0x{build_id.hex()}" if linked else "none"
    path = tmp_path / "library.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-Wl,--build-id={option}", "-o", path, tmp_path / "library.c"], check=True
    )
    module = tmp_path / "module.ptx"
    module.write_text(PTX)
    body = f"""
    import ctypes
    start()
    library = ctypes.CDLL({str(path)!r})
    text = ctypes.addressof(ctypes.c_char.in_dll(library, "text"))
    load = lambda: (ok(cu.cuModuleLoadData(text)), ok(cu.cuModuleLoad({str(module)!r}.encode())))
    load()
    say("ready")
    heard()
    load()
    say("loaded")
    heard()
    """
    with program(phosd, body) as (app, session):
        app.line()
        eventually(lambda: len(session.files) == 2)
        for told, file, known_by in zip(session.files, (path, module), (build_id if linked else b"", b""), strict=True):
            about = file.stat()
            assert (told.path, told.build_id) == (str(file), known_by)
            assert (told.device, told.inode) == (about.st_dev, about.st_ino)
            assert (told.mtime_ns, told.file_size) == (about.st_mtime_ns, about.st_size)
        assert session.files[0].offset == path.read_bytes().index(PTX.encode())
        assert FileIdentity(0, 0, 0, path.stat().st_size, build_id).is_of(path.stat(), path.read_bytes()) == linked
        before = [message_without_numbers(told) for told in session.files]
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        assert not phosd.attach(session, remembers=False, restored=True).error
        assert not phosd.open(session).error
        eventually(lambda: len(session.files) == 4)
        assert session.files[2:] == before
        app.tell()
        app.line()
        assert len(session.files) == 4, "the same files are others"
        app.tell()
        app.finish()


def message_without_numbers(told: wire.ModuleLoaded) -> wire.ModuleLoaded:
    """As it is told of the same module after a restore."""
    copy = wire.ModuleLoaded()
    copy.CopyFrom(told)
    copy.device = copy.inode = 0
    return copy


@pytest.mark.parametrize("remembers", [True, False])
def test_modules_are_told_again_when_the_gate_is_open_and_only_to_a_phosd_that_has_none(
    phosd: FakePhosd, remembers: bool
) -> None:
    body = f"""
    start()
    text = {PTX!r}.encode() + b"\\0"
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(text)), b"nothing"))
    say("ready")
    heard()
    ok(cu.cuModuleLoadData(text.replace(b"nothing", b"another")))
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    say("loaded")
    heard()
    """
    with program(phosd, body) as (app, session):
        app.line()
        eventually(lambda: len(session.kernels) == 1)
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        assert not phosd.attach(session, remembers=remembers).error
        time.sleep(0.3)
        assert len(session.modules) == len(session.kernels) == 1, "the process waits for Open, and Open for nobody"
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "loaded"
        told = 2 if remembers else 3
        eventually(lambda: len(session.modules) == told)
        assert [text.count(b"nothing") for *_, text in session.modules] == ([1, 0] if remembers else [1, 1, 0])
        eventually(lambda: len(session.kernels) == (1 if remembers else 2))
        app.tell()
        app.finish()


def test_an_application_that_closes_our_descriptors(phosd: FakePhosd) -> None:
    """Daemons close everything. The frontend must not write to what opens under its numbers next, and comes back."""
    body = """
    start()
    p = ok(cu.cuMemAlloc(3 << 20))
    fill(p, 3 << 20, 1)
    time.sleep(0.2)
    ours = [n for n, d in descriptors().items() if d.startswith(("socket:", "anon_inode:[eventfd"))]
    assert len(ours) >= 2, ours
    target = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    for n in ours:
        os.dup2(target, n)
    q = [ok(cu.cuMemAlloc(17 << 20)) for _ in range(3)]
    time.sleep(3)
    assert os.fstat(target).st_size in (0, 8 * len(ours), 8), os.fstat(target).st_size
    say("ready")
    heard()
    assert read(p, 3 << 20) == bytes([1]) * (3 << 20)
    """
    with program(phosd, body) as (app, session):
        assert phosd.arrival() is session
        app.line()
        eventually(lambda: len(session.blocks) == 4)
        phosd.toggle(session)
        app.tell()
        app.finish()


def test_a_process_that_exits_while_quiesced(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(3 << 20))
    say("ready")
    heard()
    sys.exit(0)
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        app.tell()
        time.sleep(0.2)
        phosd.open(session) if session.connection and not session.connection.ended.is_set() else None
        app.finish()


def test_a_process_that_exits_before_it_is_detached_says_so(phosd: FakePhosd) -> None:
    """Its driver has shut down while its exit handlers go on."""
    body = """
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)  # before the driver's handler: it runs after it
    start()
    p = ok(cu.cuMemAlloc(17 << 20))
    say("ready")
    heard()
    sys.exit(0)
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        app.tell()
        pausing = Path(f"/proc/{session.pid}/syscall")
        eventually(lambda: pausing.read_text().startswith("34 "))
        assert phosd.detach(session).error == "the process is exiting"
        app.kill()
