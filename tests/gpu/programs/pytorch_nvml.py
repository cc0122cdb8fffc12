#!/usr/bin/env python3
"""PyTorch beside NVML: a thread of the program asks it all the time, and so does a child that has nothing else to do.

As those who watch over training jobs do. Each iteration prints what both were answered; none may meet with an error.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))


class Nvml:
    """The library, and the first GPU in it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._gpu = ctypes.c_void_p()
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._gpu)):
            raise SystemExit("NVML does not start")

    def error(self) -> int:
        """Ask how busy the GPU is; what matters is whether there is an answer. Returns an nvmlReturn_t, 0 for one."""
        return int(self._library.nvmlDeviceGetUtilizationRates(self._gpu, (ctypes.c_uint * 2)()))


def answer_all() -> None:
    """Answer each line of stdin."""
    nvml = Nvml()
    for _ in sys.stdin:
        print(nvml.error(), flush=True)


def main() -> None:
    """Run the program."""
    import torch
    from report import Report, parser

    options = parser("PyTorch beside NVML.", iterations=60, size=1 << 20, size_help="words").parse_args()
    report = Report(options)
    child = subprocess.Popen(
        [sys.executable, __file__, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    nvml = Nvml()
    errors = {0}

    def ask() -> None:
        while True:
            errors.add(nvml.error())
            time.sleep(0.002)

    threading.Thread(target=ask, daemon=True).start()
    words = torch.arange(options.size, dtype=torch.int64, device="cuda")
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for iteration in range(options.iterations):
        words.mul_(3).add_(iteration).remainder_(1000003)
        child.stdin.write("?\n")
        child.stdin.flush()
        report.step(int(words.sum().item()), f"own {sorted(errors)} child {child.stdout.readline().strip()}")
    report.result()
    child.stdin.close()
    child.wait()


if __name__ == "__main__":
    answer_all() if sys.argv[1:] == ["child"] else main()
