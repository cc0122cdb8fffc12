/* Checkpoint and restore of this process's GPU state, carried out by the control thread (control.c).
 *
 * Checkpoint copies all device memory that the process owns alone into one private anonymous mapping, the residue, with what
 * stands for the rest of a context's state (SOFTGPU_RESIDUE bytes: a pattern that the restore checks), and lets
 * go of every memfd: mappings become PROT_NONE reservations, descriptors are closed, the guard too. What CRIU then sees is an
 * ordinary process. Restore makes new memfds and maps them at the same addresses. Handles that were exported or imported,
 * memory opened by CUDA IPC and imported pools cannot be restored, as with the real driver (DESIGN §2, bench/shared_memory.py):
 * the checkpoint succeeds and the restore fails for good. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "softgpu.h"

#define STAGING ((size_t)2 << 20)

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

/* All of this is the control thread's alone; the gate is closed and the streams are drained while it runs. */
static char *residue;
static size_t residue_size;
static size_t context_at;    /* where in it the pattern is */
static uint64_t context_key; /* what the pattern is made of: another at every checkpoint */
static CUresult tainted; /* what the restore will answer: something shared was open at the checkpoint */
static int guard = -1;

/* A descriptor of a kind CRIU cannot dump, as /dev/nvidia* is: a dump without the GPU step must fail here as it does there.
 * A userfaultfd (user mode only needs no privilege since Linux 5.11), else a perf event that counts nothing. */
bool sg_guard_open(void)
{
    guard = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (guard < 0) {
        struct perf_event_attr nothing = {
            .type = PERF_TYPE_SOFTWARE, .size = sizeof(nothing), .config = PERF_COUNT_SW_DUMMY,
            .disabled = 1, .exclude_kernel = 1, .exclude_hv = 1,
        };
        guard = (int)syscall(SYS_perf_event_open, &nothing, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
    }
    if (guard < 0)
        sg_log("neither userfaultfd nor perf_event_open works here (%s): CRIU will not notice a process that was not checkpointed",
               strerror(errno));
    sg_fd_own(guard);
    return true;
}

/* In a forked child it stays open, as /dev/nvidia* do there, and is no business of ours any more. */
void sg_guard_forget(void)
{
    sg_fd_disown(guard);
    guard = -1;
}

void sg_guard_close(void)
{
    sg_fd_close(guard);
    guard = -1;
}

static bool shared(const struct sg_physical *physical)
{
    return physical->imported || atomic_load(&physical->exported);
}

static int protection(const struct sg_range *range)
{
    return range->writable ? PROT_READ | PROT_WRITE : range->readable ? PROT_READ : PROT_NONE;
}

static void blank(const struct sg_range *range)
{
    void *at = (void *)(uintptr_t)range->begin;
    size_t size = range->end - range->begin;
    if (mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED)
        madvise(at, size, MADV_DONTFORK);
}

/* Copies between the residue and a memfd, through a mapping of its own. */
static bool transfer(int fd, char *at, size_t size, bool save)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return false;
    if (save)
        memcpy(at, memory, size);
    else
        memcpy(memory, at, size);
    munmap(memory, size);
    return true;
}

/* Writes the pattern, or says whether it is still there: by memcpy() of STAGING bytes at a time, which is how the real driver
 * moves what it saves. */
static bool context_state(bool save)
{
    static uint64_t staging[STAGING / sizeof(uint64_t)];
    uint64_t x = context_key;
    for (size_t at = context_at, bytes; at < residue_size; at += bytes) {
        bytes = residue_size - at < STAGING ? residue_size - at : STAGING;
        if (!save)
            memcpy(staging, residue + at, bytes);
        for (size_t i = 0; i < bytes / sizeof(*staging); i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            if (save)
                staging[i] = x;
            else if (staging[i] != x)
                return false;
        }
        if (save)
            memcpy(residue + at, staging, bytes);
    }
    return true;
}

