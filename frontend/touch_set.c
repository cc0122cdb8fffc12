/* What memsets, and the small reads and writes of a stream, touch. */
#include "touch_parts.h"

/* `width` elements of `element` bytes, `height` rows of them; a pitch counts from the second row on only. */
static void set(struct phos_touches *touches, CUstream stream, CUdeviceptr address, size_t pitch, size_t element,
                size_t width, size_t height)
{
    phos_touches_begin(touches, stream);
    if (width && height)
        phos_touches_add(touches, address, (height - 1) * pitch + width * element, PHOS_WRITES);
}

#define SET(name, address_type, size_type, value_type, element) \
    void touch_##name(struct phos_touches *touches, address_type address, value_type value, size_type count) \
    { \
        (void)value; \
        set(touches, NULL, address, 0, element, count, 1); \
    }
#define SET_2D(name, address_type, size_type, value_type, element) \
    void touch_##name(struct phos_touches *touches, address_type address, size_type pitch, value_type value, \
                      size_type width, size_type height) \
    { \
        (void)value; \
        set(touches, NULL, address, pitch, element, width, height); \
    }
#define SET_ASYNC(name, value_type, element) \
    void touch_##name(struct phos_touches *touches, CUdeviceptr_v2 address, value_type value, size_t count, \
                      CUstream stream) \
    { \
        (void)value; \
        set(touches, stream, address, 0, element, count, 1); \
    }
#define SET_2D_ASYNC(name, value_type, element) \
    void touch_##name(struct phos_touches *touches, CUdeviceptr_v2 address, size_t pitch, value_type value, size_t width, \
                      size_t height, CUstream stream) \
    { \
        (void)value; \
        set(touches, stream, address, pitch, element, width, height); \
    }

SET(cuMemsetD8_v2, CUdeviceptr_v2, size_t, unsigned char, 1)
SET(cuMemsetD16_v2, CUdeviceptr_v2, size_t, unsigned short, 2)
SET(cuMemsetD32_v2, CUdeviceptr_v2, size_t, unsigned int, 4)
SET(cuMemsetD8, CUdeviceptr_v1, unsigned int, unsigned char, 1)
SET(cuMemsetD16, CUdeviceptr_v1, unsigned int, unsigned short, 2)
SET(cuMemsetD32, CUdeviceptr_v1, unsigned int, unsigned int, 4)
SET_2D(cuMemsetD2D8_v2, CUdeviceptr_v2, size_t, unsigned char, 1)
SET_2D(cuMemsetD2D16_v2, CUdeviceptr_v2, size_t, unsigned short, 2)
SET_2D(cuMemsetD2D32_v2, CUdeviceptr_v2, size_t, unsigned int, 4)
SET_2D(cuMemsetD2D8, CUdeviceptr_v1, unsigned int, unsigned char, 1)
SET_2D(cuMemsetD2D16, CUdeviceptr_v1, unsigned int, unsigned short, 2)
SET_2D(cuMemsetD2D32, CUdeviceptr_v1, unsigned int, unsigned int, 4)
SET_ASYNC(cuMemsetD8Async, unsigned char, 1)
SET_ASYNC(cuMemsetD16Async, unsigned short, 2)
SET_ASYNC(cuMemsetD32Async, unsigned int, 4)
SET_2D_ASYNC(cuMemsetD2D8Async, unsigned char, 1)
SET_2D_ASYNC(cuMemsetD2D16Async, unsigned short, 2)
SET_2D_ASYNC(cuMemsetD2D32Async, unsigned int, 4)

/* The flag of a wait: what follows it in the stream may see memory that another device wrote; nothing is written here. */
#define VALUE(name, value_type, size, access) \
    void touch_##name(struct phos_touches *touches, CUstream stream, CUdeviceptr_v2 address, value_type value, \
                      unsigned int flags) \
    { \
        (void)value; \
        (void)flags; \
        phos_touches_begin(touches, stream); \
        phos_touches_add(touches, address, size, access); \
    }

