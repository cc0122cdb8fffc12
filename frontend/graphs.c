/* Executable graphs. What their nodes do is written down when they are made and when they are changed, which costs little
 * beside what the driver does then; what a launch touches is worked out from that at the first launch in a window, and
 * again after a change. A launch outside a window costs nothing.
 *
 * One lock, graph_lock, guards the records; phos_memory_lock and then phos_function_lock are taken under it. No driver call
 * is made with it held. */
#include "graphs.h"
#include "audit.h"
#include "cleanup.h"
#include "graph_nodes.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#define ALL (PHOS_READS | PHOS_WRITES)
#define BUCKETS 1024

struct executable {
    CUgraphExec graph;
    struct phos_nodes nodes;
    bool on_device; /* kernels of other graphs can launch it */
    bool worked_out;
    uint64_t version;          /* phos_kernel_touch_version() that the rest was worked out at */
    struct phos_touch *list;   /* sorted, each place once */
    size_t count;
    uint32_t anything;
    bool host_copy, communicates;
    bool guessed; /* the code of a kernel in it was not followed */
    struct executable *next;
};

struct conditional {
    CUgraphNode node;
    CUgraph graph; /* that the node is in */
    CUgraph *bodies;
    size_t count;
    struct conditional *next;
};

static pthread_mutex_t graph_lock = PTHREAD_MUTEX_INITIALIZER;
static struct executable *executables[BUCKETS];
static struct conditional *conditionals;
static size_t on_device_count; /* executables that kernels can launch */

/* With graph_lock held, from here to the next rule. */

static struct executable **place_of(CUgraphExec graph)
{
    struct executable **link = &executables[((uintptr_t)graph * 0x9e3779b97f4a7c15ull >> 32) % BUCKETS];
    while (*link && (*link)->graph != graph)
        link = &(*link)->next;
    return link;
}

static void forget(CUgraphExec graph)
{
    struct executable **link = place_of(graph), *gone = *link;
    if (!gone)
        return;
    *link = gone->next;
    on_device_count -= gone->on_device;
    phos_nodes_free(&gone->nodes);
    free(gone->list);
    free(gone);
}

static void forget_conditionals(CUgraph graph, CUgraphNode node)
{
    for (struct conditional **link = &conditionals; *link;) {
        struct conditional *c = *link;
        if (!(graph && c->graph == graph) && !(node && c->node == node)) {
            link = &c->next;
            continue;
        }
        *link = c->next;
        for (size_t i = 0; i < c->count; i++) { /* nested ones go with it */
            forget_conditionals(c->bodies[i], NULL);
            link = &conditionals; /* the list changed */
        }
        free(c->bodies);
        free(c);
    }
}

static int by_place(const void *one, const void *other)
{
    const struct phos_touch *a = one, *b = other;
    if (a->address != b->address)
        return a->address < b->address ? -1 : 1;
    return a->size < b->size ? -1 : a->size > b->size;
}

static void merge(struct phos_touches *touches)
{
    if (!touches->count)
        return;
    qsort(touches->list, touches->count, sizeof *touches->list, by_place);
    size_t kept = 0;
    for (size_t i = 1; i < touches->count; i++)
        if (by_place(&touches->list[kept], &touches->list[i]) == 0)
            touches->list[kept].access |= touches->list[i].access;
        else
            touches->list[++kept] = touches->list[i];
    touches->count = kept + 1;
}

static void work_out(struct executable *executable, uint64_t version)
{
    struct phos_touches all;
    phos_touches_begin(&all, NULL);
    for (size_t i = 0; i < executable->nodes.count; i++) {
        const struct phos_node *node = &executable->nodes.list[i];
        if (node->disabled && !node->updatable) /* else a kernel may enable it */
            continue;
        all.anything |= node->anything;
        all.host_copy |= node->host_copy;
        if (node->kernel) {
            struct phos_arguments arguments = {.block = node->block, .block_size = node->block_size};
            phos_kernel_touch(&all, node->kernel, &arguments);
            all.guessed |= all.source > PHOS_SOURCE_SASS && all.source != PHOS_SOURCE_NONE;
        }
        for (size_t t = 0; t < node->count; t++)
            phos_touches_add(&all, node->touches[t].address, node->touches[t].size, node->touches[t].access);
    }
    if (executable->nodes.lost)
        all.anything = ALL;
    phos_touches_through_anything(&all); /* what lies in them when a kernel begins, others in the graph may have put there */
    merge(&all);
    free(executable->list);
    executable->list = all.count ? malloc(all.count * sizeof *all.list) : NULL;
    executable->count = executable->list ? all.count : 0;
    if (executable->list)
        memcpy(executable->list, all.list, all.count * sizeof *all.list);
    executable->anything = all.count && !executable->list ? ALL : all.anything;
    executable->host_copy = all.host_copy;
    executable->communicates = all.communicates;
    executable->guessed = all.guessed;
    executable->version = version;
    executable->worked_out = true;
    phos_touches_end(&all);
}

