/* Questions about memory, answered as for cuMemAlloc memory where VMM memory behind it would show. */
#include "cleanup.h"
#include "ipc.h"
#include "memory.h"
#include "pool.h"
#include "runtime.h"

/* With the lock held. */
static CUdeviceptr asked(CUdeviceptr address)
{
    struct phos_mapping *mapping = phos_mapping_at(address);
    bool ours = mapping && mapping->span && mapping->span->kind != PHOS_SPAN_IMPORTED;
    return ours && !phos_allocation_at(address) ? 1 : address; /* at 1 no allocation is */
}

CUdeviceptr phos_query_address(CUdeviceptr address)
{
    PHOS_LOCKED(&phos_memory_lock);
    return asked(address);
}

CUresult serve_cuMemGetAddressRange_v2(CUdeviceptr_v2 *base, size_t *size, CUdeviceptr_v2 address)
{
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_allocation *allocation = phos_allocation_at(address);
        if (allocation) {
            if (base)
                *base = allocation->address;
            if (size)
                *size = allocation->size;
            return CUDA_SUCCESS;
        }
        const struct phos_opened *opened = phos_opened_at(address);
        if (opened) {
            if (base)
                *base = opened->address;
            if (size)
                *size = opened->size;
            return CUDA_SUCCESS;
        }
        address = asked(address);
    }
    return phos_real.cuMemGetAddressRange_v2(base, size, address);
}

/* VMM memory has a "device pointer" for the driver, cuMemAlloc memory none. */
static bool is_device_memory(const void *p)
{
    PHOS_LOCKED(&phos_memory_lock);
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)p;
    return phos_allocation_at(address) || phos_opened_at(address);
}

CUresult serve_cuMemHostGetDevicePointer_v2(CUdeviceptr_v2 *pointer, void *p, unsigned int flags)
{
    return is_device_memory(p) ? CUDA_ERROR_INVALID_VALUE : phos_real.cuMemHostGetDevicePointer_v2(pointer, p, flags);
}

CUresult serve_cuMemHostGetDevicePointer(CUdeviceptr_v1 *pointer, void *p, unsigned int flags)
{
    return is_device_memory(p) ? CUDA_ERROR_INVALID_VALUE : phos_real.cuMemHostGetDevicePointer(pointer, p, flags);
}

/* What of an allocation of ours differs from what the driver would say of its block. */
static void adjust(const struct phos_allocation *allocation, CUpointer_attribute attribute, void *data)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = allocation->pool ? NULL : allocation->context;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = allocation->buffer;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = allocation->address;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = allocation->size;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)data = allocation->pool == NULL; /* by token */
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = 0;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = phos_pool_handle(allocation->pool);
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)data = allocation->synchronous;
        break;
    default:
        break;
    }
}

/* Of the application's own mapping: what it asked for, without the descriptors that we did. And of another process's memory: the
 * allocation, not all that is mapped with it. */
static void adjust_other(CUdeviceptr address, CUpointer_attribute attribute, void *data)
{
    const struct phos_mapping *mapping = phos_mapping_at(address);
    const struct phos_opened *opened = phos_opened_at(address);
    if (mapping && !mapping->span && attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)
        *(unsigned long long *)data = (unsigned long long)mapping->block->properties.requestedHandleTypes;
    else if (opened && attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
        *(CUdeviceptr *)data = opened->address;
    else if (opened && attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        *(size_t *)data = opened->size;
}

CUresult serve_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr_v2 address)
{
    PHOS_LOCKED(&phos_memory_lock);
    CUresult result = phos_real.cuPointerGetAttribute(data, attribute, asked(address));
    if (!data)
        return result;
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (!allocation && result == CUDA_SUCCESS)
        adjust_other(address, attribute, data);
    if (!allocation)
        return result;
    /* Some are refused for VMM memory that cuMemAlloc memory has. */
    if (result != CUDA_SUCCESS && attribute != CU_POINTER_ATTRIBUTE_CONTEXT &&
        attribute != CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID &&
        attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return result;
    adjust(allocation, attribute, data);
    return CUDA_SUCCESS;
}

CUresult serve_cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                      CUdeviceptr_v2 address)
{
    PHOS_LOCKED(&phos_memory_lock);
    CUresult result = phos_real.cuPointerGetAttributes(count, attributes, data, asked(address));
    if (result != CUDA_SUCCESS || !attributes || !data)
        return result;
    struct phos_allocation *allocation = phos_allocation_at(address);
    for (unsigned int i = 0; i < count; i++)
        if (data[i] && allocation)
            adjust(allocation, attributes[i], data[i]);
        else if (data[i])
            adjust_other(address, attributes[i], data[i]);
    return result;
}
