"""`phos-gpu inspect`: what is in an image, for people and for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from phos.cli.parameters import Place, json_option
from phos.cli.refusal import refuse
from phos.cli.text import printable
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.reader import METADATA_MOST, Image
from phos.images.summary import summarise

image_argument = click.argument("image", type=Place())
summary_option = json_option("Print one JSON object instead (schema in the docs).")


@click.command("inspect")
@image_argument
@summary_option
@click.option("--buffers", is_flag=True, help="List all buffers instead of the largest ten.")
@click.option("--decode", is_flag=True, help="IMAGE is one of PhOS's own .img files: print its messages as JSON.")
def inspect(image: str, as_json: bool, buffers: bool, decode: bool) -> None:
    """Show what is in the image set in directory IMAGE.

    Processes, GPUs, buffers by size, what was saved by whom, and how long it took. Needs no GPU, no phosd and no
    privileges beyond reading the files; reads none of the data (`phos-gpu verify` does).

    \b
    Exit status: 0  the image is complete, as far as sizes and metadata tell
                 1  there is no image, or it is foreign, incomplete or damaged
                 2  wrong usage
    """
    try:
        if decode:
            click.echo(json.dumps(decode_file(image), indent=2))
            return
        with Image.open_damaged(image) as opened:
            summary = summarise(opened, all_buffers=buffers)
    except ImageError as error:
        refuse("inspect", error, as_json)
        return
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        from phos.cli.console import Console
        from phos.cli.inspect_tables import render

        console = Console(highlight=False)
        with console.capture() as capture:
            for part in render(summary, buffers):
                console.print(part)
        for line in capture.get().splitlines():
            click.echo(line.rstrip())
    if not summary["complete"]:
        for problem in summary["problems"]:
            click.echo(f"phos-gpu inspect: {printable(problem)}", err=True)
        sys.exit(1)


def decode_file(path: str) -> dict[str, Any]:
    """The messages of one of our files; ImageError if it is none or damaged."""
    if os.path.isdir(path):
        ours = ", ".join(f.file for f in formats.FORMATS)
        raise ImageError(f"{path} is a directory; --decode wants one of the files in it ({ours})")
    try:
        with open(path, "rb") as file:
            formats.format_of(file.read(8), path)  # before all of a data file is read
            size = os.fstat(file.fileno()).st_size
            if size > METADATA_MOST:
                raise ImageError(f"{path} has {size} bytes: PhOS writes no such file")
            file.seek(0)
            raw = file.read()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}") from error
    return formats.decode(raw, path)
