"""Streams, events, launches and graphs of the software GPU: order, asynchrony, simulated time, faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from .softgpu_host import needs_softgpu, run

pytestmark = needs_softgpu

# A host function that holds a stream until `go` is set, and a way to queue it.
HOLD = """
start()
go = threading.Event()
hold_c = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(20) and None)
def hold(stream):
    ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(_ptr=ctypes.addressof(hold_c)), 0))
NOT_READY = E.CUDA_ERROR_NOT_READY
p = ok(cu.cuMemAlloc(4096))
ok(cu.cuMemsetD32(p, 0, 1024))
ok(cu.cuCtxSynchronize())
"""


def test_the_legacy_stream_waits_for_blocking_streams_and_only_for_those() -> None:
    run(
        HOLD
        + """
blocking, free = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(1))
hold(blocking)
ok(cu.cuMemsetD8Async(p, 1, 16, free))
ok(cu.cuStreamSynchronize(free))            # not held up
ok(cu.cuMemsetD8Async(p, 2, 16, 0))         # the legacy stream is
assert cu.cuStreamQuery(0)[0] == NOT_READY
ok(cu.cuMemsetD8Async(p, 3, 16, free))      # a non-blocking stream does not wait for it
ok(cu.cuStreamSynchronize(free))
other = ok(cu.cuStreamCreate(0))
ok(cu.cuMemsetD8Async(p, 4, 16, other))     # a blocking one does
assert cu.cuStreamQuery(other)[0] == NOT_READY
go.set()
ok(cu.cuStreamSynchronize(other))
assert get(p, 1) == bytes([4])
"""
    )


def test_events_order_streams_and_measure_time() -> None:
    run(
        HOLD
        + """
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
first, last = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
ok(cu.cuEventRecord(first, a))
hold(a)
ok(cu.cuMemsetD8Async(p, 1, 16, a))
ok(cu.cuEventRecord(last, a))
ok(cu.cuStreamWaitEvent(b, last, 0))
ok(cu.cuMemsetD8Async(p, 2, 16, b))
time.sleep(0.05)
assert cu.cuEventQuery(last)[0] == NOT_READY and cu.cuStreamQuery(b)[0] == NOT_READY
assert cu.cuEventElapsedTime(first, last)[0] == NOT_READY
go.set()
ok(cu.cuStreamSynchronize(b))
assert get(p, 1) == bytes([2])
assert 40 < ok(cu.cuEventElapsedTime(first, last)) < 5000
assert cu.cuEventDestroy(first)[0] == E.CUDA_SUCCESS and cu.cuEventDestroy(first)[0] == E.CUDA_ERROR_INVALID_HANDLE
"""
    )


def test_copies_take_the_time_their_bandwidth_says_without_using_the_processor() -> None:
    run(
        """
        start()
        n = 8 * MIB
        device, host = ok(cu.cuMemAlloc(n)), ok(cu.cuMemHostAlloc(n, 0))
        streams = [ok(cu.cuStreamCreate(1)) for _ in range(3)]
        def timed(*copies):
            began, cpu = time.monotonic(), time.process_time()
            for copy in copies: copy()
            queued = time.monotonic() - began
            ok(cu.cuCtxSynchronize())
            return queued, time.monotonic() - began, time.process_time() - cpu
        up = lambda i: lambda: ok(cu.cuMemcpyHtoDAsync(device, host, n, streams[i]))
        down = lambda i: lambda: ok(cu.cuMemcpyDtoHAsync(host, device, n, streams[i]))
        timed(up(0), down(1))  # threads and pages
        queued, one, cpu = timed(up(0))
        assert queued < 0.05 and 0.098 < one < 0.2 and cpu < 0.08, (queued, one, cpu)
        assert 0.196 < timed(up(0), up(1))[1] < 0.32   # of one direction: one after the other
        assert 0.098 < timed(up(0), down(1))[1] < 0.19  # of both: side by side
        """,
        SOFTGPU_COPY_BANDWIDTH="80M",
    )


def test_pageable_sources_may_change_as_soon_as_the_call_returns() -> None:
    run(
        HOLD
        + """
