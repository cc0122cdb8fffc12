"""A server that is checkpointed while people ask it: nobody waits in vain, and its images go on from where they are."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.integration.site import PATIENCE, Site, wait_until

SERVES = Path(__file__).parent / "programs" / "serves.py"
# A connection that the server has not accepted yet need not be in the image: who made it is outside.
OPTIONS = ("--tcp-established", "--skip-in-flight", "--network-lock", "skip")
PEOPLE = 4


class Person:
    """Asks again and again; a new connection for every few questions."""

    def __init__(self, port: int) -> None:
        self.answers: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.answers += ask(self._port, 5)
        except Exception as error:
            self.error = error

    def leave(self) -> None:
        """Have the last answer, and go."""
        self._stop.set()
        self._thread.join()


def ask(port: int, times: int) -> list[tuple[int, int]]:
    """What is answered to so many questions: their number and what the GPU's memory held."""
    found = []
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection, connection.makefile("rw") as lines:
        for _ in range(times):
            lines.write("next\n")
            lines.flush()
            number, word = lines.readline().split()
            found.append((int(number), int(word)))
    return found


def expected(number: int) -> int:
    """The word after so many questions."""
    word = 0
    for _ in range(number):
        word = (word * 1664525 + 1013904223) % (1 << 32)
    return word


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_a_server_is_checkpointed_while_it_is_asked(site: Site, protocol: str) -> None:
    program = site.start(sys.executable, str(SERVES))
    wait_until(lambda: bool(program.lines()) or not program.alive(), "the server")
    port = int(program.lines()[0].split()[1])
    people = [Person(port) for _ in range(PEOPLE)]
    try:
        bounds = []
        for number in range(3):
            before = max((answer[0] for person in people for answer in person.answers), default=0)
            image = site.image(f"image-{number}")
            site.dump(program, image, "--leave-running", *OPTIONS, PHOS_PROTOCOL=protocol)
            bounds.append(before)
            wait_until(lambda: all(person.answers or person.error for person in people), "answers")
    finally:
        for person in people:
            person.leave()
    assert [person.error for person in people] == [None] * PEOPLE
    answers = sorted(answer for person in people for answer in person.answers)
    assert answers == [(number, expected(number)) for number in range(1, len(answers) + 1)]
    tree = psutil.Process(program.pid).children(recursive=True)
    for each in (program, *tree):
        os.kill(each.pid, signal.SIGKILL)
    site.gone(program)
    for each in tree:
        site.freed(each.pid)
    site.restore(image, *OPTIONS)
    ((number, word),) = ask(port, 1)
    assert bounds[-1] < number <= len(answers) + 1
    assert word == expected(number)
