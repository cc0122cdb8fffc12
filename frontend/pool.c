/* Stream-ordered allocation: cuMemAllocAsync and its relatives, from the same memory as cuMemAlloc.
 *
 * Freed memory waits in its pool, with an event recorded where it was freed. The stream that freed it may have it again
 * at once (its work comes after); anybody may once the event has happened. What is captured into a graph is the graph's
 * own and stays with the driver.
 *
 * Pools are the driver's (their handles, properties and access settings are real), only their memory is ours. Pools that
 * can be exported, and imported ones, are left to the driver whole. */
#include "pool_private.h"
#include "cleanup.h"
#include "clock.h"
#include "detach.h"
#include "driver_shared.h"
#include "log.h"
#include "runtime.h"
#include "track.h"

#include <stdlib.h>
#include <time.h>

#define LOOK_NS 50000
#define REST_NS 1000000000 /* a program that allocates and frees all the time wants it again by then */

struct pending {
    struct phos_allocation *allocation;
    CUevent event;
    CUcontext context; /* of the event; NULL: it ended before that was recorded */
    bool recorded;     /* until then only the thread that frees it may take it from the list */
    unsigned long long stream;
    uint64_t freed_at;        /* ns */
    struct phos_pool *former; /* whose it was; NULL: cuMemAlloc's */
    struct pending *next;
};

struct spare {
    CUevent event;
    CUcontext context;
    struct spare *next;
};

/* When there may be something that has rested for long enough, in ns; 0: nothing is pending. Written with phos_memory_lock held,
 * read without. */
static _Atomic uint64_t rested_at;

/* Guarded by phos_memory_lock. */
struct phos_pool *phos_pools;
static struct spare *spares;

struct phos_pool *phos_pool_add(CUmemoryPool handle, CUdevice device, bool carried)
{
    struct phos_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->handle = handle;
    pool->device = device;
    pool->carried = carried;
    pool->next = phos_pools;
    phos_pools = pool;
    return pool;
}

struct phos_pool *phos_pool_of(CUmemoryPool handle)
{
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        if (pool->handle == handle && !pool->destroyed)
            return pool;
    for (CUdevice d = 0; d < phos_device_count; d++) {
        CUmemoryPool usual;
        if (phos_real.cuDeviceGetDefaultMemPool(&usual, d) == CUDA_SUCCESS && usual == handle)
            return phos_pool_add(handle, d, phos_devices[d].carried);
    }
    return NULL;
}

CUmemoryPool phos_pool_handle(const struct phos_pool *pool)
{
    return pool ? pool->handle : NULL;
}

