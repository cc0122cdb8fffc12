/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which programs set on memory that a network card or another process reads behind the
 * driver's back (MPI, UCX, GDRCopy): the driver has it for cuMemAlloc and cuMemAllocAsync memory, and refuses it for VMM
 * memory. What it brings about, that a synchronous call's copies are done when it returns, a context can be told as well,
 * and then holds for all of its memory. */
#include "sync_memops.h"
#include "blocks.h"
#include "cleanup.h"
#include "log.h"
#include "memory.h"
#include "track.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Those that can be set of a context that is there. */
#define SETTABLE (CU_CTX_FLAGS_MASK & ~CU_CTX_MAP_HOST)

static atomic_bool wanted; /* of any context */

/* What a context has it keeps, whatever flags are set. NULL: the current one. */
static unsigned kept(unsigned flags, CUcontext context)
{
    unsigned now = 0;
    CUcontext former;
    if (!atomic_load(&wanted) || (context && phos_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS))
        return flags;
    if (phos_real.cuCtxGetFlags(&now) != CUDA_SUCCESS)
        now = 0;
    if (context)
        phos_real.cuCtxPopCurrent_v2(&former);
    return flags | (now & CU_CTX_SYNC_MEMOPS);
}

/* Contexts that are to have it as soon as no stream is captured. Guarded by phos_memory_lock. */
static CUcontext *due;
static size_t due_count;
static atomic_bool any_due;

static CUresult put_off(CUcontext context)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < due_count; i++)
        if (due[i] == context)
            return CUDA_SUCCESS;
    CUcontext *more = realloc(due, (due_count + 1) * sizeof *due);
    if (!more)
        return CUDA_ERROR_OUT_OF_MEMORY;
    due = more;
    due[due_count++] = context;
    atomic_store(&any_due, true);
    return CUDA_SUCCESS;
}

static CUresult set_flag(void)
{
    unsigned flags = 0;
    CUresult result = phos_real.cuCtxGetFlags(&flags);
    if (result != CUDA_SUCCESS || flags & CU_CTX_SYNC_MEMOPS)
        return result;
    result = phos_real.cuCtxSetFlags((flags & SETTABLE) | CU_CTX_SYNC_MEMOPS);
    if (result != CUDA_SUCCESS)
        return result;
    atomic_store(&wanted, true);
    /* What was begun before is done as well then: it is in default streams, and all of those are waited for with this one. Setting
     * the flag may have taken so long that a capture has begun, which would not survive it. */
    return phos_captures() ? CUDA_SUCCESS : phos_real.cuStreamSynchronize(CU_STREAM_LEGACY);
}

/* The driver synchronises the context when its flags are set (580.159.04, H200), which no capture in it survives in whichever
 * mode, as none survives a wait for the default stream: then it is put off. */
static CUresult synchronous(CUcontext context)
{
    CUcontext former;
    PHOS_RELAXED;
    CUresult result = phos_real.cuCtxPushCurrent_v2(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_rdlock(&phos_capture_lock); /* as phos_synchronize() does, and why */
    bool captured = phos_captures();
    if (!captured)
        result = set_flag();
    pthread_rwlock_unlock(&phos_capture_lock);
    phos_real.cuCtxPopCurrent_v2(&former);
    return captured ? put_off(context) : result;
}

void phos_sync_memops_context_ends(CUcontext context)
{
    for (size_t i = 0; i < due_count; i++)
        if (due[i] == context)
            due[i--] = due[--due_count];
}

void phos_sync_memops_settle(void)
{
    if (!atomic_load(&any_due) || phos_captures())
        return;
    CUcontext *list;
    size_t count;
    {
        PHOS_LOCKED(&phos_memory_lock);
        list = due;
        count = due_count;
        due = NULL;
        due_count = 0;
        atomic_store(&any_due, false);
    }
    for (size_t i = 0; i < count; i++) {
        CUresult result = phos_context_lives(list[i]) ? synchronous(list[i]) : CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            phos_warn("a context could not be told to be done with copies when a synchronous call returns (error %d)", (int)result);
    }
    free(list);
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
    CUresult result = phos_capture_permits(NULL);
    if (result == CUDA_SUCCESS && !context)
        result = phos_real.cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS && on)
        result = synchronous(context);
    if (result != CUDA_SUCCESS)
        return result;
    phos_sync_memops_settle(); /* the last capture may have ended just before it was put off */
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (allocation)
        allocation->synchronous = on;
    return CUDA_SUCCESS;
}

CUresult serve_cuCtxSetFlags(unsigned flags)
{
    return phos_real.cuCtxSetFlags(kept(flags, NULL));
}

static unsigned kept_by_primary(unsigned flags, CUdevice device)
{
    CUcontext primary;
    return atomic_load(&wanted) && phos_primary_of(device, &primary) ? kept(flags, primary) : flags;
}

CUresult serve_cuDevicePrimaryCtxSetFlags_v2(CUdevice_v1 device, unsigned flags)
{
    return phos_real.cuDevicePrimaryCtxSetFlags_v2(device, kept_by_primary(flags, device));
}

CUresult serve_cuDevicePrimaryCtxSetFlags(CUdevice_v1 device, unsigned flags)
{
    return phos_real.cuDevicePrimaryCtxSetFlags(device, kept_by_primary(flags, device));
}
