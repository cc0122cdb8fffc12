/* The application's own virtual memory management: the same calls, with handles of ours. A handle that the application
 * holds survives detach and attach, the driver's does not. */
#include "blocks.h"
#include "cleanup.h"
#include "control.h"
#include "driver_vmm.h"
#include "ipc.h"
#include "log.h"
#include "memory.h"
#include "parts.h"
#include "runtime.h"
#include "track.h"
#include "window.h"

#include <stdlib.h>

/* A handle is the block's number under a tag that no driver's handle has had (those are small numbers or pointers). */
#define HANDLE_TAG 0x50484F5300000000ull /* "PHOS" */
#define HANDLE_MASK 0xFFFFFFFF00000000ull

static CUmemGenericAllocationHandle handle_of(const struct phos_block *block)
{
    return HANDLE_TAG | block->id;
}

static struct phos_block *block_of(CUmemGenericAllocationHandle handle)
{
    struct phos_block *block = (handle & HANDLE_MASK) == HANDLE_TAG ? phos_block_find(handle & ~HANDLE_MASK) : NULL;
    return block && block->references ? block : NULL;
}

CUresult serve_cuMemCreate(CUmemGenericAllocationHandle_v1 *handle, size_t size, const CUmemAllocationProp_v1 *prop,
                           unsigned long long flags)
{
    /* Memory on the host (HOST, HOST_NUMA, ...) would come back from an image as a GPU's, and that of a part of a GPU's
     * memory as any of it. */
    bool on_device = prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    bool in_part = prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN;
    bool plain = handle && on_device && phos_policy.carry_device && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                 !(prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) &&
                 prop->allocFlags.usage == 0;
    bool known = on_device && prop->location.id >= 0 && prop->location.id < phos_device_count;
    /* What is larger than the device is not worth giving anything back. */
    CUdevice device = known && size <= phos_devices[prop->location.id].total ? prop->location.id : CU_DEVICE_INVALID;
    if (plain && known && phos_devices[prop->location.id].carried) {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block;
        CUresult result = PHOS_RETRIED(phos_memory_recover, device,
                                       phos_block_create(size, prop, flags, PHOS_OWNER_APPLICATION, &block));
        if (result == CUDA_SUCCESS) {
            block->references = 1;
            *handle = handle_of(block);
        }
        if (result != CUDA_ERROR_NOT_SUPPORTED && result != CUDA_ERROR_INVALID_VALUE)
            return result;
    }
    CUresult result = PHOS_RETRIED(phos_driver_recover, device, phos_real.cuMemCreate(handle, size, prop, flags));
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_vmm_made(*handle, on_device || in_part ? PHOS_UNCARRIED_VMM : PHOS_UNCARRIED_HOST_VMM, size, false);
    }
    return result;
}

CUresult serve_cuMemRelease(CUmemGenericAllocationHandle_v1 handle)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = block_of(handle);
    if (!block) {
        CUresult result = phos_real.cuMemRelease(handle);
        if (result == CUDA_SUCCESS)
            phos_driver_vmm_released(handle);
        return result;
    }
    block->references--;
    return phos_block_settle(block);
}

CUresult serve_cuMemMap(CUdeviceptr_v2 ptr, size_t size, size_t offset, CUmemGenericAllocationHandle_v1 handle,
                        unsigned long long flags)
{
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = block_of(handle);
        if (block)
            return phos_map(ptr, size, offset, block, flags, NULL);
    }
    /* Without the lock: of a multicast object, it waits until all devices have been added, by other threads perhaps. */
    CUresult result = phos_real.cuMemMap(ptr, size, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_vmm_mapped(handle, ptr, size);
    }
    return result;
}

