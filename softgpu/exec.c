/* Executable graphs: instantiating, launching, updating. A launch is one operation of its stream, which runs the nodes one
 * after the other in topological order. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "graph.h"

struct handle { /* what CUgraphExec points to */
    struct sg_exec *current; /* under sg_graph_lock, as is */
    struct sg_op *last;      /* the newest launch, which the next comes behind; held by a reference */
    uint64_t flags;
};

static struct sg_exec *exec_new(struct sg_graph *graph) /* takes the graph over */
{
    struct sg_exec *exec = graph ? calloc(1, sizeof(*exec)) : NULL;
    if (!exec) {
        sg_graph_free(graph);
        return NULL;
    }
    exec->references = 1;
    exec->graph = graph;
    exec->order = sg_graph_order(graph);
    pthread_mutex_init(&exec->running, NULL);
    if (exec->order)
        return exec;
    sg_exec_unreference(exec);
    return NULL;
}

void sg_exec_reference(struct sg_exec *exec)
{
    atomic_fetch_add(&exec->references, 1);
}

void sg_exec_unreference(struct sg_exec *exec)
{
    if (atomic_fetch_sub(&exec->references, 1) != 1)
        return;
    sg_graph_free(exec->graph);
    free(exec->order);
    pthread_mutex_destroy(&exec->running);
    free(exec);
}

static CUresult run_child(struct sg_graph *graph, struct sg_marks *marks, struct sg_context *context);

static CUresult run_node(struct sg_node *node, struct sg_marks *marks, struct sg_context *context)
{
    switch (node->work.type) {
    case SG_WORK_RECORD:
    case SG_WORK_WAIT:
        sg_marks_pass(marks, node);
        return CUDA_SUCCESS;
    case SG_WORK_CHILD:
        return run_child(node->work.child, marks, context);
    default:
        return sg_work_run(&node->work, context);
    }
}

static CUresult run_nodes(struct sg_node **order, size_t count, struct sg_marks *marks, struct sg_context *context)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        if (order[i]->disabled)
            continue;
        struct sg_context *own = order[i]->work.context ? order[i]->work.context : context;
        result = (CUresult)atomic_load(&own->sticky);
        if (result == CUDA_SUCCESS)
            result = run_node(order[i], marks, own);
        if (result != CUDA_SUCCESS)
            sg_context_fail(own, result);
    }
    return result;
}

CUresult sg_exec_run(struct sg_exec *exec, struct sg_marks *marks, struct sg_context *context)
{
    pthread_mutex_lock(&exec->running);
    CUresult result = run_nodes(exec->order, exec->graph->count, marks, context);
    pthread_mutex_unlock(&exec->running);
    return result;
}

static CUresult run_child(struct sg_graph *graph, struct sg_marks *marks, struct sg_context *context)
{
    struct sg_node **order = sg_graph_order(graph);
    if (!order)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = run_nodes(order, graph->count, marks, context);
    free(order);
    return result;
}

static struct handle *handle_get(CUgraphExec exec)
{
    return sg_handle_is(exec, SG_EXEC) ? (struct handle *)exec : NULL;
}

CUresult softgpu_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    if (!phGraphExec || !graph || (flags & ~15ull))
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
        return CUDA_ERROR_NOT_SUPPORTED;
    SG_UNSAFE(NULL);
    struct handle *handle = calloc(1, sizeof(*handle));
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_node **order = sg_graph_order(graph);
    handle->current = order ? exec_new(sg_graph_duplicate(graph, false, true)) : NULL;
    pthread_mutex_unlock(&sg_graph_lock);
    handle->flags = flags;
    bool cycle = !order;
    free(order);
    if (handle->current && sg_handle_add(handle, SG_EXEC)) {
        *phGraphExec = (CUgraphExec)handle;
        return CUDA_SUCCESS;
    }
    if (handle->current)
        sg_exec_unreference(handle->current);
    free(handle);
    return cycle ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult softgpu_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                       size_t bufferSize)
{
    if (phErrorNode)
        *phErrorNode = NULL;
    if (logBuffer && bufferSize)
        logBuffer[0] = 0;
    return softgpu_cuGraphInstantiateWithFlags(phGraphExec, hGraph, 0);
}

