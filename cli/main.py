"""The command group, and how failures become messages and exit statuses."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any

import click

from phos.cli.launched import Interrupted
from phos.gpu_engine.errors import ExitStatus, PhosError

COMMANDS = {
    "run": "Run a program under the frontend.",
    "checkpoint": "Dump a process tree with its GPU memory.",
    "restore": "Restore a process tree from an image.",
    "pool": "Keep processes of an image restored and stopped, to be taken at once.",
    "status": "Show phosd's GPUs, processes and jobs.",
    "inspect": "Show what is in an image.",
    "verify": "Check every hash of an image.",
    "image": "Hold images in pinned memory.",
    "wait": "Wait until an image is whole, or a restored process computes.",
    "guard": "Checkpoint a job again and again, and bring it back when it fails.",
    "audit": "Compare what a program's kernels write with what was predicted.",
    "demo": "Checkpoint, kill and restore an example, and compare its result.",
    "bench": "Run the benchmarks.",
    "doctor": "Check this machine.",
}
"""Every subcommand lives in the file of its name; what --help shows is here, so that it loads none of them."""


class LazyGroup(click.Group):
    """Loads a subcommand's file when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"phos.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PhosError, Interrupted) as error:
            click.echo(f"phos-gpu {ctx.invoked_subcommand}: {error}", err=True)
            sys.exit(int(error.exit_status))
        except OSError as error:  # a directory that may not be read, a disk that is full
            place = f"{error.filename}: " if error.filename else ""
            click.echo(f"phos-gpu {ctx.invoked_subcommand}: {place}{error.strerror or error}.", err=True)
            sys.exit(int(ExitStatus.FAILED))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="phos", prog_name="phos-gpu")
def main() -> None:
    """Checkpoint and restore CUDA processes. Exit statuses: docs/cli.md."""