/* What is not made of our mappings alone: the driver takes all of it or nothing, and then ours in it are gone too. */
static CUresult unmap_drivers(CUdeviceptr ptr, size_t size)
{
    for (size_t at = phos_ranges_first(&phos_mappings, ptr); at < phos_mappings.count; at++) {
        const struct phos_mapping *mapping = (const struct phos_mapping *)phos_mappings.items[at];
        if (mapping->range.address - ptr >= size)
            break;
        if (mapping->span)
            return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = phos_real.cuMemUnmap(ptr, size);
    if (result != CUDA_SUCCESS)
        return result;
    phos_driver_vmm_unmapped(ptr, size);
    for (size_t at = phos_ranges_first(&phos_mappings, ptr);
         at < phos_mappings.count && phos_mappings.items[at]->address - ptr < size;) {
        CUresult settled = phos_unmapped((struct phos_mapping *)phos_mappings.items[at]);
        if (result == CUDA_SUCCESS)
            result = settled;
    }
    return result;
}

static CUresult unmap(CUdeviceptr ptr, size_t size)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_mapping *mapping = phos_mapping_at(ptr);
    if (!mapping)
        return unmap_drivers(ptr, size);
    if (!size || ptr + size < ptr)
        return CUDA_ERROR_INVALID_VALUE;
    /* The driver takes a range only if it is made of whole mappings; so do we, before anything is unmapped. */
    for (CUdeviceptr at = ptr; at < ptr + size; at += mapping->range.size) {
        mapping = phos_mapping_at(at);
        if (!mapping || mapping->range.address != at || mapping->range.size > ptr + size - at || mapping->span)
            return unmap_drivers(ptr, size);
    }
    while (size) {
        mapping = phos_mapping_at(ptr);
        size_t part = mapping->range.size;
        CUresult result = phos_unmap(mapping);
        if (result != CUDA_SUCCESS)
            return result;
        ptr += part;
        size -= part;
    }
    return CUDA_SUCCESS;
}

CUresult serve_cuMemUnmap(CUdeviceptr_v2 ptr, size_t size)
{
    PHOS_RELAXED;
    phos_window_stand_still();
    phos_parts_gone(ptr, size);
    CUresult result = unmap(ptr, size);
    phos_window_go_on();
    return result;
}

CUresult serve_cuMemSetAccess(CUdeviceptr_v2 ptr, size_t size, const CUmemAccessDesc_v1 *desc, size_t count)
{
    if (!desc)
        return phos_real.cuMemSetAccess(ptr, size, desc, count);
    PHOS_RELAXED;
    phos_window_stand_still(); /* access may be taken away */
    CUresult result;
    {
        PHOS_LOCKED(&phos_memory_lock);
        result = phos_set_access(ptr, size, desc, count);
    }
    phos_window_go_on();
    return result;
}

CUresult serve_cuMemGetAccess(unsigned long long *flags, const CUmemLocation_v1 *location, CUdeviceptr_v2 ptr)
{
    if (location && flags) {
        PHOS_LOCKED(&phos_memory_lock);
        const struct phos_mapping *mapping = phos_mappings_shut ? phos_mapping_at(ptr) : NULL;
        if (mapping && mapping->shut) {
            *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
            for (uint32_t i = 0; i < mapping->access_count; i++)
                if (mapping->access[i].location.type == location->type && mapping->access[i].location.id == location->id)
                    *flags = mapping->access[i].flags;
            return CUDA_SUCCESS;
        }
    }
    return phos_real.cuMemGetAccess(flags, location, ptr);
}

CUresult serve_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp_v1 *prop,
                                                      CUmemGenericAllocationHandle_v1 handle)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = block_of(handle);
    if (!block)
        return phos_real.cuMemGetAllocationPropertiesFromHandle(prop, handle);
    CUresult result = phos_real.cuMemGetAllocationPropertiesFromHandle(prop, block->handle);
    if (result == CUDA_SUCCESS && prop)
        prop->requestedHandleTypes = block->properties.requestedHandleTypes; /* without the one we added */
    return result;
}