static bool event_get(CUcontext context, CUevent *event)
{
    for (struct spare **link = &spares; *link; link = &(*link)->next)
        if ((*link)->context == context) {
            struct spare *spare = *link;
            *event = spare->event;
            *link = spare->next;
            free(spare);
            return true;
        }
    return phos_real.cuEventCreate(event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
}

static void event_put(CUcontext context, CUevent event)
{
    struct spare *spare = malloc(sizeof *spare);
    if (!spare) {
        phos_real.cuEventDestroy_v2(event);
        return;
    }
    *spare = (struct spare){event, context, spares};
    spares = spare;
}

static void pending_take(struct phos_pool *pool, struct pending **link)
{
    struct pending *p = *link;
    *link = p->next;
    pool->waiting -= p->allocation->size;
    event_put(p->context, p->event);
    free(p);
}

/* The GPU is done with it, and nobody wants it again. */
static void pending_free(struct phos_pool *pool, struct pending **link)
{
    struct phos_allocation *allocation = (*link)->allocation;
    pending_take(pool, link);
    phos_deallocate(allocation);
}

void phos_pool_dispose_if_done(struct phos_pool *pool)
{
    if (!pool->destroyed || pool->pending || pool->live)
        return;
    for (struct phos_pool **link = &phos_pools; *link; link = &(*link)->next)
        if (*link == pool) {
            *link = pool->next;
            free(pool);
            return;
        }
}

void phos_pool_reap(struct phos_pool *pool)
{
    PHOS_RELAXED;
    for (struct pending **link = &pool->pending; *link;) {
        struct pending *p = *link;
        if (p->recorded && phos_real.cuEventQuery(p->event) == CUDA_SUCCESS)
            pending_free(pool, link);
        else
            link = &p->next;
    }
}

void phos_pool_reclaim(CUdevice device)
{
    for (struct phos_pool *pool = phos_pools, *next; pool; pool = next) {
        next = pool->next;
        if (pool->device == device) {
            phos_pool_reap(pool);
            phos_pool_dispose_if_done(pool);
        }
    }
}

size_t phos_pool_cached(CUdevice device)
{
    size_t bytes = 0;
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        if (pool->device == device)
            bytes += pool->waiting;
    return bytes;
}

static size_t freed(CUdevice device, uint64_t by)
{
    size_t count = 0;
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        for (struct pending *p = pool->device == device ? pool->pending : NULL; p; p = p->next)
            count += p->freed_at <= by;
    return count;
}

bool phos_pool_settle(CUdevice device, uint64_t freed_by, uint64_t timeout_ns)
{
    uint64_t end = phos_now_ns() + timeout_ns;
    for (size_t waiting; (waiting = freed(device, freed_by)) && !phos_exiting();) {
        phos_pool_reclaim(device);
        if (freed(device, freed_by) < waiting)
            return true;
        if (phos_now_ns() >= end)
            return false;
        int cancel;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* whoever called holds the lock, as far as it knows */
        pthread_mutex_unlock(&phos_memory_lock);
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
        pthread_mutex_lock(&phos_memory_lock);
        pthread_setcancelstate(cancel, &cancel);
    }
    return false;
}

static void pool_rest(struct phos_pool *pool, uint64_t now, uint64_t *next)
{
    uint64_t keep = pool->destroyed ? 0 : pool->keep;
    for (struct pending **link = &pool->pending; *link;) {
        struct pending *p = *link;
        uint64_t at = p->freed_at + REST_NS;
        bool rested = p->recorded && now >= at && pool->used + pool->waiting > keep;
        if (rested && phos_real.cuEventQuery(p->event) == CUDA_SUCCESS) {
            pending_free(pool, link);
            continue;
        }
        at = at > now ? at : now + REST_NS;
        *next = *next && *next < at ? *next : at;
        link = &p->next;
    }
    phos_pool_dispose_if_done(pool);
}

void phos_pool_rest(void)
{
    uint64_t due = atomic_load(&rested_at);
    if (!due || phos_now_ns() < due || phos_exiting())
        return;
    bool entered = phos_enter_context();
    {
        PHOS_LOCKED(&phos_memory_lock);
        uint64_t now = phos_now_ns(), at = 0;
        for (struct phos_pool *pool = phos_pools, *next; pool; pool = next) {
            next = pool->next;
            pool_rest(pool, now, &at);
        }
        atomic_store(&rested_at, at);
    }
    phos_leave_context(entered);
}

void phos_pool_context_ends(CUcontext context)
{
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        for (struct pending **link = &pool->pending; *link;) {
            struct pending *p = *link;
            if (p->context == context && p->recorded) {
                pending_free(pool, link);
                continue;
            }
            p->context = p->context == context ? NULL : p->context;
            link = &p->next;
        }
    for (struct spare **link = &spares; *link;) {
        struct spare *spare = *link;
        if (spare->context != context) {
            link = &spare->next;
            continue;
        }
        *link = spare->next; /* the event ends with its context */
        free(spare);
    }
}

void phos_pool_context_moves(CUcontext from, CUcontext to)
{
    for (struct phos_pool *pool = phos_pools; pool; pool = pool->next)
        for (struct pending *p = pool->pending; p; p = p->next)
            p->context = p->context == from ? to : p->context;
    for (struct spare *spare = spares; spare; spare = spare->next)
        spare->context = spare->context == from ? to : spare->context;
}

static unsigned long long stream_number(CUstream stream)
{
    unsigned long long number;
    /* Never used again, unlike the handle; CUDA 12.0. */
    if (phos_real.cuStreamGetId(stream, &number) == CUDA_SUCCESS)
        return number;
    return (unsigned long long)(uintptr_t)stream;
}

/* Captured, or not to be asked (the legacy stream during a capture): the driver's business. */
static bool captured(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return phos_captures() && (phos_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS ||
                               status != CU_STREAM_CAPTURE_STATUS_NONE);
}

static CUdevice stream_device(CUstream stream)
{
    CUcontext context;
    CUdevice device;
    return phos_stream_context(stream, &context, &device) ? device : CU_DEVICE_INVALID;
}

static CUresult pool_allocate(struct phos_pool *pool, CUcontext context, size_t size, CUstream stream,
                              const char *entry_point, CUdeviceptr *address)
{
    /* What is freed and not yet free does not count: the driver lets the stream wait for that. */
    if (pool->most && (size > pool->most || pool->used > pool->most - size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    unsigned long long number = stream_number(stream);
    struct phos_allocation *allocation = NULL;
    for (struct pending **link = &pool->pending; *link; link = &(*link)->next) {
        struct phos_allocation *a = (*link)->allocation;
        size_t capacity = phos_allocation_capacity(a);
        /* The default streams of two contexts may go by one number. */
        if (!(*link)->recorded || (*link)->stream != number || (*link)->context != context || capacity < size ||
            capacity > size + size / 8 + 4096)
            continue;
        allocation = a;
        pending_take(pool, link);
        phos_allocation_renew(a);
        break;
    }
    pool->live++; /* before allocating, which may let go of the lock: a pool with something live stays */
    if (!allocation) {
        phos_pool_reap(pool);
        CUresult result = phos_allocate(pool->device, context, size, entry_point, &allocation);
        if (result != CUDA_SUCCESS) {
            pool->live--;
            phos_pool_dispose_if_done(pool);
            return result;
        }
    }
    allocation->size = size;
    allocation->context = phos_context_whole(context);
    allocation->entry_point = entry_point;
    allocation->pool = pool;
    allocation->state = PHOS_LIVE;
    pool->used += size;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->used + pool->waiting > pool->reserved_high)
        pool->reserved_high = pool->used + pool->waiting;
    *address = allocation->address;
    return CUDA_SUCCESS;
}

CUresult serve_cuMemAllocFromPoolAsync(CUdeviceptr_v2 *dptr, size_t bytesize, CUmemoryPool handle, CUstream stream)
{
    CUcontext context;
    CUdevice device;
    bool valid = dptr && bytesize && handle && phos_policy.carry_pools && phos_policy.carry_device;
    if (valid && captured(stream)) {
        CUresult result = phos_real.cuMemAllocFromPoolAsync(dptr, bytesize, handle, stream);
        if (result == CUDA_SUCCESS)
            phos_uncarried_add(PHOS_UNCARRIED_GRAPH_MEMORY, 1, (int64_t)bytesize);
        return result;
    }
    if (valid && phos_stream_context(stream, &context, &device)) {
        CUresult permitted = phos_capture_permits(context);
        if (permitted != CUDA_SUCCESS)
            return permitted;
        phos_context_seen(context, device);
        PHOS_MEMORY_LOCKED;
        struct phos_pool *pool = phos_pool_of(handle);
        if (pool && pool->carried)
            return pool_allocate(pool, context, bytesize, stream, "cuMemAllocFromPoolAsync", dptr);
    }
    CUresult result = PHOS_RETRIED(phos_driver_recover, stream_device(stream),
                                   phos_real.cuMemAllocFromPoolAsync(dptr, bytesize, handle, stream));
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_POOL, *dptr, bytesize);
    return result;
}

CUresult serve_cuMemAllocAsync(CUdeviceptr_v2 *dptr, size_t bytesize, CUstream stream)
{
    CUcontext context;
    CUdevice device;
    CUmemoryPool handle;
    bool valid = dptr && bytesize && phos_policy.carry_pools && phos_policy.carry_device;
    if (valid && captured(stream)) {
        CUresult result = phos_real.cuMemAllocAsync(dptr, bytesize, stream);
        if (result == CUDA_SUCCESS)
            phos_uncarried_add(PHOS_UNCARRIED_GRAPH_MEMORY, 1, (int64_t)bytesize);
        return result;
    }
    if (valid && phos_stream_context(stream, &context, &device) &&
        phos_real.cuDeviceGetMemPool(&handle, device) == CUDA_SUCCESS) {
        CUresult permitted = phos_capture_permits(context);
        if (permitted != CUDA_SUCCESS)
            return permitted;
        phos_context_seen(context, device);
        PHOS_MEMORY_LOCKED;
        struct phos_pool *pool = phos_pool_of(handle);
        if (pool && pool->carried)
            return pool_allocate(pool, context, bytesize, stream, "cuMemAllocAsync", dptr);
    }
    CUresult result = PHOS_RETRIED(phos_driver_recover, stream_device(stream),
                                   phos_real.cuMemAllocAsync(dptr, bytesize, stream));
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_POOL, *dptr, bytesize);
    return result;
}

