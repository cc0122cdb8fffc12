/* Between the files that make up graphs: graph.c (structure) with graphapi.c (its entry points) and userobject.c, node.c
 * (parameters), exec.c (running), mark.c (events), capture.c. */
#ifndef SOFTGPU_GRAPH_H
#define SOFTGPU_GRAPH_H
#include "op.h"

struct sg_user_object {
    _Atomic int references;
    void *pointer;
    CUhostFn destroy;
};
struct sg_node {
    struct sg_graph *graph;
    uint64_t id, origin; /* origin: id of the node this one was copied from */
    CUgraphNodeType type;
    struct sg_work work;
    union { /* as the application gave it, for the GetParams calls */
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS fill;
        CUDA_KERNEL_NODE_PARAMS kernel;
    } given;
    void **param_pointers; /* into work.kernel.params, made when asked for */
    struct sg_node **dependencies;
    size_t dependency_count;
    size_t index; /* in graph->nodes */
    bool disabled;
};
struct sg_graph {
    struct sg_node **nodes;
    size_t count, capacity;
    bool child; /* belongs to a node: its handle cannot be destroyed */
    struct sg_user_object **objects;
    size_t object_count;
};
/* One state of an executable graph. A launch keeps the state it was made with; an update makes a new one if that is in use. */
struct sg_exec {
    _Atomic int references;
    struct sg_graph *graph;
    struct sg_node **order; /* topological */
    pthread_mutex_t running; /* launches of one executable graph do not overlap */
};
struct sg_capture_session {
    _Atomic int references; /* the streams in it */
    uint64_t id;
    struct sg_graph *graph;
    struct sg_stream *origin;
    CUstreamCaptureMode mode;
    uint64_t thread; /* that began it */
    bool invalid;
    bool given; /* the graph is the application's (cuStreamBeginCaptureToGraph) */
};
struct sg_capture { /* of one stream */
    struct sg_capture_session *session;
    struct sg_stream *stream;
    struct sg_capture *next; /* all capturing streams; under sg_graph_lock */
    struct sg_node **nodes;  /* what the next operation depends on */
    CUgraphEdgeData *edges;  /* zeros, as many, for cuStreamGetCaptureInfo_v3 */
    size_t count;
};

struct sg_graph *sg_graph_get(CUgraph handle);
struct sg_node *sg_node_get(CUgraphNode handle);
struct sg_graph *sg_graph_new(void);
/* Takes the work over when it succeeds. */
CUresult sg_graph_add(struct sg_graph *graph, struct sg_node *const *dependencies, size_t count, CUgraphNodeType type,
                      struct sg_work *work, struct sg_node **out);
bool sg_node_depend(struct sg_node *node, struct sg_node *on); /* false: out of memory */
void sg_node_destroy(struct sg_node *gone);                    /* out of its graph, its edges with it */
struct sg_graph *sg_graph_duplicate(const struct sg_graph *graph, bool keep_origin, bool children);
struct sg_node *sg_graph_find(struct sg_graph *graph, uint64_t origin);
struct sg_node **sg_graph_order(const struct sg_graph *graph); /* malloc'ed; null: a cycle, or out of memory */
void sg_user_object_release(struct sg_user_object *object, int count);
bool sg_graph_hold(struct sg_graph *graph, struct sg_user_object *object);
/* Parameters of a node in the API's forms → work. */
CUresult sg_node_kernel(const CUDA_KERNEL_NODE_PARAMS *params, struct sg_context *context, struct sg_work *out);
CUresult sg_node_copy(const CUDA_MEMCPY3D *params, struct sg_context *context, struct sg_work *out);
CUresult sg_node_fill(const CUDA_MEMSET_NODE_PARAMS *params, struct sg_context *context, struct sg_work *out);
CUresult sg_node_host(const CUDA_HOST_NODE_PARAMS *params, struct sg_context *context, struct sg_work *out);
void sg_node_replace(struct sg_node *node, struct sg_work *work);
/* The events of a launch: recorded by now, each until its node has been passed, or the end at the latest. */
CUresult sg_marks_make(const struct sg_graph *graph, struct sg_marks **out);
void sg_marks_pass(struct sg_marks *marks, const struct sg_node *node);
#endif
