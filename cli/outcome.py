"""What a command has done, told on its standard output."""

from __future__ import annotations

import click

from phos.gpu_engine import standard_streams
from phos.gpu_engine.errors import PhosError


def tell(done: str) -> None:
    """Print it. It stays done if it cannot be told: somebody who saw a failure alone might do it again.

    Raises:
        PhosError: it cannot be written; with what has been done.
        BrokenPipeError: nobody reads it any more.
    """
    try:
        click.echo(done)
    except BrokenPipeError:
        raise
    except OSError as error:
        standard_streams.silence()
        raise PhosError(f"{done}\nThat is done, but standard output did not take it: {error.strerror}.") from error
