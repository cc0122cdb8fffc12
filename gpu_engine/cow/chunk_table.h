/* What native code of phosd's does with the chunk table of a window (chunk_table.c). */
#pragma once
#include <stdint.h>

struct phos_chunk_table;
struct phos_window_table;

/* A window table as phosd made it. The table itself is in the hands of a process, which may write there what it likes:
 * nothing that is read there says where phosd reads or writes. */
struct phos_window_view {
    struct phos_window_table *table;
    uint64_t slots_at, transfers_at, queue_at, order_at; /* bytes from the start */
    uint32_t slots, queue, order;                        /* their lengths */
    uint32_t zero;
};

/* From now on anybody may write to the chunk. */
void phos_chunks_saved(struct phos_chunk_table *table, uint32_t chunk);
/* Take a chunk that nobody has. Answers the state before: PHOS_CHUNK_UNSAVED if it is the caller's now. */
uint32_t phos_chunks_claim(struct phos_chunk_table *table, uint32_t chunk);
/* See chunk_table.c. */
uint32_t phos_window_transferring(const struct phos_window_view *view, uint32_t pool, uint32_t slots, const uint32_t *flags);
void phos_window_free_slot(const struct phos_window_view *view, uint32_t slot);
/* The next chunk that a process wants to be seen to, or -1; the reader keeps *head. */
int64_t phos_window_next(const struct phos_window_view *view, uint32_t *head);
