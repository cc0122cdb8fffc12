/* Kernel launches: checking and keeping what the caller gave, running it, faults. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"

static CUresult take_params(const struct ptx_kernel *kernel, void **params, void **extra, struct sg_kernel_work *out)
{
    size_t count = ptx_kernel_param_count(kernel);
    out->params_size = ptx_kernel_param_bytes(kernel);
    out->params = NULL;
    if (!count)
        return CUDA_SUCCESS;
    const void *buffer = NULL;
    size_t size = 0;
    if (!params && extra)
        for (void **at = extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
            if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER)
                buffer = at[1];
            else if (*at == CU_LAUNCH_PARAM_BUFFER_SIZE)
                size = *(const size_t *)at[1];
            else
                return CUDA_ERROR_INVALID_VALUE;
        }
    if (!params && (!buffer || !size))
        return CUDA_ERROR_INVALID_VALUE;
    char *copy = calloc(1, out->params_size);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; params && i < count; i++) {
        size_t at, bytes;
        ptx_kernel_param(kernel, i, &at, &bytes);
        if (!params[i]) {
            free(copy);
            return CUDA_ERROR_INVALID_VALUE;
        }
        memcpy(copy + at, params[i], bytes);
    }
    if (!params)
        memcpy(copy, buffer, size < out->params_size ? size : out->params_size);
    out->params = copy;
    return CUDA_SUCCESS;
}

/* What the driver refuses when it is asked to launch must not be found by whoever runs it: that would end the context. */
static CUresult check_shape(const struct sg_kernel_work *work)
{
    struct ptx_launch launch = {.kernel = work->function->kernel, .dynamic_shared = work->dynamic_shared};
    struct ptx_fault fault = {0};
    memcpy(launch.grid, work->grid, sizeof(launch.grid));
    memcpy(launch.block, work->block, sizeof(launch.block));
    memcpy(launch.cluster, work->cluster, sizeof(launch.cluster));
    CUresult result = (CUresult)ptx_launch_check(&launch, &fault);
    if (result != CUDA_SUCCESS)
        sg_log("kernel %s cannot be launched: %s", ptx_kernel_name(launch.kernel), fault.message);
    return result;
}

CUresult sg_kernel_work_make(CUfunction handle, struct sg_context *context, const unsigned grid[3], const unsigned block[3],
                             size_t shared, void **params, void **extra, struct sg_kernel_work *out)
{
    struct sg_function *function;
    CUresult result = sg_function_get(handle, context, &function);
    if (result != CUDA_SUCCESS)
        return result;
    if (function->module->context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    static const unsigned grid_limit[3] = {2147483647, 65535, 65535}, block_limit[3] = {1024, 1024, 64};
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!grid[i] || grid[i] > grid_limit[i] || !block[i] || block[i] > block_limit[i])
            return CUDA_ERROR_INVALID_VALUE;
        threads *= block[i];
    }
    int most;
    sg_function_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &most);
    if (threads > ptx_kernel_max_threads(function->kernel) || shared > (size_t)(most > 0 ? most : 0))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (struct sg_kernel_work){.function = function, .dynamic_shared = shared};
    memcpy(out->grid, grid, sizeof(out->grid));
    memcpy(out->block, block, sizeof(out->block));
    result = check_shape(out);
    if (result != CUDA_SUCCESS)
        return result;
    return take_params(function->kernel, params, extra, out);
}

/* The interpreter asks this when an access misses the ranges it knows: all neighbouring memory of the same kind of access. */
static bool access_range(void *cookie, uint64_t address, size_t size, bool write, struct ptx_range *out)
{
    struct sg_context *context = cookie;
    bool ok = false;
    pthread_mutex_lock(&sg_map_lock);
    size_t at = sg_map_upper(&sg_ranges, address);
    struct sg_range *range = at ? sg_ranges.items[at - 1] : NULL;
    if (range && address < range->end && sg_range_allows(range, context, write)) {
        bool writable = sg_range_allows(range, context, true);
        uint64_t end = range->end;
        for (; at < sg_ranges.count; at++) {
            struct sg_range *next = sg_ranges.items[at];
            if (next->begin != end || !sg_range_allows(next, context, false) || sg_range_allows(next, context, true) != writable)
                break;
            end = next->end;
        }
        ok = address + size >= address && address + size <= end;
        *out = (struct ptx_range){range->begin, end, writable};
    }
    pthread_mutex_unlock(&sg_map_lock);
    return ok;
}

