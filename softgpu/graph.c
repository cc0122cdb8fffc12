/* Graphs: nodes and edges, copies of them, questions about them. Everything here is under sg_graph_lock when the application
 * can see it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"

pthread_mutex_t sg_graph_lock = PTHREAD_MUTEX_INITIALIZER;

struct sg_graph *sg_graph_get(CUgraph handle)
{
    return sg_handle_is(handle, SG_GRAPH) ? (struct sg_graph *)handle : NULL;
}

struct sg_node *sg_node_get(CUgraphNode handle)
{
    return sg_handle_is(handle, SG_NODE) ? (struct sg_node *)handle : NULL;
}

struct sg_graph *sg_graph_new(void)
{
    struct sg_graph *graph = calloc(1, sizeof(*graph));
    if (graph && sg_handle_add(graph, SG_GRAPH))
        return graph;
    free(graph);
    return NULL;
}

bool sg_node_depend(struct sg_node *node, struct sg_node *on)
{
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] == on)
            return true;
    struct sg_node **grown = realloc(node->dependencies, (node->dependency_count + 1) * sizeof(*grown));
    if (!grown)
        return false;
    node->dependencies = grown;
    grown[node->dependency_count++] = on;
    return true;
}

static void node_free(struct sg_node *node)
{
    sg_handle_remove(node, SG_NODE);
    sg_work_clear(&node->work);
    free(node->dependencies);
    free(node->param_pointers);
    free(node);
}

CUresult sg_graph_add(struct sg_graph *graph, struct sg_node *const *dependencies, size_t count, CUgraphNodeType type,
                      struct sg_work *work, struct sg_node **out)
{
    if (count && !dependencies)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!sg_handle_is(dependencies[i], SG_NODE) || dependencies[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    if (graph->count == graph->capacity) {
        size_t capacity = graph->capacity ? graph->capacity * 2 : 16;
        struct sg_node **grown = realloc(graph->nodes, capacity * sizeof(*grown));
        if (!grown)
            return CUDA_ERROR_OUT_OF_MEMORY;
        graph->nodes = grown;
        graph->capacity = capacity;
    }
    struct sg_node *node = calloc(1, sizeof(*node));
    if (!node || !sg_handle_add(node, SG_NODE)) {
        free(node);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->graph = graph;
    node->id = sg_next_id();
    node->type = type;
    bool ok = true;
    for (size_t i = 0; i < count; i++)
        ok = ok && sg_node_depend(node, dependencies[i]);
    if (!ok) {
        node_free(node);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->work = *work;
    node->index = graph->count;
    graph->nodes[graph->count++] = node;
    *out = node;
    return CUDA_SUCCESS;
}

void sg_user_object_release(struct sg_user_object *object, int count)
{
    if (atomic_fetch_sub(&object->references, count) != count)
        return;
    sg_handle_remove(object, SG_USER_OBJECT);
    object->destroy(object->pointer);
    free(object);
}

bool sg_graph_hold(struct sg_graph *graph, struct sg_user_object *object)
{
    struct sg_user_object **grown = realloc(graph->objects, (graph->object_count + 1) * sizeof(*grown));
    if (!grown)
        return false;
    graph->objects = grown;
    grown[graph->object_count++] = object;
    return true;
}

void sg_graph_free(struct sg_graph *graph)
{
    if (!graph)
        return;
    sg_handle_remove(graph, SG_GRAPH);
    for (size_t i = 0; i < graph->count; i++)
        node_free(graph->nodes[i]);
    for (size_t i = 0; i < graph->object_count; i++)
        sg_user_object_release(graph->objects[i], 1);
    free(graph->objects);
    free(graph->nodes);
    free(graph);
}

/* A deep copy. origin: the source's node, or (keep_origin) what the source's node itself was copied from. */
struct sg_graph *sg_graph_duplicate(const struct sg_graph *graph, bool keep_origin, bool child)
{
    struct sg_graph *copy = sg_graph_new();
    if (!copy)
        return NULL;
    copy->child = child;
    bool ok = true;
    for (size_t i = 0; i < graph->object_count && ok; i++) {
        atomic_fetch_add(&graph->objects[i]->references, 1);
        ok = sg_graph_hold(copy, graph->objects[i]);
    }
    for (size_t i = 0; i < graph->count && ok; i++) {
        const struct sg_node *from = graph->nodes[i];
        struct sg_work work;
        struct sg_node *to;
        ok = sg_work_copy(&work, &from->work);
        if (ok && sg_graph_add(copy, NULL, 0, from->type, &work, &to) != CUDA_SUCCESS) {
            sg_work_clear(&work);
            ok = false;
        }
        if (!ok)
            break;
        to->given = from->given;
        to->disabled = from->disabled;
        to->origin = keep_origin ? from->origin : from->id;
    }
    for (size_t i = 0; i < graph->count && ok; i++)
        for (size_t j = 0; j < graph->nodes[i]->dependency_count && ok; j++)
            ok = sg_node_depend(copy->nodes[i], copy->nodes[graph->nodes[i]->dependencies[j]->index]);
    if (ok)
        return copy;
    sg_graph_free(copy);
    return NULL;
}

struct sg_graph *sg_graph_copy(const struct sg_graph *graph)
{
    return sg_graph_duplicate(graph, false, true);
}

