/* Stream-ordered memory. With phos_memory_lock held, all of these. */
#pragma once
#include "memory.h"

/* Gives back what freed stream-ordered memory the GPU is done with. */
void phos_pool_reclaim(CUdevice device);
/* Waits until the GPU is done with some of what was freed by then (ns), for so long at most; false: it is not, or there is
 * none. Releases and retakes the lock. */
bool phos_pool_settle(CUdevice device, uint64_t freed_by, uint64_t timeout_ns);
/* Bytes of it that are only waiting to be given back. */
size_t phos_pool_cached(CUdevice device);
void phos_pool_context_ends(CUcontext context);
/* A green context ends: its events, and what waits for them, are its primary context's. */
void phos_pool_context_moves(CUcontext from, CUcontext to);
/* Without the lock; the control thread's, now and then: gives back what was freed a while ago and not wanted since, but for what
 * a pool is to keep (CU_MEMPOOL_ATTR_RELEASE_THRESHOLD). */
void phos_pool_rest(void);
/* cuMemFree of stream-ordered memory, which waits for nothing: who calls it has to know that nothing uses it any more. */
void phos_pool_free_now(struct phos_allocation *allocation);
/* The application's handle of a pool; NULL for NULL. */
CUmemoryPool phos_pool_handle(const struct phos_pool *pool);
