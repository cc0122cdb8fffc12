#!/usr/bin/env python3
"""Ask the driver the same questions all the time, a thread for each, and tell when each answer came.

`asks.py NAME...`: the questions to ask, by the names that it prints; all of them without any. Every answer is the same
for ever, as nothing here changes what is asked for. `--stop FILE`: when FILE appears, one line for each question, as
JSON: its name, every different answer, and for each time it was asked when that began and ended, in nanoseconds of
CLOCK_MONOTONIC, and the number of the answer. A process of its own does not need the frontend.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, CudaError, Device, check, fail
from report import Report, parser

PAUSE = 0.002
"""Seconds between an answer and the next question."""

KERNEL = 'extern "C" __global__ void nothing(u32 *words) { words[threadIdx.x] = 0; }'

Question = Callable[[], Any]


def pushed(context: Any) -> Any:
    """Push a context and pop it again, for two calls of which neither may be asked alone."""
    return driver.cuCtxPushCurrent(context), driver.cuCtxPopCurrent()


def exchanged() -> Any:
    """Change how this thread captures, and back."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    return before, driver.cuThreadExchangeStreamCaptureMode(before[-1])


def anew(context: Any, question: Question) -> Any:
    """Ask in a new thread: it has no default stream of its own yet."""
    answers: list[Any] = []

    def ask() -> None:
        driver.cuCtxSetCurrent(context)
        answers.append(question())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers


def questions(device: Device) -> dict[str, Question]:
    """Return what can be asked, by the name of the entry point without its version, or of several with commas.

    In brackets what stream is asked about: the default one, or the own one of a thread that has asked for nothing yet.
    """
    handle, context = device.handle, device.context
    module = device.load(KERNEL, "asks.cu")
    kernel = check(driver.cuModuleGetFunction(module.handle, b"nothing"), "find the kernel")
    memory = Buffer(4096)
    stream = check(driver.cuStreamCreate(0), "create a stream")
    event = check(driver.cuEventCreate(0), "create an event")
    check(driver.cuEventRecord(event, stream), "record an event")
    device.synchronize()
    default = driver.CUstream(0)
    own = driver.CUstream(driver.CU_STREAM_PER_THREAD)
    bus = check(driver.cuDeviceGetPCIBusId(16, handle), "read the device's address")
    unknown = driver.CUresult.CUDA_ERROR_UNKNOWN
    processors = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    registers = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return {
        "cuGetErrorString": lambda: driver.cuGetErrorString(unknown),
        "cuGetErrorName": lambda: driver.cuGetErrorName(unknown),
        "cuDriverGetVersion": driver.cuDriverGetVersion,
        "cuDeviceGet": lambda: driver.cuDeviceGet(0),
        "cuDeviceGetCount": driver.cuDeviceGetCount,
        "cuDeviceGetName": lambda: driver.cuDeviceGetName(128, handle),
        "cuDeviceGetUuid": lambda: driver.cuDeviceGetUuid(handle),
        "cuDeviceGetLuid": lambda: driver.cuDeviceGetLuid(handle),
        "cuDeviceTotalMem": lambda: driver.cuDeviceTotalMem(handle),
        "cuDeviceGetAttribute": lambda: driver.cuDeviceGetAttribute(processors, handle),
        "cuDeviceGetProperties": lambda: driver.cuDeviceGetProperties(handle),
        "cuDeviceComputeCapability": lambda: driver.cuDeviceComputeCapability(handle),
        "cuDeviceGetByPCIBusId": lambda: driver.cuDeviceGetByPCIBusId(bus),
        "cuDeviceGetPCIBusId": lambda: driver.cuDeviceGetPCIBusId(16, handle),
        "cuModuleGetLoadingMode": driver.cuModuleGetLoadingMode,
        "cuCtxGetId": lambda: driver.cuCtxGetId(context),
        "cuCtxPushCurrent, cuCtxPopCurrent": lambda: pushed(context),
        "cuCtxSetCurrent": lambda: driver.cuCtxSetCurrent(context),
        "cuCtxGetCurrent": driver.cuCtxGetCurrent,
        "cuCtxGetDevice": driver.cuCtxGetDevice,
        "cuCtxGetApiVersion": lambda: driver.cuCtxGetApiVersion(context),
        "cuCtxGetFlags": driver.cuCtxGetFlags,
        "cuDevicePrimaryCtxGetState": lambda: driver.cuDevicePrimaryCtxGetState(handle),
        "cuThreadExchangeStreamCaptureMode": exchanged,
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(stream),
        "cuStreamGetCaptureInfo": lambda: driver.cuStreamGetCaptureInfo(stream),
        "cuStreamGetCtx": lambda: driver.cuStreamGetCtx(stream),
        "cuStreamGetPriority": lambda: driver.cuStreamGetPriority(stream),
        "cuStreamGetFlags": lambda: driver.cuStreamGetFlags(stream),
        "cuStreamGetId": lambda: driver.cuStreamGetId(stream),
        "cuStreamGetDevice": lambda: driver.cuStreamGetDevice(stream),
        "cuStreamIsCapturing (default)": lambda: driver.cuStreamIsCapturing(default),
        "cuStreamGetCaptureInfo (default)": lambda: driver.cuStreamGetCaptureInfo(default),
        "cuStreamGetCtx (default)": lambda: driver.cuStreamGetCtx(default),
        "cuStreamGetPriority (default)": lambda: driver.cuStreamGetPriority(default),
        "cuStreamGetFlags (default)": lambda: driver.cuStreamGetFlags(default),
        "cuStreamGetId (default)": lambda: driver.cuStreamGetId(default),
        "cuStreamGetDevice (default)": lambda: driver.cuStreamGetDevice(default),
        "cuStreamIsCapturing (own)": lambda: anew(context, lambda: driver.cuStreamIsCapturing(own)),
        "cuStreamGetCaptureInfo (own)": lambda: anew(context, lambda: driver.cuStreamGetCaptureInfo(own)),
        "cuStreamGetCtx (own)": lambda: anew(context, lambda: driver.cuStreamGetCtx(own)),
        "cuStreamGetPriority (own)": lambda: anew(context, lambda: driver.cuStreamGetPriority(own)),
        "cuStreamGetFlags (own)": lambda: anew(context, lambda: driver.cuStreamGetFlags(own)),
        "cuStreamGetDevice (own)": lambda: anew(context, lambda: driver.cuStreamGetDevice(own)),
        "cuStreamQuery": lambda: driver.cuStreamQuery(stream),
        "cuEventQuery": lambda: driver.cuEventQuery(event),
        "cuFuncGetAttribute": lambda: driver.cuFuncGetAttribute(registers, kernel),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda: driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            kernel, 128, 0
        ),
        "cuPointerGetAttribute": lambda: driver.cuPointerGetAttribute(kind, memory.address),
    }


