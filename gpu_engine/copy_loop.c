/* Copies of GPU memory into an image, piece by piece, without the interpreter: have the GPU write a piece into page-locked
 * memory, append that to a file. At 50 GB/s that is twelve thousand pieces a second, each with half a dozen calls, in as many
 * threads as there are processors; Python, which lets one thread run at a time, manages a third of it.
 *
 * A lane belongs to one thread, in which the GPU's context is current. No state but the lane's. copy_loop.py describes the
 * same structures. The driver's functions come from whoever loaded the driver: this library is not linked with it. */
#include "../frontend/clock.h"
#include "../images/append.h"
#include "../images/chunk_hash.h"
#include "copy_lane.h"
#include "copy_turns.h"
#include "cow/chunk_table.h"

#include <errno.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

struct phos_save {
    uint64_t device; /* address; 0: it is known to be zeros, and its hashes say so */
    uint64_t size;
    uint64_t place;                 /* page-locked memory of the image's, where it is to go; 0: it is appended */
    unsigned char *hashes;          /* 16 bytes for each chunk: given if `known`, else set if it is appended */
    uint64_t *places;               /* see phos_append() */
    const unsigned char *zero_tail; /* hash of zeros as long as its last chunk */
    uint32_t known;
    uint32_t chunk; /* number of its first chunk */
};

struct phos_save_job {
    struct phos_stripe *stripe;
    struct phos_chunk_table *table; /* where it is said what has been saved; NULL: nobody waits for it */
    const uint32_t *changing;       /* not 0: memory may have changed before it was copied, and what is appended is compared
                                       with its hashes; NULL: it cannot */
    const unsigned char *zero;      /* hash of a chunk of zeros */
    sem_t *permits;                 /* the caller has one; NULL: none is needed */
    struct phos_turns *turns;       /* of their GPU; NULL: copies never take turns */
    uint64_t landed_ns;             /* set: when the last piece's bytes were in host memory, CLOCK_MONOTONIC */
};

/* A piece's bytes are in host memory: from now on the device memory may change. `last`: of those with one permit. */
EXPORT void phos_copy_landed(struct phos_save_job *job, const struct phos_save *save, int last)
{
    for (uint64_t at = 0, i = 0; job->table && at < save->size; at += job->stripe->chunk, i++)
        phos_chunks_saved(job->table, (uint32_t)(save->chunk + i));
    if (!last)
        return;
    job->landed_ns = phos_now_ns();
    if (job->permits)
        sem_post(job->permits);
}

/* Returns the number of the first chunk of some data that has not the hash that it should, or -1. */
EXPORT int64_t phos_copy_compare(const unsigned char *data, uint64_t size, uint64_t chunk, const unsigned char *hashes)
{
    for (uint64_t at = 0, i = 0; at < size; at += chunk, i++) {
        uint64_t sums[2];
        phos_chunk_hash(data + at, size - at < chunk ? size - at : chunk, sums);
        if (memcmp(sums, hashes + i * PHOS_HASH_SIZE, PHOS_HASH_SIZE))
            return (int64_t)i;
    }
    return -1;
}

/* What is appended is compared before it is; what has a place, by whoever gave it (copy_check.py). */
static int compare(const struct phos_save_job *job, const struct phos_save *save, const unsigned char *data,
                   struct phos_copy_failure *failure)
{
    if (!save->device || !save->known || !job->changing || !__atomic_load_n(job->changing, __ATOMIC_ACQUIRE))
        return 0;
    int64_t number = phos_copy_compare(data, save->size, job->stripe->chunk, save->hashes);
    return number < 0 ? 0 : phos_copy_fails(failure, CHANGED, (int)number);
}

static unsigned char *target(const struct phos_copy_lane *lane, const struct phos_save *saves, uint32_t number)
{
    return saves[number].place ? (unsigned char *)(uintptr_t)saves[number].place : lane->slots[number % SLOTS];
}

