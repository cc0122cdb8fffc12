/* See residue.h. The file is served in slices, each at most once: mmap() promises zeros. The first megabytes stay unused, so
 * that the file never looks like a program to CRIU (which would compare build ids before the content is back). */
#define _GNU_SOURCE
#include "residue.h"
#include "cleanup.h"
#include "driver_object.h"
#include "held.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define PIECE ((size_t)32 << 20) /* populated at a time: the application's own mmap() and munmap() wait for no more */
#define SLICES 64

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Set up and taken down by the control thread while nothing is served (mmap.c is not armed); read by the driver's. */
static char *base;
static size_t size;
static char path_name[256];
static const struct phos_driver_object *driver;

static atomic_size_t used; /* end of the last slice */
static struct {
    size_t offset, bytes;
} slices[SLICES]; /* each written once, by who took it; read by the control thread when the driver is done */
static atomic_uint slice_count;
static _Atomic uint64_t asked_bytes, served_bytes;

static void *map_aligned(int file, size_t bytes)
{
    char *raw = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    char *start = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (start > raw)
        munmap(raw, (size_t)(start - raw));
    munmap(start + bytes, (size_t)(raw + HUGE_PAGE - start));
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED)
        return start;
    int saved = errno;
    munmap(start, bytes);
    errno = saved;
    return NULL;
}

static bool populate(char *start, size_t bytes)
{
    madvise(start, bytes, MADV_HUGEPAGE); /* where the administrator lets shared memory have them */
    for (size_t done = 0; done < bytes; done += PIECE)
        if (madvise(start + done, bytes - done < PIECE ? bytes - done : PIECE, MADV_POPULATE_WRITE))
            return false;
    return true;
}

bool phos_residue_prepare(const char *path, uint64_t bytes, uint64_t device, uint64_t inode, struct phos_error *error)
{
    phos_residue_release();
    driver = phos_driver_object();
    if (!driver)
        return phos_fail(error, CUDA_SUCCESS, "the driver's code was not found");
    bytes = bytes / HUGE_PAGE * HUGE_PAGE;
    if (bytes < 2 * HUGE_PAGE || strlen(path) >= sizeof path_name)
        return phos_fail(error, CUDA_SUCCESS, "%llu bytes at %s are of no use", (unsigned long long)bytes, path);
    phos_held_lock();
    PHOS_CLOSES_HELD int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file >= 0)
        phos_held_note(file);
    int saved = errno;
    phos_held_unlock();
    errno = saved;
    struct stat status;
    if (file < 0 || fstat(file, &status))
        return phos_fail(error, CUDA_SUCCESS, "%s cannot be opened: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode) || status.st_dev != device || status.st_ino != inode || (uint64_t)status.st_size < bytes)
        return phos_fail(error, CUDA_SUCCESS, "%s is another file here", path);
    char *start = map_aligned(file, bytes);
    if (!start)
        return phos_fail(error, CUDA_SUCCESS, "%s cannot be mapped: %s", path, strerror(errno));
    if (madvise(start, bytes, MADV_DONTFORK) || !populate(start, bytes)) {
        phos_fail(error, CUDA_SUCCESS, "there is no memory for %s: %s", path, strerror(errno));
        munmap(start, bytes);
        return false;
    }
    strcpy(path_name, path);
    atomic_store(&used, HUGE_PAGE);
    atomic_store(&slice_count, 0);
    size = bytes;
    base = start;
    return true;
}

void *phos_residue_serve(size_t bytes, const void *caller)
{
    if (!driver || (uintptr_t)caller < driver->begin || (uintptr_t)caller >= driver->end)
        return NULL;
    atomic_fetch_add(&asked_bytes, bytes);
    size_t room = (bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), at = atomic_load(&used);
    if (!base)
        return NULL;
    unsigned index = atomic_load(&slice_count);
    do {
        if (index >= SLICES || room < bytes || room > size || at > size - room)
            return NULL;
    } while (!atomic_compare_exchange_weak(&used, &at, at + room));
    index = atomic_fetch_add(&slice_count, 1);
    if (index >= SLICES) /* many at once; that much of the file is lost */
        return NULL;
    slices[index].offset = at;
    slices[index].bytes = room;
    atomic_fetch_add(&served_bytes, bytes);
    /* The caller will unmap what it asked for, to the page: the rest of the last huge page must not stay behind. */
    size_t whole = (bytes + 4095) & ~(size_t)4095;
    if (whole < room)
        munmap(base + at + whole, room - whole);
    return base + at;
}

void phos_residue_count(uint64_t *asked, uint64_t *served)
{
    *asked = atomic_load(&asked_bytes);
    *served = atomic_load(&served_bytes);
}

void phos_residue_reset(void)
{
    atomic_store(&asked_bytes, 0);
    atomic_store(&served_bytes, 0);
}

static bool page_mapped(char *at)
{
    unsigned char resident;
    return mincore(at, 4096, &resident) == 0;
}

/* One mapping of the file that the driver keeps: its bytes in ordinary memory at the same address. */
static void replace(char *start, size_t bytes)
{
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy != MAP_FAILED) {
        memcpy(copy, start, bytes);
        if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, start) != MAP_FAILED)
            return;
        munmap(copy, bytes);
    }
    phos_warn("%zu bytes of the driver's stay in a file that is going: the next checkpoint may fail", bytes);
}

/* Others may have mapped something where the driver unmapped: only what has the file's name is ours. */
static void replace_kept(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    struct {
        char *start;
        size_t bytes;
    } kept[2 * SLICES];
    size_t count = 0;
    while (maps && count < sizeof kept / sizeof *kept && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (!strstr(line, path_name) || sscanf(line, "%lx-%lx", &begin, &end) != 2)
            continue;
        size_t served = atomic_load(&used);
        char *low = base + HUGE_PAGE, *high = base + served;
        char *start = (char *)begin < low ? low : (char *)begin, *stop = (char *)end > high ? high : (char *)end;
        if (start < stop) {
            kept[count].start = start;
            kept[count++].bytes = (size_t)(stop - start);
        }
    }
    if (maps)
        fclose(maps);
    for (size_t i = 0; i < count; i++)
        replace(kept[i].start, kept[i].bytes);
    phos_debug("the driver has kept %zu piece(s) of what it saved its state to", count);
}

void phos_residue_settle(void)
{
    if (!base)
        return;
    unsigned count = atomic_load(&slice_count);
    for (unsigned i = 0; i < count && i < SLICES; i++) {
        char *start = base + slices[i].offset;
        if (page_mapped(start) || page_mapped(start + slices[i].bytes / 2 / 4096 * 4096)) {
            replace_kept();
            return;
        }
    }
}

void phos_residue_release(void)
{
    if (!base)
        return;
    size_t served = atomic_load(&used);
    munmap(base, HUGE_PAGE);
    if (served < size)
        munmap(base + served, size - served);
    phos_residue_forked();
}

void phos_residue_forked(void)
{
    base = NULL; /* a child does not inherit the mapping */
    size = 0;
    atomic_store(&used, 0);
    atomic_store(&slice_count, 0);
}