def plain(answer: Any) -> Any:
    """Return an answer as JSON can have it: numbers for handles and statuses, text for the rest."""
    if isinstance(answer, tuple | list):
        return [plain(part) for part in answer]
    if answer is None or isinstance(answer, int | float | str):
        return int(answer) if isinstance(answer, int) else answer
    if isinstance(answer, bytes):
        return answer.partition(b"\0")[0].decode(errors="replace")
    try:
        return int(answer)
    except (TypeError, ValueError):
        return str(answer)


class Asker:
    """One question, asked by a thread of its own."""

    def __init__(self, name: str, question: Question, device: Device, stop: threading.Event) -> None:
        self.name, self.question, self.device, self.stop = name, question, device, stop
        self.answers: list[Any] = []
        self.asked: list[tuple[int, int, int]] = []
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def _run(self) -> None:
        driver.cuCtxSetCurrent(self.device.context)
        while not self.stop.is_set():
            began = time.monotonic_ns()
            raw = self.question()
            ended = time.monotonic_ns()
            answer = plain(raw)
            if answer not in self.answers:
                self.answers.append(answer)
            self.asked.append((began, ended, self.answers.index(answer)))
            time.sleep(PAUSE)

    def told(self) -> str:
        """Return all that came, once the thread has ended."""
        self.thread.join()
        return json.dumps({"name": self.name, "answers": self.answers, "asked": self.asked})


def main() -> None:
    """Run the program."""
    options = parser("Ask the driver what never changes, all the time.", iterations=0)
    options.add_argument("names", nargs="*", metavar="NAME", help="what to ask (all)")
    options.add_argument("--stop", type=Path, required=True, metavar="FILE", help="tell all and end when FILE appears")
    chosen = options.parse_args()
    report, stop = Report(chosen), threading.Event()
    with Device() as device:
        report.device(device.describe())
        known = questions(device)
        report.line("KNOWN " + json.dumps(list(known)))
        askers = [Asker(name, known[name], device, stop) for name in chosen.names or known]
        while not all(len(asker.asked) > 10 for asker in askers):
            time.sleep(PAUSE)
        report.line("READY")
        while not chosen.stop.exists():
            time.sleep(PAUSE)
        stop.set()
        for asker in askers:
            report.line(asker.told())


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
