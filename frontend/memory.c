/* cuMemAlloc and its relatives, served from VMM memory: see memory.h. */
#include "memory.h"
#include "arena.h"
#include "cleanup.h"
#include "control.h"
#include "log.h"
#include "pool.h"
#include "runtime.h"
#include "track.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ALIGNMENT ((size_t)512) /* what cuMemAlloc gives on every GPU of this decade */
#define SLAB_LARGEST ((size_t)1 << 20)
#define CLASSES 40
#define CACHE_LOOK 256

/* Per device; guarded by phos_memory_lock. */
static struct device_memory {
    struct phos_span *slabs[CLASSES]; /* with at least one free slot */
    struct phos_span *cached, *cached_oldest;
    size_t cached_bytes;
    uint64_t peers; /* bit p: device p may touch memory of this one */
} memory[PHOS_DEVICES];

static struct phos_allocation *deferred; /* freed during a capture; guarded by phos_memory_lock */
static unsigned long long last_buffer = 1ull << 48; /* far above the driver's own numbers; guarded likewise */

/* Slot sizes: multiples of 512 up to 4 KiB, then four steps a doubling up to 1 MiB. */
static uint32_t class_of(size_t size)
{
    if (size <= 4096)
        return (uint32_t)((size + ALIGNMENT - 1) / ALIGNMENT - 1);
    uint32_t power = 63u - (uint32_t)__builtin_clzll(size - 1);
    size_t step = (size_t)1 << (power - 2);
    return 8 + (power - 12) * 4 + (uint32_t)((size - ((size_t)1 << power) + step - 1) / step) - 1;
}

static size_t class_size(uint32_t slot_class)
{
    if (slot_class < 8)
        return (slot_class + 1) * ALIGNMENT;
    uint32_t power = 12 + (slot_class - 8) / 4;
    return ((size_t)1 << power) + ((slot_class - 8) % 4 + 1) * ((size_t)1 << (power - 2));
}

static size_t cache_limit(CUdevice device)
{
    if (phos_policy.cache_set)
        return phos_policy.cache_bytes;
    return phos_devices[device].total / 64;
}

static void list_push(struct phos_span **head, struct phos_span *span)
{
    span->previous = NULL;
    span->next = *head;
    if (*head)
        (*head)->previous = span;
    *head = span;
}

static void list_remove(struct phos_span **head, struct phos_span *span)
{
    if (span->previous)
        span->previous->next = span->next;
    else
        *head = span->next;
    if (span->next)
        span->next->previous = span->previous;
    span->next = span->previous = NULL;
}

