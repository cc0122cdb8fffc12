/* Every spelling of copy and fill, turned into the one form of copy.c. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

enum side { UNIFIED, HOST, DEVICE };

static struct sg_extent flat(uint64_t address, size_t size, enum side side)
{
    return (struct sg_extent){address, size, size, side == DEVICE, side == HOST};
}

static bool pageable(const struct sg_extent *extent)
{
    return !extent->typed_device && !sg_is_pinned(extent->address);
}

/* Bytes of a pageable source, packed, so that the caller may change them as soon as the call returns. */
static bool stage(struct sg_copy *copy)
{
    char *at = malloc(copy->width * copy->height * copy->depth);
    if (!at)
        return false;
    copy->staging = at;
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < copy->height; y++, at += copy->width)
            memcpy(at, (const void *)(uintptr_t)(copy->source.address + z * copy->source.slice + y * copy->source.pitch), copy->width);
    return true;
}

/* What an asynchronous copy waits for is documented under "API synchronization behavior": with pageable host memory it takes
 * the source's bytes before it returns, or returns once they have arrived. */
static CUresult submit(struct sg_copy *copy, CUstream handle, bool wait)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    result = sg_copy_check(copy, stream->context);
    if (result != CUDA_SUCCESS)
        return result;
    bool empty = !copy->width || !copy->height || !copy->depth;
    if (!wait && !empty && !stream->capture) {
        if (pageable(&copy->destination))
            wait = true;
        else if (pageable(&copy->source) && !stage(copy))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct sg_work work = {.type = SG_WORK_COPY, .copy = *copy, .context = stream->context};
    return sg_submit(stream, &work, wait, NULL);
}

static CUresult copy1(uint64_t to, enum side to_side, uint64_t from, enum side from_side, size_t size, CUstream stream, bool wait)
{
    struct sg_copy copy = {flat(to, size, to_side), flat(from, size, from_side), size, 1, 1, NULL};
    return submit(&copy, stream, wait);
}

/* A synchronous device-to-device copy does not wait on the host side, as the driver's does not. */
CUresult softgpu_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
{
    return copy1(dst, UNIFIED, src, UNIFIED, ByteCount, NULL, true);
}

CUresult softgpu_cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
    return copy1(dstDevice, DEVICE, (uintptr_t)srcHost, HOST, ByteCount, NULL, true);
}

CUresult softgpu_cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
    return copy1((uintptr_t)dstHost, HOST, srcDevice, DEVICE, ByteCount, NULL, true);
}

CUresult softgpu_cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)
{
    return copy1(dstDevice, DEVICE, srcDevice, DEVICE, ByteCount, NULL, false);
}

CUresult softgpu_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
    return copy1(dst, UNIFIED, src, UNIFIED, ByteCount, hStream, false);
}

CUresult softgpu_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
{
    return copy1(dstDevice, DEVICE, (uintptr_t)srcHost, UNIFIED, ByteCount, hStream, false);
}

CUresult softgpu_cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
    return copy1((uintptr_t)dstHost, UNIFIED, srcDevice, DEVICE, ByteCount, hStream, false);
}

CUresult softgpu_cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
    return copy1(dstDevice, DEVICE, srcDevice, DEVICE, ByteCount, hStream, false);
}

static CUresult peers(CUcontext one, CUcontext other)
{
    struct sg_context *context;
    CUresult result = sg_context_get(one, &context);
    return result == CUDA_SUCCESS ? sg_context_get(other, &context) : result;
}

CUresult softgpu_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, size_t ByteCount)
{
    CUresult result = peers(dstContext, srcContext);
    return result == CUDA_SUCCESS ? copy1(dstDevice, DEVICE, srcDevice, DEVICE, ByteCount, NULL, true) : result;
}

CUresult softgpu_cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                                   size_t ByteCount, CUstream hStream)
{
    CUresult result = peers(dstContext, srcContext);
    return result == CUDA_SUCCESS ? copy1(dstDevice, DEVICE, srcDevice, DEVICE, ByteCount, hStream, false) : result;
}

static CUresult copy3(const CUDA_MEMCPY3D_v2 *parameters, CUstream stream, bool wait)
{
    struct sg_copy copy;
    if (!parameters)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_copy_from_3d(parameters, &copy);
    return result == CUDA_SUCCESS ? submit(&copy, stream, wait) : result;
}

static CUresult copy2(const CUDA_MEMCPY2D_v2 *p, CUstream stream, bool wait)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D_v2 deep = {
        .srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType, .srcHost = p->srcHost,
        .srcDevice = p->srcDevice, .srcArray = p->srcArray, .srcPitch = p->srcPitch, .dstXInBytes = p->dstXInBytes,
        .dstY = p->dstY, .dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice,
        .dstArray = p->dstArray, .dstPitch = p->dstPitch, .WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = 1,
    };
    return copy3(&deep, stream, wait);
}

