"""A process with a CUDA context and no memory of its own on the GPU, or (INITIALISED) with no context even.

Asks the driver something at every step, which waits at the gate while the process is being checkpointed, and goes on
until there is a file UNTIL. Prints ITERATION lines and RESULT as the examples do.
"""

import sys
import time
from pathlib import Path

from cuda.bindings import driver as cuda


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


check(cuda.cuInit(0))
with_context = sys.argv[1] == "context"
if with_context:
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
number = 0
while not Path(sys.argv[2]).exists():
    if with_context:
        check(cuda.cuCtxSynchronize())
    number += 1
    print(f"ITERATION {number}", flush=True)
    time.sleep(0.03)
print("RESULT 12345", flush=True)