s = ok(cu.cuStreamCreate(1))
source = bytearray(b"before")
hold(s)
ok(cu.cuMemcpyHtoDAsync(p, source, 6, s))
source[:] = b"after!"
go.set()
ok(cu.cuStreamSynchronize(s))
assert get(p, 6) == b"before"
"""
    )


@pytest.mark.parametrize("copy", ["HtoDAsync(device, host", "DtoHAsync(host, device"], ids=["to", "from"])
def test_copies_to_and_from_a_device_are_held(tmp_path: Path, copy: str) -> None:
    held = tmp_path / "held"
    held.touch()
    run(
        f"""
        import os
        start()
        device, host, s = ok(cu.cuMemAlloc(64)), ok(cu.cuMemHostAlloc(64, 0)), ok(cu.cuStreamCreate(1))
        ok(cu.cuMemcpy{copy}, 64, s))
        time.sleep(0.1)
        assert cu.cuStreamQuery(s)[0] == E.CUDA_ERROR_NOT_READY
        os.unlink({str(held)!r})
        ok(cu.cuStreamSynchronize(s))
        """,
        SOFTGPU_COPY_HOLD=held,
    )


def test_a_stream_is_waited_for_until_its_work_is_done_also_once_it_is_destroyed(tmp_path: Path) -> None:
    """A copy to pageable memory is made by the thread that asks for it."""
    held = tmp_path / "held"
    held.touch()
    run(
        f"""
        import os
        start()
        device, host, s = ok(cu.cuMemAlloc(64)), bytearray(64), ok(cu.cuStreamCreate(0))
        context = ok(cu.cuCtxGetCurrent())
        def beside(action):
            def act():
                ok(cu.cuCtxSetCurrent(context))
                ok(action())
            threading.Thread(target=act, daemon=True).start()
            time.sleep(0.2)
        beside(lambda: cu.cuMemcpyDtoHAsync(host, device, 64, s))
        beside(lambda: cu.cuStreamDestroy(s))
        assert cu.cuStreamQuery(0)[0] == E.CUDA_ERROR_NOT_READY
        os.unlink({str(held)!r})
        ok(cu.cuCtxSynchronize())
        """,
        SOFTGPU_COPY_HOLD=held,
    )


def test_launches_are_delayed_by_the_latency_set() -> None:
    run(
        """
        start()
        kernel, p, s = addn(), ok(cu.cuMemAlloc(64)), ok(cu.cuStreamCreate(1))
        began = time.monotonic()
        ok(launch(kernel, p, 1, 1, s))
        assert time.monotonic() - began < 0.05
        ok(cu.cuStreamSynchronize(s))
        assert 0.1 <= time.monotonic() - began < 0.4
        """,
        SOFTGPU_LAUNCH_LATENCY=100000,
    )


def test_stream_memory_operations_wait_and_write() -> None:
    run(
        HOLD
        + """
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitValue32(a, p, 7, 1))
ok(cu.cuMemsetD8Async(int(p) + 64, 9, 4, a))
time.sleep(0.02)
assert cu.cuStreamQuery(a)[0] == NOT_READY
ok(cu.cuStreamWriteValue32(b, p, 7, 0))
ok(cu.cuStreamSynchronize(a))
assert get(int(p) + 64, 4) == bytes([9] * 4)
"""
    )


def test_an_event_recorded_in_a_context_is_behind_all_its_streams_and_before_what_comes_later() -> None:
    run(
        HOLD
        + """
