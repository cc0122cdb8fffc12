"""What an ordinary user can ask of root's phosd about what is not that user's: nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client, wire
from tests.integration.site import Site, wait_until
from tests.unit.as_user import NOBODY, as_user

WITH_ROOTS_CHILD = f"""
import os, sys, time
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "600"])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
os.execvp("sleep", ["sleep", "600"])
"""


SOCKET = Path("../run/phosd.sock")
"""As it is found from the user's folder: the folders above the test's are for root alone."""


@pytest.fixture
def folder(site: Site) -> Path:
    """A folder of the user's beside the one of phosd's socket."""
    site.folder.chmod(0o711)
    path = site.folder / "user"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    return path


def ask(folder: Path, **body: Any) -> str:
    """One request as that user, with a directory of the user's; what phosd says to it."""

    def action() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(60)
            connection.connect(str(SOCKET))
            directory = os.open(".", os.O_RDONLY)
            wire.send(connection, wire_pb2.Envelope(id=1, **body), [directory])
            answer = wire.receive(connection)
            said = answer[0] if answer else wire_pb2.Envelope()
            kind = said.WhichOneof("body") or ""
            Path("said").write_text(getattr(getattr(said, kind), "error", "") if kind else "the connection ended")

    assert as_user(folder, action) == ""
    return (folder / "said").read_text()


def test_what_is_anothers_can_neither_be_seen_nor_touched(site: Site, folder: Path) -> None:
    program = site.example("stencil", "--iterations", "100000", "--iteration-seconds", "0.01")
    program.wait_iterations(3)

    def look() -> None:
        seen = client.status(SOCKET)
        pids = [process.pid for process in seen.processes]
        Path("seen").write_text(json.dumps([pids, len(seen.gpus), len(seen.jobs), len(seen.pools)]))

    wait_until(lambda: [process["pid"] for process in site.status()["processes"]] == [program.pid], "phosd to know it")
    processes = site.status()["processes"]
    assert as_user(folder, look) == ""
    assert json.loads((folder / "seen").read_text()) == [[], 1, 0, 0]

    image = str(folder)
    requests: dict[str, dict[str, Any]] = {
        "may not checkpoint process": {"dump_begin": wire_pb2.DumpBegin(pid=program.pid, protocol="stop")},
        "may not restore here.": {"restore_begin": wire_pb2.RestoreBegin()},
        "may not restore here, and so": {"pool_create": wire_pb2.PoolCreate(name="mine", size=1)},
        "and so not have pools": {"pool_take": wire_pb2.PoolTake(name="mine")},
        "not have pools": {"pool_drop": wire_pb2.PoolDrop(name="mine")},
        "may not pin images": {"pin_image": wire_pb2.PinImage()},
        "not pin images": {"unpin_image": wire_pb2.UnpinImage(name=image)},
        "has no business with process": {"task_runs": wire_pb2.TaskRuns(pids=[program.pid], back=True)},
        "expects here that tasks": {"task_runs": wire_pb2.TaskRuns(pids=[program.pid])},
        "has no business": {"task_runs": wire_pb2.TaskRuns(pids=[1 << 30], back=True)},
        "may not stop this phosd.": {"shutdown": wire_pb2.Shutdown()},
        "no such job": {"wait_image": wire_pb2.WaitImage()},
    }
    for expected, body in requests.items():
        assert expected in ask(folder, **body)
    number = bytes.fromhex(processes[0]["session"])  # if it had become known
    hello = wire_pb2.Hello(session=number, protocol=wire.PROTOCOL_VERSION, state=wire_pb2.OPEN)
    assert ask(folder, hello=hello) == "the connection ended"
    assert ask(folder, audit_describe=wire_pb2.AuditDescribe(session=number)) == "the connection ended"
    assert [process["pid"] for process in site.status()["processes"]] == [program.pid]
    program.wait_progress()


def test_a_tree_is_its_users_as_a_whole(site: Site, folder: Path) -> None:
    """CRIU and phosd would stop the child of another user as well, and its memory would be in the image."""
    site.run("phosd", "--ensure")
    program = site.start(sys.executable, "-c", WITH_ROOTS_CHILD, under=False)
    wait_until(lambda: b"sleep" in Path(f"/proc/{program.pid}/cmdline").read_bytes().split(b"\0")[0], "the program")
    said = ask(folder, dump_begin=wire_pb2.DumpBegin(pid=program.pid))
    assert f"below process {program.pid} belongs to another user" in said
