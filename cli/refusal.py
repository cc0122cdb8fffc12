"""What a command says of an image that is bad."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

import click

from phos.cli.text import printable_lines
from phos.gpu_engine.errors import ExitStatus
from phos.images.errors import ImageError
from phos.images.summary import SCHEMA


def refuse(command: str, error: ImageError, as_json: bool, status: int = ExitStatus.BAD_IMAGE) -> NoReturn:
    """Say why an image is bad, on stderr, and if asked as JSON on stdout; and end with an exit status."""
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "complete": False, "error": str(error), "problems": error.problems}))
    click.echo(f"phos-gpu {command}: {printable_lines(str(error))}", err=True)
    sys.exit(int(status))
