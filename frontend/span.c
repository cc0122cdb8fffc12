#include "span.h"
#include "arena.h"
#include "cleanup.h"
#include "control.h"
#include "gate.h"
#include "log.h"
#include "patience.h"
#include "runtime.h"
#include "window.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Cached spans by size: one bucket for each number of units below 16, then eight a doubling. A request is served by
 * what is up to an eighth larger, which lies in its own bucket or the next two: so looking costs the same however many
 * spans are kept. */
#define BUCKETS 256
#define BUCKET_LOOK 8

/* The most that may wait above the limit, as a part of the device's memory: other processes may want it, and the control
 * thread may be kept from giving it back, by a phosd that does not read what it is told. */
#define WAITING_PART 2
#define BETWEEN_NS 20000  /* from one span given back to the next, so that others get the lock */
#define MOST_BETWEEN 1000 /* how often it sleeps again while somebody waits, who may have been stopped */

/* Per device; guarded by phos_memory_lock. */
static struct device_spans {
    struct phos_span *buckets[BUCKETS];
    struct phos_span *newest, *oldest; /* all of them, by when they were freed; the oldest go first */
    size_t bytes;
    uint32_t peers[PHOS_DEVICES]; /* how many contexts and pools let device p touch memory of this one */
    bool no_rdma;                 /* it was refused */
} spans[PHOS_DEVICES];
static bool trimmed; /* there is a thread that calls phos_span_trim; guarded by phos_memory_lock */
/* Since when there has been more than a limit, in ns; 0: there is not. Written with phos_memory_lock held, read without. Only
 * the control thread finds that there is no longer, so that it is woken once for many that are freed and used again. */
static _Atomic uint64_t above_since;

