/* Launches of twins. A twin gets its kernel's arguments, and behind them what the launch may touch: of that the first few
 * ranges, by value, so that nothing has to outlive the launch; the rest it finds in the window's map. */
#include "blocks.h"
#include "cleanup.h"
#include "functions.h"
#include "track.h"
#include "twins_private.h"
#include "window_private.h"

#include <string.h>
#include <unistd.h>

struct call {
    CUfunction function;
    struct phos_twin_stream *stream;
    void *parameters[PHOS_TWIN_PARAMETERS + 1];
    struct phos_twin_launch launch;
};

/* All with phos_twin_lock held, unless it says otherwise. */

static struct phos_twin_kernel *find(const struct phos_touches *touches)
{
    struct phos_twin_kernel *k = phos_twins.buckets[phos_twin_bucket(touches->module, touches->kernel)];
    while (k && (k->module != touches->module || strcmp(k->name, touches->kernel)))
        k = k->next;
    return k;
}

/* ---- what is the original's ---- */

static bool variable_of(CUfunction original, const char *name, CUdeviceptr *address)
{
    CUmodule module = NULL;
    CUlibrary library = NULL;
    size_t size;
    if (phos_real.cuFuncGetModule(&module, original) == CUDA_SUCCESS && module)
        return phos_real.cuModuleGetGlobal_v2(address, &size, module, name) == CUDA_SUCCESS;
    return phos_real.cuKernelGetLibrary(&library, (CUkernel)original) == CUDA_SUCCESS && library &&
           phos_real.cuLibraryGetGlobal(address, &size, library, name) == CUDA_SUCCESS;
}

static bool attribute_of(CUfunction original, CUfunction_attribute attribute, CUdevice device, int *value)
{
    return phos_real.cuFuncGetAttribute(value, attribute, original) == CUDA_SUCCESS ||
           phos_real.cuKernelGetAttribute(value, attribute, (CUkernel)original, device) == CUDA_SUCCESS;
}

/* What a program has set for a kernel is set for its twin. What cannot be set makes the launch fail, and that is seen. */
static void copy_attributes(const struct phos_twin_kernel *kernel, CUfunction original, CUdevice device)
{
    static const CUfunction_attribute which[] = {
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED};
    for (size_t i = 0; i < sizeof which / sizeof *which; i++) {
        int wanted, now;
        if (attribute_of(original, which[i], device, &wanted) &&
            phos_real.cuKernelGetAttribute(&now, which[i], kernel->handle, device) == CUDA_SUCCESS && wanted != now)
            (void)phos_real.cuKernelSetAttribute(which[i], wanted, kernel->handle, device);
    }
}

