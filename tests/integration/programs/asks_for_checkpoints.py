"""A program that counts on the GPU and asks for checkpoints of itself at the top of some of its iterations.

    asks_for_checkpoints.py ITERATIONS FOLDER STEP[,STEP...] [--KEYWORD=VALUE ...]

Keywords go to phos.checkpoint (leave_running, if_busy, protocol); --wait lets it wait for each. It prints what came of
each checkpoint as soon as that is known, and ITERATION and RESULT lines as the examples do.
"""

import ctypes
import sys
import time
from pathlib import Path

from cuda.bindings import driver as cuda

import phos

PAUSE = 0.03


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def read(address):
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value


def describe(made):
    if made.skipped:
        return f"skipped: {made.error}"
    if made.restored:
        return "restored"
    if made.committed:
        return f"committed stall={made.stall:.3f} seconds={made.seconds:.3f}"
    return f"failed: {made.error}" if made.done else "pending"


def main():
    iterations, folder = int(sys.argv[1]), Path(sys.argv[2])
    steps = [int(word) for word in sys.argv[3].split(",")]
    keywords = dict(word.removeprefix("--").split("=") for word in sys.argv[4:] if "=" in word)
    if "leave_running" in keywords:
        keywords["leave_running"] = keywords["leave_running"] == "True"
    made = phos.checkpoint(folder / "early") if "--early" in sys.argv else None
    if made:
        print("EARLY", describe(made), flush=True)
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    word = int(check(cuda.cuMemAlloc(8 << 20)))
    check(cuda.cuMemsetD32(word, 0, (8 << 20) // 4))
    time.sleep(0.5)  # until phosd knows of the process
    open_ = {}
    for number in range(iterations):
        for _ in range(steps.count(number)):
            began = time.perf_counter()
            try:
                made = phos.checkpoint(folder / f"{number}", **keywords)
            except phos.Busy as busy:
                print("CHECKPOINT", number, "busy:", busy, flush=True)
                continue
            print(f"ASKED {number} {(time.perf_counter() - began) * 1e6:.0f} us", flush=True)
            if "--wait" in sys.argv:
                made.wait(60)
            open_[made] = number
        check(cuda.cuMemsetD32(word, read(word) + 1, 1))
        time.sleep(PAUSE)
        for made in [made for made in open_ if made.done]:
            print("CHECKPOINT", open_.pop(made), describe(made), flush=True)
        print(f"ITERATION {number + 1}", flush=True)
    for made, number in open_.items():
        made.wait(60)
        print("CHECKPOINT", number, describe(made), flush=True)
    print(f"RESULT {read(word)}", flush=True)


if __name__ == "__main__":
    main()
