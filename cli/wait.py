"""``phos-gpu wait``: until an image is whole."""

from __future__ import annotations

from pathlib import Path

import click

from phos.cli.criu import image_directory
from phos.cli.parameters import SECONDS, Place
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.job_states import SUCCEEDED
from phos.images.errors import ImageError
from phos.images.formats import COMMIT_FILE
from phos.images.reader import Image


@click.command()
@click.argument("image", type=Place(path_type=Path))
@click.option("--restore", is_flag=True, help="Wait for a restore from IMAGE instead of a checkpoint into it.")
@click.option("--timeout", type=SECONDS, default=3600.0, show_default=True, help="Seconds.")
def wait(image: Path, restore: bool, timeout: float) -> None:
    """Wait until the checkpoint being written to IMAGE is committed, or the restore from it computes again."""
    state = client.wait_image(image_directory(image, create=False), restore=restore, timeout=timeout)
    if state.state == "unknown" and (image / COMMIT_FILE).exists() and not restore:
        try:
            Image.open(image).close()  # made before this phosd was started; verify says more
        except ImageError as error:
            raise CheckpointFailed(str(error)) from error
        return
    if state.state == "none":
        return  # the dump had no GPU part: CRIU's exit is all there is to wait for
    if state.error or state.state not in SUCCEEDED:
        raise CheckpointFailed(state.error or f"The job on {image} is {state.state}.")
