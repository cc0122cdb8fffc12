/* The frontend over a driver of this file's own whose memory is nearly all taken by what we keep of freed memory: what the
 * driver serves by itself must get it. */
#include "blocks.h"
#include "cleanup.h"
#include "memory.h"
#include "runtime.h"
#include "stub_driver.h"

#include <stdio.h>
#include <stdlib.h>

#define MiB ((size_t)1 << 20)
#define TOTAL (200 * MiB)
#define SIZE (120 * MiB)
#define HANDLES 100

static size_t taken, sizes[HANDLES];
static unsigned handles = 1, attempts; /* 0 is none */
static CUcontext here = (CUcontext)1;

static CUresult take(size_t size)
{
    attempts++;
    if (size > TOTAL - taken)
        return CUDA_ERROR_OUT_OF_MEMORY;
    taken += size;
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    (void)properties, (void)flags;
    CUresult result = take(size);
    if (result == CUDA_SUCCESS && handles < HANDLES) {
        sizes[handles] = size;
        *handle = handles++;
    }
    return result;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    taken -= sizes[handle];
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t size)
{
    (void)at, (void)size;
    return CUDA_SUCCESS;
}

static CUresult current(CUcontext *context)
{
    *context = here;
    return CUDA_SUCCESS;
}

static CUresult synchronize(void)
{
    return CUDA_SUCCESS;
}

static CUresult managed(CUdeviceptr *at, size_t size, unsigned int flags)
{
    (void)flags;
    *at = 1;
    return take(size);
}

static CUresult array_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    (void)array;
    return take(descriptor->Width * descriptor->Height);
}

static CUresult array_v1(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    (void)array;
    return take((size_t)descriptor->Width * descriptor->Height);
}

static CUresult volume_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    (void)array;
    return take(descriptor->Width * descriptor->Height * descriptor->Depth);
}

static CUresult volume_v1(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    (void)array;
    return take((size_t)descriptor->Width * descriptor->Height * descriptor->Depth);
}

static CUresult mipmapped(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, unsigned int levels)
{
    (void)levels;
    return volume_v2((CUarray *)array, descriptor);
}

