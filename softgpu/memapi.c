/* cuMemAlloc and its kin, host memory, and what pointers are asked about. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "softgpu.h"

CUresult softgpu_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t memory = sg_settings()->memory, used = sg_used(context->device->ordinal);
    if (total)
        *total = memory;
    if (free_bytes)
        *free_bytes = used < memory ? memory - used : 0;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (!dptr)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t address = 0;
    result = sg_allocate(context, bytesize, NULL, &address);
    if (result == CUDA_SUCCESS)
        *dptr = address;
    return result;
}

CUresult softgpu_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                    unsigned int ElementSizeBytes)
{
    if (!dptr || !pPitch || !WidthInBytes || !Height ||
        (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t pitch = (WidthInBytes + 511) / 512 * 512;
    CUresult result = softgpu_cuMemAlloc_v2(dptr, pitch * Height);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    return result;
}

CUresult softgpu_cuMemFree_v2(CUdeviceptr dptr)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (!dptr)
        return CUDA_SUCCESS;
    struct sg_allocation allocation;
    if (sg_find_allocation(dptr, &allocation) && allocation.begin == dptr) {
        /* The driver's cuMemFree waits for the device; work of this context may be using the memory. */
        result = sg_context_synchronize(allocation.context ? allocation.context : context);
        CUresult freed = sg_free(dptr, NULL);
        return freed != CUDA_SUCCESS ? freed : result;
    }
    struct sg_range range;
    if (!sg_find_range(dptr, &range) || range.begin != dptr || range.kind != SG_MEM_MANAGED)
        return CUDA_ERROR_INVALID_VALUE;
    return softgpu_cuMemFreeHost((void *)(uintptr_t)dptr);
}

CUresult softgpu_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t begin, size;
    struct sg_allocation allocation;
    struct sg_range range;
    if (sg_find_allocation(dptr, &allocation)) {
        begin = allocation.begin;
        size = allocation.size;
    } else if (sg_find_range(dptr, &range) && !range.slab) {
        begin = range.begin;
        size = range.end - range.begin;
    } else {
        return CUDA_ERROR_NOT_FOUND;
    }
    if (pbase)
        *pbase = begin;
    if (psize)
        *psize = size;
    return CUDA_SUCCESS;
}

/* ---- host memory: plain private memory, which CRIU saves with the rest of the process ---- */

static CUresult host_allocate(void **out, size_t size, unsigned flags, enum sg_memory kind)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    size_t rounded = (size + 4095) / 4096 * 4096;
    void *at = rounded < size ? MAP_FAILED : mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sg_range *range = sg_range_new((uintptr_t)at, rounded, kind, -1, context);
    if (!range) {
        munmap(at, rounded);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    range->flags = flags;
    *out = at;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
    if (Flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    return host_allocate(pp, bytesize, Flags | CU_MEMHOSTALLOC_DEVICEMAP, SG_MEM_HOST);
}

CUresult softgpu_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    return softgpu_cuMemHostAlloc(pp, bytesize, 0);
}

CUresult softgpu_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    void *at = NULL;
    CUresult result = host_allocate(&at, bytesize, flags, SG_MEM_MANAGED);
    if (result == CUDA_SUCCESS)
        *dptr = (uintptr_t)at;
    return result;
}

/* Takes the range that begins at p out of the map; null if there is none of these kinds. */
static struct sg_range *take(void *p, bool (*wanted)(const struct sg_range *))
{
    sg_use_exclusive_begin();
    pthread_mutex_lock(&sg_map_lock);
    struct sg_range *range = sg_range_at((uintptr_t)p);
    if (range && (range->begin != (uintptr_t)p || !wanted(range)))
        range = NULL;
    if (range)
        sg_map_remove(&sg_ranges, range);
    pthread_mutex_unlock(&sg_map_lock);
    sg_use_exclusive_end();
    return range;
}

static bool is_host(const struct sg_range *range)
{
    return range->kind == SG_MEM_HOST || range->kind == SG_MEM_MANAGED;
}

static bool is_registered(const struct sg_range *range)
{
    return range->kind == SG_MEM_REGISTERED;
}

CUresult softgpu_cuMemFreeHost(void *p)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (!p)
        return CUDA_SUCCESS;
    result = sg_context_synchronize(context);
    struct sg_range *range = take(p, is_host);
    if (!range)
        return CUDA_ERROR_INVALID_VALUE;
    munmap(p, range->end - range->begin);
    free(range);
    return result;
}

