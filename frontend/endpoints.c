/* Logical endpoints: what others, on this machine or on another, read and write memory by. The driver's own, and counted;
 * vmm.c has how memory is bound to them. One that is exported or imported is another process's as well: of such things the
 * driver restores nothing that the others would still see (driver_shared.h). */
#include "cleanup.h"
#include "driver_shared.h"
#include "memory.h"
#include "track.h"

static CUresult made(CUresult result)
{
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_ENDPOINT, 1, 0);
    return result;
}

static CUresult shared(CUlogicalEndpointId endpoint, CUresult result)
{
    if (result == CUDA_SUCCESS) {
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_ENDPOINT, endpoint, NULL);
    }
    return result;
}

CUresult serve_cuLogicalEndpointCreate(CUlogicalEndpointId endpoint, const CUlogicalEndpointProp *properties)
{
    return made(phos_real.cuLogicalEndpointCreate(endpoint, properties));
}

CUresult serve_cuLogicalEndpointImport(CUlogicalEndpointId endpoint, const void *handle, CUlogicalEndpointIpcHandleType type)
{
    return shared(endpoint, made(phos_real.cuLogicalEndpointImport(endpoint, handle, type)));
}

CUresult serve_cuLogicalEndpointExport(void *handle, CUlogicalEndpointId endpoint, CUlogicalEndpointIpcHandleType type)
{
    return shared(endpoint, phos_real.cuLogicalEndpointExport(handle, endpoint, type));
}

CUresult serve_cuLogicalEndpointDestroy(CUlogicalEndpointId endpoint)
{
    bool was_shared;
    {
        PHOS_LOCKED(&phos_memory_lock); /* before: afterwards the number may be another one's */
        was_shared = phos_driver_shared_drop(PHOS_SHARED_ENDPOINT, endpoint);
    }
    CUresult result = phos_real.cuLogicalEndpointDestroy(endpoint);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_ENDPOINT, -1, 0);
    else if (was_shared)
        (void)shared(endpoint, CUDA_SUCCESS);
    return result;
}
