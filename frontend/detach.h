/* Taking away everything that is carried, and putting it back. By the control thread, with the gate closed. */
#pragma once
#include "error.h"
#include "phos_api.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_detached {
    uint64_t unmap_ns, reduce_ns, blocks, bytes, host_bytes;
};

/* What makes the driver's checkpoint smaller or quicker, until the attach: the stack limit; huge pages for what it saves
 * (mmap.c); several threads that copy it (driver_memcpy.h). */
struct phos_reducers {
    bool stack, huge_pages, copy_threads;
};

/* Gets phosd's descriptor of a block, this session's or another's. */
typedef bool phos_fetch(const uint8_t session[16], uint64_t block, int *descriptor, struct phos_error *error);

/* All or nothing: after a failure everything is mapped as before. Should even that fail, every call does from then on. */
bool phos_detach(const struct phos_reducers *reducers, phos_fetch *fetch, struct phos_detached *done,
                 struct phos_error *error) PHOS_CHECKED;
/* memory_map.c: a memfd with a serialized MemoryMap, or -1. To be called before phos_detach, which keeps the records. */
int phos_memory_map(void);

/* One descriptor per block, in any order, then the rest at once. */
bool phos_attach_block(uint64_t id, int descriptor, struct phos_error *error) PHOS_CHECKED;
/* `shut`: all is mapped, but nothing has access before it is opened. */
bool phos_attach(uint64_t blocks, bool shut, uint64_t *map_ns, uint64_t *undo_ns, struct phos_error *error) PHOS_CHECKED;

/* Gives access to what is shut, to all of it or to some; any thread, with phos_memory_lock held. */
struct phos_mapping;
bool phos_mapping_open(struct phos_mapping *mapping, struct phos_error *error) PHOS_CHECKED;
bool phos_mappings_open(bool (*wanted)(const struct phos_mapping *mapping), struct phos_error *error) PHOS_CHECKED;

/* Makes any live context current, for calls that want one. Answers what phos_leave_context wants to know. */
bool phos_enter_context(void) PHOS_CHECKED;
void phos_leave_context(bool entered);

/* mmap.c: from here to there, large populated anonymous mappings (the driver's own host copies) come out of the prepared
 * file (residue.h), or get huge pages where those are asked for. */
void phos_mmap_arm(bool armed, bool huge_pages);
