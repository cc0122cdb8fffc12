"""Device memory of the software GPU: allocation, virtual memory, sharing, the machine-wide account."""

from __future__ import annotations

import os
import time
from typing import Any

from .softgpu_host import Target, needs_softgpu, run

pytestmark = needs_softgpu


def test_copies_and_fills_arrive_and_wrong_addresses_are_refused() -> None:
    run(
        """
        start()
        small, large = ok(cu.cuMemAlloc(100)), ok(cu.cuMemAlloc(5 * MIB))
        data = os.urandom(5 * MIB)
        put(large, data)
        assert get(large, 5 * MIB) == data
        ok(cu.cuMemcpyDtoD(small, int(large) + 7, 100))
        assert get(small, 100) == data[7:107]
        ok(cu.cuMemsetD32(int(large) + 4, 0x01020304, 3))
        assert get(large, 20) == data[:4] + bytes([4, 3, 2, 1]) * 3 + data[16:20]
        for address, size in [(0x1000, 4), (int(large), 5 * MIB + 1), (int(small) + 99, 2), (0, 1)]:
            assert cu.cuMemcpyDtoH(bytearray(size), address, size)[0] == E.CUDA_ERROR_INVALID_VALUE
        assert cu.cuMemFree(int(small) + 1)[0] == E.CUDA_ERROR_INVALID_VALUE
        ok(cu.cuMemFree(small))
        assert cu.cuMemFree(small)[0] == E.CUDA_ERROR_INVALID_VALUE
        ok(cu.cuCtxSynchronize())  # none of it was sticky
        """
    )


def test_two_dimensional_copies_move_rows_and_leave_the_padding() -> None:
    run(
        """
        start()
        address, pitch = ok(cu.cuMemAllocPitch(10, 4, 4))
        ok(cu.cuMemsetD8(address, 0xEE, pitch * 4))
        source = bytes(range(40))
        buffer = ctypes.create_string_buffer(source, 40)
        p = cu.CUDA_MEMCPY2D()
        p.srcMemoryType, p.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        p.srcHost, p.srcPitch, p.dstDevice, p.dstPitch = ctypes.addressof(buffer), 10, address, pitch
        p.WidthInBytes, p.Height = 10, 4
        ok(cu.cuMemcpy2D(p))
        for row in range(4):
            assert get(int(address) + row * pitch, 12) == source[row * 10 : row * 10 + 10] + bytes([0xEE] * 2)
        """
    )


def test_virtual_memory_follows_the_drivers_rules() -> None:
    run(
        """
        start()
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        G = ok(cu.cuMemGetAllocationGranularity(properties(), least))
        assert G == 2 * MIB
        bad = E.CUDA_ERROR_INVALID_VALUE
        assert cu.cuMemCreate(G + 1, properties(), 0)[0] == bad
        hint = 0x5A0000000000
        va = ok(cu.cuMemAddressReserve(4 * G, 0, hint, 0))
        assert int(va) == hint
        h = ok(cu.cuMemCreate(2 * G, properties(), 0))
        assert cu.cuMemMap(va, 2 * G, G, h, 0)[0] == bad          # an offset
        assert cu.cuMemMap(va, 4 * G, 0, h, 0)[0] == bad          # larger than the handle
        assert cu.cuMemMap(int(va) + 3 * G, 2 * G, 0, h, 0)[0] == bad  # beyond the reservation
        ok(cu.cuMemMap(va, 2 * G, 0, h, 0))
        ok(cu.cuMemMap(int(va) + 2 * G, 2 * G, 0, h, 0))          # the same memory twice
        assert cu.cuMemMap(va, 2 * G, 0, h, 0)[0] == bad          # already mapped
        assert access(va, G)[0] == bad                            # part of a mapping
        ok(access(va, 4 * G))
        put(int(va) + 5, b"hello")
        assert get(int(va) + 2 * G + 5, 5) == b"hello"
        ok(cu.cuMemRelease(h))
        assert cu.cuMemRelease(h)[0] == bad
        again = ok(cu.cuMemRetainAllocationHandle(va))
        ok(cu.cuMemRelease(again))
        assert cu.cuMemAddressFree(va, 4 * G)[0] == bad           # still mapped
        assert cu.cuMemUnmap(int(va), G)[0] == bad
        ok(cu.cuMemUnmap(va, 4 * G))
        ok(cu.cuMemAddressFree(va, 4 * G))
        """
    )