a, b, c = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(0))
e = ok(cu.cuEventCreate(0))
context = ok(cu.cuCtxGetCurrent())
ok(cu.cuCtxRecordEvent(context, e))
ok(cu.cuEventQuery(e))
ok(cu.cuStreamWaitValue32(a, p, 7, 1))
ok(cu.cuMemsetD8Async(int(p) + 64, 9, 4, b))
ok(cu.cuCtxRecordEvent(context, e))
ok(cu.cuMemsetD8Async(int(p) + 128, 9, 4, c))
ok(cu.cuStreamSynchronize(c))
assert cu.cuEventQuery(e)[0] == NOT_READY
ok(cu.cuStreamWriteValue32(b, p, 7, 0))
ok(cu.cuEventSynchronize(e))
assert cu.cuStreamQuery(a)[0] == E.CUDA_SUCCESS
"""
    )


def test_a_fault_in_a_kernel_is_named_and_sticks_to_its_context_only() -> None:
    run(
        """
        start()
        kernel, s = addn(), ok(cu.cuStreamCreate(0))
        ok(launch(kernel, 0x1000, 1, 1, s))
        assert cu.cuStreamSynchronize(s)[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
        assert cu.cuMemGetInfo()[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
        second = ok(cu.cuCtxCreate(None, 0, 0))
        p = ok(cu.cuMemAlloc(16))
        ok(cu.cuMemsetD8(p, 0, 16))
        ok(launch(addn(), p, 4, 2))
        assert words(p, 4) == [2] * 4
        """,
        error="0x1000",
    )


def test_bad_launches_are_refused_at_the_call() -> None:
    run(
        """
        start()
        kernel, p = addn(), ok(cu.cuMemAlloc(64))
        bad = E.CUDA_ERROR_INVALID_VALUE
        go = lambda grid, block, shared: cu.cuLaunchKernel(kernel, *grid, *block, shared, 0, arguments(p, 1, 1), 0)[0]
        assert go((0, 1, 1), (1, 1, 1), 0) == bad and go((1, 1, 1), (1025, 1, 1), 0) == bad
        assert go((1, 1, 1), (32, 32, 2), 0) == bad and go((1, 1, 1), (1, 1, 1), 50000) == bad
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(kernel, attribute, 60000))
        assert go((1, 1, 1), (1, 1, 1), 50000) == E.CUDA_SUCCESS
        wild = cu.CUfunction(12345678)
        assert cu.cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0] == E.CUDA_ERROR_INVALID_HANDLE
        ok(cu.cuCtxSynchronize())
        """
    )


def test_threads_that_work_at_once_do_not_disturb_each_other() -> None:
    run(
        """
        start()
        kernel, context = addn(), ok(cu.cuCtxGetCurrent())
        wrong = []
        def work(seed):
            ok(cu.cuCtxSetCurrent(context))
            s = ok(cu.cuStreamCreate(1))
            for _ in range(30):
                p = ok(cu.cuMemAlloc(1024 * (1 + seed % 3) ** 6))
                ok(cu.cuMemsetD32Async(p, seed, 200, s))
                for _ in range(5): ok(launch(kernel, p, 200, 1, s))
                ok(cu.cuStreamSynchronize(s))
                if words(p, 200) != [seed + 5] * 200: wrong.append(seed)
                ok(cu.cuMemFree(p))
            ok(cu.cuStreamDestroy(s))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not wrong
        """
    )


CAPTURE = """
start()
kernel, p = addn(), ok(cu.cuMemAlloc(400))
ok(cu.cuMemsetD32(p, 0, 100))
MODE = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
e, f = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
ok(cu.cuCtxSynchronize())                       # a fill does not wait for its end, nor a or b for the legacy stream
"""


def test_a_capture_across_streams_becomes_a_graph_that_runs_again_and_again() -> None:
    run(
        CAPTURE
        + """
ok(cu.cuStreamBeginCapture(a, MODE))
ok(launch(kernel, p, 100, 1, a))
ok(cu.cuEventRecord(e, a))
ok(cu.cuStreamWaitEvent(b, e, 0))
ok(launch(kernel, p, 50, 10, b))
ok(cu.cuMemsetD32Async(int(p) + 396, 7, 1, a))
ok(cu.cuEventRecord(f, b))
ok(cu.cuStreamWaitEvent(a, f, 0))
ok(cu.cuMemcpyDtoDAsync(int(p) + 392, p, 4, a))
info = ok(cu.cuStreamGetCaptureInfo(a))
assert info[0] == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
graph = ok(cu.cuStreamEndCapture(a))
ok(cu.cuStreamSynchronize(a))
assert words(p, 100) == [0] * 100           # nothing ran
nodes, count = ok(cu.cuGraphGetNodes(graph, 8))
kinds = [ok(cu.cuGraphNodeGetType(n)).name.rsplit("_", 1)[1] for n in nodes[:count]]
assert kinds == ["KERNEL", "KERNEL", "MEMSET", "MEMCPY"], kinds
assert ok(cu.cuGraphGetRootNodes(graph, 8))[1] == 1
assert ok(cu.cuGraphGetEdges(graph, 8))[3] == 4
run = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphDestroy(graph))
for _ in range(3): ok(cu.cuGraphLaunch(run, b))
ok(cu.cuStreamSynchronize(b))
assert words(p, 100) == [33] * 50 + [3] * 48 + [33, 7]
"""
    )


def test_captures_that_go_wrong_say_how() -> None:
    run(
        CAPTURE
        + """
