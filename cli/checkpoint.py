"""``phos-gpu checkpoint``: criu dump with the plugin, progress, and one message when it fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from phos.cli.criu import image_directory, needs_shell_job, run_criu
from phos.cli.progress import ImageProgress
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed, NoSuchProcess
from phos.gpu_engine.installation import device_kind, load_driver


@click.command()
@click.argument("pid", type=int)
@click.argument("image", type=click.Path(path_type=Path))
@click.option("--leave-running", is_flag=True, help="Let the processes run on; otherwise they are ended.")
@click.option("--protocol", type=click.Choice(["stop"]), default="stop", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def checkpoint(pid: int, image: Path, leave_running: bool, protocol: str, as_json: bool) -> None:
    """Dump process PID, its children and their GPU memory into the directory IMAGE (made if missing).

    On any failure the processes run on as before and IMAGE is left without a part of ours.
    """
    del protocol  # the one there is
    began = time.perf_counter()
    arguments = ["dump", "-t", str(pid)]
    if needs_shell_job(pid):
        arguments.append("--shell-job")
    if leave_running:
        arguments.append("--leave-running")
    _require_cuda(pid)
    directory = image_directory(image, create=True)
    client.ensure()
    with ImageProgress(directory, restore=False, quiet=as_json):
        status, errors = run_criu(arguments, directory, "dump.log")
    if status != 0:
        raise CheckpointFailed(
            f"Process {pid} could not be checkpointed; it runs on as before.\n{errors}\n"
            f"CRIU's log: {directory / 'dump.log'}"
        )
    seconds = time.perf_counter() - began
    warnings = list(client.wait_image(directory).warnings)
    if as_json:
        click.echo(
            json.dumps({"pid": pid, "image": str(directory), "seconds": round(seconds, 4), "warnings": warnings})
        )
    else:
        for line in warnings:
            click.echo(f"Warning: {line}", err=True)
        click.echo(f"Process {pid} is in {directory} ({seconds:.2f} s); 'phos-gpu inspect {directory}' shows what is.")


def _require_cuda(pid: int) -> None:
    """A process without CUDA is a mistake here (plain 'criu dump' takes it)."""
    load_driver(device_kind())
    import psutil

    from phos.gpu_engine import driver, toggle

    driver.initialise()
    tree = [pid] + [child.pid for child in psutil.Process(pid).children(recursive=True)]
    if not any(toggle.holds_cuda(member) for member in tree):
        raise NoSuchProcess(
            f"Process {pid} and its children hold no CUDA context: there is no GPU state to save. "
            "Use 'criu dump' for processes without a GPU."
        )
