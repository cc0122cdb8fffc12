/* Copies between an image and GPU memory, piece by piece, without the interpreter. Out: have the GPU write a piece into
 * page-locked memory, append that to a file. In: read a piece of a file, have the GPU fetch it, have it hashed where it has
 * arrived. At 50 GB/s that is twelve thousand pieces a second, each with half a dozen calls, in as many threads as there are
 * processors; Python, which lets one thread run at a time, manages a third of it.
 *
 * A lane belongs to one thread, in which the GPU's context is current. No state but the lane's. copy_loop.py describes the
 * same structures. The driver's functions come from whoever loaded the driver: this library is not linked with it. */
#include "../frontend/clock.h"
#include "../images/append.h"
#include "../images/chunk_hash.h"
#include "copy_turns.h"
#include "cow/chunk_table.h"

#include <errno.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define SLOTS 2

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

/* CUDA driver API documentation; handles are opaque here, and device addresses 64 bits wide. */
struct phos_copy_driver {
    int (*memcpy_to_device)(uint64_t device, const void *host, size_t size, void *stream);
    int (*memcpy_to_host)(void *host, uint64_t device, size_t size, void *stream);
    int (*memset_8)(uint64_t device, unsigned char value, size_t size, void *stream);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra);
    int (*record)(void *event, void *stream);
    int (*wait)(void *event);
    int (*synchronise)(void *stream);
    int (*query)(void *event);
};

struct phos_copy_lane {
    const struct phos_copy_driver *driver;
    void *stream;
    void *events[SLOTS];
    unsigned char *slots[SLOTS]; /* page-locked */
    uint64_t marks[SLOTS];       /* how many loads have landed once the slot's event has been reached; 0: nothing is under way */
    uint64_t queued;             /* loads, since the lane was made */
    uint64_t landed;             /* of them; they land in their order */
};

/* What a load's data is. */
enum { ZEROS, HOST, IN_FILE };

struct phos_load {
    uint64_t device; /* address */
    uint64_t size;
    uint64_t host;      /* HOST: page-locked memory that it lies in */
    uint64_t offset;    /* IN_FILE: it lies in `descriptor` there, and is no larger than a slot */
    int32_t descriptor;
    uint32_t kind;
    void *hash_kernel;  /* what hashes it where it has arrived (content_hash.cu); NULL: nothing does */
    uint64_t room;      /* device memory that it works at */
    void *hashes;       /* page-locked, where they come then */
    uint32_t hash_grid, hash_block;
    uint64_t chunk_bytes;
};

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

/* What went wrong, besides the status. */
enum { READING = 1, APPENDING, CHANGED, MEMCPY_TO_DEVICE, MEMCPY_TO_HOST, MEMSET, LAUNCH, RECORD, WAIT, SYNCHRONISE, QUERY };

struct phos_copy_failure {
    uint32_t call;
    int32_t code;    /* READING: an errno, or 0 at the file's end. APPENDING: an errno. CHANGED: the chunk's number in its
                        piece. Else the driver's status */
    uint32_t number; /* of the piece, in what was given */
};

static int fails(struct phos_copy_failure *failure, uint32_t call, int code)
{
    failure->call = call;
    failure->code = code;
    return -1;
}

static int land(struct phos_copy_lane *lane, unsigned slot, struct phos_copy_failure *failure)
{
    if (!lane->marks[slot])
        return 0;
    int code = lane->driver->wait(lane->events[slot]);
    if (code)
        return fails(failure, WAIT, code);
    if (lane->marks[slot] > lane->landed)
        lane->landed = lane->marks[slot];
    lane->marks[slot] = 0;
    return 0;
}

static int fill_slot(const struct phos_load *load, unsigned char *slot, struct phos_copy_failure *failure)
{
    for (uint64_t done = 0; done < load->size;) {
        ssize_t count = pread(load->descriptor, slot + done, load->size - done, (off_t)(load->offset + done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return fails(failure, READING, count < 0 ? errno : 0);
        done += (uint64_t)count;
    }
    return 0;
}

static int hash(const struct phos_copy_lane *lane, const struct phos_load *load, struct phos_copy_failure *failure)
{
    uint64_t memory = load->device, chunk_bytes = load->chunk_bytes, room = load->room;
    void *hashes = load->hashes, *parameters[] = {&memory, &chunk_bytes, &room, &hashes};
    int code = lane->driver->launch(load->hash_kernel, load->hash_grid, 1, 1, load->hash_block, 1, 1, 0, lane->stream,
                                    parameters, NULL);
    return code ? fails(failure, LAUNCH, code) : 0;
}

static int queue(struct phos_copy_lane *lane, const struct phos_load *load, struct phos_copy_failure *failure)
{
    const struct phos_copy_driver *driver = lane->driver;
    unsigned slot = lane->queued % SLOTS;
    if (land(lane, slot, failure))
        return -1;
    int code;
    if (load->kind == ZEROS) {
        code = driver->memset_8(load->device, 0, load->size, lane->stream);
        if (code)
            return fails(failure, MEMSET, code);
    } else {
        const void *host = (const void *)(uintptr_t)load->host;
        if (load->kind == IN_FILE) {
            if (fill_slot(load, lane->slots[slot], failure))
                return -1;
            host = lane->slots[slot];
        }
        code = driver->memcpy_to_device(load->device, host, load->size, lane->stream);
        if (code)
            return fails(failure, MEMCPY_TO_DEVICE, code);
        if (load->hash_kernel && hash(lane, load, failure))
            return -1;
    }
    code = driver->record(lane->events[slot], lane->stream);
    if (code)
        return fails(failure, RECORD, code);
    lane->marks[slot] = ++lane->queued;
    return 0;
}

/* Queue loads; the last ones may still be under way when it returns. Returns 0, or -1 and what failed. */
EXPORT int phos_copy_load(struct phos_copy_lane *lane, const struct phos_load *loads, uint32_t count,
                          struct phos_copy_failure *failure)
{
    for (failure->number = 0; failure->number < count; failure->number++)
        if (queue(lane, &loads[failure->number], failure))
            return -1;
    return 0;
}

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
    return number < 0 ? 0 : fails(failure, CHANGED, (int)number);
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
        return fails(failure, MEMCPY_TO_HOST, code);
    code = lane->driver->record(lane->events[number % SLOTS], lane->stream);
    return code ? fails(failure, RECORD, code) : 0;
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
            code = fails(failure, QUERY, status);
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
        return fails(failure, WAIT, code);
    phos_copy_landed(job, save, last);
    if (save->place)
        return 0;
    if (compare(job, save, data, failure))
        return -1;
    code = phos_append(job->stripe, data, save->size, (int)save->known, save->hashes, save->places, job->zero,
                       save->zero_tail);
    return code ? fails(failure, APPENDING, code) : 0;
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

/* Return when all that was queued has landed. */
EXPORT int phos_copy_wait(struct phos_copy_lane *lane, struct phos_copy_failure *failure)
{
    int code = lane->driver->synchronise(lane->stream);
    if (code)
        return fails(failure, SYNCHRONISE, code);
    for (unsigned slot = 0; slot < SLOTS; slot++)
        lane->marks[slot] = 0;
    lane->landed = lane->queued;
    return 0;
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
