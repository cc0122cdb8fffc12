/* What is kept of a graph's nodes, so that a launch of the graph can be told what it touches: arguments of kernels, as they
 * were when the graph was made executable, and the touches of the rest. */
#pragma once
#include "functions.h"
#include "phos_api.h"
#include "touch.h"

#include <stdbool.h>
#include <stddef.h>

struct phos_node {
    CUgraphNode node;
    CUgraphNode parent; /* the child graph's or conditional node that it is part of; NULL: none */
    CUgraphNode given;  /* the node that was given a child graph with it, under handles that others share; NULL: none */
    bool disabled;
    bool updatable; /* a kernel may give it other arguments while the graph runs */
    bool dropped; /* while others are removed */
    bool host_copy;
    uint32_t anything;
    struct phos_kernel *kernel; /* NULL: not a kernel, or an unknown one */
    void *block;                /* its arguments */
    size_t block_size;
    struct phos_touch *touches; /* of what is not a kernel */
    size_t count;
};

struct phos_nodes {
    struct phos_node *list;
    size_t count, capacity;
    size_t sorted; /* so many from the start are in order of their handles */
    bool lost;     /* not all could be kept */
};

/* Contents of a node, from its parameters. `node` is empty but for its handles. */
void phos_node_kernel(struct phos_node *node, CUfunction function, void **parameters, void **extra);
void phos_node_copy(struct phos_node *node, const CUDA_MEMCPY3D *copy);
void phos_node_set(struct phos_node *node, CUdeviceptr address, size_t pitch, size_t element, size_t width, size_t height);
void phos_node_operations(struct phos_node *node, const CUstreamBatchMemOpParams *operations, unsigned int count);
void phos_node_copies(struct phos_node *node, const CUDA_MEMCPY_BATCH_NODE_PARAMS *copies);
void phos_node_fabric_copies(struct phos_node *node, const CUDA_FABRIC_CPY_BATCH_NODE_PARAMS *copies);
void phos_node_clear(struct phos_node *node);

/* Adds all nodes of a graph, those of its child graphs too. */
void phos_nodes_record(struct phos_nodes *nodes, CUgraph graph, CUgraphNode parent);
void phos_nodes_sort(struct phos_nodes *nodes);
/* Of those that were not given to a node later. */
struct phos_node *phos_nodes_find(const struct phos_nodes *nodes, CUgraphNode node);
/* Takes the contents over; a node that is not known is added. */
void phos_nodes_put(struct phos_nodes *nodes, struct phos_node *node);
/* Removes what is inside a child graph's node, and takes over what `by` has instead. */
void phos_nodes_replace(struct phos_nodes *nodes, CUgraphNode parent, struct phos_nodes *by);
void phos_nodes_free(struct phos_nodes *nodes);

/* graphs.c: the graphs of a conditional node, to be freed. NULL: unknown. */
CUgraph *phos_conditional_graphs(CUgraphNode node, size_t *count);
