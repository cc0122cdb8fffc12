#ifndef PHOS_PAGE_COPY_H
#define PHOS_PAGE_COPY_H

#include <stdatomic.h>
#include <stdint.h>

#include "task_pages.h"

/*
 * The private mappings of a frozen task that CRIU dumps, by address: at most `room` of them into `found`. Returns how many
 * there are (if no more than `room`, none is missing), or -errno. Before CRIU has changed any: it adds one of its own, and
 * rights.
 */
long phos_read_mappings(int pid, struct phos_mapping *found, long room);

/*
 * Which pages of them there are, likewise; while the task is frozen. -errno: the kernel knows no PAGEMAP_SCAN (-ENOTTY), the
 * task has ended, its memory may not be read, ...
 */
long phos_find_pages(int pid, const struct phos_mapping *mappings, long count, struct phos_pages *found, long room);

/* A copy by several threads, each of which calls phos_copy_pages(). The last three are 0 at first. */
struct phos_page_copy {
	char *file; /* the mapping of it */
	const struct phos_pages *pages;
	uint64_t count;
	int32_t pid;
	_Atomic int32_t error; /* errno; 0: none. EFAULT, too, if the file system is full */
	_Atomic uint64_t next; /* what of the file no thread has begun: an offset */
	_Atomic uint64_t failed_at; /* an address of the task's, if there is an error */
};

/* Returns when nothing is left to begin, or something has failed. */
void phos_copy_pages(struct phos_page_copy *copy);

#endif
