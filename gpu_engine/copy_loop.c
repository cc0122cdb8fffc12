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
#include "cow/chunk_table.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

struct phos_save {
    uint64_t device; /* address; 0: it is known to be zeros, and its hashes say so */
    uint64_t size;
    unsigned char *hashes;          /* 16 bytes for each chunk: given if `known`, else set */
    uint64_t *places;               /* see phos_append() */
    const unsigned char *zero_tail; /* hash of zeros as long as its last chunk */
    uint32_t known;
    uint32_t chunk; /* number of its first chunk */
};

struct phos_save_job {
    struct phos_stripe *stripe;
    struct phos_chunk_table *table; /* where it is said what has been saved; NULL: nobody waits for it */
    const uint32_t *changing;       /* not 0: memory may have changed before it was copied, and pieces are compared with their
                                       hashes; NULL: it cannot */
    const unsigned char *zero;      /* hash of a chunk of zeros */
    uint64_t landed_ns;             /* set: when the last piece's bytes were in host memory, CLOCK_MONOTONIC */
};

/* A piece's bytes are in host memory: from now on the device memory may change. */
static void landed(struct phos_save_job *job, const struct phos_save *save)
{
    for (uint64_t at = 0, i = 0; job->table && at < save->size; at += job->stripe->chunk, i++)
        phos_chunks_saved(job->table, (uint32_t)(save->chunk + i));
    job->landed_ns = phos_now_ns();
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

static int compare(const struct phos_save_job *job, const struct phos_save *save, const unsigned char *data,
                   struct phos_copy_failure *failure)
{
    if (!save->device || !save->known || !job->changing || !__atomic_load_n(job->changing, __ATOMIC_ACQUIRE))
        return 0;
    int64_t number = phos_copy_compare(data, save->size, job->stripe->chunk, save->hashes);
    return number < 0 ? 0 : phos_copy_fails(failure, CHANGED, (int)number);
}

static int begin_save(struct phos_copy_lane *lane, const struct phos_save *save, uint32_t number,
                      struct phos_copy_failure *failure)
{
    if (!save->device)
        return 0;
    int code = lane->driver->memcpy_to_host(lane->slots[number % SLOTS], save->device, save->size, lane->stream);
    if (code)
        return phos_copy_fails(failure, MEMCPY_TO_HOST, code);
    code = lane->driver->record(lane->events[number % SLOTS], lane->stream);
    return code ? phos_copy_fails(failure, RECORD, code) : 0;
}

static int end_save(struct phos_copy_lane *lane, struct phos_save_job *job, const struct phos_save *save, uint32_t number,
                    struct phos_copy_failure *failure)
{
    const unsigned char *data = lane->slots[number % SLOTS];
    failure->number = number;
    int code = save->device ? lane->driver->wait(lane->events[number % SLOTS]) : 0;
    if (code)
        return phos_copy_fails(failure, WAIT, code);
    landed(job, save);
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
    for (uint32_t i = 0; i < count; i++) {
        failure->number = i;
        if (begin_save(lane, &saves[i], i, failure) || (i && end_save(lane, job, &saves[i - 1], i - 1, failure)))
            return -1;
    }
    return count ? end_save(lane, job, &saves[count - 1], count - 1, failure) : 0;
}
