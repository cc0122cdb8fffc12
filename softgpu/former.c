/* Calls in the form that they had before the present one, by which programs find them that look symbols up by name. */
#include "softgpu.h"

static CUDA_KERNEL_NODE_PARAMS kernel_of(const CUDA_KERNEL_NODE_PARAMS_v1 *former)
{
    return (CUDA_KERNEL_NODE_PARAMS){
        .func = former->func, .gridDimX = former->gridDimX, .gridDimY = former->gridDimY, .gridDimZ = former->gridDimZ,
        .blockDimX = former->blockDimX, .blockDimY = former->blockDimY, .blockDimZ = former->blockDimZ,
        .sharedMemBytes = former->sharedMemBytes, .kernelParams = former->kernelParams, .extra = former->extra,
    };
}

CUresult softgpu_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS kernel = kernel_of(nodeParams);
    return softgpu_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &kernel);
}

CUresult softgpu_cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUresult result = nodeParams ? softgpu_cuGraphKernelNodeGetParams_v2(hNode, &kernel) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *nodeParams = (CUDA_KERNEL_NODE_PARAMS_v1){
            .func = kernel.func, .gridDimX = kernel.gridDimX, .gridDimY = kernel.gridDimY, .gridDimZ = kernel.gridDimZ,
            .blockDimX = kernel.blockDimX, .blockDimY = kernel.blockDimY, .blockDimZ = kernel.blockDimZ,
            .sharedMemBytes = kernel.sharedMemBytes, .kernelParams = kernel.kernelParams, .extra = kernel.extra,
        };
    return result;
}

CUresult softgpu_cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS kernel = kernel_of(nodeParams);
    return softgpu_cuGraphKernelNodeSetParams_v2(hNode, &kernel);
}

CUresult softgpu_cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                                const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS kernel = kernel_of(nodeParams);
    return softgpu_cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &kernel);
}

CUresult softgpu_cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    return softgpu_cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}
