/* Events: the operation that recorded one is the event's state. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "op.h"

void sg_event_set(struct sg_event *event, struct sg_op *op)
{
    pthread_mutex_lock(&event->lock);
    struct sg_op *before = event->op;
    event->op = op;
    event->capture = NULL;
    event->capture_id = 0;
    pthread_mutex_unlock(&event->lock);
    sg_op_unreference(before);
}

struct sg_op *sg_event_op(struct sg_event *event)
{
    pthread_mutex_lock(&event->lock);
    struct sg_op *op = sg_op_reference(event->op);
    pthread_mutex_unlock(&event->lock);
    return op;
}

void sg_event_unreference(struct sg_event *event)
{
    if (atomic_fetch_sub(&event->references, 1) != 1)
        return;
    sg_op_unreference(event->op);
    free(event->nodes);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

static struct sg_event *event_get(CUevent handle)
{
    struct sg_event *event = sg_handle_is(handle, SG_EVENT) ? (struct sg_event *)handle : NULL;
    if (event)
        sg_crash_if_gone(event->context, "an event");
    return event;
}

CUresult softgpu_cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phEvent || (Flags & ~7u))
        return CUDA_ERROR_INVALID_VALUE;
    if (Flags & CU_EVENT_INTERPROCESS)
        return Flags & CU_EVENT_DISABLE_TIMING ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    struct sg_event *event = calloc(1, sizeof(*event));
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = sg_context_owner(context);
    event->flags = Flags;
    event->references = 1;
    pthread_mutex_init(&event->lock, NULL);
    if (!sg_handle_add(event, SG_EVENT)) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *phEvent = (CUevent)event;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuEventDestroy_v2(CUevent hEvent)
{
    if (!event_get(hEvent) || !sg_handle_remove(hEvent, SG_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    sg_event_unreference((struct sg_event *)hEvent);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
{
    struct sg_event *event = event_get(hEvent);
    struct sg_stream *stream;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (sg_context_owner(stream->context) != event->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    struct sg_work work = {.type = SG_WORK_EMPTY, .context = stream->context};
    if (atomic_load(&sg_captures) && stream->capture) {
        if (!(flags & CU_EVENT_RECORD_EXTERNAL))
            return sg_capture_event_record(stream, event);
        atomic_fetch_add(&event->references, 1);
        work.type = SG_WORK_RECORD;
        work.event = event;
        return sg_submit(stream, &work, false, NULL);
    }
    struct sg_op *op;
    result = sg_submit(stream, &work, false, &op);
    if (result != CUDA_SUCCESS)
        return result;
    sg_event_set(event, op);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuEventRecord(CUevent hEvent, CUstream hStream)
{
    return softgpu_cuEventRecordWithFlags(hEvent, hStream, 0);
}

CUresult softgpu_cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    struct sg_event *event = event_get(hEvent);
    struct sg_stream *stream;
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (Flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&sg_captures)) {
        if ((Flags & CU_EVENT_WAIT_EXTERNAL) && stream->capture) {
            atomic_fetch_add(&event->references, 1);
            struct sg_work work = {.type = SG_WORK_WAIT, .event = event, .context = stream->context};
            return sg_submit(stream, &work, false, NULL);
        }
        bool handled = false;
        result = sg_capture_event_wait(stream, event, &handled);
        if (handled || result != CUDA_SUCCESS)
            return result;
    }
    struct sg_op *op = sg_event_op(event);
    result = sg_submit_after(stream, op);
    sg_op_unreference(op);
    return result;
}

CUresult softgpu_cuEventQuery(CUevent hEvent)
{
    struct sg_event *event = event_get(hEvent);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id)
        return CUDA_ERROR_CAPTURED_EVENT;
    SG_UNSAFE(NULL);
    struct sg_op *op = sg_event_op(event);
    bool done = sg_op_done(op);
    sg_op_unreference(op);
    return done ? (CUresult)atomic_load(&event->context->sticky) : CUDA_ERROR_NOT_READY;
}

CUresult softgpu_cuEventSynchronize(CUevent hEvent)
{
    struct sg_event *event = event_get(hEvent);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id)
        return CUDA_ERROR_CAPTURED_EVENT;
    SG_UNSAFE(NULL);
    while (sg_fault(SG_FAULT_HANG_SYNC))
        for (;;)
            sg_sleep_ns(1000000000u);
    struct sg_op *op = sg_event_op(event);
    sg_op_wait(op);
    sg_op_unreference(op);
    return (CUresult)atomic_load(&event->context->sticky);
}

CUresult softgpu_cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    struct sg_event *start = event_get(hStart), *end = event_get(hEnd);
    if (!pMilliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!start || !end || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    struct sg_op *first = sg_event_op(start), *second = sg_event_op(end);
    CUresult result = CUDA_SUCCESS;
    if (!first || !second)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (!sg_op_done(first) || !sg_op_done(second))
        result = CUDA_ERROR_NOT_READY;
    else
        *pMilliseconds = (float)((double)(int64_t)(second->finished - first->finished) / 1e6);
    sg_op_unreference(first);
    sg_op_unreference(second);
    return result;
}

static CUresult context_of(CUcontext handle, CUevent hEvent, struct sg_context **context, struct sg_event **event)
{
    *event = event_get(hEvent);
    if (!*event)
        return CUDA_ERROR_INVALID_HANDLE;
    return sg_context_get(handle, context);
}

CUresult softgpu_cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent)
{
    struct sg_context *context;
    struct sg_event *event;
    CUresult result = context_of(hCtx, hEvent, &context, &event);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->context != sg_context_owner(context))
        return CUDA_ERROR_INVALID_HANDLE;
    if (sg_capture_among(context, true, true))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct sg_op *op;
    result = sg_context_mark(context, &op);
    if (result == CUDA_SUCCESS)
        sg_event_set(event, op);
    return result;
}

CUresult softgpu_cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent)
{
    struct sg_context *context;
    struct sg_event *event;
    CUresult result = context_of(hCtx, hEvent, &context, &event);
    if (result != CUDA_SUCCESS)
        return result;
    struct sg_op *op = sg_event_op(event);
    sg_op_wait(op);
    sg_op_unreference(op);
    return CUDA_SUCCESS;
}
