/* CUDA's virtual memory management: address reservations, physical handles, mappings, access. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "softgpu.h"

struct reservation {
    uint64_t begin, end;
};
static struct sg_map reservations; /* struct reservation; under sg_map_lock */

/* Under sg_map_lock: [address, address+size) lies in one reservation. */
static struct reservation *reserved(uint64_t address, size_t size)
{
    size_t at = sg_map_upper(&reservations, address);
    if (!at)
        return NULL;
    struct reservation *found = reservations.items[at - 1];
    return address + size >= address && address + size <= found->end ? found : NULL;
}

static bool aligned(uint64_t address, size_t size)
{
    return size && address % SG_GRANULARITY == 0 && size % SG_GRANULARITY == 0;
}

CUresult softgpu_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
{
    if (!ptr || flags || !aligned(0, size) || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    struct reservation *made = malloc(sizeof(*made));
    void *at = made ? sg_reserve(size, alignment, addr) : NULL;
    if (!at) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    madvise(at, size, MADV_DONTFORK);
    *made = (struct reservation){(uintptr_t)at, (uintptr_t)at + size};
    pthread_mutex_lock(&sg_map_lock);
    bool ok = sg_map_insert(&reservations, made);
    pthread_mutex_unlock(&sg_map_lock);
    if (!ok) {
        munmap(at, size);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *ptr = made->begin;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_map_lock);
    struct reservation *found = reserved(ptr, size);
    if (!found || found->begin != ptr || found->end != ptr + size)
        result = CUDA_ERROR_INVALID_VALUE;
    else {
        size_t next = sg_map_upper(&sg_ranges, ptr + size - 1);
        if (next && ((struct sg_range *)sg_ranges.items[next - 1])->end > ptr)
            result = CUDA_ERROR_INVALID_VALUE; /* something is still mapped in it */
        else
            sg_map_remove(&reservations, found);
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (result == CUDA_SUCCESS) {
        munmap((void *)(uintptr_t)ptr, size);
        free(found);
    }
    return result;
}

static CUresult check_location(const CUmemLocation *location, int *device)
{
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (!sg_device(location->id))
            return CUDA_ERROR_INVALID_DEVICE;
        *device = location->id;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *device = -1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult softgpu_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                             unsigned long long flags)
{
    int device;
    if (!handle || !prop || flags || !aligned(0, size) || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = check_location(&prop->location, &device);
    if (result != CUDA_SUCCESS)
        return result;
    if (sg_fault(SG_FAULT_ALLOC) || sg_fault(SG_FAULT_ALLOC_AFTER))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sg_physical *physical;
    result = sg_physical_create(device, size, &physical);
    if (result != CUDA_SUCCESS)
        return result;
    physical->prop = *prop;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

static struct sg_physical *physical_get(CUmemGenericAllocationHandle handle)
{
    void *object = (void *)(uintptr_t)handle;
    return sg_handle_is(object, SG_PHYSICAL) ? object : NULL;
}

CUresult softgpu_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct sg_physical *physical = physical_get(handle);
    if (!physical)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_fault(SG_FAULT_RELEASE))
        return CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&sg_map_lock); /* against a concurrent cuMemRetainAllocationHandle */
    bool last = atomic_fetch_sub(&physical->handles, 1) == 1;
    if (last)
        sg_handle_remove(physical, SG_PHYSICAL);
    pthread_mutex_unlock(&sg_map_lock);
    sg_physical_unreference(physical);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_map_lock);
    struct sg_range *range = sg_range_at((uintptr_t)addr);
    if (range && range->kind == SG_MEM_VMM && range->physical) {
        struct sg_physical *physical = range->physical;
        atomic_fetch_add(&physical->references, 1);
        if (atomic_fetch_add(&physical->handles, 1) == 0)
            sg_handle_add(physical, SG_PHYSICAL);
        *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sg_map_lock);
    return result;
}

