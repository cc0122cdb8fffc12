"""``phos-gpu pool``: processes of an image, restored up to the closed gate, to be taken at once (docs/pool.md)."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phos.cli.outcome import tell
from phos.cli.parameters import NAME, NAME_BYTES, NAME_OR_PATH, SECONDS_OR_NONE, Place, gpu_option, json_option, unfit
from phos.cli.text import printable, printable_lines, size_text
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client, reach, wire
from phos.gpu_engine.errors import DaemonUnavailable, ExitStatus, PhosError, RestoreFailed, UsageError

if TYPE_CHECKING:
    from rich.table import Table

POLL_SECONDS = 0.05

ANSWER_SECONDS = 600.0
"""How long phosd may take to look through an image, or to end the processes of a pool."""


@click.group()
def pool() -> None:
    """Keep processes of an image restored up to the closed gate, stopped; taking one takes milliseconds."""


@pool.command()
@click.argument("image", type=Place(path_type=Path))
@click.option("--size", type=click.IntRange(1, 256), required=True, help="How many processes to keep parked.")
@click.option("--name", type=NAME, help="What to call the pool. Default: the image directory's name.")
@click.option("--lazy", type=click.Choice(["strict", "fast"]), help="How memory comes after a take (docs/restore.md).")
@gpu_option()
@click.option("--no-wait", is_flag=True, help="Return before the processes are parked.")
@json_option()
def create(
    image: Path, size: int, name: str | None, lazy: str | None, gpus: tuple[str, ...], no_wait: bool, as_json: bool
) -> None:
    """Park SIZE processes from the directory IMAGE, and from then on another for each that is taken.

    Returns when all are parked. If one cannot be, says why and returns; phosd tries again from time to time.
    """
    from phos.cli.criu import image_directory  # here, because `take` is to be quick

    began = time.perf_counter()
    directory = image_directory(image, create=False)
    called = name or os.path.basename(os.path.realpath(directory))
    if problem := unfit(called, NAME_BYTES):
        raise UsageError(f"The directory's name is not fit to be the pool's: {problem} Give --name.")
    reach.ensure()
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        config = os.environ.get("CRIU_CONFIG_FILE", "")
        wanted = wire_pb2.PoolCreate(name=called, size=size, lazy=lazy or "")
        wanted.gpus = ",".join(gpus) or os.environ.get("PHOS_RESTORE_GPUS", "")
        wanted.criu_config = os.path.abspath(config) if config else ""
        _ask(pool_create=wanted, descriptors=[descriptor])
    finally:
        os.close(descriptor)
    made = _find(called)
    while not no_wait and made.state == "filling":
        time.sleep(POLL_SECONDS)
        made = _find(called)
    if made.error and not made.parked:
        _ask(pool_drop=wire_pb2.PoolDrop(name=called))
        raise RestoreFailed(f"No process of {directory} could be parked; there is no pool. {made.error}")
    seconds = time.perf_counter() - began
    if as_json:
        tell(json.dumps(_plain(made) | {"seconds": round(seconds, 4)}))
    elif no_wait:
        tell(f"Pool {called} is being filled; 'phos-gpu pool list' shows how far it is.")
    else:
        tell(f"Pool {called} of {directory}: {_parked(made)} of {size} processes are parked ({seconds:.2f} s).")
    if made.error:
        click.echo(f"Not all could be parked; phosd goes on trying. {printable_lines(made.error)}", err=True)
        raise SystemExit(int(ExitStatus.FAILED))


@pool.command()
@click.argument("name", type=NAME_OR_PATH)
@click.option("--eager", is_flag=True, help="Let it compute only when all of its GPU memory is there.")
@click.option("--no-wait", is_flag=True, help="If no process is parked, fail at once.")
@click.option(
    "--timeout",
    type=SECONDS_OR_NONE,
    default=60.0,
    show_default=True,
    help="How long to wait for a parked process; seconds.",
)
@click.option("--quick", is_flag=True, help="Return as soon as it computes, not only when all of its memory is there.")
@json_option()
@click.pass_obj
def take(asked: int | None, name: str, eager: bool, no_wait: bool, timeout: float, quick: bool, as_json: bool) -> None:
    """Open one process of the pool NAME (or of the only pool of the image NAME). It runs in the background."""
    # packaging/take.py may have asked already; `asked` is its connection.
    with reach.connect() if asked is None else socket.socket(fileno=asked) as connection:
        if asked is None:
            request = wire_pb2.PoolTake(name=name, eager=eager, wait_s=0.0 if no_wait else timeout)
            wire.send(connection, wire_pb2.Envelope(id=1, pool_take=request))
        taken = _receive(connection)
        if not as_json:
            tell(f"Process {', '.join(map(str, taken.pids))} computes ({taken.attached * 1e3:.1f} ms).")
        while not quick and not taken.final:
            taken = _receive(connection)
    if as_json:
        tell(json.dumps(_times(taken)))
    elif not quick:
        if taken.first_kernel:
            click.echo(f"First kernel after {taken.first_kernel * 1e3:.1f} ms.")
        click.echo(f"Last byte of {size_text(taken.bytes)} after {taken.last_byte:.3f} s.")


def _receive(connection: Any) -> wire_pb2.PoolTaken:
    answer = wire.receive(connection)
    if answer is None:
        raise DaemonUnavailable("phosd ended while a process was being taken; the process has ended with it.")
    taken: wire_pb2.PoolTaken = answer[0].pool_taken
    if answer[0].done.error:
        raise PhosError(answer[0].done.error)
    if taken.error:
        raise RestoreFailed(taken.error)
    return taken


def _times(taken: wire_pb2.PoolTaken) -> dict[str, Any]:
    window = dict(taken.window)
    said: dict[str, Any] = {
        "pool": taken.pool,
        "image": taken.image,
        "pids": list(taken.pids),
        "began": taken.began,
        "waited_for_process": round(taken.waited, 4),
        "attached": round(taken.attached, 4),
    }
    if taken.final:
        said |= {
            "first_kernel": round(taken.first_kernel, 4) if taken.first_kernel else None,
            "last_byte": round(taken.last_byte, 4),
            "bytes": taken.bytes,
            "on_demand_bytes": window.get("on_demand_bytes", 0),
            "waits": window.get("waits", 0) + window.get("anything", 0),
            "waited": round(window.get("wait_ns", 0) / 1e9, 4),
        }
    return said


@pool.command(name="list")
@json_option()
def list_pools(as_json: bool) -> None:
    """Show the pools, and what each parked process costs."""
    pools = client.status().pools
    if as_json:
        click.echo(json.dumps({"pools": [_plain(one) for one in pools]}, indent=2))
        return
    if not pools:
        click.echo("There is no pool. Make one with 'phos-gpu pool create IMAGE --size N'.")
        return
    from rich.table import Table

    from phos.cli.console import Console

    console = Console()
    console.print(pools_table(pools))
    columns = ("Pool", "Pid", "State", "GPU memory", "Host memory", "Parked in")
    parked = Table(*columns, title="Processes", title_justify="left")
    for one in pools:
        for process in one.parked:
            parked.add_row(
                printable(one.name),
                " ".join(map(str, process.pids)),
                process.state,
                size_text(process.gpu_bytes),
                size_text(process.host_bytes),
                f"{process.seconds:.2f} s" if process.seconds else "-",
            )
    console.print(parked)


def pools_table(pools: Any) -> Table:
    """For ``pool list`` and ``phos-gpu status``."""
    from rich.table import Table

    table = Table("Pool", "Image", "State", "Parked", "Taken", "Opens to", "Error", title="Pools", title_justify="left")
    for one in pools:
        table.add_row(
            printable(one.name),
            printable(one.image),
            one.state,
            f"{_parked(one)} of {one.size}",
            str(one.taken),
            size_text(one.bytes),
            printable_lines(one.error),
        )
    return table


@pool.command()
@click.argument("name", type=NAME_OR_PATH)
def drop(name: str) -> None:
    """End the parked processes of the pool NAME, and refill it no more. Processes that were taken run on."""
    _ask(pool_drop=wire_pb2.PoolDrop(name=name))
    tell(f"Pool {name} is gone.")


def _parked(one: wire_pb2.Status.Pool) -> int:
    return sum(process.state == "parked" for process in one.parked)


def _find(name: str) -> wire_pb2.Status.Pool:
    for one in client.status().pools:
        if one.name == name:
            return one
    raise RestoreFailed(f"Pool {name} was dropped before it was full.")


def _ask(descriptors: list[int] | None = None, **body: object) -> None:
    answer = client.request(None, descriptors, timeout=ANSWER_SECONDS, **body)
    if answer.done.error:
        raise RestoreFailed(answer.done.error)


def _plain(one: wire_pb2.Status.Pool) -> dict[str, Any]:
    return {
        "name": one.name,
        "image": one.image,
        "size": one.size,
        "state": one.state,
        "error": one.error,
        "taken": one.taken,
        "bytes": one.bytes,
        "since": one.since,
        "parked": [
            {
                "pids": list(process.pids),
                "state": process.state,
                "gpu_bytes": process.gpu_bytes,
                "host_bytes": process.host_bytes,
                "since": process.since,
                "seconds": round(process.seconds, 4),
            }
            for process in one.parked
        ],
    }
