/* Contexts: primary and created, which there are, and the per-thread stack of current ones. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

#define STACK_DEPTH 64
static _Thread_local struct {
    CUcontext entries[STACK_DEPTH];
    unsigned depth;
} stack;

/* All live contexts; under registry_lock, which is never held while another lock is taken. */
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sg_context **registry;
static size_t registry_count, registry_capacity;

static const size_t default_limits[CU_LIMIT_MAX] = {
    [CU_LIMIT_STACK_SIZE] = 1024,
    [CU_LIMIT_PRINTF_FIFO_SIZE] = 8 << 20,
    [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
    [CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2,
    [CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048,
    [CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64,
};

/* What a destroyed context was in, for another one. */
static struct sg_context *renewed(struct sg_context *gone)
{
    sg_handle_remove(gone, SG_GONE);
    gone->marks = NULL;
    gone->resizes = false;
    atomic_store(&gone->sticky, 0);
    return gone;
}

static struct sg_context *context_create(struct sg_device *device, unsigned flags, bool primary)
{
    bool again = primary && device->former && sg_fault(SG_FAULT_SAME_PRIMARY);
    struct sg_context *context = again ? renewed(device->former) : calloc(1, sizeof(*context));
    if (!context)
        return NULL;
    context->device = device;
    context->primary = primary;
    context->flags = flags;
    context->api_version = 3020;
    context->id = sg_next_id();
    context->peers = 1u << device->ordinal;
    memcpy(context->limits, default_limits, sizeof(default_limits));
    if (!again)
        pthread_mutex_init(&context->lock, NULL);
    context->legacy = sg_stream_create(context, 0, 0);
    if (!context->legacy || !sg_handle_add(context, SG_CONTEXT)) {
        if (context->legacy)
            sg_stream_destroy(context->legacy);
        free(context);
        return NULL;
    }
    context->legacy->legacy = true;
    pthread_mutex_lock(&registry_lock);
    if (registry_count == registry_capacity) {
        size_t capacity = registry_capacity ? registry_capacity * 2 : 8;
        struct sg_context **grown = realloc(registry, capacity * sizeof(*registry));
        if (grown) {
            registry = grown;
            registry_capacity = capacity;
        }
    }
    bool room = registry_count < registry_capacity;
    if (room)
        registry[registry_count++] = context;
    pthread_mutex_unlock(&registry_lock);
    if (!room) {
        sg_handle_remove(context, SG_CONTEXT);
        sg_stream_destroy(context->legacy);
        free(context);
        return NULL;
    }
    return context;
}

static void registry_remove(const struct sg_context *context)
{
    pthread_mutex_lock(&registry_lock);
    for (size_t i = 0; i < registry_count; i++)
        if (registry[i] == context) {
            registry[i] = registry[--registry_count];
            break;
        }
    pthread_mutex_unlock(&registry_lock);
}

/* Waits for the context's work, then frees what it owns. The structure itself stays allocated (a few hundred bytes): late
 * operations and events of other contexts may still point to it. */
static void context_destroy(struct sg_context *context)
{
    if (!sg_handle_remove(context, SG_CONTEXT))
        return;
    sg_handle_add(context, SG_GONE);
    registry_remove(context);
    sg_context_synchronize(context);
    for (;;) {
        pthread_mutex_lock(&context->lock);
        struct sg_stream *stream = context->streams;
        pthread_mutex_unlock(&context->lock);
        if (!stream)
            break;
        sg_stream_destroy(stream);
    }
    sg_op_unreference(context->resize);
    context->resize = NULL;
    while (context->modules)
        sg_module_destroy(context->modules);
    sg_memory_free_context(context);
}

void sg_contexts_each(void (*visit)(struct sg_context *, void *), void *cookie)
{
    pthread_mutex_lock(&registry_lock);
    size_t count = registry_count;
    struct sg_context **copy = malloc((count + 1) * sizeof(*copy));
    if (copy && count)
        memcpy(copy, registry, count * sizeof(*copy));
    pthread_mutex_unlock(&registry_lock);
    for (size_t i = 0; copy && i < count; i++)
        visit(copy[i], cookie);
    free(copy);
}

struct sg_context *sg_context_first(int device)
{
    struct sg_context *found = NULL;
    pthread_mutex_lock(&registry_lock);
    for (size_t i = 0; i < registry_count && !found; i++)
        if (registry[i]->device->ordinal == device)
            found = registry[i];
    pthread_mutex_unlock(&registry_lock);
    return found;
}

void sg_context_fail(struct sg_context *context, CUresult error)
{
    int none = 0;
    atomic_compare_exchange_strong(&context->sticky, &none, (int)error);
}

CUresult sg_context_current(struct sg_context **out)
{
    if (!stack.depth || !stack.entries[stack.depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    return sg_context_get(stack.entries[stack.depth - 1], out);
}

CUresult sg_context_get(CUcontext handle, struct sg_context **out)
{
    if (!handle)
        return sg_context_current(out);
    if (!sg_handle_is(handle, SG_CONTEXT))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *out = (struct sg_context *)handle;
    return (CUresult)atomic_load_explicit(&(*out)->sticky, memory_order_relaxed);
}

CUresult sg_primary_retain(struct sg_device *device, struct sg_context **out)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&device->lock);
    if (!device->primary)
        device->primary = context_create(device, device->primary_flags, true);
    if (device->primary) {
        device->primary_references++;
        *out = device->primary;
    } else {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&device->lock);
    return result;
}

CUresult softgpu_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    struct sg_device *device = sg_device(dev);
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    struct sg_context *context;
    CUresult result = sg_primary_retain(device, &context);
    if (result == CUDA_SUCCESS)
        *pctx = (CUcontext)context;
    return result;
}

static CUresult primary_drop(CUdevice dev, bool reset)
{
    struct sg_device *device = sg_device(dev);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    struct sg_context *victim = NULL;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&device->lock);
    if (!reset && !device->primary_references)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (reset || --device->primary_references == 0) {
        victim = device->primary;
        device->primary = NULL;
        device->primary_references = 0;
        if (reset)
            device->primary_flags = 0;
    }
    pthread_mutex_unlock(&device->lock);
    if (victim) {
        context_destroy(victim);
        pthread_mutex_lock(&device->lock);
        device->former = victim;
        pthread_mutex_unlock(&device->lock);
    }
    return result;
}

CUresult softgpu_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    return primary_drop(dev, false);
}

CUresult softgpu_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    return primary_drop(dev, true);
}

