/* Driver calls that do nothing, for tests of the allocator with a driver of their own. */
#pragma once
#include "phos_api.h"

static CUresult reserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
    (void)size, (void)alignment, (void)flags;
    *at = hint;
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags)
{
    (void)at, (void)size, (void)offset, (void)handle, (void)flags;
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count)
{
    (void)at, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

static CUresult current_device(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

static __thread CUstreamCaptureMode capture_mode;

static CUresult exchanged(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult context_version(CUcontext context, unsigned int *version)
{
    (void)context;
    *version = 3020;
    return CUDA_SUCCESS;
}
