/* Descriptors that the frontend holds for a while: of memory on its way to phosd and back, of what else comes with phosd's
 * packets, and the sockets themselves. A child that a thread of the program forks meanwhile has them as well, and would keep
 * memory or a connection alive for as long as it lives: it closes them. So each is noted in the same breath as it is made, and forgotten as it is closed; a
 * fork waits for the end of that. */
#pragma once

void phos_held_lock(void);
void phos_held_unlock(void);
/* With the lock. */
void phos_held_note(int descriptor);
/* With the lock: it has another number now. */
void phos_held_moved(int descriptor, int now);
/* Takes the lock. */
void phos_held_close(int descriptor);

/* The three halves of a fork. */
void phos_held_forking(void);
void phos_held_parent(void);
void phos_held_child(void);

static inline void phos_cleanup_held(int *descriptor)
{
    if (*descriptor >= 0)
        phos_held_close(*descriptor);
}
#define PHOS_CLOSES_HELD __attribute__((cleanup(phos_cleanup_held)))
