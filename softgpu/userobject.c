/* User objects: what an application hangs onto graphs, to be destroyed with the last graph or handle that refers to it. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "graph.h"

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
    pthread_mutex_lock(&sg_graph_lock);
    CUresult result = hold(graph, object, count, flags & CU_GRAPH_USER_OBJECT_MOVE);
    pthread_mutex_unlock(&sg_graph_lock);
    return result;
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
