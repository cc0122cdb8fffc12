"""A program that uses the GPU listens on a TCP port and is connected with itself.

When the file GO appears it looks whether its GPU memory is as it was, what comes through the connection, and whether
it can be connected with once more. Usage: tcp_connection.py GO.
"""

import array
import os
import socket
import sys
import time

from cuda.bindings import driver as cuda

COUNT = 1 << 20


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
numbers = array.array("I", range(COUNT))
device = check(cuda.cuMemAlloc(4 * COUNT))
check(cuda.cuMemcpyHtoD(device, numbers.buffer_info()[0], 4 * COUNT))

listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
near.sendall(b"on-its-way")
print("READY", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)

found = array.array("I", bytes(4 * COUNT))
check(cuda.cuMemcpyDtoH(found.buffer_info()[0], device, 4 * COUNT))
far.sendall(far.recv(64))
said = near.recv(64).decode()
another = socket.create_connection(listener.getsockname())
listener.accept()[0].sendall(b"hello")
print("RESULT", f"{said},{another.recv(64).decode()},{'same' if found == numbers else 'other'}", flush=True)
