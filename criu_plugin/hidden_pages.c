/*
 * Pages that CRIU need not dump, because phosd copies them itself while the task is frozen (gpu_engine/page_copy.c): CRIU
 * takes them through a pipe with one thread, phosd with several straight into the file.
 *
 * CRIU asks the kernel which pages a task has by ioctl PAGEMAP_SCAN. The launcher preloads this library into a CRIU that
 * dumps, so that the call comes here first, and takes away from the kernel's answer what phosd has. What was taken away is
 * noted: phosd adds exactly that to CRIU's images afterwards (images/criu_pages.py). Where CRIU would not have looked at a
 * page, nothing is noted; where phosd has not got it, CRIU dumps it as ever.
 *
 * phosd is asked which pages it has when CRIU asks for the first: it looks for them from when the task was frozen, and CRIU
 * has a lot to do before. Where it has all that there are the kernel need not look through them once more.
 *
 * CRIU dumps with one thread: no lock.
 */
#include "phos_plugin.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptor_name.h"
#include "ranges.h"
#include "task_pages.h"

struct task {
	struct task *next;
	int pid;
	bool told; /* what follows, by phosd */
	size_t count, mapping_count;
	const struct phos_pages *pages; /* by address */
	const struct phos_mapping *mappings;
};

static struct task *tasks; /* that are frozen */

static struct {
	struct phos_hidden *ranges;
	size_t count, room;
} noted;

/* A question of CRIU's could not be answered. CRIU 4.1 takes that for the end of a mapping, if it is not the first of it. */
static bool unanswered;

static int scan_ioctl(int descriptor, unsigned long request, ...);
__attribute__((visibility("default"), alias("scan_ioctl"))) int ioctl(int descriptor, unsigned long request, ...);

bool phos_can_hide(void)
{
	/* By its other name: in a plugin that was not preloaded, ioctl is libc's for ourselves as well. */
	return dlsym(RTLD_DEFAULT, "ioctl") == (void *)scan_ioctl;
}

int phos_hide(int pid)
{
	struct task *task = calloc(1, sizeof(*task));

	if (!task) {
		pr_err("no memory to note that task %d is frozen\n", pid);
		return -1;
	}
	task->pid = pid;
	task->next = tasks;
	tasks = task;
	return 0;
}

