/* Graph nodes: parameters in the API's forms, and the calls that add, read and change them. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "graph.h"

CUresult sg_node_kernel(const CUDA_KERNEL_NODE_PARAMS *p, struct sg_context *context, struct sg_work *out)
{
    CUfunction function = p->func ? p->func : (CUfunction)p->kern;
    struct sg_function *found;
    if (!context && p->ctx && sg_context_get(p->ctx, &context) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = sg_function_get(function, context, &found);
    if (result != CUDA_SUCCESS)
        return result;
    *out = (struct sg_work){.type = SG_WORK_KERNEL, .context = found->module->context};
    return sg_kernel_work_make((CUfunction)found, found->module->context, (unsigned[3]){p->gridDimX, p->gridDimY, p->gridDimZ},
                               (unsigned[3]){p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes, p->kernelParams,
                               p->extra, &out->kernel);
}

CUresult sg_node_copy(const CUDA_MEMCPY3D *p, struct sg_context *context, struct sg_work *out)
{
    *out = (struct sg_work){.type = SG_WORK_COPY, .context = context};
    CUresult result = sg_copy_from_3d(p, &out->copy);
    return result == CUDA_SUCCESS ? sg_copy_check(&out->copy, context) : result;
}

CUresult sg_node_fill(const CUDA_MEMSET_NODE_PARAMS *p, struct sg_context *context, struct sg_work *out)
{
    *out = (struct sg_work){.type = SG_WORK_FILL, .context = context};
    size_t pitch = p->height > 1 ? p->pitch : p->width * p->elementSize;
    out->fill = (struct sg_fill){p->dst, pitch, p->width, p->height, p->elementSize, p->value};
    return sg_fill_check(&out->fill, context);
}

CUresult sg_node_host(const CUDA_HOST_NODE_PARAMS *p, struct sg_context *context, struct sg_work *out)
{
    *out = (struct sg_work){.type = SG_WORK_HOST, .host = {.function = p->fn, .data = p->userData}, .context = context};
    return p->fn ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void sg_node_replace(struct sg_node *node, struct sg_work *work)
{
    sg_work_clear(&node->work);
    free(node->param_pointers);
    node->param_pointers = NULL;
    node->work = *work;
}

/* Adds, under the lock; drops the work if that fails. */
static CUresult add(CUgraphNode *out, CUgraph hGraph, const CUgraphNode *dependencies, size_t count, CUgraphNodeType type,
                    struct sg_work *work, struct sg_node **made)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    struct sg_node *node = NULL;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (out && graph) {
        pthread_mutex_lock(&sg_graph_lock);
        result = sg_graph_add(graph, (struct sg_node *const *)dependencies, count, type, work, &node);
        pthread_mutex_unlock(&sg_graph_lock);
    }
    if (result != CUDA_SUCCESS) {
        sg_work_clear(work);
        return result;
    }
    *out = (CUgraphNode)node;
    if (made)
        *made = node;
    return CUDA_SUCCESS;
}

static CUresult context_for(CUcontext handle, struct sg_context **context)
{
    return sg_context_get(handle, context);
}

CUresult softgpu_cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                         size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    struct sg_work work;
    struct sg_node *node;
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_node_kernel(nodeParams, NULL, &work);
    if (result == CUDA_SUCCESS)
        result = add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_KERNEL, &work, &node);
    return result;
}

CUresult softgpu_cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
    struct sg_context *context;
    struct sg_work work;
    struct sg_node *node;
    CUresult result = copyParams ? context_for(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = sg_node_copy(copyParams, context, &work);
    if (result == CUDA_SUCCESS)
        result = add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_MEMCPY, &work, &node);
    if (result == CUDA_SUCCESS)
        node->given.copy = *copyParams;
    return result;
}

