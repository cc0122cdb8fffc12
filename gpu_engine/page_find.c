/*
 * Which private pages a frozen task has.
 *
 * Which pages are asked for as CRIU asks (criu/pagemap-cache.c: in RAM or swap, neither zero pages nor the file's own), and
 * of which mappings (criu/mem.c: private ones, but for what the kernel itself maps). To be copied is all that CRIU's own
 * work leaves alone and that can be read without changing the mapping. What is left to CRIU:
 *   - executable mappings: it puts a few instructions of its own there for a moment, at the start of the first that has a
 *     page (compel), which makes that page a private one;
 *   - mappings without the right to read, which it gives them for the time of its dump;
 *   - the vDSO, which it dumps whole.
 */
#include "page_find.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096u
#define REGIONS 512	   /* as many as the kernel looks for at a time */
#define SCAN_PAGES 4096u   /* found by one call at most: what comes first can be copied meanwhile */
#define BLOCK 4096u	   /* runs of pages */
#define BLOCKS 16384u

int phos_found_init(struct phos_found *found)
{
	*found = (struct phos_found){ .blocks = calloc(BLOCKS, sizeof(*found->blocks)) };
	return found->blocks ? 0 : -ENOMEM;
}

void phos_found_free(struct phos_found *found)
{
	for (uint64_t i = 0; found->blocks && i < BLOCKS && found->blocks[i]; i++)
		free(found->blocks[i]);
	free(found->blocks);
}

const struct phos_pages *phos_found_at(const struct phos_found *found, uint64_t number)
{
	return &found->blocks[number / BLOCK][number % BLOCK];
}

struct search {
	int pid, pagemap;
	struct phos_found *found;
	uint64_t shown, shown_end; /* runs, and the offset behind them */
	uint64_t step;
	uint64_t guard; /* PHOS_PAGE_IS_GUARD, unless the kernel does not know it */
	bool can_read;
	int (*show)(void *context);
	void *context;
};

/* Whether the task's memory may be read at all: the right to attach to it is more than that to look at its maps. */
static int try_reading(struct search *search)
{
	char byte;
	struct iovec to = { .iov_base = &byte, .iov_len = 1 };

	for (uint64_t i = search->shown; i < search->found->count && !search->can_read; i++) {
		const struct phos_pages *pages = phos_found_at(search->found, i);
		struct iovec from = { .iov_base = (void *)(uintptr_t)pages->address, .iov_len = 1 };

		if (!pages->copied)
			continue;
		if (process_vm_readv(search->pid, &to, 1, &from, 1, 0) != 1)
			return -errno;
		search->can_read = true;
	}
	return 0;
}

static int show(struct search *search)
{
	int error = try_reading(search);

	if (error)
		return error;
	search->shown = search->found->count;
	search->shown_end = search->found->end;
	return search->show(search->context);
}

/* Returns 0 or -errno. */
static int add(struct search *search, uint64_t address, uint64_t end, bool copied)
{
	struct phos_found *found = search->found;
	uint64_t number = found->count;
	struct phos_pages *last =
		number > search->shown ? &found->blocks[(number - 1) / BLOCK][(number - 1) % BLOCK] : NULL;

	if (last && last->address + last->size == address && last->copied == copied) {
		last->size += end - address;
	} else {
		if (number / BLOCK == BLOCKS)
			return -E2BIG;
		if (!found->blocks[number / BLOCK]) {
			found->blocks[number / BLOCK] = malloc(BLOCK * sizeof(struct phos_pages));
			if (!found->blocks[number / BLOCK])
				return -ENOMEM;
		}
		found->blocks[number / BLOCK][number % BLOCK] =
			(struct phos_pages){ address, end - address, found->end, copied };
		found->count++;
	}
	found->end += end - address;
	return found->end - search->shown_end < search->step ? 0 : show(search);
}

