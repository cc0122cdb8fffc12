/* The allocator behind cuMemAlloc and its relatives.
 *
 *     span    a run of addresses with one block behind it, mapped: 2 MiB cut into equal slots (a slab), or one large
 *             allocation, or free and kept mapped for the next one (cached), or memory of another process (imported)
 *     allocation  what the application was given: a slot, or a large span
 *
 * All metadata is in host memory. All functions here want phos_memory_lock held. */
#pragma once
#include "blocks.h"
#include "error.h"
#include "phos_api.h"

#define PHOS_UNIT ((size_t)2 << 20) /* granularity of physical memory; softgpu and every GPU with VMM up to now */

struct phos_pool;

enum phos_allocation_state {
    PHOS_FREE,     /* a slot not in use */
    PHOS_LIVE,     /* the application's */
    PHOS_PENDING,  /* freed, but work already queued may still touch it */
};

struct phos_allocation {
    CUdeviceptr address;
    size_t size; /* as asked for */
    CUcontext context;
    unsigned long long buffer; /* CU_POINTER_ATTRIBUTE_BUFFER_ID: never reused */
    const char *entry_point;
    struct phos_pool *pool; /* of stream-ordered memory */
    struct phos_span *span;
    struct phos_allocation *next; /* in whatever list its state says */
    uint32_t free_next;           /* in its slab's list of free slots */
    uint8_t state;
};

enum phos_span_kind { PHOS_SPAN_LARGE, PHOS_SPAN_SLAB, PHOS_SPAN_CACHED, PHOS_SPAN_IMPORTED };

struct phos_span {
    enum phos_span_kind kind;
    CUdevice device;
    struct phos_mapping *mapping;
    struct phos_span *next, *previous; /* slabs with room, or cached spans, newest first */
    struct phos_allocation whole;      /* LARGE */
    struct phos_allocation *slots;     /* SLAB */
    uint32_t slot_class, slot_count, used, free_slot;
    uint32_t opens;                    /* IMPORTED: cuIpcOpenMemHandle calls not closed yet */
};

/* May unlock and lock again while it waits for memory to come back. */
CUresult phos_allocate(CUdevice device, CUcontext context, size_t size, const char *entry_point,
                       struct phos_allocation **allocation) PHOS_CHECKED;
/* The GPU must be done with it. */
void phos_deallocate(struct phos_allocation *allocation);
/* The live allocation that contains the address, or NULL. */
struct phos_allocation *phos_allocation_at(CUdeviceptr address);
/* Another process's memory, mapped. */
CUresult phos_map_imported(struct phos_block *block, struct phos_span **span) PHOS_CHECKED;
CUresult phos_unmap_imported(struct phos_span *span) PHOS_CHECKED;

/* Gives freed memory that was kept mapped back to the driver; device -1: of all. */
void phos_cache_flush(CUdevice device);
/* Every allocation made in this context is gone; the context is idle. */
void phos_free_context(CUcontext context);
void phos_each_allocation(void (*visit)(struct phos_allocation *allocation, void *cookie), void *cookie);
/* From now on `peer` may (or may no longer) touch what is or will be on `device`. */
CUresult phos_peer_access(CUdevice device, CUdevice peer, bool allowed);

/* Device and context of the calling thread, or the driver's error. */
CUresult phos_current(CUcontext *context, CUdevice *device);
/* Waits for a context's work, whatever is current; during a capture it does nothing and answers *captured. */
CUresult phos_synchronize(CUcontext context, bool *captured);
