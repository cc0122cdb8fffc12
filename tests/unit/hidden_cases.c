/*
 * criu_plugin/hidden_pages.c against the kernel: this program has pages here and there, hides some of them, and asks by
 * PAGEMAP_SCAN as CRIU does, with little room for the answer. What comes back must be what the kernel says, less what is
 * hidden, each page once and in order; and what is noted must be what was hidden of what was asked for.
 *
 * hidden_cases SEED ROUNDS
 */
#include <assert.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "criu_log.h"
#include "phos_plugin.h"
#include "task_pages.h"

#define PAGE 4096ul
#define PAGES 3000ul
#define ROOM 4096 /* regions */

static unsigned room; /* a call: few, fewer than one answer of the kernel may become; or more than one turn of its */

enum kind { ABSENT, SHOWN, HIDDEN };

static enum kind wanted[PAGES]; /* of a page that the program has: whether the table hides it */
static bool present[PAGES], copied[PAGES];

static unsigned long number(uint64_t address, const char *memory)
{
	return (address - (uintptr_t)memory) / PAGE;
}

/* A table with runs of pages, copied and left out, which may reach over pages that are not there. */
static int table_of(const char *memory)
{
	int table = memfd_create("table", 0);
	uint64_t offset = 0;

	assert(table >= 0);
	for (unsigned long page = rand() % 9; page < PAGES;) {
		unsigned long count = 1 + rand() % (rand() % 4 ? 6 : 90);
		struct phos_pages pages = { (uintptr_t)memory + page * PAGE, 0, offset, rand() % 3 != 0 };

		if (count > PAGES - page)
			count = PAGES - page;
		pages.size = count * PAGE;
		offset += pages.size;
		for (unsigned long i = page; i < page + count; i++)
			copied[i] = pages.copied;
		assert(write(table, &pages, sizeof(pages)) == sizeof(pages));
		page += count + (rand() % 2 ? rand() % 20 : 0);
	}
	return table;
}

static void ask(int pagemap, const char *memory, unsigned long from, unsigned long to, bool with_table,
		enum kind *seen)
{
	struct phos_pm_region regions[ROOM];
	uint64_t start = (uintptr_t)memory + from * PAGE, end = (uintptr_t)memory + to * PAGE;

	while (start < end) {
		uint64_t behind = start;
		struct phos_pm_scan scan = {
			.size = sizeof(scan),
			.start = start,
			.end = end,
			.vec = (uintptr_t)regions,
			.vec_len = room,
			.category_anyof_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED,
			.return_mask = PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED,
		};
		int count = ioctl(pagemap, PHOS_PAGEMAP_SCAN, &scan);

		assert(count >= 0 && count <= (int)room);
		assert(scan.walk_end > start && scan.walk_end <= end);
		for (int i = 0; i < count; i++) {
			assert(regions[i].start >= behind && regions[i].end > regions[i].start);
			assert(regions[i].categories & (PHOS_PAGE_IS_PRESENT | PHOS_PAGE_IS_SWAPPED));
			behind = regions[i].end;
			for (uint64_t at = regions[i].start; at < regions[i].end; at += PAGE) {
				assert(seen[number(at, memory)] == ABSENT);
				seen[number(at, memory)] = SHOWN;
			}
		}
		/* The kernel's own answer may say less than it holds (page_copy.c). */
		assert(behind <= scan.walk_end || !with_table);
		start = behind > scan.walk_end ? behind : scan.walk_end;
	}
}

static void round_of(bool with_table)
{
	char *memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int pagemap = open("/proc/self/pagemap", O_RDONLY), table, noted;
	unsigned long from = rand() % PAGES, to = from + 1 + rand() % (PAGES - from);
	static enum kind seen[PAGES];
	struct phos_hidden hidden;
	unsigned long hid = 0;
	room = rand() % 2 ? 7 : ROOM;
	unsigned sparse = rand() % 2 ? 5 : 2; /* lone pages are regions of their own */

	assert(memory != MAP_FAILED && pagemap >= 0);
	madvise(memory, PAGES * PAGE, MADV_NOHUGEPAGE);
	memset(copied, 0, sizeof(copied));
	memset(seen, 0, sizeof(seen));
	for (unsigned long i = 0; i < PAGES; i++)
		if ((present[i] = rand() % sparse != 0))
			memory[i * PAGE] = 1;
	if (with_table) {
		table = table_of(memory);
		assert(!phos_hide(getpid(), table));
		close(table);
	}
	for (unsigned long i = 0; i < PAGES; i++)
		wanted[i] = i < from || i >= to || !present[i] ? ABSENT : copied[i] ? HIDDEN : SHOWN;
	ask(pagemap, memory, from, to, with_table, seen);
	for (unsigned long i = 0; i < PAGES; i++)
		assert((seen[i] == SHOWN) == (wanted[i] == SHOWN));

	assert(!phos_hidden(&noted));
	for (unsigned long i = 0; i < PAGES; i++)
		hid += wanted[i] == HIDDEN;
	assert((noted >= 0) == (hid > 0));
	if (noted >= 0) {
		lseek(noted, 0, SEEK_SET);
		while (read(noted, &hidden, sizeof(hidden)) == sizeof(hidden)) {
			assert(hidden.pid == (uint64_t)getpid());
			for (uint64_t at = hidden.start; at < hidden.end; at += PAGE) {
				assert(wanted[number(at, memory)] == HIDDEN);
				wanted[number(at, memory)] = ABSENT; /* noted once */
				hid--;
			}
		}
		close(noted);
	}
	assert(!hid);
	printf("%lu pages asked for\n", to - from);
	close(pagemap);
}

int main(int count, char **words)
{
	assert(count == 3);
	srand(atoi(words[1]));
	assert(phos_can_hide());
	/* Each round in a process of its own: what is hidden stays so, as in a CRIU. */
	for (int i = atoi(words[2]); i; i--) {
		pid_t child = fork();

		assert(child >= 0);
		if (!child) {
			srand(atoi(words[1]) * 1000 + i);
			round_of(i % 10 != 1);
			fflush(stdout);
			_exit(0);
		}
		int status;

		assert(waitpid(child, &status, 0) == child && status == 0);
	}
	return 0;
}
