/* Shared by the window's two halves: window.c (begin and end), window_shadow.c (what is done before a call). */
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
};

struct phos_slot {
    CUevent event; /* recorded behind the copy into it, and those made with it */
    CUcontext context;
    uint32_t leader; /* the slot whose event stands for this one's copy */
};

/* Written by the control thread while no call is traced. `slots`, `next` of a pool, the tickets and the tail of the queue
 * change with `lock` held. */
struct phos_window {
    struct phos_chunk_table *chunks;
    struct phos_window_table *table;
    size_t chunks_size, table_size;
    struct phos_shadow_pool pools[PHOS_DEVICES];
    struct phos_slot *slots;
    uint32_t ticket;
    uint32_t transfer; /* where to look for a free transfer record */
};

extern struct phos_window phos_window;
extern pthread_mutex_t phos_window_lock;
/* Set: traced calls no longer wait, and do nothing. */
extern atomic_bool phos_window_over;

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
