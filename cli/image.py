"""``phos-gpu image``: images that phosd holds in pinned memory, from which they are restored without being read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phos.cli.criu import image_directory
from phos.cli.outcome import tell
from phos.cli.parameters import NAME, NAME_OR_DIRECTORY, Place, json_option
from phos.cli.refusal import refuse
from phos.cli.text import printable, size_text
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client, reach, wire
from phos.gpu_engine.errors import DaemonUnavailable, PhosError, UsageError
from phos.images.errors import ImageError

if TYPE_CHECKING:
    from phos.cli.console import Console


@click.group()
def image() -> None:
    """Hold images in phosd's memory, page-locked, so that restoring them reads nothing."""


@image.command()
@click.argument("directory", metavar="IMAGE", type=Place(path_type=Path))
@click.option("--name", type=NAME, default=None, help="What to call it, here and for restores from other hosts.")
@click.option(
    "--copy", is_flag=True, help="Copy the data also where it lies in memory already (tmpfs) and could stay there."
)
@json_option()
def pin(directory: Path, name: str | None, copy: bool, as_json: bool) -> None:
    """Load the GPU data of the image in the directory IMAGE, check it, and keep it until phosd ends."""
    began, name = time.perf_counter(), name or ""
    descriptor = _open(directory)
    try:
        reach.ensure()
        _ask(wire_pb2.Envelope(id=1, pin_image=wire_pb2.PinImage(name=name, copy=copy)), [descriptor], quiet=as_json)
    finally:
        os.close(descriptor)
    seconds = time.perf_counter() - began
    path = client.image_name(directory)
    found = [pinned for pinned in client.status().pinned if pinned.image == path]
    size, copied = (found[-1].bytes, found[-1].copied) if found else (0, 0)
    if as_json:
        said = {"image": path, "name": name, "bytes": size, "copied": copied, "seconds": round(seconds, 4)}
        tell(json.dumps(said))
        return
    called = f" as {name}" if name else ""
    where = "" if copied else ", where it lies"
    tell(f"Pinned {size_text(size)} of {directory}{called}{where} ({seconds:.2f} s).")


@image.command()
@click.argument("address", metavar="tcp://HOST:PORT/NAME")
@click.argument("directory", metavar="IMAGE", type=Place(path_type=Path))
@json_option()
def fetch(address: str, directory: Path, as_json: bool) -> None:
    """Make the directory IMAGE stand for an image that another host shares.

    It is restored, pinned or made a pool of like any other; its GPU data stays there and comes when it is wanted.
    """
    from phos.cli import remote_image

    began = time.perf_counter()
    at = remote_image.address(address)
    with remote_image.interruptible(address) as interruption:
        made: list[Path] = []
        ours = False
        try:
            with interruption.held():
                image_directory(directory, create=True)
                ours = True
            size = remote_image.fetch(at, directory, lasting=True, made=made)
            interruption.copied()
        except BaseException as error:
            if ours:
                with interruption.held():
                    remote_image.remove(made, directory)
                if isinstance(error, ImageError):
                    refuse("image fetch", error, as_json)
            raise
    seconds = time.perf_counter() - began
    if as_json:
        said = {"image": client.image_name(directory), "address": address, "bytes": size, "seconds": round(seconds, 4)}
        tell(json.dumps(said))
        return
    tell(f"{directory} stands for {address}; {size_text(size)} copied ({seconds:.2f} s).")


@image.command()
@click.argument("which", metavar="IMAGE", type=NAME_OR_DIRECTORY)
def unpin(which: str) -> None:
    """Let IMAGE go, named by its directory or its name. Restores that use it keep it until they are done."""
    if os.path.isdir(which) and not any(pinned.name == which for pinned in client.status().pinned):
        descriptor = _open(Path(which))
        try:
            _ask(wire_pb2.Envelope(id=1, unpin_image=wire_pb2.UnpinImage()), [descriptor])
        finally:
            os.close(descriptor)
        return
    path = client.image_name(which)  # the directory may be gone
    name = path if any(pinned.image == path for pinned in client.status().pinned) else which
    _ask(wire_pb2.Envelope(id=1, unpin_image=wire_pb2.UnpinImage(name=name)), [])


@image.command(name="list")
@json_option()
def list_(as_json: bool) -> None:
    """Show which images are pinned."""
    status = client.status()
    if as_json:
        pinned = [
            {
                "name": entry.name,
                "image": entry.image,
                "image_id": entry.image_id.hex(),
                "state": entry.state,
                "bytes": entry.bytes,
                "copied": entry.copied,
                "checked": entry.checked,
                "users": entry.users,
                "since": entry.since,
                "pools": list(entry.pools),
            }
            for entry in status.pinned
        ]
        click.echo(json.dumps({"limit": status.pin_limit, "pinned": pinned}))
        return
    from phos.cli.console import Console

    show_pinned(Console(), status)


def show_pinned(console: Console, status: wire_pb2.Status) -> None:
    """The pinned images as a table."""
    if not status.pinned:
        console.print("No image is pinned. Pin one with 'phos-gpu image pin IMAGE'.")
        return
    used = sum(entry.bytes for entry in status.pinned)
    from rich.table import Table

    title = f"Pinned images: {size_text(used)} of {size_text(status.pin_limit)}"
    table = Table("Name", "Image", "State", "Size", "Of it copied", "In use by", title=title, title_justify="left")
    for entry in status.pinned:
        state = entry.state
        if state == "loading":
            state = f"loading, {size_text(entry.checked)} checked"
        table.add_row(
            printable(entry.name or ", ".join(f"pool {pool}" for pool in entry.pools)),
            printable(entry.image),
            state,
            size_text(entry.bytes),
            size_text(entry.copied),
            str(entry.users) if entry.users else "nobody",
        )
    console.print(table)


def _open(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"There is no image directory {directory} ({error.strerror}).") from error


def _ask(envelope: wire_pb2.Envelope, descriptors: list[int], *, quiet: bool = True) -> None:
    """One request; shows how far it is, on a terminal.

    Raises:
        PhosError: phosd's reason.
    """
    if quiet or not sys.stderr.isatty():
        _exchange(envelope, descriptors, lambda _: None)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from phos.cli.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("GPU data", total=None)

        def show(state: wire_pb2.ImageState) -> None:
            bar.update(task, total=state.bytes_total, completed=state.bytes_done)

        _exchange(envelope, descriptors, show)


def _exchange(
    envelope: wire_pb2.Envelope, descriptors: list[int], progress: Callable[[wire_pb2.ImageState], None]
) -> None:
    with reach.connect() as connection:
        wire.send(connection, envelope, descriptors)
        while (answer := wire.receive(connection)) is not None:
            wire.close_all(answer[1])
            if answer[0].WhichOneof("body") == "done":
                if answer[0].done.error:
                    raise PhosError(answer[0].done.error)
                return
            progress(answer[0].image_state)
    raise DaemonUnavailable("phosd ended before it answered.")
