/* Copies and fills: what they check when they are asked for, what they do when they run, how long that takes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softgpu.h"

#define PIECE ((size_t)8 << 20) /* access may be taken away between pieces */

/* Bytes from the first to one past the last byte of one side. */
static bool span(const struct sg_extent *extent, size_t width, size_t height, size_t depth, size_t *bytes)
{
    unsigned __int128 total = (unsigned __int128)extent->slice * (depth - 1) + (unsigned __int128)extent->pitch * (height - 1) + width;
    *bytes = (size_t)total;
    return total <= (uint64_t)1 << 62;
}

/* Does the driver know this address at all? A VMM mapping without access is found out when the copy runs, not here. */
static bool known(uint64_t address, size_t size)
{
    struct sg_allocation allocation;
    struct sg_range range;
    uint64_t end = address + size;
    if (end < address)
        return false;
    if (sg_find_allocation(address, &allocation))
        return end <= allocation.begin + allocation.size;
    while (address < end) {
        if (!sg_find_range(address, &range) || range.slab)
            return false;
        address = range.end;
    }
    return true;
}

static CUresult check_side(const struct sg_extent *extent, const struct sg_copy *copy)
{
    size_t bytes;
    struct sg_range range;
    if (!extent->address || !span(extent, copy->width, copy->height, copy->depth, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (copy->height > 1 && extent->pitch < copy->width)
        return CUDA_ERROR_INVALID_VALUE;
    if (extent->typed_host)
        return CUDA_SUCCESS;
    if (!extent->typed_device && !sg_find_range(extent->address, &range))
        return CUDA_SUCCESS; /* unified: pageable host memory */
    return known(extent->address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sg_copy_check(const struct sg_copy *copy, struct sg_context *context)
{
    (void)context;
    if (!copy->width || !copy->height || !copy->depth)
        return CUDA_SUCCESS;
    CUresult result = check_side(&copy->destination, copy);
    return result == CUDA_SUCCESS ? check_side(&copy->source, copy) : result;
}

/* When the copy began, or was let go: for tests in which it must not end before something else, however slow that is. */
static uint64_t while_held(size_t bytes, uint64_t started)
{
    const char *file = sg_settings()->copy_hold;
    if (!file[0] || bytes < sg_settings()->copy_hold_bytes || access(file, F_OK) != 0)
        return started;
    while (access(file, F_OK) == 0)
        sg_sleep_ns(1000000);
    return sg_now_ns();
}

/* Queues behind the copies of the same direction, and returns when this one would have ended. */
static void engine_wait(struct sg_engine *engine, size_t bytes, uint64_t started)
{
    double bandwidth = sg_settings()->copy_bandwidth;
    if (bandwidth <= 0)
        return;
    uint64_t duration = (uint64_t)((double)bytes / bandwidth * 1e9);
    pthread_mutex_lock(&engine->lock);
    uint64_t begin = engine->busy_until > started ? engine->busy_until : started;
    uint64_t end = begin + duration;
    engine->busy_until = end;
    pthread_mutex_unlock(&engine->lock);
    sg_sleep_until_ns(end);
}

static bool on_device(const struct sg_extent *extent, int *device)
{
    return !extent->typed_host && sg_is_device_memory(extent->address, device);
}

/* One stretch. False: device memory that may not be accessed (any more). */
static bool move(uint64_t to, uint64_t from, size_t size, bool to_checked, bool from_checked)
{
    while (size) {
        size_t part = size < PIECE ? size : PIECE;
        sg_use_begin();
        bool ok = (!to_checked || sg_accessible(NULL, to, part, true)) && (!from_checked || sg_accessible(NULL, from, part, false));
        if (ok)
            memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, part);
        sg_use_end();
        if (!ok)
            return false;
        to += part;
        from += part;
        size -= part;
    }
    return true;
}

CUresult sg_copy_run(const struct sg_copy *copy, struct sg_context *context)
{
    if (!copy->width || !copy->height || !copy->depth)
        return CUDA_SUCCESS;
    if (sg_fault(SG_FAULT_COPY))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    uint64_t started = sg_now_ns();
    int to_device = -1, from_device = -1;
    bool to = on_device(&copy->destination, &to_device), from = on_device(&copy->source, &from_device);
    /* Any address the driver gave out is checked, pinned host memory too: the application may have freed it since. */
    struct sg_range range;
    bool to_checked = copy->destination.typed_device || sg_find_range(copy->destination.address, &range);
    bool from_checked = !copy->staging && (copy->source.typed_device || sg_find_range(copy->source.address, &range));
    uint64_t source = copy->staging ? (uintptr_t)copy->staging : copy->source.address;
    size_t source_pitch = copy->staging ? copy->width : copy->source.pitch;
    size_t source_slice = copy->staging ? copy->width * copy->height : copy->source.slice;
    for (size_t z = 0; z < copy->depth; z++) {
        uint64_t a = copy->destination.address + z * copy->destination.slice, b = source + z * source_slice;
        bool whole = copy->height == 1 || (copy->destination.pitch == copy->width && source_pitch == copy->width);
        size_t rows = whole ? 1 : copy->height, bytes = whole ? copy->width * copy->height : copy->width;
        for (size_t y = 0; y < rows; y++)
            if (!move(a + y * copy->destination.pitch, b + y * source_pitch, bytes, to_checked, from_checked))
                return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    size_t bytes = copy->width * copy->height * copy->depth;
    if (to && from)
        engine_wait(&sg_device(to_device)->engines[SG_D2D], to_device == from_device ? 0 : bytes, started);
    else if (to)
        engine_wait(&sg_device(to_device)->engines[SG_H2D], bytes, while_held(bytes, started));
    else if (from)
        engine_wait(&sg_device(from_device)->engines[SG_D2H], bytes, while_held(bytes, started));
    (void)context;
    return CUDA_SUCCESS;
}

CUresult sg_fill_check(const struct sg_fill *fill, struct sg_context *context)
{
    (void)context;
    if (fill->element != 1 && fill->element != 2 && fill->element != 4)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fill->width || !fill->height)
        return CUDA_SUCCESS;
    if (fill->width > ((uint64_t)1 << 60) || fill->address % fill->element ||
        (fill->height > 1 && (fill->pitch % fill->element || fill->pitch < fill->width * fill->element)))
        return CUDA_ERROR_INVALID_VALUE;
    struct sg_extent extent = {.address = fill->address, .pitch = fill->pitch, .typed_device = true};
    size_t bytes;
    if (!span(&extent, fill->width * fill->element, fill->height, 1, &bytes) || !known(fill->address, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static void fill_row(void *at, const struct sg_fill *fill, size_t count)
{
    if (fill->element == 1)
        memset(at, (int)fill->value, count);
    else if (fill->element == 2)
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)at)[i] = (uint16_t)fill->value;
    else
        for (size_t i = 0; i < count; i++)
            ((uint32_t *)at)[i] = fill->value;
}

CUresult sg_fill_run(const struct sg_fill *fill, struct sg_context *context)
{
    (void)context;
    if (!fill->width)
        return CUDA_SUCCESS;
    size_t piece = PIECE / fill->element;
    for (size_t y = 0; y < fill->height; y++)
        for (size_t x = 0; x < fill->width; x += piece) {
            size_t count = fill->width - x < piece ? fill->width - x : piece;
            uint64_t at = fill->address + y * fill->pitch + x * fill->element;
            sg_use_begin();
            bool ok = sg_accessible(NULL, at, count * fill->element, true);
            if (ok)
                fill_row((void *)(uintptr_t)at, fill, count);
            sg_use_end();
            if (!ok)
                return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    return CUDA_SUCCESS;
}

/* One side of a CUDA_MEMCPY3D. Arrays (texture memory) are not simulated. */
static CUresult side(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t z, size_t pitch,
                     size_t height, size_t width, size_t rows, struct sg_extent *out)
{
    if (type == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pitch)
        pitch = width + x;
    if (!height)
        height = rows + y;
    out->pitch = pitch;
    out->slice = pitch * height;
    out->address = (type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : device) + z * out->slice + y * pitch + x;
    out->typed_host = type == CU_MEMORYTYPE_HOST;
    out->typed_device = type == CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
}

CUresult sg_copy_from_3d(const CUDA_MEMCPY3D_v2 *p, struct sg_copy *out)
{
    *out = (struct sg_copy){.width = p->WidthInBytes, .height = p->Height, .depth = p->Depth};
    if (p->srcLOD || p->dstLOD)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = side(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes, p->srcY, p->srcZ, p->srcPitch,
                           p->srcHeight, p->WidthInBytes, p->Height, &out->source);
    if (result != CUDA_SUCCESS)
        return result;
    return side(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes, p->dstY, p->dstZ, p->dstPitch, p->dstHeight,
                p->WidthInBytes, p->Height, &out->destination);
}
