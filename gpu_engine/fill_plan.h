/* What is loaded into GPU memory next: first what a process waits for, then the rest in its order. fill_plan.py describes the
 * same structures. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct phos_chunk_table;
struct phos_window_view;

#define PHOS_HASH_BYTES 16

/* Where a place's data lies, if `descriptor` is no file's. */
#define PHOS_FILL_IN_MEMORY (-1) /* page-locked, at `source` */
#define PHOS_FILL_ZEROS (-2)
#define PHOS_FILL_ELSEWHERE (-3) /* who asks for it has to get it */

/* A chunk. */
struct phos_fill_place {
    uint64_t address; /* device memory */
    uint64_t source;  /* offset in its file, or address */
    uint32_t size;
    uint32_t chunk_bytes; /* of all but the last chunks of its block */
    int32_t descriptor;
    uint32_t block; /* its number, by which it is said whether it is mapped */
    uint32_t queue; /* whose it is */
    uint32_t zero;
    unsigned char hash[PHOS_HASH_BYTES];
};

/* What goes to one GPU. */
struct phos_fill_queue {
    const uint32_t *order; /* places */
    uint32_t count;        /* in the order */
    uint32_t next;         /* in the order, to be looked at */
    uint32_t left;         /* places that nobody has been given */
    uint32_t *asked;       /* a ring of `count` places that somebody waits for */
    uint64_t head, tail;   /* in the ring: how many have been taken out, and put in */
    uint64_t queued;       /* bytes that were queued to be copied; atomically */
};

struct phos_fill_window {
    const struct phos_window_view *view;
    uint32_t head; /* in its list of wanted chunks */
    uint32_t zero;
};

/* Of one restore. Whoever makes it initialises it with phos_fill_begin(); the memory behind its pointers is his. */
struct phos_fill_plan {
    const struct phos_fill_place *places;
    struct phos_fill_queue *queues;
    struct phos_fill_window *windows;
    struct phos_chunk_table *table; /* where it is said what has arrived, by the places' numbers; NULL: nobody looks */
    unsigned char *state;           /* of places, see below */
    uint32_t *mapped;               /* of blocks: not 0 once they are; atomically */
    uint32_t *needed;               /* of blocks that are not mapped: not 0 if something of them is due; atomically */
    uint32_t count, queue_count, window_count;
    uint32_t join_bytes; /* most in one piece, zeros apart */
    uint64_t on_demand, on_demand_bytes; /* places that went before others because a process waited for them */
    uint32_t broken;                     /* not 0: nothing of it can be had any more; atomically */
    uint32_t breathes; /* not 0: the driver needs the copy engines as well, see fill_loop.c; atomically */
    pthread_mutex_t lock; /* guards the queues, windows, state, on_demand and on_demand_bytes */
};

/* Bits of a place's state. */
#define PHOS_FILL_GIVEN 1
#define PHOS_FILL_ASKED 2 /* it is in its queue's ring, or has been */
#define PHOS_FILL_HEARD 4 /* a process has asked for it */

/* Neighbouring places that are loaded at once. */
struct phos_fill_piece {
    uint32_t first, count;
    uint64_t bytes;
    bool urgent; /* somebody waits for it */
};

enum phos_fill_taken { PHOS_FILL_TAKEN, PHOS_FILL_NOTHING_YET, PHOS_FILL_NOTHING_LEFT };

/* The next piece of a queue, which is the caller's then. NOTHING_YET: the blocks of all that is left are not mapped. */
enum phos_fill_taken phos_fill_take(struct phos_fill_plan *plan, uint32_t queue, struct phos_fill_piece *piece);
/* Whether somebody waits for something of the queue that can be had. */
bool phos_fill_asked(struct phos_fill_plan *plan, uint32_t queue);
