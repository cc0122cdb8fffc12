"""What chooses a checkpoint's protocol and its options: command line, environment, configuration file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phos.cli import checkpoint as command
from phos.cli.checkpoint import checkpoint, choose_protocol
from phos.gpu_engine import configuration
from phos.gpu_engine.cow.settings import DEFAULT_POOL_BYTES, CowSettings, size_of
from phos.gpu_engine.errors import UsageError
from phos.gpu_engine.timeline import Phase, stall_seconds
from tests.unit.packaging_script import packaging_script

VARIABLES = ("PHOS_CONFIG", "PHOS_PROTOCOL", "PHOS_COW_POOL", "PHOS_VALIDATE", "PHOS_PRIORITISE")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside, and none that is left behind."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(configuration, "DEFAULT_PATH", Path("/nonexistent/phos.toml"))


def write(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "phos.toml").write_text(text)
    monkeypatch.setenv("PHOS_CONFIG", str(folder / "phos.toml"))


# Settings of copy-on-write.


def test_nothing_said_is_the_default() -> None:
    assert CowSettings.from_environment({}) == CowSettings(DEFAULT_POOL_BYTES, True, True)


def test_the_environment_is_read() -> None:
    said = {"PHOS_COW_POOL": "0", "PHOS_VALIDATE": "off", "PHOS_PRIORITISE": "no"}
    assert CowSettings.from_environment(said) == CowSettings(0, False, False)


def test_a_checkpoint_changes_only_what_it_names() -> None:
    settings = CowSettings(1 << 20, False, True)
    assert settings.changed(pool="256M") == CowSettings(256 << 20, False, True)
    assert settings.changed(validate="on", prioritise="off") == CowSettings(1 << 20, True, False)


@pytest.mark.parametrize(
    "text, size",
    [
        ("0", 0),
        ("4096", 4096),
        ("64k", 65536),
        ("256M", 256 << 20),
        ("1.5G", 3 << 29),
        ("2GiB", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_of("X", text) == size


@given(st.integers(0, 1 << 50))
def test_every_whole_number_is_a_size(number: int) -> None:
    assert size_of("X", str(number)) == number
    assert size_of("X", f"{number}K") == number * 1024


@pytest.mark.parametrize("text", ["", "-1", "2X", "G", "1e9", "two", "0x10", "1 0"])
def test_what_is_no_size_is_said(text: str) -> None:
    with pytest.raises(UsageError, match=r"PHOS_COW_POOL=.* is no size"):
        size_of("PHOS_COW_POOL", text)


@pytest.mark.parametrize("name", ["PHOS_VALIDATE", "PHOS_PRIORITISE"])
def test_what_is_no_switch_is_said(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=maybe is neither on nor off"):
        CowSettings.from_environment({name: "maybe"})


# The configuration file.


def test_without_a_file_nothing_is_set() -> None:
    assert configuration.read() == {}


def test_all_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 'protocol = "cow"\ncow-pool = 0\nvalidate = false\nprioritise = true\n', monkeypatch)
    assert configuration.read() == {
        "PHOS_PROTOCOL": "cow",
        "PHOS_COW_POOL": "0",
        "PHOS_VALIDATE": "off",
        "PHOS_PRIORITISE": "on",
    }


@pytest.mark.parametrize(
    "text, said",
    [
        ("protocol = cow", "is not TOML"),
        ('protocol = "fast"', 'protocol must be "stop" or "cow"'),
        ("protocol = 1", "protocol must be"),
        ("cow-pool = true", "cow-pool must be a size"),
        ('cow-pool = "much"', "phos.toml: cow-pool=much is no size"),
        ("pin-limit = -1", "phos.toml: pin-limit=-1 is no size"),
        ('validate = "on"', "validate must be true or false"),
        ('colour = "red"', "the key 'colour', which means nothing"),
    ],
)
def test_what_a_file_says_wrongly_is_said(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, text, monkeypatch)
    with pytest.raises(UsageError, match=said):
        configuration.read()


def test_a_file_that_is_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_CONFIG", "/nonexistent/other.toml")
    with pytest.raises(UsageError, match="There is no configuration file"):
        configuration.read()


# The order of precedence.


def test_the_default_follows_from_leave_running() -> None:
    assert choose_protocol(None, leave_running=True) == "cow"
    assert choose_protocol(None, leave_running=False) == "stop"


def test_option_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 'protocol = "stop"', monkeypatch)
    assert choose_protocol(None, leave_running=True) == "stop"
    monkeypatch.setenv("PHOS_PROTOCOL", "cow")
    assert choose_protocol(None, leave_running=False) == "cow"
    assert choose_protocol("stop", leave_running=True) == "stop"


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_PROTOCOL", "fast")
    with pytest.raises(UsageError, match="PHOS_PROTOCOL=fast"):
        choose_protocol(None, leave_running=True)


def test_options_without_a_meaning_do_nothing() -> None:
    result = CliRunner().invoke(checkpoint, ["1", "/nonexistent/image", "--pool", "lots"])
    assert isinstance(result.exception, UsageError)
    assert not Path("/nonexistent").exists()


# The stall, from the phases that phosd reports.


def test_the_stall_is_from_detach_to_attach() -> None:
    phases = [
        Phase("map blocks", 0.0, 0.3, False),
        Phase("quiesce", 0.3, 0.2, False),  # the GPU computes what is queued
        Phase("detach", 0.5, 0.1, False),
        Phase("GPU data", 0.6, 9.0, True),
        Phase("attach", 1.0, 0.25, False),
        Phase("wait for GPU data", 1.25, 8.0, False),
    ]
    assert stall_seconds(phases) == pytest.approx(0.75)


def test_the_stall_of_a_process_without_the_frontend() -> None:
    phases = [Phase("driver checkpoint", 1.0, 2.0, False), Phase("driver restore", 5.0, 1.0, False)]
    assert stall_seconds(phases) == pytest.approx(5.0)
    assert stall_seconds([]) == 0.0


def test_a_stall_that_was_measured_as_a_whole() -> None:
    phases = [
        Phase("quiesce", 1.0, 0.1, False),
        Phase("stall", 1.0, 0.3, True),
        Phase("GPU data", 1.2, 9.0, True),
        Phase("attach", 1.3, 20.0, False),
    ]
    assert stall_seconds(phases) == pytest.approx(0.3)


# The launcher reads the file as well.


def test_the_launcher_fills_in_what_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 'protocol = "cow"\nvalidate = false', monkeypatch)
    monkeypatch.setenv("PHOS_VALIDATE", "on")
    assert packaging_script("supervise").configure() == ""
    assert os.environ["PHOS_PROTOCOL"] == "cow"
    assert os.environ["PHOS_VALIDATE"] == "on"


def test_the_launcher_says_what_is_wrong_before_criu_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "protocol = 1", monkeypatch)
    started = tmp_path / "started"
    assert (
        packaging_script("supervise").main(["supervise.py", "dump", str(tmp_path), "phosd", "touch", str(started)]) == 1
    )
    assert "criu: " in (said := capfd.readouterr().err)
    assert "protocol must be" in said
    assert not started.exists()


# What became of it.


def test_a_checkpoint_is_done_although_phosd_has_ended_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it could say besides is not there."""
    monkeypatch.setenv("PHOS_SOCKET", str(tmp_path / "phosd.sock"))
    monkeypatch.setattr(command.reach, "ensure", lambda **_: None)
    monkeypatch.setattr(command, "_require_cuda", lambda _pid: None)
    monkeypatch.setattr(command, "run_dump", lambda *_: (0, "", 0))
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            done = CliRunner().invoke(checkpoint, [str(process.pid), str(tmp_path / "image"), "--json"])
        finally:
            process.kill()
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert (said["pid"], said["stall"], said["warnings"]) == (process.pid, None, [])
