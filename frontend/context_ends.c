/* Contexts that end, and all that is in them. */
#include "cleanup.h"
#include "driver_shared.h"
#include "functions.h"
#include "host.h"
#include "ipc.h"
#include "log.h"
#include "memory.h"
#include "pool.h"
#include "sync_memops.h"
#include "track.h"
#include "window.h"

static void context_forget(CUcontext context)
{
    phos_context_seen(context, -1);
    phos_functions_context_ends(context);
    phos_driver_shared_context_ends(context);
    phos_uncarried_context_ends(context);
    phos_sync_memops_context_ends(context);
}

/* Everything in a context ends with it. */
static void context_ends(CUcontext context, CUdevice device)
{
    phos_twins_context_may_end(context);
    if (phos_synchronize_anyhow(context) != CUDA_SUCCESS)
        phos_debug("a context ends with an error pending");
    phos_window_context_ends(context, false);
    phos_twins_context_ends(context, false);
    struct host_memory *pinned;
    phos_window_stand_still();
    {
        PHOS_LOCKED(&phos_memory_lock);
        phos_pool_context_ends(context);
        phos_free_context(context);
        phos_ipc_context_ends(context);
        phos_host_context_ends(context, false);
        pinned = phos_host_leaving();
        context_forget(context);
        if (!phos_contexts_on(device))
            phos_cache_flush(device);
    }
    phos_window_go_on();
    phos_host_unpin(pinned);
}

/* Too late to wait for its work, which the driver did; its memory goes now. */
static void primary_gone(CUcontext primary, CUdevice device)
{
    phos_window_context_ends(primary, true);
    phos_twins_context_ends(primary, true);
    struct host_memory *pinned;
    phos_window_stand_still();
    {
        PHOS_LOCKED(&phos_memory_lock);
        phos_pool_context_ends(primary);
        phos_free_context(primary);
        phos_ipc_context_ends(primary);
        phos_host_context_ends(primary, true);
        pinned = phos_host_leaving();
        context_forget(primary);
        phos_cache_flush(device);
    }
    phos_window_go_on();
    phos_host_unpin(pinned);
}

/* A primary or a green context is not to be destroyed: the driver refuses, and all that is in it stays. */
static CUresult context_destroyed(CUcontext context, CUresult (*destroy)(CUcontext))
{
    CUdevice device = context && phos_context_whole(context) == context ? phos_context_device(context) : -1;
    CUcontext primary = NULL;
    bool is_primary = device >= 0 && phos_primary_of(device, &primary) && primary == context;
    if (device >= 0 && !is_primary)
        context_ends(context, device);
    CUresult result = destroy(context);
    if (is_primary && result == CUDA_SUCCESS)
        primary_gone(primary, device);
    return result;
}

CUresult serve_cuCtxDestroy_v2(CUcontext context)
{
    return context_destroyed(context, phos_real.cuCtxDestroy_v2);
}

CUresult serve_cuCtxDestroy(CUcontext context)
{
    return context_destroyed(context, phos_real.cuCtxDestroy);
}

/* After a call that may have let go of it for the last time. NULL: there was none. */
static CUresult primary_let_go(CUresult result, CUcontext primary, CUdevice device)
{
    unsigned int flags;
    int active = 1;
    if (result == CUDA_SUCCESS && primary &&
        phos_real.cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS && !active)
        primary_gone(primary, device);
    else if (primary)
        phos_twins_context_stays(primary);
    return result;
}

/* Before such a call. */
static void primary_may_end(CUcontext primary)
{
    phos_twins_context_may_end(primary);
    phos_window_context_may_end(primary);
}

/* Long deprecated, and what PyCUDA ends its contexts with. */
CUresult serve_cuCtxAttach(CUcontext *context, unsigned int flags)
{
    CUresult result = phos_real.cuCtxAttach(context, flags);
    CUdevice device;
    if (result == CUDA_SUCCESS && phos_real.cuCtxGetDevice(&device) == CUDA_SUCCESS) {
        phos_context_seen(*context, device);
        phos_context_attach(*context, false);
    }
    return result;
}

CUresult serve_cuCtxDetach(CUcontext context)
{
    CUcontext current = NULL, primary = NULL;
    CUdevice device = phos_context_device(context);
    bool is_current = phos_real.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context; /* else it is refused */
    if (device >= 0 && phos_primary_of(device, &primary) && primary == context) {
        PHOS_LOCKED(&phos_primary_lock);
        primary_may_end(primary);
        return primary_let_go(phos_real.cuCtxDetach(context), primary, device);
    }
    if (!is_current || device < 0 || phos_context_attach(context, true))
        return phos_real.cuCtxDetach(context);
    return context_destroyed(context, phos_real.cuCtxDetach);
}

/* Only its streams end with it; but what the frontend has made to copy aside is in such a stream. */
CUresult serve_cuGreenCtxDestroy(CUgreenCtx green)
{
    CUcontext context, primary = NULL;
    PHOS_LOCKED(&phos_primary_lock);
    if (phos_real.cuCtxFromGreenCtx(&context, green) != CUDA_SUCCESS || !phos_context_lives(context))
        return phos_real.cuGreenCtxDestroy(green);
    CUdevice device = phos_context_any_device(context);
    if (device < 0 || !phos_primary_of(device, &primary))
        primary = NULL;
    phos_window_context_ends(context, false);
    if (primary) {
        phos_twins_context_may_end(primary);
        PHOS_LOCKED(&phos_memory_lock);
        phos_pool_context_moves(context, primary);
    }
    CUresult result = phos_real.cuGreenCtxDestroy(green);
    if (result == CUDA_SUCCESS)
        phos_context_seen(context, -1);
    return primary_let_go(result, primary, device);
}

static CUresult primary_released(CUdevice device, CUresult (*release)(CUdevice_v1))
{
    CUcontext primary = NULL;
    PHOS_LOCKED(&phos_primary_lock);
    if (!phos_primary_of(device, &primary))
        primary = NULL;
    else
        primary_may_end(primary);
    return primary_let_go(release(device), primary, device);
}

CUresult serve_cuDevicePrimaryCtxRelease_v2(CUdevice_v1 device)
{
    return primary_released(device, phos_real.cuDevicePrimaryCtxRelease_v2);
}

CUresult serve_cuDevicePrimaryCtxRelease(CUdevice_v1 device)
{
    return primary_released(device, phos_real.cuDevicePrimaryCtxRelease);
}

static void primary_resetting(CUdevice device)
{
    CUcontext primary = NULL;
    if (phos_primary_of(device, &primary))
        context_ends(primary, device);
}

CUresult serve_cuDevicePrimaryCtxReset_v2(CUdevice_v1 device)
{
    primary_resetting(device);
    return phos_real.cuDevicePrimaryCtxReset_v2(device);
}

CUresult serve_cuDevicePrimaryCtxReset(CUdevice_v1 device)
{
    primary_resetting(device);
    return phos_real.cuDevicePrimaryCtxReset(device);
}