static uint32_t bucket_of(size_t size)
{
    uint64_t units = size / PHOS_UNIT;
    if (units < 16)
        return (uint32_t)units;
    uint32_t power = 63u - (uint32_t)__builtin_clzll(units);
    uint32_t bucket = 16 + (power - 4) * 8 + (uint32_t)(units >> (power - 3) & 7);
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

static size_t cache_limit(CUdevice device)
{
    if (phos_policy.cache_set)
        return phos_policy.cache_bytes;
    size_t usual = phos_devices[device].total / 64;
    return usual > PHOS_MEDIUM_UNITS * PHOS_UNIT ? usual : PHOS_MEDIUM_UNITS * PHOS_UNIT;
}

static uint32_t access_list(CUdevice device, CUmemAccessDesc list[PHOS_DEVICES])
{
    uint32_t count = 0;
    list[count++] = (CUmemAccessDesc){{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (int peer = 0; peer < phos_device_count; peer++)
        if (peer != device && spans[device].peers[peer])
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
    span->mapping->span = NULL; /* should it refuse to be unmapped, it is nobody's */
    CUresult result = phos_unmap(span->mapping);
    if (result == CUDA_SUCCESS)
        phos_arena_give(address, size);
    else if (result != CUDA_ERROR_DEINITIALIZED)
        phos_warn_once("cannot give memory back to the driver (error %d)", (int)result);
    free(span->slots);
    free(span);
}

CUresult phos_span_create(CUdevice device, size_t size, struct phos_span **out)
{
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    properties.allocFlags.gpuDirectRDMACapable = phos_devices[device].rdma && !spans[device].no_rdma;
    struct phos_block *block;
    CUresult result = phos_block_create(size, &properties, 0, PHOS_OWNER_FRONTEND, &block);
    if (properties.allocFlags.gpuDirectRDMACapable &&
        (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE)) {
        /* The device says it can, its surroundings (a virtual machine, MIG) say no. */
        properties.allocFlags.gpuDirectRDMACapable = 0;
        result = phos_block_create(size, &properties, 0, PHOS_OWNER_FRONTEND, &block);
        spans[device].no_rdma = result == CUDA_SUCCESS;
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
    for (struct phos_opened *opened = span->opened, *next; opened; opened = next) {
        next = opened->next;
        free(opened);
    }
    span_destroy(span);
    return CUDA_SUCCESS;
}

const struct phos_opened *phos_opened_at(CUdeviceptr address)
{
    const struct phos_mapping *mapping = phos_mapping_at(address);
    const struct phos_opened *opened = mapping && mapping->span ? mapping->span->opened : NULL;
    while (opened && address - opened->address >= opened->size)
        opened = opened->next;
    return opened;
}

/* ---- freed spans that stay mapped ---- */

static void cache_remove(struct device_spans *d, struct phos_span *span)
{
    *(span->newer ? &span->newer->older : &d->newest) = span->older;
    *(span->older ? &span->older->newer : &d->oldest) = span->newer;
    span->newer = span->older = NULL;
    phos_span_unlink(&d->buckets[bucket_of(span->mapping->range.size)], span);
    d->bytes -= span->mapping->range.size;
}

/* As the oldest: what is larger than the limit is not to push everything else out. */
static void cache_add(struct device_spans *d, struct phos_span *span, bool as_oldest)
{
    struct phos_span *newer = as_oldest ? d->oldest : NULL, *older = as_oldest ? NULL : d->newest;
    span->newer = newer;
    span->older = older;
    *(newer ? &newer->older : &d->newest) = span;
    *(older ? &older->newer : &d->oldest) = span;
    phos_span_push(&d->buckets[bucket_of(span->mapping->range.size)], span);
    d->bytes += span->mapping->range.size;
}

static void give_oldest_back(struct device_spans *d)
{
    struct phos_span *span = d->oldest;
    cache_remove(d, span);
    span_destroy(span);
}

static void cache_trim(struct device_spans *d, size_t limit)
{
    while (d->oldest && d->bytes > limit)
        give_oldest_back(d);
}

/* How much may wait for the control thread. A limit of 0 means that nothing is kept, not even for a moment. */
static size_t may_wait(CUdevice device, size_t limit)
{
    /* What is unmapped in a window must not be copied aside at that moment, which only the control thread sees to. Copies may
     * be under way for a while after calls are traced no more. */
    if (atomic_load(&phos_gate_word) & PHOS_GATE_TRACED || atomic_load(&phos_window_shadows))
        return SIZE_MAX;
    return trimmed && limit ? phos_devices[device].total / WAITING_PART : 0;
}

void phos_span_release(struct phos_span *span)
{
    CUdevice device = span->device;
    struct device_spans *d = &spans[device];
    size_t size = span->mapping->range.size, limit = cache_limit(device), waiting = may_wait(device, limit);
    free(span->slots);
    span->slots = NULL;
    span->kind = PHOS_SPAN_CACHED;
    cache_add(d, span, size > limit);
    if (d->bytes <= limit)
        return;
    uint64_t now = span->freed_at = phos_now_ns();
    phos_block_changes++;
    while (d->bytes > limit && d->bytes - limit > waiting)
        give_oldest_back(d);
    if (d->bytes > limit && !atomic_load(&above_since)) {
        atomic_store(&above_since, now);
        phos_control_kick();
    }
}

uint64_t phos_span_patience(void)
{
    return phos_patience_left(atomic_load(&above_since));
}

void phos_span_trimmed(void)
{
    PHOS_LOCKED(&phos_memory_lock);
    trimmed = true;
}

/* With phos_memory_lock held. */
static bool give_one_back(uint64_t *changes)
{
    uint64_t now = phos_now_ns();
    bool above = false;
    if (changes && *changes != phos_block_changes && phos_span_patience())
        return false;
    for (CUdevice device = 0; device < phos_device_count; device++) {
        struct device_spans *d = &spans[device];
        if (d->bytes <= cache_limit(device))
            continue;
        above = true;
        /* What was freed just now may be wanted again, by a program that allocates and frees all the time. */
        if (changes && now - d->oldest->freed_at < PHOS_QUIET_MS * 1000000u)
            continue;
        give_oldest_back(d);
        if (changes)
            *changes = phos_block_changes; /* that was we */
        return true;
    }
    atomic_store(&above_since, above ? now : 0);
    return false;
}

bool phos_span_trim(uint64_t *changes)
{
    if (!atomic_load(&above_since) || phos_exiting())
        return false;
    bool given;
    phos_window_stand_still();
    {
        PHOS_LOCKED(&phos_memory_lock);
        given = give_one_back(changes);
    }
    phos_window_go_on();
    if (!given)
        return false;
    unsigned rounds = 0;
    do
        nanosleep(&(struct timespec){.tv_nsec = BETWEEN_NS}, NULL);
    while (atomic_load(&phos_memory_wanted) && ++rounds < MOST_BETWEEN);
    return true;
}

struct phos_span *phos_span_reuse(CUdevice device, size_t size, size_t largest)
{
    struct device_spans *d = &spans[device];
    for (uint32_t b = bucket_of(size), last = bucket_of(largest); d->bytes && b <= last; b++) {
        struct phos_span *best = NULL;
        unsigned looked = 0;
        for (struct phos_span *s = d->buckets[b]; s && looked < BUCKET_LOOK; s = s->next, looked++) {
            size_t have = s->mapping->range.size;
            if (have >= size && have <= largest && (!best || have < best->mapping->range.size))
                best = s;
        }
        if (best) {
            cache_remove(d, best);
            return best;
        }
    }
    return NULL;
}

void phos_span_flush(CUdevice device)
{
    cache_trim(&spans[device], 0);
}

size_t phos_span_waiting(CUdevice device)
{
    return spans[device].bytes;
}

CUresult phos_peer_access(CUdevice device, CUdevice peer, bool allowed)
{
    uint32_t *holders = &spans[device].peers[peer];
    if (allowed)
        ++*holders;
    else if (*holders && --*holders)
        return CUDA_SUCCESS; /* all that is on a device has one access: as long as anybody wants it, it stays */
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
