/* Pools themselves: made, destroyed, asked and told. The handles are the driver's; of its answers, what concerns memory is
 * completed with what pool.c serves in its place. */
#include "cleanup.h"
#include "driver_shared.h"
#include "log.h"
#include "pool_private.h"
#include "runtime.h"
#include "track.h"
#include "window.h"

CUresult serve_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps_v1 *props)
{
    CUresult result = phos_real.cuMemPoolCreate(pool, props);
    if (result != CUDA_SUCCESS || !props)
        return result;
    CUdevice device = props->location.id;
    /* Memory for a special use, such as the decompression engine's, only the driver knows how to make. */
    bool ours = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE && props->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
                props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && !props->usage && device >= 0 &&
                device < phos_device_count && phos_devices[device].carried;
    if (!ours)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_pool *record = phos_pool_add(*pool, device, true);
    if (record)
        record->most = props->maxSize;
    else
        phos_warn_once("out of host memory: a pool is left to the driver");
    return result;
}

CUresult serve_cuMemPoolDestroy(CUmemoryPool handle)
{
    bool was_shared;
    {
        PHOS_LOCKED(&phos_memory_lock); /* before: afterwards the handle may be another one's */
        was_shared = phos_driver_shared_drop(PHOS_SHARED_POOL, (uintptr_t)handle);
    }
    CUresult result = phos_real.cuMemPoolDestroy(handle);
    PHOS_LOCKED(&phos_memory_lock);
    if (result != CUDA_SUCCESS) {
        if (was_shared)
            phos_driver_shared_add(PHOS_SHARED_POOL, (uintptr_t)handle, NULL);
        return result;
    }
    /* The oldest: since the driver's answer another thread may have been given the handle for a pool of its own. */
    struct phos_pool *gone = NULL;
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        if (pool->handle == handle && !pool->destroyed)
            gone = pool;
    if (gone) {
        gone->destroyed = true; /* it lives on until all its memory is freed */
        phos_pool_reap(gone);
        phos_pool_dispose_if_done(gone);
    }
    return result;
}

CUresult serve_cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    CUresult result = phos_real.cuMemPoolTrimTo(handle, keep);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_RELAXED;
    phos_window_stand_still();
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_pool *pool = phos_pool_of(handle);
        if (pool && pool->carried && pool->used + pool->waiting > keep) {
            phos_pool_reap(pool);
            phos_cache_flush(pool->device);
        }
    }
    phos_window_go_on();
    return result;
}

CUresult serve_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    CUresult result = phos_real.cuMemPoolSetAttribute(handle, attribute, value);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_pool *pool = phos_pool_of(handle);
    if (pool && pool->carried) {
        /* High marks can be set to zero only: they start again from now. */
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            pool->used_high = pool->used;
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
            pool->reserved_high = pool->used + pool->waiting;
        if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
            pool->keep = *(const cuuint64_t *)value;
    }
    return result;
}

CUresult serve_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    CUresult result = phos_real.cuMemPoolGetAttribute(handle, attribute, value);
    if (result != CUDA_SUCCESS || !value)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_pool *pool = phos_pool_of(handle);
    if (!pool || !pool->carried)
        return result;
    cuuint64_t *number = value; /* of these four; the others are flags and a threshold that the driver keeps */
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        *number += pool->used;
    else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        *number += pool->used_high;
    else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        *number += pool->used + pool->waiting;
    else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
        *number += pool->reserved_high;
    return result;
}

CUresult serve_cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc_v1 *map, size_t count)
{
    CUresult result = phos_real.cuMemPoolSetAccess(handle, map, count);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_pool *pool = phos_pool_of(handle);
    /* Pools share blocks with other memory of their device: what one may, all may, and who may read may write. It is taken
     * back from none. */
    for (size_t i = 0; pool && pool->carried && i < count && result == CUDA_SUCCESS; i++)
        if (map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && map[i].location.id != pool->device &&
            map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
            result = phos_peer_access(pool->device, map[i].location.id, true);
    return result;
}

CUresult serve_cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
                                                  unsigned long long flags)
{
    CUresult result = phos_real.cuMemPoolImportFromShareableHandle(pool, handle, type, flags);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_POOL, (uintptr_t)*pool, NULL);
    }
    return result;
}

CUresult serve_cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, CUmemAllocationHandleType type,
                                                unsigned long long flags)
{
    CUresult result = phos_real.cuMemPoolExportToShareableHandle(handle, pool, type, flags);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_POOL, (uintptr_t)pool, NULL);
    }
    return result;
}

/* A pool may be destroyed before its memory is freed. */
CUresult serve_cuMemPoolImportPointer(CUdeviceptr_v2 *address, CUmemoryPool pool, CUmemPoolPtrExportData_v1 *data)
{
    CUresult result = phos_real.cuMemPoolImportPointer(address, pool, data);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_POINTER, *address, NULL);
    }
    return result;
}

CUresult serve_cuMemPoolExportPointer(CUmemPoolPtrExportData_v1 *data, CUdeviceptr_v2 address)
{
    CUresult result = phos_real.cuMemPoolExportPointer(data, address);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_POINTER, address, NULL);
    }
    return result;
}
