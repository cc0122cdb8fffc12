#ifndef PHOS_PAGE_COPY_H
#define PHOS_PAGE_COPY_H

#include <stdint.h>

#include "task_pages.h"

/* Threads that wait for frozen tasks, to find their pages and to copy them. */
struct phos_page_pool;

/* One task, whose pages are copied into a file. */
struct phos_page_copy;

/* At least one thread, and `threads` if there can be so many. Returns 0 or -errno. */
int phos_page_pool_open(long threads, struct phos_page_pool **opened);

/* No task may have been left in it. */
void phos_page_pool_close(struct phos_page_pool *pool);

/*
 * A task is frozen, and CRIU has not changed its mappings yet: read which there are, and begin to find its pages and to copy
 * those that are found, by the threads of the pool. `file`, of which `mapped` bytes are mapped at `place`, becomes as large
 * as all; both are the caller's, and stay until phos_page_copy_drop(). Returns 0 or -errno.
 */
int phos_page_copy_begin(struct phos_page_pool *pool, int pid, int file, char *place, uint64_t mapped,
			 struct phos_page_copy **begun);

/* At most `room` of the task's mappings. Returns how many there are. */
long phos_page_copy_mappings(const struct phos_page_copy *copy, struct phos_mapping *mappings, long room);

/*
 * At most `room` of its runs of pages, by address, once all have been found. Returns how many there are, or -errno: they
 * cannot be found (phos_find_pages()), or there is no room for so many.
 */
long phos_page_copy_found(struct phos_page_copy *copy, struct phos_pages *found, long room);

/*
 * Returns 0 when all is copied, or an errno with the address of the task's that could not be: EFAULT, too, if the file
 * system is full.
 */
int phos_page_copy_wait(struct phos_page_copy *copy, uint64_t *failed_at);

/* Copy no more, and forget it. */
void phos_page_copy_drop(struct phos_page_copy *copy);

#endif
