/* A driver which has what the software GPU lacks: conditional nodes, child graphs that change, nodes that kernels change,
 * tensor maps, handles that nobody told us of. And what the rest of the frontend would give to touch_cases.c. */
#include "touch_driver.h"
#include "audit.h"
#include "blocks.h"
#include "graph_nodes.h"
#include "log.h"
#include "memory.h"
#include "parts.h"
#include "track.h"

#include <string.h>

/* ---- what the rest of the frontend would give ---- */

/* Nothing is audited here. */
atomic_bool phos_audit_on;
void phos_audit_arguments(struct phos_kernel *kernel, const struct phos_arguments *arguments)
{
    (void)kernel, (void)arguments;
}
void phos_audit_graph(const struct phos_nodes *nodes)
{
    (void)nodes;
}

/* Nothing that was freed is kept here. */
bool phos_driver_recover(CUdevice device, unsigned *step)
{
    (void)device, (void)step;
    return false;
}

union phos_real phos_real;
pthread_mutex_t phos_memory_lock = PTHREAD_MUTEX_INITIALIZER;
struct phos_ranges phos_mappings;
_Atomic int phos_capture_count;

struct phos_mapping *phos_mapping_at(CUdeviceptr address)
{
    return (struct phos_mapping *)phos_ranges_find(&phos_mappings, address);
}
_Atomic(driver_event *) driver_meanwhile;
void phos_control_kick(void)
{
    driver_event *other = atomic_exchange(&driver_meanwhile, NULL);
    if (other)
        other();
}
bool phos_parts_any(uint64_t begin, uint64_t end)
{
    (void)begin, (void)end;
    return false;
}
struct phos_relaxed phos_relax(void)
{
    return (struct phos_relaxed){0};
}
void phos_unrelax(struct phos_relaxed *relaxed)
{
    (void)relaxed;
}
bool phos_library_in_blas(void)
{
    return false;
}

void phos_library_refine(struct phos_touches *touches)
{
    (void)touches;
}
void phos_log(enum phos_log_level level, const char *format, ...)
{
    (void)level, (void)format;
}
bool phos_log_wanted(enum phos_log_level level)
{
    (void)level;
    return false;
}

static struct phos_range memory = {LOW, 1 << 30};

/* ---- the driver ---- */

