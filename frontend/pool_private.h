/* What pool.c (allocation) and pool_handle.c (pools themselves) share. With phos_memory_lock held, all of it. */
#pragma once
#include "pool.h"

struct pending; /* freed, but the GPU may not be done with it */

struct phos_pool {
    CUmemoryPool handle;
    CUdevice device;
    bool carried, destroyed;
    uint64_t used, used_high, waiting, reserved_high; /* bytes; reserved is used and waiting */
    uint64_t most; /* bytes that it may have in use; 0: any number */
    uint64_t keep; /* bytes that it is to keep (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) */
    uint64_t live;
    struct pending *pending; /* newest first */
    struct phos_pool *next;
};

extern struct phos_pool *phos_pools;

/* NULL: out of host memory. */
struct phos_pool *phos_pool_add(CUmemoryPool handle, CUdevice device, bool carried);
/* The record of a pool that is ours to serve or was seen before; NULL: of any other. */
struct phos_pool *phos_pool_of(CUmemoryPool handle);
/* Gives back what the GPU is done with. */
void phos_pool_reap(struct phos_pool *pool);
/* A pool that was destroyed lives on until all its memory is freed. */
void phos_pool_dispose_if_done(struct phos_pool *pool);