/* ---- */

void phos_graph_touch(struct phos_touches *touches, CUgraphExec graph)
{
    uint64_t version = phos_kernel_touch_version();
    PHOS_LOCKED(&graph_lock);
    struct executable *executable = *place_of(graph);
    if (!executable || on_device_count) { /* made past us; or its kernels may launch what was made for them */
        touches->anything = ALL;
        return;
    }
    if (!executable->worked_out || executable->version != version)
        work_out(executable, version);
    touches->recorded = true;
    touches->anything |= executable->anything;
    touches->host_copy |= executable->host_copy;
    touches->communicates |= executable->communicates;
    touches->guessed |= executable->guessed;
    for (size_t i = 0; i < executable->count; i++)
        phos_touches_add(touches, executable->list[i].address, executable->list[i].size, executable->list[i].access);
    if (phos_audit_active())
        phos_audit_graph(&executable->nodes);
}

void phos_graph_node_added(CUgraph graph, CUgraphNode node, const CUgraphNodeParams *parameters)
{
    if (parameters->type != CU_GRAPH_NODE_TYPE_CONDITIONAL || !parameters->conditional.phGraph_out)
        return;
    size_t count = parameters->conditional.size;
    struct conditional *conditional = malloc(sizeof *conditional);
    CUgraph *bodies = calloc(count ? count : 1, sizeof *bodies);
    if (!conditional || !bodies) {
        free(conditional);
        free(bodies);
        return;
    }
    memcpy(bodies, parameters->conditional.phGraph_out, count * sizeof *bodies);
    PHOS_LOCKED(&graph_lock);
    forget_conditionals(NULL, node);
    *conditional = (struct conditional){node, graph, bodies, count, conditionals};
    conditionals = conditional;
}

CUgraph *phos_conditional_graphs(CUgraphNode node, size_t *count)
{
    PHOS_LOCKED(&graph_lock);
    for (struct conditional *c = conditionals; c; c = c->next) {
        if (c->node != node)
            continue;
        CUgraph *copy = malloc((c->count + 1) * sizeof *copy);
        if (copy)
            memcpy(copy, c->bodies, c->count * sizeof *copy);
        *count = c->count;
        return copy;
    }
    return NULL;
}

CUresult serve_cuGraphDestroy(CUgraph graph)
{
    {
        PHOS_LOCKED(&graph_lock);
        if (conditionals)
            forget_conditionals(graph, NULL);
    }
    return phos_real.cuGraphDestroy(graph);
}

CUresult serve_cuGraphDestroyNode(CUgraphNode node)
{
    {
        PHOS_LOCKED(&graph_lock);
        if (conditionals)
            forget_conditionals(NULL, node);
    }
    return phos_real.cuGraphDestroyNode(node);
}

/* ---- executable graphs as they are made ---- */

static CUresult made(CUresult result, const CUgraphExec *made_graph, CUgraph graph, cuuint64_t flags)
{
    if (result != CUDA_SUCCESS)
        return result;
    struct phos_nodes nodes = {0};
    phos_nodes_record(&nodes, graph, NULL);
    phos_nodes_sort(&nodes);
    struct executable *executable = calloc(1, sizeof *executable);
    PHOS_LOCKED(&graph_lock);
    forget(*made_graph); /* a former one of this value */
    if (!executable) {   /* one that is not known may touch anything */
        phos_nodes_free(&nodes);
        return result;
    }
    executable->graph = *made_graph;
    executable->nodes = nodes;
    executable->on_device = flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
    on_device_count += executable->on_device;
    *place_of(*made_graph) = executable;
    return result;
}

CUresult serve_cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuGraphInstantiate(executable, graph, error, log, size));
    return made(result, executable, graph, 0);
}

