/*
 * Pages that CRIU need not dump, because phosd copies them itself while the task is frozen (gpu_engine/page_copy.c): CRIU
 * takes them through a pipe with one thread, phosd with several straight into the file.
 *
 * CRIU asks the kernel which pages a task has by ioctl PAGEMAP_SCAN. The launcher preloads this library into a CRIU that
 * dumps, so that the call comes here first, and takes away from the kernel's answer what phosd has. What was taken away is
 * noted: phosd adds exactly that to CRIU's images afterwards (images/criu_pages.py). Where CRIU would not have looked at a
 * page, nothing is noted; where phosd has not got it, CRIU dumps it as ever.
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

#include "ranges.h"
#include "task_pages.h"

struct task {
	struct task *next;
	int pid;
	size_t count;
	const struct phos_pages *pages; /* by address; a mapping */
};

static struct task *tasks;

static struct {
	struct phos_hidden *ranges;
	size_t count, room;
} noted;

static int scan_ioctl(int descriptor, unsigned long request, ...);
__attribute__((visibility("default"), alias("scan_ioctl"))) int ioctl(int descriptor, unsigned long request, ...);

bool phos_can_hide(void)
{
	/* By its other name: in a plugin that was not preloaded, ioctl is libc's for ourselves as well. */
	return dlsym(RTLD_DEFAULT, "ioctl") == (void *)scan_ioctl;
}

int phos_hide(int pid, int table)
{
	struct stat status;
	struct task *task;

	if (fstat(table, &status)) {
		pr_err("the table of task %d's pages cannot be read: %s\n", pid, strerror(errno));
		return -1;
	}
	if (!status.st_size)
		return 0;
	task = malloc(sizeof(*task));
	if (!task) {
		pr_err("no memory for the table of task %d's pages\n", pid);
		return -1;
	}
	task->pid = pid;
	task->count = status.st_size / sizeof(*task->pages);
	task->pages = mmap(NULL, status.st_size, PROT_READ, MAP_SHARED, table, 0);
	if (task->pages == MAP_FAILED) {
		pr_err("the table of task %d's pages cannot be mapped: %s\n", pid, strerror(errno));
		free(task);
		return -1;
	}
	task->next = tasks;
	tasks = task;
	return 0;
}

int phos_hidden(int *table)
{
	size_t size = noted.count * sizeof(*noted.ranges);

	*table = -1;
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

static const struct task *task_of(int pagemap)
{
	char link[32], path[PATH_MAX];
	ssize_t size;
	int pid;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", pagemap);
	size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return NULL;
	path[size] = 0;
	/* Wherever CRIU has its /proc: the last two components. */
	for (int slashes = 0; size && slashes < 2;)
		slashes += path[--size] == '/';
	if (sscanf(path + size, "/%d/pagemap", &pid) != 1)
		return NULL;
	for (const struct task *task = tasks; task; task = task->next)
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
	const struct task *task;
	struct phos_pm_scan *scan;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	result = syscall(SYS_ioctl, descriptor, request, argument);
	if (request != PHOS_PAGEMAP_SCAN || result <= 0 || !tasks || !asks_for_pages(argument))
		return (int)result;
	task = task_of(descriptor);
	if (!task)
		return (int)result;
	scan = argument;
	scan->walk_end = phos_pm_walked(scan, result); /* else CRIU asks for what is noted once more, and it is noted again */
	result = take_away(task, scan, result);
	if (result < 0)
		errno = ENOMEM;
	return (int)result;
}
