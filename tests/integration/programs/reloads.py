"""Loads, launches and unloads a kernel with a variable again and again, one ITERATION each, until it is killed.

The variable is elsewhere each time, and the kernel's handle often the same: with
GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4096 the functions of such a module have pages of their own in the software
GPU.
"""

import ctypes
import time

from cuda.bindings import driver as cuda

HEADER = ".version 7.0\n.target sm_70\n.address_size 64\n"
KERNEL = """
.global .u32 counter;
.visible .entry count(.param .u64 to) {
    .reg .b64 %a<1>;
    .reg .b32 %r<2>;
    ld.param.u64 %a0, [to];
    st.global.u32 [%a0], 7;
    ld.global.u32 %r0, [counter];
    add.u32 %r1, %r0, 1;
    st.global.u32 [counter], %r1;
    ret;
}
""" + "".join(f".visible .entry more{i}() {{ ret; }}\n" for i in range(150))
OTHER = ".global .u32 other;\n.visible .entry nothing() { ret; }\n"


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def loaded(text):
    return check(cuda.cuModuleLoadData((HEADER + text).encode() + b"\0"))


def main():
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    memory = check(cuda.cuMemAlloc(256 << 20))
    check(cuda.cuMemsetD32(memory, 1, 64 << 20))
    value = ctypes.c_uint32()
    number = same = last = 0
    while True:
        module = loaded(KERNEL)
        kernel = check(cuda.cuModuleGetFunction(module, b"count"))
        address, _ = check(cuda.cuModuleGetGlobal(module, b"counter"))
        same += int(kernel) == last
        last = int(kernel)
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(memory),), (ctypes.c_uint64,)), 0))
        check(cuda.cuCtxSynchronize())
        check(cuda.cuMemcpyDtoH(ctypes.addressof(value), address, 4))
        if value.value != 1:
            raise SystemExit(f"a kernel counted elsewhere: {value.value}")
        check(cuda.cuModuleUnload(module))
        loaded(OTHER)  # takes the variable's place, and stays
        number += 1
        if number == 30 and not same:
            raise SystemExit("no handle is used again")
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.02)


main()
