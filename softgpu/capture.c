/* Stream capture: what is submitted to a capturing stream becomes a node of a graph, after what the stream captured before;
 * events carry the dependency to other streams, which join the capture by waiting for one. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static struct sg_capture *captures; /* every capturing stream; under sg_graph_lock */

/* Under sg_graph_lock from here on, unless it says otherwise. */

static bool set_nodes(struct sg_capture *capture, struct sg_node *const *nodes, size_t count, bool keep)
{
    size_t before = keep ? capture->count : 0;
    struct sg_node **grown = realloc(capture->nodes, (before + count + 1) * sizeof(*grown));
    if (grown)
        capture->nodes = grown;
    CUgraphEdgeData *edges = realloc(capture->edges, (before + count + 1) * sizeof(*edges));
    if (edges)
        capture->edges = edges;
    if (!grown || !edges)
        return false;
    for (size_t i = 0; i < count; i++) {
        bool there = false;
        for (size_t j = 0; j < before; j++)
            there |= grown[j] == nodes[i];
        if (!there)
            grown[before++] = nodes[i];
    }
    capture->count = before;
    memset(edges, 0, (before + 1) * sizeof(*edges));
    return true;
}

static struct sg_capture *join(struct sg_stream *stream, struct sg_capture_session *session)
{
    struct sg_capture *capture = calloc(1, sizeof(*capture));
    if (!capture)
        return NULL;
    capture->session = session;
    capture->stream = stream;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    atomic_fetch_add(&session->references, 1);
    atomic_fetch_add(&sg_captures, 1);
    return capture;
}

static void leave(struct sg_capture *capture)
{
    struct sg_capture_session *session = capture->session;
    for (struct sg_capture **link = &captures; *link; link = &(*link)->next)
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    capture->stream->capture = NULL;
    free(capture->nodes);
    free(capture->edges);
    free(capture);
    atomic_fetch_sub(&sg_captures, 1);
    if (atomic_fetch_sub(&session->references, 1) == 1) {
        if (session->graph && !session->given)
            sg_graph_free(session->graph);
        free(session);
    }
}

static CUgraphNodeType node_type(enum sg_work_type type)
{
    switch (type) {
    case SG_WORK_KERNEL:
        return CU_GRAPH_NODE_TYPE_KERNEL;
    case SG_WORK_COPY:
        return CU_GRAPH_NODE_TYPE_MEMCPY;
    case SG_WORK_FILL:
        return CU_GRAPH_NODE_TYPE_MEMSET;
    case SG_WORK_HOST:
        return CU_GRAPH_NODE_TYPE_HOST;
    case SG_WORK_RECORD:
        return CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    case SG_WORK_WAIT:
        return CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    case SG_WORK_BATCH:
        return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    case SG_WORK_ALLOC:
        return CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    case SG_WORK_FREE:
        return CU_GRAPH_NODE_TYPE_MEM_FREE;
    case SG_WORK_EMPTY:
    case SG_WORK_GRAPH: /* refused */
    case SG_WORK_CHILD: /* by hand alone */
        break;
    }
    return CU_GRAPH_NODE_TYPE_EMPTY;
}

/* For cuGraphMemcpyNodeGetParams: the API's form of a captured copy. */
static void describe(const struct sg_copy *copy, CUDA_MEMCPY3D *out)
{
    *out = (CUDA_MEMCPY3D){
        .srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = copy->source.address, .srcHost = (void *)(uintptr_t)copy->source.address,
        .srcPitch = copy->source.pitch, .srcHeight = copy->source.pitch ? copy->source.slice / copy->source.pitch : 0,
        .dstMemoryType = CU_MEMORYTYPE_UNIFIED, .dstDevice = copy->destination.address,
        .dstHost = (void *)(uintptr_t)copy->destination.address, .dstPitch = copy->destination.pitch,
        .dstHeight = copy->destination.pitch ? copy->destination.slice / copy->destination.pitch : 0,
        .WidthInBytes = copy->width, .Height = copy->height, .Depth = copy->depth,
    };
}

/* Not under the lock. */
CUresult sg_capture_add(struct sg_stream *stream, struct sg_work *work)
{
    CUresult result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    if (capture && !capture->session->invalid) {
        struct sg_node *node;
        result = sg_graph_add(capture->session->graph, capture->nodes, capture->count, node_type(work->type), work, &node);
        if (result == CUDA_SUCCESS && node->type == CU_GRAPH_NODE_TYPE_MEMCPY)
            describe(&node->work.copy, &node->given.copy);
        if (result == CUDA_SUCCESS && !set_nodes(capture, &node, 1, false))
            capture->session->invalid = true;
        if (result == CUDA_SUCCESS)
            work->type = SG_WORK_EMPTY; /* the node's now */
    }
    pthread_mutex_unlock(&sg_graph_lock);
    sg_work_clear(work);
    return result;
}