static bool resolve(struct phos_twin_kernel *kernel, CUfunction original, CUcontext context)
{
    if (kernel->resolved && kernel->original == original && kernel->context == context)
        return true;
    CUdevice device;
    if (phos_real.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return false;
    for (uint32_t i = 0; i < kernel->variables; i++) {
        CUdeviceptr address = 0;
        if (!variable_of(original, kernel->variable[i], &address)) {
            kernel->unusable = true;
            return false;
        }
        kernel->address[kernel->variable_at[i]] = address;
    }
    copy_attributes(kernel, original, device);
    kernel->original = original;
    kernel->context = context;
    return kernel->resolved = true;
}

/* ---- arguments ---- */

static bool arguments_of(struct call *call, const struct phos_twin_kernel *kernel, void **parameters, void **extra)
{
    struct phos_arguments given = phos_arguments_of(parameters, extra);
    for (uint32_t i = 0; i < kernel->count; i++) {
        if (given.parameters)
            call->parameters[i] = given.parameters[i];
        else if (given.block && kernel->offsets[i] + kernel->sizes[i] <= given.block_size)
            call->parameters[i] = (char *)given.block + kernel->offsets[i];
        else
            return false;
        if (!call->parameters[i])
            return false;
    }
    call->parameters[kernel->count] = &call->launch;
    return true;
}

/* ---- where it may touch memory, with phos_memory_lock held ---- */

struct extent {
    CUdeviceptr begin, end;
};

/* Addresses of a mapping's chunks from one to another. */
static struct extent addresses_of(const struct phos_mapping *mapping, struct phos_chunk_range chunks)
{
    uint64_t unit = phos_window.chunks->chunk_bytes;
    uint64_t first = (uint64_t)(chunks.first - mapping->block->window_first) * unit;
    uint64_t end = (uint64_t)(chunks.end - mapping->block->window_first) * unit;
    uint64_t mapped_end = mapping->offset + mapping->range.size;
    first = first > mapping->offset ? first : mapping->offset;
    end = end < mapped_end ? end : mapped_end;
    return (struct extent){mapping->range.address + (first - mapping->offset), mapping->range.address + (end - mapping->offset)};
}

/* What a touch reaches has been seen to as whole chunks: so much is in order. */
static void add_range(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct phos_twin_launch *launch = cookie;
    struct phos_chunk_range chunks = phos_window_chunks(mapping, begin, end);
    if (chunks.first >= chunks.end || launch->ranges > PHOS_TWIN_RANGES)
        return;
    struct extent extent = addresses_of(mapping, chunks);
    for (uint32_t i = 0; i < launch->ranges; i++) {
        struct phos_twin_range *range = &launch->range[i];
        if (extent.begin > range->begin + range->size || extent.end < range->begin)
            continue;
        uint64_t first = extent.begin < range->begin ? extent.begin : range->begin;
        uint64_t last = extent.end > range->begin + range->size ? extent.end : range->begin + range->size;
        *range = (struct phos_twin_range){first, last - first};
        return;
    }
    if (launch->ranges < PHOS_TWIN_RANGES)
        launch->range[launch->ranges] = (struct phos_twin_range){extent.begin, extent.end - extent.begin};
    launch->ranges++; /* one more than there is room for: too many */
}

static bool make_map(void)
{
    struct phos_twins *t = &phos_twins;
    struct phos_twin_map *map = (struct phos_twin_map *)t->arena;
    size_t room = (size_t)(t->arena_end - t->arena);
    if (room < sizeof *map)
        return false;
    map->count = 0;
    for (size_t i = 0; i < phos_mappings.count; i++) {
        const struct phos_mapping *m = (const struct phos_mapping *)phos_mappings.items[i];
        if (!m->block->window_chunks)
            continue;
        struct phos_chunk_range chunks = phos_window_chunks(m, m->range.address, m->range.address + m->range.size);
        if (chunks.first >= chunks.end)
            continue;
        if (room < sizeof *map + (map->count + 1) * sizeof *map->place)
            return false;
        const struct phos_chunk_table *states = t->chunks;
        map->place[map->count++] =
            (struct phos_twin_place){.begin = m->range.address,
                                     .end = m->range.address + m->range.size,
                                     .state = (uint64_t)(uintptr_t)&states->state[chunks.first],
                                     .delta = m->offset % states->chunk_bytes};
    }
    size_t used = sizeof *map + map->count * sizeof *map->place;
    t->arena += (used + 63) & ~(size_t)63;
    t->map = map;
    t->map_version = phos_mappings_version;
    return true;
}

static bool guess(struct phos_twin_launch *launch, const struct phos_touches *touches)
{
    bool loading = phos_twins.window->mode == PHOS_TWIN_LOADING;
    PHOS_LOCKED(&phos_memory_lock);
    if ((!phos_twins.map || phos_twins.map_version != phos_mappings_version) && !make_map()) {
        phos_twins.full = true;
        return false;
    }
    for (size_t i = 0; i < touches->count; i++)
        if (loading || touches->list[i].access & PHOS_WRITES)
            phos_window_visit(&touches->list[i], add_range, launch);
    if (launch->ranges > PHOS_TWIN_RANGES) {
        /* What is left out has been loaded, and a twin finds that. What was copied aside looks like anybody's. */
        if (!loading)
            return false;
        launch->ranges = PHOS_TWIN_RANGES;
    }
    launch->map = (uint64_t)(uintptr_t)phos_twins.map;
    return true;
}

/* ---- the stream ---- */

static struct phos_twin_stream *stream_of(CUstream stream, CUcontext context)
{
    struct phos_twins *t = &phos_twins;
    int32_t thread = stream == CU_STREAM_PER_THREAD ? gettid() : 0;
    for (uint32_t i = 0; i < t->stream_count; i++)
        if (t->streams[i].stream == stream && t->streams[i].context == context && t->streams[i].thread == thread &&
            !t->streams[i].gone)
            return &t->streams[i];
    if (t->stream_count == PHOS_TWIN_STREAMS) {
        t->full = true;
        return NULL;
    }
    struct phos_twin_stream *made = &t->streams[t->stream_count];
    *made = (struct phos_twin_stream){.stream = stream, .context = context, .thread = thread};
    if (phos_real.cuEventCreate(&made->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return NULL;
    t->stream_count++;
    return made;
}

/* ---- the launch; without phos_twin_lock ---- */

struct shape {
    uint64_t blocks, threads; /* in the grid; in a block */
    size_t shared;            /* bytes of dynamic shared memory of a block */
};

/* A twin takes more registers than its original, so that fewer of its blocks run at a time. Those of a kernel that was launched
 * with as many as run at a time may wait for each other: a twin of which not all do would wait for ever. */
static bool as_many_run(struct phos_twin_kernel *kernel, CUfunction original, const struct shape *shape, CUdevice device)
{
    if (kernel->threads != shape->threads || kernel->shared != shape->shared) {
        kernel->threads = 0;
        if (phos_real.cuOccupancyMaxActiveBlocksPerMultiprocessor(&kernel->resident, (CUfunction)kernel->handle,
                                                                  (int)shape->threads, shape->shared) != CUDA_SUCCESS ||
            phos_real.cuOccupancyMaxActiveBlocksPerMultiprocessor(&kernel->resident_original, original, (int)shape->threads,
                                                                  shape->shared) != CUDA_SUCCESS)
            return false;
        kernel->threads = shape->threads;
        kernel->shared = shape->shared;
    }
    int processors = 0;
    if (kernel->resident >= kernel->resident_original)
        return true;
    if (phos_real.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS)
        return false;
    uint64_t most = (uint64_t)processors * (uint64_t)kernel->resident_original;
    return shape->blocks <= (uint64_t)processors * (uint64_t)kernel->resident || shape->blocks > most;
}

static bool prepare(struct call *call, const struct phos_touches *touches, CUfunction original, const struct shape *shape,
                    void **parameters, void **extra)
{
    PHOS_LOCKED(&phos_twin_lock);
    PHOS_RELAXED;
    struct phos_twins *t = &phos_twins;
    struct phos_twin_kernel *kernel = t->window && !t->retired && touches->kernel ? find(touches) : NULL;
    if (!kernel || phos_window_closed())
        return false;
    int most = 0;
    CUcontext context = NULL;
    CUdevice device;
    if (!t->full && !kernel->unusable && phos_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context &&
        (t->owner || phos_twins_register()) && (!t->withheld || phos_context_whole(context) == t->owner) &&
        phos_real.cuCtxGetDevice(&device) == CUDA_SUCCESS &&
        phos_real.cuKernelGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel->handle, device) ==
            CUDA_SUCCESS &&
        shape->threads <= (uint64_t)most && resolve(kernel, original, context) &&
        as_many_run(kernel, original, shape, device) &&
        arguments_of(call, kernel, parameters, extra)) {
        /* Not the whole of it: most of a call is room for parameters. */
        memset(&call->launch, 0, sizeof call->launch);
        call->launch.window = (uint64_t)(uintptr_t)t->window;
        call->launch.kernel = kernel->number;
        memcpy(call->launch.variable, kernel->address, sizeof call->launch.variable);
        if (guess(&call->launch, touches) && (call->stream = stream_of(touches->stream, context))) {
            call->function = (CUfunction)kernel->handle;
            t->launching++;
            return true;
        }
    }
    phos_count(&t->window->originals, 1);
    return false;
}

/* Whether that was it; else the original has to be launched. */
static bool launched(const struct call *call, const struct phos_touches *touches, CUresult result)
{
    /* Not with the lock: if the stream is full the driver waits, and it may wait for who waits for the lock. */
    bool behind = result == CUDA_SUCCESS && phos_real.cuEventRecord(call->stream->event, touches->stream) == CUDA_SUCCESS;
    PHOS_LOCKED(&phos_twin_lock);
    phos_twins.launching--;
    if (result != CUDA_SUCCESS) { /* it takes more registers than the original, for one */
        struct phos_twin_kernel *kernel = find(touches);
        if (kernel)
            kernel->resolved = false;
        phos_count(&phos_twins.window->originals, 1);
        return false;
    }
    phos_count(&phos_twins.window->launched, 1);
    phos_twins.unknown |= !behind;
    return true;
}

CUresult twin_cuLaunchKernel(const struct phos_touches *touches, phos_real_launch *real, CUfunction function,
                             unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                             unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra)
{
    struct call call;
    const struct shape shape = {(uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, shared};
    if (prepare(&call, touches, function, &shape, parameters, extra)) {
        CUresult result = real(call.function, gx, gy, gz, bx, by, bz, shared, stream, call.parameters, NULL);
        if (launched(&call, touches, result))
            return result;
    }
    return real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

CUresult twin_cuLaunchKernelEx(const struct phos_touches *touches, phos_real_launch_ex *real, const CUlaunchConfig *config,
                               CUfunction function, void **parameters, void **extra)
{
    struct call call;
    struct shape shape = {0};
    if (config)
        shape = (struct shape){(uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ,
                               (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ, config->sharedMemBytes};
    if (config && prepare(&call, touches, function, &shape, parameters, extra)) {
        CUresult result = real(config, call.function, call.parameters, NULL);
        if (launched(&call, touches, result))
            return result;
    }
    return real(config, function, parameters, extra);
}

CUresult twin_cuLaunchCooperativeKernel(const struct phos_touches *touches, phos_real_cooperative *real,
                                        CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                                        unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                                        CUstream stream, void **parameters)
{
    struct call call;
    const struct shape shape = {(uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, shared};
    if (prepare(&call, touches, function, &shape, parameters, NULL)) {
        CUresult result = real(call.function, gx, gy, gz, bx, by, bz, shared, stream, call.parameters);
        if (launched(&call, touches, result))
            return result;
    }
    return real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters);
}
