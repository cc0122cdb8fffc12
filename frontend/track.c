/* Contexts, peers, captures: which there are, and the calls that make them. context_ends.c has those that end contexts. */
#include "track.h"
#include "twins.h"
#include "window.h"
#include "cleanup.h"
#include "log.h"
#include "memory.h"
#include "parts.h"
#include "runtime.h"
#include "sync_memops.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

_Atomic int phos_capture_count;
/* Writers first: a storm of frees must not keep a capture from beginning. */
pthread_rwlock_t phos_capture_lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

pthread_mutex_t phos_primary_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER; /* guards both lists; taken last */
static struct phos_context *contexts;
static size_t context_count, context_capacity;
static _Atomic size_t green_count; /* of them; written with the lock, read without */

/* Captures that were begun, by the stream that they were begun in; guarded by context_lock. */
static struct capture {
    CUstream stream;
    CUcontext context; /* NULL: unknown */
    int32_t thread;    /* of a per-thread default stream; 0: another kind */
    struct capture *next;
} *captures;

/* With context_lock held. */
static void set_whole(struct phos_context *context, CUcontext whole)
{
    green_count += (whole != NULL) - (context->whole != NULL);
    context->whole = whole;
}

static bool context_known(CUcontext context)
{
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            return true;
    return false;
}

static void count_captures(int more)
{
    atomic_fetch_add(&phos_capture_count, more);
    phos_parts_capture(more);
}

static void capture_ended(struct capture *capture)
{
    free(capture);
    count_captures(-1);
}

/* Those of a context or, if there is a thread, in that one's own streams. */
static void captures_end(CUcontext context, int32_t thread)
{
    for (struct capture **link = &captures; *link;) {
        struct capture *capture = *link;
        if (thread ? capture->thread != thread : capture->context != context) {
            link = &capture->next;
            continue;
        }
        *link = capture->next;
        capture_ended(capture);
    }
}

void phos_context_seen(CUcontext context, CUdevice device)
{
    /* The usual case: the same one as last time. */
    static __thread CUcontext last __attribute__((tls_model("initial-exec")));
    static __thread uint64_t last_change __attribute__((tls_model("initial-exec")));
    static _Atomic uint64_t changes = 1;
    if (device >= 0 && context == last && last_change == atomic_load_explicit(&changes, memory_order_relaxed))
        return;
    PHOS_LOCKED(&context_lock);
    if (device < 0) { /* forget it */
        for (size_t i = 0; i < context_count; i++)
            if (contexts[i].context == context) {
                set_whole(&contexts[i], NULL);
                contexts[i--] = contexts[--context_count];
            }
        captures_end(context, 0);
        atomic_fetch_add(&changes, 1);
        return;
    }
    if (!context_known(context)) {
        if (context_count == context_capacity) {
            size_t capacity = context_capacity ? context_capacity * 2 : 8;
            struct phos_context *grown = realloc(contexts, capacity * sizeof *grown);
            if (!grown)
                return;
            contexts = grown;
            context_capacity = capacity;
        }
        contexts[context_count++] = (struct phos_context){.context = context, .device = device};
        atomic_fetch_add(&changes, 1);
    }
    last = context;
    last_change = atomic_load(&changes);
}

bool phos_context_lives(CUcontext context)
{
    unsigned int version;
    CUresult result = context ? phos_real.cuCtxGetApiVersion(context, &version) : CUDA_ERROR_INVALID_CONTEXT;
    return result != CUDA_ERROR_INVALID_CONTEXT && result != CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUdevice phos_context_device(CUcontext context)
{
    PHOS_LOCKED(&context_lock);
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            return contexts[i].device;
    return -1;
}

bool phos_primary_of(CUdevice device, CUcontext *primary)
{
    unsigned int flags;
    int active = 0;
    PHOS_LOCKED(&phos_primary_lock);
    if (phos_real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active)
        return false;
    if (phos_real.cuDevicePrimaryCtxRetain(primary, device) != CUDA_SUCCESS)
        return false;
    phos_real.cuDevicePrimaryCtxRelease_v2(device);
    return true;
}

CUcontext phos_context_whole(CUcontext context)
{
    if (!atomic_load_explicit(&green_count, memory_order_relaxed))
        return context;
    PHOS_LOCKED(&context_lock);
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context && contexts[i].whole)
            return contexts[i].whole;
    return context;
}