static CUresult no_descriptor(CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, CUarray array)
{
    (void)descriptor, (void)array;
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult no_level(CUarray *level, CUmipmappedArray array, unsigned int number)
{
    (void)level, (void)array, (void)number;
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult from_pool(CUdeviceptr *at, size_t size, CUmemoryPool pool, CUstream stream)
{
    (void)pool, (void)stream;
    *at = 1;
    return take(size);
}

static CUresult from_usual_pool(CUdeviceptr *at, size_t size, CUstream stream)
{
    return from_pool(at, size, NULL, stream);
}

static CUresult instantiate(CUgraphExec *executable, CUgraph graph, CUgraphNode *node, char *log, size_t size)
{
    (void)executable, (void)graph, (void)node, (void)log, (void)size;
    CUresult result = take(SIZE);
    return result == CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : result; /* what it would be noted from is not here */
}

static CUresult instantiate_flags(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    return instantiate(executable, graph, NULL, NULL, 0);
}

static CUresult instantiate_parameters(CUgraphExec *executable, CUgraph graph,
                                       CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    (void)parameters;
    return instantiate(executable, graph, NULL, NULL, 0);
}

static CUresult context_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device)
{
    (void)context, (void)parameters, (void)flags, (void)device;
    return instantiate(NULL, NULL, NULL, NULL, 0);
}

static CUresult context_v3(CUcontext *context, CUexecAffinityParam *parameters, int count, unsigned int flags,
                           CUdevice_v1 device)
{
    (void)parameters, (void)count;
    return context_v4(context, NULL, flags, device);
}

static CUresult context_v2(CUcontext *context, unsigned int flags, CUdevice_v1 device)
{
    return context_v4(context, NULL, flags, device);
}

static CUresult context_retained(CUcontext *context, CUdevice_v1 device)
{
    return context_v4(context, NULL, 0, device);
}

static CUresult green_context(CUgreenCtx *context, CUdevResourceDesc description, CUdevice device, unsigned int flags)
{
    (void)context, (void)description;
    return context_v4(NULL, NULL, flags, device);
}

static void check(bool good, const char *what, int line)
{
    if (good)
        return;
    fprintf(stderr, "line %d: not so: %s (%zu bytes taken)\n", line, what, taken);
    exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

/* The driver has nothing but what we keep of what was allocated and freed. */
static void kept(int line)
{
    CUdeviceptr at;
    {
        PHOS_LOCKED(&phos_memory_lock);
        phos_cache_flush(0);
    }
    taken = 0;
    check(serve_cuMemAlloc_v2(&at, SIZE) == CUDA_SUCCESS && taken == SIZE, "it is ours", line);
    check(serve_cuMemFree_v2(at) == CUDA_SUCCESS && taken == SIZE, "it is kept", line);
    attempts = 0;
}

static void ended(CUresult result, CUresult expected, int line)
{
    check(result == expected && taken == SIZE && attempts == 2, "it got what we kept, at the second attempt", line);
}
#define SERVED_AS(call, expected) (kept(__LINE__), ended(call, expected, __LINE__))
#define SERVED(call) SERVED_AS(call, CUDA_SUCCESS)

static void physical(void)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    SERVED(serve_cuMemCreate(&handle, SIZE, &properties, 0));
    CHECK(handle != handles - 1); /* ours */
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    SERVED(serve_cuMemCreate(&handle, SIZE, &properties, 0));
    CHECK(handle == handles - 1);
    properties.requestedHandleTypes = 0;
    properties.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
    SERVED(serve_cuMemCreate(&handle, SIZE, &properties, 0));
    CHECK(handle == handles - 1);

    /* What cannot be, and what is not the device's, is no reason to give anything back. */
    kept(__LINE__);
    CHECK(serve_cuMemCreate(&handle, TOTAL + 2 * MiB, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY && taken == SIZE);
    properties.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CHECK(serve_cuMemCreate(&handle, SIZE, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY && taken == SIZE);
    CHECK(attempts == 2);
}

static void arrays(void)
{
    CUarray array = NULL;
    CUmipmappedArray levels = NULL;
    SERVED(serve_cuArrayCreate_v2(&array, &(CUDA_ARRAY_DESCRIPTOR_v2){.Width = MiB, .Height = 120}));
    SERVED(serve_cuArrayCreate(&array, &(CUDA_ARRAY_DESCRIPTOR_v1){.Width = MiB, .Height = 120}));
    CUDA_ARRAY3D_DESCRIPTOR_v2 volume = {.Width = MiB, .Height = 12, .Depth = 10};
    SERVED(serve_cuArray3DCreate_v2(&array, &volume));
    SERVED(serve_cuArray3DCreate(&array, &(CUDA_ARRAY3D_DESCRIPTOR_v1){.Width = MiB, .Height = 12, .Depth = 10}));
    SERVED(serve_cuMipmappedArrayCreate(&levels, &volume, 1));
}

static void others(void)
{
    CUdeviceptr at;
    CUgraphExec executable;
    SERVED(serve_cuMemAllocManaged(&at, SIZE, CU_MEM_ATTACH_GLOBAL));
    SERVED(serve_cuMemAllocAsync(&at, SIZE, NULL));
    SERVED(serve_cuMemAllocFromPoolAsync(&at, SIZE, NULL, NULL));
    SERVED_AS(serve_cuGraphInstantiate(&executable, NULL, NULL, NULL, 0), CUDA_ERROR_UNKNOWN);
    SERVED_AS(serve_cuGraphInstantiate_v2(&executable, NULL, NULL, NULL, 0), CUDA_ERROR_UNKNOWN);
    SERVED_AS(serve_cuGraphInstantiateWithFlags(&executable, NULL, 0), CUDA_ERROR_UNKNOWN);
    SERVED_AS(serve_cuGraphInstantiateWithParams(&executable, NULL, NULL), CUDA_ERROR_UNKNOWN);
    SERVED_AS(serve_cuGraphInstantiateWithParams_ptsz(&executable, NULL, NULL), CUDA_ERROR_UNKNOWN);
}

/* A thread that makes a context has none yet. */
#define MADE(call) \
    (kept(__LINE__), here = NULL, ended(call, CUDA_ERROR_UNKNOWN, __LINE__), (void)(here = (CUcontext)1))

static void contexts(void)
{
    CUcontext context;
    CUgreenCtx green;
    MADE(serve_cuCtxCreate_v4(&context, NULL, 0, 0));
    MADE(serve_cuCtxCreate_v3(&context, NULL, 0, 0, 0));
    MADE(serve_cuCtxCreate_v2(&context, 0, 0));
    MADE(serve_cuCtxCreate(&context, 0, 0));
    MADE(serve_cuDevicePrimaryCtxRetain(&context, 0));
    MADE(serve_cuGreenCtxCreate(&green, NULL, 0, CU_GREEN_CTX_DEFAULT_STREAM));
}

/* An answer that says nothing of memory, more than there is, and a thread without a context. */
static void refused(void)
{
    CUdeviceptr at;
    CUmemAllocationProp properties = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 7}};
    CUmemGenericAllocationHandle handle;
    kept(__LINE__);
    CHECK(serve_cuMemCreate(&handle, SIZE, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY && taken == SIZE);
    here = NULL;
    CHECK(serve_cuMemAllocManaged(&at, SIZE, CU_MEM_ATTACH_GLOBAL) == CUDA_ERROR_OUT_OF_MEMORY && taken == SIZE);
    here = (CUcontext)1;
    CHECK(attempts == 2);
    CHECK(serve_cuMemAllocManaged(&at, TOTAL + 1, CU_MEM_ATTACH_GLOBAL) == CUDA_ERROR_OUT_OF_MEMORY && !taken);
    CHECK(attempts == 4); /* again after what was kept was given back, and then there is nothing left to try */
}

int main(void)
{
    phos_real.cuMemCreate = create;
    phos_real.cuMemRelease = release;
    phos_real.cuMemAddressReserve = reserve;
    phos_real.cuMemMap = map;
    phos_real.cuMemUnmap = unmap;
    phos_real.cuMemSetAccess = set_access;
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuCtxGetDevice = current_device;
    phos_real.cuCtxGetApiVersion = context_version;
    phos_real.cuCtxSynchronize = synchronize;
    phos_real.cuThreadExchangeStreamCaptureMode = exchanged;
    phos_real.cuMemAllocManaged = managed;
    phos_real.cuArrayCreate_v2 = array_v2;
    phos_real.cuArrayCreate = array_v1;
    phos_real.cuArray3DCreate_v2 = volume_v2;
    phos_real.cuArray3DCreate = volume_v1;
    phos_real.cuMipmappedArrayCreate = mipmapped;
    phos_real.cuArray3DGetDescriptor_v2 = no_descriptor;
    phos_real.cuMipmappedArrayGetLevel = no_level;
    phos_real.cuMemAllocAsync = from_usual_pool;
    phos_real.cuMemAllocFromPoolAsync = from_pool;
    phos_real.cuGraphInstantiate = instantiate;
    phos_real.cuGraphInstantiate_v2 = instantiate;
    phos_real.cuGraphInstantiateWithFlags = instantiate_flags;
    phos_real.cuGraphInstantiateWithParams = instantiate_parameters;
    phos_real.cuGraphInstantiateWithParams_ptsz = instantiate_parameters;
    phos_real.cuCtxCreate_v4 = context_v4;
    phos_real.cuCtxCreate_v3 = context_v3;
    phos_real.cuCtxCreate_v2 = context_v2;
    phos_real.cuCtxCreate = context_v2;
    phos_real.cuDevicePrimaryCtxRetain = context_retained;
    phos_real.cuGreenCtxCreate = green_context;
    phos_policy = (struct phos_policy){.carry_device = true, .cache_set = true, .cache_bytes = TOTAL};
    phos_device_count = 1;
    phos_devices[0] = (struct phos_device){.total = TOTAL, .granularity = 2 * MiB, .carried = true};
    physical();
    arrays();
    others();
    contexts();
    refused();
    return 0;
}
