/* Executable graphs, and what a launch of one touches. */
#pragma once
#include "phos_api.h"
#include "touch.h"

/* Adds what a launch of the graph touches. */
void phos_graph_touch(struct phos_touches *touches, CUgraphExec graph);
/* A node was added by cuGraphAddNode: of a conditional one, only now are its graphs named. */
void phos_graph_node_added(CUgraph graph, CUgraphNode node, const CUgraphNodeParams *parameters);