bool phos_context_attach(CUcontext context, bool undo)
{
    PHOS_LOCKED(&context_lock);
    for (size_t i = 0; i < context_count; i++) {
        if (contexts[i].context != context || (undo && !contexts[i].attached))
            continue;
        contexts[i].attached += undo ? -1u : 1u;
        return true;
    }
    return false;
}

size_t phos_contexts_on(CUdevice device)
{
    size_t count = 0;
    PHOS_LOCKED(&context_lock);
    for (size_t i = 0; i < context_count; i++)
        count += contexts[i].device == device;
    return count;
}

/* Drivers before CUDA 13 refuse to say it of a stream that cuGreenCtxStreamCreate made, but for its green context. */
static CUresult context_of(CUstream stream, CUcontext *context)
{
    CUgreenCtx green = NULL;
    CUresult result = phos_real.cuStreamGetCtx(stream, context);
    if (result == CUDA_ERROR_NOT_SUPPORTED)
        result = phos_real.cuStreamGetCtx_v2(stream, context, &green);
    return result == CUDA_SUCCESS && green ? phos_real.cuCtxFromGreenCtx(context, green) : result;
}

bool phos_stream_context(CUstream stream, CUcontext *context, CUdevice *device)
{
    CUcontext current;
    CUdevice here;
    bool have = phos_current(&current, &here) == CUDA_SUCCESS;
    if ((uintptr_t)stream <= 2) {
        *context = current;
        *device = here;
        return have;
    }
    if (context_of(stream, context) != CUDA_SUCCESS)
        return false;
    if (have && *context == current) {
        *device = here;
        return true;
    }
    if (phos_real.cuCtxPushCurrent_v2(*context) != CUDA_SUCCESS)
        return false;
    have = phos_real.cuCtxGetDevice(device) == CUDA_SUCCESS && *device >= 0 && *device < phos_device_count;
    phos_real.cuCtxPopCurrent_v2(&current);
    return have;
}

static void context_made(CUresult result, CUcontext *context, CUdevice device)
{
    if (result == CUDA_SUCCESS && context && *context && device >= 0)
        phos_context_seen(*context, device);
}

struct phos_context *phos_contexts(size_t *count)
{
    /* Who is letting go of a primary context may wait for its work, and others not for that. */
    bool locked = pthread_mutex_trylock(&phos_primary_lock) == 0;
    for (int d = 0; locked && d < phos_device_count; d++) {
        /* The runtime library may make primary contexts through private tables. */
        unsigned int flags;
        int active = 0;
        CUcontext primary;
        if (phos_real.cuDevicePrimaryCtxGetState(d, &flags, &active) == CUDA_SUCCESS && active &&
            phos_real.cuDevicePrimaryCtxRetain(&primary, d) == CUDA_SUCCESS) {
            phos_context_seen(primary, d);
            phos_real.cuDevicePrimaryCtxRelease_v2(d);
        }
    }
    if (locked)
        pthread_mutex_unlock(&phos_primary_lock);
    return phos_contexts_seen(count);
}

struct phos_context *phos_contexts_seen(size_t *count)
{
    struct phos_context *copy;
    size_t seen = 0;
    *count = 0;
    {
        PHOS_LOCKED(&context_lock);
        copy = calloc(context_count + 1, sizeof *copy);
        if (copy)
            memcpy(copy, contexts, (seen = context_count) * sizeof *copy);
    }
    for (size_t i = 0; i < seen; i++)
        if (phos_context_lives(copy[i].context))
            copy[(*count)++] = copy[i];
    return copy;
}

CUresult serve_cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
    CUresult result =
        PHOS_RETRIED(phos_driver_recover, device, phos_real.cuCtxCreate_v4(context, params, flags, device));
    context_made(result, context, device);
    return result;
}

CUresult serve_cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
                              CUdevice_v1 device)
{
    CUresult result =
        PHOS_RETRIED(phos_driver_recover, device, phos_real.cuCtxCreate_v3(context, params, count, flags, device));
    context_made(result, context, device);
    return result;
}

