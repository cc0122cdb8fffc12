#include "quiesce.h"
#include "cleanup.h"
#include "clock.h"
#include "connection.h"
#include "runtime.h"
#include "track.h"

#include <stdlib.h>
#include <time.h>

CUevent phos_event_behind(CUcontext context, CUresult *result)
{
    CUevent event = NULL;
    CUcontext former;
    *result = phos_real.cuCtxPushCurrent_v2(context);
    if (*result != CUDA_SUCCESS)
        return NULL;
    pthread_rwlock_rdlock(&phos_capture_lock); /* as phos_synchronize() does, and why */
    if (phos_captures())
        *result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    else {
        if (phos_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
            event = NULL; /* whatever is there now is not one */
        if (event && phos_real.cuCtxRecordEvent(context, event) != CUDA_SUCCESS) {
            phos_real.cuEventDestroy_v2(event);
            event = NULL;
        }
        if (!event) /* before CUDA 12.5 there is only this way, which has no time limit; after a fault it says which */
            *result = phos_real.cuCtxSynchronize();
    }
    pthread_rwlock_unlock(&phos_capture_lock);
    phos_real.cuCtxPopCurrent_v2(&former);
    return event;
}

CUresult phos_wait(CUcontext context, uint64_t end, bool (*pump)(void))
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult result, exchanged = phos_real.cuThreadExchangeStreamCaptureMode(&mode);
    CUevent event = phos_event_behind(context, &result);
    for (unsigned round = 0; event; round++) {
        result = phos_real.cuEventQuery(event);
        if (result != CUDA_ERROR_NOT_READY || phos_now_ns() >= end || (pump && !pump()))
            break;
        nanosleep(&(struct timespec){.tv_nsec = round < 50 ? 20000 : 200000}, NULL);
    }
    if (event)
        phos_real.cuEventDestroy_v2(event);
    if (exchanged == CUDA_SUCCESS)
        phos_real.cuThreadExchangeStreamCaptureMode(&mode);
    return result;
}

/* What cuCtxSynchronize would say, or CUDA_ERROR_NOT_READY. */
static CUresult rest(CUcontext context, uint64_t end)
{
    CUresult result = phos_wait(context, end, phos_connection_pump);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext popped;
    result = phos_real.cuCtxPushCurrent_v2(context);
    if (result == CUDA_SUCCESS) {
        result = phos_real.cuCtxSynchronize(); /* nothing is left to wait for but what the driver does by itself */
        phos_real.cuCtxPopCurrent_v2(&popped);
    }
    return result;
}

bool phos_quiesce(uint64_t timeout_ns, struct phos_error *error)
{
    uint64_t end = phos_now_ns() + timeout_ns;
    size_t count;
    PHOS_FREES struct phos_context *list = phos_contexts(&count);
    if (!list)
        return phos_fail(error, CUDA_SUCCESS, "out of host memory");
    for (size_t i = 0; i < count; i++) {
        CUresult result = rest(list[i].context, end);
        if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT)
            continue; /* destroyed without our hearing of it */
        if (result == CUDA_ERROR_NOT_READY)
            return phos_fail(error, CUDA_SUCCESS,
                             "the work on device %d did not end in time; it may be long, or wait for what the program "
                             "does next: try again at another moment, or give it more time (PHOS_QUIESCE_SECONDS)",
                             list[i].device);
        if (result != CUDA_SUCCESS)
            return phos_fail(error, result, "device %d cannot be brought to rest", list[i].device);
    }
    return true;
}
