/* The graph entry points: making, cloning, asking, changing edges. Nodes are node.c's, executable graphs exec.c's. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "graph.h"

#define LOCKED(expression)                                                                                                    \
    pthread_mutex_lock(&sg_graph_lock);                                                                                       \
    CUresult result = (expression);                                                                                           \
    pthread_mutex_unlock(&sg_graph_lock);                                                                                     \
    return result

CUresult softgpu_cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
    if (!phGraph || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *phGraph = (CUgraph)sg_graph_new();
    return *phGraph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult softgpu_cuGraphDestroy(CUgraph hGraph)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    if (!graph || graph->child)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    sg_graph_free(graph);
    pthread_mutex_unlock(&sg_graph_lock);
    return CUDA_SUCCESS;
}

static CUresult make_clone(CUgraph *out, struct sg_graph *graph)
{
    *out = (CUgraph)sg_graph_duplicate(graph, false, false);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult softgpu_cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    struct sg_graph *graph = sg_graph_get(originalGraph);
    if (!phGraphClone || !graph)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(make_clone(phGraphClone, graph));
}

CUresult softgpu_cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
    struct sg_graph *graph = sg_graph_get(hClonedGraph);
    struct sg_node *node = sg_node_get(hOriginalNode);
    if (!phNode || !graph || !node)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    *phNode = (CUgraphNode)sg_graph_find(graph, node->id);
    pthread_mutex_unlock(&sg_graph_lock);
    return *phNode ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
}

/* The API's way to return a list: the number alone when there is no room; what does not fit is left out, the rest nulled. */
struct list {
    CUgraphNode *nodes;
    size_t room, count;
};

static void put(struct list *list, struct sg_node *node)
{
    if (list->nodes && list->count < list->room)
        list->nodes[list->count] = (CUgraphNode)node;
    list->count++;
}

static CUresult finish(struct list *list, size_t *number)
{
    for (size_t i = list->count; list->nodes && i < list->room; i++)
        list->nodes[i] = NULL;
    *number = !list->nodes || list->count < list->room ? list->count : list->room;
    return CUDA_SUCCESS;
}

static CUresult nodes(struct sg_graph *graph, CUgraphNode *out, size_t *number, bool roots)
{
    struct list list = {out, *number, 0};
    for (size_t i = 0; i < graph->count; i++)
        if (!roots || !graph->nodes[i]->dependency_count)
            put(&list, graph->nodes[i]);
    return finish(&list, number);
}

CUresult softgpu_cuGraphGetNodes(CUgraph hGraph, CUgraphNode *out, size_t *numNodes)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    if (!graph || !numNodes)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(nodes(graph, out, numNodes, false));
}

CUresult softgpu_cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    if (!graph || !numRootNodes)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(nodes(graph, rootNodes, numRootNodes, true));
}

static CUresult edges(struct sg_graph *graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *number)
{
    if (!from != !to)
        return CUDA_ERROR_INVALID_VALUE;
    struct list sources = {from, *number, 0}, targets = {to, *number, 0};
    size_t room = *number;
    for (size_t i = 0; i < graph->count; i++)
        for (size_t j = 0; j < graph->nodes[i]->dependency_count; j++) {
            put(&sources, graph->nodes[i]->dependencies[j]);
            put(&targets, graph->nodes[i]);
        }
    if (data && from)
        memset(data, 0, room * sizeof(*data));
    finish(&sources, number);
    return finish(&targets, number);
}

CUresult softgpu_cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    if (!graph || !numEdges)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(edges(graph, from, to, edgeData, numEdges));
}

CUresult softgpu_cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
    return softgpu_cuGraphGetEdges_v2(hGraph, from, to, NULL, numEdges);
}

