/* What copies touch. Host memory and arrays do not count: the first is not device memory, the second is the driver's to
 * save. A copy with a side on the host sets host_copy. So does one that names a device's memory as the host's, and that
 * counts: with unified addressing the driver goes by the address. */
#include "touch_parts.h"
#include "memory.h"
#include "cleanup.h"

/* One side of a copy, `bytes` from `address` on. */
static void side(struct phos_touches *touches, CUdeviceptr address, size_t bytes, uint32_t access)
{
    if (bytes)
        phos_touches_add(touches, address, bytes, access);
}

static bool is_ours(CUdeviceptr address)
{
    PHOS_LOCKED(&phos_memory_lock);
    return phos_mapping_at(address) != NULL;
}

/* An address that may be the host's as well (unified addressing): memory that we know is on a device, and the rest is
 * taken for host memory. */
static void either(struct phos_touches *touches, CUdeviceptr address, size_t bytes, uint32_t access)
{
    if (!is_ours(address))
        touches->host_copy = true;
    side(touches, address, bytes, access);
}

/* An address that the call takes for the host's. */
static void host_side(struct phos_touches *touches, const void *address, size_t bytes, uint32_t access)
{
    if (is_ours((CUdeviceptr)(uintptr_t)address))
        side(touches, (CUdeviceptr)(uintptr_t)address, bytes, access);
}

static void linear(struct phos_touches *touches, CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    phos_touches_begin(touches, stream);
    side(touches, to, bytes, PHOS_WRITES);
    side(touches, from, bytes, PHOS_READS);
}

static void host(struct phos_touches *touches, CUstream stream, bool synchronous)
{
    phos_touches_begin(touches, stream);
    touches->host_copy = true;
    touches->synchronous = synchronous;
}

void touch_cuMemcpyAsync(struct phos_touches *touches, CUdeviceptr_v2 to, CUdeviceptr_v2 from, size_t bytes,
                         CUstream stream)
{
    phos_touches_begin(touches, stream);
    either(touches, to, bytes, PHOS_WRITES);
    either(touches, from, bytes, PHOS_READS);
}

void touch_cuMemcpy(struct phos_touches *touches, CUdeviceptr_v2 to, CUdeviceptr_v2 from, size_t bytes)
{
    touch_cuMemcpyAsync(touches, to, from, bytes, NULL);
    touches->synchronous = true;
}

void touch_cuMemcpyPeerAsync(struct phos_touches *touches, CUdeviceptr_v2 to, CUcontext to_context, CUdeviceptr_v2 from,
                             CUcontext from_context, size_t bytes, CUstream stream)
{
    (void)to_context;
    (void)from_context;
    linear(touches, stream, to, from, bytes);
}

void touch_cuMemcpyPeer(struct phos_touches *touches, CUdeviceptr_v2 to, CUcontext to_context, CUdeviceptr_v2 from,
                        CUcontext from_context, size_t bytes)
{
    touch_cuMemcpyPeerAsync(touches, to, to_context, from, from_context, bytes, NULL);
}