CUresult softgpu_cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy)
{
    return copy2(pCopy, NULL, true);
}

CUresult softgpu_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy)
{
    return copy2(pCopy, NULL, true);
}

CUresult softgpu_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
{
    return copy2(pCopy, hStream, false);
}

CUresult softgpu_cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy)
{
    return copy3(pCopy, NULL, true);
}

CUresult softgpu_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
{
    return copy3(pCopy, hStream, false);
}

static CUresult copy3_peer(const CUDA_MEMCPY3D_PEER *p, CUstream stream, bool wait)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = peers(p->dstContext, p->srcContext);
    if (result != CUDA_SUCCESS)
        return result;
    CUDA_MEMCPY3D_v2 plain = {
        .srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcZ = p->srcZ, .srcLOD = p->srcLOD,
        .srcMemoryType = p->srcMemoryType, .srcHost = p->srcHost, .srcDevice = p->srcDevice, .srcPitch = p->srcPitch,
        .srcHeight = p->srcHeight, .dstXInBytes = p->dstXInBytes, .dstY = p->dstY, .dstZ = p->dstZ, .dstLOD = p->dstLOD,
        .dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice, .dstPitch = p->dstPitch,
        .dstHeight = p->dstHeight, .WidthInBytes = p->WidthInBytes, .Height = p->Height, .Depth = p->Depth,
    };
    return copy3(&plain, stream, wait);
}

CUresult softgpu_cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *pCopy)
{
    return copy3_peer(pCopy, NULL, true);
}

CUresult softgpu_cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream)
{
    return copy3_peer(pCopy, hStream, false);
}

CUresult softgpu_cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                       CUmemcpyAttributes *attrs, size_t *attrIdxs, size_t numAttrs, CUstream hStream)
{
    if (!dsts || !srcs || !sizes || !count || !attrs || !attrIdxs || !numAttrs || !hStream)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        CUresult result = copy1(dsts[i], UNIFIED, srcs[i], UNIFIED, sizes[i], hStream, false);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult softgpu_cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                                    size_t *attrIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream)
{
    if (failIdx)
        *failIdx = SIZE_MAX;
    return softgpu_cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attrs, attrIdxs, numAttrs, hStream);
}

CUresult softgpu_cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, CUstream hStream)
{
    return attr ? copy1(dst, UNIFIED, src, UNIFIED, size, hStream, false) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- fills ---- */

static CUresult fill(uint64_t address, size_t pitch, unsigned value, unsigned element, size_t width, size_t height, CUstream handle)
{
    struct sg_stream *stream;
    CUresult result = sg_stream_get(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    struct sg_work work = {.type = SG_WORK_FILL, .fill = {address, pitch, width, height, element, value}, .context = stream->context};
    result = sg_fill_check(&work.fill, stream->context);
    return result == CUDA_SUCCESS ? sg_submit(stream, &work, false, NULL) : result;
}

CUresult softgpu_cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N)
{
    return fill(dstDevice, N, uc, 1, N, 1, NULL);
}

CUresult softgpu_cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
{
    return fill(dstDevice, N, uc, 1, N, 1, hStream);
}

CUresult softgpu_cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height)
{
    return fill(dstDevice, dstPitch, uc, 1, Width, Height, NULL);
}

CUresult softgpu_cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height, CUstream hStream)
{
    return fill(dstDevice, dstPitch, uc, 1, Width, Height, hStream);
}

CUresult softgpu_cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N)
{
    return fill(dstDevice, N * 2, us, 2, N, 1, NULL);
}

CUresult softgpu_cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)
{
    return fill(dstDevice, N * 2, us, 2, N, 1, hStream);
}

CUresult softgpu_cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height)
{
    return fill(dstDevice, dstPitch, us, 2, Width, Height, NULL);
}

CUresult softgpu_cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height, CUstream hStream)
{
    return fill(dstDevice, dstPitch, us, 2, Width, Height, hStream);
}

CUresult softgpu_cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N)
{
    return fill(dstDevice, N * 4, ui, 4, N, 1, NULL);
}

CUresult softgpu_cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
{
    return fill(dstDevice, N * 4, ui, 4, N, 1, hStream);
}

CUresult softgpu_cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height)
{
    return fill(dstDevice, dstPitch, ui, 4, Width, Height, NULL);
}

CUresult softgpu_cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream)
{
    return fill(dstDevice, dstPitch, ui, 4, Width, Height, hStream);
}
