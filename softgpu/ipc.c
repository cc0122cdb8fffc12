/* Memory of another process by CUDA IPC, and pools that are shared by a handle.
 *
 * What travels is the owner's pid and where the memory lies in it; the memfd behind it is opened through the kernel's list of
 * the owner's mappings, so both must have one user, who may look there (root, or CAP_CHECKPOINT_RESTORE). Memory that was
 * opened and pools that were imported the driver saves with its process and cannot restore, and what was exported comes
 * back as other memory than the importers' (measured with driver 580; checkpoint.c). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softgpu.h"

struct place { /* what a handle holds */
    char magic[8];
    int pid;
    uint64_t begin, end, offset, size; /* of the mapping; of the memory in it */
};
struct pool_place { /* what the descriptor of a pool holds */
    char magic[8];
    int physical;
};
static const char memory_magic[8] = "sgmem-1", pool_magic[8] = "sgpool1";
_Static_assert(sizeof(struct place) <= sizeof(CUipcMemHandle), "a handle is 64 bytes");

_Atomic int sg_pools_imported;

static bool place_of(uint64_t address, bool pooled, void *out)
{
    struct place place = {.pid = getpid()};
    bool found = false;
    memcpy(place.magic, memory_magic, sizeof(place.magic));
    pthread_mutex_lock(&sg_map_lock);
    size_t at = sg_map_upper(&sg_allocations, address);
    const struct sg_allocation *allocation = at ? sg_allocations.items[at - 1] : NULL;
    if (allocation && address - allocation->begin < allocation->size && !allocation->range->imported &&
        pooled == (allocation->pool && allocation->pool->props.handleTypes) && (pooled || !allocation->pool)) {
        place.begin = allocation->range->begin;
        place.end = allocation->range->end;
        place.offset = allocation->begin - place.begin;
        place.size = allocation->size;
        found = true;
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (!found)
        return false;
    memset(out, 0, sizeof(CUipcMemHandle));
    memcpy(out, &place, sizeof(place));
    return true;
}

static CUresult import(const void *handle, struct sg_pool *pool, CUdeviceptr *out)
{
    struct place place;
    struct sg_context *context;
    char path[96];
    memcpy(&place, handle, sizeof(place));
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || memcmp(place.magic, memory_magic, sizeof(place.magic)))
        return CUDA_ERROR_INVALID_VALUE;
    if (place.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    snprintf(path, sizeof(path), "/proc/%d/map_files/%lx-%lx", place.pid, (unsigned long)place.begin, (unsigned long)place.end);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    int device = fd < 0 ? -2 : sg_memfd_device(fd);
    size_t size = place.end - place.begin;
    void *at = device >= 0 ? sg_reserve(size, 0, 0) : NULL;
    if (at && mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(at, size);
        at = NULL;
    }
    if (fd >= 0)
        close(fd);
    if (!at) {
        sg_log("memory of process %d at %#lx cannot be opened", place.pid, (unsigned long)place.begin);
        return CUDA_ERROR_INVALID_VALUE;
    }
    madvise(at, size, MADV_DONTFORK);
    result = sg_allocation_import(context, (uintptr_t)at, size, place.offset, place.size, device, pool);
    if (result != CUDA_SUCCESS)
        munmap(at, size);
    else
        *out = (uintptr_t)at + place.offset;
    return result;
}

CUresult softgpu_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
    return pHandle && place_of(dptr, false, pHandle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int flags)
{
    return flags & ~(unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ? CUDA_ERROR_INVALID_VALUE : import(&handle, NULL, pdptr);
}

CUresult softgpu_cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    struct sg_allocation allocation;
    if (!sg_find_allocation(dptr, &allocation) || !allocation.range->imported || allocation.pool)
        return CUDA_ERROR_INVALID_VALUE;
    return sg_free(allocation.begin, NULL);
}

CUresult softgpu_cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool handle, CUmemAllocationHandleType handleType,
                                                  unsigned long long flags)
{
    struct sg_pool *pool = sg_handle_is(handle, SG_POOL) ? (struct sg_pool *)handle : NULL;
    SG_UNSAFE(NULL);
    if (!handle_out || !pool || flags || pool->imported || !handleType || pool->props.handleTypes != handleType)
        return CUDA_ERROR_INVALID_VALUE;
    struct pool_place place = {.physical = atomic_load(&sg_device(pool->device)->physical)};
    memcpy(place.magic, pool_magic, sizeof(place.magic));
    int fd = memfd_create("softgpu-pool", MFD_CLOEXEC);
    if (fd < 0 || write(fd, &place, sizeof(place)) != sizeof(place)) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *(int *)handle_out = fd;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType,
                                                    unsigned long long flags)
{
    struct pool_place place;
    if (!pool_out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (pread((int)(uintptr_t)handle, &place, sizeof(place), 0) != sizeof(place) ||
        memcmp(place.magic, pool_magic, sizeof(place.magic)))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; sg_device(i); i++)
        if (atomic_load(&sg_device(i)->physical) == place.physical) {
            struct sg_pool *pool = sg_pool_new(i, NULL);
            if (!pool)
                return CUDA_ERROR_OUT_OF_MEMORY;
            pool->imported = true;
            atomic_fetch_add(&sg_pools_imported, 1);
            *pool_out = (CUmemoryPool)pool;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult softgpu_cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
{
    return shareData_out && place_of(ptr, true, shareData_out) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool handle, CUmemPoolPtrExportData *shareData)
{
    struct sg_pool *pool = sg_handle_is(handle, SG_POOL) ? (struct sg_pool *)handle : NULL;
    return pool && pool->imported && shareData ? import(shareData, pool, ptr_out) : CUDA_ERROR_INVALID_VALUE;
}