/* The plain forms, at both widths. */
#define LINEAR_COPIES(suffix, address_type, size_type) \
    void touch_cuMemcpyHtoD##suffix(struct phos_touches *touches, address_type to, const void *from, size_type bytes) \
    { \
        host(touches, NULL, true); \
        side(touches, to, bytes, PHOS_WRITES); \
        host_side(touches, from, bytes, PHOS_READS); \
    } \
    void touch_cuMemcpyHtoDAsync##suffix(struct phos_touches *touches, address_type to, const void *from, \
                                         size_type bytes, CUstream stream) \
    { \
        host(touches, stream, false); \
        side(touches, to, bytes, PHOS_WRITES); \
        host_side(touches, from, bytes, PHOS_READS); \
    } \
    void touch_cuMemcpyDtoH##suffix(struct phos_touches *touches, void *to, address_type from, size_type bytes) \
    { \
        host(touches, NULL, true); \
        side(touches, from, bytes, PHOS_READS); \
        host_side(touches, to, bytes, PHOS_WRITES); \
    } \
    void touch_cuMemcpyDtoHAsync##suffix(struct phos_touches *touches, void *to, address_type from, size_type bytes, \
                                         CUstream stream) \
    { \
        host(touches, stream, false); \
        side(touches, from, bytes, PHOS_READS); \
        host_side(touches, to, bytes, PHOS_WRITES); \
    } \
    void touch_cuMemcpyDtoD##suffix(struct phos_touches *touches, address_type to, address_type from, size_type bytes) \
    { \
        linear(touches, NULL, to, from, bytes); \
    } \
    void touch_cuMemcpyDtoDAsync##suffix(struct phos_touches *touches, address_type to, address_type from, \
                                         size_type bytes, CUstream stream) \
    { \
        linear(touches, stream, to, from, bytes); \
    } \
    void touch_cuMemcpyDtoA##suffix(struct phos_touches *touches, CUarray to, size_type offset, address_type from, \
                                    size_type bytes) \
    { \
        (void)to; \
        (void)offset; \
        linear(touches, NULL, 0, from, bytes); \
    } \
    void touch_cuMemcpyAtoD##suffix(struct phos_touches *touches, address_type to, CUarray from, size_type offset, \
                                    size_type bytes) \
    { \
        (void)from; \
        (void)offset; \
        linear(touches, NULL, to, 0, bytes); \
    } \
    void touch_cuMemcpyHtoA##suffix(struct phos_touches *touches, CUarray to, size_type offset, const void *from, \
                                    size_type bytes) \
    { \
        (void)to; \
        (void)offset; \
        host(touches, NULL, true); \
        host_side(touches, from, bytes, PHOS_READS); \
    } \
    void touch_cuMemcpyHtoAAsync##suffix(struct phos_touches *touches, CUarray to, size_type offset, const void *from, \
                                         size_type bytes, CUstream stream) \
    { \
        (void)to; \
        (void)offset; \
        host(touches, stream, false); \
        host_side(touches, from, bytes, PHOS_READS); \
    } \
    void touch_cuMemcpyAtoH##suffix(struct phos_touches *touches, void *to, CUarray from, size_type offset, \
                                    size_type bytes) \
    { \
        (void)from; \
        (void)offset; \
        host(touches, NULL, true); \
        host_side(touches, to, bytes, PHOS_WRITES); \
    } \
    void touch_cuMemcpyAtoHAsync##suffix(struct phos_touches *touches, void *to, CUarray from, size_type offset, \
                                         size_type bytes, CUstream stream) \
    { \
        (void)from; \
        (void)offset; \
        host(touches, stream, false); \
        host_side(touches, to, bytes, PHOS_WRITES); \
    } \
    void touch_cuMemcpyAtoA##suffix(struct phos_touches *touches, CUarray to, size_type to_offset, CUarray from, \
                                    size_type from_offset, size_type bytes) \
    { \
        (void)to; \
        (void)to_offset; \
        (void)from; \
        (void)from_offset; \
        (void)bytes; \
        phos_touches_begin(touches, NULL); \
    }

LINEAR_COPIES(_v2, CUdeviceptr_v2, size_t)
LINEAR_COPIES(, CUdeviceptr_v1, unsigned int)

/* One side of a copy of up to three dimensions: from its first byte to its last, gaps included. */
static void box(struct phos_touches *touches, CUmemorytype type, CUdeviceptr device, const void *host_address, size_t x,
                size_t y, size_t z, size_t pitch, size_t rows, size_t width, size_t height, size_t depth, uint32_t access)
{
    if (type == CU_MEMORYTYPE_HOST)
        touches->host_copy = true;
    if (type == CU_MEMORYTYPE_ARRAY || !width || !height || !depth)
        return;
    pitch = pitch ? pitch : width;
    rows = rows ? rows : height;
    size_t begin = (z * rows + y) * pitch + x;
    size_t bytes = ((depth - 1) * rows + height - 1) * pitch + width;
    if (type == CU_MEMORYTYPE_HOST)
        host_side(touches, (const void *)((uintptr_t)host_address + begin), bytes, access);
    else if (type == CU_MEMORYTYPE_UNIFIED)
        either(touches, device + begin, bytes, access);
    else
        side(touches, device + begin, bytes, access);
}