CUresult softgpu_cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
    struct sg_context *context;
    struct sg_work work;
    struct sg_node *node;
    CUresult result = memsetParams ? context_for(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = sg_node_fill(memsetParams, context, &work);
    if (result == CUDA_SUCCESS)
        result = add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_MEMSET, &work, &node);
    if (result == CUDA_SUCCESS)
        node->given.fill = *memsetParams;
    return result;
}

CUresult softgpu_cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
    struct sg_work work;
    CUresult result = nodeParams ? sg_node_host(nodeParams, NULL, &work) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_HOST, &work, NULL);
    return result;
}

CUresult softgpu_cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies)
{
    struct sg_work work = {.type = SG_WORK_EMPTY};
    return add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_EMPTY, &work, NULL);
}

CUresult softgpu_cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                          size_t numDependencies, CUgraph childGraph)
{
    struct sg_graph *child = sg_graph_get(childGraph);
    if (!child)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_work work = {.type = SG_WORK_CHILD, .child = sg_graph_copy(child)};
    pthread_mutex_unlock(&sg_graph_lock);
    if (!work.child)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return add(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_GRAPH, &work, NULL);
}

static CUresult add_event(CUgraphNode *out, CUgraph hGraph, const CUgraphNode *dependencies, size_t count, CUevent handle, bool record)
{
    if (!sg_handle_is(handle, SG_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    struct sg_event *event = (struct sg_event *)handle;
    atomic_fetch_add(&event->references, 1);
    struct sg_work work = {.type = record ? SG_WORK_RECORD : SG_WORK_WAIT, .event = event};
    return add(out, hGraph, dependencies, count, record ? CU_GRAPH_NODE_TYPE_EVENT_RECORD : CU_GRAPH_NODE_TYPE_WAIT_EVENT, &work, NULL);
}

CUresult softgpu_cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                           size_t numDependencies, CUevent event)
{
    return add_event(phGraphNode, hGraph, dependencies, numDependencies, event, true);
}

CUresult softgpu_cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                         size_t numDependencies, CUevent event)
{
    return add_event(phGraphNode, hGraph, dependencies, numDependencies, event, false);
}

CUresult softgpu_cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                   const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *p)
{
    (void)dependencyData;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        CUDA_KERNEL_NODE_PARAMS kernel = {
            p->kernel.func, p->kernel.gridDimX, p->kernel.gridDimY, p->kernel.gridDimZ, p->kernel.blockDimX, p->kernel.blockDimY,
            p->kernel.blockDimZ, p->kernel.sharedMemBytes, p->kernel.kernelParams, p->kernel.extra, p->kernel.kern, p->kernel.ctx,
        };
        return softgpu_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &kernel);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return softgpu_cuGraphAddMemcpyNode(phGraphNode, hGraph, dependencies, numDependencies, &p->memcpy.copyParams, p->memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
        CUDA_MEMSET_NODE_PARAMS fill = {p->memset.dst, p->memset.pitch, p->memset.value, p->memset.elementSize, p->memset.width,
                                        p->memset.height};
        return softgpu_cuGraphAddMemsetNode(phGraphNode, hGraph, dependencies, numDependencies, &fill, p->memset.ctx);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
        CUDA_HOST_NODE_PARAMS host = {p->host.fn, p->host.userData};
        return softgpu_cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, &host);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return softgpu_cuGraphAddChildGraphNode(phGraphNode, hGraph, dependencies, numDependencies, p->graph.graph);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return softgpu_cuGraphAddEmptyNode(phGraphNode, hGraph, dependencies, numDependencies);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return add_event(phGraphNode, hGraph, dependencies, numDependencies, p->eventRecord.event, true);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return add_event(phGraphNode, hGraph, dependencies, numDependencies, p->eventWait.event, false);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult softgpu_cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                CUgraphNodeParams *nodeParams)
{
    return softgpu_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, NULL, numDependencies, nodeParams);
}

/* ---- reading and changing ---- */

static struct sg_node *typed(CUgraphNode hNode, CUgraphNodeType type)
{
    struct sg_node *node = sg_node_get(hNode);
    return node && node->type == type ? node : NULL;
}