CUresult serve_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle_v1 *handle, void *addr)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_mapping *mapping = phos_mapping_at((CUdeviceptr)addr);
    if (!mapping || !handle) {
        CUresult result = phos_real.cuMemRetainAllocationHandle(handle, addr);
        if (result == CUDA_SUCCESS)
            phos_driver_vmm_retained(*handle, (CUdeviceptr)addr);
        return result;
    }
    if (mapping->span)
        return CUDA_ERROR_INVALID_VALUE; /* as for cuMemAlloc memory */
    mapping->block->references++;
    *handle = handle_of(mapping->block);
    return CUDA_SUCCESS;
}

/* Reservations survive detach, the driver keeps them: they need no record. */
CUresult serve_cuMemAddressReserve(CUdeviceptr_v2 *ptr, size_t size, size_t alignment, CUdeviceptr_v2 addr,
                                   unsigned long long flags)
{
    PHOS_RELAXED;
    return phos_real.cuMemAddressReserve(ptr, size, alignment, addr, flags);
}

CUresult serve_cuMemAddressFree(CUdeviceptr_v2 ptr, size_t size)
{
    return phos_real.cuMemAddressFree(ptr, size);
}

CUresult serve_cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle_v1 handle,
                                            CUmemAllocationHandleType type, unsigned long long flags)
{
    uint64_t id = 0;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = block_of(handle);
        if (!block) {
            CUresult result = phos_real.cuMemExportToShareableHandle(shareable, handle, type, flags);
            if (result == CUDA_SUCCESS)
                phos_driver_vmm_exported(handle);
            return result;
        }
        bool allowed = block->imported || block->properties.requestedHandleTypes & (unsigned)type;
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !allowed || !shareable || flags)
            return phos_real.cuMemExportToShareableHandle(shareable, block->handle, allowed ? type : 0, flags);
        id = block->id;
    }
    if (phos_token_export(id, shareable))
        return CUDA_SUCCESS;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = block_of(handle);
    if (!block)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = phos_real.cuMemExportToShareableHandle(shareable, block->handle, type, flags);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_IPC, 1, (int64_t)block->size);
    return result;
}

CUresult serve_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle_v1 *handle, void *os,
                                              CUmemAllocationHandleType type)
{
    struct phos_token token;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !handle || !phos_token_read((int)(intptr_t)os, &token)) {
        CUresult result = phos_real.cuMemImportFromShareableHandle(handle, os, type);
        if (result == CUDA_SUCCESS) {
            PHOS_LOCKED(&phos_memory_lock);
            phos_driver_vmm_made(*handle, PHOS_UNCARRIED_IPC, 0, true);
        }
        return result;
    }
    struct phos_block *block;
    CUresult result = phos_token_block(&token, &block);
    if (result == CUDA_SUCCESS)
        *handle = handle_of(block);
    return result;
}

/* ---- memory behind objects of the driver's own ----
 *
 * A sparse array, a multicast object or a logical endpoint refers to physical memory by itself, and the driver saves and
 * restores it by itself: after that it would refer to a copy, and the block to another. Nothing tells which block a later
 * unmap or unbind is about, so a block that was ever bound keeps its process from being detached until it is freed; then
 * what is left of it is the driver's alone.
 *
 * To bind waits until all devices have been added to the object, which other threads may have to allocate for first: it
 * must not hold the lock. */

/* Its handle is released, mapped and exported like one of memory. */
CUresult serve_cuMulticastCreate(CUmemGenericAllocationHandle_v1 *handle, const CUmulticastObjectProp_v1 *properties)
{
    CUresult result = phos_real.cuMulticastCreate(handle, properties);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_vmm_made(*handle, PHOS_UNCARRIED_MULTICAST, properties->size, false);
    }
    return result;
}

/* The block that a handle of ours stands for, which stays meanwhile, and the driver's handle in its place. */
static struct phos_block *binding(CUmemGenericAllocationHandle *memory)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = block_of(*memory);
    if (block) {
        block->references++;
        *memory = block->handle;
    }
    return block;
}

