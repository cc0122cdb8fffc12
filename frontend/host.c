/* Pinned host memory. What cuMemHostAlloc gives is an anonymous mapping of ours, registered with the driver; what the
 * application registers itself is recorded. Detach unregisters all of it, so that it is plain memory when CRIU looks,
 * and attach registers it again: the addresses the GPU uses are the host's own (checked per device), so they stay. */
#include "host.h"
#include "blocks.h"
#include "cleanup.h"
#include "deferred.h"
#include "gate.h"
#include "log.h"
#include "memory.h"
#include "runtime.h"
#include "track.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define HUGE ((size_t)2 << 20)

struct host_memory {
    struct phos_range range;    /* as asked for */
    void *mapping;              /* ours to unmap; NULL: the application's own memory */
    size_t mapping_size;
    size_t registered_size;
    unsigned int register_flags, flags; /* `flags`: as the application gave them */
    CUcontext context;
    const char *entry_point;
    bool absent;
    bool freed; /* deferred: see deferred.h */
    bool ends;  /* with its context, whatever the driver says */
    struct host_memory *next; /* of those that leave */
};

/* Guarded by phos_memory_lock. */
static struct phos_ranges host_ranges; /* of struct host_memory */
static struct host_memory *leaving;    /* no longer in there */

static struct host_memory *item(size_t index)
{
    return (struct host_memory *)host_ranges.items[index];
}

/* What cuMemHostAlloc or cuMemAllocHost gave that has this address in it, or NULL. */
static struct host_memory *made_at(const void *p)
{
    struct host_memory *host = (struct host_memory *)phos_ranges_find(&host_ranges, (uint64_t)(uintptr_t)p);
    return host && host->mapping ? host : NULL;
}

static bool carried(CUcontext *context)
{
    CUdevice device;
    if (!phos_policy.carry_host || phos_current(context, &device) != CUDA_SUCCESS)
        return false;
    /* Portable memory is seen by every device. */
    for (int d = 0; d < phos_device_count; d++)
        if (!phos_devices[d].host_pointers)
            return false;
    phos_context_seen(*context, device);
    *context = phos_context_whole(*context);
    return true;
}

static void *host_map(size_t size, size_t *mapped)
{
    bool large = size >= HUGE;
    *mapped = (size + PAGE - 1) & ~(PAGE - 1);
    char *raw = mmap(NULL, *mapped + (large ? HUGE : 0), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    if (!large)
        return raw;
    char *start = (char *)(((uintptr_t)raw + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    if (start > raw)
        munmap(raw, (size_t)(start - raw));
    if (raw + HUGE > start)
        munmap(start + *mapped, (size_t)(raw + HUGE - start));
    madvise(start, *mapped, MADV_HUGEPAGE);
    return start;
}

static CUresult host_allocate(void **pointer, size_t size, unsigned int flags, const char *entry_point, CUcontext context)
{
    {
        PHOS_LOCKED(&phos_memory_lock);
        phos_deferred_settle(0); /* nothing says when host memory is short: what need not be waited for goes now */
    }
    struct host_memory *host = calloc(1, sizeof *host);
    if (!host)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *memory = host_map(size, &host->mapping_size);
    if (!memory) {
        free(host);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* All pinned memory is portable and mapped where addresses are unified. Write-combining has no registered form; it is
     * a hint about speed. */
    host->register_flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    host->flags = flags;
    host->mapping = memory;
    host->registered_size = size; /* what the driver then says of its range */
    host->context = context;
    host->entry_point = entry_point;
    host->range = (struct phos_range){(uint64_t)(uintptr_t)memory, size};
    PHOS_RELAXED;
    CUresult result = phos_real.cuMemHostRegister_v2(memory, host->registered_size, host->register_flags);
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        if (phos_ranges_add(&host_ranges, &host->range)) {
            *pointer = memory;
            return CUDA_SUCCESS;
        }
        phos_real.cuMemHostUnregister(memory);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    munmap(memory, host->mapping_size);
    free(host);
    return result;
}

CUresult serve_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
    CUcontext context;
    const unsigned int known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (pp && bytesize && bytesize < (size_t)1 << 46 && !(flags & ~known) && carried(&context))
        return host_allocate(pp, bytesize, flags, "cuMemHostAlloc", context);
    CUresult result = phos_real.cuMemHostAlloc(pp, bytesize, flags);
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_HOST, (uint64_t)(uintptr_t)*pp, bytesize);
    return result;
}

CUresult serve_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    CUcontext context;
    if (pp && bytesize && bytesize < (size_t)1 << 46 && carried(&context))
        return host_allocate(pp, bytesize, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP, "cuMemAllocHost", context);
    CUresult result = phos_real.cuMemAllocHost_v2(pp, bytesize);
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_HOST, (uint64_t)(uintptr_t)*pp, bytesize);
    return result;
}

static bool enter(const struct host_memory *host)
{
    /* Its context may have ended past us; any current one will do then. */
    return phos_context_lives(host->context) && phos_real.cuCtxPushCurrent_v2(host->context) == CUDA_SUCCESS;
}

