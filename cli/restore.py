"""``phos-gpu restore``: criu restore with the plugin, progress, and one message when it fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from phos.cli.criu import image_directory, run_criu
from phos.cli.inspect import refuse
from phos.cli.progress import ImageProgress
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import RestoreFailed
from phos.images.errors import ImageError
from phos.images.reader import Image


@click.command()
@click.argument("image", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def restore(image: Path, as_json: bool) -> None:
    """Restore the processes in the directory IMAGE; returns when they compute again. They run in the background."""
    began = time.perf_counter()
    directory = image_directory(image, create=False)
    try:
        with Image.open(directory) as opened:
            pids = [process.pid for process in opened.inventory.processes]
    except ImageError as error:
        refuse("restore", error, as_json)
    client.ensure()
    with ImageProgress(directory, restore=True, quiet=as_json):
        status, errors = run_criu(["restore", "--restore-detached", "--shell-job"], directory, "restore.log")
    if status != 0:
        raise RestoreFailed(
            f"The image in {directory} could not be restored; nothing of it was left running.\n{errors}\n"
            f"CRIU's log: {directory / 'restore.log'}"
        )
    seconds = time.perf_counter() - began
    if as_json:
        click.echo(json.dumps({"pids": pids, "image": str(directory), "seconds": round(seconds, 4)}))
    else:
        click.echo(f"Restored process {', '.join(map(str, pids))} from {directory} ({seconds:.2f} s).")
