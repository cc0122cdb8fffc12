/* The map of device-accessible address space, and cuMemAlloc's memory in it.
 *
 * Three locks: sg_map_lock guards the map; `use` is held for reading by whatever touches device memory through an address it
 * looked up (copies, kernels), and for writing while access is taken away, so that an unmap racing with work makes the work
 * fail or wait, never crash. A long kernel therefore delays an unmap: the real driver's cuMemFree waits likewise. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "softgpu.h"

pthread_mutex_t sg_map_lock = PTHREAD_MUTEX_INITIALIZER;
struct sg_map sg_ranges, sg_allocations;
static pthread_rwlock_t use;
static _Atomic uint64_t last_id;

/* Small allocations share blocks of SG_GRANULARITY, in units of 512 bytes (the driver's alignment). */
#define UNIT 512
#define UNITS (SG_GRANULARITY / UNIT)
#define SLAB_LIMIT (SG_GRANULARITY / 2)
struct slab {
    struct slab *next;
    struct sg_range *range;
    struct sg_context *context;
    unsigned used;
    bool taken[UNITS];
};
static struct slab *slabs; /* under sg_map_lock */

bool sg_memory_init(void)
{
    /* A waiting unmap goes before new work, or steady work would keep it waiting for ever. */
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    bool ok = pthread_rwlock_init(&use, &attributes) == 0;
    pthread_rwlockattr_destroy(&attributes);
    return ok;
}

uint64_t sg_next_id(void)
{
    return atomic_fetch_add(&last_id, 1) + 1;
}

void sg_use_begin(void)
{
    pthread_rwlock_rdlock(&use);
}

void sg_use_end(void)
{
    pthread_rwlock_unlock(&use);
}

void sg_use_exclusive_begin(void)
{
    pthread_rwlock_wrlock(&use);
}

void sg_use_exclusive_end(void)
{
    pthread_rwlock_unlock(&use);
}

/* ---- sorted arrays ---- */

static uint64_t begin_of(const void *item)
{
    return *(const uint64_t *)item; /* `begin` comes first in every item */
}

