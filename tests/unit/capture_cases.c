/* track.c over a driver of this file's own: captures of kinds that the software GPU does not have, from their begin to their
 * end. */
#include "check.h"
#include "runtime.h"
#include "track.h"

#include <stdio.h>
#include <stdlib.h>

static CUresult answer;
static CUstreamCaptureStatus status;

static CUresult recapture(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback,
                          void *data)
{
    (void)stream, (void)mode, (void)graph, (void)callback, (void)data;
    return answer;
}

static CUresult to_graphics(CUstream stream, CUstreamCigCaptureParams *parameters)
{
    (void)stream, (void)parameters;
    return answer;
}

static CUresult end(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    return answer;
}

static CUresult end_graphics(CUstream stream)
{
    (void)stream;
    return answer;
}

static CUresult capturing(CUstream stream, CUstreamCaptureStatus *now)
{
    (void)stream;
    *now = status;
    return CUDA_SUCCESS;
}

static CUresult no_context(CUcontext *context)
{
    *context = NULL;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUstream stream)
{
    (void)stream;
    return CUDA_SUCCESS;
}

static CUresult stream_context(CUstream stream, CUcontext *context)
{
    (void)stream, (void)context;
    return CUDA_ERROR_INVALID_CONTEXT;
}

/* A stream of a green context's, before CUDA 13. */
static const CUcontext primary = (CUcontext)0x30, green = (CUcontext)0x40;

static CUresult stream_contexts(CUstream stream, CUcontext *context, CUgreenCtx *of)
{
    (void)stream;
    *context = primary;
    *of = (CUgreenCtx)0x50;
    return CUDA_SUCCESS;
}

static CUresult not_supported(CUstream stream, CUcontext *context)
{
    (void)stream, (void)context;
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult from_green(CUcontext *context, CUgreenCtx of)
{
    *context = green;
    return of == (CUgreenCtx)0x50 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult version(CUcontext context, unsigned int *number)
{
    (void)context, (void)number;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context)
{
    (void)context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    (void)context;
    return CUDA_SUCCESS;
}

static CUresult first_device(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

static CUresult state(CUdevice device, unsigned int *flags, int *active)
{
    (void)device, (void)flags;
    *active = 1;
    return CUDA_SUCCESS;
}

static CUresult retain(CUcontext *context, CUdevice device)
{
    (void)device;
    *context = primary;
    return CUDA_SUCCESS;
}

static CUresult let_go(CUdevice device)
{
    (void)device;
    return CUDA_SUCCESS;
}

static CUresult destroy_green(CUgreenCtx of)
{
    (void)of;
    return CUDA_SUCCESS;
}

static CUresult begins(bool graphics, CUstream stream)
{
    if (graphics)
        return serve_cuStreamBeginCaptureToCig(stream, NULL);
    return serve_cuStreamBeginRecaptureToGraph(stream, CU_STREAM_CAPTURE_MODE_RELAXED, NULL, NULL, NULL);
}

static CUresult ends(bool graphics, CUstream stream)
{
    return graphics ? serve_cuStreamEndCaptureToCig(stream) : serve_cuStreamEndCapture(stream, NULL);
}

static CUresult exchange(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

static void in_a_green_context(CUstream stream)
{
    CUcontext context = NULL;
    CUdevice device = -1;
    phos_device_count = 1;
    phos_real.cuStreamGetCtx = not_supported;
    phos_real.cuStreamGetCtx_v2 = stream_contexts;
    phos_real.cuCtxFromGreenCtx = from_green;
    phos_real.cuCtxGetApiVersion = version;
    phos_real.cuCtxPushCurrent_v2 = push;
    phos_real.cuCtxPopCurrent_v2 = pop;
    phos_real.cuCtxGetDevice = first_device;
    phos_real.cuDevicePrimaryCtxGetState = state;
    phos_real.cuDevicePrimaryCtxRetain = retain;
    phos_real.cuDevicePrimaryCtxRelease_v2 = let_go;
    phos_real.cuGreenCtxDestroy = destroy_green;
    phos_real.cuThreadExchangeStreamCaptureMode = exchange;
    CHECK(phos_stream_context(stream, &context, &device) && context == green && device == 0);
    CHECK(begins(false, stream) == CUDA_SUCCESS && phos_captures() == 1);
    CHECK(serve_cuGreenCtxDestroy((CUgreenCtx)0x50) == CUDA_SUCCESS && !phos_captures());
}

int main(void)
{
    phos_real.cuStreamBeginRecaptureToGraph = recapture;
    phos_real.cuStreamBeginCaptureToCig = to_graphics;
    phos_real.cuStreamEndCapture = end;
    phos_real.cuStreamEndCaptureToCig = end_graphics;
    phos_real.cuStreamIsCapturing = capturing;
    phos_real.cuStreamGetCtx = stream_context;
    phos_real.cuStreamDestroy_v2 = destroy;
    phos_real.cuCtxGetCurrent = no_context;
    CUstream one = (CUstream)0x1000, other = (CUstream)0x2000;
    for (int graphics = 0; graphics < 2; graphics++) {
        answer = CUDA_ERROR_INVALID_VALUE;
        CHECK(begins(graphics, one) == CUDA_ERROR_INVALID_VALUE && !phos_captures());
        answer = CUDA_SUCCESS;
        CHECK(begins(graphics, one) == CUDA_SUCCESS && phos_captures() == 1);
        CHECK(begins(graphics, other) == CUDA_SUCCESS && phos_captures() == 2);
        CHECK(ends(graphics, one) == CUDA_SUCCESS && phos_captures() == 1);
        /* One that failed goes on only if the driver says so. */
        answer = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
        CHECK(ends(graphics, other) == answer && phos_captures() == 1);
        status = CU_STREAM_CAPTURE_STATUS_NONE;
        CHECK(ends(graphics, other) == answer && !phos_captures());
        answer = CUDA_SUCCESS;
        CHECK(begins(graphics, one) == CUDA_SUCCESS && phos_captures() == 1);
        CHECK(serve_cuStreamDestroy_v2(one) == CUDA_SUCCESS && !phos_captures());
    }
    in_a_green_context(one);
    return 0;
}
