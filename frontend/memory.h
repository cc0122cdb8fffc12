/* The allocator behind cuMemAlloc and its relatives.
 *
 *     span        a run of addresses with one block behind it, mapped: cut into equal slots (a small slab), or into runs
 *                 of 2 MiB units (a medium slab), or one large allocation, or free and kept mapped for the next one
 *                 (cached), or memory of another process (imported)
 *     allocation  what the application was given: a slot, a run, or a large span
 *
 * All metadata is in host memory. All functions here want phos_memory_lock held. */
#pragma once
#include "blocks.h"
#include "error.h"
#include "phos_api.h"

#define PHOS_UNIT ((size_t)2 << 20) /* granularity of physical memory; softgpu and every GPU with VMM up to now */
#define PHOS_ALIGNMENT ((size_t)512)        /* what cuMemAlloc gives on every GPU of this decade */
#define PHOS_MEDIUM_UNITS 16                /* of a medium slab */

struct phos_pool;

enum phos_allocation_state {
    PHOS_FREE,     /* a slot or unit not in use */
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
    uint32_t free_next;           /* in its small slab's list of free slots */
    uint8_t units;                /* how many of its medium slab are its own */
    uint8_t state;
    bool synchronous;             /* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS */
};

enum phos_span_kind { PHOS_SPAN_LARGE, PHOS_SPAN_SMALL, PHOS_SPAN_MEDIUM, PHOS_SPAN_CACHED, PHOS_SPAN_IMPORTED };

/* An allocation of another process's, in what is mapped of it. */
struct phos_opened {
    CUdeviceptr address;
    size_t size;
    struct phos_opened *next;
};

struct phos_span {
    enum phos_span_kind kind;
    CUdevice device;
    struct phos_mapping *mapping;
    struct phos_span *next, *previous;     /* slabs with room, or cached spans of about this size */
    struct phos_span *newer, *older;       /* CACHED: all of the device's */
    uint64_t freed_at;                     /* CACHED: in ns, if there were more than are to be kept; else whatever it was */
    struct phos_allocation whole;          /* LARGE */
    struct phos_allocation *slots;         /* SMALL; MEDIUM: one a unit, that of its first unit stands for a run */
    uint32_t list;                         /* SMALL: size class; MEDIUM: longest free run */
    uint32_t slot_count, used, free_slot;
    uint16_t free_units;                   /* MEDIUM: a bit each */
    uint8_t unit_first[PHOS_MEDIUM_UNITS]; /* MEDIUM: where the run begins that a unit in use belongs to */
    uint32_t opens;                        /* IMPORTED: cuIpcOpenMemHandle calls not closed yet ... */
    CUcontext opener;                      /* ... the context that all of them were made in; NULL: several ... */
    struct phos_opened *opened;            /* ... and what they asked for */
};

/* May unlock and lock again while it waits for memory to come back. */
CUresult phos_allocate(CUdevice device, CUcontext context, size_t size, const char *entry_point,
                       struct phos_allocation **allocation) PHOS_CHECKED;
/* After CUDA_ERROR_OUT_OF_MEMORY: gives back freed memory that is kept somewhere, in the cheapest way that has not been
 * tried. *step begins with 0. False: there is no other way, or no such device (CU_DEVICE_INVALID). May unlock and lock
 * again, as phos_allocate may. */
bool phos_memory_recover(CUdevice device, unsigned *step);
/* The same for who does not hold the lock. PHOS_DEVICE_HERE is the current context's. */
#define PHOS_DEVICE_HERE (-1)
bool phos_driver_recover(CUdevice device, unsigned *step);
/* The result of a call, tried again as long as `recover`, which is given `where`, finds something to give back. */
#define PHOS_RETRIED(recover, where, call) \
    ({ \
        CUresult retried_; \
        unsigned step_ = 0; \
        do \
            retried_ = (call); \
        while (__builtin_expect(retried_ == CUDA_ERROR_OUT_OF_MEMORY, 0) && recover(where, &step_)); \
        retried_; \
    })
/* Likewise, of one that the driver serves on the current device: what we keep must not be what it lacks. */
#define PHOS_RETRIED_HERE(allocation) PHOS_RETRIED(phos_driver_recover, PHOS_DEVICE_HERE, allocation)
/* The GPU must be done with it. */
void phos_deallocate(struct phos_allocation *allocation);
/* It becomes another buffer at the same place. */
void phos_allocation_renew(struct phos_allocation *allocation);
/* How many bytes could be used of what was given out. */
size_t phos_allocation_capacity(const struct phos_allocation *allocation);
/* The live allocation that contains the address, or NULL. */
struct phos_allocation *phos_allocation_at(CUdeviceptr address);
/* The same, for an address in this mapping. */
struct phos_allocation *phos_allocation_in(const struct phos_mapping *mapping, CUdeviceptr address);
/* Another process's memory, mapped. */
CUresult phos_map_imported(struct phos_block *block, struct phos_span **span) PHOS_CHECKED;
CUresult phos_unmap_imported(struct phos_span *span) PHOS_CHECKED;
/* The allocation of another process's that contains the address, if it was opened; or NULL. */
const struct phos_opened *phos_opened_at(CUdeviceptr address);

/* What to ask the driver about in place of an address: one that the application does not own any more, though our block is
 * still mapped there, must be as unknown as after a cuMemFree of the driver's. */
CUdeviceptr phos_query_address(CUdeviceptr address);

/* Gives freed memory that was kept mapped back to the driver; device -1: of all. */
void phos_cache_flush(CUdevice device);
/* Bytes free in blocks of ours: kept mapped, or in medium slabs that are in use. */
size_t phos_cache_bytes(CUdevice device);
/* Every allocation made in this context is gone; the context is idle. */
void phos_free_context(CUcontext context);
void phos_each_allocation(void (*visit)(struct phos_allocation *allocation, void *cookie), void *cookie);
/* From now on `peer` may (or, once nobody wants it any more who has wanted it, may no longer) touch what is or will be on
 * `device`. */
CUresult phos_peer_access(CUdevice device, CUdevice peer, bool allowed);

/* Device and context of the calling thread, or the driver's error. */
CUresult phos_current(CUcontext *context, CUdevice *device);
/* Waits for a context's work, whatever is current; during a capture it does nothing and answers *captured. */
CUresult phos_synchronize(CUcontext context, bool *captured);
/* Waits during a capture too: for a context that is about to end. A capture in another context is not harmed by that, and
 * one in this context ends with it. */
CUresult phos_synchronize_anyhow(CUcontext context);
