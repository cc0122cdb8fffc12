"""`phos-gpu verify`: is every byte of an image the one that was written?"""

from __future__ import annotations

import json
import sys
import time

import click

from phos.cli.inspect import image_argument, summary_option
from phos.cli.refusal import refuse
from phos.cli.text import printable, size_text
from phos.images.errors import ImageError
from phos.images.reader import Image
from phos.images.summary import SCHEMA


class _Lines:
    """Progress where there is no terminal: a line on stderr at every tenth, but none for what is done in a moment."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 2.0
        self._tenth = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if tenth > self._tenth and time.monotonic() >= self._next:
            click.echo(f"checked {size_text(done)} of {size_text(total)}", err=True)
            self._tenth = tenth


def _check(image: Image, threads: int | None) -> tuple[list[str], int]:
    """Problems, and how many bytes were checked."""
    total = 0
    if not sys.stderr.isatty():
        lines = _Lines()

        def report(done: int, of: int) -> None:
            nonlocal total
            total = of
            lines(done, of)

        return image.verify(report, threads), total
    # Here, because importing it takes as long as checking a small image.
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from phos.cli.console import Console

    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def show(done: int, of: int) -> None:
            nonlocal total
            total = of
            bar.update(task, completed=done, total=of)

        return image.verify(show, threads), total


@click.command("verify")
@image_argument
@summary_option
@click.option("--threads", type=click.IntRange(1, 256), help="How many threads read and hash; default: one a core.")
def verify(image: str, as_json: bool, threads: int | None) -> None:
    """Check every hash of the image set in directory IMAGE: PhOS's files and CRIU's.

    Lists every problem, with the file, the place in it, and whose buffer it hits. Changes nothing.

    \b
    Exit status: 0  whole: every byte is the one that was written
                 1  there is no image, or it is foreign, incomplete or damaged
                 2  wrong usage
    """
    began = time.monotonic()
    try:
        with Image.open_damaged(image) as opened:
            problems, size = _check(opened, threads)
            path = str(opened.path)
    except ImageError as error:
        refuse("verify", error, as_json)
        return
    seconds = time.monotonic() - began
    if as_json:
        result = {"schema": SCHEMA, "path": path, "complete": not problems, "problems": problems}
        click.echo(json.dumps({**result, "bytes_checked": size, "seconds": round(seconds, 3)}, indent=2))
    else:
        for problem in problems:
            click.echo(printable(problem))
        verdict = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "whole"
        click.echo(f"{path}: {verdict} ({size_text(size)} checked in {seconds:.1f} s)")
    if problems:
        sys.exit(1)
