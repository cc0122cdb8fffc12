/* What exists besides memory: contexts, stream captures, and what the driver itself has to save. */
#pragma once
#include "phos_api.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Streams being captured now, or about to be. A capture begins with the lock held for writing, so that whoever holds it for
 * reading and sees none can do what a capture would not survive; but it waits for a tenth of a second at most. Nothing
 * else is locked under it. */
extern pthread_rwlock_t phos_capture_lock;
extern _Atomic int phos_capture_count;
static inline int phos_captures(void)
{
    return atomic_load_explicit(&phos_capture_count, memory_order_relaxed);
}

struct phos_context {
    CUcontext context;
    CUdevice device;
    CUcontext whole;     /* of a green context: its device's primary one; else NULL */
    unsigned attached;   /* cuCtxAttach calls that cuCtxDetach has not undone */
    size_t stack_limit;  /* while detached with reduced limits: what to put back */
    bool stack_reduced;
};

void phos_context_seen(CUcontext context, CUdevice device);
/* In a child: another thread may have held a lock. */
void phos_track_forked(void);
/* The driver lets one that was destroyed be made current, answers most calls with it, and crashes at cuCtxGetDevice, for one,
 * and at any with a stream or an event of it (580.159.04, H100). A primary context that is not active does not live either. */
bool phos_context_lives(CUcontext context);
/* The device of one that calls have shown; -1: none such. And how many of those a device has. */
CUdevice phos_context_device(CUcontext context);
size_t phos_contexts_on(CUdevice device);
/* The device of any living context; -1: it cannot be had. */
CUdevice phos_context_any_device(CUcontext context);
/* The one that owns what is made in a context: a green context owns no memory, its device's primary one does. */
CUcontext phos_context_whole(CUcontext context);
/* Taken before any other lock of ours, by who takes or lets go of a primary context: what is let go of for the last time is
 * forgotten before it is taken anew, and nobody holds one in passing when the application lets go. */
extern pthread_mutex_t phos_primary_lock;
/* A device's primary context, if it is active. */
bool phos_primary_of(CUdevice device, CUcontext *primary);
/* Notes a cuCtxAttach, or undoes one; false: there is none to undo. */
bool phos_context_attach(CUcontext context, bool undo);
/* The context that a stream is in, and its device; of a default stream the current ones. */
bool phos_stream_context(CUstream stream, CUcontext *context, CUdevice *device);
/* A copy of the list of live contexts, primary ones that were made behind our back included, and without those that ended
 * there; to be freed. */
struct phos_context *phos_contexts(size_t *count);
/* Likewise, but only those that calls have shown: any thread. */
struct phos_context *phos_contexts_seen(size_t *count);

/* What the frontend cannot carry: totals by kind. */
enum phos_uncarried {
    PHOS_UNCARRIED_MANAGED,
    PHOS_UNCARRIED_ARRAY,
    PHOS_UNCARRIED_GRAPH_MEMORY,
    PHOS_UNCARRIED_MULTICAST,
    PHOS_UNCARRIED_EXTERNAL,
    PHOS_UNCARRIED_DEVICE,
    PHOS_UNCARRIED_VMM,
    PHOS_UNCARRIED_HOST_VMM,
    PHOS_UNCARRIED_HOST,
    PHOS_UNCARRIED_POOL,
    PHOS_UNCARRIED_IPC,
    PHOS_UNCARRIED_IPC_EVENT,
    PHOS_UNCARRIED_ENDPOINT,
    PHOS_UNCARRIED_KINDS
};
extern const char *const phos_uncarried_names[PHOS_UNCARRIED_KINDS];
void phos_uncarried_add(enum phos_uncarried kind, int64_t count, int64_t bytes);
/* Memory that the driver has given out or taken, which counts until it is freed or, other than a pool's, its context ends; arrays
 * go by their handles. Who frees it takes it out of the record before, as its address may be anything's right afterwards, and
 * says what came of it. */
struct phos_uncarried_memory;
void phos_uncarried_made(enum phos_uncarried kind, uint64_t address, size_t bytes);
struct phos_uncarried_memory *phos_uncarried_take(uint64_t address); /* NULL: there is none */
CUresult phos_uncarried_freed(struct phos_uncarried_memory *memory, CUresult result);
void phos_uncarried_context_ends(CUcontext context);
void phos_uncarried_get(enum phos_uncarried kind, uint64_t *count, uint64_t *bytes);
/* A number that grows whenever a total changes. */
uint64_t phos_uncarried_version(void);