static uint32_t access_list(CUdevice device, CUmemAccessDesc list[PHOS_DEVICES])
{
    uint32_t count = 0;
    list[count++] = (CUmemAccessDesc){{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (int peer = 0; peer < phos_device_count; peer++)
        if (memory[device].peers >> peer & 1)
            list[count++] = (CUmemAccessDesc){{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return count;
}

static CUresult span_map(struct phos_block *block, enum phos_span_kind kind, struct phos_span **out)
{
    struct phos_span *span = calloc(1, sizeof *span);
    if (!span)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr address;
    CUresult result = phos_arena_take(block->device, block->size, &address);
    if (result != CUDA_SUCCESS) {
        free(span);
        return result;
    }
    result = phos_map(address, block->size, 0, block, 0, &span->mapping);
    if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access[PHOS_DEVICES];
        uint32_t count = access_list(block->device, access);
        result = phos_set_access(address, block->size, access, count);
        if (result == CUDA_SUCCESS) {
            span->kind = kind;
            span->device = block->device;
            span->mapping->span = span;
            *out = span;
            return CUDA_SUCCESS;
        }
        block->pins++; /* the caller disposes of it */
        if (phos_unmap(span->mapping) != CUDA_SUCCESS)
            phos_warn_once("cannot unmap memory whose access could not be set");
        block->pins--;
    }
    phos_arena_give(address, block->size);
    free(span);
    return result;
}

/* Unmaps a span and lets go of its block. */
static void span_destroy(struct phos_span *span)
{
    CUdeviceptr address = span->mapping->range.address;
    size_t size = span->mapping->range.size;
    CUresult result = phos_unmap(span->mapping);
    if (result == CUDA_SUCCESS)
        phos_arena_give(address, size);
    else if (result != CUDA_ERROR_DEINITIALIZED)
        phos_warn_once("cannot give memory back to the driver (error %d)", (int)result);
    free(span->slots);
    free(span);
}

static CUresult span_create(CUdevice device, size_t size, struct phos_span **out)
{
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    properties.allocFlags.gpuDirectRDMACapable = phos_devices[device].rdma;
    struct phos_block *block;
    CUresult result = phos_block_create(size, &properties, 0, PHOS_OWNER_FRONTEND, &block);
    if (properties.allocFlags.gpuDirectRDMACapable &&
        (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE)) {
        /* The device says it can, its surroundings (a virtual machine, MIG) say no. */
        properties.allocFlags.gpuDirectRDMACapable = 0;
        result = phos_block_create(size, &properties, 0, PHOS_OWNER_FRONTEND, &block);
    }
    if (result != CUDA_SUCCESS)
        return result;
    result = span_map(block, PHOS_SPAN_LARGE, out);
    if (result != CUDA_SUCCESS && phos_block_settle(block) != CUDA_SUCCESS)
        phos_warn_once("cannot release memory that could not be mapped");
    return result;
}

CUresult phos_map_imported(struct phos_block *block, struct phos_span **span)
{
    return span_map(block, PHOS_SPAN_IMPORTED, span);
}

CUresult phos_unmap_imported(struct phos_span *span)
{
    span_destroy(span);
    return CUDA_SUCCESS;
}

/* ---- freed spans that stay mapped ---- */

static void cache_remove(struct device_memory *m, struct phos_span *span)
{
    if (m->cached_oldest == span)
        m->cached_oldest = span->previous;
    list_remove(&m->cached, span);
    m->cached_bytes -= span->mapping->range.size;
}

static void cache_trim(struct device_memory *m, size_t limit)
{
    while (m->cached_oldest && m->cached_bytes > limit) {
        struct phos_span *span = m->cached_oldest;
        cache_remove(m, span);
        span_destroy(span);
    }
}

static void cache_put(struct phos_span *span)
{
    struct device_memory *m = &memory[span->device];
    if (span->mapping->range.size > cache_limit(span->device)) {
        span_destroy(span);
        return;
    }
    free(span->slots);
    span->slots = NULL;
    span->kind = PHOS_SPAN_CACHED;
    list_push(&m->cached, span);
    if (!m->cached_oldest)
        m->cached_oldest = span;
    m->cached_bytes += span->mapping->range.size;
    cache_trim(m, cache_limit(span->device));
}

static struct phos_span *cache_take(CUdevice device, size_t size)
{
    struct device_memory *m = &memory[device];
    struct phos_span *best = NULL;
    unsigned looked = 0;
    for (struct phos_span *s = m->cached; s && looked < CACHE_LOOK; s = s->next, looked++) {
        size_t have = s->mapping->range.size;
        /* A little too large is fine; more would hold memory that nobody asked for. */
        if (have >= size && have <= size + size / 8 && (!best || have < best->mapping->range.size))
            best = s;
        if (best && best->mapping->range.size == size)
            break;
    }
    if (best)
        cache_remove(m, best);
    return best;
}

void phos_cache_flush(CUdevice device)
{
    for (CUdevice d = 0; d < phos_device_count; d++)
        if (device < 0 || d == device)
            cache_trim(&memory[d], 0);
}

/* ---- allocation ---- */

/* Memory given back reaches the driver only when phosd, which holds a descriptor of it, has heard of it too. */
static CUresult span_get(CUdevice device, size_t size, struct phos_span **span)
{
    if ((*span = cache_take(device, size)))
        return CUDA_SUCCESS;
    CUresult result = span_create(device, size, span);
    if (result != CUDA_ERROR_OUT_OF_MEMORY || size > phos_devices[device].total)
        return result;
    phos_pool_reclaim(device);
    phos_cache_flush(device);
    for (long wait_ms = 1; wait_ms <= 512; wait_ms *= 2) {
        uint64_t owed = phos_control_owed();
        result = span_create(device, size, span);
        if (result != CUDA_ERROR_OUT_OF_MEMORY || !owed)
            return result;
        pthread_mutex_unlock(&phos_memory_lock);
        phos_control_kick();
        nanosleep(&(struct timespec){.tv_nsec = wait_ms * 1000000}, NULL);
        pthread_mutex_lock(&phos_memory_lock);
    }
    return span_create(device, size, span);
}

static struct phos_allocation *slot_take(struct phos_span *span)
{
    struct phos_allocation *slot = &span->slots[span->free_slot];
    span->free_slot = slot->free_next;
    if (++span->used == span->slot_count)
        list_remove(&memory[span->device].slabs[span->slot_class], span);
    return slot;
}

static CUresult slab_get(CUdevice device, uint32_t slot_class, struct phos_span **out)
{
    struct phos_span *span = memory[device].slabs[slot_class];
    if (!span) {
        CUresult result = span_get(device, PHOS_UNIT, &span);
        if (result != CUDA_SUCCESS)
            return result;
        size_t slot_size = class_size(slot_class);
        uint32_t count = (uint32_t)(span->mapping->range.size / slot_size);
        span->slots = calloc(count, sizeof *span->slots);
        if (!span->slots) {
            cache_put(span);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        for (uint32_t i = 0; i < count; i++) {
            span->slots[i].span = span;
            span->slots[i].address = span->mapping->range.address + i * slot_size;
            span->slots[i].free_next = i + 1;
        }
        span->kind = PHOS_SPAN_SLAB;
        span->slot_class = slot_class;
        span->slot_count = count;
        span->used = span->free_slot = 0;
        list_push(&memory[device].slabs[slot_class], span);
    }
    *out = span;
    return CUDA_SUCCESS;
}

CUresult phos_allocate(CUdevice device, CUcontext context, size_t size, const char *entry_point,
                       struct phos_allocation **out)
{
    PHOS_RELAXED;
    struct phos_span *span;
    struct phos_allocation *allocation;
    if (size <= SLAB_LARGEST) {
        CUresult result = slab_get(device, class_of(size), &span);
        if (result != CUDA_SUCCESS)
            return result;
        allocation = slot_take(span);
    } else {
        size_t granularity = phos_devices[device].granularity;
        if (size > phos_devices[device].total)
            return CUDA_ERROR_OUT_OF_MEMORY;
        CUresult result = span_get(device, (size + granularity - 1) & ~(granularity - 1), &span);
        if (result != CUDA_SUCCESS)
            return result;
        span->kind = PHOS_SPAN_LARGE;
        allocation = &span->whole;
        allocation->span = span;
        allocation->address = span->mapping->range.address;
    }
    allocation->size = size;
    allocation->context = context;
    allocation->buffer = ++last_buffer;
    allocation->entry_point = entry_point;
    allocation->pool = NULL;
    allocation->state = PHOS_LIVE;
    *out = allocation;
    return CUDA_SUCCESS;
}

void phos_deallocate(struct phos_allocation *allocation)
{
    PHOS_RELAXED;
    struct phos_span *span = allocation->span;
    allocation->state = PHOS_FREE;
    if (span->kind == PHOS_SPAN_LARGE) {
        cache_put(span);
        return;
    }
    struct phos_span **slabs = &memory[span->device].slabs[span->slot_class];
    allocation->free_next = span->free_slot;
    span->free_slot = (uint32_t)(allocation - span->slots);
    if (span->used-- == span->slot_count)
        list_push(slabs, span);
    /* The last empty slab of a class stays one: programs allocate and free one small thing over and over. */
    if (!span->used && (span->next || span->previous)) {
        list_remove(slabs, span);
        cache_put(span);
    }
}

struct phos_allocation *phos_allocation_at(CUdeviceptr address)
{
    struct phos_mapping *mapping = phos_mapping_at(address);
    struct phos_span *span = mapping ? mapping->span : NULL;
    if (!span)
        return NULL;
    struct phos_allocation *a = NULL;
    if (span->kind == PHOS_SPAN_LARGE)
        a = &span->whole;
    else if (span->kind == PHOS_SPAN_SLAB) {
        size_t slot = (address - mapping->range.address) / class_size(span->slot_class);
        if (slot < span->slot_count)
            a = &span->slots[slot];
    }
    return a && a->state == PHOS_LIVE && address - a->address < a->size ? a : NULL;
}

void phos_each_allocation(void (*visit)(struct phos_allocation *allocation, void *cookie), void *cookie)
{
    /* Backwards: a visitor may free what it is shown, and with it the mapping. */
    for (size_t i = phos_mappings.count; i > 0;) {
        i = (i < phos_mappings.count ? i : phos_mappings.count) - 1;
        if (i >= phos_mappings.count)
            return;
        struct phos_span *span = ((struct phos_mapping *)phos_mappings.items[i])->span;
        if (!span)
            continue;
        if (span->kind == PHOS_SPAN_LARGE && span->whole.state != PHOS_FREE)
            visit(&span->whole, cookie);
        else if (span->kind == PHOS_SPAN_SLAB) {
            uint32_t left = span->used, count = span->slot_count;
            struct phos_allocation *slots = span->slots;
            for (uint32_t s = 0; s < count && left; s++)
                if (slots[s].state != PHOS_FREE) {
                    left--; /* once none is left the span itself may be gone */
                    visit(&slots[s], cookie);
                }
        }
    }
}

static void free_if_in(struct phos_allocation *allocation, void *context)
{
    if (allocation->context == context && !allocation->pool)
        phos_deallocate(allocation);
}

void phos_free_context(CUcontext context)
{
    for (struct phos_allocation **link = &deferred; *link;)
        if ((*link)->context == context)
            *link = (*link)->next;
        else
            link = &(*link)->next;
    phos_each_allocation(free_if_in, context);
}

CUresult phos_peer_access(CUdevice device, CUdevice peer, bool allowed)
{
    if (allowed)
        memory[device].peers |= 1ull << peer;
    else
        memory[device].peers &= ~(1ull << peer);
    CUmemAccessDesc access = {{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = peer},
                              allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE};
    CUresult first = CUDA_SUCCESS;
    for (size_t i = 0; i < phos_mappings.count; i++) {
        struct phos_mapping *mapping = (struct phos_mapping *)phos_mappings.items[i];
        if (!mapping->span || mapping->span->device != device)
            continue;
        CUresult result = phos_set_access(mapping->range.address, mapping->range.size, &access, 1);
        if (result != CUDA_SUCCESS && first == CUDA_SUCCESS)
            first = result;
    }
    return first;
}

/* ---- what the application calls ---- */

CUresult phos_current(CUcontext *context, CUdevice *device)
{
    CUresult result = phos_real.cuCtxGetCurrent(context);
    if (result == CUDA_SUCCESS && !*context)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS)
        result = phos_real.cuCtxGetDevice(device);
    if (result == CUDA_SUCCESS && (*device < 0 || *device >= phos_device_count))
        result = CUDA_ERROR_INVALID_DEVICE;
    return result;
}

CUresult phos_synchronize(CUcontext context, bool *captured)
{
    /* Synchronising a context while one of its streams is being captured is an error that also spoils the capture, in
     * whichever thread that is: none may begin meanwhile. */
    pthread_rwlock_rdlock(&phos_capture_lock);
    *captured = phos_captures() > 0;
    CUcontext current = NULL;
    CUresult result = CUDA_SUCCESS;
    if (!*captured) {
        phos_real.cuCtxGetCurrent(&current);
        bool push = current != context;
        result = push ? phos_real.cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
        if (result == CUDA_SUCCESS) {
            result = phos_real.cuCtxSynchronize();
            if (push)
                phos_real.cuCtxPopCurrent_v2(&current);
        }
    }
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
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_allocation *allocation;
    CUresult result = phos_allocate(device, context, size, entry_point, &allocation);
    if (result == CUDA_SUCCESS)
        *address = allocation->address;
    return result;
}

CUresult serve_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    CUcontext context;
    CUdevice device;
    /* What is wrong with a call, the driver says best. */
    if (!dptr || !bytesize || phos_current(&context, &device) != CUDA_SUCCESS || !carried(device))
        return phos_real.cuMemAlloc_v2(dptr, bytesize);
    return allocate_for(dptr, bytesize, "cuMemAlloc", device, context);
}

CUresult serve_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    CUcontext context;
    CUdevice device;
    bool valid = dptr && pitch && width && height && width <= INT_MAX - ALIGNMENT &&
                 (element == 4 || element == 8 || element == 16);
    if (!valid || phos_current(&context, &device) != CUDA_SUCCESS || !carried(device))
        return phos_real.cuMemAllocPitch_v2(dptr, pitch, width, height, element);
    size_t row = (width + ALIGNMENT - 1) & ~(ALIGNMENT - 1), size;
    if (__builtin_mul_overflow(row, height, &size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = allocate_for(dptr, size, "cuMemAllocPitch", device, context);
    if (result == CUDA_SUCCESS)
        *pitch = row;
    return result;
}

/* What was freed during a capture waited for a moment when the context could be synchronised: now. */
static void deferred_release(CUcontext context)
{
    for (struct phos_allocation **link = &deferred; *link;) {
        struct phos_allocation *a = *link;
        if (a->context != context) {
            link = &a->next;
            continue;
        }
        *link = a->next;
        phos_deallocate(a);
    }
}

CUresult serve_cuMemFree_v2(CUdeviceptr address)
{
    CUcontext context = NULL;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_allocation *allocation = phos_allocation_at(address);
        if (!allocation || allocation->address != address)
            return allocation ? CUDA_ERROR_INVALID_VALUE : phos_real.cuMemFree_v2(address);
        if (allocation->pool)
            return phos_pool_free_now(allocation);
        context = allocation->context;
    }
    /* cuMemFree waits for the device, as programs that free what a kernel still reads rely on. Not under the lock: other
     * threads may allocate meanwhile. */
    bool captured;
    CUresult result = phos_synchronize(context, &captured);
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (!allocation || allocation->address != address)
        return CUDA_ERROR_INVALID_VALUE; /* freed twice at the same time */
    if (captured) {
        allocation->state = PHOS_PENDING;
        allocation->next = deferred;
        deferred = allocation;
        return CUDA_SUCCESS;
    }
    phos_deallocate(allocation);
    if (deferred)
        deferred_release(context);
    return result;
}

CUresult serve_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult result = phos_real.cuMemGetInfo_v2(free_bytes, total);
    CUdevice device;
    CUcontext context;
    if (result != CUDA_SUCCESS || !free_bytes || phos_current(&context, &device) != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    *free_bytes += memory[device].cached_bytes + phos_pool_cached(device);
    return result;
}
