/* Memory that stays with the driver: passed through, counted, reported. Never silently wrong. */
#include "array_size.h"
#include "cleanup.h"
#include "graphs.h"
#include "memory.h"
#include "phos_api.h"
#include "track.h"

#include <stdlib.h>

const char *const phos_uncarried_names[PHOS_UNCARRIED_KINDS] = {
    [PHOS_UNCARRIED_MANAGED] = "managed",     [PHOS_UNCARRIED_ARRAY] = "array",
    [PHOS_UNCARRIED_GRAPH_MEMORY] = "graph-memory", [PHOS_UNCARRIED_MULTICAST] = "multicast",
    [PHOS_UNCARRIED_EXTERNAL] = "external",   [PHOS_UNCARRIED_DEVICE] = "device",
    [PHOS_UNCARRIED_VMM] = "vmm",             [PHOS_UNCARRIED_HOST] = "pinned-host",
    [PHOS_UNCARRIED_POOL] = "pool",           [PHOS_UNCARRIED_IPC] = "ipc",
    [PHOS_UNCARRIED_IPC_EVENT] = "ipc-event", [PHOS_UNCARRIED_HOST_VMM] = "host-vmm",
    [PHOS_UNCARRIED_ENDPOINT] = "logical-endpoint",
};

static struct {
    _Atomic int64_t count, bytes;
} totals[PHOS_UNCARRIED_KINDS];
static _Atomic uint64_t version;

void phos_uncarried_add(enum phos_uncarried kind, int64_t count, int64_t bytes)
{
    atomic_fetch_add(&totals[kind].count, count);
    atomic_fetch_add(&totals[kind].bytes, bytes);
    atomic_fetch_add(&version, 1);
}

void phos_uncarried_get(enum phos_uncarried kind, uint64_t *count, uint64_t *bytes)
{
    int64_t c = atomic_load(&totals[kind].count), b = atomic_load(&totals[kind].bytes);
    *count = c > 0 ? (uint64_t)c : 0;
    *bytes = b > 0 ? (uint64_t)b : 0;
}

uint64_t phos_uncarried_version(void)
{
    return atomic_load(&version);
}

/* ---- memory, by its address, and arrays, by their handles ---- */

#define BUCKETS 1024

struct phos_uncarried_memory {
    uint64_t address;
    size_t bytes;
    enum phos_uncarried kind;
    CUcontext context;
    struct phos_uncarried_memory *next;
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER; /* taken last */
static struct phos_uncarried_memory *memories[BUCKETS];

static struct phos_uncarried_memory **bucket_of(uint64_t address)
{
    return &memories[(address * 0x9e3779b97f4a7c15ull >> 32) % BUCKETS];
}

static void put(struct phos_uncarried_memory *memory)
{
    struct phos_uncarried_memory **bucket = bucket_of(memory->address);
    PHOS_LOCKED(&memory_lock);
    memory->next = *bucket;
    *bucket = memory;
}

void phos_uncarried_made(enum phos_uncarried kind, uint64_t address, size_t bytes)
{
    CUcontext context = NULL;
    phos_uncarried_add(kind, 1, (int64_t)bytes);
    struct phos_uncarried_memory *memory = malloc(sizeof *memory);
    if (!memory) /* then it counts for ever */
        return;
    if (kind != PHOS_UNCARRIED_POOL && phos_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS)
        context = phos_context_whole(context);
    *memory = (struct phos_uncarried_memory){.address = address, .bytes = bytes, .kind = kind, .context = context};
    put(memory);
}

struct phos_uncarried_memory *phos_uncarried_take(uint64_t address)
{
    PHOS_LOCKED(&memory_lock);
    for (struct phos_uncarried_memory **link = bucket_of(address); *link; link = &(*link)->next)
        if ((*link)->address == address) {
            struct phos_uncarried_memory *memory = *link;
            *link = memory->next;
            return memory;
        }
    return NULL;
}

static void gone(struct phos_uncarried_memory *memory)
{
    phos_uncarried_add(memory->kind, -1, -(int64_t)memory->bytes);
    free(memory);
}

CUresult phos_uncarried_freed(struct phos_uncarried_memory *memory, CUresult result)
{
    if (memory && result == CUDA_SUCCESS)
        gone(memory);
    else if (memory)
        put(memory);
    return result;
}

void phos_uncarried_context_ends(CUcontext context)
{
    PHOS_LOCKED(&memory_lock);
    for (size_t i = 0; context && i < BUCKETS; i++)
        for (struct phos_uncarried_memory **link = &memories[i]; *link;) {
            struct phos_uncarried_memory *memory = *link;
            if (memory->context != context) {
                link = &memory->next;
                continue;
            }
            *link = memory->next;
            gone(memory);
        }
}

CUresult serve_cuMemAllocManaged(CUdeviceptr_v2 *dptr, size_t bytesize, unsigned int flags)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuMemAllocManaged(dptr, bytesize, flags));
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_MANAGED, *dptr, bytesize);
    return result;
}