/* Queue `size` bytes of a piece, and its event. */
static int fetch(struct phos_copy_lane *lane, const struct phos_save *saves, uint32_t number, uint64_t offset, uint64_t size,
                 struct phos_copy_failure *failure)
{
    int code = lane->driver->memcpy_to_host(target(lane, saves, number) + offset, saves[number].device + offset, size,
                                            lane->stream);
    if (code)
        return phos_copy_fails(failure, MEMCPY_TO_HOST, code);
    code = lane->driver->record(lane->events[number % SLOTS], lane->stream);
    return code ? phos_copy_fails(failure, RECORD, code) : 0;
}

/* The piece has landed when it returns. */
static int fetch_in_turn(struct phos_copy_lane *lane, const struct phos_save *saves, uint32_t number, struct phos_turns *turns,
                         uint64_t part, struct phos_copy_failure *failure)
{
    int code = 0;
    phos_turn_begin(turns);
    for (uint64_t at = 0, size = saves[number].size; at < size && !code; at += part) {
        code = fetch(lane, saves, number, at, size - at < part ? size - at : part, failure);
        int status = NOT_READY;
        for (unsigned spins = 0; !code && (status = lane->driver->query(lane->events[number % SLOTS])) == NOT_READY;)
            phos_turn_pause(&spins);
        if (!code && status)
            code = phos_copy_fails(failure, QUERY, status);
    }
    phos_turn_end(turns);
    return code;
}

/* Returns 1 if the piece has landed already, 0 if it is on its way. */
static int begin_save(struct phos_copy_lane *lane, const struct phos_save_job *job, const struct phos_save *saves,
                      uint32_t number, struct phos_copy_failure *failure)
{
    const struct phos_save *save = &saves[number];
    if (!save->device)
        return 0;
    uint32_t part = job->turns ? __atomic_load_n(&job->turns->part, __ATOMIC_RELAXED) : 0;
    if (part)
        return fetch_in_turn(lane, saves, number, job->turns, part, failure) ? -1 : 1;
    return fetch(lane, saves, number, 0, save->size, failure);
}

static int end_save(struct phos_copy_lane *lane, struct phos_save_job *job, const struct phos_save *saves,
                    uint32_t number, int last, struct phos_copy_failure *failure)
{
    const struct phos_save *save = &saves[number];
    const unsigned char *data = target(lane, saves, number);
    failure->number = number;
    int code = save->device ? lane->driver->wait(lane->events[number % SLOTS]) : 0;
    if (code)
        return phos_copy_fails(failure, WAIT, code);
    phos_copy_landed(job, save, last);
    if (save->place)
        return 0;
    if (compare(job, save, data, failure))
        return -1;
    code = phos_append(job->stripe, data, save->size, (int)save->known, save->hashes, save->places, job->zero,
                       save->zero_tail);
    return code ? phos_copy_fails(failure, APPENDING, code) : 0;
}

/* Copy pieces out; while one is appended the next is on its way. All are there when it returns 0; after -1 one may still be
 * under way, and what was appended is not to be counted. Nothing else may be under way with the lane's events and slots. */
EXPORT int phos_copy_save(struct phos_copy_lane *lane, struct phos_save_job *job, const struct phos_save *saves,
                          uint32_t count, struct phos_copy_failure *failure)
{
    int under_way = 0; /* the piece before */
    for (uint32_t i = 0; i < count; i++) {
        failure->number = i;
        int landed = begin_save(lane, job, saves, i, failure);
        if (landed < 0 || (under_way && end_save(lane, job, saves, i - 1, 0, failure)))
            return -1;
        under_way = !landed;
        if (landed && end_save(lane, job, saves, i, i == count - 1, failure)) /* nobody waits for the next one's turn */
            return -1;
    }
    return under_way ? end_save(lane, job, saves, count - 1, 1, failure) : 0;
}

EXPORT size_t phos_permits_size(void)
{
    return sizeof(sem_t);
}

EXPORT void phos_permits_begin(sem_t *permits, uint32_t count)
{
    sem_init(permits, 0, count);
}

EXPORT void phos_permits_take(sem_t *permits)
{
    while (sem_wait(permits) && errno == EINTR)
        ;
}

/* Answers whether there was one. */
EXPORT int phos_permits_try(sem_t *permits)
{
    int code;
    while ((code = sem_trywait(permits)) && errno == EINTR)
        ;
    return !code;
}

EXPORT void phos_permits_give(sem_t *permits)
{
    sem_post(permits);
}
