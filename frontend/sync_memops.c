/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which programs set on memory that a network card or another process reads behind the
 * driver's back (MPI, UCX, GDRCopy): the driver has it for cuMemAlloc and cuMemAllocAsync memory, and refuses it for VMM
 * memory. What it brings about, that a synchronous call's copies are done when it returns, a context can be told as well,
 * and then holds for all of its memory. */
#include "cleanup.h"
#include "memory.h"
#include "track.h"

#include <stdatomic.h>

/* Those that can be set of a context that is there. */
#define SETTABLE (CU_CTX_FLAGS_MASK & ~CU_CTX_MAP_HOST)

static atomic_bool wanted; /* of any context: from then on it stays, whatever flags are set */

static unsigned kept(unsigned flags)
{
    return atomic_load(&wanted) ? flags | CU_CTX_SYNC_MEMOPS : flags;
}

/* What was begun before is done as well then: it is in default streams, and all of those are waited for with the legacy one. */
static CUresult wait_for_copies(void)
{
    PHOS_RELAXED;
    pthread_rwlock_rdlock(&phos_capture_lock); /* as phos_synchronize() does, and why */
    CUresult result = phos_captures() ? CUDA_SUCCESS : phos_real.cuStreamSynchronize(CU_STREAM_LEGACY);
    pthread_rwlock_unlock(&phos_capture_lock);
    return result;
}

static CUresult synchronous(CUcontext context)
{
    CUcontext former;
    unsigned flags = 0;
    CUresult result = phos_real.cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS)
        return result;
    result = phos_real.cuCtxGetFlags(&flags);
    if (result == CUDA_SUCCESS && !(flags & CU_CTX_SYNC_MEMOPS)) {
        result = phos_real.cuCtxSetFlags((flags & SETTABLE) | CU_CTX_SYNC_MEMOPS);
        if (result == CUDA_SUCCESS) {
            atomic_store(&wanted, true);
            result = wait_for_copies();
        }
    }
    phos_real.cuCtxPopCurrent_v2(&former);
    return result;
}

CUresult serve_cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr_v2 address)
{
    CUcontext context = NULL;
    bool ours = false;
    {
        PHOS_LOCKED(&phos_memory_lock);
        const struct phos_allocation *allocation = phos_allocation_at(address);
        ours = allocation || phos_opened_at(address);
        context = allocation ? allocation->context : NULL;
    }
    if (!ours)
        return phos_real.cuPointerSetAttribute(value, attribute, phos_query_address(address));
    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE; /* of VMM memory, as ours is, the driver would say that nothing can be set */
    bool on = *(const unsigned *)value;
    CUresult result = context ? CUDA_SUCCESS : phos_real.cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && on)
        result = synchronous(context);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (allocation)
        allocation->synchronous = on;
    return CUDA_SUCCESS;
}

CUresult serve_cuCtxSetFlags(unsigned flags)
{
    return phos_real.cuCtxSetFlags(kept(flags));
}

CUresult serve_cuDevicePrimaryCtxSetFlags_v2(CUdevice_v1 device, unsigned flags)
{
    return phos_real.cuDevicePrimaryCtxSetFlags_v2(device, kept(flags));
}

CUresult serve_cuDevicePrimaryCtxSetFlags(CUdevice_v1 device, unsigned flags)
{
    return phos_real.cuDevicePrimaryCtxSetFlags(device, kept(flags));
}