ok(cu.cuStreamBeginCapture(a, MODE))
ok(cu.cuEventRecord(e, a))
ok(cu.cuStreamWaitEvent(b, e, 0))
ok(launch(kernel, p, 1, 1, b))
assert cu.cuStreamEndCapture(a)[0] == E.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
assert ok(cu.cuStreamIsCapturing(b)) == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
assert cu.cuStreamEndCapture(a)[0] == E.CUDA_ERROR_ILLEGAL_STATE
blocking = ok(cu.cuStreamCreate(0))
ok(cu.cuStreamBeginCapture(blocking, MODE))
assert cu.cuMemsetD8Async(p, 0, 1, 0)[0] == E.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
assert cu.cuStreamEndCapture(blocking)[0] == E.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
ok(cu.cuStreamBeginCapture(blocking, MODE))
assert cu.cuStreamIsCapturing(0)[0] == E.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
ok(cu.cuStreamEndCapture(blocking))
for too_much in (cu.cuCtxSynchronize, lambda: cu.cuCtxRecordEvent(ok(cu.cuCtxGetCurrent()), e),
                 lambda: cu.cuStreamQuery(a), lambda: cu.cuStreamSynchronize(b), lambda: cu.cuMemAlloc(16)):
    ok(cu.cuStreamBeginCapture(a, MODE))
    assert too_much()[0] == E.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert cu.cuStreamEndCapture(a)[0] == E.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
assert cu.cuStreamBeginCapture(0, MODE)[0] == E.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
"""
    )


def test_graphs_are_built_by_hand_cloned_and_updated() -> None:
    run(
        CAPTURE
        + """
graph = ok(cu.cuGraphCreate(0))
fill = cu.CUDA_MEMSET_NODE_PARAMS()
fill.dst, fill.elementSize, fill.width, fill.height, fill.value = p, 4, 100, 1, 5
first = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill, ok(cu.cuCtxGetCurrent())))
k = cu.CUDA_KERNEL_NODE_PARAMS()
k.func, k.gridDimX, k.gridDimY, k.gridDimZ, k.blockDimX, k.blockDimY, k.blockDimZ = kernel, 1, 1, 1, 128, 1, 1
k.kernelParams = arguments(p, 100, 3)
second = ok(cu.cuGraphAddKernelNode(graph, [first], 1, k))
assert ok(cu.cuGraphNodeGetDependencies(second, 4))[2] == 1
run_it = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphLaunch(run_it, a))
k.kernelParams = arguments(p, 100, 30)
ok(cu.cuGraphExecKernelNodeSetParams(run_it, second, k))
ok(cu.cuStreamSynchronize(a))
assert words(p, 100) == [8] * 100            # the launch before the update kept its parameters
ok(cu.cuGraphLaunch(run_it, a))
ok(cu.cuStreamSynchronize(a))
assert words(p, 100) == [35] * 100
clone = ok(cu.cuGraphClone(graph))
twin = ok(cu.cuGraphNodeFindInClone(second, clone))
assert ok(cu.cuGraphNodeGetType(twin)) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
ok(cu.cuGraphNodeSetEnabled(run_it, second, 0))
ok(cu.cuGraphLaunch(run_it, a))
ok(cu.cuStreamSynchronize(a))
assert words(p, 100) == [5] * 100
assert cu.cuGraphAddDependencies(graph, [second], [first], None, 1)[0] == E.CUDA_SUCCESS
assert cu.cuGraphInstantiate(graph, 0)[0] == E.CUDA_ERROR_INVALID_VALUE  # a cycle
"""
    )


def test_after_the_stack_limit_has_changed_all_streams_wait_for_the_first_kernel() -> None:
    """As the driver does (580.159.04, H100); there a memset of 1 MiB is a kernel, and one of 3 bytes is not."""
    run(
        HOLD
        + """
