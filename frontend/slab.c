/* The allocator: small slots, medium runs, large spans. See memory.h.
 *
 *     up to 1 MiB    a slot of a small slab: one unit of 2 MiB cut into equal slots, a slab for each size class
 *     up to 16 MiB   a run of units of a medium slab: one block of 16 units (32 MiB) that all sizes share
 *     above          a span of its own
 *
 * What a medium slab has free is a word of 16 bits: runs come together again by themselves when they are freed, and the
 * smallest run that fits is found without a search. A slab is listed under the length of its longest free run. */
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "deferred.h"
#include "gate.h"
#include "log.h"
#include "parts.h"
#include "pool.h"
#include "runtime.h"
#include "span.h"
#include "window.h"

#include <stdlib.h>

#define SMALL_LARGEST ((size_t)1 << 20)
#define CLASSES 40
#define MEDIUM_BYTES (PHOS_MEDIUM_UNITS * PHOS_UNIT)
#define MEDIUM_LARGEST (MEDIUM_BYTES / 2)
#define SCATTERED_PART 16 /* of the device's memory: how much may be free in medium slabs before there are no more */
#define PENDING_NS 10000000000 /* the longest wait for any of what was freed in a stream; the driver waits for it, too */
#define DEFERRED_NS 1000000000 /* the longest wait for the work that may use memory that was freed during a capture */
#define OWED_MS 1000 /* the longest wait for phosd to let go of memory that was freed ... */
#define SAVED_MS 600000 /* ... and if a checkpoint has to save it first, which may go to a slow disk */

/* Per device; guarded by phos_memory_lock. */
static struct device_slabs {
    struct phos_span *small[CLASSES];                /* with at least one free slot */
    struct phos_span *medium[PHOS_MEDIUM_UNITS + 1]; /* by longest free run; none under 0 */
    uint64_t medium_free;                            /* units free in medium slabs that are in use */
} slabs[PHOS_DEVICES];

static unsigned long long last_buffer = 1ull << 48; /* far above the driver's own numbers; guarded likewise */

/* ---- small: slots ---- */

/* Slot sizes: multiples of 512 up to 4 KiB, then four steps a doubling up to 1 MiB. */
static uint32_t class_of(size_t size)
{
    if (size <= 4096)
        return (uint32_t)((size + PHOS_ALIGNMENT - 1) / PHOS_ALIGNMENT - 1);
    uint32_t power = 63u - (uint32_t)__builtin_clzll(size - 1);
    size_t step = (size_t)1 << (power - 2);
    return 8 + (power - 12) * 4 + (uint32_t)((size - ((size_t)1 << power) + step - 1) / step) - 1;
}

static size_t class_size(uint32_t slot_class)
{
    if (slot_class < 8)
        return (slot_class + 1) * PHOS_ALIGNMENT;
    uint32_t power = 12 + (slot_class - 8) / 4;
    return ((size_t)1 << power) + ((slot_class - 8) % 4 + 1) * ((size_t)1 << (power - 2));
}

static CUresult span_get(CUdevice device, size_t size, size_t largest, struct phos_span **span)
{
    if ((*span = phos_span_reuse(device, size, largest)))
        return CUDA_SUCCESS;
    return phos_span_create(device, size, span);
}

