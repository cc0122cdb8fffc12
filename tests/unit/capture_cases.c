/* track.c over a driver of this file's own: captures of kinds that the software GPU does not have, from their begin to their
 * end. */
#include "check.h"
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
    return 0;
}
