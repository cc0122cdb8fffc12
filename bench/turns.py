"""Two processes that are there at the same time and compute in turns, one without and one with the frontend.

Started once, a pair can be compared many times, each time within a fraction of a second, so that what drifts on the
machine hits both alike. The program's end of the conversation is in programs/answering.py and programs/launch_rate.c.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import process
from process import ProcessError

Answers = tuple[list[float], list[float]]
"""What was answered to one question, without and with the frontend."""


def the_processor() -> int:
    """Which one programs keep to that are to keep to one."""
    return max(os.sched_getaffinity(0))


class Answering:
    """A program that prints READY, and then, for each line that it is given, a line of numbers."""

    def __init__(
        self, command: Sequence[str], device: str, errors: Path, *, frontend: bool, processor: int | None = None
    ) -> None:
        """Start it. ``errors``: the file for its stderr; ``processor``: the only one that its threads may run on."""
        self.frontend = frontend
        if frontend:
            command = [process.PHOS_GPU, "run", "--device", device, "--", *command]
        self._command = " ".join(command)
        if processor is not None:
            command = ["taskset", "--cpu-list", str(processor), *command]
        self._errors = errors
        self._unread = b""
        with open(errors, "wb") as file:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                env=None if frontend else process.device_environment(device),
            )
        self.pid = self._child.pid

    def ready(self, timeout: float = 300.0) -> None:
        """Wait until it can be asked. Raises ProcessError if it ends before, or takes longer."""
        while self._line(timeout) != "READY":  # a library may have something to say first
            pass

    def ask(self, question: str, timeout: float = 120.0) -> list[float]:
        """Let it do what `question` says; return the numbers that it answers.

        Raises:
            ProcessError: it ended, took longer than `timeout` seconds, or answered something else.
        """
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{question}\n".encode())
        except BrokenPipeError as error:
            raise ProcessError(f"`{self._command}` ended.{self._tail()}") from error
        answer = self._line(timeout)
        try:
            return [float(word) for word in answer.split()]
        except ValueError as error:
            raise ProcessError(f"`{self._command}` answered '{answer}' to '{question}'.") from error

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and reap it."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(10)  # at the end of its input it ends by itself
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def _line(self, timeout: float) -> str:
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ProcessError(f"`{self._command}` did not answer within {timeout:.0f} s.{self._tail()}")
            piece = os.read(descriptor, 65536)
            if not piece:
                raise ProcessError(f"`{self._command}` ended.{self._tail()}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _tail(self) -> str:
        text = self._errors.read_text(errors="replace")[-2000:].strip()
        return f" Its stderr ends: {text.rpartition(chr(10))[2]}\n{text}"  # results note the first line


class Pair:
    """One program twice, without and with the frontend."""

    def __init__(self, command: Sequence[str], device: str, work: Path, *, one_processor: bool = False) -> None:
        """Start both and wait until both can be asked. ``one_processor``: both keep to the same one."""
        processor = the_processor() if one_processor else None
        self._both: list[Answering] = []
        try:
            for frontend in (False, True):
                errors = work / f"{'with' if frontend else 'without'}.stderr"
                self._both.append(Answering(command, device, errors, frontend=frontend, processor=processor))
            for one in self._both:
                one.ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the one with the frontend."""
        return self._both[1].pid

    def round(self, questions: Sequence[str], number: int) -> list[Answers]:
        """Ask both each question; which goes first alternates with the number of the round."""
        answers = []
        for question in questions:
            order = self._both if number % 2 == 0 else self._both[::-1]
            given = {one.frontend: one.ask(question) for one in order}
            answers.append((given[False], given[True]))
        return answers

    def rounds(self, questions: Sequence[str], count: int, go_on: Callable[[], bool]) -> list[list[Answers]]:
        """Return the answers of as many rounds; of fewer, at least one, where `go_on` says no."""
        answers: list[list[Answers]] = []
        while len(answers) < count and (not answers or go_on()):
            answers.append(self.round(questions, len(answers)))
        return answers

    def close(self) -> None:
        """End both."""
        for one in self._both:
            one.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
