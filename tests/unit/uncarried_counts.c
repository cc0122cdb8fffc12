/* uncarried.c over a driver of this file's own: what is made and destroyed again must leave nothing counted. */
#include "array_size.h"
#include "graphs.h"
#include "memory.h"
#include "track.h"

#include <stdio.h>
#include <stdlib.h>

union phos_real phos_real;

struct array {
    CUDA_ARRAY3D_DESCRIPTOR_v2 descriptor;
    unsigned int levels;
    struct array *made[32];
};

static CUresult array_create(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    struct array *array = calloc(1, sizeof *array);
    array->descriptor = *descriptor;
    *handle = (CUarray)array;
    return CUDA_SUCCESS;
}

static CUresult array_create_2d(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    CUDA_ARRAY3D_DESCRIPTOR_v2 whole = {descriptor->Width, descriptor->Height, 0, descriptor->Format, descriptor->NumChannels, 0};
    return array_create(handle, &whole);
}

static CUresult array_describe(CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, CUarray handle)
{
    *descriptor = ((struct array *)handle)->descriptor;
    return CUDA_SUCCESS;
}

static CUresult array_destroy(CUarray handle)
{
    if (((struct array *)handle)->levels)
        return CUDA_ERROR_INVALID_HANDLE;
    free(handle);
    return CUDA_SUCCESS;
}

static CUresult mipmapped_create(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, unsigned int levels)
{
    CUresult result = array_create((CUarray *)handle, descriptor);
    struct array *array = (struct array *)*handle;
    array->levels = levels;
    CUDA_ARRAY3D_DESCRIPTOR_v2 level = *descriptor;
    for (unsigned int n = 0; n < levels; n++) {
        array_create((CUarray *)&array->made[n], &level);
        level.Width = level.Width > 1 ? level.Width / 2 : 1;
        level.Height = level.Height > 1 ? level.Height / 2 : level.Height;
    }
    return result;
}

static CUresult mipmapped_level(CUarray *level, CUmipmappedArray handle, unsigned int n)
{
    struct array *array = (struct array *)handle;
    if (n >= array->levels)
        return CUDA_ERROR_INVALID_VALUE;
    *level = (CUarray)array->made[n];
    return CUDA_SUCCESS;
}

static CUresult mipmapped_destroy(CUmipmappedArray handle)
{
    struct array *array = (struct array *)handle;
    for (unsigned int n = 0; n < array->levels; n++)
        free(array->made[n]);
    free(array);
    return CUDA_SUCCESS;
}

