#include "graph_nodes.h"
#include "cleanup.h"
#include "touch_parts.h"

#include <stdlib.h>
#include <string.h>

#define ALL (PHOS_READS | PHOS_WRITES)

/* ---- one node ---- */

void phos_node_clear(struct phos_node *node)
{
    free(node->block);
    free(node->touches);
    *node = (struct phos_node){.node = node->node, .parent = node->parent, .disabled = node->disabled};
}

static void take(struct phos_node *node, struct phos_touches *touches)
{
    node->anything |= touches->anything;
    node->host_copy = touches->host_copy;
    if (touches->count && (node->touches = malloc(touches->count * sizeof *node->touches))) {
        memcpy(node->touches, touches->list, touches->count * sizeof *node->touches);
        node->count = touches->count;
    } else if (touches->count)
        node->anything = ALL;
    phos_touches_end(touches);
}

void phos_node_kernel(struct phos_node *node, CUfunction function, void **parameters, void **extra)
{
    struct phos_arguments arguments = phos_arguments_of(parameters, extra);
    struct phos_kernel *kernel = function ? phos_kernel_of(function) : NULL;
    if (kernel && phos_kernel_copy(kernel, &arguments, &node->block, &node->block_size))
        node->kernel = kernel;
    else
        node->anything = ALL;
}

void phos_node_copy(struct phos_node *node, const CUDA_MEMCPY3D *copy)
{
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    if (copy)
        phos_touch_copy_3d(&touches, copy);
    take(node, &touches);
}

void phos_node_set(struct phos_node *node, CUdeviceptr address, size_t pitch, size_t element, size_t width, size_t height)
{
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    if (width && height)
        phos_touches_add(&touches, address, (height - 1) * pitch + width * element, PHOS_WRITES);
    take(node, &touches);
}

void phos_node_operations(struct phos_node *node, const CUstreamBatchMemOpParams *operations, unsigned int count)
{
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    phos_touch_memory_operations(&touches, operations, count);
    take(node, &touches);
}

void phos_node_copies(struct phos_node *node, const CUDA_MEMCPY_BATCH_NODE_PARAMS *copies)
{
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    phos_touch_copies(&touches, copies->dsts, copies->srcs, copies->sizes, copies->count);
    take(node, &touches);
}

void phos_node_fabric_copies(struct phos_node *node, const CUDA_FABRIC_CPY_BATCH_NODE_PARAMS *copies)
{
    struct phos_touches touches;
    phos_touches_begin(&touches, NULL);
    phos_touch_fabric_copies(&touches, copies->opList, copies->numOps);
    take(node, &touches);
}

/* ---- nodes of a graph ---- */

static struct phos_node *add(struct phos_nodes *nodes)
{
    if (nodes->count == nodes->capacity) {
        size_t capacity = nodes->capacity ? nodes->capacity * 2 : 16;
        struct phos_node *grown = realloc(nodes->list, capacity * sizeof *grown);
        if (!grown) {
            nodes->lost = true;
            return NULL;
        }
        nodes->list = grown;
        nodes->capacity = capacity;
    }
    return &nodes->list[nodes->count++];
}

static void record_kernel(struct phos_node *node)
{
    CUDA_KERNEL_NODE_PARAMS_v2 parameters = {0};
    CUresult result = phos_real.cuGraphKernelNodeGetParams_v2(node->node, &parameters);
    if (result == CUDA_ERROR_NOT_SUPPORTED) { /* a driver before 12.0 */
        CUDA_KERNEL_NODE_PARAMS_v1 former = {0};
        result = phos_real.cuGraphKernelNodeGetParams(node->node, &former);
        parameters.func = former.func;
        parameters.kernelParams = former.kernelParams;
        parameters.extra = former.extra;
    }
    if (result != CUDA_SUCCESS) {
        node->anything = ALL;
        return;
    }
    CUfunction function = parameters.func ? parameters.func : (CUfunction)parameters.kern;
    CUcontext popped;
    bool entered = parameters.ctx && phos_real.cuCtxPushCurrent_v2(parameters.ctx) == CUDA_SUCCESS; /* what it is named in */
    phos_node_kernel(node, function, parameters.kernelParams, parameters.extra);
    if (entered)
        phos_real.cuCtxPopCurrent_v2(&popped);
    CUkernelNodeAttrValue_v1 value;
    memset(&value, 0, sizeof value);
    if (phos_real.cuGraphKernelNodeGetAttribute(node->node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) ==
            CUDA_SUCCESS &&
        value.deviceUpdatableKernelNode.deviceUpdatable) {
        node->updatable = true;
        node->anything = ALL;
    }
}

static void record_memory(struct phos_node *node, CUgraphNodeType type)
{
    CUDA_MEMCPY3D_v2 copy;
    CUDA_MEMSET_NODE_PARAMS_v1 set;
    CUDA_BATCH_MEM_OP_NODE_PARAMS operations = {0};
    if (type == CU_GRAPH_NODE_TYPE_MEMCPY && phos_real.cuGraphMemcpyNodeGetParams(node->node, &copy) == CUDA_SUCCESS)
        phos_node_copy(node, &copy);
    else if (type == CU_GRAPH_NODE_TYPE_MEMSET && phos_real.cuGraphMemsetNodeGetParams(node->node, &set) == CUDA_SUCCESS)
        phos_node_set(node, set.dst, set.pitch, set.elementSize, set.width, set.height);
    else if (type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP &&
             phos_real.cuGraphBatchMemOpNodeGetParams(node->node, &operations) == CUDA_SUCCESS)
        phos_node_operations(node, operations.paramArray, operations.count);
    else
        node->anything = ALL;
}

