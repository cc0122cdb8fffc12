/* Tables: device memory in which a kernel finds the addresses that it goes on to. What lies in one is known once the work
 * in front of the kernel is done; a call that writes through one waits for that in a window, and so far less long than
 * for all of memory to be saved or loaded. */
#include "cleanup.h"
#include "clock.h"
#include "functions.h"
#include "memory.h"
#include "track.h"
#include "window_private.h"

#include <stdlib.h>
#include <time.h>

#define TABLE_MOST ((size_t)1 << 20) /* bytes that are read: 131,072 addresses */
#define SPIN_NS 20000

/* Behind what was queued in the stream, and what that waits for. */
static CUevent event_behind(CUstream stream)
{
    CUevent event;
    PHOS_RELAXED;
    pthread_rwlock_rdlock(&phos_capture_lock); /* what is recorded in the default stream would end a capture */
    bool recorded = !phos_captures() && phos_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    if (recorded && phos_real.cuEventRecord(event, stream) != CUDA_SUCCESS) {
        phos_real.cuEventDestroy_v2(event);
        recorded = false;
    }
    pthread_rwlock_unlock(&phos_capture_lock);
    return recorded ? event : NULL;
}

/* Whether the tables are as the kernel will find them, as far as this stream goes. The window may end before: then nobody
 * wants to know. */
static bool await(CUstream stream)
{
    CUevent event = event_behind(stream);
    if (!event)
        return false;
    uint64_t start = phos_now_ns();
    CUresult result;
    for (;;) {
        {
            PHOS_RELAXED;
            result = phos_real.cuEventQuery(event);
        }
        if (result != CUDA_ERROR_NOT_READY || phos_window_closed())
            break;
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    }
    phos_count(&phos_window.table->counts.waits, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
    PHOS_RELAXED;
    phos_real.cuEventDestroy_v2(event);
    return result == CUDA_SUCCESS;
}

/* What a table may take up: to the end of what its address names, or as much of that as is read. */
struct extent {
    CUdeviceptr begin, end;
};

static void extend(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct extent *extent = cookie;
    CUdeviceptr limit = mapping->range.address + mapping->range.size;
    end = end < limit ? end : limit;
    if (begin <= extent->end && mapping->range.address <= extent->end && end > extent->end)
        extent->end = end;
}

static struct extent extent_of(const struct phos_touch *touch)
{
    struct extent extent = {touch->address, touch->address};
    phos_window_visit(touch, extend, &extent);
    if (extent.end - extent.begin > TABLE_MOST)
        extent.end = extent.begin + TABLE_MOST;
    extent.begin = (extent.begin + 7) & ~(CUdeviceptr)7;
    return extent;
}

static bool read_memory(CUdeviceptr address, size_t size, void *to)
{
    CUstream stream; /* of its own: in the default stream it would wait for others */
    if (phos_real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    bool read = phos_real.cuMemcpyDtoHAsync_v2(to, address, size, stream) == CUDA_SUCCESS &&
                phos_real.cuStreamSynchronize(stream) == CUDA_SUCCESS;
    phos_real.cuStreamDestroy_v2(stream);
    return read;
}

static int by_value(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

static void unite(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct extent *extent = cookie;
    CUdeviceptr limit = mapping->range.address + mapping->range.size;
    begin = begin > mapping->range.address ? begin : mapping->range.address;
    end = end < limit ? end : limit;
    extent->begin = begin < extent->begin ? begin : extent->begin;
    extent->end = end > extent->end ? end : extent->end;
}

/* Each allocation once, whatever many addresses lie in it. */
static void add_targets(struct phos_touches *touches, uint64_t *words, size_t count, uint32_t access)
{
    CUdeviceptr low, high;
    size_t kept = 0;
    phos_device_range(&low, &high);
    for (size_t i = 0; i < count; i++)
        if (words[i] >= low && words[i] <= high && (!kept || words[i] != words[kept - 1]))
            words[kept++] = words[i];
    if (!kept)
        return;
    qsort(words, kept, sizeof *words, by_value);
    CUdeviceptr end = 0;
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < kept; i++) {
        if (words[i] < end)
            continue;
        struct phos_touch word = {words[i], 0, access};
        struct extent extent = {~(CUdeviceptr)0, 0};
        phos_window_visit(&word, unite, &extent);
        if (extent.begin >= extent.end)
            continue;
        phos_touches_add(touches, extent.begin, extent.end - extent.begin, access);
        end = extent.end;
    }
}

/* False: what is done through the table may be done anywhere; or, with `again`, what is mapped has changed. Nothing is
 * unmapped while the window's lock is held. */
static bool follow(struct phos_touches *touches, struct phos_touch touch, bool *again)
{
    uint32_t access = touch.access >> PHOS_THROUGH;
    struct extent extent;
    uint64_t version;
    {
        PHOS_LOCKED(&phos_memory_lock);
        extent = extent_of(&touch);
        version = phos_mappings_version;
    }
    if (extent.end < extent.begin + sizeof(uint64_t))
        return false; /* the host's memory, or the driver's */
    size_t count = (extent.end - extent.begin) / sizeof(uint64_t);
    PHOS_FREES uint64_t *words = malloc(count * sizeof *words);
    {
        PHOS_LOCKED(&phos_window_lock);
        PHOS_RELAXED;
        *again = version != phos_mappings_version;
        if (*again || !words || !read_memory(extent.begin, count * sizeof *words, words))
            return false;
    }
    add_targets(touches, words, count, access);
    return true;
}

void phos_window_follow(struct phos_touches *touches, bool rested)
{
    if (!rested && !await(touches->stream)) {
        phos_touches_through_anything(touches);
        return;
    }
    size_t count = touches->count; /* of tables that tables name nothing is said */
    for (size_t i = 0; i < count; i++) {
        struct phos_touch touch = touches->list[i]; /* which may move */
        touches->list[i].access &= PHOS_READS | PHOS_WRITES;
        bool again = touch.access >> PHOS_THROUGH, known = true;
        while (again) {
            again = false;
            known = follow(touches, touch, &again);
        }
        if (!known)
            touches->anything |= touch.access >> PHOS_THROUGH;
    }
}