LIMIT, SIZE = cu.CUlimit.CU_LIMIT_STACK_SIZE, 1 << 20
held, free = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
large = ok(cu.cuMemAlloc(SIZE))
former = ok(cu.cuCtxGetLimit(LIMIT))
for value in 128, former:
    ok(cu.cuCtxSetLimit(LIMIT, value))
ok(cu.cuMemsetD8Async(p, 1, 3, free))
ok(cu.cuStreamSynchronize(free))
hold(held)
ok(cu.cuMemsetD8Async(p, 2, 3, free))
ok(cu.cuStreamSynchronize(free))            # there was no kernel yet
ok(cu.cuMemsetD8Async(large, 1, SIZE, held))
ok(cu.cuMemsetD8Async(p, 3, 3, free))
time.sleep(0.05)
assert cu.cuStreamQuery(free)[0] == NOT_READY
go.set()
ok(cu.cuStreamSynchronize(free))
go.clear()
ok(cu.cuCtxSetLimit(LIMIT, former))         # no change
hold(held)
ok(cu.cuMemsetD8Async(large, 1, SIZE, held))
ok(cu.cuMemsetD8Async(large, 2, SIZE, free))
ok(cu.cuStreamSynchronize(free))
go.set()
ok(cu.cuCtxSynchronize())
"""
    )


def test_a_launch_of_a_shape_that_the_kernel_cannot_have_is_refused_at_once_and_the_context_goes_on() -> None:
    run(
        HOLD
        + r'''
PTX = b""".version 8.5
.target sm_90
.address_size 64
.visible .entry fixed(.param .u64 o) .reqntid 64 { .reg .b64 %d; ld.param.u64 %d, [o]; st.global.u32 [%d], 7; ret; }
.visible .entry clustered() .explicitcluster .reqnctapercluster 2, 1, 1 { ret; }
\0"""
module = ok(cu.cuModuleLoadData(PTX))
fixed, clustered = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"fixed", b"clustered"))
arguments = ((int(p),), (ctypes.c_void_p,))
def launch(function, block, arguments):
    return cu.cuLaunchKernel(function, 2, 1, 1, block, 1, 1, 0, 0, arguments, 0)[0]
assert launch(fixed, 32, arguments) == E.CUDA_ERROR_INVALID_VALUE
assert launch(clustered, 32, 0) == E.CUDA_ERROR_NOT_SUPPORTED
ok(cu.cuCtxSynchronize())
assert launch(fixed, 64, arguments) == E.CUDA_SUCCESS
ok(cu.cuCtxSynchronize())
assert get(p, 4) == bytes([7, 0, 0, 0])
'''
    )


@pytest.mark.parametrize("kind", ["PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT"])
def test_events_that_a_launch_is_to_record_are_refused(kind: str) -> None:
    run(
        HOLD
        + f"""
PTX = b".version 8.5\\n.target sm_90\\n.address_size 64\\n.visible .entry k() {{ ret; }}\\0"
function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(PTX)), b"k"))
attribute = cu.CUlaunchAttribute()
attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_{kind}
config = cu.CUlaunchConfig()
config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
config.attrs, config.numAttrs = [attribute], 1
assert cu.cuLaunchKernelEx(config, function, 0, 0)[0] == E.CUDA_ERROR_NOT_SUPPORTED
config.numAttrs = 0
ok(cu.cuLaunchKernelEx(config, function, 0, 0))
"""
    )


def test_a_launch_of_a_graph_records_the_events_of_its_nodes() -> None:
    """Not the node when it runs: who asks for the event, or waits for it, meanwhile goes by this launch."""
    run(
        HOLD
        + """
