"""From what is known of the processes of a checkpoint to the image's inventory."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver, procfs
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.process import Detached, ForeignProcess
from phos.gpu_engine.timeline import Phase


@dataclass(frozen=True)
class Versions:
    """Of everything that had a part in an image. ``cuda`` as ``cuDriverGetVersion`` says; ``driver`` its release."""

    phos: str
    criu: str
    driver: str
    cuda: int
    device_kind: str  # "nvidia" or "software"


@dataclass(frozen=True)
class LoadedModule:
    """A module that a process loaded; ``path`` is empty when it was given as bytes."""

    entry_point: str
    size: int
    path: str
    offset: int


@dataclass
class ProcessRecord:
    """What is known of one process under the frontend at the moment of its checkpoint."""

    pid: int
    session: bytes
    executable: str
    command_line: list[str]
    parent_pid: int
    detached: Detached
    own_blocks: list[Block]
    modules: Sequence[LoadedModule]
    devices: list[int]
    restore_thread: int = 0


def command_line(pid: int) -> tuple[list[str], int]:
    """(argument vector, parent's pid) of a living process; empty and 0 when it cannot be read."""
    try:
        process = psutil.Process(pid)
        return [procfs.readable(argument) for argument in process.cmdline()], process.ppid()
    except psutil.Error:
        return [], 0


def build(
    protocol: str,
    records: Sequence[ProcessRecord],
    foreign: Sequence[ForeignProcess],
    gpus: Sequence[driver.Gpu],
    versions: Versions,
    began: float,
) -> pb.Inventory:
    """The inventory of a checkpoint that began at ``began`` (seconds since 1970), without its timings."""
    inventory = pb.Inventory(
        created_ns=int(began * 1e9),
        phos_version=versions.phos,
        criu_version=versions.criu,
        driver_version=versions.cuda,
        driver_release=versions.driver,
        device_kind=versions.device_kind,
        protocol=protocol,
        host=_host(),
    )
    for gpu in gpus:
        inventory.gpus.append(
            pb.Gpu(
                ordinal=gpu.ordinal,
                uuid=bytes.fromhex(gpu.uuid.removeprefix("GPU-").replace("-", "")),
                name=gpu.name,
                major=gpu.compute_capability[0],
                minor=gpu.compute_capability[1],
                memory=gpu.total_memory,
            )
        )
    for record in records:
        inventory.processes.append(_process(record, records))
    for process in foreign:
        arguments, parent = command_line(process.pid)
        inventory.processes.append(
            pb.Process(
                pid=procfs.inner_pid(process.pid),
                executable=process.executable,
                command_line=arguments,
                parent_pid=parent,
                restore_thread=process.restore_thread,
            )
        )
    return inventory


def add_timings(inventory: pb.Inventory, phases: Sequence[Phase], total: float) -> None:
    """Put the phases of the job into its inventory; seconds."""
    inventory.total_seconds = total
    for phase in phases:
        inventory.timings.append(pb.Timing(phase=phase.name, seconds=phase.seconds, concurrent=phase.concurrent))


def _process(record: ProcessRecord, everyone: Sequence[ProcessRecord]) -> pb.Process:
    importers = {block.key for other in everyone for block in other.detached.blocks if other.session != block.key[0]}
    message = pb.Process(
        pid=record.pid,
        session=record.session,
        executable=record.executable,
        command_line=record.command_line,
        parent_pid=record.parent_pid,
        under_frontend=True,
        devices=record.devices,
        restore_thread=record.restore_thread,
    )
    applications = {block.key for block in record.own_blocks if block.by_application}
    for block in record.detached.blocks:
        mine = block.key[0] == record.session
        message.blocks.append(
            pb.Block(
                block=block.number,
                size=block.size,
                device=block.device,
                owner=pb.Block.APPLICATION if block.key in applications else pb.Block.FRONTEND,
                owner_session=b"" if mine else block.key[0],
                owner_block=0 if mine else block.key[1],
                shared=not mine or block.key in importers,
            )
        )
    for allocation in record.detached.allocations:
        message.allocations.append(
            pb.Allocation(
                address=allocation.address,
                size=allocation.size,
                block=allocation.block,
                offset=allocation.offset,
                entry_point=allocation.entry_point,
            )
        )
    for host in record.detached.host_allocations:
        message.host_allocations.append(
            pb.HostAllocation(address=host.address, size=host.size, entry_point=host.entry_point)
        )
    for state in record.detached.uncarried:
        message.uncarried.append(pb.Uncarried(kind=state.kind, count=state.count, bytes=state.bytes))
    for module in record.modules:
        message.modules.append(
            pb.Module(entry_point=module.entry_point, size=module.size, path=module.path, offset=module.offset)
        )
    return message


def _host() -> pb.Host:
    distribution = ""
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        pass
    boot = Path("/proc/sys/kernel/random/boot_id")
    return pb.Host(
        name=platform.node(),
        kernel=platform.release(),
        machine=platform.machine(),
        distribution=distribution,
        cpus=os.cpu_count() or 0,
        memory=psutil.virtual_memory().total,
        boot_id=boot.read_text().strip() if boot.exists() else "",
    )