static void leave(bool entered)
{
    CUcontext popped;
    if (entered)
        phos_real.cuCtxPopCurrent_v2(&popped);
}

/* Of what nobody finds any more. Not under the lock: the driver may wait for the device. */
static CUresult host_free(struct host_memory *host)
{
    CUresult result = phos_real.cuMemHostUnregister(host->mapping);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED || host->ends)
        munmap(host->mapping, host->mapping_size);
    free(host);
    return result;
}

static void release(void *what)
{
    struct host_memory *host = what;
    phos_ranges_remove(&host_ranges, &host->range);
    host->next = leaving;
    leaving = host;
}

void phos_host_context_ends(CUcontext context, bool gone)
{
    for (size_t i = host_ranges.count; i-- > 0;) {
        struct host_memory *host = item(i);
        if (host->context != context)
            continue;
        if (host->mapping && !gone) {
            host->ends = true;
            release(host);
            continue;
        }
        phos_ranges_remove(&host_ranges, &host->range);
        if (host->mapping)
            munmap(host->mapping, host->mapping_size);
        free(host);
    }
}

struct host_memory *phos_host_leaving(void)
{
    struct host_memory *list = leaving;
    leaving = NULL;
    return list;
}

void phos_host_unpin(struct host_memory *list)
{
    PHOS_RELAXED;
    for (struct host_memory *host = list, *next; host; host = next) {
        next = host->next;
        bool entered = enter(host);
        if (host_free(host) != CUDA_SUCCESS)
            phos_debug("pinned memory that was freed during a capture, or whose context ends, could not be unpinned");
        leave(entered);
    }
}

/* `captured`: nobody could wait for the work that may use it. */
static CUresult free_ours(void *p, CUcontext context, bool captured, bool *more)
{
    PHOS_RELAXED;
    struct host_memory *host;
    {
        PHOS_LOCKED(&phos_memory_lock);
        host = made_at(p);
        if (!host || host->mapping != p || host->freed)
            return CUDA_ERROR_INVALID_VALUE;
        *more = !captured && phos_deferred_in(context);
        if (captured) {
            host->freed = phos_deferred_add(context, release, host);
            return host->freed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        phos_ranges_remove(&host_ranges, &host->range);
    }
    return host_free(host);
}

CUresult serve_cuMemFreeHost(void *p)
{
    CUcontext context = NULL;
    uint64_t earlier;
    bool ours;
    {
        PHOS_LOCKED(&phos_memory_lock);
        earlier = phos_deferred_ever();
        struct host_memory *host = made_at(p);
        ours = host != NULL;
        if (ours && (host->mapping != p || host->freed))
            return CUDA_ERROR_INVALID_VALUE;
        context = ours ? host->context : NULL;
    }
    if (!ours) {
        struct phos_uncarried_memory *left = phos_uncarried_take((uint64_t)(uintptr_t)p);
        return phos_uncarried_freed(left, phos_real.cuMemFreeHost(p)); /* not under the lock: the driver waits for the device */
    }
    /* Work in flight may still read it; the driver waits too. */
    bool captured, more = false;
    CUresult waited = phos_synchronize(context, &captured);
    CUresult result = free_ours(p, context, captured, &more);
    if (more)
        phos_deferred_release_idle(context, earlier);
    return result == CUDA_SUCCESS && waited != CUDA_ERROR_CONTEXT_IS_DESTROYED ? waited : result;
}

static CUresult host_register(void *p, size_t size, unsigned int flags, CUresult (*call)(void *, size_t, unsigned int),
                              const char *entry_point)
{
    CUcontext context;
    {
        PHOS_LOCKED(&phos_memory_lock);
        if (made_at(p))
            return CUDA_ERROR_INVALID_VALUE; /* as the driver says of what it has allocated */
    }
    PHOS_RELAXED;
    CUresult result = call(p, size, flags);
    if (result != CUDA_SUCCESS)
        return result;
    struct host_memory *host = carried(&context) ? calloc(1, sizeof *host) : NULL;
    if (!host) {
        phos_uncarried_made(PHOS_UNCARRIED_HOST, (uint64_t)(uintptr_t)p, size);
        return result;
    }
    *host = (struct host_memory){.range = {(uint64_t)(uintptr_t)p, size},
                                 .registered_size = size,
                                 .register_flags = flags,
                                 .flags = flags,
                                 .context = context,
                                 .entry_point = entry_point};
    PHOS_LOCKED(&phos_memory_lock);
    if (!phos_ranges_add(&host_ranges, &host->range)) {
        free(host);
        phos_uncarried_made(PHOS_UNCARRIED_HOST, (uint64_t)(uintptr_t)p, size);
    }
    return result;
}

CUresult serve_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags)
{
    return host_register(p, bytesize, flags, phos_real.cuMemHostRegister_v2, "cuMemHostRegister");
}

CUresult serve_cuMemHostRegister(void *p, size_t bytesize, unsigned int flags)
{
    return host_register(p, bytesize, flags, phos_real.cuMemHostRegister, "cuMemHostRegister");
}

