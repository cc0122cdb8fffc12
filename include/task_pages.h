#ifndef PHOS_TASK_PAGES_H
#define PHOS_TASK_PAGES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

/*
 * ioctl PAGEMAP_SCAN of /proc/PID/pagemap (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst; uapi linux/fs.h). Written
 * down here because the kernel headers of the systems that PhOS is built on may be older than the kernel it runs on.
 */
struct phos_pm_region {
	uint64_t start, end; /* addresses, half-open */
	uint64_t categories;
};

struct phos_pm_scan {
	uint64_t size; /* of this structure */
	uint64_t flags;
	uint64_t start, end;
	uint64_t walk_end; /* written: what comes from here on was not looked at */
	uint64_t vec, vec_len; /* struct phos_pm_region */
	uint64_t max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define PHOS_PAGEMAP_SCAN _IOWR('f', 16, struct phos_pm_scan)

/*
 * Up to where a scan has looked that reported so many regions. The kernel looks at as many pages at a time as make 512
 * regions, and where it needs a last, smaller turn, walk_end stays at the end of the one before (fs/proc/task_mmu.c,
 * Linux 6.18): regions may lie behind it.
 */
static inline uint64_t phos_pm_walked(const struct phos_pm_scan *scan, size_t count)
{
	const struct phos_pm_region *regions = (const struct phos_pm_region *)(uintptr_t)scan->vec;

	return count && regions[count - 1].end > scan->walk_end ? regions[count - 1].end : scan->walk_end;
}

#define PHOS_PAGE_IS_FILE (1 << 2)
#define PHOS_PAGE_IS_PRESENT (1 << 3)
#define PHOS_PAGE_IS_SWAPPED (1 << 4)
#define PHOS_PAGE_IS_PFNZERO (1 << 5)
#define PHOS_PAGE_IS_GUARD (1 << 8) /* Linux 6.15 */

/* Pages of a frozen task, and their place in the file that phosd copies them to. Bytes, all multiples of the page size. */
struct phos_pages {
	uint64_t address, size;
	uint64_t offset; /* each begins where the one before it ends */
	uint64_t copied; /* 0: CRIU is to dump it, if it is there; phosd only leaves room for it */
};

/* What is done about a mapping of a frozen task. */
enum phos_mapping_kind {
	PHOS_LEFT,	 /* CRIU dumps what pages there are */
	PHOS_LEFT_WHOLE, /* it may dump all, whatever pages there are now */
	PHOS_COPIED,	 /* phosd copies all that can be read */
};

struct phos_mapping {
	uint64_t address, size;
	uint64_t kind;
};

/* What phosd says of a frozen task's pages: this, then the pages by address, then the mappings by address. */
struct phos_task_table {
	uint64_t pages, mappings;
};

/* Pages that CRIU asked for and was not shown. */
struct phos_hidden {
	uint64_t pid; /* as CRIU sees it */
	uint64_t start, end;
};

#endif
