/* Graphs: nodes and edges, copies of them, an order to run them in. Callers hold sg_graph_lock where the application can see
 * the graph. */
#define _GNU_SOURCE
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

void sg_node_destroy(struct sg_node *gone)
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