CUresult serve_cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice_v1 device)
{
    CUresult result = PHOS_RETRIED(phos_driver_recover, device, phos_real.cuCtxCreate_v2(context, flags, device));
    context_made(result, context, device);
    return result;
}

CUresult serve_cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice_v1 device)
{
    CUresult result = PHOS_RETRIED(phos_driver_recover, device, phos_real.cuCtxCreate(context, flags, device));
    context_made(result, context, device);
    return result;
}

/* It takes its device's primary context. */
CUresult serve_cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc description, CUdevice device, unsigned int flags)
{
    PHOS_LOCKED(&phos_primary_lock);
    return PHOS_RETRIED(phos_driver_recover, device, phos_real.cuGreenCtxCreate(green, description, device, flags));
}

CUresult serve_cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    CUresult result = phos_real.cuCtxFromGreenCtx(context, green);
    CUdevice device = result == CUDA_SUCCESS ? phos_context_any_device(*context) : -1;
    CUcontext primary;
    if (device < 0 || !phos_primary_of(device, &primary))
        return result;
    phos_context_seen(*context, device);
    PHOS_LOCKED(&context_lock);
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == *context)
            set_whole(&contexts[i], primary);
    return result;
}

CUresult serve_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice_v1 device)
{
    PHOS_LOCKED(&phos_primary_lock);
    CUresult result =
        PHOS_RETRIED(phos_driver_recover, device, phos_real.cuDevicePrimaryCtxRetain(context, device));
    context_made(result, context, device);
    return result;
}

/* ---- peers: cuMemAlloc memory follows cuCtxEnablePeerAccess, VMM memory does not by itself ---- */

/* Of a context that may have come past us, through the driver's private tables. */
CUdevice phos_context_any_device(CUcontext context)
{
    CUdevice device = phos_context_device(context);
    CUcontext popped;
    if (device < 0 && phos_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS) {
        if (phos_real.cuCtxGetDevice(&device) != CUDA_SUCCESS)
            device = -1;
        phos_real.cuCtxPopCurrent_v2(&popped);
    }
    return device;
}

static void peer_changed(CUcontext peer_context, bool allowed)
{
    CUcontext current;
    CUdevice here, there = phos_context_any_device(peer_context);
    if (there < 0 || there >= phos_device_count || phos_current(&current, &here) != CUDA_SUCCESS || here == there)
        return;
    CUresult result;
    phos_window_stand_still(); /* access may be taken away */
    {
        PHOS_LOCKED(&phos_memory_lock);
        result = phos_peer_access(there, here, allowed);
    }
    phos_window_go_on();
    if (result != CUDA_SUCCESS)
        phos_warn("device %d could not be given access to all memory of device %d (error %d)", here, there, (int)result);
}

CUresult serve_cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUresult result = phos_real.cuCtxEnablePeerAccess(peer, flags);
    if (result == CUDA_SUCCESS)
        peer_changed(peer, true);
    return result;
}

CUresult serve_cuCtxDisablePeerAccess(CUcontext peer)
{
    CUresult result = phos_real.cuCtxDisablePeerAccess(peer);
    if (result == CUDA_SUCCESS)
        peer_changed(peer, false);
    return result;
}

void phos_track_forked(void)
{
    pthread_mutex_init(&context_lock, NULL);
    pthread_rwlock_init(&phos_capture_lock, NULL);
    phos_primary_lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
}

/* ---- captures ---- */

/* Counted before it begins: who has not asked yet is not waited for. Who has, and waits for work of the GPU, may wait for
 * what this thread does next; by the end of this time it is in the driver, where a capture does it no harm. */
static bool capture_begins(void)
{
    count_captures(1);
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_nsec += 100000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    return pthread_rwlock_timedwrlock(&phos_capture_lock, &deadline) == 0;
}

static void capture_put(struct capture *capture)
{
    PHOS_LOCKED(&context_lock);
    capture->next = captures;
    captures = capture;
}

static int32_t thread_of(CUstream stream)
{
    return stream == CU_STREAM_PER_THREAD ? gettid() : 0;
}

static pthread_once_t capture_once = PTHREAD_ONCE_INIT;
static pthread_key_t capture_key; /* set: the thread may have begun one in its own stream, which nobody else can end */
static bool capture_key_made;

