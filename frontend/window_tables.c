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
    bool waited = false;
    for (;;) {
        {
            PHOS_RELAXED;
            result = phos_real.cuEventQuery(event);
        }
        if (result != CUDA_ERROR_NOT_READY || phos_window_closed())
            break;
        waited = true;
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    }
    if (waited) {
        phos_count(&phos_window.table->counts.waits, 1);
        phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
    }
    PHOS_RELAXED;
    phos_real.cuEventDestroy_v2(event);
    return result == CUDA_SUCCESS;
}

struct extent {
    CUdeviceptr begin, end;
};
#define NOTHING ((struct extent){~(CUdeviceptr)0, 0})

static void unite(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct extent *extent = cookie;
    CUdeviceptr limit = mapping->range.address + mapping->range.size;
    begin = begin > mapping->range.address ? begin : mapping->range.address;
    end = end < limit ? end : limit;
    extent->begin = begin < extent->begin ? begin : extent->begin;
    extent->end = end > extent->end ? end : extent->end;
}

/* What a table may take up: to the end of what its address names, or as much of that as is read. */
static struct extent extent_of(const struct phos_touch *touch)
{
    struct extent extent = NOTHING;
    phos_window_visit(touch, unite, &extent);
    extent.begin = (touch->address + 7) & ~(CUdeviceptr)7;
    if (extent.end > touch->address + TABLE_MOST)
        extent.end = touch->address + TABLE_MOST;
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
        struct phos_touch word = {.address = words[i], .access = access};
        struct extent extent = NOTHING;
        phos_window_visit(&word, unite, &extent);
        if (extent.begin >= extent.end)
            continue;
        phos_touches_add(touches, extent.begin, extent.end - extent.begin, access);
        end = extent.end;
    }
}

/* False: what is done through the table may be done anywhere; or, with `again`, what is mapped has changed. Nothing is
 * unmapped while the window's lock is held. */
static bool follow(struct phos_touches *touches, const struct phos_touch *table, struct extent *read, bool *again)
{
    uint64_t version;
    {
        PHOS_LOCKED(&phos_memory_lock);
        *read = extent_of(table);
        version = phos_mappings_version;
    }
    if (read->end < read->begin + sizeof(uint64_t))
        return false; /* the host's memory, or the driver's */
    size_t count = (read->end - read->begin) / sizeof(uint64_t);
    PHOS_FREES uint64_t *words = malloc(count * sizeof *words);
    {
        PHOS_LOCKED(&phos_window_lock);
        PHOS_RELAXED;
        *again = version != phos_mappings_version;
        if (*again || !words || !read_memory(read->begin, count * sizeof *words, words))
            return false;
    }
    add_targets(touches, words, count, table->access);
    return true;
}

static int by_address(const void *one, const void *other)
{
    const struct phos_touch *a = one, *b = other;
    return a->address < b->address ? -1 : a->address > b->address;
}

/* The tables among the touches, each with what is done through it. NULL: out of host memory. */
static struct phos_touch *tables_of(const struct phos_touches *touches, uint32_t access, size_t *count)
{
    struct phos_touch *tables = malloc((touches->count + 1) * sizeof *tables);
    *count = 0;
    for (size_t i = 0; tables && i < touches->count; i++)
        if (touches->list[i].access >> PHOS_THROUGH & access)
            tables[(*count)++] = (struct phos_touch){.address = touches->list[i].address,
                                                     .size = touches->list[i].size,
                                                     .access = touches->list[i].access >> PHOS_THROUGH & access};
    if (tables)
        qsort(tables, *count, sizeof *tables, by_address);
    return tables;
}

/* What a kernel puts into a table itself is not there before: it may be given the table twice, and as what it writes to. */
static bool fills(const struct phos_touches *touches, CUdeviceptr table)
{
    for (size_t i = 0; i < touches->count; i++) {
        const struct phos_touch *touch = &touches->list[i];
        if (touch->access & PHOS_WRITES && (touch->address == table || table - touch->address < touch->size))
            return true;
    }
    return false;
}

void phos_window_follow(struct phos_touches *touches, uint32_t access, bool rested)
{
    size_t count;
    PHOS_FREES struct phos_touch *tables = tables_of(touches, access, &count);
    if (!tables || (!rested && !await(touches->stream))) {
        phos_touches_through_anything(touches);
        return;
    }
    phos_touches_through_nothing(touches);
    for (size_t i = 0; i < count; i++)
        touches->anything |= fills(touches, tables[i].address) ? tables[i].access : 0;
    struct extent read = {0};
    uint32_t known = 0; /* the access that was added for all that lies there, to the end of the allocation */
    for (size_t i = 0; i < count; i++) {
        /* Programs put their tables side by side. */
        if (tables[i].address >= read.begin && tables[i].address < read.end && !(tables[i].access & ~known))
            continue;
        bool again = true, found = true;
        while (again) {
            again = false;
            found = follow(touches, &tables[i], &read, &again);
        }
        known = found && !tables[i].size && read.end - read.begin < TABLE_MOST ? tables[i].access : 0;
        if (!found)
            touches->anything |= tables[i].access;
    }
}