/* A driver that has such nodes has this call. */
static void record_batch(struct phos_node *node, CUgraphNodeType type)
{
    CUgraphNodeParams parameters = {.type = type};
    if (phos_real.cuGraphNodeGetParams(node->node, &parameters) != CUDA_SUCCESS || parameters.type != type)
        node->anything = ALL;
    else if (type == CU_GRAPH_NODE_TYPE_MEMCPY_BATCH)
        phos_node_copies(node, &parameters.memcpyBatch);
    else
        phos_node_fabric_copies(node, &parameters.fabricCpyBatch);
}

static void record_node(struct phos_nodes *nodes, CUgraphNode handle, CUgraphNode parent)
{
    struct phos_node node = {.node = handle, .parent = parent};
    CUgraphNodeType type;
    CUgraph child = NULL;
    size_t bodies = 0;
    PHOS_FREES CUgraph *body = NULL;
    if (phos_real.cuGraphNodeGetType(handle, &type) != CUDA_SUCCESS)
        type = CU_GRAPH_NODE_TYPE_CONDITIONAL; /* nobody knows it */
    switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        record_kernel(&node);
        break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        record_memory(&node, type);
        break;
    case CU_GRAPH_NODE_TYPE_MEMCPY_BATCH:
    case CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH:
        record_batch(&node, type);
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        if (phos_real.cuGraphChildGraphNodeGetGraph(handle, &child) != CUDA_SUCCESS)
            node.anything = ALL;
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: /* the driver's own memory */
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        if (!(body = phos_conditional_graphs(handle, &bodies)))
            node.anything = ALL;
        break;
    default: /* a newer driver's */
        node.anything = ALL;
    }
    struct phos_node *place = add(nodes);
    if (place)
        *place = node;
    else
        phos_node_clear(&node);
    if (child)
        phos_nodes_record(nodes, child, handle);
    for (size_t i = 0; body && i < bodies; i++)
        phos_nodes_record(nodes, body[i], handle);
}

void phos_nodes_record(struct phos_nodes *nodes, CUgraph graph, CUgraphNode parent)
{
    size_t count = 0;
    if (phos_real.cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS) {
        nodes->lost = true;
        return;
    }
    if (!count)
        return;
    PHOS_FREES CUgraphNode *handles = malloc(count * sizeof *handles);
    if (!handles || phos_real.cuGraphGetNodes(graph, handles, &count) != CUDA_SUCCESS) {
        nodes->lost = true;
        return;
    }
    for (size_t i = 0; i < count; i++)
        record_node(nodes, handles[i], parent);
}

static int by_handle(const void *one, const void *other)
{
    const struct phos_node *x = one, *y = other;
    uintptr_t a = (uintptr_t)x->node, b = (uintptr_t)y->node;
    if (a == b) {
        a = (uintptr_t)x->given;
        b = (uintptr_t)y->given;
    }
    return a < b ? -1 : a > b;
}

void phos_nodes_sort(struct phos_nodes *nodes)
{
    if (nodes->count)
        qsort(nodes->list, nodes->count, sizeof *nodes->list, by_handle);
    nodes->sorted = nodes->count;
}

struct phos_node *phos_nodes_find(const struct phos_nodes *nodes, CUgraphNode node)
{
    struct phos_node key = {.node = node};
    struct phos_node *found =
        nodes->sorted ? bsearch(&key, nodes->list, nodes->sorted, sizeof key, by_handle) : NULL;
    for (size_t i = nodes->sorted; !found && i < nodes->count; i++)
        if (nodes->list[i].node == node && !nodes->list[i].given)
            found = &nodes->list[i];
    return found;
}

void phos_nodes_put(struct phos_nodes *nodes, struct phos_node *node)
{
    struct phos_node *place = phos_nodes_find(nodes, node->node);
    if (place) {
        node->parent = place->parent;
        node->disabled = place->disabled;
        node->updatable = place->updatable;
        if (node->updatable)
            node->anything = ALL;
        phos_node_clear(place);
    } else if (!(place = add(nodes))) {
        phos_node_clear(node);
        return;
    }
    *place = *node;
    *node = (struct phos_node){0};
}

/* Two nodes may be given the same child graph: what they are given is only known to be inside these. */
static bool inside(const struct phos_nodes *nodes, const struct phos_node *node, CUgraphNode parent)
{
    CUgraphNode around = node->given ? node->given : node->parent;
    while (around && around != parent) {
        node = phos_nodes_find(nodes, around);
        around = node ? node->parent : NULL;
    }
    return around != NULL;
}

void phos_nodes_replace(struct phos_nodes *nodes, CUgraphNode parent, struct phos_nodes *by)
{
    for (size_t i = 0; i < nodes->count; i++)
        nodes->list[i].dropped = inside(nodes, &nodes->list[i], parent);
    size_t kept = 0;
    for (size_t i = 0; i < nodes->count; i++) {
        if (nodes->list[i].dropped)
            phos_node_clear(&nodes->list[i]);
        else
            nodes->list[kept++] = nodes->list[i];
    }
    nodes->count = kept;
    for (size_t i = 0; i < by->count; i++) {
        struct phos_node *place = add(nodes);
        if (place) {
            *place = by->list[i];
            place->given = parent;
            by->list[i] = (struct phos_node){0};
        }
    }
    nodes->lost |= by->lost;
    phos_nodes_free(by);
    phos_nodes_sort(nodes);
}

void phos_nodes_free(struct phos_nodes *nodes)
{
    for (size_t i = 0; i < nodes->count; i++)
        phos_node_clear(&nodes->list[i]);
    free(nodes->list);
    *nodes = (struct phos_nodes){0};
}
