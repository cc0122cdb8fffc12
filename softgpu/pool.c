/* Memory pools and stream-ordered allocation. Memory is made when it is asked for and freed when the stream reaches the
 * free; pools keep nothing back, so their release threshold is remembered and has no effect. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "op.h"

struct sg_pool *sg_pool_new(int device, const CUmemPoolProps *props)
{
    struct sg_pool *pool = calloc(1, sizeof(*pool));
    if (!pool)
        return NULL;
    pool->device = device;
    pool->reuse_follow = pool->reuse_opportunistic = pool->reuse_internal = 1;
    pool->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (props)
        pool->props = *props;
    if (sg_handle_add(pool, SG_POOL))
        return pool;
    free(pool);
    return NULL;
}

static struct sg_pool *pool_get(CUmemoryPool handle)
{
    return sg_handle_is(handle, SG_POOL) ? (struct sg_pool *)handle : NULL;
}

/* The device's pools; the default one is made at first use. */
static struct sg_pool *device_pool(struct sg_device *device, bool current)
{
    pthread_mutex_lock(&device->lock);
    if (!device->default_pool) {
        device->default_pool = sg_pool_new(device->ordinal, NULL);
        if (device->default_pool)
            device->default_pool->is_default = true;
    }
    if (!device->current_pool)
        device->current_pool = device->default_pool;
    struct sg_pool *pool = current ? device->current_pool : device->default_pool;
    pthread_mutex_unlock(&device->lock);
    return pool;
}

static CUresult get_pool(CUmemoryPool *out, CUdevice dev, bool current)
{
    struct sg_device *device = sg_device(dev);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = (CUmemoryPool)device_pool(device, current);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult softgpu_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    return get_pool(pool_out, dev, false);
}

CUresult softgpu_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    return get_pool(pool, dev, true);
}

CUresult softgpu_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle)
{
    struct sg_device *device = sg_device(dev);
    struct sg_pool *pool = pool_get(handle);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!pool || pool->device != dev)
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    pthread_mutex_lock(&device->lock);
    device->current_pool = pool;
    pthread_mutex_unlock(&device->lock);
    return CUDA_SUCCESS;
}

static CUresult by_location(CUmemoryPool *out, const CUmemLocation *location, CUmemAllocationType type, bool current)
{
    if (!location || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    return get_pool(out, location->id, current);
}

CUresult softgpu_cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
    return by_location(pool_out, location, type, false);
}

CUresult softgpu_cuMemGetMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)
{
    return by_location(pool_out, location, type, true);
}

CUresult softgpu_cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    if (!location || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE ? softgpu_cuDeviceSetMemPool(location->id, pool) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult softgpu_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        poolProps->handleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!sg_device(poolProps->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    SG_UNSAFE(NULL);
    *pool = (CUmemoryPool)sg_pool_new(poolProps->location.id, poolProps);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The pool's memory stays until it is freed, and so does the structure its allocations point to: only the handle goes. */
CUresult softgpu_cuMemPoolDestroy(CUmemoryPool handle)
{
    struct sg_pool *pool = pool_get(handle);
    if (!pool || pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    struct sg_device *device = sg_device(pool->device);
    pthread_mutex_lock(&device->lock);
    if (device->current_pool == pool)
        device->current_pool = device->default_pool;
    pthread_mutex_unlock(&device->lock);
    if (sg_handle_remove(pool, SG_POOL) && pool->imported)
        atomic_fetch_sub(&sg_pools_imported, 1);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    (void)minBytesToKeep;
    SG_UNSAFE(NULL);
    return pool_get(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct sg_pool *pool = pool_get(handle);
    if (!pool || !value)
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        pool->reuse_follow = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        pool->reuse_opportunistic = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse_internal = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        atomic_store(&pool->threshold, *(cuuint64_t *)value);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(cuuint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE; /* it can only be reset */
        atomic_store(&pool->used_high, atomic_load(&pool->used));
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult softgpu_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct sg_pool *pool = pool_get(handle);
    if (!pool || !value)
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        *(int *)value = pool->reuse_follow;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        *(int *)value = pool->reuse_opportunistic;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = pool->reuse_internal;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = atomic_load(&pool->threshold);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = atomic_load(&pool->used);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = atomic_load(&pool->used_high);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult softgpu_cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *map, size_t count)
{
    struct sg_pool *pool = pool_get(handle);
    if (!pool || (count && !map))
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    for (size_t i = 0; i < count; i++) {
        if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !sg_device(map[i].location.id))
            return CUDA_ERROR_INVALID_VALUE;
        pool->access[map[i].location.id] = map[i].flags;
    }
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle, CUmemLocation *location)
{
    struct sg_pool *pool = pool_get(handle);
    if (!flags || !pool || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE || !sg_device(location->id))
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    *flags = pool->access[location->id];
    return CUDA_SUCCESS;
}

/* ---- stream-ordered allocation ---- */

static CUresult allocate(CUdeviceptr *dptr, size_t size, struct sg_pool *pool, CUstream hStream)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!dptr)
        return CUDA_ERROR_INVALID_VALUE;
    bool captured = atomic_load(&sg_captures) && stream->capture;
    if (!captured)
        SG_UNSAFE(NULL);
    if (!size) {
        *dptr = 0;
        return CUDA_SUCCESS;
    }
    if (!pool)
        pool = device_pool(stream->context->device, true);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t address = 0;
    result = sg_allocate(stream->context, size, pool, &address);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        /* Frees that are queued may make room, as they do for the driver. */
        sg_stream_synchronize(stream);
        result = sg_allocate(stream->context, size, pool, &address);
    }
    if (result != CUDA_SUCCESS)
        return result;
    *dptr = address;
    if (!captured)
        return CUDA_SUCCESS;
    sg_make_of_graph(address);
    struct sg_work work = {.type = SG_WORK_ALLOC, .alloc = {address, size}, .context = stream->context};
    return sg_submit(stream, &work, false, NULL);
}

CUresult softgpu_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    return allocate(dptr, bytesize, NULL, hStream);
}

CUresult softgpu_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool handle, CUstream hStream)
{
    struct sg_pool *pool = pool_get(handle);
    return pool ? allocate(dptr, bytesize, pool, hStream) : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    struct sg_stream *stream;
    struct sg_allocation allocation;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!dptr)
        return CUDA_SUCCESS;
    bool captured = atomic_load(&sg_captures) && stream->capture;
    if (!captured)
        SG_UNSAFE(NULL);
    if (!sg_find_allocation(dptr, &allocation) || allocation.begin != dptr || (captured && !allocation.graph))
        return CUDA_ERROR_INVALID_VALUE;
    /* A graph is launched more than once: memory freed inside it stays, at its address, for the next launch. */
    struct sg_work work = {.type = captured ? SG_WORK_EMPTY : SG_WORK_FREE, .address = dptr, .context = stream->context};
    if (!captured)
        sg_set_unused(dptr, true);
    result = sg_submit(stream, &work, false, NULL);
    if (result != CUDA_SUCCESS && !captured)
        sg_set_unused(dptr, false);
    return result;
}
