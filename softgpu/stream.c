/* Streams: queues of operations, each run by a worker thread of its own that exists from the first queued operation on.
 *
 * An operation waits for the one before it in its queue and for its dependencies: other operations, by reference. The legacy
 * default stream's rule (it waits for all blocking streams, and they for it) and cuStreamWaitEvent are such dependencies,
 * fixed when the operation is submitted, so nothing ever waits for something submitted later and no cycle can arise. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "op.h"

atomic_int sg_captures;

/* ---- operations ---- */

struct sg_op *sg_op_reference(struct sg_op *op)
{
    if (op)
        atomic_fetch_add(&op->references, 1);
    return op;
}

void sg_op_unreference(struct sg_op *op)
{
    if (!op || atomic_fetch_sub(&op->references, 1) != 1)
        return;
    sg_work_clear(&op->work);
    for (unsigned i = 0; i < op->dependency_count; i++)
        sg_op_unreference(op->dependencies[i]);
    free(op->dependencies);
    free(op);
}

bool sg_op_done(struct sg_op *op)
{
    return !op || atomic_load_explicit(&op->done, memory_order_acquire);
}

void sg_op_wait(struct sg_op *op)
{
    while (!sg_op_done(op))
        syscall(SYS_futex, &op->done, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
}

struct sg_op *sg_op_finished(void)
{
    struct sg_op *op = calloc(1, sizeof(*op));
    if (op) {
        op->references = 1;
        op->finished = sg_now_ns();
        atomic_store(&op->done, 1);
    }
    return op;
}

static bool depend(struct sg_op *op, struct sg_op *on)
{
    if (sg_op_done(on))
        return true;
    if (op->dependency_count == op->dependency_capacity) {
        unsigned capacity = op->dependency_capacity ? op->dependency_capacity * 2 : 4;
        struct sg_op **grown = realloc(op->dependencies, capacity * sizeof(*grown));
        if (!grown)
            return false;
        op->dependencies = grown;
        op->dependency_capacity = capacity;
    }
    op->dependencies[op->dependency_count++] = sg_op_reference(on);
    return true;
}

/* Waits for what the operation needs, runs it, and tells those who wait for it. */
static void run(struct sg_op *op)
{
    for (unsigned i = 0; i < op->dependency_count; i++)
        sg_op_wait(op->dependencies[i]);
    /* After a fault the context runs nothing more; a stream callback is still told. */
    int sticky = atomic_load(&op->context->sticky);
    bool callback = op->work.type == SG_WORK_HOST && op->work.host.callback;
    op->result = sticky && !callback ? (CUresult)sticky : sg_work_run(&op->work, op->context);
    if (op->result != CUDA_SUCCESS)
        sg_context_fail(op->context, op->result);
    if (op->work.type == SG_WORK_GRAPH)
        sg_marks_end(op->work.marks); /* of nodes that did not run */
    op->finished = sg_now_ns();
    atomic_store_explicit(&op->done, 1, memory_order_release);
    syscall(SYS_futex, &op->done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* ---- streams ---- */

static void unlink_stream(struct sg_stream *stream) /* under context->lock */
{
    for (struct sg_stream **link = &stream->context->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            return;
        }
}

static void *worker(void *argument)
{
    struct sg_stream *stream = argument;
    struct sg_context *context = stream->context;
    pthread_mutex_lock(&context->lock);
    for (;;) {
        struct sg_op *op = stream->head;
        if (op) {
            stream->head = op->next;
            if (!stream->head)
                stream->tail = NULL;
            stream->queued--;
            pthread_cond_signal(&stream->room);
            pthread_mutex_unlock(&context->lock);
            run(op);
            sg_op_unreference(op);
            pthread_mutex_lock(&context->lock);
        } else if (stream->destroyed) {
            break;
        } else {
            pthread_cond_wait(&stream->wake, &context->lock);
        }
    }
    unlink_stream(stream);
    struct sg_op *last = stream->last;
    pthread_mutex_unlock(&context->lock);
    sg_op_unreference(last);
    pthread_cond_destroy(&stream->wake);
    pthread_cond_destroy(&stream->room);
    free(stream);
    return NULL;
}

static CUresult start_worker(struct sg_stream *stream) /* under context->lock */
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all); /* the application's signals are not for our threads */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, worker, stream);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        sg_log("cannot start a stream's thread: %s", strerror(error));
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_setname_np(thread, "softgpu-stream");
    stream->worker = true;
    return CUDA_SUCCESS;
}