stream, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
begun, ended = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
graph, inner = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddEventRecordNode(inner, None, 0, ended))
waits = ok(cu.cuGraphAddEventWaitNode(graph, None, 0, ended))  # for the launch before
first = ok(cu.cuGraphAddEventRecordNode(graph, [waits], 1, begun))
ok(cu.cuGraphAddChildGraphNode(graph, [first], 1, inner))
run_it = ok(cu.cuGraphInstantiate(graph, 0))
assert cu.cuEventQuery(ended)[0] == E.CUDA_SUCCESS  # never recorded
hold(stream)
ok(cu.cuGraphLaunch(run_it, stream))
ok(cu.cuGraphLaunch(run_it, stream))
ok(cu.cuStreamWaitEvent(other, ended, 0))
ok(cu.cuMemsetD8Async(p, 5, 16, other))
time.sleep(0.05)
assert cu.cuEventQuery(begun)[0] == NOT_READY and cu.cuEventQuery(ended)[0] == NOT_READY
assert cu.cuStreamQuery(other)[0] == NOT_READY
go.set()
ok(cu.cuEventSynchronize(ended))
ok(cu.cuStreamSynchronize(other))
assert get(p, 1) == bytes([5])
assert 0 <= ok(cu.cuEventElapsedTime(begun, ended)) < 5000
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
assert int(cu.cuGraphLaunch(run_it, stream)[0]) == 900 and int(cu.cuStreamEndCapture(stream)[0]) == 901
before = ok(cu.cuEventElapsedTime(begun, ended))
outer = ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddChildGraphNode(outer, None, 0, graph))
ok(cu.cuGraphInstantiate(outer, 0))  # and records nothing yet
assert ok(cu.cuEventElapsedTime(begun, ended)) == before
"""
    )


def test_launches_of_an_executable_graph_come_one_behind_the_other() -> None:
    """In whichever streams; else an earlier one would wait for the event of a later one, here."""
    run(
        HOLD
        + """
streams = [ok(cu.cuStreamCreate(1)) for _ in range(2)]
event = ok(cu.cuEventCreate(0))
graph = ok(cu.cuGraphCreate(0))
waits = ok(cu.cuGraphAddEventWaitNode(graph, None, 0, event))
ok(cu.cuGraphAddEventRecordNode(graph, [waits], 1, event))
run_it = ok(cu.cuGraphInstantiate(graph, 0))
hold(streams[0])
ok(cu.cuGraphLaunch(run_it, streams[0]))
for _ in range(50):
    for stream in reversed(streams):
        ok(cu.cuGraphLaunch(run_it, stream))
time.sleep(0.05)
assert cu.cuStreamQuery(streams[1])[0] == NOT_READY
go.set()
for stream in streams:
    ok(cu.cuStreamSynchronize(stream))
"""
    )


def test_who_waits_for_an_event_of_a_graph_that_fails_is_told() -> None:
    run(
        HOLD
        + """
stream = ok(cu.cuStreamCreate(1))
event = ok(cu.cuEventCreate(0))
graph = ok(cu.cuGraphCreate(0))
k = cu.CUDA_KERNEL_NODE_PARAMS()
k.func, k.kernelParams = addn(), arguments(64, 1, 1)  # no memory of anybody's
k.gridDimX = k.gridDimY = k.gridDimZ = k.blockDimX = k.blockDimY = k.blockDimZ = 1
fails = ok(cu.cuGraphAddKernelNode(graph, None, 0, k))
ok(cu.cuGraphAddEventRecordNode(graph, [fails], 1, event))
run_it = ok(cu.cuGraphInstantiate(graph, 0))
hold(stream)
ok(cu.cuGraphLaunch(run_it, stream))
ok(cu.cuGraphLaunch(run_it, stream))
go.set()
assert cu.cuEventSynchronize(event)[0] == E.CUDA_ERROR_ILLEGAL_ADDRESS
"""
    )


def test_a_stream_that_is_full_makes_who_submits_wait() -> None:
    run(
        HOLD
        + """
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
context = ok(cu.cuCtxGetCurrent())
hold(a)
done = []
def submit():
    ok(cu.cuCtxSetCurrent(context))
    for value in range(10):
        ok(cu.cuMemsetD8Async(p, value, 16, a))
        done.append(value)
thread = threading.Thread(target=submit)
thread.start()
while len(done) < 4:
    time.sleep(0.001)
time.sleep(0.1)
assert len(done) in (4, 5), done            # whether or not the one that waits has begun
ok(cu.cuMemsetD8Async(int(p) + 16, 7, 16, b))
ok(cu.cuStreamSynchronize(b))               # others are not held up
go.set()
thread.join()
ok(cu.cuStreamSynchronize(a))
assert get(p, 1) == bytes([9])
""",
        SOFTGPU_QUEUE="4",
    )
