"""What the start of a command, and of phosd, does not load: users wait for it, and tests start thousands of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEVER = {"importlib.metadata", "rich"}
NO_ANALYSIS = {"elftools", "lz4", "zstandard", "phos.gpu_engine.spec.analysis", "phos.gpu_engine.spec.twins"}
PHOSD = """
from phos.gpu_engine.daemon import __main__, startup
startup.load_driver("software")
from phos.gpu_engine.daemon import server
"""


def loaded(words: list[str], folder: Path) -> set[str]:
    """The modules that a Python loads while it works, whatever comes of it; no phosd runs."""
    environment = {**os.environ, "PHOS_SOCKET": str(folder / "phosd.sock"), "PHOS_DEVICE": "software"}
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    ("words", "wanted", "unwanted"),
    [
        (["-m", "phos.gpu_engine.daemon", "--stop"], "phos.gpu_engine.daemon.client", {"click", "logging"}),
        (["-m", "phos.cli", "--version"], "click", {"google.protobuf", "cuda"}),
        (["-m", "phos.cli", "status"], "phos.gpu_engine.daemon.client", {"phos.images.remote", "cuda"}),
        (
            ["-m", "phos.cli", "image", "list", "--json"],
            "phos.gpu_engine.daemon.client",
            {"phos.images.remote", "cuda"},
        ),
        (["-m", "phos.cli", "inspect", "--json", "."], "phos.images.summary", {"cuda"}),
        (["-m", "phos.cli", "verify", "."], "phos.images.summary", {"cuda"}),
        (["-c", "import phos.gpu_engine.spec.worker"], "phos.gpu_engine.spec.cache", NO_ANALYSIS),
        (["-c", PHOSD], "phos.gpu_engine.daemon.server", {"click", *NO_ANALYSIS}),
    ],
    ids=["phosd --stop", "--version", "status", "image list", "inspect", "verify", "analysis", "phosd"],
)
def test_a_start_loads_nothing_slow(words: list[str], wanted: str, unwanted: set[str], tmp_path: Path) -> None:
    modules = loaded(words, tmp_path)
    assert wanted in modules
    assert not modules & (NEVER | unwanted)