/* Not under the lock. */
bool sg_capture_among(struct sg_context *context, bool non_blocking, bool spoil)
{
    if (!atomic_load(&sg_captures))
        return false;
    bool found = false;
    pthread_mutex_lock(&sg_graph_lock);
    for (struct sg_capture *capture = captures; capture; capture = capture->next)
        if (capture->stream->context == context && (non_blocking || !(capture->stream->flags & CU_STREAM_NON_BLOCKING))) {
            capture->session->invalid |= spoil;
            found = true;
        }
    pthread_mutex_unlock(&sg_graph_lock);
    return found;
}

static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static uint64_t this_thread(void)
{
    static _Thread_local uint64_t own;
    if (!own)
        own = sg_next_id();
    return own;
}

static bool forbids(const struct sg_capture_session *session)
{
    if (!session->origin || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || session->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    bool everywhere = session->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    return everywhere || session->thread == this_thread();
}

/* Not under the lock. */
bool sg_capture_spoil(struct sg_stream *stream)
{
    pthread_mutex_lock(&sg_graph_lock);
    bool captured = stream->capture;
    if (captured)
        stream->capture->session->invalid = true;
    pthread_mutex_unlock(&sg_graph_lock);
    return captured;
}

/* Not under the lock. */
CUresult sg_capture_permits(struct sg_stream *stream)
{
    if (!atomic_load(&sg_captures))
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_graph_lock);
    for (struct sg_capture *capture = captures; capture; capture = capture->next)
        if (capture->stream == stream || forbids(capture->session)) {
            capture->session->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

CUresult sg_capture_event_record(struct sg_stream *stream, struct sg_event *event)
{
    CUresult result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    if (capture && !capture->session->invalid) {
        struct sg_node **nodes = malloc((capture->count + 1) * sizeof(*nodes));
        result = nodes ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (nodes) {
            if (capture->count)
                memcpy(nodes, capture->nodes, capture->count * sizeof(*nodes));
            free(event->nodes);
            event->nodes = nodes;
            event->node_count = capture->count;
            event->capture_id = capture->session->id;
        }
    }
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

CUresult sg_capture_event_wait(struct sg_stream *stream, struct sg_event *event, bool *handled)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    struct sg_capture_session *session = NULL;
    for (struct sg_capture *other = captures; other && event->capture_id; other = other->next)
        if (other->session->id == event->capture_id)
            session = other->session;
    *handled = capture || event->capture_id;
    if (capture && capture->session->invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!event->capture_id && capture) {
        capture->session->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (event->capture_id && !session) {
        result = CUDA_ERROR_CAPTURED_EVENT; /* its capture is over */
    } else if (session && capture && capture->session != session) {
        capture->session->invalid = session->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    } else if (session) {
        if (stream->legacy)
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        else if (!capture)
            capture = join(stream, session);
        if (result == CUDA_SUCCESS && (!capture || !set_nodes(capture, event->nodes, event->node_count, true)))
            result = CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_SUCCESS && session->invalid)
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

void sg_capture_forget_stream(struct sg_stream *stream)
{
    pthread_mutex_lock(&sg_graph_lock);
    if (stream->capture) {
        struct sg_capture_session *session = stream->capture->session;
        session->invalid = true;
        if (session->origin == stream)
            session->origin = NULL; /* nobody can end it any more */
        leave(stream->capture);
    }
    pthread_mutex_unlock(&sg_graph_lock);
}

/* ---- entry points ---- */

static CUresult begin(struct sg_stream *stream, CUstreamCaptureMode mode, struct sg_graph *graph, const CUgraphNode *dependencies,
                      size_t count)
{
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture_session *session = stream->capture ? NULL : calloc(1, sizeof(*session));
    struct sg_capture *capture = NULL;
    if (stream->capture) {
        result = CUDA_ERROR_ILLEGAL_STATE;
    } else if (session) {
        session->id = sg_next_id();
        session->given = graph != NULL;
        session->graph = graph ? graph : sg_graph_new();
        session->origin = stream;
        session->mode = mode;
        session->thread = this_thread();
        capture = session->graph ? join(stream, session) : NULL;
    }
    if (result == CUDA_SUCCESS && (!capture || !set_nodes(capture, (struct sg_node *const *)dependencies, count, false))) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
        if (capture)
            leave(capture);
        else if (session) {
            if (!graph)
                sg_graph_free(session->graph);
            free(session);
        }
    }
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

CUresult softgpu_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    return (unsigned)mode <= CU_STREAM_CAPTURE_MODE_RELAXED ? begin(stream, mode, NULL, NULL, 0) : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuStreamBeginCapture(CUstream hStream)
{
    return softgpu_cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult softgpu_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                             const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode)
{
    struct sg_stream *stream;
    struct sg_graph *graph = sg_graph_get(hGraph);
    (void)dependencyData;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!graph || (numDependencies && !dependencies) || (unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    return begin(stream, mode, graph, dependencies, numDependencies);
}

/* Marks everything the node depends on. */
static void mark(const struct sg_node *node, bool *reached)
{
    if (reached[node->index])
        return;
    reached[node->index] = true;
    for (size_t i = 0; i < node->dependency_count; i++)
        mark(node->dependencies[i], reached);
}

/* Every joined stream must have been joined back: what it captured last comes before what the origin stream is at. */
static bool joined(struct sg_capture_session *session, const struct sg_capture *origin)
{
    bool *reached = calloc(session->graph->count + 1, sizeof(*reached)), ok = reached != NULL;
    for (size_t i = 0; ok && i < origin->count; i++)
        mark(origin->nodes[i], reached);
    for (struct sg_capture *capture = captures; ok && capture; capture = capture->next)
        for (size_t i = 0; capture->session == session && i < capture->count; i++)
            ok = ok && reached[capture->nodes[i]->index];
    free(reached);
    return ok;
}

CUresult softgpu_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phGraph)
        return CUDA_ERROR_INVALID_VALUE;
    *phGraph = NULL;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    struct sg_capture_session *session = capture ? capture->session : NULL;
    if (!capture) {
        result = CUDA_ERROR_ILLEGAL_STATE;
    } else if (session->origin != stream) {
        session->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    } else if (session->mode != CU_STREAM_CAPTURE_MODE_RELAXED && session->thread != this_thread()) {
        session->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    } else {
        if (session->invalid)
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (!joined(session, capture))
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        if (result == CUDA_SUCCESS) {
            *phGraph = (CUgraph)session->graph;
            session->graph = NULL;
        }
        for (struct sg_capture *other = captures, *next; other; other = next) {
            next = other->next;
            if (other->session == session && other != capture)
                leave(other);
        }
        leave(capture);
    }
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

static CUstreamCaptureStatus status(const struct sg_stream *stream)
{
    if (!stream->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->session->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult softgpu_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!captureStatus)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy && sg_capture_among(stream->context, false, false))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_lock(&sg_graph_lock);
    *captureStatus = status(stream);
    pthread_mutex_unlock(&sg_graph_lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                           CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                           const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!captureStatus_out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    *captureStatus_out = status(stream);
    if (capture) {
        if (id_out)
            *id_out = capture->session->id;
        if (graph_out)
            *graph_out = (CUgraph)capture->session->graph;
        if (dependencies_out)
            *dependencies_out = (const CUgraphNode *)capture->nodes;
        if (edgeData_out)
            *edgeData_out = capture->edges;
        if (numDependencies_out)
            *numDependencies_out = capture->count;
    }
    pthread_mutex_unlock(&sg_graph_lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                           CUgraph *graph_out, const CUgraphNode **dependencies_out, size_t *numDependencies_out)
{
    return softgpu_cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out);
}

CUresult softgpu_cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out)
{
    return softgpu_cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, NULL, NULL, NULL, NULL);
}

CUresult softgpu_cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode *dependencies,
                                                      const CUgraphEdgeData *dependencyData, size_t numDependencies, unsigned int flags)
{
    struct sg_stream *stream;
    (void)dependencyData;
    CUresult result = sg_stream_get(hStream, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if ((numDependencies && !dependencies) || flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sg_graph_lock);
    struct sg_capture *capture = stream->capture;
    if (!capture || capture->session->invalid)
        result = CUDA_ERROR_ILLEGAL_STATE;
    for (size_t i = 0; result == CUDA_SUCCESS && i < numDependencies; i++)
        if (!sg_handle_is(dependencies[i], SG_NODE) || ((struct sg_node *)dependencies[i])->graph != capture->session->graph)
            result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && !set_nodes(capture, (struct sg_node *const *)dependencies, numDependencies,
                                             flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
}

CUresult softgpu_cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags)
{
    return softgpu_cuStreamUpdateCaptureDependencies_v2(hStream, dependencies, NULL, numDependencies, flags);
}

CUresult softgpu_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
