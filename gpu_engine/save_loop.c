/* Saving GPU memory into page-locked memory of the image's own: one thread for each GPU, without the interpreter. It keeps the
 * copy engine busy and no more than that, because what a process waits for comes behind all that is queued; whatever follows
 * from a piece that has come (saving its hash, comparing it) others do later.
 *
 * While processes are brought back, one small part is under way at a time. What the driver does then, setting up page tables
 * for example, needs the engine that copies to the host, and gets it when that has nothing to do, or after a millisecond: as
 * long as anything is queued, however small, 397 blocks take 0.4 s to be mapped instead of 0.02, and a context a third longer
 * to come back (an H100, bench/copy_load.py). So the next part is queued when the one before has landed: 42 GB/s still, and
 * the engine is free every 40 microseconds.
 *
 * No state but the pump's and the plan's. save_plan.py describes the same structures. */
#include "../frontend/clock.h"
#include "copy_lane.h"
#include "save_plan.h"

#include <errno.h>
#include <sched.h>
#include <sys/prctl.h>

#define MOST 32 /* pieces under way */

#define PAUSE_NS 20000
#define SPINS 200

/* What became of a piece; times are CLOCK_MONOTONIC. */
struct phos_save_record {
    struct phos_save_piece piece;
    uint64_t to;       /* where it is; 0: nowhere, being zeros */
    uint64_t taken_ns, landed_ns;
    uint32_t changing; /* memory may have changed before it was copied */
    uint32_t zero;
};

struct phos_save_pump {
    const struct phos_copy_driver *driver;
    void *stream;
    void *const *events; /* MOST of them */
    struct phos_save_record *records; /* one more than the plan has chunks */
    uint64_t recorded;                /* how many of them are there; atomically */
    uint64_t under_way_bytes;         /* with so many, nothing more is queued */
    /* The pieces under way are records[recorded] and so on. */
    uint32_t under_way, event; /* the event of the oldest */
    uint64_t bytes;
};

enum { DONE, BROKEN };

static void short_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

static struct phos_save_record *at(struct phos_save_pump *pump, uint32_t behind)
{
    return &pump->records[pump->recorded + behind]; /* `recorded` is written by this thread alone */
}

/* The oldest piece under way, or one that needed no copy while none is, has landed. */
static void land(struct phos_save_plan *plan, struct phos_save_pump *pump)
{
    struct phos_save_record *record = at(pump, 0);
    record->changing = (uint32_t)phos_save_landed(plan, &record->piece);
    record->landed_ns = phos_now_ns();
    __atomic_store_n(&pump->recorded, pump->recorded + 1, __ATOMIC_RELEASE);
}

static int land_ready(struct phos_save_plan *plan, struct phos_save_pump *pump, struct phos_copy_failure *failure)
{
    while (pump->under_way) {
        int code = pump->driver->query(pump->events[pump->event]);
        if (code == NOT_READY)
            return 0;
        if (code)
            return phos_copy_fails(failure, QUERY, code);
        pump->bytes -= at(pump, 0)->piece.address ? at(pump, 0)->piece.bytes : 0;
        pump->under_way--;
        pump->event = (pump->event + 1) % MOST;
        land(plan, pump);
    }
    return 0;
}

static int queue(struct phos_save_pump *pump, const struct phos_save_record *record, uint64_t offset, uint64_t bytes,
                 void *event, struct phos_copy_failure *failure)
{
    int code = 0;
    if (record->piece.address)
        code = pump->driver->memcpy_to_host((char *)(uintptr_t)record->to + offset, record->piece.address + offset, bytes,
                                            pump->stream);
    if (code)
        return phos_copy_fails(failure, MEMCPY_TO_HOST, code);
    code = pump->driver->record(event, pump->stream);
    return code ? phos_copy_fails(failure, RECORD, code) : 0;
}

/* It has landed when this returns 0. */
static int copy_in_parts(struct phos_save_pump *pump, const struct phos_save_record *record, uint32_t part,
                         struct phos_copy_failure *failure)
{
    void *event = pump->events[pump->event];
    for (uint64_t done = 0, size = record->piece.bytes; done < size; done += part) {
        if (queue(pump, record, done, size - done < part ? size - done : part, event, failure))
            return -1;
        int code;
        for (unsigned spins = 0; (code = pump->driver->query(event)) == NOT_READY;)
            if (++spins > SPINS)
                sched_yield();
        if (code)
            return phos_copy_fails(failure, QUERY, code);
    }
    return 0;
}

/* A piece has been taken: its record is the one behind those under way. */
static int begin(struct phos_save_plan *plan, struct phos_save_pump *pump, struct phos_copy_failure *failure)
{
    struct phos_save_record *record = at(pump, pump->under_way);
    const struct phos_save_piece *piece = &record->piece;
    record->to = piece->address ? phos_save_room(plan, piece->bytes) : 0;
    if (piece->address && !record->to)
        return phos_copy_fails(failure, APPENDING, ENOSPC);
    uint32_t part = __atomic_load_n(&plan->part, __ATOMIC_RELAXED);
    if (!pump->under_way && (part || !piece->address)) {
        if (piece->address && copy_in_parts(pump, record, part, failure))
            return -1;
        if (piece->address)
            __atomic_fetch_add(&plan->in_turns, 1, __ATOMIC_RELAXED);
        land(plan, pump);
        return 0;
    }
    if (queue(pump, record, 0, piece->bytes, pump->events[(pump->event + pump->under_way) % MOST], failure))
        return -1;
    pump->under_way++;
    pump->bytes += piece->address ? piece->bytes : 0;
    return 0;
}

static bool full(struct phos_save_plan *plan, const struct phos_save_pump *pump)
{
    bool in_parts = __atomic_load_n(&plan->part, __ATOMIC_RELAXED);
    return pump->under_way && (in_parts || pump->under_way == MOST || pump->bytes >= pump->under_way_bytes);
}

EXPORT uint32_t phos_save_events(void)
{
    return MOST;
}

/* Save until nothing is left, and all has landed. BROKEN, or -1: something may be under way, of which there is no record. */
EXPORT int phos_save(struct phos_save_plan *plan, struct phos_save_pump *pump, uint32_t number, struct phos_copy_failure *failure)
{
    prctl(PR_SET_TIMERSLACK, 1000UL); /* of this thread: its pauses are shorter than the usual slack */
    for (;;) {
        if (__atomic_load_n(&plan->broken, __ATOMIC_ACQUIRE))
            return BROKEN;
        if (land_ready(plan, pump, failure))
            return -1;
        if (full(plan, pump)) {
            short_pause();
            continue;
        }
        struct phos_save_record *record = at(pump, pump->under_way);
        record->taken_ns = phos_now_ns();
        int taken = phos_save_take(plan, number, &record->piece);
        if (taken == PHOS_SAVE_NOTHING_LEFT && !pump->under_way)
            return DONE;
        if (taken != PHOS_SAVE_TAKEN)
            short_pause();
        else if (begin(plan, pump, failure))
            return -1;
    }
}
