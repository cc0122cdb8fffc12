#include "deferred.h"
#include "blocks.h"
#include "cleanup.h"
#include "clock.h"
#include "host.h"
#include "quiesce.h"
#include "track.h"
#include "window.h"

#include <stdlib.h>

struct deferred {
    CUcontext context;
    uint64_t number;
    void (*release)(void *what);
    void *what;
    struct deferred *next;
};

/* Guarded by phos_memory_lock. */
static struct deferred *deferred; /* newest first */
static uint64_t ever;

uint64_t phos_deferred_ever(void)
{
    return ever;
}

bool phos_deferred_add(CUcontext context, void (*release)(void *what), void *what)
{
    struct deferred *d = malloc(sizeof *d);
    if (!d)
        return false;
    *d = (struct deferred){context, ++ever, release, what, deferred};
    deferred = d;
    return true;
}

void phos_deferred_drop(const void *what)
{
    for (struct deferred **link = &deferred; *link; link = &(*link)->next)
        if ((*link)->what == what) {
            struct deferred *d = *link;
            *link = d->next;
            free(d);
            return;
        }
}

bool phos_deferred_release(CUcontext context, uint64_t upto)
{
    bool any = false;
    PHOS_RELAXED;
    for (struct deferred **link = &deferred; *link;) {
        struct deferred *d = *link;
        if ((context && d->context != context) || d->number > upto) {
            link = &d->next;
            continue;
        }
        *link = d->next;
        d->release(d->what);
        free(d);
        any = true;
    }
    return any;
}

void phos_deferred_release_idle(CUcontext context, uint64_t upto)
{
    struct host_memory *pinned;
    phos_window_stand_still();
    {
        PHOS_MEMORY_LOCKED;
        phos_deferred_release(context, upto);
        pinned = phos_host_leaving();
    }
    phos_window_go_on();
    phos_host_unpin(pinned);
}

bool phos_deferred_in(CUcontext context)
{
    for (const struct deferred *d = deferred; d; d = d->next)
        if (d->context == context)
            return true;
    return false;
}

bool phos_deferred_settle(uint64_t timeout_ns)
{
    bool any = false;
    size_t count = 0;
    uint64_t upto = ever, end = phos_now_ns() + timeout_ns;
    PHOS_FREES struct phos_context *contexts = deferred ? phos_contexts_seen(&count) : NULL;
    for (size_t i = 0; i < count; i++) {
        CUcontext context = contexts[i].context;
        if (!phos_deferred_in(context))
            continue;
        pthread_mutex_unlock(&phos_memory_lock);
        CUresult result = phos_wait(context, end, NULL);
        phos_window_stand_still();
        pthread_mutex_lock(&phos_memory_lock);
        any |= result == CUDA_SUCCESS && phos_deferred_release(context, upto);
        struct host_memory *pinned = phos_host_leaving();
        phos_window_go_on();
        if (pinned) {
            pthread_mutex_unlock(&phos_memory_lock);
            phos_host_unpin(pinned);
            pthread_mutex_lock(&phos_memory_lock);
        }
    }
    return any;
}