#define BOX_2D(copy, access, part) \
    box(touches, (copy)->part##MemoryType, (copy)->part##Device, (copy)->part##Host, (copy)->part##XInBytes, \
        (copy)->part##Y, 0, (copy)->part##Pitch, 0, (copy)->WidthInBytes, (copy)->Height, 1, access)
#define BOX_3D(copy, access, part) \
    box(touches, (copy)->part##MemoryType, (copy)->part##Device, (copy)->part##Host, (copy)->part##XInBytes, \
        (copy)->part##Y, (copy)->part##Z, (copy)->part##Pitch, (copy)->part##Height, (copy)->WidthInBytes, \
        (copy)->Height, (copy)->Depth, access)
#define BOX_COPY(name, copy_type, box_kind) \
    void touch_##name(struct phos_touches *touches, const copy_type *copy) \
    { \
        phos_touches_begin(touches, NULL); \
        if (!copy) \
            return; \
        box_kind(copy, PHOS_WRITES, dst); \
        box_kind(copy, PHOS_READS, src); \
        touches->synchronous = true; \
    }
#define BOX_COPY_ASYNC(name, copy_type, box_kind) \
    void touch_##name(struct phos_touches *touches, const copy_type *copy, CUstream stream) \
    { \
        phos_touches_begin(touches, stream); \
        if (!copy) \
            return; \
        box_kind(copy, PHOS_WRITES, dst); \
        box_kind(copy, PHOS_READS, src); \
    }

BOX_COPY(cuMemcpy2D_v2, CUDA_MEMCPY2D_v2, BOX_2D)
BOX_COPY(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D_v2, BOX_2D)
BOX_COPY(cuMemcpy3D_v2, CUDA_MEMCPY3D_v2, BOX_3D)
BOX_COPY(cuMemcpy3DPeer, CUDA_MEMCPY3D_PEER_v1, BOX_3D)
BOX_COPY(cuMemcpy2D, CUDA_MEMCPY2D_v1, BOX_2D)
BOX_COPY(cuMemcpy2DUnaligned, CUDA_MEMCPY2D_v1, BOX_2D)
BOX_COPY(cuMemcpy3D, CUDA_MEMCPY3D_v1, BOX_3D)
BOX_COPY_ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D_v2, BOX_2D)
BOX_COPY_ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D_v2, BOX_3D)
BOX_COPY_ASYNC(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D_PEER_v1, BOX_3D)
BOX_COPY_ASYNC(cuMemcpy2DAsync, CUDA_MEMCPY2D_v1, BOX_2D)
BOX_COPY_ASYNC(cuMemcpy3DAsync, CUDA_MEMCPY3D_v1, BOX_3D)

void phos_touch_copy_3d(struct phos_touches *touches, const CUDA_MEMCPY3D *copy)
{
    BOX_3D(copy, PHOS_WRITES, dst);
    BOX_3D(copy, PHOS_READS, src);
}

void phos_touch_copies(struct phos_touches *touches, const CUdeviceptr_v2 *to, const CUdeviceptr_v2 *from,
                       const size_t *sizes, size_t count)
{
    for (size_t i = 0; to && from && sizes && i < count; i++) {
        either(touches, to[i], sizes[i], PHOS_WRITES);
        either(touches, from[i], sizes[i], PHOS_READS);
    }
}

void touch_cuMemcpyBatchAsync_v2(struct phos_touches *touches, CUdeviceptr_v2 *to, CUdeviceptr_v2 *from, size_t *sizes,
                                 size_t count, CUmemcpyAttributes_v1 *attributes, size_t *indices,
                                 size_t attribute_count, CUstream stream)
{
    (void)attributes;
    (void)indices;
    (void)attribute_count;
    phos_touches_begin(touches, stream);
    phos_touch_copies(touches, to, from, sizes, count);
}

void touch_cuMemcpyBatchAsync(struct phos_touches *touches, CUdeviceptr_v2 *to, CUdeviceptr_v2 *from, size_t *sizes,
                              size_t count, CUmemcpyAttributes_v1 *attributes, size_t *indices, size_t attribute_count,
                              size_t *failed, CUstream stream)
{
    (void)failed;
    touch_cuMemcpyBatchAsync_v2(touches, to, from, sizes, count, attributes, indices, attribute_count, stream);
}

void touch_cuMemcpyWithAttributesAsync(struct phos_touches *touches, CUdeviceptr_v2 to, CUdeviceptr_v2 from, size_t bytes,
                                       CUmemcpyAttributes_v1 *attributes, CUstream stream)
{
    (void)attributes;
    touch_cuMemcpyAsync(touches, to, from, bytes, stream);
}