static CUresult list_neighbours(struct sg_node *node, CUgraphNode *out, CUgraphEdgeData *data, size_t *number, bool after)
{
    struct list list = {out, *number, 0};
    if (data && out)
        memset(data, 0, *number * sizeof(*data));
    for (size_t i = 0; !after && i < node->dependency_count; i++)
        put(&list, node->dependencies[i]);
    for (size_t i = 0; after && i < node->graph->count; i++)
        for (size_t j = 0; j < node->graph->nodes[i]->dependency_count; j++)
            if (node->graph->nodes[i]->dependencies[j] == node)
                put(&list, node->graph->nodes[i]);
    return finish(&list, number);
}

static CUresult neighbours(CUgraphNode hNode, CUgraphNode *out, CUgraphEdgeData *data, size_t *number, bool after)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node || !number)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(list_neighbours(node, out, data, number, after));
}

CUresult softgpu_cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData,
                                               size_t *numDependencies)
{
    return neighbours(hNode, dependencies, edgeData, numDependencies, false);
}

CUresult softgpu_cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies)
{
    return softgpu_cuGraphNodeGetDependencies_v2(hNode, dependencies, NULL, numDependencies);
}

CUresult softgpu_cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData,
                                                 size_t *numDependentNodes)
{
    return neighbours(hNode, dependentNodes, edgeData, numDependentNodes, true);
}

CUresult softgpu_cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes)
{
    return softgpu_cuGraphNodeGetDependentNodes_v2(hNode, dependentNodes, NULL, numDependentNodes);
}

static CUresult change_edges(struct sg_graph *graph, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool add)
{
    for (size_t i = 0; i < count; i++) {
        struct sg_node *source = sg_node_get(from[i]), *target = sg_node_get(to[i]);
        if (!source || !target || source == target || source->graph != graph || target->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
        size_t at = 0;
        while (at < target->dependency_count && target->dependencies[at] != source)
            at++;
        bool there = at < target->dependency_count;
        if (there == add)
            return CUDA_ERROR_INVALID_VALUE; /* already there, or not there */
        if (add && !sg_node_depend(target, source))
            return CUDA_ERROR_OUT_OF_MEMORY;
        if (!add)
            target->dependencies[at] = target->dependencies[--target->dependency_count];
    }
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                           const CUgraphEdgeData *edgeData, size_t numDependencies)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    (void)edgeData; /* every edge is a full dependency here */
    if (!graph || (numDependencies && (!from || !to)))
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(change_edges(graph, from, to, numDependencies, true));
}

CUresult softgpu_cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies)
{
    return softgpu_cuGraphAddDependencies_v2(hGraph, from, to, NULL, numDependencies);
}

CUresult softgpu_cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                              const CUgraphEdgeData *edgeData, size_t numDependencies)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    (void)edgeData;
    if (!graph || (numDependencies && (!from || !to)))
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(change_edges(graph, from, to, numDependencies, false));
}

CUresult softgpu_cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies)
{
    return softgpu_cuGraphRemoveDependencies_v2(hGraph, from, to, NULL, numDependencies);
}

CUresult softgpu_cuGraphDestroyNode(CUgraphNode hNode)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    sg_node_destroy(node);
    pthread_mutex_unlock(&sg_graph_lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    (void)flags;
    FILE *file = graph && path ? fopen(path, "we") : NULL;
    if (!file)
        return graph && path ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    fprintf(file, "digraph dot {\n");
    for (size_t i = 0; i < graph->count; i++) {
        struct sg_node *node = graph->nodes[i];
        fprintf(file, "  n%zu [label=\"%zu: type %d%s%s\"];\n", i, i, (int)node->type, node->type == CU_GRAPH_NODE_TYPE_KERNEL ? " " : "",
                node->type == CU_GRAPH_NODE_TYPE_KERNEL ? ptx_kernel_name(node->work.kernel.function->kernel) : "");
        for (size_t j = 0; j < node->dependency_count; j++)
            fprintf(file, "  n%zu -> n%zu;\n", node->dependencies[j]->index, i);
    }
    fprintf(file, "}\n");
    pthread_mutex_unlock(&sg_graph_lock);
    return fclose(file) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}