CUresult sg_checkpoint(void)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_map_lock);
    residue_size = 0;
    tainted = atomic_load(&sg_pools_imported) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    for (size_t i = 0; i < sg_ranges.count; i++) {
        struct sg_range *range = sg_ranges.items[i];
        if (range->imported) {
            tainted = tainted ? tainted : CUDA_ERROR_INVALID_VALUE;
        } else if (range->kind == SG_MEM_DEVICE) {
            range->residue = residue_size;
            residue_size += range->end - range->begin;
        }
    }
    for (struct sg_physical *physical = sg_physicals; physical; physical = physical->next) {
        if (shared(physical)) {
            tainted = CUDA_ERROR_NOT_SUPPORTED;
            continue;
        }
        physical->residue = residue_size;
        residue_size += physical->size;
    }
    context_at = residue_size;
    context_key = sg_now_ns() | 1;
    residue_size += sg_settings()->residue & ~(uint64_t)7;
    if (residue_size) {
        /* One populated anonymous mapping, made through the symbol: a preloaded library may serve it (DESIGN §2). */
        residue = mmap(NULL, residue_size, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE | MAP_POPULATE, -1, 0);
        if (residue == MAP_FAILED) {
            residue = NULL;
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    for (struct sg_physical *physical = sg_physicals; physical && result == CUDA_SUCCESS; physical = physical->next)
        if (!shared(physical) && !transfer(physical->fd, residue + physical->residue, physical->size, true))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        context_state(true);
        for (size_t i = 0; i < sg_ranges.count; i++) {
            struct sg_range *range = sg_ranges.items[i];
            if (range->kind == SG_MEM_DEVICE && !range->imported)
                memcpy(residue + range->residue, (void *)(uintptr_t)range->begin, range->end - range->begin);
            if (range->kind == SG_MEM_DEVICE || range->kind == SG_MEM_VMM)
                blank(range);
        }
        for (struct sg_physical *physical = sg_physicals; physical; physical = physical->next) {
            sg_fd_close(physical->fd);
            physical->fd = -1;
        }
    } else if (residue) {
        munmap(residue, residue_size);
        residue = NULL;
    }
    pthread_mutex_unlock(&sg_map_lock);
    if (result == CUDA_SUCCESS) {
        sg_guard_close();
        sg_used_changed(0, 0);
    }
    return result;
}

/* Under sg_map_lock. Device memory back at its address, with its bytes. */
static CUresult restore_range(struct sg_range *range)
{
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    size_t size = range->end - range->begin;
    int fd = sg_memfd(range->device, size, &error);
    if (fd < 0)
        return error;
    void *at = mmap((void *)(uintptr_t)range->begin, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    sg_fd_close(fd);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(at, size, MADV_DONTFORK);
    memcpy(at, residue + range->residue, size);
    return CUDA_SUCCESS;
}

static CUresult restore_physical(struct sg_physical *physical)
{
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    physical->fd = sg_memfd(physical->device, physical->size, &error);
    if (physical->fd < 0)
        return error;
    return transfer(physical->fd, residue + physical->residue, physical->size, false) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult restore_all(void)
{
    CUresult result = CUDA_SUCCESS;
    for (struct sg_physical *physical = sg_physicals; physical && result == CUDA_SUCCESS; physical = physical->next)
        result = restore_physical(physical);
    for (size_t i = 0; i < sg_ranges.count && result == CUDA_SUCCESS; i++) {
        struct sg_range *range = sg_ranges.items[i];
        size_t size = range->end - range->begin;
        if (range->kind == SG_MEM_DEVICE)
            result = restore_range(range);
        else if (range->kind == SG_MEM_VMM) {
            void *at = mmap((void *)(uintptr_t)range->begin, size, protection(range), MAP_SHARED | MAP_FIXED, range->physical->fd, 0);
            if (at == MAP_FAILED)
                result = CUDA_ERROR_OUT_OF_MEMORY;
            else
                madvise(at, size, MADV_DONTFORK);
        }
    }
    return result;
}

/* Back to the checkpointed state after a restore that did not succeed: the residue still holds everything. */
static void undo(void)
{
    for (size_t i = 0; i < sg_ranges.count; i++) {
        struct sg_range *range = sg_ranges.items[i];
        if (range->kind == SG_MEM_DEVICE || range->kind == SG_MEM_VMM)
            blank(range);
    }
    for (struct sg_physical *physical = sg_physicals; physical; physical = physical->next) {
        sg_fd_close(physical->fd);
        physical->fd = -1;
    }
}

CUresult sg_restore(const int *physical, unsigned count, const char **why)
{
    int before[SG_MAX_DEVICES];
    *why = NULL;
    if (tainted) {
        *why = "memory or pools were shared with other processes at the checkpoint";
        return tainted;
    }
    if (!context_state(false)) {
        *why = "what the checkpoint saved of the context is not what it was";
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    for (int i = 0; sg_device(i); i++) {
        before[i] = sg_device(i)->physical;
        if (count)
            atomic_store(&sg_device(i)->physical, physical[i]);
    }
    pthread_mutex_lock(&sg_map_lock);
    CUresult result = sg_fault(SG_FAULT_RESTORE_OOM) ? CUDA_ERROR_OUT_OF_MEMORY : restore_all();
    if (result != CUDA_SUCCESS)
        undo();
    pthread_mutex_unlock(&sg_map_lock);
    sg_used_changed(0, 0);
    if (result != CUDA_SUCCESS) {
        for (int i = 0; sg_device(i); i++)
            atomic_store(&sg_device(i)->physical, before[i]);
        return result;
    }
    if (residue && sg_fault(SG_FAULT_RESIDUE_WRITE))
        memset(residue, 0xff, residue_size);
    if (residue && !sg_fault(SG_FAULT_RESIDUE_KEEP))
        munmap(residue, residue_size);
    residue = NULL;
    for (int i = 0; sg_device(i); i++)
        for (int direction = 0; direction < SG_DIRECTIONS; direction++)
            sg_device(i)->engines[direction].busy_until = 0; /* another machine's clock, perhaps */
    sg_guard_open();
    return CUDA_SUCCESS;
}