VALUE(cuStreamWriteValue32, cuuint32_t, 4, PHOS_WRITES)
VALUE(cuStreamWriteValue32_v2, cuuint32_t, 4, PHOS_WRITES)
VALUE(cuStreamWriteValue64, cuuint64_t, 8, PHOS_WRITES)
VALUE(cuStreamWriteValue64_v2, cuuint64_t, 8, PHOS_WRITES)
VALUE(cuStreamWaitValue32, cuuint32_t, 4, PHOS_READS)
VALUE(cuStreamWaitValue32_v2, cuuint32_t, 4, PHOS_READS)
VALUE(cuStreamWaitValue64, cuuint64_t, 8, PHOS_READS)
VALUE(cuStreamWaitValue64_v2, cuuint64_t, 8, PHOS_READS)

static void reduction(struct phos_touches *touches, const struct CUstreamMemOpAtomicReductionParams_st *operation)
{
    if (operation->dataType == CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32)
        phos_touches_add(touches, operation->address, 4, PHOS_READS | PHOS_WRITES);
    else if (operation->dataType == CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64)
        phos_touches_add(touches, operation->address, 8, PHOS_READS | PHOS_WRITES);
    else
        touches->anything |= PHOS_READS | PHOS_WRITES;
}

void phos_touch_memory_operations(struct phos_touches *touches, const CUstreamBatchMemOpParams *operations,
                                  unsigned int count)
{
    for (unsigned int i = 0; operations && i < count; i++)
        switch (operations[i].operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
            phos_touches_add(touches, operations[i].waitValue.address, 4, PHOS_READS);
            break;
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            phos_touches_add(touches, operations[i].waitValue.address, 8, PHOS_READS);
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            phos_touches_add(touches, operations[i].writeValue.address, 4, PHOS_WRITES);
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            phos_touches_add(touches, operations[i].writeValue.address, 8, PHOS_WRITES);
            break;
        case CU_STREAM_MEM_OP_BARRIER:
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
            break;
        case CU_STREAM_MEM_OP_ATOMIC_REDUCTION:
            reduction(touches, &operations[i].atomicReduction);
            break;
        default: /* a newer driver's */
            touches->anything |= PHOS_READS | PHOS_WRITES;
        }
}

void touch_cuStreamBatchMemOp(struct phos_touches *touches, CUstream stream, unsigned int count,
                              CUstreamBatchMemOpParams *operations, unsigned int flags)
{
    (void)flags;
    phos_touches_begin(touches, stream);
    phos_touch_memory_operations(touches, operations, count);
}

void touch_cuStreamBatchMemOp_v2(struct phos_touches *touches, CUstream stream, unsigned int count,
                                 CUstreamBatchMemOpParams *operations, unsigned int flags)
{
    touch_cuStreamBatchMemOp(touches, stream, count, operations, flags);
}

/* What is discarded has any content afterwards. */
void touch_cuMemDiscardBatchAsync(struct phos_touches *touches, CUdeviceptr_v2 *addresses, size_t *sizes, size_t count,
                                  unsigned long long flags, CUstream stream)
{
    (void)flags;
    phos_touches_begin(touches, stream);
    for (size_t i = 0; addresses && sizes && i < count; i++)
        if (sizes[i])
            phos_touches_add(touches, addresses[i], sizes[i], PHOS_WRITES);
}

void touch_cuMemDiscardAndPrefetchBatchAsync(struct phos_touches *touches, CUdeviceptr_v2 *addresses, size_t *sizes,
                                             size_t count, CUmemLocation_v1 *locations, size_t *indices,
                                             size_t location_count, unsigned long long flags, CUstream stream)
{
    (void)locations;
    (void)indices;
    (void)location_count;
    touch_cuMemDiscardBatchAsync(touches, addresses, sizes, count, flags, stream);
}