size_t sg_map_upper(const struct sg_map *map, uint64_t address)
{
    size_t low = 0, high = map->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (begin_of(map->items[middle]) > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool sg_map_insert(struct sg_map *map, void *item)
{
    if (map->count == map->capacity) {
        size_t capacity = map->capacity ? map->capacity * 2 : 64;
        void **grown = realloc(map->items, capacity * sizeof(*grown));
        if (!grown)
            return false;
        map->items = grown;
        map->capacity = capacity;
    }
    size_t at = sg_map_upper(map, begin_of(item));
    memmove(&map->items[at + 1], &map->items[at], (map->count - at) * sizeof(*map->items));
    map->items[at] = item;
    map->count++;
    return true;
}

void sg_map_remove(struct sg_map *map, const void *item)
{
    size_t at = sg_map_upper(map, begin_of(item));
    if (!at || map->items[at - 1] != item)
        return;
    at--;
    map->count--;
    memmove(&map->items[at], &map->items[at + 1], (map->count - at) * sizeof(*map->items));
}

/* ---- ranges ---- */

struct sg_range *sg_range_at(uint64_t address)
{
    size_t at = sg_map_upper(&sg_ranges, address);
    if (!at)
        return NULL;
    struct sg_range *range = sg_ranges.items[at - 1];
    return address < range->end ? range : NULL;
}

struct sg_range *sg_range_new(uint64_t begin, size_t size, enum sg_memory kind, int device, struct sg_context *context)
{
    struct sg_range *range = calloc(1, sizeof(*range));
    if (!range)
        return NULL;
    range->begin = begin;
    range->end = begin + size;
    range->kind = kind;
    range->device = device;
    range->context = context;
    range->id = sg_next_id();
    if (kind != SG_MEM_VMM)
        range->readable = range->writable = ~0u;
    pthread_mutex_lock(&sg_map_lock);
    bool ok = sg_map_insert(&sg_ranges, range);
    pthread_mutex_unlock(&sg_map_lock);
    if (ok)
        return range;
    free(range);
    return NULL;
}

bool sg_range_allows(const struct sg_range *range, const struct sg_context *context, bool write)
{
    uint32_t bits = write ? range->writable : range->readable;
    if (!context)
        return bits != 0;
    if (range->kind == SG_MEM_DEVICE)
        return context->peers >> range->device & 1;
    return bits >> context->device->ordinal & 1;
}

bool sg_find_range(uint64_t address, struct sg_range *out)
{
    pthread_mutex_lock(&sg_map_lock);
    struct sg_range *range = sg_range_at(address);
    if (range)
        *out = *range;
    pthread_mutex_unlock(&sg_map_lock);
    return range != NULL;
}

bool sg_accessible(const struct sg_context *context, uint64_t address, size_t size, bool write)
{
    uint64_t end = address + size;
    if (end < address)
        return false;
    bool ok = true;
    pthread_mutex_lock(&sg_map_lock);
    do {
        struct sg_range *range = sg_range_at(address);
        ok = range && sg_range_allows(range, context, write);
        if (ok)
            address = range->end;
    } while (ok && address < end);
    pthread_mutex_unlock(&sg_map_lock);
    return ok;
}

bool sg_is_device_memory(uint64_t address, int *device)
{
    struct sg_range range;
    if (!sg_find_range(address, &range) || (range.kind != SG_MEM_DEVICE && range.kind != SG_MEM_VMM) || range.device < 0)
        return false;
    *device = range.device;
    return true;
}

bool sg_is_pinned(uint64_t address)
{
    struct sg_range range;
    return sg_find_range(address, &range);
}

/* Under sg_map_lock. */
static struct sg_allocation *allocation_at(uint64_t address)
{
    size_t at = sg_map_upper(&sg_allocations, address);
    struct sg_allocation *allocation = at ? sg_allocations.items[at - 1] : NULL;
    return allocation && address - allocation->begin < allocation->size ? allocation : NULL;
}

bool sg_find_allocation(uint64_t address, struct sg_allocation *out)
{
    pthread_mutex_lock(&sg_map_lock);
    const struct sg_allocation *allocation = allocation_at(address);
    if (allocation)
        *out = *allocation;
    pthread_mutex_unlock(&sg_map_lock);
    return allocation != NULL;
}

void sg_make_synchronous(uint64_t address, bool synchronous)
{
    pthread_mutex_lock(&sg_map_lock);
    struct sg_allocation *allocation = allocation_at(address);
    if (allocation)
        allocation->synchronous = synchronous;
    pthread_mutex_unlock(&sg_map_lock);
}

void sg_make_of_graph(uint64_t address)
{
    pthread_mutex_lock(&sg_map_lock);
    struct sg_allocation *allocation = allocation_at(address);
    if (allocation)
        allocation->graph = true;
    pthread_mutex_unlock(&sg_map_lock);
}

/* ---- cuMemAlloc's memory ---- */

/* A mapping of its own. The descriptor is not kept: the mapping alone holds the memory. */
static CUresult map_range(struct sg_context *context, size_t size, struct sg_range **out)
{
    int device = context->device->ordinal;
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    int fd = sg_memfd(device, size, &error);
    if (fd < 0)
        return error;
    void *at = sg_reserve(size, 0, 0);
    if (at && mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(at, size);
        at = NULL;
    }
    sg_fd_close(fd);
    if (!at) {
        sg_used_changed(device, -(int64_t)size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    madvise(at, size, MADV_DONTFORK); /* a child of fork has no GPU memory */
    *out = sg_range_new((uintptr_t)at, size, SG_MEM_DEVICE, device, context);
    if (*out)
        return CUDA_SUCCESS;
    munmap(at, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void unmap_range(struct sg_range *range)
{
    sg_use_exclusive_begin();
    pthread_mutex_lock(&sg_map_lock);
    sg_map_remove(&sg_ranges, range);
    pthread_mutex_unlock(&sg_map_lock);
    munmap((void *)(uintptr_t)range->begin, range->end - range->begin);
    sg_use_exclusive_end();
    if (!range->imported)
        sg_used_changed(range->device, -(int64_t)(range->end - range->begin));
    free(range);
}

/* Under sg_map_lock: room in a slab of the context, or null. */
static struct slab *slab_take(struct sg_context *context, unsigned units, unsigned *first)
{
    for (struct slab *slab = slabs; slab; slab = slab->next) {
        if (slab->context != context || UNITS - slab->used < units)
            continue;
        unsigned run = 0;
        for (unsigned i = 0; i < UNITS; i++) {
            run = slab->taken[i] ? 0 : run + 1;
            if (run == units) {
                *first = i + 1 - units;
                memset(&slab->taken[*first], true, units);
                slab->used += units;
                return slab;
            }
        }
    }
    return NULL;
}

static CUresult slab_allocate(struct sg_context *context, size_t size, uint64_t *address, struct sg_range **range)
{
    unsigned units = (unsigned)((size + UNIT - 1) / UNIT), first = 0;
    pthread_mutex_lock(&sg_map_lock);
    struct slab *slab = slab_take(context, units, &first);
    pthread_mutex_unlock(&sg_map_lock);
    if (!slab) {
        struct sg_range *fresh;
        slab = calloc(1, sizeof(*slab));
        if (!slab)
            return CUDA_ERROR_OUT_OF_MEMORY;
        CUresult result = map_range(context, SG_GRANULARITY, &fresh);
        if (result != CUDA_SUCCESS) {
            free(slab);
            return result;
        }
        fresh->slab = true;
        slab->range = fresh;
        slab->context = context;
        memset(slab->taken, true, units);
        slab->used = units;
        pthread_mutex_lock(&sg_map_lock);
        slab->next = slabs;
        slabs = slab;
        pthread_mutex_unlock(&sg_map_lock);
    }
    *range = slab->range;
    *address = slab->range->begin + (uint64_t)first * UNIT;
    return CUDA_SUCCESS;
}

static void slab_free(struct sg_range *range, uint64_t address, size_t size)
{
    unsigned units = (unsigned)((size + UNIT - 1) / UNIT);
    struct slab *empty = NULL;
    pthread_mutex_lock(&sg_map_lock);
    for (struct slab **link = &slabs; *link; link = &(*link)->next)
        if ((*link)->range == range) {
            struct slab *slab = *link;
            memset(&slab->taken[(address - range->begin) / UNIT], false, units);
            slab->used -= units;
            if (!slab->used) {
                *link = slab->next;
                empty = slab;
            }
            break;
        }
    pthread_mutex_unlock(&sg_map_lock);
    if (empty) {
        unmap_range(empty->range);
        free(empty);
    }
}

CUresult sg_allocate(struct sg_context *context, size_t size, struct sg_pool *pool, uint64_t *out)
{
    if (!size)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_fault(SG_FAULT_ALLOC) || sg_fault(SG_FAULT_ALLOC_AFTER) || size > ((uint64_t)1 << 46))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sg_allocation *allocation = calloc(1, sizeof(*allocation));
    if (!allocation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result;
    if (size <= SLAB_LIMIT) {
        result = slab_allocate(context, size, &allocation->begin, &allocation->range);
    } else {
        result = map_range(context, (size + SG_GRANULARITY - 1) / SG_GRANULARITY * SG_GRANULARITY, &allocation->range);
        if (result == CUDA_SUCCESS)
            allocation->begin = allocation->range->begin;
    }
    if (result != CUDA_SUCCESS) {
        free(allocation);
        return result;
    }
    allocation->size = size;
    allocation->context = context;
    allocation->device = context->device->ordinal;
    allocation->pool = pool;
    allocation->id = sg_next_id();
    if (pool) {
        uint64_t used = atomic_fetch_add(&pool->used, size) + size, high = atomic_load(&pool->used_high);
        while (used > high && !atomic_compare_exchange_weak(&pool->used_high, &high, used))
            ;
    }
    *out = allocation->begin;
    pthread_mutex_lock(&sg_map_lock);
    bool ok = sg_map_insert(&sg_allocations, allocation);
    pthread_mutex_unlock(&sg_map_lock);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sg_allocation_import(struct sg_context *context, uint64_t begin, size_t mapped, uint64_t offset, size_t size, int device,
                              struct sg_pool *pool)
{
    struct sg_allocation *allocation = calloc(1, sizeof(*allocation));
    struct sg_range *range = allocation ? sg_range_new(begin, mapped, SG_MEM_DEVICE, device, context) : NULL;
    if (!range) {
        free(allocation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *allocation = (struct sg_allocation){.begin = begin + offset, .size = size, .range = range, .context = context,
                                         .pool = pool, .id = sg_next_id(), .device = device};
    pthread_mutex_lock(&sg_map_lock);
    range->imported = true;
    bool ok = sg_map_insert(&sg_allocations, allocation);
    if (!ok)
        sg_map_remove(&sg_ranges, range);
    pthread_mutex_unlock(&sg_map_lock);
    if (ok)
        return CUDA_SUCCESS;
    free(range);
    free(allocation);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Under sg_map_lock, or where nobody finds it any more. */
static void set_unused(struct sg_allocation *allocation, bool unused)
{
    if (allocation->pool && !allocation->range->imported && allocation->unused != unused)
        atomic_fetch_add(&allocation->pool->used, unused ? -allocation->size : allocation->size);
    allocation->unused = unused;
}

void sg_set_unused(uint64_t address, bool unused)
{
    pthread_mutex_lock(&sg_map_lock);
    struct sg_allocation *allocation = allocation_at(address);
    if (allocation)
        set_unused(allocation, unused);
    pthread_mutex_unlock(&sg_map_lock);
}

static void release(struct sg_allocation *allocation)
{
    set_unused(allocation, true);
    if (allocation->range->slab)
        slab_free(allocation->range, allocation->begin, allocation->size);
    else
        unmap_range(allocation->range);
    free(allocation);
}

CUresult sg_free(uint64_t address, bool *found_pool_memory)
{
    struct sg_allocation *allocation = NULL;
    pthread_mutex_lock(&sg_map_lock);
    size_t at = sg_map_upper(&sg_allocations, address);
    if (at && begin_of(sg_allocations.items[at - 1]) == address) {
        allocation = sg_allocations.items[at - 1];
        sg_map_remove(&sg_allocations, allocation);
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (!allocation)
        return CUDA_ERROR_INVALID_VALUE;
    if (found_pool_memory)
        *found_pool_memory = allocation->pool != NULL;
    release(allocation);
    return CUDA_SUCCESS;
}

static void forget_host_memory(const struct sg_context *context)
{
    sg_use_exclusive_begin();
    pthread_mutex_lock(&sg_map_lock);
    for (size_t i = sg_ranges.count; i-- > 0;) {
        struct sg_range *range = sg_ranges.items[i];
        if ((range->kind != SG_MEM_REGISTERED && range->kind != SG_MEM_HOST) || range->context != context)
            continue;
        sg_map_remove(&sg_ranges, range);
        if (range->kind == SG_MEM_HOST)
            munmap((void *)(uintptr_t)range->begin, range->end - range->begin);
        free(range);
    }
    pthread_mutex_unlock(&sg_map_lock);
    sg_use_exclusive_end();
}

/* Memory of pools outlives it; that of graphs goes here, if it is not freed before. */
void sg_memory_free_context(struct sg_context *context)
{
    forget_host_memory(context);
    for (;;) {
        struct sg_allocation *allocation = NULL;
        pthread_mutex_lock(&sg_map_lock);
        for (size_t i = 0; i < sg_allocations.count && !allocation; i++) {
            struct sg_allocation *one = sg_allocations.items[i];
            if (one->context != context)
                continue;
            one->context = NULL;
            allocation = one->pool && !one->graph ? NULL : one;
        }
        if (allocation)
            sg_map_remove(&sg_allocations, allocation);
        pthread_mutex_unlock(&sg_map_lock);
        if (!allocation)
            return;
        release(allocation);
    }
}
