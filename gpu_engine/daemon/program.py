"""What phosd is started for: to serve, to see to it that one serves, or to end the one that does."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

from phos.gpu_engine import standard_streams
from phos.gpu_engine.daemon import reach
from phos.gpu_engine.daemon.paths import refuse_unfit, socket_path
from phos.gpu_engine.errors import ExitStatus, PhosError, UsageError


def perform(path: Path | None = None, *, ensure: bool = False, stop: bool = False, verbose: bool = False) -> None:
    """What a command line asks for; ends this process, with a sentence, if it cannot be done."""
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
        _end(str(error), error.exit_status)
    except OSError as error:
        _end(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}.", ExitStatus.FAILED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _end(said: str, status: int) -> None:
    with suppress(OSError):  # nobody reads it
        print(f"phosd: {said}", file=sys.stderr)
    sys.exit(int(status))