CUresult softgpu_cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *out)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL);
    if (!node || !out)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sg_kernel_work *work = &node->work.kernel;
    size_t count = ptx_kernel_param_count(work->function->kernel);
    pthread_mutex_lock(&sg_graph_lock);
    if (!node->param_pointers && count)
        node->param_pointers = malloc(count * sizeof(*node->param_pointers));
    for (size_t i = 0; node->param_pointers && i < count; i++) {
        size_t offset, size;
        ptx_kernel_param(work->function->kernel, i, &offset, &size);
        node->param_pointers[i] = (char *)work->params + offset;
    }
    pthread_mutex_unlock(&sg_graph_lock);
    *out = (CUDA_KERNEL_NODE_PARAMS){
        .func = (CUfunction)work->function, .gridDimX = work->grid[0], .gridDimY = work->grid[1], .gridDimZ = work->grid[2],
        .blockDimX = work->block[0], .blockDimY = work->block[1], .blockDimZ = work->block[2],
        .sharedMemBytes = (unsigned)work->dynamic_shared, .kernelParams = node->param_pointers,
        .ctx = (CUcontext)work->function->module->context,
    };
    return CUDA_SUCCESS;
}

static CUresult set(struct sg_node *node, CUresult made, struct sg_work *work)
{
    if (made != CUDA_SUCCESS)
        return made;
    pthread_mutex_lock(&sg_graph_lock);
    sg_node_replace(node, work);
    pthread_mutex_unlock(&sg_graph_lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL);
    struct sg_work work;
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    return set(node, sg_node_kernel(nodeParams, NULL, &work), &work);
}

CUresult softgpu_cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_MEMCPY);
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    *nodeParams = node->given.copy;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_MEMCPY);
    struct sg_work work;
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = set(node, sg_node_copy(nodeParams, node->work.context, &work), &work);
    if (result == CUDA_SUCCESS)
        node->given.copy = *nodeParams;
    return result;
}

CUresult softgpu_cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_MEMSET);
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sg_fill *fill = &node->work.fill;
    *nodeParams = (CUDA_MEMSET_NODE_PARAMS){fill->address, fill->pitch, fill->value, fill->element, fill->width, fill->height};
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_MEMSET);
    struct sg_work work;
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    return set(node, sg_node_fill(nodeParams, node->work.context, &work), &work);
}

CUresult softgpu_cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_HOST);
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    *nodeParams = (CUDA_HOST_NODE_PARAMS){node->work.host.function, node->work.host.data};
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_HOST);
    struct sg_work work;
    if (!node || !nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    return set(node, sg_node_host(nodeParams, node->work.context, &work), &work);
}

CUresult softgpu_cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)
{
    struct sg_node *node = typed(hNode, CU_GRAPH_NODE_TYPE_GRAPH);
    if (!node || !phGraph)
        return CUDA_ERROR_INVALID_VALUE;
    *phGraph = (CUgraph)node->work.child;
    return CUDA_SUCCESS;
}

static CUresult get_event(CUgraphNode hNode, CUgraphNodeType type, CUevent *out)
{
    struct sg_node *node = typed(hNode, type);
    if (!node || !out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUevent)node->work.event;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
    return get_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event_out);
}

CUresult softgpu_cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
    return get_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event_out);
}

/* Attributes of kernel nodes are hints here; the cooperative one is implied. */
CUresult softgpu_cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)
{
    (void)attr;
    if (!typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) || !value_out)
        return CUDA_ERROR_INVALID_VALUE;
    memset(value_out, 0, sizeof(*value_out));
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
    (void)attr;
    return typed(hNode, CU_GRAPH_NODE_TYPE_KERNEL) && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
    return typed(dst, CU_GRAPH_NODE_TYPE_KERNEL) && typed(src, CU_GRAPH_NODE_TYPE_KERNEL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