static CUresult bound(struct phos_block *block, CUresult result)
{
    if (!block)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    block->bound |= result == CUDA_SUCCESS;
    block->references--;
    CUresult settled = phos_block_settle(block);
    return result == CUDA_SUCCESS ? settled : result;
}

static CUresult bound_at(CUdeviceptr memory, size_t size, CUresult result)
{
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t at = phos_ranges_first(&phos_mappings, memory); at < phos_mappings.count; at++) {
        struct phos_mapping *mapping = (struct phos_mapping *)phos_mappings.items[at];
        if (mapping->range.address >= memory + size)
            break;
        mapping->block->bound = true;
    }
    return result;
}

CUresult serve_cuMulticastBindMem(CUmemGenericAllocationHandle_v1 multicast, size_t multicast_offset,
                                  CUmemGenericAllocationHandle_v1 memory, size_t offset, size_t size,
                                  unsigned long long flags)
{
    struct phos_block *block = binding(&memory);
    return bound(block, phos_real.cuMulticastBindMem(multicast, multicast_offset, memory, offset, size, flags));
}

CUresult serve_cuMulticastBindMem_v2(CUmemGenericAllocationHandle_v1 multicast, CUdevice device, size_t multicast_offset,
                                     CUmemGenericAllocationHandle_v1 memory, size_t offset, size_t size,
                                     unsigned long long flags)
{
    struct phos_block *block = binding(&memory);
    return bound(block, phos_real.cuMulticastBindMem_v2(multicast, device, multicast_offset, memory, offset, size, flags));
}

CUresult serve_cuLogicalEndpointBindMem(CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t endpoint_offset,
                                        CUmemGenericAllocationHandle_v1 memory, cuuint64_t offset, cuuint64_t size,
                                        unsigned long long flags)
{
    struct phos_block *block = binding(&memory);
    return bound(block, phos_real.cuLogicalEndpointBindMem(endpoint, device, endpoint_offset, memory, offset, size, flags));
}

CUresult serve_cuMulticastBindAddr(CUmemGenericAllocationHandle_v1 multicast, size_t multicast_offset, CUdeviceptr_v2 memory,
                                   size_t size, unsigned long long flags)
{
    return bound_at(memory, size, phos_real.cuMulticastBindAddr(multicast, multicast_offset, memory, size, flags));
}

CUresult serve_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle_v1 multicast, CUdevice device, size_t multicast_offset,
                                      CUdeviceptr_v2 memory, size_t size, unsigned long long flags)
{
    return bound_at(memory, size,
                    phos_real.cuMulticastBindAddr_v2(multicast, device, multicast_offset, memory, size, flags));
}

CUresult serve_cuLogicalEndpointBindAddr(CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t endpoint_offset,
                                         void *memory, cuuint64_t size, unsigned long long flags)
{
    return bound_at((CUdeviceptr)(uintptr_t)memory, size,
                    phos_real.cuLogicalEndpointBindAddr(endpoint, device, endpoint_offset, memory, size, flags));
}

CUresult serve_cuMemMapArrayAsync(CUarrayMapInfo_v1 *list, unsigned int count, CUstream stream)
{
    if (!list || !count)
        return phos_real.cuMemMapArrayAsync(list, count, stream);
    PHOS_FREES CUarrayMapInfo_v1 *copy = malloc(count * sizeof *copy);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    PHOS_LOCKED(&phos_memory_lock);
    for (unsigned int i = 0; i < count; i++) {
        copy[i] = list[i];
        struct phos_block *block = block_of(list[i].memHandle.memHandle);
        if (block)
            copy[i].memHandle.memHandle = block->handle;
    }
    CUresult result = phos_real.cuMemMapArrayAsync(copy, count, stream);
    for (unsigned int i = 0; i < count; i++) {
        struct phos_block *block = block_of(list[i].memHandle.memHandle);
        /* Also after an error: some of the list may have been mapped. */
        if (block && list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            block->bound = true;
    }
    return result;
}
