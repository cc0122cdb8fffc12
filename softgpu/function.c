/* Functions: attributes, parameters, occupancy. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softgpu.h"

#define SHARED_PER_BLOCK 49152   /* without asking for more */
#define SHARED_OPTIN 232448      /* at most */
#define SHARED_PER_SM 233472
#define SHARED_RESERVED 1024     /* per block */
#define THREADS_PER_SM 2048
#define BLOCKS_PER_SM 32
#define SMS 132

CUresult sg_function_attribute(const struct sg_function *function, CUfunction_attribute attribute, int *value)
{
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = (int)ptx_kernel_max_threads(function->kernel);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = (int)ptx_kernel_static_shared(function->kernel);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 32;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->max_dynamic_shared ? function->max_dynamic_shared
                                              : SHARED_PER_BLOCK - (int)ptx_kernel_static_shared(function->kernel);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = function->carveout;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        *value = 0;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult sg_function_set_attribute(struct sg_function *function, CUfunction_attribute attribute, int value)
{
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || (size_t)value + ptx_kernel_static_shared(function->kernel) > SHARED_OPTIN)
            return CUDA_ERROR_INVALID_VALUE;
        function->max_dynamic_shared = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        if (value < -1 || value > 100)
            return CUDA_ERROR_INVALID_VALUE;
        function->carveout = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult softgpu_cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
    struct sg_function *function;
    if (!pi)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(hfunc, NULL, &function);
    return result == CUDA_SUCCESS ? sg_function_attribute(function, attrib, pi) : result;
}

CUresult softgpu_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
    struct sg_function *function;
    CUresult result = sg_function_get(hfunc, NULL, &function);
    return result == CUDA_SUCCESS ? sg_function_set_attribute(function, attrib, value) : result;
}

CUresult softgpu_cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
    struct sg_function *function;
    (void)config;
    return sg_function_get(hfunc, NULL, &function);
}

CUresult softgpu_cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
    struct sg_function *function;
    (void)config;
    return sg_function_get(hfunc, NULL, &function);
}

CUresult softgpu_cuFuncGetName(const char **name, CUfunction hfunc)
{
    struct sg_function *function;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(hfunc, NULL, &function);
    if (result == CUDA_SUCCESS)
        *name = ptx_kernel_name(function->kernel);
    return result;
}

CUresult softgpu_cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    struct sg_function *function;
    if (!hmod)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(hfunc, NULL, &function);
    if (result == CUDA_SUCCESS)
        *hmod = (CUmodule)function->module;
    return result;
}

CUresult softgpu_cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize)
{
    struct sg_function *function;
    CUresult result = sg_function_get(func, NULL, &function);
    if (result != CUDA_SUCCESS)
        return result;
    if (!paramOffset || paramIndex >= ptx_kernel_param_count(function->kernel))
        return CUDA_ERROR_INVALID_VALUE;
    size_t size;
    ptx_kernel_param(function->kernel, paramIndex, paramOffset, &size);
    if (paramSize)
        *paramSize = size;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction hfunc)
{
    struct sg_function *function;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(hfunc, NULL, &function);
    if (result == CUDA_SUCCESS)
        *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return result;
}

CUresult softgpu_cuFuncLoad(CUfunction hfunc)
{
    struct sg_function *function;
    return sg_function_get(hfunc, NULL, &function);
}

/* ---- occupancy: by threads, blocks, registers and shared memory of an H100's multiprocessor ---- */

static int blocks_per_sm(const struct sg_function *function, int threads, size_t dynamic)
{
    size_t shared = ptx_kernel_static_shared(function->kernel) + dynamic;
    if (threads <= 0 || threads > (int)ptx_kernel_max_threads(function->kernel) || shared > SHARED_OPTIN)
        return 0;
    int rounded = (threads + 31) / 32 * 32;
    int blocks = THREADS_PER_SM / rounded, by_shared = (int)(SHARED_PER_SM / (shared + SHARED_RESERVED));
    if (blocks > BLOCKS_PER_SM)
        blocks = BLOCKS_PER_SM;
    if (sg_settings()->registers) {
        int by_registers = (int)(sg_settings()->registers / (ptx_kernel_registers(function->kernel) * (unsigned)rounded));
        blocks = blocks < by_registers ? blocks : by_registers;
    }
    return blocks < by_shared ? blocks : by_shared;
}

CUresult softgpu_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize,
                                                                      size_t dynamicSMemSize, unsigned int flags)
{
    struct sg_function *function;
    if (!numBlocks || blockSize <= 0 || (flags & ~1u))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(func, NULL, &function);
    if (result == CUDA_SUCCESS)
        *numBlocks = blocks_per_sm(function, blockSize, dynamicSMemSize);
    return result;
}

CUresult softgpu_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize)
{
    return softgpu_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

CUresult softgpu_cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction func,
                                                           CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                                           int blockSizeLimit, unsigned int flags)
{
    struct sg_function *function;
    if (!minGridSize || !blockSize || (flags & ~1u))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(func, NULL, &function);
    if (result != CUDA_SUCCESS)
        return result;
    int limit = (int)ptx_kernel_max_threads(function->kernel), best = 0;
    if (blockSizeLimit > 0 && blockSizeLimit < limit)
        limit = blockSizeLimit;
    for (int threads = limit; threads > 0; threads = threads % 32 ? threads / 32 * 32 : threads - 32) {
        size_t dynamic = blockSizeToDynamicSMemSize ? blockSizeToDynamicSMemSize(threads) : dynamicSMemSize;
        int blocks = blocks_per_sm(function, threads, dynamic);
        if (blocks * threads > best) {
            best = blocks * threads;
            *blockSize = threads;
            *minGridSize = blocks * SMS;
        }
    }
    return best ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction func,
                                                  CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                                  int blockSizeLimit)
{
    return softgpu_cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                             dynamicSMemSize, blockSizeLimit, 0);
}

CUresult softgpu_cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func, int numBlocks, int blockSize)
{
    struct sg_function *function;
    if (!dynamicSmemSize || numBlocks <= 0 || blockSize <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_function_get(func, NULL, &function);
    if (result != CUDA_SUCCESS)
        return result;
    size_t each = SHARED_PER_SM / (size_t)numBlocks, used = ptx_kernel_static_shared(function->kernel) + SHARED_RESERVED;
    each = each < SHARED_OPTIN + SHARED_RESERVED ? each : SHARED_OPTIN + SHARED_RESERVED;
    *dynamicSmemSize = each > used ? each - used : 0;
    return CUDA_SUCCESS;
}
