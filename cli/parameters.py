"""What the words of a command line may be: numbers that the kernel and phosd have room for, names, places.

Whatever does not fit is refused with a sentence and status 2 before anything is done. Imports nothing slow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import click

from phos.gpu_engine.errors import UsageError

AS_JSON = "phos.as_json"
"""In a context's ``meta``: the command was given --json, so that what fails is said on stdout, too (main.py)."""


def _note(context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    context.meta[AS_JSON] = value
    return value


def json_option(text: str = "Print one JSON object instead.") -> Callable[[Any], Any]:
    """The option --json. It is looked at before others, which may have no meaning."""
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=_note, help=text)


PID = click.IntRange(1, 1 << 22)
"""Of a process: what the kernel gives at most (PID_MAX_LIMIT)."""

COUNT = click.IntRange(0, (1 << 32) - 1)
"""For a uint32 of proto/wire.proto."""

NAME_BYTES = 255
PATH_BYTES = 4095


class Number(click.ParamType):
    """A number that is one: more than 0 (or 0 as well), and at most as much as makes sense."""

    name = "float"

    def __init__(self, most: float, *, zero: bool = False) -> None:
        self._most, self._zero = most, zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number.", param, ctx)
        least = number >= 0 if self._zero else number > 0
        if not least or not number <= self._most or not math.isfinite(number):
            self.fail(
                f"{value} is not {'at least' if self._zero else 'more than'} 0, and at most {self._most:g}.", param, ctx
            )
        return number


LONGEST_SECONDS = 1e8
"""Three years: timers have room for more, and nobody waits so long."""

SECONDS = Number(LONGEST_SECONDS)
SECONDS_OR_NONE = Number(LONGEST_SECONDS, zero=True)
RATE = Number(1e6)


class Text(click.ParamType):
    """Some text that phosd can be told, and shown to people: UTF-8, nothing that is not printed, not too long."""

    name = "text"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        problem = unfit(str(value), self._most)
        if problem:
            self.fail(problem, param, ctx)
        return str(value)


def unfit(text: str, most: int) -> str:
    """What is wrong with it as a name of so many bytes; nothing if it will do."""
    if not text:
        return "It is empty."
    if not text.isprintable():  # also what was no UTF-8
        return f"{text.encode('unicode_escape', 'replace').decode('ascii')} is not printable UTF-8."
    if len(text.encode()) > most:
        return f"It has {len(text.encode())} bytes; {most} is the most."
    return ""


class NameOrPath(Text):
    """A pool's name, or an image's path, which has a slash and becomes absolute: phosd is in another directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        return os.path.abspath(text) if "/" in text else text


class NameOrDirectory(NameOrPath):
    """Likewise, or a directory that there is, whatever its name is made of: as it was given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value) if os.path.isdir(value) else super().convert(value, param, ctx)


class Move(click.ParamType):
    """OLD=NEW: which GPU here takes the place of which one of an image's; phosd knows what there is."""

    name = "OLD=NEW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from phos.gpu_engine.restore.gpu_moves import read_moves  # here, for it is seldom asked for

        try:
            read_moves(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def gpu_option() -> Callable[[Any], Any]:
    """The option --gpu of what restores."""
    return click.option(
        "--gpu",
        "gpus",
        type=Move(),
        multiple=True,
        help="What was on the image's GPU OLD comes to NEW, a number or UUID of phosd's ('phos-gpu status'). "
        "May be repeated. Default: PHOS_RESTORE_GPUS; else each stays on its GPU, or takes another of the same model.",
    )


NAME = Text(NAME_BYTES)
NAME_OR_PATH = NameOrPath(PATH_BYTES)
NAME_OR_DIRECTORY = NameOrDirectory(PATH_BYTES)


class Place(click.Path):
    """A path; the empty one is a mistake, an unset variable of a script usually, and not the directory one is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("The path is empty.", param, ctx)
        return super().convert(value, param, ctx)