static void print(void *cookie, const char *text)
{
    (void)cookie;
    fputs(text, stdout);
    fflush(stdout);
}

CUresult sg_kernel_work_run(const struct sg_kernel_work *work, struct sg_context *context)
{
    struct sg_function *function = work->function;
    if (!sg_handle_is(function, SG_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE; /* a graph outlived the module */
    if (work->not_before)
        sg_sleep_until_ns(work->not_before);
    if (sg_fault(SG_FAULT_LAUNCH))
        return CUDA_ERROR_LAUNCH_FAILED;
    struct ptx_launch launch = {
        .kernel = function->kernel,
        .dynamic_shared = work->dynamic_shared,
        .params = work->params,
        .addresses = function->module->addresses,
        .threads = sg_settings()->threads,
        .access = access_range,
        .cookie = context,
        .print = print,
    };
    memcpy(launch.grid, work->grid, sizeof(launch.grid));
    memcpy(launch.block, work->block, sizeof(launch.block));
    memcpy(launch.cluster, work->cluster, sizeof(launch.cluster));
    struct ptx_fault fault = {0};
    sg_use_begin();
    CUresult result = (CUresult)ptx_launch_run(&launch, &fault);
    sg_use_end();
    if (result != CUDA_SUCCESS)
        sg_log("kernel %s stopped with error %d: %s (address 0x%llx, block %u,%u,%u, thread %u,%u,%u)",
               ptx_kernel_name(function->kernel), (int)result, fault.message[0] ? fault.message : "no reason given",
               (unsigned long long)fault.address, fault.block[0], fault.block[1], fault.block[2], fault.thread[0],
               fault.thread[1], fault.thread[2]);
    return result;
}

static CUresult launch(CUfunction f, const unsigned grid[3], const unsigned block[3], const unsigned cluster[3], size_t shared,
                       CUstream hStream, void **params, void **extra, bool cooperative)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (sg_fault(SG_FAULT_LAUNCH_OOM))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sg_work work = {.type = SG_WORK_KERNEL, .context = stream->context};
    result = sg_kernel_work_make(f, stream->context, grid, block, shared, params, extra, &work.kernel);
    if (result != CUDA_SUCCESS)
        return result;
    work.kernel.cooperative = cooperative;
    for (int i = 0; cluster && i < 3; i++) {
        work.kernel.cluster[i] = cluster[i];
        if (cluster[i] && grid[i] % cluster[i]) {
            sg_work_clear(&work);
            return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        }
    }
    result = check_shape(&work.kernel);
    if (result != CUDA_SUCCESS) {
        sg_work_clear(&work);
        return result;
    }
    if (sg_settings()->launch_latency)
        work.kernel.not_before = sg_now_ns() + (uint64_t)sg_settings()->launch_latency * 1000u;
    return sg_submit(stream, &work, false, NULL);
}

CUresult softgpu_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
    return launch(f, (unsigned[3]){gridDimX, gridDimY, gridDimZ}, (unsigned[3]){blockDimX, blockDimY, blockDimZ}, NULL,
                  sharedMemBytes, hStream, kernelParams, extra, false);
}

CUresult softgpu_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                           unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                           unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
{
    return launch(f, (unsigned[3]){gridDimX, gridDimY, gridDimZ}, (unsigned[3]){blockDimX, blockDimY, blockDimZ}, NULL,
                  sharedMemBytes, hStream, kernelParams, NULL, true);
}

CUresult softgpu_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    unsigned cluster[3] = {0, 0, 0};
    bool cooperative = false;
    for (unsigned i = 0; i < config->numAttrs; i++)
        switch (config->attrs[i].id) {
        case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            cooperative = config->attrs[i].value.cooperative != 0;
            break;
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            cluster[0] = config->attrs[i].value.clusterDim.x;
            cluster[1] = config->attrs[i].value.clusterDim.y;
            cluster[2] = config->attrs[i].value.clusterDim.z;
            break;
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: /* whoever waits for such an event must not find it unrecorded */
            return CUDA_ERROR_NOT_SUPPORTED;
        default: /* hints of scheduling and caching */
            break;
        }
    return launch(f, (unsigned[3]){config->gridDimX, config->gridDimY, config->gridDimZ},
                  (unsigned[3]){config->blockDimX, config->blockDimY, config->blockDimZ}, cluster, config->sharedMemBytes,
                  config->hStream, kernelParams, extra, cooperative);
}