static CUresult map(uint64_t ptr, size_t size, struct sg_physical *physical)
{
    pthread_mutex_lock(&sg_map_lock);
    size_t next = sg_map_upper(&sg_ranges, ptr + size - 1);
    bool taken = next && ((struct sg_range *)sg_ranges.items[next - 1])->end > ptr;
    bool ok = !taken && reserved(ptr, size);
    pthread_mutex_unlock(&sg_map_lock);
    if (!ok)
        return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(at, size, MADV_DONTFORK);
    atomic_fetch_add(&physical->references, 1);
    struct sg_range *range = sg_range_new(ptr, size, SG_MEM_VMM, physical->device, NULL);
    if (!range) {
        mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        sg_physical_unreference(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* No access yet, so nothing looked at it before this. */
    pthread_mutex_lock(&sg_map_lock);
    range->physical = physical;
    pthread_mutex_unlock(&sg_map_lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags)
{
    struct sg_physical *physical = physical_get(handle);
    if (!physical || offset || flags || !aligned(ptr, size) || size > physical->size)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_fault(SG_FAULT_MAP))
        return CUDA_ERROR_OUT_OF_MEMORY;
    /* One mapping at a time, so that two cannot find the same place free. */
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    CUresult result = map(ptr, size, physical);
    pthread_mutex_unlock(&one);
    return result;
}

/* Under sg_map_lock: the mappings that cover [ptr, ptr+size) exactly, without gaps: index of the first, or -1. */
static ssize_t covering(uint64_t ptr, size_t size, size_t *count)
{
    size_t first = sg_map_upper(&sg_ranges, ptr);
    if (!aligned(ptr, size) || ptr + size < ptr || !first)
        return -1;
    first--;
    uint64_t at = ptr;
    size_t i = first;
    for (; i < sg_ranges.count && at < ptr + size; i++) {
        struct sg_range *range = sg_ranges.items[i];
        if (range->begin != at || range->kind != SG_MEM_VMM || range->end > ptr + size)
            return -1;
        at = range->end;
    }
    *count = i - first;
    return at == ptr + size ? (ssize_t)first : -1;
}

CUresult softgpu_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    size_t count = 0;
    if (sg_fault(SG_FAULT_UNMAP))
        return CUDA_ERROR_UNKNOWN;
    sg_use_exclusive_begin();
    pthread_mutex_lock(&sg_map_lock);
    ssize_t first = covering(ptr, size, &count);
    struct sg_range **gone = first < 0 ? NULL : malloc(count * sizeof(*gone));
    for (size_t i = 0; gone && i < count; i++) {
        gone[i] = sg_ranges.items[first];
        sg_map_remove(&sg_ranges, gone[i]);
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (gone) {
        void *at = mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (at != MAP_FAILED)
            madvise(at, size, MADV_DONTFORK);
    }
    sg_use_exclusive_end();
    if (first < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!gone)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < count; i++) {
        sg_physical_unreference(gone[i]->physical);
        free(gone[i]);
    }
    free(gone);
    return CUDA_SUCCESS;
}

static int protection(const struct sg_range *range)
{
    return range->writable ? PROT_READ | PROT_WRITE : range->readable ? PROT_READ : PROT_NONE;
}

CUresult softgpu_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    if (!desc || !count)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_fault(SG_FAULT_ACCESS))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint32_t read = 0, write = 0, touched = 0;
    for (size_t i = 0; i < count; i++) {
        int device;
        CUresult result = check_location(&desc[i].location, &device);
        if (result != CUDA_SUCCESS)
            return result;
        if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
            desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
        uint32_t bit = device < 0 ? 1u << 31 : 1u << device; /* bit 31: the host */
        touched |= bit;
        read = desc[i].flags & 1 ? read | bit : read & ~bit;
        write = desc[i].flags & 2 ? write | bit : write & ~bit;
    }
    CUresult result = CUDA_SUCCESS;
    size_t ranges = 0;
    bool exclusive = false;
again:
    pthread_mutex_lock(&sg_map_lock);
    ssize_t first = covering(ptr, size, &ranges);
    if (first < 0)
        result = CUDA_ERROR_INVALID_VALUE;
    bool less = false;
    for (size_t i = 0; result == CUDA_SUCCESS && i < ranges; i++) {
        struct sg_range *range = sg_ranges.items[(size_t)first + i];
        less |= (range->readable & touched & ~read) || (range->writable & touched & ~write);
    }
    if (less && !exclusive) {
        /* Work in flight may be using what is taken away: wait for it, and look again. */
        pthread_mutex_unlock(&sg_map_lock);
        sg_use_exclusive_begin();
        exclusive = true;
        goto again;
    }
    for (size_t i = 0; result == CUDA_SUCCESS && i < ranges; i++) {
        struct sg_range *range = sg_ranges.items[(size_t)first + i];
        range->readable = (range->readable & ~touched) | read;
        range->writable = (range->writable & ~touched) | write;
        if (mprotect((void *)(uintptr_t)range->begin, range->end - range->begin, protection(range)))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (exclusive)
        sg_use_exclusive_end();
    return result;
}

CUresult softgpu_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    int device;
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_location(location, &device);
    struct sg_range range;
    if (result != CUDA_SUCCESS)
        return result;
    if (!sg_find_range(ptr, &range) || range.kind != SG_MEM_VMM)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned bit = device < 0 ? 31 : (unsigned)device;
    *flags = (range.readable >> bit & 1) | (range.writable >> bit & 1) << 1;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType handleType, unsigned long long flags)
{
    struct sg_physical *physical = physical_get(handle);
    if (!shareableHandle || !physical || flags)
        return CUDA_ERROR_INVALID_VALUE;
    /* As on the real driver: a handle that came from a descriptor cannot become one again (DESIGN §2). */
    if (physical->imported || !(physical->prop.requestedHandleTypes & (unsigned)handleType))
        return CUDA_ERROR_INVALID_VALUE;
    if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (sg_fault(SG_FAULT_EXPORT))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    atomic_store(&physical->exported, true);
    *(int *)shareableHandle = fd;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                CUmemAllocationHandleType shHandleType)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    if (shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (sg_fault(SG_FAULT_IMPORT))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int fd = fcntl((int)(uintptr_t)osHandle, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    sg_fd_own(fd);
    struct sg_physical *physical;
    CUresult result = sg_physical_wrap(fd, &physical);
    if (result != CUDA_SUCCESS)
        return result;
    physical->prop = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = physical->device < 0 ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE,
                     .id = physical->device < 0 ? 0 : physical->device},
    };
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option)
{
    int device;
    if (!granularity || !prop || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_location(&prop->location, &device);
    if (result == CUDA_SUCCESS)
        *granularity = SG_GRANULARITY;
    return result;
}

CUresult softgpu_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    struct sg_physical *physical = physical_get(handle);
    if (!prop || !physical)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = physical->prop;
    return CUDA_SUCCESS;
}