struct sg_stream *sg_stream_create(struct sg_context *context, unsigned flags, int priority)
{
    struct sg_stream *stream = calloc(1, sizeof(*stream));
    if (!stream)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = sg_next_id();
    pthread_cond_init(&stream->wake, NULL);
    pthread_cond_init(&stream->room, NULL);
    if (!sg_handle_add(stream, SG_STREAM)) {
        free(stream);
        return NULL;
    }
    pthread_mutex_lock(&context->lock);
    stream->next = context->streams;
    context->streams = stream;
    pthread_mutex_unlock(&context->lock);
    return stream;
}

/* What is queued still runs; until it has, the stream stays in its context's list, so that others wait for it. */
void sg_stream_destroy(struct sg_stream *stream)
{
    struct sg_context *context = stream->context;
    if (!sg_handle_remove(stream, SG_STREAM))
        return;
    if (atomic_load(&sg_captures))
        sg_capture_forget_stream(stream);
    pthread_mutex_lock(&context->lock);
    stream->destroyed = true;
    bool has_worker = stream->worker;
    if (has_worker)
        pthread_cond_signal(&stream->wake);
    pthread_mutex_unlock(&context->lock);
    if (has_worker)
        return;
    sg_op_wait(stream->last); /* one that its submitter runs */
    pthread_mutex_lock(&context->lock);
    unlink_stream(stream);
    pthread_mutex_unlock(&context->lock);
    sg_op_unreference(stream->last);
    pthread_cond_destroy(&stream->wake);
    pthread_cond_destroy(&stream->room);
    free(stream);
}

/* ---- the per-thread default stream ---- */

struct thread_streams { /* of one thread, one per context it used this way */
    struct thread_streams *next;
    uint64_t context;
    struct sg_stream *stream;
};
static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;

static void thread_ends(void *argument)
{
    for (struct thread_streams *entry = argument, *next; entry; entry = next) {
        next = entry->next;
        if (sg_handle_is(entry->stream, SG_STREAM))
            sg_stream_destroy(entry->stream);
        free(entry);
    }
}

static void make_key(void)
{
    pthread_key_create(&thread_key, thread_ends);
}

static struct sg_stream *per_thread(struct sg_context *context)
{
    pthread_once(&thread_once, make_key);
    struct thread_streams *list = pthread_getspecific(thread_key);
    for (struct thread_streams *entry = list; entry; entry = entry->next)
        if (entry->context == context->id)
            return entry->stream;
    struct thread_streams *entry = calloc(1, sizeof(*entry));
    struct sg_stream *stream = entry ? sg_stream_create(context, 0, 0) : NULL;
    if (!stream) {
        free(entry);
        return NULL;
    }
    stream->per_thread = true;
    *entry = (struct thread_streams){list, context->id, stream};
    pthread_setspecific(thread_key, entry);
    return stream;
}

