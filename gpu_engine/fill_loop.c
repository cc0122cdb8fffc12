/* Filling GPU memory: a worker's part of it, without the interpreter. It takes pieces from a plan, reads them into page-locked
 * memory (those that do not lie there), has the GPU fetch them, and hash them where they have arrived; only then they count.
 *
 * All copies to a GPU are in one stream, and each worker's hashes in its own. While the driver saves processes or brings
 * them back (engine_turns.py), the copies wait for a hash now and then: the driver copies as well, with the same engine, and
 * as long as that has something queued, from whatever stream, others get it once a millisecond. A context comes back in
 * 0.38 s beside copies that leave the engine free for a moment after each 16 MiB, and in 0.72 s beside such that do not (an
 * H100, bench/copy_load.py).
 *
 * A worker belongs to one thread, in which the GPU's context is current. No state but the worker's and the plan's. fill_plan.py
 * describes the same structures. */
#include "../frontend/clock.h"
#include "copy_lane.h"
#include "cow/chunk_table.h"
#include "fill_plan.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* So much is copied from one moment to the next in which the copy engine is free. */
#define BREATH_BYTES (16u << 20)

/* What one slot has under way. */
struct phos_fill_load {
    uint32_t first, count; /* places; 0 of them: nothing is under way */
    uint64_t bytes;
    uint32_t hashed, zero;
};

/* What became of a piece, for who wants to know (copy_trace.py); CLOCK_MONOTONIC. */
struct phos_fill_step {
    uint64_t asked_ns, taken_ns, queued_ns;
    uint64_t bytes;
    int32_t descriptor; /* of its first place */
    uint32_t urgent;
};

/* A worker's use of one GPU. */
struct phos_fill_worker {
    struct phos_copy_lane lane;
    struct phos_copy_lane copies; /* of all workers, but for its events */
    struct phos_fill_load loads[SLOTS];
    void *hash_kernel;           /* phos_arrival_hash of content_hash.cu; NULL: nothing is hashed */
    uint64_t rooms[SLOTS];       /* device memory that it works at */
    unsigned char *sums[SLOTS];  /* page-locked, where the hashes come */
    uint32_t span_bytes, threads; /* SPAN and THREADS of content_hash.cu */
    uint32_t turn;               /* the slot that is used next */
    uint32_t steps_most;         /* room for steps; 0: nobody wants to know */
    struct phos_fill_step *steps;
    uint32_t steps_made;         /* since the call began */
    uint32_t place;              /* ELSEWHERE: the one to be got, into the slot that is used next */
    uint32_t urgent, zero;       /* somebody waits for it */
    uint64_t arrived;            /* bytes, since the call began */
    uint64_t asked_ns;
};

/* Why phos_fill() has returned; -1: something failed. */
enum { OUT_OF_TIME, NOTHING_YET, NOTHING_LEFT, ELSEWHERE, BROKEN };

/* ---- what has landed ---- */

static int confirm(struct phos_fill_plan *plan, struct phos_fill_worker *worker, unsigned slot,
                   struct phos_copy_failure *failure)
{
    struct phos_fill_load *load = &worker->loads[slot];
    for (uint32_t i = 0; load->hashed && i < load->count; i++)
        if (memcmp(worker->sums[slot] + i * PHOS_HASH_BYTES, plan->places[load->first + i].hash, PHOS_HASH_BYTES)) {
            failure->number = load->first + i;
            return phos_copy_fails(failure, CHANGED, 0);
        }
    for (uint32_t i = 0; plan->table && i < load->count; i++)
        phos_chunks_saved(plan->table, load->first + i);
    worker->arrived += load->bytes;
    load->count = 0;
    return 0;
}

static int land(struct phos_fill_plan *plan, struct phos_fill_worker *worker, unsigned slot, struct phos_copy_failure *failure)
{
    if (!worker->loads[slot].count)
        return 0;
    int code = worker->lane.driver->wait(worker->lane.events[slot]);
    return code ? phos_copy_fails(failure, WAIT, code) : confirm(plan, worker, slot, failure);
}

/* The slots are used in turns, so the one that is used next has been under way for longest. */
static int land_all(struct phos_fill_plan *plan, struct phos_fill_worker *worker, struct phos_copy_failure *failure)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (land(plan, worker, (worker->turn + i) % SLOTS, failure))
            return -1;
    return 0;
}