/* Counts a pool's allocation as gone; its memory may follow later. */
static void pool_forget(struct phos_allocation *allocation)
{
    struct phos_pool *pool = allocation->pool;
    if (!pool)
        return;
    pool->live--;
    pool->used -= allocation->size;
}

/* Takes it out of use, to wait in a pool; the event is not recorded yet. */
static CUresult pending_begin(CUdeviceptr address, CUcontext context, CUstream stream, struct pending **out)
{
    PHOS_MEMORY_LOCKED;
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (!allocation || allocation->address != address)
        return CUDA_ERROR_INVALID_VALUE;
    struct phos_pool *former = allocation->pool, *pool = former;
    if (!pool) { /* memory of cuMemAlloc may be freed this way too: it waits with its device's usual pool */
        CUmemoryPool usual;
        CUresult result = phos_real.cuDeviceGetDefaultMemPool(&usual, allocation->span->device);
        if (result != CUDA_SUCCESS)
            return result;
        pool = phos_pool_of(usual);
    }
    struct pending *p = pool ? malloc(sizeof *p) : NULL;
    CUevent event;
    if (!p || !event_get(context, &event)) {
        free(p);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool_forget(allocation);
    allocation->pool = pool; /* which has it now, and keeps it should its context end first */
    allocation->state = PHOS_PENDING;
    *p = (struct pending){.allocation = allocation,
                          .event = event,
                          .context = context,
                          .stream = stream_number(stream),
                          .freed_at = phos_now_ns(),
                          .former = former,
                          .next = pool->pending};
    pool->pending = p;
    pool->waiting += allocation->size;
    if (!atomic_load(&rested_at))
        atomic_store(&rested_at, p->freed_at + REST_NS);
    *out = p;
    return CUDA_SUCCESS;
}

/* `result`: of recording the event. */
static void pending_end(struct pending *p, CUresult result)
{
    PHOS_MEMORY_LOCKED;
    struct phos_allocation *allocation = p->allocation;
    struct phos_pool *pool = allocation->pool, *former = p->former;
    p->recorded = p->context && result == CUDA_SUCCESS;
    if (p->recorded)
        return;
    struct pending **link = &pool->pending;
    while (*link != p)
        link = &(*link)->next;
    *link = p->next;
    pool->waiting -= allocation->size;
    if (!p->context) /* the event has ended with it, and so had the work */
        phos_deallocate(allocation);
    else { /* it is not freed */
        event_put(p->context, p->event);
        allocation->state = PHOS_LIVE;
        allocation->pool = former;
        if (former) {
            former->live++;
            former->used += allocation->size;
        }
    }
    free(p);
    phos_pool_dispose_if_done(pool);
}

CUresult serve_cuMemFreeAsync(CUdeviceptr_v2 dptr, CUstream stream)
{
    bool ours;
    {
        PHOS_MEMORY_LOCKED;
        struct phos_allocation *allocation = phos_allocation_at(dptr);
        if (allocation && allocation->address != dptr)
            return CUDA_ERROR_INVALID_VALUE;
        ours = allocation;
    }
    /* Nothing is queued under the lock: if the stream is full, the driver waits for the GPU. */
    if (!ours) {
        struct phos_uncarried_memory *left = phos_uncarried_take(dptr);
        bool shared = false;
        if (!captured(stream)) { /* first: as soon as it is freed another thread may be given the address */
            PHOS_MEMORY_LOCKED;
            shared = phos_driver_shared_drop(PHOS_SHARED_POINTER, dptr);
        }
        CUresult result = phos_uncarried_freed(left, phos_real.cuMemFreeAsync(dptr, stream));
        if (result != CUDA_SUCCESS && shared) {
            PHOS_MEMORY_LOCKED;
            phos_driver_shared_add(PHOS_SHARED_POINTER, dptr, NULL);
        }
        return result;
    }
    /* Freeing what was allocated outside into a graph: the driver knows no such memory, and says so. */
    if (captured(stream))
        return phos_real.cuMemFreeAsync(dptr, stream);
    CUcontext context;
    CUdevice device;
    if (!phos_stream_context(stream, &context, &device)) {
        CUresult problem = phos_real.cuStreamGetCtx(stream, &context);
        return problem != CUDA_SUCCESS ? problem : CUDA_ERROR_INVALID_CONTEXT;
    }
    CUresult result = phos_capture_permits(context);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_RELAXED;
    CUcontext current = NULL;
    phos_real.cuCtxGetCurrent(&current);
    bool pushed = current != context && phos_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    struct pending *p;
    result = pending_begin(dptr, context, stream, &p);
    if (result == CUDA_SUCCESS) {
        result = phos_real.cuEventRecord(p->event, stream);
        pending_end(p, result);
    }
    if (pushed)
        phos_real.cuCtxPopCurrent_v2(&current);
    return result;
}

void phos_pool_free_now(struct phos_allocation *allocation)
{
    struct phos_pool *pool = allocation->pool;
    pool_forget(allocation);
    phos_deallocate(allocation);
    phos_pool_dispose_if_done(pool);
}