/* ---- arrays: the driver's alone, for their layout is; their descriptors say how large they are ---- */

static uint64_t array_bytes(CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR_v2 descriptor;
    return phos_real.cuArray3DGetDescriptor_v2(&descriptor, array) == CUDA_SUCCESS ? phos_array_bytes(&descriptor) : 0;
}

static uint64_t mipmapped_bytes(CUmipmappedArray array)
{
    enum { LEVELS = 32 };
    uint64_t bytes = 0;
    CUarray level;
    for (unsigned int n = 0; n < LEVELS && phos_real.cuMipmappedArrayGetLevel(&level, array, n) == CUDA_SUCCESS; n++)
        bytes += array_bytes(level);
    return bytes;
}

static CUresult array_made(CUresult result, const CUarray *array)
{
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_ARRAY, (uint64_t)(uintptr_t)*array, array_bytes(*array));
    return result;
}

CUresult serve_cuArrayCreate_v2(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    return array_made(PHOS_RETRIED_HERE(phos_real.cuArrayCreate_v2(handle, descriptor)), handle);
}

CUresult serve_cuArrayCreate(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    return array_made(PHOS_RETRIED_HERE(phos_real.cuArrayCreate(handle, descriptor)), handle);
}

CUresult serve_cuArray3DCreate_v2(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    return array_made(PHOS_RETRIED_HERE(phos_real.cuArray3DCreate_v2(handle, descriptor)), handle);
}

CUresult serve_cuArray3DCreate(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    return array_made(PHOS_RETRIED_HERE(phos_real.cuArray3DCreate(handle, descriptor)), handle);
}

CUresult serve_cuArrayDestroy(CUarray array)
{
    struct phos_uncarried_memory *memory = phos_uncarried_take((uint64_t)(uintptr_t)array);
    return phos_uncarried_freed(memory, phos_real.cuArrayDestroy(array));
}

CUresult serve_cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor,
                                      unsigned int levels)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuMipmappedArrayCreate(handle, descriptor, levels));
    if (result == CUDA_SUCCESS)
        phos_uncarried_made(PHOS_UNCARRIED_ARRAY, (uint64_t)(uintptr_t)*handle, mipmapped_bytes(*handle));
    return result;
}

CUresult serve_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    struct phos_uncarried_memory *memory = phos_uncarried_take((uint64_t)(uintptr_t)array);
    return phos_uncarried_freed(memory, phos_real.cuMipmappedArrayDestroy(array));
}

CUresult serve_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1 *descriptor)
{
    CUresult result = phos_real.cuImportExternalMemory(memory, descriptor);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_EXTERNAL, 1, 0);
    return result;
}

CUresult serve_cuDestroyExternalMemory(CUexternalMemory memory)
{
    CUresult result = phos_real.cuDestroyExternalMemory(memory);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_EXTERNAL, -1, 0);
    return result;
}

CUresult serve_cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      CUDA_MEM_ALLOC_NODE_PARAMS_v1 *parameters)
{
    CUresult result = phos_real.cuGraphAddMemAllocNode(node, graph, dependencies, count, parameters);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_GRAPH_MEMORY, 1, (int64_t)(parameters ? parameters->bytesize : 0));
    return result;
}

static CUresult node_added(CUresult result, CUgraph graph, const CUgraphNode *node, const CUgraphNodeParams *parameters)
{
    if (result == CUDA_SUCCESS && node && parameters)
        phos_graph_node_added(graph, *node, parameters);
    if (result == CUDA_SUCCESS && parameters && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        phos_uncarried_add(PHOS_UNCARRIED_GRAPH_MEMORY, 1, (int64_t)parameters->alloc.bytesize);
    return result;
}

CUresult serve_cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                 const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *parameters)
{
    CUresult result = phos_real.cuGraphAddNode_v3(node, graph, dependencies, data, count, parameters);
    return node_added(result, graph, node, parameters);
}

CUresult serve_cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                 const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *parameters)
{
    CUresult result = phos_real.cuGraphAddNode_v2(node, graph, dependencies, data, count, parameters);
    return node_added(result, graph, node, parameters);
}

CUresult serve_cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              CUgraphNodeParams *parameters)
{
    CUresult result = phos_real.cuGraphAddNode(node, graph, dependencies, count, parameters);
    return node_added(result, graph, node, parameters);
}
