/* cuMemAlloc and its relatives, served from VMM memory: see memory.h. */
#include "memory.h"
#include "cleanup.h"
#include "deferred.h"
#include "driver_shared.h"
#include "pool.h"
#include "runtime.h"
#include "track.h"
#include "window.h"

#include <limits.h>

static void free_if_in(struct phos_allocation *allocation, void *context)
{
    if (allocation->context != context)
        return;
    if (allocation->pool) /* the pool's, which is its device's */
        allocation->context = NULL;
    else
        phos_deallocate(allocation);
}

void phos_free_context(CUcontext context)
{
    phos_deferred_release(context, UINT64_MAX);
    phos_each_allocation(free_if_in, context);
}

/* ---- what the application calls ---- */

CUresult phos_current(CUcontext *context, CUdevice *device)
{
    CUresult result = phos_real.cuCtxGetCurrent(context);
    if (result == CUDA_SUCCESS && !*context)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS && !phos_context_lives(*context))
        result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (result == CUDA_SUCCESS)
        result = phos_real.cuCtxGetDevice(device);
    if (result == CUDA_SUCCESS && (*device < 0 || *device >= phos_device_count))
        result = CUDA_ERROR_INVALID_DEVICE;
    return result;
}

CUresult phos_synchronize_anyhow(CUcontext context)
{
    PHOS_RELAXED;
    CUcontext current = NULL;
    phos_real.cuCtxGetCurrent(&current);
    bool push = current != context;
    CUresult result = push ? phos_real.cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        result = phos_real.cuCtxSynchronize();
        if (push)
            phos_real.cuCtxPopCurrent_v2(&current);
    }
    return result;
}

CUresult phos_synchronize(CUcontext context, bool *captured)
{
    /* Synchronising a context while one of its streams is being captured is an error that also spoils the capture, in
     * whichever thread that is: none may begin meanwhile. */
    pthread_rwlock_rdlock(&phos_capture_lock);
    *captured = phos_captures() > 0;
    CUresult result = *captured ? CUDA_SUCCESS : phos_synchronize_anyhow(context);
    pthread_rwlock_unlock(&phos_capture_lock);
    return result;
}

static bool carried(CUdevice device)
{
    return phos_policy.carry_device && phos_devices[device].carried;
}

static CUresult allocate_for(CUdeviceptr *address, size_t size, const char *entry_point, CUdevice device,
                             CUcontext context)
{
    phos_context_seen(context, device);
    PHOS_MEMORY_LOCKED;
    struct phos_allocation *allocation;
    CUresult result = phos_allocate(device, phos_context_whole(context), size, entry_point, &allocation);
    if (result == CUDA_SUCCESS)
        *address = allocation->address;
    return result;
}

static CUresult left_to_driver(CUresult result, const CUdeviceptr *address, size_t size)
{
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_DEVICE, *address, size);
    return result;
}

CUresult serve_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    CUcontext context;
    CUdevice device;
    /* What is wrong with a call, the driver says best. */
    if (!dptr || !bytesize || phos_current(&context, &device) != CUDA_SUCCESS || !carried(device))
        return left_to_driver(phos_real.cuMemAlloc_v2(dptr, bytesize), dptr, bytesize);
    return allocate_for(dptr, bytesize, "cuMemAlloc", device, context);
}

CUresult serve_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    CUcontext context;
    CUdevice device;
    bool valid = dptr && pitch && width && height && width <= INT_MAX - PHOS_ALIGNMENT &&
                 (element == 4 || element == 8 || element == 16);
    if (!valid || phos_current(&context, &device) != CUDA_SUCCESS || !carried(device)) {
        CUresult result = phos_real.cuMemAllocPitch_v2(dptr, pitch, width, height, element);
        return left_to_driver(result, dptr, result == CUDA_SUCCESS ? *pitch * height : 0);
    }
    size_t row = (width + PHOS_ALIGNMENT - 1) & ~(PHOS_ALIGNMENT - 1), size;
    if (__builtin_mul_overflow(row, height, &size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = allocate_for(dptr, size, "cuMemAllocPitch", device, context);
    if (result == CUDA_SUCCESS)
        *pitch = row;
    return result;
}

static void release(void *allocation)
{
    phos_deallocate(allocation);
}

CUresult serve_cuMemFree_v2(CUdeviceptr address)
{
    CUcontext context = NULL;
    unsigned long long buffer = 0;
    uint64_t earlier;
    bool ours;
    {
        PHOS_MEMORY_LOCKED;
        earlier = phos_deferred_ever();
        struct phos_allocation *allocation = phos_allocation_at(address);
        if (allocation && allocation->address != address)
            return CUDA_ERROR_INVALID_VALUE;
        ours = allocation;
        if (ours && allocation->pool) {
            phos_pool_free_now(allocation);
            return CUDA_SUCCESS;
        }
        context = ours ? allocation->context : NULL;
        buffer = ours ? allocation->buffer : 0;
    }
    if (!ours) {
        struct phos_uncarried_memory *left = phos_uncarried_take(address);
        return phos_uncarried_freed(left, phos_driver_shared_free(address, phos_real.cuMemFree_v2));
    }
    /* cuMemFree waits for the device, as programs that free what a kernel still reads rely on. Not under the lock: other
     * threads may allocate meanwhile. */
    bool captured, more;
    CUresult result = phos_synchronize(context, &captured);
    {
        PHOS_MEMORY_LOCKED;
        struct phos_allocation *allocation = phos_allocation_at(address);
        if (!allocation || allocation->buffer != buffer)
            return CUDA_ERROR_INVALID_VALUE; /* freed twice at the same time, and perhaps given out again */
        if (captured) {
            if (!phos_deferred_add(context, release, allocation))
                return CUDA_ERROR_OUT_OF_MEMORY;
            allocation->state = PHOS_PENDING;
            return CUDA_SUCCESS;
        }
        phos_deallocate(allocation);
        more = phos_deferred_in(context);
    }
    if (more)
        phos_deferred_release_idle(context, earlier);
    return result;
}

CUresult serve_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult result = phos_real.cuMemGetInfo_v2(free_bytes, total);
    CUdevice device;
    CUcontext context;
    if (result != CUDA_SUCCESS || !free_bytes || phos_current(&context, &device) != CUDA_SUCCESS)
        return result;
    PHOS_MEMORY_LOCKED;
    *free_bytes += phos_cache_bytes(device) + phos_pool_cached(device);
    return result;
}