/* Between pointers an element is a byte. With an array on the other side it is the array's, whose size we do not ask for:
 * then the whole allocation counts. */
static void operand(struct phos_touches *touches, const CUmemcpy3DOperand *operand, const CUextent3D *extent, bool bytes,
                    uint32_t access)
{
    if (operand->type != CU_MEMCPY_OPERAND_TYPE_POINTER)
        return;
    size_t row = operand->op.ptr.rowLength ? operand->op.ptr.rowLength : extent->width;
    size_t layer = operand->op.ptr.layerHeight ? operand->op.ptr.layerHeight : extent->height;
    if (!extent->width || !extent->height || !extent->depth)
        return;
    size_t size = ((extent->depth - 1) * layer + extent->height - 1) * row + extent->width;
    if (bytes)
        either(touches, operand->op.ptr.ptr, size, access);
    else
        phos_touches_add(touches, operand->op.ptr.ptr, 0, access);
}

void touch_cuMemcpy3DBatchAsync_v2(struct phos_touches *touches, size_t count, CUDA_MEMCPY3D_BATCH_OP_v1 *list,
                                   unsigned long long flags, CUstream stream)
{
    (void)flags;
    phos_touches_begin(touches, stream);
    for (size_t i = 0; list && i < count; i++) {
        bool bytes = list[i].src.type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
                     list[i].dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER;
        operand(touches, &list[i].dst, &list[i].extent, bytes, PHOS_WRITES);
        operand(touches, &list[i].src, &list[i].extent, bytes, PHOS_READS);
    }
}

void touch_cuMemcpy3DBatchAsync(struct phos_touches *touches, size_t count, CUDA_MEMCPY3D_BATCH_OP_v1 *list,
                                size_t *failed, unsigned long long flags, CUstream stream)
{
    (void)failed;
    touch_cuMemcpy3DBatchAsync_v2(touches, count, list, flags, stream);
}

void touch_cuMemcpy3DWithAttributesAsync(struct phos_touches *touches, CUDA_MEMCPY3D_BATCH_OP_v1 *copy,
                                         unsigned long long flags, CUstream stream)
{
    touch_cuMemcpy3DBatchAsync_v2(touches, 1, copy, flags, stream);
}

/* What is bound to a logical endpoint, here or in another process, nobody tells: memory of ours perhaps. */
static void fabric_operand(struct phos_touches *touches, const CUfabricCpyOperand *operand, size_t bytes, uint32_t access)
{
    if (operand->type == CU_FABRIC_COPY_OPERAND_TYPE_POINTER)
        either(touches, operand->op.ptr.ptr, bytes, access);
    else if (bytes)
        touches->anything |= access;
}

void phos_touch_fabric_copies(struct phos_touches *touches, const CUDA_FABRIC_COPY_BATCH_OP_v1 *list, size_t count)
{
    for (size_t i = 0; list && i < count; i++) {
        fabric_operand(touches, &list[i].dst, list[i].size, PHOS_WRITES);
        fabric_operand(touches, &list[i].src, list[i].size, PHOS_READS);
    }
}

void touch_cuFabricCpyBatchAsync(struct phos_touches *touches, size_t count, CUDA_FABRIC_COPY_BATCH_OP_v1 *list,
                                 unsigned long long flags, CUstream stream)
{
    (void)flags;
    phos_touches_begin(touches, stream);
    phos_touch_fabric_copies(touches, list, count);
}

void touch_cuMemBatchDecompressAsync(struct phos_touches *touches, CUmemDecompressParams *list, size_t count,
                                     unsigned int flags, size_t *failed, CUstream stream)
{
    (void)flags;
    (void)failed;
    phos_touches_begin(touches, stream);
    for (size_t i = 0; list && i < count; i++) {
        side(touches, (CUdeviceptr)(uintptr_t)list[i].dst, list[i].dstNumBytes, PHOS_WRITES);
        side(touches, (CUdeviceptr)(uintptr_t)list[i].src, list[i].srcNumBytes, PHOS_READS);
        side(touches, (CUdeviceptr)(uintptr_t)list[i].dstActBytes, sizeof *list[i].dstActBytes, PHOS_WRITES);
    }
}