CUresult serve_cuGraphInstantiate_v2(CUgraphExec *executable, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuGraphInstantiate_v2(executable, graph, error, log, size));
    return made(result, executable, graph, 0);
}

CUresult serve_cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuGraphInstantiateWithFlags(executable, graph, flags));
    return made(result, executable, graph, flags);
}

CUresult serve_cuGraphInstantiateWithParams(CUgraphExec *executable, CUgraph graph,
                                            CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuGraphInstantiateWithParams(executable, graph, parameters));
    return made(result, executable, graph, parameters ? parameters->flags : 0);
}

CUresult serve_cuGraphInstantiateWithParams_ptsz(CUgraphExec *executable, CUgraph graph,
                                                 CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    CUresult result = PHOS_RETRIED_HERE(phos_real.cuGraphInstantiateWithParams_ptsz(executable, graph, parameters));
    return made(result, executable, graph, parameters ? parameters->flags : 0);
}

CUresult serve_cuGraphExecDestroy(CUgraphExec executable)
{
    {
        PHOS_LOCKED(&graph_lock); /* before: another thread may be given the same value once it is gone */
        forget(executable);
    }
    return phos_real.cuGraphExecDestroy(executable);
}

/* ---- changes ---- */

static CUresult updated(CUresult result, CUgraphExec graph, CUgraph by)
{
    if (result != CUDA_SUCCESS)
        return result;
    struct phos_nodes nodes = {0};
    phos_nodes_record(&nodes, by, NULL);
    phos_nodes_sort(&nodes);
    PHOS_LOCKED(&graph_lock);
    struct executable *executable = *place_of(graph);
    if (!executable) {
        phos_nodes_free(&nodes);
        return result;
    }
    phos_nodes_free(&executable->nodes);
    executable->nodes = nodes;
    executable->worked_out = false;
    return result;
}

CUresult serve_cuGraphExecUpdate(CUgraphExec executable, CUgraph graph, CUgraphNode *error,
                                 CUgraphExecUpdateResult *outcome)
{
    return updated(phos_real.cuGraphExecUpdate(executable, graph, error, outcome), executable, graph);
}

CUresult serve_cuGraphExecUpdate_v2(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo *outcome)
{
    return updated(phos_real.cuGraphExecUpdate_v2(executable, graph, outcome), executable, graph);
}

static CUresult changed(CUgraphExec graph, struct phos_node *node)
{
    PHOS_LOCKED(&graph_lock);
    struct executable *executable = *place_of(graph);
    if (executable) {
        phos_nodes_put(&executable->nodes, node);
        executable->worked_out = false;
    } else
        phos_node_clear(node);
    return CUDA_SUCCESS;
}

static CUresult kernel_changed(CUgraphExec executable, CUgraphNode handle, CUfunction function, void **parameters,
                               void **extra)
{
    struct phos_node node = {.node = handle};
    phos_node_kernel(&node, function, parameters, extra);
    return changed(executable, &node);
}

static CUresult copy_changed(CUgraphExec executable, CUgraphNode handle, const CUDA_MEMCPY3D *copy)
{
    struct phos_node node = {.node = handle};
    phos_node_copy(&node, copy);
    return changed(executable, &node);
}

static CUresult set_changed(CUgraphExec executable, CUgraphNode handle, CUdeviceptr address, size_t pitch, size_t element,
                            size_t width, size_t height)
{
    struct phos_node node = {.node = handle};
    phos_node_set(&node, address, pitch, element, width, height);
    return changed(executable, &node);
}

static CUresult operations_changed(CUgraphExec executable, CUgraphNode handle, const CUstreamBatchMemOpParams *operations,
                                   unsigned int count)
{
    struct phos_node node = {.node = handle};
    phos_node_operations(&node, operations, count);
    return changed(executable, &node);
}

static CUresult batch_changed(CUgraphExec executable, CUgraphNode handle, const CUgraphNodeParams *p)
{
    struct phos_node node = {.node = handle};
    if (p->type == CU_GRAPH_NODE_TYPE_MEMCPY_BATCH)
        phos_node_copies(&node, &p->memcpyBatch);
    else
        phos_node_fabric_copies(&node, &p->fabricCpyBatch);
    return changed(executable, &node);
}

