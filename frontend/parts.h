/* What PyTorch's allocator has handed out of the memory that it took from the driver: to the driver a segment is one
 * allocation, however many tensors lie in it. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct phos_part {
    uint64_t begin, end;
};
enum phos_part_kind {
    PHOS_PART_UNKNOWN, /* nothing is known of any part */
    PHOS_PART_HELD,    /* this one holds the address; or ends there, and none begins: what is free behind it as well */
    PHOS_PART_FREE,    /* the address lies between two, in what is nobody's. It may reach far beyond the segment */
};
enum phos_part_kind phos_parts_find(uint64_t address, struct phos_part *part);
/* Whether any memory in [begin, end) was handed out while a graph was being captured, and has not gone since: there PyTorch
 * makes tensors at a graph's addresses again, each time it launches that, and reports none of them. */
bool phos_parts_captured(uint64_t begin, uint64_t end);
/* Whether any part reaches into [begin, end): then that is PyTorch's. */
bool phos_parts_any(uint64_t begin, uint64_t end);
/* Memory goes back to the driver: what was in it is forgotten, whether it was reported or not. */
void phos_parts_gone(uint64_t address, uint64_t size);
/* The control thread's, now and then: what was reported is put where it is found. */
void phos_parts_settle(void);
/* A capture begins (1) or has ended (-1), with no lock held that is taken with phos_memory_lock. */
void phos_parts_capture(int more);
/* Nobody asks any more for now: what comes and goes is noted with the least effort. */
void phos_parts_rest(void);
/* In a forked child. */
void phos_parts_forked(void);