CUresult sg_stream_get(CUstream handle, struct sg_stream **out)
{
    struct sg_context *context;
    if (handle > CU_STREAM_PER_THREAD) {
        if (!sg_handle_is(handle, SG_STREAM))
            return CUDA_ERROR_INVALID_HANDLE;
        *out = (struct sg_stream *)handle;
        if ((*out)->context->whole && !sg_handle_is((*out)->context, SG_CONTEXT))
            return CUDA_ERROR_CONTEXT_IS_DESTROYED; /* what the driver says of a green context's (580.159, H100) */
        return (CUresult)atomic_load(&(*out)->context->sticky);
    }
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    bool own = handle == CU_STREAM_PER_THREAD || (!handle && sg_thread.per_thread_default);
    *out = own ? per_thread(context) : context->legacy;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- submitting ---- */

static bool blocking(const struct sg_stream *stream)
{
    return !stream->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* As far as is known of the driver: it sets 1 MiB by a kernel, and a few bytes by none. */
static bool is_kernel(const struct sg_work *work)
{
    const struct sg_fill *fill = &work->fill;
    return work->type == SG_WORK_KERNEL || work->type == SG_WORK_GRAPH ||
           (work->type == SG_WORK_FILL && fill->width * fill->height * fill->element >= (size_t)1 << 20);
}

/* Under context->lock. After the stack limit has changed, what is queued in any stream waits for the first kernel: so does
 * the driver (measured with 580.159 on an H100). */
static void note_resize(struct sg_op *op)
{
    struct sg_context *context = op->context;
    if (!context->resizes || !is_kernel(&op->work))
        return;
    sg_op_unreference(context->resize);
    context->resize = sg_op_reference(op);
    context->resizes = false;
}

/* Under context->lock: what the streams' rules make the operation wait for. */
static bool depend_on_streams(struct sg_op *op, struct sg_stream *stream)
{
    struct sg_context *context = stream->context;
    bool ok = true;
    if (stream->last && stream->last->taken)
        ok = depend(op, stream->last); /* not in the queue: its submitter runs it */
    if (stream->legacy)
        for (struct sg_stream *other = context->streams; other; other = other->next)
            ok = ok && (!blocking(other) || depend(op, other->last));
    else if (stream->marks)
        for (struct sg_stream *other = context->streams; other; other = other->next)
            ok = ok && depend(op, other->last);
    else if (blocking(stream))
        ok = ok && depend(op, context->legacy->last);
    return ok;
}

static CUresult submit(struct sg_stream *stream, struct sg_work *work, struct sg_op *after, bool wait, struct sg_op **out)
{
    struct sg_context *context = stream->context;
    struct sg_op *op = calloc(1, sizeof(*op));
    if (!op) {
        sg_work_clear(work);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    op->references = 2; /* the queue's (or the runner's), and stream->last's */
    op->work = *work;
    op->context = context;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&context->lock);
    while (sg_settings()->queue && stream->queued >= sg_settings()->queue)
        pthread_cond_wait(&stream->room, &context->lock);
    bool idle = sg_op_done(stream->last);
    if (!depend_on_streams(op, stream) || !depend(op, context->resize) || !depend(op, after))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    /* The caller waits and nothing is before it: it may as well run the operation itself. */
    bool take = wait && idle && !op->dependency_count;
    if (result == CUDA_SUCCESS && !take && !stream->worker)
        result = start_worker(stream);
    if (result != CUDA_SUCCESS) {
        pthread_mutex_unlock(&context->lock);
        op->references = 1;
        sg_op_unreference(op);
        return result;
    }
    op->taken = take;
    note_resize(op);
    struct sg_op *previous = stream->last;
    stream->last = op;
    if (!take) {
        if (stream->tail)
            stream->tail->next = op;
        else
            stream->head = op;
        stream->tail = op;
        stream->queued++;
        pthread_cond_signal(&stream->wake);
    }
    if (out)
        *out = sg_op_reference(op);
    if (wait && !take)
        sg_op_reference(op);
    pthread_mutex_unlock(&context->lock);
    sg_op_unreference(previous);
    if (!wait)
        return CUDA_SUCCESS;
    if (take)
        run(op);
    else
        sg_op_wait(op);
    result = op->result;
    sg_op_unreference(op);
    return result;
}

CUresult sg_submit(struct sg_stream *stream, struct sg_work *work, bool wait, struct sg_op **out)
{
    if (atomic_load(&sg_captures)) {
        if (stream->legacy && sg_capture_among(stream->context, false, true)) {
            sg_work_clear(work);
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (stream->capture) {
            if (!wait)
                return sg_capture_add(stream, work);
            sg_work_clear(work);
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return submit(stream, work, NULL, wait, out);
}

CUresult sg_submit_after(struct sg_stream *stream, struct sg_op *dependency)
{
    struct sg_work work = {.type = SG_WORK_EMPTY, .context = stream->context};
    /* With a limit it takes its place in any case, as in the driver's queues. */
    return sg_op_done(dependency) && !sg_settings()->queue ? CUDA_SUCCESS : submit(stream, &work, dependency, false, NULL);
}

/* ---- waiting ---- */

/* The newest operations of the context's streams that `wanted` picks: references, to wait for without a lock. */
static struct sg_op **newest(struct sg_context *context, struct sg_stream *only, size_t *count)
{
    struct sg_op **found = NULL;
    *count = 0;
    pthread_mutex_lock(&context->lock);
    size_t streams = 0;
    for (struct sg_stream *stream = context->streams; stream; stream = stream->next)
        streams++;
    found = malloc((streams + 1) * sizeof(*found));
    for (struct sg_stream *stream = context->streams; found && stream; stream = stream->next)
        if ((!only || stream == only || (only->legacy && blocking(stream))) && !sg_op_done(stream->last))
            found[(*count)++] = sg_op_reference(stream->last);
    pthread_mutex_unlock(&context->lock);
    return found;
}

static void wait_newest(struct sg_context *context, struct sg_stream *only)
{
    size_t count;
    struct sg_op **ops = newest(context, only, &count);
    for (size_t i = 0; i < count; i++) {
        sg_op_wait(ops[i]);
        sg_op_unreference(ops[i]);
    }
    free(ops);
}

static void hang_if_told(void)
{
    while (sg_fault(SG_FAULT_HANG_SYNC))
        for (;;)
            sg_sleep_ns(1000000000u);
}

CUresult sg_context_synchronize(struct sg_context *context)
{
    hang_if_told();
    wait_newest(context, NULL);
    return (CUresult)atomic_load(&context->sticky);
}

CUresult sg_stream_synchronize(struct sg_stream *stream)
{
    hang_if_told();
    wait_newest(stream->context, stream);
    return (CUresult)atomic_load(&stream->context->sticky);
}

static bool context_idle(struct sg_context *context)
{
    bool idle = true;
    pthread_mutex_lock(&context->lock);
    for (struct sg_stream *stream = context->streams; stream && idle; stream = stream->next)
        idle = sg_op_done(stream->last);
    pthread_mutex_unlock(&context->lock);
    return idle;
}

CUresult sg_context_mark(struct sg_context *context, struct sg_op **out)
{
    if (context_idle(context)) {
        *out = sg_op_finished();
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&making);
    struct sg_stream *stream = context->marks;
    if (!stream && (stream = sg_stream_create(context, CU_STREAM_NON_BLOCKING, 0))) {
        stream->marks = true;
        context->marks = stream;
    }
    pthread_mutex_unlock(&making);
    struct sg_work work = {.type = SG_WORK_EMPTY, .context = context};
    return stream ? submit(stream, &work, NULL, false, out) : CUDA_ERROR_OUT_OF_MEMORY;
}

static void see_idle(struct sg_context *context, void *cookie)
{
    bool *idle = cookie;
    *idle = *idle && context_idle(context);
}

bool sg_streams_idle(uint64_t deadline)
{
    for (;;) {
        bool idle = true;
        sg_contexts_each(see_idle, &idle);
        if (idle)
            return true;
        if (deadline && sg_now_ns() >= deadline)
            return false;
        sg_sleep_ns(200000);
    }
}

bool sg_stream_idle(struct sg_stream *stream)
{
    size_t count;
    struct sg_op **ops = newest(stream->context, stream, &count);
    for (size_t i = 0; i < count; i++)
        sg_op_unreference(ops[i]);
    free(ops);
    return !count;
}