CUresult softgpu_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (!p || !bytesize || (Flags & ~15u) || (uintptr_t)p + bytesize < (uintptr_t)p)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_fault(SG_FAULT_REGISTER))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t first = (uintptr_t)p & ~(uintptr_t)4095;
    if (msync((void *)first, (uintptr_t)p + bytesize - first, MS_ASYNC))
        return CUDA_ERROR_INVALID_VALUE; /* not memory of this process */
    pthread_mutex_lock(&sg_map_lock);
    size_t next = sg_map_upper(&sg_ranges, (uintptr_t)p + bytesize - 1);
    const struct sg_range *last = next ? sg_ranges.items[next - 1] : NULL;
    bool taken = last && last->end > (uintptr_t)p, registered = taken && is_registered(last);
    pthread_mutex_unlock(&sg_map_lock);
    if (taken)
        return registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    struct sg_range *range = sg_range_new((uintptr_t)p, bytesize, SG_MEM_REGISTERED, -1, context);
    if (!range)
        return CUDA_ERROR_OUT_OF_MEMORY;
    range->flags = Flags | CU_MEMHOSTREGISTER_DEVICEMAP;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemHostUnregister(void *p)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (sg_fault(SG_FAULT_UNREGISTER))
        return CUDA_ERROR_UNKNOWN;
    if (sg_fault(SG_FAULT_UNREGISTER_WAITS))
        sg_streams_idle(0);
    struct sg_range *range = take(p, is_registered);
    struct sg_range other;
    if (!range)
        return sg_find_range((uintptr_t)p, &other) && other.kind == SG_MEM_HOST ? CUDA_ERROR_INVALID_VALUE
                                                                               : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    free(range);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    struct sg_range range;
    if (!pdptr || Flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sg_find_range((uintptr_t)p, &range) || range.kind == SG_MEM_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    *pdptr = (uintptr_t)p;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
    struct sg_range range;
    if (!pFlags || !sg_find_range((uintptr_t)p, &range) || range.kind != SG_MEM_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    /* As driver 580: whether it is portable is said of write-combined memory alone. */
    *pFlags = range.flags & CU_MEMHOSTALLOC_WRITECOMBINED ? range.flags : CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
}

/* ---- pointers ---- */

static CUresult attribute(void *data, CUpointer_attribute name, CUdeviceptr ptr)
{
    struct sg_allocation allocation = {0};
    struct sg_range range;
    if (!sg_find_range(ptr, &range))
        return CUDA_ERROR_INVALID_VALUE;
    bool part = sg_find_allocation(ptr, &allocation);
    if (range.slab && !part)
        return CUDA_ERROR_INVALID_VALUE;
    bool host = range.device < 0 && range.kind != SG_MEM_MANAGED;
    struct sg_context *context = part ? allocation.context : range.context;
    switch ((int)name) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = range.kind == SG_MEM_VMM || (part && allocation.pool) ? NULL : (CUcontext)context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = ptr;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (range.kind == SG_MEM_DEVICE || range.kind == SG_MEM_VMM)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)(uintptr_t)ptr;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(int *)data = part && allocation.synchronous;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)data = part && !allocation.pool && !allocation.range->imported;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
        *(int *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        *(unsigned long long *)data = part ? allocation.id : range.id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(int *)data = range.kind == SG_MEM_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = range.device >= 0 ? range.device : context ? context->device->ordinal : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = part ? allocation.begin : range.begin;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = part ? allocation.size : range.end - range.begin;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)data = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = range.physical ? range.physical->prop.requestedHandleTypes : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(CUmemAccess_flags *)data = range.writable  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                     : range.readable ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                      : CU_MEM_ACCESS_FLAGS_PROT_NONE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = part ? (CUmemoryPool)allocation.pool : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *(size_t *)data = range.end - range.begin;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)data = range.begin;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult softgpu_cuPointerGetAttribute(void *data, CUpointer_attribute name, CUdeviceptr ptr)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    return data ? attribute(data, name, ptr) : CUDA_ERROR_INVALID_VALUE;
}

/* A pointer this driver knows nothing of is no error here: its attributes are 0. */
CUresult softgpu_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
{
    static const CUpointer_attribute wide[] = {
        CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
        CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
    };
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < numAttributes; i++) {
        if (!data[i])
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute(data[i], attributes[i], ptr) == CUDA_SUCCESS)
            continue;
        size_t size = sizeof(int);
        for (size_t j = 0; j < sizeof(wide) / sizeof(wide[0]); j++)
            if (wide[j] == attributes[i])
                size = 8;
        memset(data[i], 0, size);
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)data[i] = -2; /* CU_DEVICE_INVALID, as the driver answers for plain host memory */
    }
    return CUDA_SUCCESS;
}

CUresult softgpu_cuPointerSetAttribute(const void *value, CUpointer_attribute name, CUdeviceptr ptr)
{
    struct sg_range range;
    if (!value || !sg_find_range(ptr, &range))
        return CUDA_ERROR_INVALID_VALUE;
    if (range.kind == SG_MEM_VMM)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (name != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    SG_UNSAFE(NULL);
    sg_make_synchronous(ptr, *(const unsigned *)value);
    return CUDA_SUCCESS;
}

/* Hints about managed memory: there is one copy of it, so there is nothing to do. */
CUresult softgpu_cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
    (void)advice;
    (void)location;
    return sg_accessible(NULL, devPtr, count, false) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream)
{
    struct sg_stream *stream;
    (void)location;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result == CUDA_SUCCESS && (flags || !sg_accessible(NULL, devPtr, count, false)))
        result = CUDA_ERROR_INVALID_VALUE;
    return result;
}