static CUresult get_function(CUfunction *function, CUmodule module, const char *name)
{
    struct thing *thing = calloc(1, sizeof *thing);
    *thing = (struct thing){name, (struct thing *)module, false};
    *function = (CUfunction)thing;
    return CUDA_SUCCESS;
}
static CUresult get_kernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    get_function((CUfunction *)kernel, (CUmodule)library, name);
    ((struct thing *)*kernel)->is_kernel = true;
    return CUDA_SUCCESS;
}
static CUresult function_name(const char **name, CUfunction function)
{
    *name = ((struct thing *)function)->name;
    return ((struct thing *)function)->is_kernel ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
static CUresult kernel_name(const char **name, CUkernel kernel)
{
    *name = ((struct thing *)kernel)->name;
    return ((struct thing *)kernel)->is_kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
static CUresult function_module(CUmodule *module, CUfunction function)
{
    *module = (CUmodule)((struct thing *)function)->holder;
    return CUDA_SUCCESS;
}
static CUresult kernel_library(CUlibrary *library, CUkernel kernel)
{
    *library = (CUlibrary)((struct thing *)kernel)->holder;
    return CUDA_SUCCESS;
}
/* All kernels: two addresses and a number; "map": a tensor map. */
static CUresult layout(const struct thing *thing, size_t index, size_t *offset, size_t *size)
{
    bool map = !strcmp(thing->name, "map");
    if (index >= (map ? 1u : 3u))
        return CUDA_ERROR_INVALID_VALUE;
    *offset = index * 8;
    *size = map ? 128 : index < 2 ? 8 : 4;
    return CUDA_SUCCESS;
}
static CUresult function_layout(CUfunction function, size_t index, size_t *offset, size_t *size)
{
    check(!((struct thing *)function)->is_kernel, "a kernel was asked for as a function");
    return layout((struct thing *)function, index, offset, size);
}
static CUresult kernel_layout(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    check(((struct thing *)kernel)->is_kernel, "a function was asked for as a kernel");
    return layout((struct thing *)kernel, index, offset, size);
}
static CUresult module_unload(CUmodule module)
{
    (void)module;
    return CUDA_SUCCESS;
}
static CUresult current(CUcontext *context)
{
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

static CUresult graph_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    struct graph *g = (struct graph *)graph;
    for (size_t i = 0; nodes && i < g->count; i++)
        nodes[i] = (CUgraphNode)&g->nodes[i];
    *count = g->count;
    return CUDA_SUCCESS;
}
static CUresult node_type(CUgraphNode node, CUgraphNodeType *type)
{
    *type = ((struct node *)node)->type;
    return CUDA_SUCCESS;
}
static CUresult node_kernel(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2 *parameters)
{
    struct node *n = (struct node *)node;
    *parameters = (CUDA_KERNEL_NODE_PARAMS_v2){.func = n->function, .kernelParams = n->parameters};
    return CUDA_SUCCESS;
}
static CUresult node_attribute(CUgraphNode node, CUkernelNodeAttrID attribute, CUkernelNodeAttrValue_v1 *value)
{
    check(attribute == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, "another attribute was asked for");
    value->deviceUpdatableKernelNode.deviceUpdatable = ((struct node *)node)->updatable;
    return CUDA_SUCCESS;
}
static CUresult node_enable(CUgraphExec executable, CUgraphNode node, unsigned int enabled)
{
    return executable && node && enabled <= 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult node_set(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS_v1 *parameters)
{
    *parameters = ((struct node *)node)->set;
    return CUDA_SUCCESS;
}
static CUresult node_child(CUgraphNode node, CUgraph *graph)
{
    *graph = (CUgraph)((struct node *)node)->child;
    return CUDA_SUCCESS;
}
static CUresult node_operations(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters)
{
    parameters->count = 1;
    parameters->paramArray = &((struct node *)node)->operation;
    return CUDA_SUCCESS;
}
static CUresult node_all(CUgraphNode node, CUgraphNodeParams *parameters)
{
    *parameters = ((struct node *)node)->all;
    return parameters->type ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult instantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    (void)graph, (void)flags;
    *executable = malloc(16);
    return CUDA_SUCCESS;
}
static CUresult exec_destroy(CUgraphExec executable)
{
    free(executable);
    return CUDA_SUCCESS;
}
static CUresult exec_update(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
    (void)executable, (void)graph, (void)info;
    return CUDA_SUCCESS;
}
static CUresult exec_child(CUgraphExec executable, CUgraphNode node, CUgraph graph)
{
    (void)executable, (void)node, (void)graph;
    return CUDA_SUCCESS;
}
static CUresult exec_set(CUgraphExec executable, CUgraphNode node, CUgraphNodeParams *parameters)
{
    (void)executable, (void)node, (void)parameters;
    return CUDA_SUCCESS;
}
static CUresult library_unload(CUlibrary library)
{
    (void)library;
    return CUDA_SUCCESS;
}
static CUresult library_module(CUmodule *module, CUlibrary library)
{
    *module = (CUmodule)((char *)library + 8);
    return CUDA_SUCCESS;
}
static CUresult kernel_function(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)((char *)kernel + 8);
    return CUDA_SUCCESS;
}
static CUresult graph_destroy(CUgraph graph)
{
    (void)graph;
    return CUDA_SUCCESS;
}
static CUresult map_replace(CUtensorMap *map, void *address)
{
    memset(map, 0x5a, sizeof *map);
    memcpy(map, &(uint64_t){(uint64_t)(uintptr_t)address * 3}, 8);
    return CUDA_SUCCESS;
}

static CUresult map_class(CUtensorMap *map, CUtensorMapAllocClass wanted, CUtensorMapAllocClass *given)
{
    (void)given;
    ((char *)map)[127] = (char)wanted;
    return wanted == CU_TENSOR_MAP_ALLOC_CLASS_AUTO ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* There are no twins. */
void phos_twins_unloading(void)
{
}

void driver_install(void)
{
    phos_real.cuModuleGetFunction = get_function;
    phos_real.cuLibraryGetKernel = get_kernel;
    phos_real.cuFuncGetName = function_name;
    phos_real.cuKernelGetName = kernel_name;
    phos_real.cuFuncGetModule = function_module;
    phos_real.cuKernelGetLibrary = kernel_library;
    phos_real.cuFuncGetParamInfo = function_layout;
    phos_real.cuKernelGetParamInfo = kernel_layout;
    phos_real.cuModuleUnload = module_unload;
    phos_real.cuLibraryUnload = library_unload;
    phos_real.cuLibraryGetModule = library_module;
    phos_real.cuKernelGetFunction = kernel_function;
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuGraphGetNodes = graph_nodes;
    phos_real.cuGraphNodeGetType = node_type;
    phos_real.cuGraphKernelNodeGetParams_v2 = node_kernel;
    phos_real.cuGraphKernelNodeGetAttribute = node_attribute;
    phos_real.cuGraphMemsetNodeGetParams = node_set;
    phos_real.cuGraphChildGraphNodeGetGraph = node_child;
    phos_real.cuGraphNodeGetParams = node_all;
    phos_real.cuGraphBatchMemOpNodeGetParams = node_operations;
    phos_real.cuGraphInstantiateWithFlags = instantiate;
    phos_real.cuGraphExecDestroy = exec_destroy;
    phos_real.cuGraphExecUpdate_v2 = exec_update;
    phos_real.cuGraphExecChildGraphNodeSetParams = exec_child;
    phos_real.cuGraphExecNodeSetParams = exec_set;
    phos_real.cuGraphNodeSetEnabled = node_enable;
    phos_real.cuGraphDestroy = graph_destroy;
    phos_real.cuTensorMapReplaceAddress = map_replace;
    phos_real.cuTensorMapSetAllocationClass = map_class;
    phos_ranges_add(&phos_mappings, &memory);
}
