"""The command group, and how failures become messages and exit statuses."""

from __future__ import annotations

import importlib
import io
import json
import signal
import sys
from typing import Any

import click

from phos.cli.launched import Interrupted
from phos.cli.parameters import AS_JSON
from phos.cli.text import printable_lines
from phos.gpu_engine import standard_streams
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


WORDS = "phos.words"
"""In a context's ``meta``: the command line, as it was given."""


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)  # what is behind the command's name is parsed by the command, and consumed
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a file is not always text, nor is all text in a locale
            sys.stdout.reconfigure(errors="backslashreplace")
        return super().main(*args, **extra)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except OSError as error:  # --help and --version print here
            raise _ended(info_name or "", *_failed_call(error)) from None

    def invoke(self, ctx: click.Context) -> Any:
        said = ""
        try:
            result = super().invoke(ctx)
            standard_streams.flush()
            return result
        except click.UsageError as error:
            if AS_JSON not in ctx.meta and _names_json(ctx):
                ctx.meta[AS_JSON] = True
            _say_as_json(ctx, error.format_message())
            raise
        except (PhosError, Interrupted) as error:
            said, status = str(error), int(error.exit_status)
        except OSError as error:
            said, status = _failed_call(error)
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        _say_as_json(ctx, said or "It was interrupted.")
        raise _ended(f"phos-gpu {ctx.invoked_subcommand}", said, status)


def _names_json(context: click.Context) -> bool:
    """Whether --json is on a command line that was not read to its end, as with an unknown option."""
    command: click.Command | None = context.command
    words = list(context.meta[WORDS])
    while isinstance(command, click.Group) and words:
        command = command.get_command(context, words.pop(0))
    own = words[: words.index("--")] if "--" in words else words
    return command is not None and "--json" in own and any("--json" in option.opts for option in command.params)


def _say_as_json(context: click.Context, said: str) -> None:
    """To who was to get an object: one that says what failed."""
    if context.meta.get(AS_JSON):
        try:
            click.echo(json.dumps({"error": said}))
        except OSError:  # the exit status still tells
            standard_streams.silence()


def _ended(command: str, said: str, status: int) -> SystemExit:
    try:
        click.echo(f"{command}: {printable_lines(said)}" if said else "", err=True, nl=bool(said))
    except OSError:
        standard_streams.silence(messages=True)
    return SystemExit(status)


def _failed_call(error: OSError) -> tuple[str, int]:
    """What to say of a call that the kernel refused, and the exit status: mostly it is output that nobody takes."""
    nobody_reads = standard_streams.nobody_reads()
    standard_streams.silence()
    if isinstance(error, BrokenPipeError) and nobody_reads:  # as of a program that is ended by it
        return "", 128 + signal.SIGPIPE
    if isinstance(error, (BrokenPipeError, ConnectionResetError)):
        return "phosd ended before it answered.", int(ExitStatus.NO_DAEMON)
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}.", int(ExitStatus.FAILED)


def _show_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from phos.gpu_engine.installation import version

        click.echo(f"phos-gpu, version {version()}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Checkpoint and restore CUDA processes. Exit statuses: docs/cli.md."""