struct sg_node *sg_graph_find(struct sg_graph *graph, uint64_t origin)
{
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i]->origin == origin)
            return graph->nodes[i];
    return NULL;
}

struct sg_node **sg_graph_order(const struct sg_graph *graph)
{
    struct sg_node **order = malloc((graph->count + 1) * sizeof(*order));
    size_t *left = malloc((graph->count + 1) * sizeof(*left)), done = 0;
    for (size_t i = 0; order && left && i < graph->count; i++)
        left[i] = graph->nodes[i]->dependency_count;
    /* Nodes in order of creation as far as the edges allow; passes over the rest until nothing moves. */
    for (bool moved = order && left; moved && done < graph->count;) {
        moved = false;
        for (size_t i = 0; i < graph->count; i++) {
            struct sg_node *node = graph->nodes[i];
            if (left[i] == SIZE_MAX)
                continue;
            bool ready = true;
            for (size_t j = 0; j < node->dependency_count && ready; j++)
                ready = left[node->dependencies[j]->index] == SIZE_MAX;
            if (ready) {
                left[i] = SIZE_MAX;
                order[done++] = node;
                moved = true;
            }
        }
    }
    free(left);
    if (order && done == graph->count)
        return order;
    free(order);
    return NULL;
}

/* ---- entry points ---- */

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

static CUresult neighbours(struct sg_node *node, CUgraphNode *out, CUgraphEdgeData *data, size_t *number, bool after)
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

CUresult softgpu_cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData,
                                               size_t *numDependencies)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node || !numDependencies)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(neighbours(node, dependencies, edgeData, numDependencies, false));
}

CUresult softgpu_cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies)
{
    return softgpu_cuGraphNodeGetDependencies_v2(hNode, dependencies, NULL, numDependencies);
}

CUresult softgpu_cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData,
                                                 size_t *numDependentNodes)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node || !numDependentNodes)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(neighbours(node, dependentNodes, edgeData, numDependentNodes, true));
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

static CUresult destroy_node(struct sg_node *gone)
{
    struct sg_graph *graph = gone->graph;
    for (size_t i = 0; i < graph->count; i++) {
        struct sg_node *node = graph->nodes[i];
        for (size_t j = 0; j < node->dependency_count;)
            if (node->dependencies[j] == gone)
                node->dependencies[j] = node->dependencies[--node->dependency_count];
            else
                j++;
    }
    memmove(&graph->nodes[gone->index], &graph->nodes[gone->index + 1], (graph->count - gone->index - 1) * sizeof(*graph->nodes));
    graph->count--;
    for (size_t i = gone->index; i < graph->count; i++)
        graph->nodes[i]->index = i;
    node_free(gone);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphDestroyNode(CUgraphNode hNode)
{
    struct sg_node *node = sg_node_get(hNode);
    if (!node)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(destroy_node(node));
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

/* ---- user objects ---- */

static struct sg_user_object *object_get(CUuserObject handle)
{
    return sg_handle_is(handle, SG_USER_OBJECT) ? (struct sg_user_object *)handle : NULL;
}

CUresult softgpu_cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount,
                                    unsigned int flags)
{
    if (!object_out || !destroy || !initialRefcount || initialRefcount > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    struct sg_user_object *object = calloc(1, sizeof(*object));
    if (!object || !sg_handle_add(object, SG_USER_OBJECT)) {
        free(object);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    object->references = (int)initialRefcount;
    object->pointer = ptr;
    object->destroy = destroy;
    *object_out = (CUuserObject)object;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuUserObjectRetain(CUuserObject handle, unsigned int count)
{
    struct sg_user_object *object = object_get(handle);
    if (!object || !count || count > INT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    atomic_fetch_add(&object->references, (int)count);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuUserObjectRelease(CUuserObject handle, unsigned int count)
{
    struct sg_user_object *object = object_get(handle);
    if (!object || !count || (int)count > atomic_load(&object->references))
        return CUDA_ERROR_INVALID_VALUE;
    sg_user_object_release(object, (int)count);
    return CUDA_SUCCESS;
}

static CUresult hold(struct sg_graph *graph, struct sg_user_object *object, unsigned count, bool move)
{
    if (!move)
        atomic_fetch_add(&object->references, (int)count);
    for (unsigned i = 0; i < count; i++)
        if (!sg_graph_hold(graph, object))
            return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGraphRetainUserObject(CUgraph hGraph, CUuserObject handle, unsigned int count, unsigned int flags)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    struct sg_user_object *object = object_get(handle);
    if (!graph || !object || !count || count > 4096 || (flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE))
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED(hold(graph, object, count, flags & CU_GRAPH_USER_OBJECT_MOVE));
}

CUresult softgpu_cuGraphReleaseUserObject(CUgraph hGraph, CUuserObject handle, unsigned int count)
{
    struct sg_graph *graph = sg_graph_get(hGraph);
    struct sg_user_object *object = object_get(handle);
    if (!graph || !object || !count)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned dropped = 0;
    pthread_mutex_lock(&sg_graph_lock);
    for (size_t i = 0; i < graph->object_count && dropped < count;)
        if (graph->objects[i] == object) {
            graph->objects[i] = graph->objects[--graph->object_count];
            dropped++;
        } else {
            i++;
        }
    pthread_mutex_unlock(&sg_graph_lock);
    if (dropped)
        sg_user_object_release(object, (int)dropped);
    return dropped == count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