static int scan(struct search *search, uint64_t start, uint64_t end, bool copy)
{
	struct phos_pm_region regions[REGIONS];
	struct phos_pm_scan arguments = {
		.size = sizeof(arguments),
		.end = end,
		.vec = (uintptr_t)regions,
		.vec_len = REGIONS,
		.max_pages = SCAN_PAGES,
		.category_inverted = PHOS_PAGE_IS_PFNZERO | PHOS_PAGE_IS_FILE,
		.category_mask = PHOS_PAGE_IS_PFNZERO | PHOS_PAGE_IS_FILE,
		.category_anyof_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED,
	};

	while (start < end) {
		int count;

		arguments.start = start;
		arguments.return_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED | search->guard;
		count = ioctl(search->pagemap, PHOS_PAGEMAP_SCAN, &arguments);
		if (count < 0 && errno == EINVAL && search->guard) {
			search->guard = 0;
			continue;
		}
		if (count < 0)
			return -errno;
		for (int i = 0; i < count; i++) { /* nothing can be read in a guard region */
			bool copied = copy && !(regions[i].categories & search->guard);
			int error = add(search, regions[i].start, regions[i].end, copied);

			if (error)
				return error;
		}
		arguments.walk_end = phos_pm_walked(&arguments, count);
		if (arguments.walk_end <= start)
			return -EIO;
		start = arguments.walk_end;
	}
	return 0;
}

int phos_find_pages(int pid, const struct phos_mapping *mappings, long count, struct phos_found *found, uint64_t step,
		    int (*shows)(void *context), void *context)
{
	struct search search = { .pid = pid, .found = found, .step = step, .guard = PHOS_PAGE_IS_GUARD, .show = shows };
	char path[64];
	int error = 0;

	search.context = context;
	snprintf(path, sizeof(path), "/proc/%d/pagemap", pid);
	search.pagemap = open(path, O_RDONLY | O_CLOEXEC);
	if (search.pagemap < 0)
		return -errno;
	for (long i = 0; i < count && !error; i++) {
		uint64_t start = mappings[i].address, end = start + mappings[i].size;

		if (mappings[i].kind == PHOS_LEFT_WHOLE)
			error = add(&search, start, end, false);
		else
			error = scan(&search, start, end, mappings[i].kind == PHOS_COPIED);
	}
	if (!error)
		error = show(&search);
	close(search.pagemap);
	return error;
}

/* What CRIU never dumps, or has rules of its own for: the kernel's mappings, rings of asynchronous I/O, device memory. */
static bool is_special(const char *name)
{
	return !strncmp(name, "[vvar", 5) || !strcmp(name, "[vsyscall]") || !strncmp(name, "/[aio]", 6) ||
	       (!strncmp(name, "/dev/", 5) && strncmp(name, "/dev/zero", 9) && strncmp(name, "/dev/shm/", 9));
}

struct mapping_list {
	struct phos_mapping *mappings;
	long count, room;
};

static int add_mapping(struct mapping_list *list, uint64_t address, uint64_t size, enum phos_mapping_kind kind)
{
	if (list->count == list->room) {
		long room = list->room ? 2 * list->room : 1024;
		struct phos_mapping *mappings = realloc(list->mappings, room * sizeof(*mappings));

		if (!mappings)
			return -ENOMEM;
		list->mappings = mappings;
		list->room = room;
	}
	list->mappings[list->count++] = (struct phos_mapping){ address, size, kind };
	return 0;
}

/* A line of maps. *injected: the page that CRIU puts its instructions into lies before it. Returns 0 or -errno. */
static int add_line(struct mapping_list *list, char *line, bool *injected)
{
	uint64_t start, end;
	char rights[5];
	int name = 0, error = 0;
	bool copy;

	if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %*s %n", &start, &end, rights, &name) < 3 || !name)
		return 0;
	line[strcspn(line, "\n")] = 0;
	if (start >> 63 || is_special(line + name))
		return 0;
	if (!strcmp(line + name, "[vdso]"))
		return add_mapping(list, start, end - start, PHOS_LEFT_WHOLE);
	if (rights[2] == 'x' && !*injected) {
		*injected = true;
		if (rights[3] == 'p') {
			error = add_mapping(list, start, PAGE, PHOS_LEFT_WHOLE);
			start += PAGE;
		}
	}
	copy = rights[0] == 'r' && rights[2] != 'x';
	if (!error && rights[3] == 'p' && start < end)
		error = add_mapping(list, start, end - start, copy ? PHOS_COPIED : PHOS_LEFT);
	return error;
}

long phos_read_mappings(int pid, struct phos_mapping **found)
{
	struct mapping_list list = { 0 };
	char path[64], *line = NULL;
	size_t size = 0;
	bool injected = false;
	int error = 0;
	FILE *maps;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		return -errno;
	while (!error && getline(&line, &size, maps) > 0)
		error = add_line(&list, line, &injected);
	if (!error && ferror(maps))
		error = -EIO;
	free(line);
	fclose(maps);
	if (error) {
		free(list.mappings);
		return error;
	}
	*found = list.mappings;
	return list.count;
}
