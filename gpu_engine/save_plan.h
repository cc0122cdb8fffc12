/* Which GPU memory is saved next: first what a process waits for, then what processes have copied aside, then the rest in
 * its order. save_plan.py describes the same structures. */
#pragma once

#include "cow/chunk_table.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define PHOS_SAVE_IN_PLACE UINT32_MAX /* instead of a shadow slot */

/* A chunk. */
struct phos_save_place {
    uint64_t address; /* device memory; 0: it is known to be zeros, and nothing is copied */
    uint32_t size;
    uint32_t block; /* its number: those of one follow each other */
    uint32_t queue; /* whose memory it is in */
    uint32_t zero;
};

/* A copy that a process has made, or (slot PHOS_SAVE_IN_PLACE) a chunk that it let go of unchanged. */
struct phos_save_made {
    uint64_t address;
    uint32_t chunk;
    uint32_t slot; /* as the chunk's state says it, without PHOS_CHUNK_SHADOWED */
};

/* What is copied by one GPU. All but the order's memory is guarded by the plan's lock. */
struct phos_save_queue {
    const uint32_t *order; /* its chunks */
    uint32_t count;
    uint32_t next;               /* in the order, to be looked at */
    uint32_t left;               /* of them, those that nobody has been given */
    uint32_t zero;
    uint32_t *asked;             /* a ring of chunks that a process waits for; of as many as the plan has, like `made` */
    struct phos_save_made *made; /* a ring of what can be had now; it may lie on another GPU than its chunk */
    uint64_t asked_head, asked_tail, made_head, made_tail;
};

struct phos_save_window {
    const struct phos_window_view *view;
    uint32_t head; /* in its list of wanted chunks */
    uint32_t dead; /* its process has ended; atomically */
};

/* A shadow pool, as far as it tells of a process's own transfers. */
struct phos_save_pool {
    const uint32_t *flags; /* as last read */
    uint32_t window, number, slots;
    uint32_t zero;
};

/* Of one checkpoint. Whoever makes it initialises it with phos_save_begin(); the memory behind its pointers is his. */
struct phos_save_plan {
    const struct phos_save_place *places;
    struct phos_save_queue *queues;
    struct phos_save_window *windows;
    struct phos_save_pool *pools;
    struct phos_chunk_table *table; /* where it is said what has been saved; NULL: nobody looks */
    unsigned char *state;           /* of chunks, see below */
    uint32_t *owed;                 /* a ring of chunks that processes have taken: where they are is to be found out */
    uint64_t owed_head, owed_tail;
    uint32_t count, queue_count, window_count, pool_count;
    uint32_t left;    /* chunks that nobody has been given */
    uint32_t pending; /* chunks that are owed, or made and not taken */
    uint32_t join_bytes, zeros_at_once; /* most in one piece */
    uint32_t prioritise;                /* the applications' own transfers go first */
    uint32_t asked;    /* only newer flags can tell of some transfer; atomically */
    uint32_t changing; /* from now on memory may have changed before it was saved; atomically */
    uint32_t part;     /* bytes under way at a time, because others need the copy engine as well; 0: no matter; atomically */
    uint32_t broken;   /* not 0: nothing of it is wanted any more; atomically */
    uint32_t in_turns; /* pieces that were copied by parts; atomically */
    uint64_t aside_ns, again_ns; /* how long copies step aside at a stretch, and how long they then go all the same */
    uint64_t aside_since, aside_again;
    /* Page-locked memory of the image's, where pieces are put one behind the other; none lies across a multiple of `segment`. */
    uint64_t room, room_size, segment, room_end;
    uint64_t landed;     /* bytes that are in host memory; atomically */
    uint64_t hold_until; /* CLOCK_MONOTONIC: until then only what processes have asked for is given; atomically */
    pthread_mutex_t lock; /* guards all that is not said to be atomic or constant */
};

/* Bits of a chunk's state. */
#define PHOS_SAVE_GIVEN 1
#define PHOS_SAVE_PENDING 2

/* Chunks of one block that are copied at once. */
struct phos_save_piece {
    uint64_t address; /* 0: zeros */
    uint64_t bytes;
    uint32_t first, count;
    uint32_t slot;
    uint32_t urgent; /* somebody waits for it */
};

enum phos_save_taken { PHOS_SAVE_TAKEN, PHOS_SAVE_NOTHING_YET, PHOS_SAVE_NOTHING_LEFT };

/* The next piece for a queue, which is the caller's then. NOTHING_LEFT: no queue will have any more. */
int phos_save_take(struct phos_save_plan *plan, uint32_t queue, struct phos_save_piece *piece);
/* A piece's bytes are in host memory: anybody may write where they were. Answers whether that may have happened before. */
int phos_save_landed(struct phos_save_plan *plan, const struct phos_save_piece *piece);
/* An address in the image's memory for a piece; 0: there is no room left. */
uint64_t phos_save_room(struct phos_save_plan *plan, uint64_t bytes);
