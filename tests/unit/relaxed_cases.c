/* The frontend over a driver of this file's own, in which another thread begins a capture in the middle of an allocation, in the
 * mode in which calls of all threads can spoil it. */
#include "check.h"
#include "memory.h"
#include "runtime.h"
#include "stub_driver.h"
#include "track.h"

#include <stdio.h>
#include <stdlib.h>

#define MiB ((size_t)1 << 20)
#define STREAM ((CUstream)0x1000)

static bool capturing;

/* As a driver calls it that would spoil a capture. */
static CUresult unsafe(void)
{
    CHECK(!capturing || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    return CUDA_SUCCESS;
}

static CUresult free_memory(CUdeviceptr address)
{
    CHECK(!address);
    return capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static void begin_elsewhere(void)
{
    if (!capturing)
        CHECK(serve_cuStreamBeginCapture_v2(STREAM, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    capturing = true;
}

static void end_elsewhere(void)
{
    CHECK(capturing && serve_cuStreamEndCapture(STREAM, NULL) == CUDA_SUCCESS);
    capturing = false;
    CHECK(!phos_captures() && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    static CUmemGenericAllocationHandle last;
    (void)size, (void)properties, (void)flags;
    *handle = ++last;
    begin_elsewhere();
    return CUDA_SUCCESS;
}

static CUresult map_unsafely(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                             unsigned long long flags)
{
    return unsafe() == CUDA_SUCCESS ? map(at, size, offset, handle, flags) : CUDA_ERROR_UNKNOWN;
}

static CUresult set_access_unsafely(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count)
{
    return unsafe() == CUDA_SUCCESS ? set_access(at, size, access, count) : CUDA_ERROR_UNKNOWN;
}

static CUresult query(CUevent event)
{
    (void)event;
    unsafe();
    begin_elsewhere();
    return CUDA_ERROR_NOT_READY;
}

static CUresult event_create(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = (CUevent)0x3000;
    return CUDA_SUCCESS;
}

static CUresult event_record(CUevent event, CUstream stream)
{
    (void)event, (void)stream;
    return CUDA_SUCCESS;
}

static CUresult stream_id(CUstream stream, unsigned long long *number)
{
    *number = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

static CUresult usual_pool(CUmemoryPool *pool, CUdevice device)
{
    (void)device;
    *pool = (CUmemoryPool)0x4000;
    return CUDA_SUCCESS;
}

static CUresult current(CUcontext *context)
{
    *context = (CUcontext)0x5000;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(CUstream stream, CUstreamCaptureMode how)
{
    (void)stream, (void)how;
    return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    return CUDA_SUCCESS;
}

static CUresult not_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult stream_context(CUstream stream, CUcontext *context)
{
    (void)stream;
    return current(context);
}

int main(void)
{
    CUdeviceptr memory, small[3];
    phos_real.cuMemFree_v2 = free_memory;
    phos_real.cuMemCreate = create;
    phos_real.cuMemAddressReserve = reserve;
    phos_real.cuMemMap = map_unsafely;
    phos_real.cuMemSetAccess = set_access_unsafely;
    phos_real.cuThreadExchangeStreamCaptureMode = exchanged;
    phos_real.cuEventCreate = event_create;
    phos_real.cuEventRecord = event_record;
    phos_real.cuEventQuery = query;
    phos_real.cuStreamGetId = stream_id;
    phos_real.cuStreamGetCtx = stream_context;
    phos_real.cuStreamIsCapturing = not_capturing;
    phos_real.cuStreamBeginCapture_v2 = begin_capture;
    phos_real.cuStreamEndCapture = end_capture;
    phos_real.cuDeviceGetMemPool = phos_real.cuDeviceGetDefaultMemPool = usual_pool;
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuCtxGetDevice = current_device;
    phos_real.cuCtxGetApiVersion = context_version;
    phos_policy = (struct phos_policy){.carry_device = true, .carry_pools = true};
    phos_device_count = 1;
    phos_devices[0] = (struct phos_device){.total = (size_t)64 << 30, .granularity = 2 * MiB, .carried = true};

    CHECK(serve_cuMemAlloc_v2(&memory, 40 * MiB) == CUDA_SUCCESS);
    end_elsewhere();

    for (int i = 0; i < 3; i++) {
        CHECK(serve_cuMemAllocAsync(&small[i], 1000, NULL) == CUDA_SUCCESS);
        if (!capturing)
            continue;
        CHECK(serve_cuMemAllocAsync(&memory, 1000, NULL) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        CHECK(serve_cuMemFreeAsync(small[i], NULL) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        end_elsewhere();
    }
    for (int i = 0; i < 2; i++)
        CHECK(serve_cuMemFreeAsync(small[i], NULL) == CUDA_SUCCESS);
    CHECK(!capturing);
    /* It looks at both of those that were freed. */
    CHECK(serve_cuMemAllocAsync(&memory, 100000, NULL) == CUDA_SUCCESS);
    end_elsewhere();
    return 0;
}
