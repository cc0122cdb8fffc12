/*
 * Filling a process's memory at once: in the process of `criu lazy-pages` (interpose.c says why), and in one of the plugin's
 * for restores that are not lazy (../fill_server.c).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PAGE ((uint64_t)4096)

/* Pages that lie one behind the other, in the process and in the file. */
struct phos_lazy_run {
	uint64_t address, offset, size; /* bytes, multiples of PAGE */
};

/* What a pagemap image (pagemap.proto of CRIU) says is to be restored lazily. */
struct phos_lazy_pages {
	uint32_t pages_id; /* of the file that they lie in: pages-ID.img */
	size_t count;
	struct phos_lazy_run *runs; /* the caller frees them */
};

/* Reads such an image, whatever it holds. Returns 0; -1: it is none, or one that is not understood. */
int phos_lazy_decode(const void *image, size_t size, struct phos_lazy_pages *pages);

/* UFFDIO_COPY for pages of which some are there already: those are left alone. As ioctl(), `copied`: bytes done or there. */
int phos_lazy_copy(int uffd, uint64_t to, const void *from, uint64_t size, int64_t *copied);

struct phos_lazy_piece {
	uint64_t address, size;
	bool gone; /* the process has done something with that memory since */
};

/* What has been brought, by address. */
struct phos_lazy_filled {
	size_t count;
	struct phos_lazy_piece *pieces;
	uint64_t bytes, wanted; /* brought, or there already; that the image has */
	int error; /* what ended it before all was there; 0: nothing did, or the image is cut off */
};

/*
 * What PHOS_FILL_THREADS says, or half of the processors (phosd and the driver are at work as well), or 0 if that is less
 * than `fewest`; never above 8.
 */
unsigned phos_lazy_threads(unsigned fewest);

/*
 * Brings all of a process's lazy pages, with so many threads, if its image lies in memory. `pid`: as CRIU's images have it.
 * Returns 0 when all is there, or nothing more can be brought this way; -1: nothing could be. The caller frees the pieces.
 */
int phos_lazy_fill(int uffd, int pid, unsigned threads, struct phos_lazy_filled *filled);

/* Whether all of a range has been brought, and the process has changed none of it since. */
bool phos_lazy_has(const struct phos_lazy_filled *filled, uint64_t address, uint64_t size);

/* The process has changed what is mapped there. */
void phos_lazy_gone(struct phos_lazy_filled *filled, uint64_t address, uint64_t size);

#define PHOS_LAZY_MOST 256 /* processes that are served at once; of any more, CRIU brings the pages by itself */
#define PHOS_LAZY_NOWHERE UINT32_MAX

/*
 * If this process is killed, or fails, that one (0: it is not known) is ended before its userfaultfd closes, and so is what it
 * has forked since, as long as that is below it (keeper.c). Returns its place; NOWHERE: it will not be ended.
 */
unsigned phos_lazy_keep(pid_t pid);

/* It has forked, and there is a userfaultfd of the child. */
void phos_lazy_forked(unsigned place);

/* One of these is about to be closed: nothing more comes there. `itself`: the process's own. */
void phos_lazy_let_go(unsigned place, bool itself);

/*
 * Whether a thread of the image has this pid. Whoever is started beside a restore gets the next one, whichever that is, and
 * must not keep such a one: a task's threads are given theirs only later.
 */
bool phos_pid_needed(int images, pid_t pid);
