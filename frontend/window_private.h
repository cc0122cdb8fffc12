/* Shared by the window's parts: window.c (begin and end), window_shadow.c and window_lazy.c (what is done before a call, in
 * a checkpoint and in a lazy restore), window_ranges.c (what a call touches), window_tables.c (through addresses in memory). */
#pragma once
#include "blocks.h"
#include "runtime.h"
#include "window.h"
#include "window_table.h"

#include <pthread.h>
#include <stdatomic.h>

struct phos_shadow_pool {
    CUdeviceptr address; /* 0: the device has none */
    size_t size;
    uint32_t index; /* in the window table */
    uint32_t first_slot, slots;
    uint32_t next; /* where to look for a free slot */
    /* What makes the copies: a stream of their own, in the context that the last were made in. In the application's they
     * would stand behind work that may wait for the application. */
    CUstream copies; /* NULL: none yet */
    CUcontext context;
};

struct phos_slot {
    CUevent event; /* recorded behind the copy into it, and those made with it; or behind a transfer's flag */
    CUcontext context;
    uint32_t leader; /* the slot whose event stands for this one's copy */
    /* Calls that use the event without the lock: until they are through it stays, and the slot is not used anew. Grows with
     * `lock` held. */
    _Atomic uint32_t held;
    bool ends; /* its context does, and the copy has been made */
};

/* Written by the control thread while no call is traced. What `slots` points to, `next`, `copies` and `context` of a pool,
 * the tickets and the tail of the queue change with `lock` held. */
struct phos_window {
    struct phos_chunk_table *chunks;
    struct phos_window_table *table;
    size_t chunks_size, table_size;
    struct phos_shadow_pool pools[PHOS_DEVICES];
    struct phos_slot *slots; /* after those of the pools PHOS_TRANSFERS for the flags of transfers; set last, with `lock` */
    uint32_t ticket;
    uint32_t transfer; /* where to look for a free transfer record */
    uint64_t *seen, *written; /* a bit for each chunk that was touched, or written to; with phos_memory_lock */
    uint32_t unwritten;       /* chunks of this process that were not written to; likewise, but read by anybody, atomically */
    uint64_t *queued; /* lazy: a bit for each chunk that was put in the queue; with `lock` */
    bool no_longer_shut; /* strict: what is mapped from now on has access; with phos_memory_lock */
};

extern struct phos_window phos_window;
extern pthread_mutex_t phos_window_lock;
/* Set: traced calls no longer wait, and do nothing. */
extern atomic_bool phos_window_over;

/* ---- window.c ---- */

/* What a call said of a pool's copies: after an error phosd is told that they are not made any more. With the window's lock
 * held. */
void phos_window_see(const struct phos_shadow_pool *pool, CUresult result);

/* ---- window_ranges.c, all with phos_memory_lock held ---- */

struct phos_chunk_range {
    uint32_t first, end; /* in the chunk table */
};

/* The chunks in the part of a mapping that lies in [begin, end); none if its block is not in the window. */
struct phos_chunk_range phos_window_chunks(const struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end);
/* These chunks are touched now: those that never were, or were not written to, before are next in the order. */
void phos_window_note(struct phos_chunk_range chunks, bool writes);

/* ---- window_lazy.c ---- */

/* Before a call in a lazy restore: what it may touch is there when this returns. */
void phos_window_load(struct phos_touches *touches);
/* At the window's end, with all data there: gives access to what has none yet. False: a guess was wrong, and phosd is about
 * to end this process, which must not get to see that. */
bool phos_window_loaded(void) PHOS_CHECKED;
/* The kernels launched last, and the time of the first. */
void phos_window_launched(const struct phos_touches *touches);

/* ---- window_shadow.c ---- */

/* phosd sees to this chunk before others; with the window's lock held. */
void phos_window_ask(uint32_t chunk);
bool phos_window_closed(void);
/* The first call that waits for everything, for whoever asks why a window stopped the program. */
void phos_window_blame(const struct phos_touches *touches);

static inline struct phos_window_slot *phos_window_slots(void)
{
    return (struct phos_window_slot *)((char *)phos_window.table + phos_window.table->slots_at);
}
static inline struct phos_window_transfer *phos_window_transfers(void)
{
    return (struct phos_window_transfer *)((char *)phos_window.table + phos_window.table->transfers_at);
}
static inline struct phos_window_pool *phos_window_pools(void)
{
    return (struct phos_window_pool *)((char *)phos_window.table + phos_window.table->pools_at);
}
static inline CUdeviceptr phos_slot_address(const struct phos_shadow_pool *pool, uint32_t slot)
{
    return pool->address + PHOS_POOL_FLAGS + (CUdeviceptr)(slot - pool->first_slot) * phos_window.chunks->chunk_bytes;
}
static inline void phos_count(uint64_t *counter, uint64_t more)
{
    __atomic_fetch_add(counter, more, __ATOMIC_RELAXED);
}
