/*
 * The private memory of a frozen task: which pages it has, and copying them into a file.
 *
 * Which pages are asked for as CRIU asks (criu/pagemap-cache.c: in RAM or swap, neither zero pages nor the file's own), and
 * of which mappings (criu/mem.c: private ones, but for what the kernel itself maps). To be copied is all that CRIU's own
 * work leaves alone and that can be read without changing the mapping. What is left to CRIU:
 *   - executable mappings: it puts a few instructions of its own there for a moment, at the start of the first that has a
 *     page (compel), which makes that page a private one;
 *   - mappings without the right to read, which it gives them for the time of its dump;
 *   - the vDSO, which it dumps whole.
 */
#include "page_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096u
#define SHARE (1u << 20) /* of the file, which a thread takes at once */
#define REGIONS 1024

#define EXPORT __attribute__((visibility("default")))

struct finding {
	struct phos_pages *found;
	long count, room;
	uint64_t offset;
	uint64_t guard; /* PHOS_PAGE_IS_GUARD, unless the kernel does not know it */
};

static void add(struct finding *finding, uint64_t address, uint64_t end, bool copied)
{
	struct phos_pages *last = finding->count ? &finding->found[finding->count - 1] : NULL;

	if (finding->count <= finding->room && last && last->address + last->size == address && last->copied == copied)
		last->size += end - address;
	else if (finding->count++ < finding->room)
		finding->found[finding->count - 1] = (struct phos_pages){ address, end - address, finding->offset, copied };
	finding->offset += end - address;
}

static int scan(int pagemap, uint64_t start, uint64_t end, bool copy, struct finding *finding)
{
	struct phos_pm_region regions[REGIONS];
	struct phos_pm_scan arguments = {
		.size = sizeof(arguments),
		.end = end,
		.vec = (uintptr_t)regions,
		.vec_len = REGIONS,
		.category_inverted = PHOS_PAGE_IS_PFNZERO | PHOS_PAGE_IS_FILE,
		.category_mask = PHOS_PAGE_IS_PFNZERO | PHOS_PAGE_IS_FILE,
		.category_anyof_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED,
	};

	while (start < end) {
		int count;

		arguments.start = start;
		arguments.return_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED | finding->guard;
		count = ioctl(pagemap, PHOS_PAGEMAP_SCAN, &arguments);
		if (count < 0 && errno == EINVAL && finding->guard) {
			finding->guard = 0;
			continue;
		}
		if (count < 0)
			return -errno;
		for (int i = 0; i < count; i++) /* nothing can be read in a guard region */
			add(finding, regions[i].start, regions[i].end, copy && !(regions[i].categories & finding->guard));
		arguments.walk_end = phos_pm_walked(&arguments, count);
		if (arguments.walk_end <= start)
			return -EIO;
		start = arguments.walk_end;
	}
	return 0;
}

/* What CRIU never dumps, or has rules of its own for: the kernel's mappings, rings of asynchronous I/O, device memory. */
static bool is_special(const char *name)
{
	return !strncmp(name, "[vvar", 5) || !strcmp(name, "[vsyscall]") || !strncmp(name, "/[aio]", 6) ||
	       (!strncmp(name, "/dev/", 5) && strncmp(name, "/dev/zero", 9) && strncmp(name, "/dev/shm/", 9));
}

/* Whether the task's memory may be read at all: the right to attach to it is more than that to look at its maps. */
static int try_reading(int pid, const struct finding *finding)
{
	char byte;
	struct iovec to = { .iov_base = &byte, .iov_len = 1 };

	for (long i = 0; i < finding->count && i < finding->room; i++) {
		struct iovec from = { .iov_base = (void *)(uintptr_t)finding->found[i].address, .iov_len = 1 };

		if (finding->found[i].copied)
			return process_vm_readv(pid, &to, 1, &from, 1, 0) == 1 ? 0 : -errno;
	}
	return 0;
}

static void add_mapping(struct phos_mapping *found, long room, long *count, struct phos_mapping mapping)
{
	if (*count < room)
		found[*count] = mapping;
	++*count;
}

