"""Kernels and their twins on the PTX interpreter: what the frontend does for a launch of a twin, in Python."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence

import ptx_machine

from phos.gpu_engine.ptx_instrument import twin_table as table
from phos.gpu_engine.ptx_instrument.twin import Twin, make

UNSAVED = 0
SHIFT = 12
"""Chunks of 4096 bytes."""

Range = tuple[int, int]
"""Address and bytes."""


class Window:
    """Memory with chunks, of which each buffer has its own, and the table in which twins report."""

    def __init__(self, buffers: Sequence[ptx_machine.Buffer], mode: int = table.COW, limit_ns: int = 10**9) -> None:
        self.buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self.states = ptx_machine.Buffer(4 * (len(buffers) + 1))  # the last word: closed
        places = bytearray(struct.pack("<QQ", len(buffers), 0))
        for index, buffer in enumerate(self.buffers):
            assert buffer.size <= 1 << SHIFT
            state = self.states.address + 4 * index
            places += struct.pack("<QQQQ", buffer.address, buffer.address + buffer.size, state, 0)
        self.map = ptx_machine.Buffer(bytes(places))
        self.table = ptx_machine.Buffer(table.WINDOW_BYTES)
        closed = self.states.address + 4 * len(buffers)
        head = struct.pack("<QQQII", table.MAGIC, closed, limit_ns, mode, SHIFT)
        ctypes.memmove(self.table.address, head, len(head))
        ctypes.memmove(self.table.address + table.WINDOW_NAME, b"k\0", 2)

    def set_state(self, buffer: ptx_machine.Buffer, state: int) -> None:
        ctypes.memmove(self.states.address + 4 * self.buffers.index(buffer), state.to_bytes(4, "little"), 4)

    def set_all(self, state: int) -> None:
        for buffer in self.buffers:
            self.set_state(buffer, state)

    def close(self) -> None:
        ctypes.memmove(self.states.address + 4 * len(self.buffers), b"\1", 1)

    def forget(self) -> None:
        """Of reports."""
        ctypes.memset(self.table.address + table.WINDOW_REPORTS, 0, 8)
        ctypes.memset(self.table.address + table.WINDOW_REPORT, 0, table.REPORTS * table.REPORT_BYTES)

    def report(self) -> table.Report:
        return table.read(self.table.bytes())

    def launch(self, ranges: Iterable[Range], variables: Sequence[int] = (), kernel: int = 0) -> bytes:
        """struct phos_twin_launch."""
        listed = list(ranges)
        head = struct.pack("<QQIIQ", self.table.address, self.map.address, len(listed), kernel, 0)
        body = b"".join(struct.pack("<QQ", *one) for one in listed).ljust(16 * table.RANGES, b"\0")
        return (head + body + b"".join(address.to_bytes(8, "little") for address in variables)).ljust(
            table.LAUNCH_BYTES, b"\0"
        )

    @property
    def memory(self) -> list[ptx_machine.Buffer]:
        """What twins read and write besides the application's memory."""
        return [self.states, self.map, self.table]


class Pair:
    """A module and its twin."""

    def __init__(self, text: str, *, reads: bool) -> None:
        self.twin: Twin = make(text, reads=reads)
        self.original = ptx_machine.Module(text)
        self.double = ptx_machine.Module(self.twin.text)

    def variables(self, kernel: str) -> list[int]:
        """The addresses that a launch has to give."""
        addresses = [0] * table.VARIABLES
        for index, name in self.twin.kernels[kernel]:
            addresses[index] = self.original.globals[name].address
        return addresses

    def run_twin(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        *arguments: object,
        window: Window,
        ranges: Iterable[Range] = (),
        extra: Sequence[ptx_machine.Buffer] = (),
        **options: object,
    ) -> tuple[int, ptx_machine.Fault]:
        """Launch the twin; gives what launch() gives."""
        launch = window.launch(ranges, self.variables(kernel))
        more = [*extra, *window.memory, *window.buffers, *self.original.globals.values()]
        return self.double.launch(kernel, grid, block, *arguments, launch, extra=more, **options)  # type: ignore[arg-type]


def whole(buffers: Iterable[ptx_machine.Buffer]) -> list[Range]:
    return [(buffer.address, buffer.size) for buffer in buffers]