def test_memory_without_access_and_read_only_memory_fault_and_the_fault_sticks() -> None:
    for flags, refused in (("NONE", "read"), ("READ", "write")):
        run(
            f"""
            start()
            address, handle = mapped(2 * MIB)
            put(address, b"data")
            ok(access(address, 2 * MIB, "{flags}"))
            if "{refused}" == "write":
                assert get(address, 4) == b"data"
                ok(launch(addn(), address, 1, 1))
            else:
                ok(cu.cuMemsetD8(address, 1, 1))
            assert cu.cuCtxSynchronize()[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
            assert cu.cuMemAlloc(1)[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
            """
        )


def test_a_descriptor_shares_memory_between_processes_and_outlives_its_maker() -> None:
    maker = """
        start()
        address, handle = mapped(4 * MIB)
        put(address, b"from the maker")
        fd = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
        print(fd, flush=True)
        input()
    """
    taker = """
        start()
        fd = int(sys.argv[-1]) if len(sys.argv) > 1 else int(os.environ["THE_FD"])
        handle = ok(cu.cuMemImportFromShareableHandle(fd, FD))
        # An imported one cannot be exported again.
        assert cu.cuMemExportToShareableHandle(handle, FD, 0)[0] == E.CUDA_ERROR_INVALID_VALUE
        assert ok(cu.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 0
        os.close(fd)
        address = ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0))
        ok(cu.cuMemMap(address, 4 * MIB, 0, handle, 0))
        ok(access(address, 4 * MIB))
        assert get(address, 14) == b"from the maker"
        ok(cu.cuMemsetD8(address, 0x41, 4))
        free, total = ok(cu.cuMemGetInfo())
        print("used", (total - free) // MIB, flush=True)
        input()
        print(get(address, 14).decode(), flush=True)
    """
    with Target(maker) as one:
        number = one.read()
        fd = os.open(f"/proc/{one.pid}/fd/{number}", os.O_RDWR)
        try:
            with Target(taker, pass_fds=(fd,), THE_FD=fd) as two:
                two.expect("used 4")  # counted once
                one.process.kill()
                one.process.wait()
                two.tell()
                two.expect("AAAA the maker")
        finally:
            os.close(fd)