static void capturing_thread_ends(void *unused)
{
    (void)unused;
    PHOS_LOCKED(&context_lock);
    captures_end(NULL, gettid());
}

static void make_capture_key(void)
{
    capture_key_made = pthread_key_create(&capture_key, capturing_thread_ends) == 0;
}

static void watch_capturing_thread(void)
{
    pthread_once(&capture_once, make_capture_key);
    if (capture_key_made)
        pthread_setspecific(capture_key, &capture_key);
}

/* The one that was begun in this stream, no longer in the list; NULL: none, though it may take part in another's. */
static struct capture *capture_take(CUstream stream)
{
    int32_t thread = thread_of(stream);
    PHOS_LOCKED(&context_lock);
    for (struct capture **link = &captures; *link; link = &(*link)->next)
        if ((*link)->stream == stream && (*link)->thread == thread) {
            struct capture *capture = *link;
            *link = capture->next;
            return capture;
        }
    return NULL;
}

static CUresult capture_begun(bool locked, CUstream stream, CUresult result)
{
    if (locked)
        pthread_rwlock_unlock(&phos_capture_lock);
    CUdevice device;
    struct capture *capture = result == CUDA_SUCCESS ? calloc(1, sizeof *capture) : NULL;
    if (!capture) { /* or out of host memory */
        count_captures(-1);
        phos_sync_memops_settle();
        return result;
    }
    capture->stream = stream;
    if ((capture->thread = thread_of(stream)))
        watch_capturing_thread();
    if (phos_stream_context(stream, &capture->context, &device))
        phos_context_seen(capture->context, device);
    else
        capture->context = NULL;
    capture_put(capture);
    return result;
}

CUresult serve_cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    bool locked = capture_begins();
    return capture_begun(locked, stream, phos_real.cuStreamBeginCapture_v2(stream, mode));
}

CUresult serve_cuStreamBeginCapture(CUstream stream)
{
    bool locked = capture_begins();
    return capture_begun(locked, stream, phos_real.cuStreamBeginCapture(stream));
}

CUresult serve_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                           const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode)
{
    bool locked = capture_begins();
    return capture_begun(locked, stream, phos_real.cuStreamBeginCaptureToGraph(stream, graph, dependencies, data, count, mode));
}

CUresult serve_cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                             CUgraphRecaptureCallback callback, void *data)
{
    bool locked = capture_begins();
    return capture_begun(locked, stream, phos_real.cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data));
}

/* Into a command list of a graphics library's. */
CUresult serve_cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *parameters)
{
    bool locked = capture_begins();
    return capture_begun(locked, stream, phos_real.cuStreamBeginCaptureToCig(stream, parameters));
}

static CUresult capture_ends(CUresult result, CUstream stream)
{
    /* One that was spoilt ends here too, with an error; one that is another thread's does not. */
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    bool ended = result == CUDA_SUCCESS || phos_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS ||
                 status == CU_STREAM_CAPTURE_STATUS_NONE;
    struct capture *capture = ended ? capture_take(stream) : NULL;
    if (capture) {
        capture_ended(capture);
        phos_sync_memops_settle();
    }
    return result;
}

CUresult serve_cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return capture_ends(phos_real.cuStreamEndCapture(stream, graph), stream);
}

CUresult serve_cuStreamEndCaptureToCig(CUstream stream)
{
    return capture_ends(phos_real.cuStreamEndCaptureToCig(stream), stream);
}

/* A capture ends with its stream as well. */
static CUresult stream_destroyed(CUresult result, struct capture *capture)
{
    if (capture && result == CUDA_SUCCESS) {
        capture_ended(capture);
        phos_sync_memops_settle();
    } else if (capture) {
        capture_put(capture);
    }
    return result;
}

CUresult serve_cuStreamDestroy_v2(CUstream stream)
{
    struct capture *capture = phos_captures() ? capture_take(stream) : NULL;
    phos_twins_stream_ends(stream);
    return stream_destroyed(phos_real.cuStreamDestroy_v2(stream), capture);
}

CUresult serve_cuStreamDestroy(CUstream stream)
{
    struct capture *capture = phos_captures() ? capture_take(stream) : NULL;
    phos_twins_stream_ends(stream);
    return stream_destroyed(phos_real.cuStreamDestroy(stream), capture);
}