CUresult softgpu_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = softgpu_cuGraphInstantiateWithFlags(phGraphExec, hGraph, p->flags & ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
    p->hErrNode_out = NULL;
    p->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

CUresult softgpu_cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    SG_UNSAFE(NULL);
    if (!sg_handle_remove(hGraphExec, SG_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    struct handle *handle = (struct handle *)hGraphExec;
    sg_exec_unreference(handle->current);
    sg_op_unreference(handle->last);
    free(handle);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)
{
    struct handle *handle = handle_get(hGraphExec);
    if (!handle || !flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = handle->flags;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
    struct sg_stream *stream;
    CUresult result = handle_get(hGraphExec) ? sg_stream_get(hStream, &stream) : CUDA_ERROR_INVALID_VALUE;
    return result == CUDA_SUCCESS && sg_fault(SG_FAULT_UPLOAD_OOM) ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

CUresult softgpu_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
    struct handle *handle = handle_get(hGraphExec);
    struct sg_stream *stream;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (atomic_load(&sg_captures) && sg_capture_spoil(stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* graphs become children of others by hand alone */
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_work work = {.type = SG_WORK_GRAPH, .exec = handle->current, .context = stream->context};
    sg_exec_reference(work.exec);
    struct sg_op *before = sg_op_reference(handle->last), *op = NULL;
    pthread_mutex_unlock(&sg_graph_lock);
    result = sg_marks_make(work.exec->graph, &work.marks);
    if (result == CUDA_SUCCESS)
        result = sg_submit_after(stream, before);
    sg_op_unreference(before);
    if (result == CUDA_SUCCESS)
        result = sg_submit(stream, &work, false, &op);
    else
        sg_work_clear(&work);
    if (!op)
        return result;
    pthread_mutex_lock(&sg_graph_lock);
    before = handle->last;
    handle->last = op;
    pthread_mutex_unlock(&sg_graph_lock);
    sg_op_unreference(before);
    return result;
}

/* ---- updates: later launches see them, earlier ones do not ---- */

/* Under sg_graph_lock: a state that no launch holds, and the node in it that came from `node`. */
static CUresult writable(struct handle *handle, const struct sg_node *node, struct sg_node **out)
{
    if (atomic_load(&handle->current->references) > 1) {
        struct sg_exec *fresh = exec_new(sg_graph_duplicate(handle->current->graph, true, true));
        if (!fresh)
            return CUDA_ERROR_OUT_OF_MEMORY;
        sg_exec_unreference(handle->current);
        handle->current = fresh;
    }
    *out = sg_graph_find(handle->current->graph, node->id);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set(CUgraphExec exec, CUgraphNode hNode, CUgraphNodeType type, CUresult made, struct sg_work *work)
{
    struct handle *handle = handle_get(exec);
    struct sg_node *node = sg_node_get(hNode), *target;
    CUresult result = made;
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || !node || node->type != type) {
        sg_work_clear(work);
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&sg_graph_lock);
    result = writable(handle, node, &target);
    if (result == CUDA_SUCCESS)
        sg_node_replace(target, work);
    pthread_mutex_unlock(&sg_graph_lock);
    if (result != CUDA_SUCCESS)
        sg_work_clear(work);
    return result;
}

CUresult softgpu_cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    struct sg_work work;
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    return set(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_KERNEL, sg_node_kernel(nodeParams, NULL, &work), &work);
}

CUresult softgpu_cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
    struct sg_context *context;
    struct sg_work work;
    CUresult result = copyParams ? sg_context_get(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    return set(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMCPY, sg_node_copy(copyParams, context, &work), &work);
}

CUresult softgpu_cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                                const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
    struct sg_context *context;
    struct sg_work work;
    CUresult result = memsetParams ? sg_context_get(ctx, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    return set(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMSET, sg_node_fill(memsetParams, context, &work), &work);
}

CUresult softgpu_cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
    struct sg_work work;
    if (!nodeParams)
        return CUDA_ERROR_INVALID_VALUE;
    return set(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_HOST, sg_node_host(nodeParams, NULL, &work), &work);
}

CUresult softgpu_cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
    struct handle *handle = handle_get(hGraphExec);
    struct sg_node *node = sg_node_get(hNode), *target;
    if (!handle || !node)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    CUresult result = writable(handle, node, &target);
    if (result == CUDA_SUCCESS)
        target->disabled = !isEnabled;
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

CUresult softgpu_cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)
{
    struct handle *handle = handle_get(hGraphExec);
    struct sg_node *node = sg_node_get(hNode), *target;
    if (!handle || !node || !isEnabled)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    target = sg_graph_find(handle->current->graph, node->id);
    if (target)
        *isEnabled = !target->disabled;
    pthread_mutex_unlock(&sg_graph_lock);
    return target ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The shapes must agree: as many nodes, of the same types, with the same edges, in the order of their creation. */
static CUgraphExecUpdateResult compare(const struct sg_graph *a, const struct sg_graph *b, const struct sg_node **where)
{
    *where = NULL;
    if (a->count != b->count)
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < a->count; i++) {
        *where = b->nodes[i];
        if (a->nodes[i]->type != b->nodes[i]->type)
            return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        if (a->nodes[i]->dependency_count != b->nodes[i]->dependency_count)
            return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        for (size_t j = 0; j < a->nodes[i]->dependency_count; j++)
            if (a->nodes[i]->dependencies[j]->index != b->nodes[i]->dependencies[j]->index)
                return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    *where = NULL;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

CUresult softgpu_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
    struct handle *handle = handle_get(hGraphExec);
    struct sg_graph *graph = sg_graph_get(hGraph);
    const struct sg_node *where;
    if (!handle || !graph || !resultInfo)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_graph_lock);
    CUgraphExecUpdateResult verdict = compare(handle->current->graph, graph, &where);
    if (verdict == CU_GRAPH_EXEC_UPDATE_SUCCESS) {
        struct sg_graph *copy = sg_graph_duplicate(graph, false, true);
        /* The nodes of the graph it was made from go on naming the executable graph's nodes. */
        for (size_t i = 0; copy && i < copy->count; i++)
            copy->nodes[i]->origin = handle->current->graph->nodes[i]->origin;
        struct sg_exec *fresh = exec_new(copy);
        if (fresh) {
            sg_exec_unreference(handle->current);
            handle->current = fresh;
        } else {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    } else {
        result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    pthread_mutex_unlock(&sg_graph_lock);
    *resultInfo = (CUgraphExecUpdateResultInfo){.result = verdict, .errorNode = (CUgraphNode)where};
    return result;
}