static CUresult child_changed(CUgraphExec graph, CUgraphNode handle, CUgraph child)
{
    struct phos_nodes nodes = {0};
    phos_nodes_record(&nodes, child, handle);
    PHOS_LOCKED(&graph_lock);
    struct executable *executable = *place_of(graph);
    if (executable) {
        phos_nodes_replace(&executable->nodes, handle, &nodes);
        executable->worked_out = false;
    } else
        phos_nodes_free(&nodes);
    return CUDA_SUCCESS;
}

CUresult serve_cuGraphExecKernelNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                              const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
    CUresult result = phos_real.cuGraphExecKernelNodeSetParams(executable, node, p);
    return result == CUDA_SUCCESS ? kernel_changed(executable, node, p->func, p->kernelParams, p->extra) : result;
}

CUresult serve_cuGraphExecKernelNodeSetParams_v2(CUgraphExec executable, CUgraphNode node,
                                                 const CUDA_KERNEL_NODE_PARAMS_v2 *p)
{
    CUresult result = phos_real.cuGraphExecKernelNodeSetParams_v2(executable, node, p);
    if (result != CUDA_SUCCESS)
        return result;
    return kernel_changed(executable, node, p->func ? p->func : (CUfunction)p->kern, p->kernelParams, p->extra);
}

CUresult serve_cuGraphExecMemcpyNodeSetParams(CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D_v2 *copy,
                                              CUcontext context)
{
    CUresult result = phos_real.cuGraphExecMemcpyNodeSetParams(executable, node, copy, context);
    return result == CUDA_SUCCESS ? copy_changed(executable, node, copy) : result;
}

CUresult serve_cuGraphExecMemsetNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                              const CUDA_MEMSET_NODE_PARAMS_v1 *p, CUcontext context)
{
    CUresult result = phos_real.cuGraphExecMemsetNodeSetParams(executable, node, p, context);
    if (result != CUDA_SUCCESS)
        return result;
    return set_changed(executable, node, p->dst, p->pitch, p->elementSize, p->width, p->height);
}

CUresult serve_cuGraphExecBatchMemOpNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                                  const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
    CUresult result = phos_real.cuGraphExecBatchMemOpNodeSetParams(executable, node, p);
    return result == CUDA_SUCCESS ? operations_changed(executable, node, p->paramArray, p->count) : result;
}

CUresult serve_cuGraphExecChildGraphNodeSetParams(CUgraphExec executable, CUgraphNode node, CUgraph child)
{
    CUresult result = phos_real.cuGraphExecChildGraphNodeSetParams(executable, node, child);
    return result == CUDA_SUCCESS ? child_changed(executable, node, child) : result;
}

CUresult serve_cuGraphExecNodeSetParams(CUgraphExec executable, CUgraphNode node, CUgraphNodeParams *p)
{
    CUresult result = phos_real.cuGraphExecNodeSetParams(executable, node, p);
    if (result != CUDA_SUCCESS)
        return result;
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return kernel_changed(executable, node, p->kernel.func ? p->kernel.func : (CUfunction)p->kernel.kern,
                              p->kernel.kernelParams, p->kernel.extra);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return copy_changed(executable, node, &p->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return set_changed(executable, node, p->memset.dst, p->memset.pitch, p->memset.elementSize, p->memset.width,
                           p->memset.height);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        return operations_changed(executable, node, p->memOp.paramArray, p->memOp.count);
    case CU_GRAPH_NODE_TYPE_MEMCPY_BATCH:
    case CU_GRAPH_NODE_TYPE_FABRIC_CPY_BATCH:
        return batch_changed(executable, node, p);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return child_changed(executable, node, p->graph.graph);
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
        return result;
    default: {
        struct phos_node unknown = {.node = node, .anything = ALL};
        return changed(executable, &unknown);
    }
    }
}

CUresult serve_cuGraphNodeSetEnabled(CUgraphExec graph, CUgraphNode handle, unsigned int enabled)
{
    CUresult result = phos_real.cuGraphNodeSetEnabled(graph, handle, enabled);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_LOCKED(&graph_lock);
    struct executable *executable = *place_of(graph);
    struct phos_node *node = executable ? phos_nodes_find(&executable->nodes, handle) : NULL;
    if (node && node->disabled != !enabled) {
        node->disabled = !enabled;
        executable->worked_out = false;
    }
    return result;
}
