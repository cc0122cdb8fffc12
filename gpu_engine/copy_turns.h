/* Copies to the host that leave the copy engine to others again and again.
 *
 * What the driver does for an application that comes back, setting up page tables for example, needs the engine that copies
 * to the host, and gets it when that has nothing to do, or after a millisecond: as long as anything is queued, however
 * small, 397 blocks take 0.4 s to be mapped instead of 0.02, and a context a third longer to come back (an H100,
 * bench/copy_load.py). So, while it matters, one small part of a copy is under way at a time, and the next one is queued
 * when that has landed: 40 GB/s still, and the engine is free every 40 microseconds. */
#pragma once

#include <sched.h>
#include <stdint.h>
#include <time.h>

#define PHOS_TURN_SPINS 200

#define PHOS_TURN_AWAKE 2 /* so many wait without sleeping: to be woken may take as long as a small piece */

#define PHOS_TURN_SLEEP_NS 200000 /* half of what a piece of 16 MiB takes */

/* Of one checkpoint's copies on one GPU. copy_loop.py describes the same structure. All are accessed atomically. */
struct phos_turns {
    uint32_t part; /* bytes under way at a time; 0: copies do not take turns */
    uint32_t next; /* the ticket of who comes next */
    uint32_t served; /* the ticket of who copies */
};

static inline void phos_turn_pause(unsigned *spins)
{
    if (++*spins < PHOS_TURN_SPINS)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        ;
#endif
    else
        sched_yield();
}

/* Wait until nobody else copies. */
static inline void phos_turn_begin(struct phos_turns *turns)
{
    uint32_t mine = __atomic_fetch_add(&turns->next, 1, __ATOMIC_RELAXED), before;
    for (unsigned spins = 0; (before = mine - __atomic_load_n(&turns->served, __ATOMIC_ACQUIRE));) {
        if (before > PHOS_TURN_AWAKE)
            nanosleep(&(struct timespec){0, PHOS_TURN_SLEEP_NS}, NULL);
        else
            phos_turn_pause(&spins);
    }
}

static inline void phos_turn_end(struct phos_turns *turns)
{
    __atomic_fetch_add(&turns->served, 1, __ATOMIC_RELEASE);
}
