/* phosd's side of the tables in frontend/window_table.h: what needs atomic operations, which Python does not have. Loaded
 * by chunk_table.py with ctypes, which lets go of the interpreter lock for each call. No state of its own; any thread. */
#include "chunk_table.h"

#include "../../frontend/window_table.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static uint32_t load(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* ---- the chunk table ---- */

EXPORT uint64_t phos_chunks_size(uint32_t chunks)
{
    return sizeof(struct phos_chunk_table) + (uint64_t)chunks * sizeof(uint32_t);
}

/* The memory is fresh: zero. */
EXPORT void phos_chunks_begin(struct phos_chunk_table *table, uint32_t chunk_bytes, uint32_t chunks)
{
    table->chunk_bytes = chunk_bytes;
    table->chunks = chunks;
    table->magic = PHOS_CHUNKS_MAGIC;
}

EXPORT uint32_t phos_chunks_state(const struct phos_chunk_table *table, uint32_t chunk)
{
    return load(&table->state[chunk]);
}

/* The state before: PHOS_CHUNK_UNSAVED if it is the caller's now. */
EXPORT uint32_t phos_chunks_claim(struct phos_chunk_table *table, uint32_t chunk)
{
    uint32_t state = PHOS_CHUNK_UNSAVED;
    __atomic_compare_exchange_n(&table->state[chunk], &state, PHOS_CHUNK_SAVING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return state;
}

EXPORT void phos_chunks_saved(struct phos_chunk_table *table, uint32_t chunk)
{
    __atomic_store_n(&table->state[chunk], PHOS_CHUNK_SAVED, __ATOMIC_RELEASE);
}

EXPORT void phos_chunks_close(struct phos_chunk_table *table)
{
    __atomic_store_n(&table->closed, 1, __ATOMIC_RELEASE);
}

/* ---- a process's window table ---- */

static uint64_t aligned(uint64_t size)
{
    return (size + 63) & ~(uint64_t)63;
}

EXPORT uint64_t phos_window_size(uint32_t blocks, uint32_t pools, uint32_t slots, uint32_t queue, uint32_t order)
{
    return aligned(sizeof(struct phos_window_table)) + aligned((uint64_t)blocks * sizeof(struct phos_window_block)) +
           aligned(pools * sizeof(struct phos_window_pool)) + aligned((uint64_t)slots * sizeof(struct phos_window_slot)) +
           aligned(PHOS_TRANSFERS * sizeof(struct phos_window_transfer)) + aligned((uint64_t)queue * sizeof(uint32_t)) +
           aligned((uint64_t)order * sizeof(uint32_t));
}

EXPORT void phos_window_begin(struct phos_window_view *view, struct phos_window_table *table, uint32_t process,
                              uint32_t blocks, uint32_t pools, uint32_t slots, uint32_t queue, uint32_t order,
                              uint32_t prioritise, uint32_t mode)
{
    table->size = phos_window_size(blocks, pools, slots, queue, order);
    table->process = process;
    table->blocks = blocks;
    table->pools = pools;
    table->slots = slots;
    table->queue = queue;
    table->order = order;
    table->prioritise = prioritise;
    table->mode = mode;
    table->blocks_at = aligned(sizeof *table);
    table->pools_at = table->blocks_at + aligned((uint64_t)blocks * sizeof(struct phos_window_block));
    table->slots_at = table->pools_at + aligned(pools * sizeof(struct phos_window_pool));
    table->transfers_at = table->slots_at + aligned((uint64_t)slots * sizeof(struct phos_window_slot));
    table->queue_at = table->transfers_at + aligned(PHOS_TRANSFERS * sizeof(struct phos_window_transfer));
    table->order_at = table->queue_at + aligned((uint64_t)queue * sizeof(uint32_t));
    table->magic = PHOS_WINDOW_MAGIC;
    *view = (struct phos_window_view){
        .table = table,
        .slots_at = table->slots_at,
        .transfers_at = table->transfers_at,
        .queue_at = table->queue_at,
        .order_at = table->order_at,
        .slots = slots,
        .queue = queue,
        .order = order,
    };
}

static void *at(struct phos_window_table *table, uint64_t offset)
{
    return (char *)table + offset;
}

/* This and phos_window_set_pool(): before any process has the table. */
EXPORT void phos_window_set_block(struct phos_window_table *table, uint32_t index, uint64_t block, uint64_t size, uint32_t first_chunk)
{
    ((struct phos_window_block *)at(table, table->blocks_at))[index] =
        (struct phos_window_block){.block = block, .size = size, .first_chunk = first_chunk};
}

EXPORT void phos_window_set_pool(struct phos_window_table *table, uint32_t index, uint32_t device, uint32_t first_slot,
                                 uint32_t slots, uint64_t bytes)
{
    ((struct phos_window_pool *)at(table, table->pools_at))[index] =
        (struct phos_window_pool){.device = device, .first_slot = first_slot, .slots = slots, .bytes = bytes};
}

/* The next chunk in the queue, or -1; the reader keeps *head. A frontend that writes nonsense harms only its own image:
 * the caller checks the number. */
EXPORT int64_t phos_window_next(const struct phos_window_view *view, uint32_t *head)
{
    uint32_t tail = load(&view->table->tail);
    if (*head == tail || *head >= view->queue)
        return -1;
    return ((uint32_t *)at(view->table, view->queue_at))[(*head)++];
}

/* The next chunk that the process touched for the first time, perhaps with PHOS_TOUCH_WRITES, or -1; the reader keeps
 * *head. */
EXPORT int64_t phos_window_next_touched(const struct phos_window_view *view, uint32_t *head)
{
    uint32_t tail = load(&view->table->touched);
    if (*head == tail || *head >= view->order)
        return -1;
    return ((uint32_t *)at(view->table, view->order_at))[(*head)++];
}

/* The names in it end in a zero byte, whatever the frontend wrote. */
EXPORT void phos_window_loading(const struct phos_window_table *table, struct phos_window_loading *loading)
{
    memcpy(loading, &table->loading, sizeof *loading);
    loading->fault = load(&table->loading.fault);
    for (uint32_t i = 0; i < PHOS_RECENT; i++)
        loading->recent[i][PHOS_RECENT_NAME - 1] = 0;
}

static struct phos_window_slot *slot_of(const struct phos_window_view *view, uint32_t slot)
{
    return (struct phos_window_slot *)at(view->table, view->slots_at) + slot;
}

/* Of a slot that there is: the caller has looked. */
EXPORT uint32_t phos_window_ticket(const struct phos_window_view *view, uint32_t slot)
{
    return load(&slot_of(view, slot)->ticket);
}

EXPORT void phos_window_free_slot(const struct phos_window_view *view, uint32_t slot)
{
    __atomic_store_n(&slot_of(view, slot)->ticket, 0, __ATOMIC_RELEASE);
}

/* Bit p: in the context of pool p's copies nothing is done any more, neither these nor what was to follow them. */
EXPORT uint64_t phos_window_faulted(const struct phos_window_table *table)
{
    return __atomic_load_n(&table->faulted, __ATOMIC_ACQUIRE);
}

/* Whether the application waits for a transfer of its own: in a call now, or queued. `flags` are the words that the GPU
 * has set in a pool of `slots` slots, as last read; transfers that have ended are cleared. Bit 1: some could not be judged
 * without newer flags of this pool. */
EXPORT uint32_t phos_window_transferring(const struct phos_window_view *view, uint32_t pool, uint32_t slots, const uint32_t *flags)
{
    uint32_t answer = load(&view->table->transferring) ? 1 : 0;
    struct phos_window_transfer *transfers = at(view->table, view->transfers_at);
    if (phos_window_faulted(view->table) >> pool & 1)
        return answer; /* nothing is transferred any more */
    for (uint32_t i = 0; i < PHOS_TRANSFERS; i++) {
        uint32_t ticket = load(&transfers[i].ticket);
        if (!ticket || transfers[i].pool != pool)
            continue;
        if (flags[slots + i] == ticket)
            __atomic_store_n(&transfers[i].ticket, 0, __ATOMIC_RELEASE);
        else
            answer |= 2;
    }
    return answer;
}

EXPORT void phos_window_counts(const struct phos_window_table *table, struct phos_window_counts *counts)
{
    const uint64_t *from = (const uint64_t *)&table->counts;
    uint64_t *to = (uint64_t *)counts;
    for (size_t i = 0; i < sizeof *counts / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

/* The call for which the process waited until all was saved; empty: none. It ends in a zero byte, as those above do. */
EXPORT void phos_window_culprit(const struct phos_window_table *table, char culprit[PHOS_RECENT_NAME])
{
    memcpy(culprit, table->culprit, PHOS_RECENT_NAME);
    culprit[PHOS_RECENT_NAME - 1] = 0;
}