/* What phosd has written into a table; it stays mapped. Returns 0 or -1. */
static int read_table(struct task *task, int descriptor)
{
	const struct phos_task_table *table;
	struct stat status;

	if (fstat(descriptor, &status))
		return -1;
	if (!status.st_size)
		return 0;
	errno = EPROTO;
	if (status.st_size < (off_t)sizeof(*table))
		return -1;
	table = mmap(NULL, status.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
	if (table == MAP_FAILED)
		return -1;
	if (table->pages > (uint64_t)status.st_size / sizeof(*task->pages) ||
	    table->mappings > (uint64_t)status.st_size / sizeof(*task->mappings) ||
	    sizeof(*table) + table->pages * sizeof(*task->pages) + table->mappings * sizeof(*task->mappings) !=
		    (uint64_t)status.st_size) {
		munmap((void *)table, status.st_size);
		errno = EPROTO;
		return -1;
	}
	task->count = table->pages;
	task->mapping_count = table->mappings;
	task->pages = (const void *)(table + 1);
	task->mappings = (const void *)(task->pages + task->count);
	return 0;
}

static int ask_phosd(struct task *task)
{
	int table = memfd_create("phos-pages", MFD_CLOEXEC), ret;

	if (table < 0) {
		pr_err("cannot make a table of pages: %s\n", strerror(errno));
		return -1;
	}
	ret = phos_link_task_pages(task->pid, table);
	if (!ret && (ret = read_table(task, table)))
		pr_err("the table of task %d's pages cannot be read: %s\n", task->pid, strerror(errno));
	close(table);
	task->told = !ret;
	return ret;
}

int phos_hidden(int *table)
{
	size_t size = noted.count * sizeof(*noted.ranges);

	*table = -1;
	if (unanswered) {
		pr_err("CRIU was not told which pages there are: there was no memory, or no phosd\n");
		return -1;
	}
	if (!size)
		return 0;
	*table = memfd_create("phos-hidden", MFD_CLOEXEC);
	/* A memfd takes all that is written, or there is no memory. */
	if (*table >= 0 && write(*table, noted.ranges, size) == (ssize_t)size)
		return 0;
	pr_err("what phosd has of the tasks' pages cannot be told: %s\n", strerror(errno));
	if (*table >= 0)
		close(*table);
	*table = -1;
	return -1;
}

static int note(int pid, uint64_t start, uint64_t end)
{
	struct phos_hidden *last = noted.count ? &noted.ranges[noted.count - 1] : NULL;

	if (last && last->pid == (uint64_t)pid && last->end == start) {
		last->end = end;
		return 0;
	}
	if (noted.count == noted.room) {
		size_t room = noted.room ? 2 * noted.room : 1024;
		void *larger = realloc(noted.ranges, room * sizeof(*noted.ranges));

		if (!larger)
			return -1;
		noted.ranges = larger;
		noted.room = room;
	}
	noted.ranges[noted.count++] = (struct phos_hidden){ pid, start, end };
	return 0;
}

static struct task *task_of(int pagemap)
{
	char path[PATH_MAX];
	size_t at;
	int pid;

	if (!phos_name_of(pagemap, path, sizeof(path)))
		return NULL;
	/* Wherever CRIU has its /proc: the last two components. */
	at = strlen(path);
	for (int slashes = 0; at && slashes < 2;)
		slashes += path[--at] == '/';
	if (sscanf(path + at, "/%d/pagemap", &pid) != 1)
		return NULL;
	for (struct task *task = tasks; task; task = task->next)
		if (task->pid == pid)
			return task;
	return NULL;
}

/* The first of the task's pages that end behind `address`. */
static size_t first_behind(const struct task *task, uint64_t address)
{
	return phos_first_behind(task->pages, sizeof(*task->pages), task->count, address);
}

/* Takes away from the kernel's answer what phosd has. Returns how many regions are left; -1 if there is no memory. */
static int take_away(const struct task *task, struct phos_pm_scan *scan, size_t count)
{
	struct phos_pm_region *answer = (void *)(uintptr_t)scan->vec;
	struct phos_pm_region *regions = malloc(count * sizeof(*regions));
	size_t left = 0;

	if (!regions)
		return -1;
	memcpy(regions, answer, count * sizeof(*regions));
	for (size_t i = 0; i < count; i++) {
		uint64_t at = regions[i].start, end = regions[i].end, until;

		for (size_t p = first_behind(task, at); at < end; at = until) {
			const struct phos_pages *pages = p < task->count ? &task->pages[p] : NULL;
			bool within = pages && pages->address <= at;

			until = within ? pages->address + pages->size : pages ? pages->address : end;
			if (until > end)
				until = end;
			p += within;
			if (within && pages->copied) {
				if (note(task->pid, at, until))
					goto none;
				continue;
			}
			if (left == scan->vec_len) {
				scan->walk_end = at; /* CRIU asks again from there */
				goto out;
			}
			answer[left++] = (struct phos_pm_region){ at, until, regions[i].categories };
		}
	}
out:
	free(regions);
	return (int)left;
none:
	free(regions);
	return -1;
}

/* Whether phosd copies all that can be in [start, end). */
static bool has_all(const struct task *task, uint64_t start, uint64_t end)
{
	uint64_t at = start;
	size_t m = phos_first_behind(task->mappings, sizeof(*task->mappings), task->mapping_count, start);

	for (; at < end && m < task->mapping_count; m++) {
		const struct phos_mapping *mapping = &task->mappings[m];

		if (mapping->address > at || mapping->kind != PHOS_COPIED)
			break;
		at = mapping->address + mapping->size;
	}
	if (at < end)
		return false;
	for (size_t p = first_behind(task, start); p < task->count && task->pages[p].address < end; p++)
		if (!task->pages[p].copied)
			return false;
	return true;
}

/* Notes all that phosd has in [start, end). Returns 0, or -1 if there is no memory. */
static int note_all(const struct task *task, uint64_t start, uint64_t end)
{
	for (size_t p = first_behind(task, start); p < task->count && task->pages[p].address < end; p++) {
		const struct phos_pages *pages = &task->pages[p];
		uint64_t from = pages->address > start ? pages->address : start;
		uint64_t to = pages->address + pages->size < end ? pages->address + pages->size : end;

		if (note(task->pid, from, to))
			return -1;
	}
	return 0;
}

/* CRIU's question which pages it has to dump; later ones ask the same way for other kinds (guard regions). */
static bool asks_for_pages(const struct phos_pm_scan *scan)
{
	return scan->category_anyof_mask == (PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED);
}

static int scan_ioctl(int descriptor, unsigned long request, ...)
{
	va_list list;
	void *argument;
	long result;
	struct task *task = NULL;
	struct phos_pm_scan *scan;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	scan = argument;
	if (request == PHOS_PAGEMAP_SCAN && tasks && asks_for_pages(scan))
		task = task_of(descriptor);
	if (!task)
		return (int)syscall(SYS_ioctl, descriptor, request, argument);
	if (!task->told && ask_phosd(task)) {
		unanswered = true;
		errno = EIO;
		return -1;
	}
	if (task->count && has_all(task, scan->start, scan->end)) {
		scan->walk_end = scan->end;
		result = note_all(task, scan->start, scan->end);
	} else {
		result = syscall(SYS_ioctl, descriptor, request, argument);
		if (result <= 0)
			return (int)result;
		/* else CRIU asks for what is noted once more, and it is noted again */
		scan->walk_end = phos_pm_walked(scan, result);
		result = take_away(task, scan, result);
	}
	if (result < 0) {
		unanswered = true;
		errno = ENOMEM;
	}
	return (int)result;
}