def test_the_account_is_machine_wide_and_death_gives_memory_back() -> None:
    holder = """
        start(1)
        mapped(6 * MIB, device=1)
        ok(cu.cuMemAlloc(4 * MIB))
        print("holding", flush=True)
        input()
    """
    other = """
        start(1)
        free, total = ok(cu.cuMemGetInfo())
        print(free // MIB, cu.cuMemCreate(8 * MIB, properties(1), 0)[0].name, cu.cuMemAlloc(8 * MIB)[0].name)
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
        print(ok(cu.cuMemGetInfo())[0] // MIB)
    """
    settings: dict[str, Any] = {"SOFTGPU_MEMORY": "16M", "SOFTGPU_DEVICES": 2}
    with Target(holder, **settings) as one:
        one.expect("holding")
        first = run(other, **settings).split()
        assert first[:3] == ["6", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OUT_OF_MEMORY"]
        assert first[3] == "16"  # the other device
        one.process.kill()
        one.process.wait()
        assert run(other, **settings).split()[:2] == ["16", "CUDA_SUCCESS"]


def test_host_memory_can_be_allocated_registered_and_asked_about() -> None:
    run(
        """
        start()
        host = ok(cu.cuMemHostAlloc(10000, 0))
        assert int(ok(cu.cuMemHostGetDevicePointer(host, 0))) == int(host)
        buffer = ctypes.create_string_buffer(8192)
        at = ctypes.addressof(buffer)
        ok(cu.cuMemHostRegister(at, 8192, 0))
        assert cu.cuMemHostRegister(at + 10, 10, 0)[0] == E.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        device = ok(cu.cuMemAlloc(16))
        assert [int(ok(cu.cuPointerGetAttribute(kind, p))) for p in (host, at, device)] == [1, 1, 2]
        ok(launch(addn(), at, 4, 7))
        ok(cu.cuCtxSynchronize())
        assert buffer.raw[:16] == (7).to_bytes(4, "little") * 4
        ok(cu.cuMemHostUnregister(at))
        assert cu.cuMemHostUnregister(at)[0] == E.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        assert cu.cuPointerGetAttribute(kind, at)[0] == E.CUDA_ERROR_INVALID_VALUE
        assert cu.cuMemHostRegister(0x10000, 4096, 0)[0] == E.CUDA_ERROR_INVALID_VALUE  # nothing is mapped there
        ok(cu.cuMemFreeHost(host))
        """
    )


def test_a_forked_child_has_no_gpu_and_only_the_descriptor_that_criu_refuses() -> None:
    run(
        """
        KINDS = ("softgpu", "userfaultfd", "perf_event")
        def links():
            paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            links = [os.readlink(path) for path in paths if os.path.lexists(path)]
            return [link for link in links if any(kind in link for kind in KINDS)]
        def work():
            ok(cu.cuCtxSetCurrent(context))
            while not enough.is_set():
                put(address, bytes(MIB))  # takes the locks; maps nothing, as mapping and MADV_DONTFORK are two calls
                ok(cu.cuMemGetInfo())
                rounds.append(1)
        start()
        context = ok(cu.cuCtxGetCurrent())
        address, _ = mapped(2 * MIB)
        guard = [link for link in links() if "softgpu" not in link]
        assert len(guard) <= 1
        enough, rounds = threading.Event(), []
        busy = threading.Thread(target=work)
        busy.start()
        while not rounds:
            time.sleep(0.001)
        try:
            for _ in range(10):
                pid = os.fork()
                if pid == 0:
                    refused = cu.cuMemGetInfo()[0] == cu.cuInit(0)[0] == E.CUDA_ERROR_NOT_INITIALIZED
                    good = refused and links() == guard and "memfd:softgpu" not in open("/proc/self/maps").read()
                    os._exit(0 if good else 1)
                assert os.waitpid(pid, 0)[1] == 0
            assert busy.is_alive()
        finally:
            enough.set()
        busy.join()
        """
    )


def test_stream_ordered_memory_is_freed_when_its_stream_gets_there() -> None:
    run(
        """
        start()
        stream = ok(cu.cuStreamCreate(1))
        go = threading.Event()
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(20) and None)
        block = ok(cu.cuMemAllocAsync(12 * MIB, stream))
        ok(cu.cuMemsetD8Async(block, 3, 12 * MIB, stream))
        ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(_ptr=ctypes.addressof(callback)), 0))
        ok(cu.cuMemFreeAsync(block, stream))
        assert get(block, 4) == bytes([3] * 4)  # still there
        assert cu.cuMemAlloc(8 * MIB)[0] == E.CUDA_ERROR_OUT_OF_MEMORY
        go.set()
        ok(cu.cuStreamSynchronize(stream))
        ok(cu.cuMemAlloc(8 * MIB))
        assert cu.cuMemFreeAsync(block, stream)[0] == E.CUDA_ERROR_INVALID_VALUE
        """,
        SOFTGPU_MEMORY="16M",
    )


def test_peers_see_each_others_memory_once_they_ask() -> None:
    run(
        """
        start(0)
        memory = ok(cu.cuMemAlloc(16))
        ok(cu.cuMemsetD32(memory, 5, 4))
        ok(cu.cuCtxSynchronize())  # streams of different contexts do not wait for each other
        zero = ok(cu.cuCtxGetCurrent())
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(1))))
        ok(cu.cuCtxEnablePeerAccess(zero, 0))
        assert cu.cuCtxEnablePeerAccess(zero, 0)[0] == E.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        kernel = addn()
        ok(launch(kernel, memory, 4, 1))
        ok(cu.cuCtxSynchronize())
        assert words(memory, 4) == [6] * 4
        ok(cu.cuCtxDisablePeerAccess(zero))
        ok(launch(kernel, memory, 4, 1))
        assert cu.cuCtxSynchronize()[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
        ok(cu.cuCtxSetCurrent(zero))
        ok(cu.cuCtxSynchronize())  # the other context is not hurt
        """,
        SOFTGPU_DEVICES=2,
    )


def test_named_allocation_faults_strike_when_told() -> None:
    body = """
        start()
        four = [cu.cuMemAlloc(16)[0].name for _ in range(4)]
        print(four.count("CUDA_ERROR_OUT_OF_MEMORY"), cu.cuMemAlloc(16)[0].name)
    """
    assert run(body, SOFTGPU_FAULTS="alloc-oom-at:2").split() == ["1", "CUDA_SUCCESS"]
    assert run(body, SOFTGPU_FAULTS="alloc-oom-after:3").split() == ["1", "CUDA_ERROR_OUT_OF_MEMORY"]
    run("start()\ncu.cuMemAlloc(16)", SOFTGPU_FAULTS="no-such-fault", error="there is no fault named 'no-such-fault'")


def test_a_dead_process_is_not_counted_for_longer_than_a_moment() -> None:
    with Target("start()\nmapped(8 * MIB)\nprint('up', flush=True)\ninput()") as one:
        one.expect("up")
        with Target(
            "start()\nwhile True:\n input(); f, t = ok(cu.cuMemGetInfo()); print((t - f) // MIB, flush=True)"
        ) as two:
            two.tell()
            two.expect("8")
            one.process.kill()
            one.process.wait()
            time.sleep(0.2)
            two.tell()
            two.expect("0")
