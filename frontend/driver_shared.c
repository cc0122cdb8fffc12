/* See driver_shared.h. */
#include "driver_shared.h"
#include "cleanup.h"
#include "memory.h"
#include "track.h"

#include <stdlib.h>

struct shared {
    struct shared *next;
    enum phos_shared kind;
    uint64_t key;
    CUcontext context;
    unsigned count;
};

/* Guarded by phos_memory_lock. */
static struct shared *all;
static bool forgotten; /* for want of host memory: perhaps shared, for ever */

static struct shared **find(enum phos_shared kind, uint64_t key)
{
    struct shared **link = &all;
    while (*link && ((*link)->kind != kind || (*link)->key != key))
        link = &(*link)->next;
    return link;
}

static void count(enum phos_shared kind, int64_t change)
{
    if (kind != PHOS_SHARED_POINTER && kind != PHOS_SHARED_ENDPOINT)
        phos_uncarried_add(kind == PHOS_SHARED_POOL ? PHOS_UNCARRIED_POOL : PHOS_UNCARRIED_IPC, change, 0);
}

static void end(struct shared **link)
{
    struct shared *shared = *link;
    *link = shared->next;
    count(shared->kind, -1);
    free(shared);
}

void phos_driver_shared_add(enum phos_shared kind, uint64_t key, CUcontext context)
{
    struct shared *shared = *find(kind, key);
    if (shared) {
        shared->count += kind == PHOS_SHARED_OPENED;
        return;
    }
    count(kind, 1);
    shared = malloc(sizeof *shared);
    if (!shared) {
        forgotten = true;
        return;
    }
    *shared = (struct shared){all, kind, key, context, 1};
    all = shared;
}

bool phos_driver_shared_drop(enum phos_shared kind, uint64_t key)
{
    struct shared **link = find(kind, key);
    if (!*link)
        return false;
    if (!--(*link)->count)
        end(link);
    return true;
}

void phos_driver_shared_context_ends(CUcontext context)
{
    for (struct shared **link = &all; *link;)
        if (context && (*link)->context == context)
            end(link);
        else
            link = &(*link)->next;
}

CUresult phos_driver_shared_free(CUdeviceptr address, CUresult (*call)(CUdeviceptr_v2))
{
    bool exported = false, pointer = false;
    CUcontext context = NULL;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct shared *shared = *find(PHOS_SHARED_EXPORTED, address);
        context = shared ? shared->context : NULL;
        exported = phos_driver_shared_drop(PHOS_SHARED_EXPORTED, address);
        pointer = phos_driver_shared_drop(PHOS_SHARED_POINTER, address);
    }
    CUresult result = call(address); /* not under the lock: the driver waits for the device */
    if (result != CUDA_SUCCESS && (exported || pointer)) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(exported ? PHOS_SHARED_EXPORTED : PHOS_SHARED_POINTER, address, context);
    }
    return result;
}

bool phos_driver_shared(void)
{
    return all || forgotten;
}