CUresult serve_cuMemHostUnregister(void *p)
{
    PHOS_RELAXED;
    struct host_memory *host;
    {
        PHOS_LOCKED(&phos_memory_lock);
        if (made_at(p))
            return CUDA_ERROR_INVALID_VALUE; /* as the driver says of what it has allocated */
        host = (struct host_memory *)phos_ranges_find(&host_ranges, (uint64_t)(uintptr_t)p);
        if (host && host->range.address != (uint64_t)(uintptr_t)p)
            host = NULL;
        if (host) /* first: as soon as the driver is done another thread may register it anew */
            phos_ranges_remove(&host_ranges, &host->range);
    }
    struct phos_uncarried_memory *left = host ? NULL : phos_uncarried_take((uint64_t)(uintptr_t)p);
    /* Not under the lock: the driver may wait for the device. */
    CUresult result = phos_uncarried_freed(left, phos_real.cuMemHostUnregister(p));
    if (result != CUDA_SUCCESS && host) {
        PHOS_LOCKED(&phos_memory_lock);
        if (phos_ranges_add(&host_ranges, &host->range))
            return result;
        phos_uncarried_made(PHOS_UNCARRIED_HOST, host->range.address, host->registered_size);
    }
    free(host);
    return result;
}

/* The driver answers for what it has allocated itself, and not for what is registered, as ours is. */
CUresult serve_cuMemHostGetFlags(unsigned int *flags, void *p)
{
    if (flags) {
        PHOS_LOCKED(&phos_memory_lock);
        struct host_memory *host = made_at(p);
        if (host && !host->freed) {
            /* All is portable and mapped where addresses are unified: it reports the one only of write-combined memory (580),
             * and the other always. */
            bool combined = host->flags & CU_MEMHOSTALLOC_WRITECOMBINED;
            *flags = (combined ? host->flags : 0) | CU_MEMHOSTALLOC_DEVICEMAP;
            return CUDA_SUCCESS;
        }
    }
    return phos_real.cuMemHostGetFlags(flags, p);
}

/* ---- detach and attach ---- */

bool phos_host_unregister_all(uint64_t *bytes, struct phos_error *error)
{
    for (size_t i = 0; i < host_ranges.count; i++) {
        struct host_memory *host = item(i);
        bool entered = enter(host);
        CUresult result = phos_real.cuMemHostUnregister((void *)(uintptr_t)host->range.address);
        leave(entered);
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
            return phos_fail(error, result, "host memory at 0x%llx cannot be unpinned",
                             (unsigned long long)host->range.address);
        host->absent = true;
        *bytes += host->range.size;
    }
    return true;
}

struct part {
    size_t first, step;
    CUresult result;
};

static void *register_part(void *argument)
{
    struct part *part = argument;
    if (part->first) /* a thread of its own, while the gate is closed */
        phos_gate_exempt_self();
    for (size_t i = part->first; i < host_ranges.count; i += part->step) {
        struct host_memory *host = item(i);
        if (!host->absent)
            continue;
        bool entered = enter(host);
        CUresult result = phos_real.cuMemHostRegister_v2((void *)(uintptr_t)host->range.address, host->registered_size,
                                                         host->register_flags);
        leave(entered);
        if (result == CUDA_SUCCESS)
            host->absent = false;
        else
            part->result = result;
    }
    return NULL;
}

bool phos_host_register_all(struct phos_error *error)
{
    /* Pinning is page-table work that several threads share well; a handful of registrations is not worth a thread. */
    enum { PARTS = 4, WORTH_IT = 64 };
    struct part parts[PARTS];
    pthread_t threads[PARTS];
    bool started[PARTS] = {false};
    size_t count = host_ranges.count >= WORTH_IT ? PARTS : 1;
    for (size_t i = 0; i < count; i++) {
        parts[i] = (struct part){i, count, CUDA_SUCCESS};
        started[i] = i > 0 && pthread_create(&threads[i], NULL, register_part, &parts[i]) == 0;
    }
    for (size_t i = 0; i < count; i++)
        if (!started[i])
            register_part(&parts[i]);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        if (parts[i].result != CUDA_SUCCESS)
            result = parts[i].result;
    }
    return result == CUDA_SUCCESS || phos_fail(error, result, "host memory cannot be pinned again");
}

Phos__Wire__MemoryMap__HostAllocation **phos_host_list(size_t *count)
{
    size_t n = host_ranges.count;
    Phos__Wire__MemoryMap__HostAllocation **list = malloc((n + 1) * (sizeof *list + sizeof **list));
    if (!list)
        return NULL;
    Phos__Wire__MemoryMap__HostAllocation *items = (void *)(list + n + 1);
    for (size_t i = 0; i < n; i++) {
        phos__wire__memory_map__host_allocation__init(&items[i]);
        items[i].address = item(i)->range.address;
        items[i].size = item(i)->range.size;
        items[i].entry_point = (char *)item(i)->entry_point;
        list[i] = &items[i];
    }
    *count = n;
    return list;
}
