"""Command lines that mean nothing, or cannot be done: a sentence, the documented exit status, and nothing is done."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phos.cli.main import COMMANDS, main
from phos.cli.run import program_of
from phos.gpu_engine.daemon.command_line import main as phosd
from phos.gpu_engine.errors import UsageError

LONG = "x" * 5000
NOT_UTF8 = os.fsdecode(b"\xff\xfe")

# No daemon runs, and none is started by any of these. `there` is an empty directory, `file` is one.
USAGE = [
    ["checkpoint", "--", "-1", "new"],
    ["checkpoint", "0", "new"],
    ["checkpoint", str(1 << 31), "new"],
    ["checkpoint", str(1 << 70), "new"],
    ["checkpoint", "pid", "new"],
    ["checkpoint", "self", "new"],
    ["checkpoint", "1000000", ""],
    ["checkpoint", "1000000", "new", "--pool", "-5"],
    ["checkpoint", "1000000", "new", "--pool", "much"],
    ["checkpoint", "1000000", "new", "--pool", "", "--leave-running"],
    ["checkpoint", "1000000", "new", "--pool", "256M"],
    ["checkpoint", "1000000", "new", "--no-validate", "--leave-running", "--protocol", "stop"],
    ["checkpoint", "1000000", "new", "--no-prioritise"],
    ["checkpoint", "1000000", "new", "--protocol", "none"],
    ["restore", ""],
    ["restore", "file"],
    ["restore", "nowhere"],
    ["restore", "tcp://"],
    ["restore", "tcp://host/name"],
    ["image", "fetch", "nowhere", "new"],
    ["image", "fetch", "tcp://host:port/name", "new"],
    ["restore", LONG],
    ["pool", "create", "there"],
    ["pool", "create", "there", "--size", "0"],
    ["pool", "create", "there", "--size", "-1"],
    ["pool", "create", "there", "--size", "257"],
    ["pool", "create", "there", "--size", "99999999999"],
    ["pool", "create", "there", "--size", "1", "--name", ""],
    ["pool", "create", "there", "--size", "1", "--name", LONG],
    ["pool", "create", "there", "--size", "1", "--name", NOT_UTF8],
    ["pool", "create", "there", "--size", "1", "--name", "two\nlines"],
    ["pool", "create", NOT_UTF8, "--size", "1"],
    ["pool", "create", "file", "--size", "1"],
    ["pool", "take", ""],
    ["pool", "take", LONG],
    ["pool", "take", NOT_UTF8],
    ["pool", "take", "name", "--timeout", "nan"],
    ["pool", "take", "name", "--timeout", "inf"],
    ["pool", "take", "name", "--timeout", "-1"],
    ["pool", "take", "name", "--timeout", "1e300"],
    ["pool", "take", "name", "--timeout", "soon"],
    ["pool", "drop", ""],
    ["pool", "drop", LONG],
    ["pool", "drop", NOT_UTF8],
    ["status", "more"],
    ["inspect", ""],
    ["verify", ""],
    ["verify", "there", "--threads", "0"],
    ["image", "pin", "file"],
    ["image", "pin", ""],
    ["image", "pin", "there", "--name", ""],
    ["image", "pin", "there", "--name", LONG],
    ["image", "pin", "there", "--name", NOT_UTF8],
    ["image", "unpin", ""],
    ["image", "unpin", LONG],
    ["image", "fetch", "tcp://localhost:1/image", "file"],
    ["image", "fetch", "tcp://localhost:1/image", LONG],
    ["wait", ""],
    ["wait", "file"],
    ["wait", LONG],
    ["wait", "there", "--timeout", "nan"],
    ["wait", "there", "--timeout", "inf"],
    ["wait", "there", "--timeout", "0"],
    ["wait", "there", "--timeout", "-1"],
    ["guard", "true"],
    ["guard", "--images", "", "true"],
    ["guard", "--images", "file", "true"],
    ["guard", "--images", "there", "--interval", "nan", "true"],
    ["guard", "--images", "there", "--interval", "0", "true"],
    ["guard", "--images", "there", "--failure-rate", "nan", "true"],
    ["guard", "--images", "there", "--failure-rate", "inf", "true"],
    ["guard", "--images", "there", "--keep", "0", "true"],
    ["guard", "--images", "there", "--gpus", "0", "true"],
    ["guard", "--images", "there", "--restarts", "-1", "true"],
    ["audit"],
    ["audit", ""],
    ["audit", "no-such-program"],
    ["audit", "--output", "there", "true"],
    ["audit", "--output", "nowhere/file", "true"],
    ["audit", "--limit-launches", "99999999999", "true"],
    ["audit", "--every", "-1", "true"],
    ["audit", "--patience", "99999999999", "true"],
    ["audit", "--device", "other", "true"],
    ["demo", "--iterations", "3"],
    ["demo", "--protocol", "stop", "--restore", "pool"],
    ["bench", "nothing"],
    ["bench", "--python", "/no/such/python", "toggle"],
    ["run"],
    ["run", "--connections", "33", "true"],
    ["doctor", "more"],
    ["nothing"],
]
OTHERS = [
    (3, ["status"]),
    (3, ["pool", "list"]),
    (3, ["pool", "take", "name"]),
    (3, ["pool", "drop", "name"]),
    (3, ["image", "list"]),
    (3, ["image", "unpin", "name"]),
    (3, ["image", "unpin", NOT_UTF8]),  # a directory
    (3, ["wait", "there"]),
    (1, ["inspect", "there"]),
    (1, ["inspect", "nowhere"]),
    (1, ["inspect", LONG]),
    (1, ["verify", "there"]),
    (1, ["verify", "nowhere"]),
    (1, ["image", "fetch", "tcp://localhost:1/image", "new"]),
    (7, ["restore", "there"]),
    (7, ["restore", "tcp://localhost:1/image"]),
    (0, ["bench"]),
    (0, ["--version"]),
    *((0, [command, "--help"]) for command in COMMANDS),
]


@pytest.fixture(autouse=True)
def nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)  # commands hand settings on in it
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("file").touch()
    for name in [name for name in before if name.startswith("PHOS_")]:
        del os.environ[name]
    os.environ |= {"PHOS_SOCKET": str(tmp_path / "phosd.sock"), "PHOS_DEVICE": "software"}
    os.mkdir(NOT_UTF8)
    yield
    os.environ.clear()
    os.environ.update(before)


def call(words: list[str]) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("words", USAGE, ids=lambda words: " ".join(words)[:60].encode("unicode_escape").decode())
def test_what_means_nothing_is_refused(words: list[str]) -> None:
    done = call([str(os.getpid()) if word == "self" else word for word in words])
    assert done.exit_code == 2, f"{done.exception!r}\n{done.output}"
    assert isinstance(done.exception, SystemExit)
    assert done.stderr
    assert not done.stdout
    assert not Path("phosd.log").exists(), "nothing was started"


@pytest.mark.parametrize("name", ["file", "link"])
def test_what_is_no_directory_is_said_to_be_none(name: str) -> None:
    Path("link").symlink_to("nowhere")
    done = call(["image", "fetch", "tcp://localhost:1/image", name])
    assert (done.exit_code, done.stderr) == (
        2,
        f"phos-gpu image: {name} is there, and is no directory: name another for the image.\n",
    )


def test_an_option_that_means_nothing_is_named() -> None:
    done = call(["checkpoint", "1000000", "new", "--pool", "much", "--leave-running"])
    assert "--pool=much is no size" in done.stderr


@pytest.mark.parametrize(("status", "words"), OTHERS, ids=lambda of: str(of)[:60])
def test_the_exit_status_is_the_documented_one(status: int, words: list[str]) -> None:
    done = call(words)
    assert done.exit_code == status, f"{done.exception!r}\n{done.output}"
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert bool(done.stderr) == (status != 0)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (2, ["checkpoint", "pid", "new", "--json"]),
        (2, ["checkpoint", "1000000", "new", "--pool", "much", "--leave-running", "--json"]),
        (2, ["restore", "--json", "nowhere"]),
        (7, ["restore", "--json", "there"]),
        (7, ["restore", "--json", "tcp://localhost:1/image"]),
        (2, ["pool", "create", "there", "--json"]),
        (3, ["pool", "take", "--json", "name"]),
        (3, ["pool", "list", "--json"]),
        (2, ["image", "pin", "--json", "file"]),
        (1, ["image", "fetch", "--json", "tcp://localhost:1/image", "new"]),
        (3, ["image", "list", "--json"]),
        (3, ["status", "--json"]),
        (1, ["inspect", "--json", "there"]),
        (1, ["verify", "--json", "there"]),
        (2, ["guard", "--images", "file", "--json", "true"]),
        (2, ["audit", "--json", "no-such-program"]),
        (2, ["status", "--json", "--no-such-option"]),
        (2, ["checkpoint", "--no-such-option", "1000000", "new", "--json"]),
        (2, ["verify", "there", "--json", "--threads"]),
        (2, ["pool", "take", "--json", "--no-such-option", "name"]),
    ],
    ids=lambda of: str(of)[:60],
)
def test_who_was_to_get_an_object_gets_one_that_says_what_failed(status: int, words: list[str]) -> None:
    done = call(words)
    assert done.exit_code == status, f"{done.exception!r}\n{done.output}"
    said = json.loads(done.stdout)["error"]
    assert said
    assert said in done.stderr


@pytest.mark.parametrize("words", [["audit", "no-such-program", "--json"], ["audit", "--no", "--", "--json"]])
def test_an_option_of_the_program_s_own_is_none_of_the_command_s(words: list[str]) -> None:
    done = call(words)
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize("command", [["checkpoint", "thread", "new"], ["guard", "--images", "new", "thread"]])
def test_a_thread_is_no_process(command: list[str]) -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    number = str(thread.native_id)
    done = call([number if word == "thread" else word for word in command])
    ends.set()
    thread.join()
    wanted = f"There is no process {number}: that is a thread of process {os.getpid()}. Name the process.\n"
    assert (done.exit_code, done.stderr) == (4, f"phos-gpu {command[0]}: {wanted}")
    assert not Path("new").exists()


def test_what_the_kernel_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(os, "open", refuse)
    done = call(["wait", "there"])
    assert (done.exit_code, done.stderr) == (7, "phos-gpu wait: there: Permission denied.\n")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (2, ["--ensure", "--stop"]),
        (2, ["--socket", "there", "--ensure"]),
        (2, ["--socket", "", "--stop"]),
        (2, ["--socket", LONG]),
        (3, ["--stop"]),
        (2, ["--socket", "file/phosd.sock", "--ensure"]),
    ],
)
def test_phosd_says_what_is_wrong(status: int, words: list[str]) -> None:
    done = CliRunner().invoke(phosd, words)
    assert done.exit_code == status, f"{done.exception!r}\n{done.output}"
    assert done.stderr.startswith("phosd: ")


@pytest.mark.parametrize("value", [LONG, "phosd.sock", "/"])
def test_a_socket_that_cannot_be_is_refused(value: str) -> None:
    os.environ["PHOS_SOCKET"] = value
    done = call(["status"])
    assert (done.exit_code, "phos-gpu status: " in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-program", "There is no program 'no-such-program' on the PATH."),
        ("./missing", "There is no program './missing'."),
        ("./text", "'./text' is not executable: chmod +x makes it so, or name the program that reads it before it."),
        ("./folder", "'./folder' is a directory, and no program."),
    ],
)
def test_a_program_that_cannot_be_one_is_told_apart_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").touch()
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        program_of(name)
