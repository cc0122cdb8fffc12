/* What a context is asked and told once it exists: its id and version, flags, limits, cache configuration, peers. */
#define _GNU_SOURCE
#include "softgpu.h"

CUresult softgpu_cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
    struct sg_context *context;
    if (!ctxId)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_context_get(ctx, &context);
    if (result == CUDA_SUCCESS)
        *ctxId = context->id;
    return result;
}

CUresult softgpu_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    struct sg_context *context;
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_context_get(ctx, &context);
    if (result == CUDA_SUCCESS)
        *version = context->api_version;
    return result;
}

CUresult softgpu_cuCtxGetFlags(unsigned int *flags)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS && !flags)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *flags = context->flags;
    return result;
}

CUresult softgpu_cuCtxSetFlags(unsigned int flags)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    /* The driver synchronises the context for this one. */
    if (flags & ~context->flags & CU_CTX_SYNC_MEMOPS && sg_capture_among(context, true, true))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    context->flags = flags;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxSetLimit(CUlimit limit, size_t value)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    SG_UNSAFE(NULL);
    if (limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit == CU_LIMIT_STACK_SIZE)
        value = (value + 15) / 16 * 16; /* the driver rounds up too */
    context = sg_context_owner(context);
    pthread_mutex_lock(&context->lock);
    context->resizes |= limit == CU_LIMIT_STACK_SIZE && context->limits[limit] != value;
    context->limits[limit] = value;
    pthread_mutex_unlock(&context->lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pvalue || limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    context = sg_context_owner(context);
    pthread_mutex_lock(&context->lock);
    *pvalue = context->limits[limit];
    pthread_mutex_unlock(&context->lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxGetCacheConfig(CUfunc_cache *pconfig)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS && !pconfig)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *pconfig = context->cache;
    return result;
}

CUresult softgpu_cuCtxSetCacheConfig(CUfunc_cache config)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        context->cache = config;
    return result;
}

CUresult softgpu_cuCtxGetSharedMemConfig(CUsharedconfig *pConfig)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS && !pConfig)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *pConfig = context->shared_config;
    return result;
}

CUresult softgpu_cuCtxSetSharedMemConfig(CUsharedconfig config)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        context->shared_config = config;
    return result;
}

CUresult softgpu_cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (leastPriority)
        *leastPriority = 0;
    if (greatestPriority)
        *greatestPriority = -5;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxResetPersistingL2Cache(void)
{
    struct sg_context *context;
    return sg_context_current(&context);
}

CUresult softgpu_cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
    struct sg_context *context, *peer;
    if (Flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        result = peerContext ? sg_context_get(peerContext, &peer) : CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS)
        return result;
    if (peer->device == context->device)
        return CUDA_ERROR_INVALID_CONTEXT;
    uint32_t bit = 1u << peer->device->ordinal;
    pthread_mutex_lock(&context->lock);
    if (context->peers & bit)
        result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context->peers |= bit;
    pthread_mutex_unlock(&context->lock);
    return result;
}

CUresult softgpu_cuCtxDisablePeerAccess(CUcontext peerContext)
{
    struct sg_context *context, *peer;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        result = peerContext ? sg_context_get(peerContext, &peer) : CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS)
        return result;
    uint32_t bit = 1u << peer->device->ordinal;
    pthread_mutex_lock(&context->lock);
    if (!(context->peers & bit) || peer->device == context->device)
        result = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    else
        context->peers &= ~bit;
    pthread_mutex_unlock(&context->lock);
    return result;
}