CUresult softgpu_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    struct sg_device *device = sg_device(dev);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&device->lock);
    device->primary_flags = flags;
    if (device->primary)
        device->primary->flags = flags;
    pthread_mutex_unlock(&device->lock);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    struct sg_device *device = sg_device(dev);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&device->lock);
    *flags = device->primary_flags;
    *active = device->primary != NULL;
    pthread_mutex_unlock(&device->lock);
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context)
{
    if (stack.depth == STACK_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack.entries[stack.depth++] = context;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct sg_device *device = sg_device(dev);
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    struct sg_context *context = context_create(device, flags, false);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = push((CUcontext)context);
    if (result != CUDA_SUCCESS)
        context_destroy(context);
    else
        *pctx = (CUcontext)context;
    return result;
}

CUresult softgpu_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev)
{
    if (paramsArray || numParams)
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    return softgpu_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult softgpu_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
    if (ctxCreateParams && (ctxCreateParams->execAffinityParams || ctxCreateParams->cigParams))
        return CUDA_ERROR_NOT_SUPPORTED;
    return softgpu_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult softgpu_cuCtxDestroy_v2(CUcontext ctx)
{
    if (!sg_handle_is(ctx, SG_CONTEXT))
        return ctx ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_VALUE;
    if (((struct sg_context *)ctx)->primary || ((struct sg_context *)ctx)->whole)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.depth && stack.entries[stack.depth - 1] == ctx)
        stack.depth--;
    context_destroy((struct sg_context *)ctx);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    struct sg_context *context;
    if (!pctx || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (context->primary || context->whole)
        return CUDA_ERROR_INVALID_CONTEXT;
    atomic_fetch_add(&context->attached, 1);
    *pctx = (CUcontext)context;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxDetach(CUcontext ctx)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if ((CUcontext)context != ctx || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!atomic_load(&context->attached))
        return softgpu_cuCtxDestroy_v2(ctx);
    atomic_fetch_sub(&context->attached, 1);
    return CUDA_SUCCESS;
}

/* What the driver does (measured with 580.159 on an H100). */
void sg_crash_if_gone(const struct sg_context *context, const char *what)
{
    if (!sg_handle_is(context, SG_GONE))
        return;
    sg_log("%s of a context that was destroyed: the driver of a GPU crashes here", what);
    volatile int *nothing = NULL;
    *nothing = 0; /* no raise(): who has blocked the signal crashes, too */
}

/* One that was destroyed is taken as well; what is called with it is refused. Measured likewise. */
CUresult softgpu_cuCtxPushCurrent_v2(CUcontext ctx)
{
    if (!sg_handle_is(ctx, SG_CONTEXT) && !sg_handle_is(ctx, SG_GONE))
        return CUDA_ERROR_INVALID_CONTEXT;
    return push(ctx);
}

CUresult softgpu_cuCtxPopCurrent_v2(CUcontext *pctx)
{
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext top = stack.entries[--stack.depth];
    if (pctx)
        *pctx = top;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxSetCurrent(CUcontext ctx)
{
    if (ctx && !sg_handle_is(ctx, SG_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!ctx) {
        if (stack.depth)
            stack.depth--;
        return CUDA_SUCCESS;
    }
    if (!stack.depth)
        return push(ctx);
    stack.entries[stack.depth - 1] = ctx;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxGetCurrent(CUcontext *pctx)
{
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    *pctx = stack.depth ? stack.entries[stack.depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxGetDevice(CUdevice *device)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stack.depth || !stack.entries[stack.depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    struct sg_context *context = (struct sg_context *)stack.entries[stack.depth - 1];
    sg_crash_if_gone(context, "cuCtxGetDevice");
    *device = context->device->ordinal;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
    if (!ctx)
        return softgpu_cuCtxGetDevice(device);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sg_handle_is(ctx, SG_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = ((struct sg_context *)ctx)->device->ordinal;
    return CUDA_SUCCESS;
}

/* ---- green contexts: the same processors here, and of memory and events nothing, which are their device's primary one's ---- */

static void synchronize_part(struct sg_context *part, void *whole)
{
    if (part->whole == whole)
        sg_context_synchronize(part);
}

CUresult softgpu_cuDeviceGetDevResource(CUdevice dev, CUdevResource *result, CUdevResourceType type)
{
    if (!result || type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sg_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    *result = (CUdevResource){.type = type, .sm = {.smCount = 1, .minSmPartitionSize = 1, .smCoscheduledAlignment = 1}};
    return CUDA_SUCCESS;
}

CUresult softgpu_cuDevResourceGenerateDesc(CUdevResourceDesc *phDesc, CUdevResource *resources, unsigned int nbResources)
{
    static char any;
    if (!phDesc || !resources || nbResources != 1)
        return CUDA_ERROR_INVALID_VALUE;
    *phDesc = (CUdevResourceDesc)&any;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
    struct sg_device *device = sg_device(dev);
    struct sg_context *primary;
    if (!phCtx || !desc || flags != CU_GREEN_CTX_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = sg_primary_retain(device, &primary);
    if (result != CUDA_SUCCESS)
        return result;
    struct sg_context *context = context_create(device, 0, false);
    if (!context) {
        primary_drop(dev, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->whole = primary;
    *phCtx = (CUgreenCtx)context;
    return CUDA_SUCCESS;
}

static struct sg_context *green(CUgreenCtx handle)
{
    struct sg_context *context = (struct sg_context *)handle;
    return sg_handle_is(handle, SG_CONTEXT) && context->whole ? context : NULL;
}

CUresult softgpu_cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)
{
    if (!pContext || !green(hCtx))
        return CUDA_ERROR_INVALID_VALUE;
    *pContext = (CUcontext)hCtx;
    return CUDA_SUCCESS;
}

/* What was made in it stays; its streams can no longer be used. */
CUresult softgpu_cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    struct sg_context *context = green(hCtx);
    if (!context || !sg_handle_remove(context, SG_CONTEXT))
        return CUDA_ERROR_INVALID_VALUE;
    sg_handle_add(context, SG_GONE);
    registry_remove(context);
    return primary_drop(context->device->ordinal, false);
}

CUresult softgpu_cuCtxSynchronize_v2(CUcontext ctx)
{
    struct sg_context *context;
    CUresult result = sg_context_get(ctx, &context);
    if (result == CUDA_SUCCESS && sg_capture_among(context, true, true))
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result == CUDA_SUCCESS)
        sg_contexts_each(synchronize_part, context);
    return result == CUDA_SUCCESS ? sg_context_synchronize(context) : result;
}

CUresult softgpu_cuCtxSynchronize(void)
{
    return softgpu_cuCtxSynchronize_v2(NULL);
}
