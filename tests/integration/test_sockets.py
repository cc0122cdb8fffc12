"""Programs with TCP sockets: what CRIU does, and what it needs of us on newer kernels (socket_options.c)."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.site import Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "tcp_connection.py"

# Other packets need not be held back: both ends are in the image.
OPTIONS = ("--tcp-established", "--network-lock", "skip")


def test_a_listener_and_a_connection_come_back(site: Site) -> None:
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAM), str(go))
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    site.dump(program, image, *OPTIONS)
    site.restore(image, *OPTIONS)
    go.touch()
    assert program.wait_result() == "on-its-way,hello,same"


def test_a_connection_is_refused_unless_asked_for(site: Site) -> None:
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAM), str(go))
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    refused = site.dump(program, image, check=False)
    assert refused.returncode != 0
    assert "--tcp-established" in (image / "dump.log").read_text(errors="replace")
    go.touch()
    assert program.wait_result() == "on-its-way,hello,same"
