/* While detached, the driver's checkpoint maps several hundred megabytes of populated anonymous memory for what it has to
 * save itself. With 4 KiB pages populating takes longer than the copying (0.09 s of 0.16 s, measured on an H100, driver
 * 580), with huge pages less than half; out of the file prepared for it (residue.c) it takes nothing. Nothing else asks for
 * MAP_POPULATE on that scale; for who does, only the page size is different. */
#include "detach.h"
#include "residue.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define LARGE ((size_t)8 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static atomic_bool armed;
static atomic_bool huge;

void phos_mmap_arm(bool arm, bool huge_pages)
{
    if (arm)
        phos_residue_reset();
    atomic_store(&huge, huge_pages);
    atomic_store(&armed, arm);
}

/* A sanitizer maps its shadow with this before it can check anything. */
#define EARLY __attribute__((no_sanitize("address", "undefined", "thread")))

static EARLY void *raw_mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    return (void *)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
}

static void *huge_mmap(size_t length, int protection, int flags)
{
    size_t whole = (length + 4095) & ~(size_t)4095;
    char *raw = raw_mmap(NULL, whole + HUGE_PAGE, protection, flags & ~MAP_POPULATE, -1, 0);
    if (raw == MAP_FAILED)
        return MAP_FAILED;
    char *start = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (start > raw)
        munmap(raw, (size_t)(start - raw));
    munmap(start + whole, (size_t)(raw + whole + HUGE_PAGE - (start + whole)));
    int saved = errno;
    madvise(start, whole, MADV_HUGEPAGE);
    /* Linux 5.14; before, pages come when they are touched. */
    madvise(start, whole, MADV_POPULATE_WRITE);
    errno = saved;
    return start;
}

__attribute__((visibility("default"))) EARLY void *mmap(void *address, size_t length, int protection, int flags, int descriptor,
                                                  off_t offset)
{
    const int want = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    if (__builtin_expect(atomic_load_explicit(&armed, memory_order_relaxed), 0) && !address && length >= LARGE &&
        (flags & (want | MAP_HUGETLB | MAP_LOCKED)) == want && (protection & (PROT_READ | PROT_WRITE)) == (PROT_READ | PROT_WRITE)) {
        void *mapped = protection & PROT_EXEC ? NULL : phos_residue_serve(length, __builtin_return_address(0));
        if (mapped)
            return mapped;
        mapped = atomic_load(&huge) ? huge_mmap(length, protection, flags) : MAP_FAILED;
        if (mapped != MAP_FAILED)
            return mapped;
    }
    return raw_mmap(address, length, protection, flags, descriptor, offset);
}