/* What has landed by now need not wait until its slot is wanted. */
static int land_ready(struct phos_fill_plan *plan, struct phos_fill_worker *worker, struct phos_copy_failure *failure)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        unsigned slot = (worker->turn + i) % SLOTS;
        if (!worker->loads[slot].count)
            continue;
        int code = worker->lane.driver->query(worker->lane.events[slot]);
        if (code == NOT_READY)
            return 0;
        if (code)
            return phos_copy_fails(failure, QUERY, code);
        if (confirm(plan, worker, slot, failure))
            return -1;
    }
    return 0;
}

/* ---- queueing ---- */

static int read_piece(const struct phos_fill_place *places, const struct phos_fill_piece *piece, unsigned char *to,
                      struct phos_copy_failure *failure)
{
    const struct phos_fill_place *place = &places[piece->first];
    for (uint64_t done = 0; done < piece->bytes;) {
        ssize_t count = pread(place->descriptor, to + done, piece->bytes - done, (off_t)(place->source + done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            failure->number = piece->first + (uint32_t)(done / place->chunk_bytes);
            return phos_copy_fails(failure, READING, count < 0 ? errno : 0);
        }
        done += (uint64_t)count;
    }
    return 0;
}

static int hash(struct phos_fill_worker *worker, unsigned slot, const struct phos_fill_place *place, uint64_t bytes,
                struct phos_copy_failure *failure)
{
    uint64_t memory = place->address, chunk_bytes = place->chunk_bytes, room = worker->rooms[slot];
    void *sums = worker->sums[slot], *parameters[] = {&memory, &chunk_bytes, &room, &sums};
    int code = worker->lane.driver->launch(worker->hash_kernel, (unsigned)(bytes / worker->span_bytes), 1, 1, worker->threads, 1,
                                           1, 0, worker->lane.stream, parameters, NULL);
    return code ? phos_copy_fails(failure, LAUNCH, code) : 0;
}

/* To come from `host`; all that follows in the worker's stream comes after it. */
static int copy(struct phos_fill_worker *worker, unsigned slot, const struct phos_fill_place *place, uint64_t bytes,
                const void *host, struct phos_copy_failure *failure)
{
    const struct phos_copy_driver *driver = worker->lane.driver;
    int code = driver->memcpy_to_device(place->address, host, bytes, worker->copies.stream);
    if (code)
        return phos_copy_fails(failure, MEMCPY_TO_DEVICE, code);
    if ((code = driver->record(worker->copies.events[slot], worker->copies.stream)))
        return phos_copy_fails(failure, RECORD, code);
    code = driver->stream_wait(worker->lane.stream, worker->copies.events[slot], 0);
    return code ? phos_copy_fails(failure, STREAM_WAIT, code) : 0;
}

/* So many bytes have been queued to be copied, and what is in this slot comes after them. */
static int breathe(struct phos_fill_plan *plan, struct phos_fill_worker *worker, uint32_t number, unsigned slot, uint64_t bytes,
                   struct phos_copy_failure *failure)
{
    uint64_t before = __atomic_fetch_add(&plan->queues[number].queued, bytes, __ATOMIC_RELAXED);
    if (before / BREATH_BYTES == (before + bytes) / BREATH_BYTES || !__atomic_load_n(&plan->breathes, __ATOMIC_RELAXED))
        return 0;
    int code = worker->lane.driver->stream_wait(worker->copies.stream, worker->lane.events[slot], 0);
    return code ? phos_copy_fails(failure, STREAM_WAIT, code) : 0;
}

/* The slot has nothing under way; `host`: where the data is, NULL: zeros. */
static int queue(struct phos_fill_plan *plan, struct phos_fill_worker *worker, const struct phos_fill_piece *piece,
                 const void *host, struct phos_copy_failure *failure)
{
    const struct phos_copy_driver *driver = worker->lane.driver;
    const struct phos_fill_place *place = &plan->places[piece->first];
    unsigned slot = worker->turn;
    int code = 0;
    if (host && copy(worker, slot, place, piece->bytes, host, failure))
        return -1;
    if (!host && (code = driver->memset_8(place->address, 0, piece->bytes, worker->lane.stream)))
        return phos_copy_fails(failure, MEMSET, code);
    uint32_t hashed = host && worker->hash_kernel;
    if (hashed && hash(worker, slot, place, piece->bytes, failure))
        return -1;
    if ((code = driver->record(worker->lane.events[slot], worker->lane.stream)))
        return phos_copy_fails(failure, RECORD, code);
    if (hashed && breathe(plan, worker, place->queue, slot, piece->bytes, failure))
        return -1;
    worker->loads[slot] = (struct phos_fill_load){piece->first, piece->count, piece->bytes, hashed, 0};
    worker->turn = (slot + 1) % SLOTS;
    return 0;
}

static void note(struct phos_fill_plan *plan, struct phos_fill_worker *worker, const struct phos_fill_piece *piece,
                 uint64_t taken_ns)
{
    if (worker->steps_made < worker->steps_most)
        worker->steps[worker->steps_made++] =
            (struct phos_fill_step){worker->asked_ns, taken_ns, phos_now_ns(), piece->bytes,
                                    plan->places[piece->first].descriptor, piece->urgent};
}

/* A piece has been taken, and its slot is free. */
static int load(struct phos_fill_plan *plan, struct phos_fill_worker *worker, const struct phos_fill_piece *piece,
                struct phos_copy_failure *failure)
{
    const struct phos_fill_place *place = &plan->places[piece->first];
    uint64_t taken_ns = worker->steps_most ? phos_now_ns() : 0;
    const void *host = NULL;
    if (place->descriptor == PHOS_FILL_IN_MEMORY)
        host = (const void *)(uintptr_t)place->source;
    else if (place->descriptor >= 0) {
        host = worker->lane.slots[worker->turn];
        if (read_piece(plan->places, piece, worker->lane.slots[worker->turn], failure))
            return -1;
    }
    if (queue(plan, worker, piece, host, failure))
        return -1;
    note(plan, worker, piece, taken_ns);
    return 0;
}

/* What somebody waits for is not left under way while there is nothing else to be read. */
static int after(struct phos_fill_plan *plan, struct phos_fill_worker *worker, uint32_t number, bool urgent,
                 struct phos_copy_failure *failure)
{
    if (urgent && !phos_fill_asked(plan, number))
        return land_all(plan, worker, failure);
    return land_ready(plan, worker, failure);
}

/* ---- for Python ---- */

EXPORT uint64_t phos_fill_worker_size(void)
{
    return sizeof(struct phos_fill_worker);
}

/* Load from a queue for about so long. NOTHING_YET, NOTHING_LEFT: what was taken has landed. ELSEWHERE: put that place's data
 * into the slot whose turn it is, and call phos_fill_got(). Otherwise something may be under way. */
EXPORT int phos_fill(struct phos_fill_plan *plan, struct phos_fill_worker *worker, uint32_t number, uint64_t limit_ns,
                     struct phos_copy_failure *failure)
{
    uint64_t end = phos_now_ns() + limit_ns;
    worker->arrived = worker->steps_made = 0;
    do {
        struct phos_fill_piece piece;
        if (__atomic_load_n(&plan->broken, __ATOMIC_ACQUIRE))
            return BROKEN;
        if (worker->steps_most && worker->steps_made == worker->steps_most)
            return OUT_OF_TIME;
        if (worker->steps_most)
            worker->asked_ns = phos_now_ns();
        /* Before a piece is taken, so that nobody waits for one that nobody is at. */
        if (land(plan, worker, worker->turn, failure))
            return -1;
        enum phos_fill_taken taken = phos_fill_take(plan, number, &piece);
        if (taken != PHOS_FILL_TAKEN)
            return land_all(plan, worker, failure) ? -1 : taken == PHOS_FILL_NOTHING_YET ? NOTHING_YET : NOTHING_LEFT;
        if (plan->places[piece.first].descriptor == PHOS_FILL_ELSEWHERE) {
            worker->place = piece.first;
            worker->urgent = piece.urgent;
            return ELSEWHERE;
        }
        if (load(plan, worker, &piece, failure) || after(plan, worker, number, piece.urgent, failure))
            return -1;
    } while (phos_now_ns() < end);
    return OUT_OF_TIME;
}

/* What was ELSEWHERE lies in the slot now. */
EXPORT int phos_fill_got(struct phos_fill_plan *plan, struct phos_fill_worker *worker, uint32_t number,
                         struct phos_copy_failure *failure)
{
    const struct phos_fill_place *place = &plan->places[worker->place];
    struct phos_fill_piece piece = {.first = worker->place, .count = 1, .bytes = place->size, .urgent = worker->urgent};
    worker->arrived = worker->steps_made = 0;
    if (queue(plan, worker, &piece, worker->lane.slots[worker->turn], failure))
        return -1;
    note(plan, worker, &piece, worker->asked_ns);
    return after(plan, worker, number, piece.urgent, failure);
}

/* Return when all that the worker has under way has landed. */
EXPORT int phos_fill_land(struct phos_fill_plan *plan, struct phos_fill_worker *worker, struct phos_copy_failure *failure)
{
    worker->arrived = worker->steps_made = 0;
    return land_all(plan, worker, failure);
}
