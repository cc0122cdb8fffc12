/*
 * criu_plugin/hidden_pages.c against the kernel: this program has pages here and there, hides some of them, and asks by
 * PAGEMAP_SCAN as CRIU does, with little room for the answer. What comes back must be what the kernel says, less what is
 * hidden, each page once and in order; and what is noted must be what was hidden of what was asked for. Of mappings all of
 * whose pages are copied the kernel is not asked: what it would say by then is not what was copied.
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
#define MAPPINGS 10
#define ROOM 4096 /* regions */

static unsigned room; /* a call: few, fewer than one answer of the kernel may become; or more than one turn of its */

enum kind { ABSENT, SHOWN, HIDDEN };

static enum kind wanted[PAGES]; /* of a page that the program has: whether the table hides it */
static bool present[PAGES], copied[PAGES];
static unsigned asked; /* phosd */

static unsigned long number(uint64_t address, const char *memory)
{
	return (address - (uintptr_t)memory) / PAGE;
}

static struct phos_pages runs[PAGES];
static struct phos_mapping mappings[MAPPINGS];
static size_t run_count, mapping_count;

static void add_run(const char *memory, unsigned long page, unsigned long count, bool is_copied)
{
	uint64_t offset = run_count ? runs[run_count - 1].offset + runs[run_count - 1].size : 0;

	runs[run_count++] = (struct phos_pages){ (uintptr_t)memory + page * PAGE, count * PAGE, offset, is_copied };
	for (unsigned long i = page; i < page + count; i++)
		copied[i] = is_copied;
}

/* Runs of pages, copied and left out, which may reach over pages that are not there; and nothing is said of mappings. */
static void loose_table(const char *memory)
{
	for (unsigned long page = rand() % 9; page < PAGES;) {
		unsigned long count = 1 + rand() % (rand() % 4 ? 6 : 90);

		if (count > PAGES - page)
			count = PAGES - page;
		add_run(memory, page, count, rand() % 3 != 0);
		page += count + (rand() % 2 ? rand() % 20 : 0);
	}
}

/* What phosd says of the memory as it is, in several mappings: all of some is copied, but for guard pages perhaps. */
static void exact_table(const char *memory)
{
	unsigned long each = PAGES / MAPPINGS;

	for (; mapping_count < MAPPINGS; mapping_count++) {
		unsigned long first = mapping_count * each;
		bool copies = rand() % 3 != 0, guards = rand() % 4 == 0;

		mappings[mapping_count] = (struct phos_mapping){ (uintptr_t)memory + first * PAGE, each * PAGE,
								 copies ? PHOS_COPIED : PHOS_LEFT };
		for (unsigned long i = first; i < first + each; i++)
			if (present[i])
				add_run(memory, i, 1, copies && !(guards && rand() % 50 == 0));
	}
}

/* Whether no page of these is left to CRIU, and all mappings that they lie in are said to be copied. */
static bool all_copied(unsigned long from, unsigned long to)
{
	if (!mapping_count)
		return false;
	for (unsigned long i = from; i < to; i++)
		if (mappings[i / (PAGES / MAPPINGS)].kind != PHOS_COPIED || (present[i] && !copied[i]))
			return false;
	return true;
}

/* phosd's answer. */
int phos_link_task_pages(int pid, int table)
{
	struct phos_task_table head = { run_count, mapping_count };

	assert(pid == getpid());
	asked++;
	assert(write(table, &head, sizeof(head)) == sizeof(head));
	assert(write(table, runs, run_count * sizeof(*runs)) == (ssize_t)(run_count * sizeof(*runs)));
	assert(write(table, mappings, mapping_count * sizeof(*mappings)) == (ssize_t)(mapping_count * sizeof(*mappings)));
	return 0;
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
	int pagemap = open("/proc/self/pagemap", O_RDONLY), noted;
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
	bool exact = with_table && rand() % 2;
	if (exact)
		exact_table(memory);
	else if (with_table)
		loose_table(memory);
	if (with_table)
		assert(!phos_hide(getpid()));
	for (unsigned long at = from, next; at < to; at = next) {
		/* As CRIU asks: of one mapping, or of several that lie near each other. */
		next = exact ? (at / (PAGES / MAPPINGS) + 1 + rand() % 2) * (PAGES / MAPPINGS) : to;
		if (next > to)
			next = to;
		bool unasked = all_copied(at, next);
		for (unsigned long i = at; i < next; i++) {
			wanted[i] = !present[i] ? ABSENT : copied[i] ? HIDDEN : SHOWN;
			if (unasked && rand() % 2)
				madvise(memory + i * PAGE, PAGE, MADV_DONTNEED);
		}
		ask(pagemap, memory, at, next, with_table, seen);
	}
	assert(asked == with_table);
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
