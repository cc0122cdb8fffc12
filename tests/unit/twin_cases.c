/* The launch of a twin, over a driver of this file's own. */
#include "check.h"
#include "twins_private.h"
#include "window_private.h"

#define HERE ((CUcontext)1)
#define STREAM ((CUstream)5)

static unsigned launches, records;
static CUresult recorded;

static CUresult current(CUcontext *context)
{
    *context = HERE;
    return CUDA_SUCCESS;
}

static CUresult current_device(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

static CUresult same_mode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

static CUresult threads_of(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
    (void)attribute, (void)kernel, (void)device;
    *value = 1024;
    return CUDA_SUCCESS;
}

static CUresult make_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = (CUevent)9;
    return CUDA_SUCCESS;
}

/* The stream is full, until another thread goes on. */
static CUresult record(CUevent event, CUstream stream)
{
    CHECK(event == (CUevent)9 && stream == STREAM && launches == records + 1);
    CHECK(pthread_mutex_trylock(&phos_twin_lock) == 0);
    CHECK(phos_twins.launching == 1);
    pthread_mutex_unlock(&phos_twin_lock);
    records++;
    return recorded;
}

static CUresult launch(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                       unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters, (void)extra;
    CHECK(function == (CUfunction)7); /* the twin's */
    launches++;
    return CUDA_SUCCESS;
}

int main(void)
{
    static struct phos_twin_window window;
    static struct phos_twin_map map;
    static struct phos_chunk_table chunks;
    static struct phos_twin_kernel kernel = {.module = 3, .name = "one", .handle = (CUkernel)7, .original = (CUfunction)6,
                                             .context = HERE, .resolved = true, .threads = 1};
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuCtxGetDevice = current_device;
    phos_real.cuKernelGetAttribute = threads_of;
    phos_real.cuEventCreate = make_event;
    phos_real.cuEventRecord = record;
    phos_real.cuThreadExchangeStreamCaptureMode = same_mode;
    phos_window.chunks = &chunks;
    phos_twins.window = &window;
    phos_twins.map = &map;
    phos_twins.map_version = phos_mappings_version;
    phos_twins.owner = HERE;
    phos_twins.buckets[phos_twin_bucket(kernel.module, kernel.name)] = &kernel;
    struct phos_touches touches = {.stream = STREAM, .kernel = "one", .module = 3, .list = touches.inline_list};
    for (unsigned i = 1; i <= 3; i++) {
        recorded = i < 3 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
        CHECK(twin_cuLaunchKernel(&touches, launch, (CUfunction)6, 1, 1, 1, 1, 1, 1, 0, STREAM, NULL, NULL) == CUDA_SUCCESS);
        CHECK(records == i && window.launched == i && !window.originals && !phos_twins.launching);
        CHECK(phos_twins.unknown == (i == 3));
    }
    return 0;
}