static CUresult small_get(CUdevice device, size_t size, struct phos_allocation **out)
{
    uint32_t slot_class = class_of(size);
    struct phos_span **list = &slabs[device].small[slot_class], *span = *list;
    if (!span) {
        size_t unit = phos_devices[device].granularity;
        CUresult result = span_get(device, unit, unit, &span);
        if (result != CUDA_SUCCESS)
            return result;
        size_t slot_size = class_size(slot_class);
        uint32_t count = (uint32_t)(span->mapping->range.size / slot_size);
        span->slots = calloc(count, sizeof *span->slots);
        if (!span->slots) {
            phos_span_release(span);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        for (uint32_t i = 0; i < count; i++) {
            span->slots[i].span = span;
            span->slots[i].address = span->mapping->range.address + i * slot_size;
            span->slots[i].free_next = i + 1;
        }
        span->kind = PHOS_SPAN_SMALL;
        span->list = slot_class;
        span->slot_count = count;
        span->used = span->free_slot = 0;
        phos_span_push(list, span);
    }
    struct phos_allocation *slot = &span->slots[span->free_slot];
    span->free_slot = slot->free_next;
    if (++span->used == span->slot_count)
        phos_span_unlink(list, span);
    *out = slot;
    return CUDA_SUCCESS;
}

static void small_put(struct phos_allocation *slot)
{
    struct phos_span *span = slot->span, **list = &slabs[span->device].small[span->list];
    slot->free_next = span->free_slot;
    span->free_slot = (uint32_t)(slot - span->slots);
    if (span->used-- == span->slot_count)
        phos_span_push(list, span);
    /* The last empty slab of a class stays one: programs allocate and free one small thing over and over. */
    if (!span->used && (span->next || span->previous)) {
        phos_span_unlink(list, span);
        phos_span_release(span);
    }
}

/* ---- medium: runs of units ---- */

static uint32_t run_mask(uint32_t first, uint32_t length)
{
    return ((1u << length) - 1) << first;
}

static uint32_t longest_run(uint32_t free_units)
{
    uint32_t length = 0;
    for (; free_units; length++)
        free_units &= free_units >> 1;
    return length;
}

/* Where the shortest run of at least `length` free units begins; there must be one. */
static uint32_t best_run(uint32_t free_units, uint32_t length)
{
    uint32_t best = 0, best_length = UINT32_MAX;
    while (free_units) {
        uint32_t first = (uint32_t)__builtin_ctz(free_units);
        uint32_t run = (uint32_t)__builtin_ctz(~(free_units >> first));
        if (run >= length && run < best_length) {
            best = first;
            best_length = run;
        }
        free_units &= ~run_mask(first, run);
    }
    return best;
}

static void medium_list(struct phos_span *span)
{
    if ((span->list = longest_run(span->free_units)))
        phos_span_push(&slabs[span->device].medium[span->list], span);
}

static void medium_unlist(struct phos_span *span)
{
    if (span->list)
        phos_span_unlink(&slabs[span->device].medium[span->list], span);
}

static bool medium_begin(struct phos_span *span)
{
    span->slots = calloc(PHOS_MEDIUM_UNITS, sizeof *span->slots);
    if (!span->slots)
        return false;
    for (uint32_t i = 0; i < PHOS_MEDIUM_UNITS; i++) {
        span->slots[i].span = span;
        span->slots[i].address = span->mapping->range.address + i * PHOS_UNIT;
    }
    span->kind = PHOS_SPAN_MEDIUM;
    span->slot_count = PHOS_MEDIUM_UNITS;
    span->used = 0;
    span->free_units = run_mask(0, PHOS_MEDIUM_UNITS);
    slabs[span->device].medium_free += PHOS_MEDIUM_UNITS;
    medium_list(span);
    return true;
}

static struct phos_allocation *medium_cut(struct phos_span *span, uint32_t length)
{
    uint32_t first = best_run(span->free_units, length);
    medium_unlist(span);
    span->free_units &= ~run_mask(first, length);
    medium_list(span);
    span->used++;
    span->slots[first].units = (uint8_t)length;
    for (uint32_t i = first; i < first + length; i++)
        span->unit_first[i] = (uint8_t)first;
    slabs[span->device].medium_free -= length;
    return &span->slots[first];
}

static CUresult medium_get(CUdevice device, size_t size, struct phos_allocation **out)
{
    uint32_t length = (uint32_t)((size + PHOS_UNIT - 1) / PHOS_UNIT);
    for (uint32_t run = length; run <= PHOS_MEDIUM_UNITS; run++)
        if (slabs[device].medium[run]) {
            *out = medium_cut(slabs[device].medium[run], length);
            return CUDA_SUCCESS;
        }
    /* Pieces that live long may keep many a slab from being given back, and what is free in them cannot serve large
     * requests: beyond this, each gets a block of its own. */
    if (slabs[device].medium_free * PHOS_UNIT > phos_devices[device].total / SCATTERED_PART)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct phos_span *span;
    CUresult result = span_get(device, MEDIUM_BYTES, MEDIUM_BYTES, &span);
    if (result != CUDA_SUCCESS)
        return result;
    if (medium_begin(span)) {
        *out = medium_cut(span, length);
        return CUDA_SUCCESS;
    }
    phos_span_release(span);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void medium_put(struct phos_allocation *allocation)
{
    struct phos_span *span = allocation->span;
    uint32_t first = (uint32_t)(allocation - span->slots), length = allocation->units;
    medium_unlist(span);
    span->free_units |= run_mask(first, length);
    allocation->units = 0;
    slabs[span->device].medium_free += length;
    if (--span->used) {
        medium_list(span);
        return;
    }
    slabs[span->device].medium_free -= PHOS_MEDIUM_UNITS;
    phos_span_release(span);
}

/* ---- all sizes ---- */

static CUresult large_get(CUdevice device, size_t size, struct phos_allocation **out)
{
    size_t granularity = phos_devices[device].granularity;
    size = (size + granularity - 1) & ~(granularity - 1);
    struct phos_span *span;
    /* A little too large is fine; more would hold memory that nobody asked for. */
    CUresult result = span_get(device, size, size + size / 8, &span);
    if (result != CUDA_SUCCESS)
        return result;
    span->kind = PHOS_SPAN_LARGE;
    span->whole.span = span;
    span->whole.address = span->mapping->range.address;
    *out = &span->whole;
    return CUDA_SUCCESS;
}

static CUresult try_allocate(CUdevice device, size_t size, struct phos_allocation **out)
{
    if (size <= SMALL_LARGEST)
        return small_get(device, size, out);
    if (size <= MEDIUM_LARGEST && MEDIUM_BYTES % phos_devices[device].granularity == 0) {
        CUresult result = medium_get(device, size, out);
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            return result;
        /* No slab, or there is not that much left; perhaps there is as much as was asked for. */
    }
    return large_get(device, size, out);
}

/* With phos_memory_lock, which others may have meanwhile. */
static void give_back(CUdevice device)
{
    pthread_mutex_unlock(&phos_memory_lock);
    phos_window_stand_still();
    pthread_mutex_lock(&phos_memory_lock);
    phos_cache_flush(device);
    phos_window_go_on();
}

/* In a window, phosd lets go of memory when all of it is saved: a call that is served here may wait for that. It has nothing to
 * do with the window's tables from then on, so the window may end before it. */
static unsigned longest_wait(bool served)
{
    if (!served || !(atomic_load(&phos_gate_word) & PHOS_GATE_TRACED))
        return OWED_MS;
    phos_gate_untrace_self();
    return SAVED_MS;
}

static __thread uint64_t short_since __attribute__((tls_model("initial-exec"))); /* ns */

static bool recover(CUdevice device, unsigned *step, bool served)
{
    if (device < 0)
        return false;
    PHOS_RELAXED;
    switch ((*step)++) {
    case 0:
        short_since = phos_now_ns();
        phos_pool_reclaim(device);
        give_back(device);
        return true;
    case 1:
        /* Not for what other threads free meanwhile, which may go on for ever. */
        if (!phos_pool_settle(device, short_since, PENDING_NS))
            return recover(device, step, served);
        --*step; /* if that was too little, there may be more */
        give_back(device);
        return true;
    case 2:
        if (!phos_deferred_settle(DEFERRED_NS))
            return recover(device, step, served);
        give_back(device);
        return true;
    case 3:
        /* Memory given back reaches the driver only when phosd, which holds a descriptor of it, has let go of it too. */
        return phos_control_settle(longest_wait(served));
    default:
        return false;
    }
}

bool phos_memory_recover(CUdevice device, unsigned *step)
{
    return recover(device, step, true);
}

bool phos_driver_recover(CUdevice device, unsigned *step)
{
    CUcontext context;
    if (device == PHOS_DEVICE_HERE && phos_current(&context, &device) != CUDA_SUCCESS)
        return false;
    PHOS_LOCKED(&phos_memory_lock);
    return recover(device, step, false);
}

CUresult phos_allocate(CUdevice device, CUcontext context, size_t size, const char *entry_point,
                       struct phos_allocation **out)
{
    PHOS_RELAXED;
    if (size > phos_devices[device].total)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct phos_allocation *allocation;
    CUresult result = PHOS_RETRIED(phos_memory_recover, device, try_allocate(device, size, &allocation));
    if (result != CUDA_SUCCESS)
        return result;
    allocation->size = size;
    allocation->context = context;
    allocation->entry_point = entry_point;
    allocation->pool = NULL;
    allocation->state = PHOS_LIVE;
    phos_allocation_renew(allocation);
    *out = allocation;
    return CUDA_SUCCESS;
}

void phos_allocation_renew(struct phos_allocation *allocation)
{
    allocation->buffer = ++last_buffer;
    allocation->synchronous = false;
}

size_t phos_allocation_capacity(const struct phos_allocation *allocation)
{
    const struct phos_span *span = allocation->span;
    switch (span->kind) {
    case PHOS_SPAN_SMALL:
        return class_size(span->list);
    case PHOS_SPAN_MEDIUM:
        return allocation->units * PHOS_UNIT;
    default:
        return span->mapping->range.size;
    }
}

void phos_deallocate(struct phos_allocation *allocation)
{
    PHOS_RELAXED;
    phos_parts_gone(allocation->address, allocation->size);
    allocation->state = PHOS_FREE;
    switch (allocation->span->kind) {
    case PHOS_SPAN_SMALL:
        small_put(allocation);
        break;
    case PHOS_SPAN_MEDIUM:
        medium_put(allocation);
        break;
    default:
        phos_span_release(allocation->span);
    }
}

void phos_cache_flush(CUdevice device)
{
    for (CUdevice d = 0; d < phos_device_count; d++) {
        if (device >= 0 && d != device)
            continue;
        for (uint32_t c = 0; c < CLASSES; c++)
            for (struct phos_span *span = slabs[d].small[c], *next; span; span = next) {
                next = span->next;
                if (span->used)
                    continue;
                phos_span_unlink(&slabs[d].small[c], span);
                phos_span_release(span);
            }
        phos_span_flush(d);
    }
}

size_t phos_cache_bytes(CUdevice device)
{
    return phos_span_waiting(device) + slabs[device].medium_free * PHOS_UNIT;
}

/* ---- looking ---- */

struct phos_allocation *phos_allocation_in(const struct phos_mapping *mapping, CUdeviceptr address)
{
    struct phos_span *span = mapping->span;
    if (!span)
        return NULL;
    struct phos_allocation *a = NULL;
    size_t offset = address - mapping->range.address;
    if (span->kind == PHOS_SPAN_LARGE)
        a = &span->whole;
    else if (span->kind == PHOS_SPAN_MEDIUM)
        a = &span->slots[span->unit_first[offset / PHOS_UNIT]];
    else if (span->kind == PHOS_SPAN_SMALL && offset / class_size(span->list) < span->slot_count)
        a = &span->slots[offset / class_size(span->list)];
    return a && a->state == PHOS_LIVE && address - a->address < a->size ? a : NULL;
}

struct phos_allocation *phos_allocation_at(CUdeviceptr address)
{
    const struct phos_mapping *mapping = phos_mapping_at(address);
    return mapping ? phos_allocation_in(mapping, address) : NULL;
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
        else if (span->kind == PHOS_SPAN_SMALL || span->kind == PHOS_SPAN_MEDIUM) {
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