static CUresult node_add(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *data, size_t count,
                         CUgraphNodeParams *parameters)
{
    (void)node, (void)graph, (void)before, (void)data, (void)count;
    return parameters ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void expect(enum phos_uncarried kind, uint64_t count, uint64_t bytes, int line)
{
    uint64_t found, size;
    phos_uncarried_get(kind, &found, &size);
    if (found != count || size != bytes) {
        fprintf(stderr, "line %d: %llu of %llu bytes, not %llu of %llu\n", line, (unsigned long long)found,
                (unsigned long long)size, (unsigned long long)count, (unsigned long long)bytes);
        exit(1);
    }
}
#define ARRAYS(count, bytes) expect(PHOS_UNCARRIED_ARRAY, count, bytes, __LINE__)

/* graphs.c and slab.c are not linked here. */
bool phos_driver_recover(CUdevice device, unsigned *step)
{
    (void)device, (void)step;
    return false;
}

void phos_graph_node_added(CUgraph graph, CUgraphNode node, const CUgraphNodeParams *parameters)
{
    (void)graph, (void)node, (void)parameters;
}

CUcontext phos_context_whole(CUcontext context)
{
    return context;
}

static CUcontext here;

static CUresult current(CUcontext *context)
{
    *context = here;
    return CUDA_SUCCESS;
}

int main(void)
{
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuArrayCreate_v2 = array_create_2d;
    phos_real.cuArray3DCreate_v2 = array_create;
    phos_real.cuArray3DGetDescriptor_v2 = array_describe;
    phos_real.cuArrayDestroy = array_destroy;
    phos_real.cuMipmappedArrayCreate = mipmapped_create;
    phos_real.cuMipmappedArrayGetLevel = mipmapped_level;
    phos_real.cuMipmappedArrayDestroy = mipmapped_destroy;
    phos_real.cuGraphAddNode_v2 = phos_real.cuGraphAddNode_v3 = node_add;

    CUarray line, plane, volume, sparse, packed;
    CUmipmappedArray mipmapped;
    serve_cuArrayCreate_v2(&line, &(CUDA_ARRAY_DESCRIPTOR_v2){1000, 0, CU_AD_FORMAT_HALF, 1});
    ARRAYS(1, 2000);
    serve_cuArrayCreate_v2(&plane, &(CUDA_ARRAY_DESCRIPTOR_v2){100, 50, CU_AD_FORMAT_FLOAT, 4});
    ARRAYS(2, 82000);
    serve_cuArray3DCreate_v2(&volume, &(CUDA_ARRAY3D_DESCRIPTOR_v2){10, 10, 10, CU_AD_FORMAT_UNSIGNED_INT8, 2, 0});
    ARRAYS(3, 84000);
    serve_cuArray3DCreate_v2(&sparse, &(CUDA_ARRAY3D_DESCRIPTOR_v2){1 << 14, 1 << 14, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_SPARSE});
    ARRAYS(4, 84000);
    serve_cuArray3DCreate_v2(&packed, &(CUDA_ARRAY3D_DESCRIPTOR_v2){64, 64, 0, CU_AD_FORMAT_BC1_UNORM, 4, 0});
    ARRAYS(5, 86048);
    serve_cuMipmappedArrayCreate(&mipmapped, &(CUDA_ARRAY3D_DESCRIPTOR_v2){16, 8, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0}, 3);
    ARRAYS(6, 86048 + 4 * (128 + 32 + 8));
    serve_cuMipmappedArrayDestroy(mipmapped);
    serve_cuArrayDestroy(packed), serve_cuArrayDestroy(plane), serve_cuArrayDestroy(volume);
    ARRAYS(2, 2000);
    serve_cuArrayDestroy(sparse), serve_cuArrayDestroy(line);
    ARRAYS(0, 0);

    /* Those that nobody destroys go with their context. */
    CUarray early, late;
    here = (CUcontext)0x1000;
    serve_cuArrayCreate_v2(&early, &(CUDA_ARRAY_DESCRIPTOR_v2){1000, 0, CU_AD_FORMAT_HALF, 1});
    here = (CUcontext)0x2000;
    serve_cuArrayCreate_v2(&late, &(CUDA_ARRAY_DESCRIPTOR_v2){500, 0, CU_AD_FORMAT_HALF, 1});
    serve_cuMipmappedArrayCreate(&mipmapped, &(CUDA_ARRAY3D_DESCRIPTOR_v2){16, 8, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0}, 3);
    phos_uncarried_context_ends(here);
    ARRAYS(1, 2000);
    serve_cuArrayDestroy(early);
    ARRAYS(0, 0);
    array_destroy(late), mipmapped_destroy(mipmapped);

    CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    parameters.alloc.bytesize = 12345;
    serve_cuGraphAddNode_v2(NULL, NULL, NULL, NULL, 0, &parameters);
    parameters.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    serve_cuGraphAddNode_v2(NULL, NULL, NULL, NULL, 0, &parameters);
    serve_cuGraphAddNode_v2(NULL, NULL, NULL, NULL, 0, NULL);
    expect(PHOS_UNCARRIED_GRAPH_MEMORY, 1, 12345, __LINE__);
    parameters.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    serve_cuGraphAddNode_v3(NULL, NULL, NULL, NULL, 0, &parameters);
    expect(PHOS_UNCARRIED_GRAPH_MEMORY, 2, 24690, __LINE__);
    return 0;
}
