"""A program that computes, and a child that only asks NVML how many GPUs there are, once for each iteration.

looks_on.py LIBRARY OPTIONS (those of the examples). LIBRARY: what stands for NVML. With `alone` before it, the program
itself asks, and does not compute.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))


from report import Report, parser


class Nvml:
    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        if self._library.nvmlInit_v2():
            raise SystemExit("NVML does not start")

    def answer(self) -> str:
        count = ctypes.c_uint(77)
        return f"{self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))} {count.value}"


def answer_all(library: str) -> None:
    nvml = Nvml(library)
    for _ in sys.stdin:
        print(nvml.answer(), flush=True)


def ask(library: str, report: Report) -> None:
    nvml = Nvml(library)
    for iteration in range(report.options.iterations):
        report.step(iteration, nvml.answer())
    report.result()


def compute(library: str, report: Report) -> None:
    from cuda_program import Buffer, Device

    child = subprocess.Popen(
        [sys.executable, __file__, "answer", library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    with Device() as device:
        module = device.load("", "looks_on.cu")
        state = Buffer(1 << 20)
        report.device(f"child {child.pid}")
        for iteration in range(report.options.iterations):
            state.fill(iteration)
            child.stdin.write("?\n")
            child.stdin.flush()
            report.step(module.digest(state), child.stdout.readline().strip())
        report.result()
    child.stdin.close()
    if child.wait():
        raise SystemExit(f"the child ended with {child.returncode}")


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "answer":
        answer_all(words[1])
        return
    alone = words[0] == "alone"
    library, *rest = words[alone:]
    report = Report(parser("Looks on.", iterations=60).parse_args(rest))
    (ask if alone else compute)(library, report)


if __name__ == "__main__":
    main()
