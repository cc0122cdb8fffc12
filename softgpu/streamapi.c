/* The stream entry points: making, asking, waiting, host functions, memory operations. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "op.h"

CUresult softgpu_cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phStream || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    int clamped = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    struct sg_stream *stream = sg_stream_create(context, flags, clamped);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *phStream = (CUstream)stream;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    return softgpu_cuStreamCreateWithPriority(phStream, Flags, 0);
}

CUresult softgpu_cuStreamDestroy_v2(CUstream hStream)
{
    if (!sg_handle_is(hStream, SG_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    struct sg_stream *stream = (struct sg_stream *)hStream;
    if (stream->legacy || stream->per_thread)
        return CUDA_ERROR_INVALID_HANDLE;
    sg_stream_destroy(stream);
    return CUDA_SUCCESS;
}

/* Many questions share this: resolve, refuse a null answer place. */
#define STREAM_OR_RETURN(place)                                                                                               \
    struct sg_stream *stream;                                                                                                 \
    CUresult result = sg_stream_get(hStream, &stream);                                                                        \
    if (result != CUDA_SUCCESS)                                                                                               \
        return result;                                                                                                        \
    if (!(place))                                                                                                             \
    return CUDA_ERROR_INVALID_VALUE

CUresult softgpu_cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
    STREAM_OR_RETURN(streamId);
    *streamId = stream->id;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetPriority(CUstream hStream, int *priority)
{
    STREAM_OR_RETURN(priority);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
    STREAM_OR_RETURN(flags);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetDevice(CUstream hStream, CUdevice *device)
{
    STREAM_OR_RETURN(device);
    *device = stream->context->device->ordinal;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
    STREAM_OR_RETURN(pctx);
    *pctx = (CUcontext)stream->context;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamGetCtx_v2(CUstream hStream, CUcontext *pctx, CUgreenCtx *pGreenCtx)
{
    STREAM_OR_RETURN(pctx);
    *pctx = (CUcontext)stream->context;
    if (pGreenCtx)
        *pGreenCtx = NULL;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuStreamQuery(CUstream hStream)
{
    STREAM_OR_RETURN(true);
    SG_UNSAFE(stream);
    return sg_stream_idle(stream) ? (CUresult)atomic_load(&stream->context->sticky) : CUDA_ERROR_NOT_READY;
}

CUresult softgpu_cuStreamSynchronize(CUstream hStream)
{
    STREAM_OR_RETURN(true);
    SG_UNSAFE(stream);
    return sg_stream_synchronize(stream);
}

CUresult softgpu_cuStreamCopyAttributes(CUstream dst, CUstream src)
{
    struct sg_stream *to, *from;
    CUresult result = sg_stream_get(dst, &to);
    if (result == CUDA_SUCCESS)
        result = sg_stream_get(src, &from);
    if (result == CUDA_SUCCESS)
        to->sync_policy = from->sync_policy;
    return result;
}

CUresult softgpu_cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value)
{
    STREAM_OR_RETURN(value);
    memset(value, 0, sizeof(*value));
    switch ((int)attr) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        *value = stream->sync_policy;
        if (!value->syncPolicy)
            value->syncPolicy = CU_SYNC_POLICY_AUTO;
        return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        value->priority = stream->priority;
        return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Policies for caches and waiting change nothing here; the one that can be asked back is kept. */
CUresult softgpu_cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value)
{
    STREAM_OR_RETURN(value);
    switch ((int)attr) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        stream->sync_policy = *value;
        return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        stream->priority = value->priority;
        return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult softgpu_cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags)
{
    (void)length;
    (void)flags;
    STREAM_OR_RETURN(sg_accessible(NULL, dptr, 1, false));
    return CUDA_SUCCESS;
}

/* ---- host functions ---- */

CUresult softgpu_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    STREAM_OR_RETURN(fn);
    struct sg_work work = {.type = SG_WORK_HOST, .host = {.function = fn, .data = userData}, .context = stream->context};
    return sg_submit(stream, &work, false, NULL);
}

CUresult softgpu_cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode)
{
    return syncMode <= CU_HOST_TASK_SPINWAIT ? softgpu_cuLaunchHostFunc(hStream, fn, userData) : CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
    STREAM_OR_RETURN(callback && !flags);
    if (atomic_load(&sg_captures) && stream->capture)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct sg_work work = {.type = SG_WORK_HOST,
                           .host = {.callback = callback, .stream = hStream, .data = userData},
                           .context = stream->context};
    return sg_submit(stream, &work, false, NULL);
}

/* ---- memory operations ---- */

static CUresult memory_ops(struct sg_stream *stream, const struct sg_memory_op *ops, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (ops[i].address % (ops[i].wide ? 8 : 4) || !sg_accessible(NULL, ops[i].address, ops[i].wide ? 8 : 4, !ops[i].wait))
            return CUDA_ERROR_INVALID_VALUE;
    struct sg_memory_op *copy = malloc(count * sizeof(*copy));
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(copy, ops, count * sizeof(*copy));
    struct sg_work work = {.type = SG_WORK_BATCH, .batch = {copy, count}, .context = stream->context};
    return sg_submit(stream, &work, false, NULL);
}

static CUresult memory_op(CUstream hStream, struct sg_memory_op op)
{
    STREAM_OR_RETURN(true);
    return memory_ops(stream, &op, 1);
}

CUresult softgpu_cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
{
    return memory_op(stream, (struct sg_memory_op){true, false, addr, value, flags});
}

CUresult softgpu_cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
    return memory_op(stream, (struct sg_memory_op){true, true, addr, value, flags});
}

CUresult softgpu_cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
{
    return memory_op(stream, (struct sg_memory_op){false, false, addr, value, flags});
}

CUresult softgpu_cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
    return memory_op(stream, (struct sg_memory_op){false, true, addr, value, flags});
}

CUresult softgpu_cuStreamBatchMemOp_v2(CUstream hStream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags)
{
    STREAM_OR_RETURN(paramArray && count && count <= 256 && !flags);
    struct sg_memory_op ops[256];
    unsigned used = 0;
    for (unsigned i = 0; i < count; i++) {
        const CUstreamBatchMemOpParams *p = &paramArray[i];
        switch (p->operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
            ops[used++] = (struct sg_memory_op){true, false, p->waitValue.address, p->waitValue.value, p->waitValue.flags};
            break;
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            ops[used++] = (struct sg_memory_op){true, true, p->waitValue.address, p->waitValue.value64, p->waitValue.flags};
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            ops[used++] = (struct sg_memory_op){false, false, p->writeValue.address, p->writeValue.value, p->writeValue.flags};
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            ops[used++] = (struct sg_memory_op){false, true, p->writeValue.address, p->writeValue.value64, p->writeValue.flags};
            break;
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        case CU_STREAM_MEM_OP_BARRIER:
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return used ? memory_ops(stream, ops, used) : CUDA_SUCCESS;
}
