"""``phosd``: the daemon as a program."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phos.gpu_engine import standard_streams
from phos.gpu_engine.daemon import reach
from phos.gpu_engine.daemon.paths import refuse_unfit, socket_path
from phos.gpu_engine.errors import ExitStatus, PhosError, UsageError


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
    standard_streams.occupy()
    try:
        if ensure and stop:
            raise UsageError("--ensure and --stop are two requests: choose one.")
        # A phosd in the background is in a directory of its own.
        path = socket_path() if path is None else path.absolute()
        refuse_unfit(path)
        if ensure:
            reach.ensure(path)
            return
        if stop:
            from phos.gpu_engine.daemon import client

            client.shutdown(path)
            return
        from phos.gpu_engine.daemon import startup  # what it needs takes as long to load as the rest of --ensure

        startup.run(path, verbose=verbose)
    except PhosError as error:
        click.echo(f"phosd: {error}", err=True)
        sys.exit(int(error.exit_status))
    except OSError as error:
        click.echo(f"phosd: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}.", err=True)
        sys.exit(int(ExitStatus.FAILED))


if __name__ == "__main__":
    main(prog_name="phosd")