EXPORT long phos_read_mappings(int pid, struct phos_mapping *found, long room)
{
	char path[64], *line = NULL;
	size_t size = 0;
	bool injected = false; /* we are past the page that CRIU puts its instructions into */
	long count = 0;
	int error = 0;
	FILE *maps;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		return -errno;
	while (getline(&line, &size, maps) > 0) {
		uint64_t start, end;
		char rights[5];
		int name = 0;
		bool copy;

		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %*s %n", &start, &end, rights, &name) < 3 || !name)
			continue;
		line[strcspn(line, "\n")] = 0;
		if (start >> 63 || is_special(line + name))
			continue;
		if (!strcmp(line + name, "[vdso]")) {
			add_mapping(found, room, &count, (struct phos_mapping){ start, end - start, PHOS_LEFT_WHOLE });
			continue;
		}
		if (rights[2] == 'x' && !injected) {
			injected = true;
			if (rights[3] == 'p') {
				add_mapping(found, room, &count, (struct phos_mapping){ start, PAGE, PHOS_LEFT_WHOLE });
				start += PAGE;
			}
		}
		copy = rights[0] == 'r' && rights[2] != 'x';
		if (rights[3] == 'p' && start < end)
			add_mapping(found, room, &count, (struct phos_mapping){ start, end - start, copy ? PHOS_COPIED : PHOS_LEFT });
	}
	if (ferror(maps))
		error = -EIO;
	free(line);
	fclose(maps);
	return error ? error : count;
}

EXPORT long phos_find_pages(int pid, const struct phos_mapping *mappings, long count, struct phos_pages *found, long room)
{
	struct finding finding = { .found = found, .room = room, .guard = PHOS_PAGE_IS_GUARD };
	char path[64];
	int pagemap, error = 0;

	snprintf(path, sizeof(path), "/proc/%d/pagemap", pid);
	pagemap = open(path, O_RDONLY | O_CLOEXEC);
	if (pagemap < 0)
		return -errno;
	for (long i = 0; i < count && !error; i++) {
		uint64_t start = mappings[i].address, end = start + mappings[i].size;

		if (mappings[i].kind == PHOS_LEFT_WHOLE)
			add(&finding, start, end, false);
		else
			error = scan(pagemap, start, end, mappings[i].kind == PHOS_COPIED, &finding);
	}
	if (!error)
		error = try_reading(pid, &finding);
	close(pagemap);
	return error ? error : finding.count;
}

/* Copies what of [address, address + size) there is; false if something cannot be copied. */
static bool copy_range(struct phos_page_copy *copy, uint64_t address, uint64_t size, char *place)
{
	while (size) {
		struct iovec to = { .iov_base = place, .iov_len = size };
		struct iovec from = { .iov_base = (void *)(uintptr_t)address, .iov_len = size };
		ssize_t read = process_vm_readv(copy->pid, &to, 1, &from, 1, 0);

		if (read <= 0) {
			atomic_store(&copy->failed_at, address);
			atomic_store(&copy->error, read ? errno : EIO);
			return false;
		}
		address += read;
		place += read;
		size -= read;
	}
	return true;
}

EXPORT void phos_copy_pages(struct phos_page_copy *copy)
{
	uint64_t first = 0; /* no share that is still to be had begins before these pages */

	while (!atomic_load(&copy->error)) {
		uint64_t begin = atomic_fetch_add(&copy->next, SHARE), end = begin + SHARE;

		while (first < copy->count && copy->pages[first].offset + copy->pages[first].size <= begin)
			first++;
		if (first == copy->count)
			break;
		for (uint64_t number = first; number < copy->count && copy->pages[number].offset < end; number++) {
			const struct phos_pages *pages = &copy->pages[number];
			uint64_t from = pages->offset > begin ? pages->offset : begin;
			uint64_t to = pages->offset + pages->size < end ? pages->offset + pages->size : end;

			if (pages->copied &&
			    !copy_range(copy, pages->address + (from - pages->offset), to - from, copy->file + from))
				break;
		}
	}
}
