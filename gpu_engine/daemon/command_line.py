"""phosd's command line, as click reads it."""

from __future__ import annotations

from pathlib import Path

import click

from phos.gpu_engine.daemon import program


@click.command(name="phosd")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    help="Socket path. Default: PHOS_SOCKET or /run/phos/phosd.sock.",
)
@click.option(
    "--ensure", is_flag=True, help="Start phosd in the background unless it runs, wait until it answers, and exit."
)
@click.option("--stop", is_flag=True, help="Ask the running phosd to end.")
@click.option("--verbose", is_flag=True, help="Log every step.")
def main(path: Path | None, ensure: bool, stop: bool, verbose: bool) -> None:
    """The PhOS daemon: holds the GPU memory of processes under 'phos-gpu run', checkpoints and restores them."""
    program.perform(path, ensure=ensure, stop=stop, verbose=verbose)
