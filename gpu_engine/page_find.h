#ifndef PHOS_PAGE_FIND_H
#define PHOS_PAGE_FIND_H

#include <stdbool.h>
#include <stdint.h>

#include "task_pages.h"

/*
 * The private mappings of a frozen task that CRIU dumps, by address: *found, which the caller frees. Returns how many there
 * are, or -errno. Before CRIU has changed any: it adds one of its own, and rights.
 */
long phos_read_mappings(int pid, struct phos_mapping **found);

/* Pages that have been found, by address. Only one thread adds to them; what it has shown to others stays as it is. */
struct phos_found {
	struct phos_pages **blocks; /* NULL where none has been needed yet */
	uint64_t count;
	uint64_t end; /* offset behind the last */
};

/* Returns 0 or -ENOMEM. */
int phos_found_init(struct phos_found *found);
void phos_found_free(struct phos_found *found);
const struct phos_pages *phos_found_at(const struct phos_found *found, uint64_t number);

/*
 * Find which pages there are of the mappings, while the task is frozen. Whenever there are `step` bytes more, and once at the
 * end, `show` is called, which returns 0, or -errno to end the search with it.
 *
 * Returns 0 or -errno: the kernel knows no PAGEMAP_SCAN (-ENOTTY), the task has ended, its memory may not be read, there is
 * no memory for so many, ...
 */
int phos_find_pages(int pid, const struct phos_mapping *mappings, long count, struct phos_found *found, uint64_t step,
		    int (*show)(void *context), void *context);

#endif
