/* What twins there are: they come while a window is open, and go when the last of them that was launched has ended.
 *
 * A twin is compiled by the driver when it is loaded, which takes milliseconds to seconds and a deep stack: a thread of
 * its own does it, one text at a time. Until it is done the originals are launched. Nothing of this is in the way of a
 * launch, and nothing of it is left once a process has been quiesced. */
#include "cleanup.h"
#include "clock.h"
#include "detach.h"
#include "gate.h"
#include "log.h"
#include "runtime.h"
#include "blocks.h"
#include "track.h"
#include "twins_private.h"
#include "window.h"
#include "window_table.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TEXT_MOST ((off_t)16 << 20)
#define STACK_BYTES ((size_t)32 << 20) /* the driver's compiler recurses */
#define LIMIT_NS 600000000000ull       /* a chunk comes, or phosd ends the process, far sooner */

struct phos_twins phos_twins;
pthread_mutex_t phos_twin_lock = PTHREAD_MUTEX_INITIALIZER;
atomic_uint phos_twin_kernels;

struct order { /* for the loading thread */
    uint64_t module;
    char *text;
    size_t size;
};

/* The control thread's own. */
static pthread_t loader;
static bool loader_runs;

/* ---- the memory that twins share with us and with phosd ---- */

static void *map_file(int descriptor, size_t least, size_t *size)
{
    struct stat status;
    if (fstat(descriptor, &status) || status.st_size < 0 || (size_t)status.st_size < least)
        return NULL;
    void *memory = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    *size = (size_t)status.st_size;
    return memory == MAP_FAILED ? NULL : memory;
}

/* With a context current and the lock held. Addresses must be the same for the GPU: they are put into tables as they are. */
static bool reachable(void *memory, size_t size, bool *registered)
{
    CUdeviceptr seen = 0;
    CUresult result =
        phos_real.cuMemHostRegister_v2(memory, size, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    *registered = result == CUDA_SUCCESS;
    return *registered && phos_real.cuMemHostGetDevicePointer_v2(&seen, memory, 0) == CUDA_SUCCESS &&
           seen == (CUdeviceptr)memory;
}

static void unregister(void)
{
    struct phos_twins *t = &phos_twins;
    if (t->memory_registered && phos_real.cuMemHostUnregister(t->memory) != CUDA_SUCCESS)
        phos_debug("the table of the twins could not be unregistered");
    if (t->chunks_registered && phos_real.cuMemHostUnregister(t->chunks) != CUDA_SUCCESS)
        phos_debug("the chunk table of the twins could not be unregistered");
    t->memory_registered = t->chunks_registered = false;
    t->owner = NULL;
}

bool phos_twins_register(void)
{
    struct phos_twins *t = &phos_twins;
    CUcontext context;
    if (phos_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context &&
        reachable(t->chunks, t->chunks_size, &t->chunks_registered) &&
        reachable(t->memory, t->memory_size, &t->memory_registered)) {
        t->owner = phos_context_whole(context);
        return true;
    }
    unregister();
    return false;
}

static void unmap(void)
{
    struct phos_twins *t = &phos_twins;
    unregister();
    if (t->memory)
        munmap(t->memory, t->memory_size);
    if (t->chunks)
        munmap(t->chunks, t->chunks_size);
}

/* With a context current and the lock held: the first twins of a window. */
static bool begin(int chunks, int table, struct phos_error *error)
{
    struct phos_twins *t = &phos_twins;
    for (int d = 0; d < phos_device_count; d++)
        if (!phos_devices[d].host_pointers)
            return phos_fail(error, CUDA_SUCCESS, "device %d gives registered host memory another address", d);
    t->chunks = map_file(chunks, sizeof(struct phos_chunk_table), &t->chunks_size);
    t->memory = map_file(table, sizeof(struct phos_twin_window) + 4096, &t->memory_size);
    struct phos_chunk_table *states = t->chunks;
    struct phos_twin_window *window = t->memory;
    if (!states || !window || states->magic != PHOS_CHUNKS_MAGIC || window->magic != PHOS_TWIN_MAGIC ||
        !states->chunk_bytes || states->chunk_bytes & (states->chunk_bytes - 1))
        return phos_fail(error, CUDA_SUCCESS, "the tables of the twins cannot be used");
    if (!phos_twins_register())
        return phos_fail(error, CUDA_SUCCESS, "the GPU cannot reach the tables of the twins");
    window->closed = (uint64_t)(uintptr_t)&states->closed;
    window->limit_ns = LIMIT_NS;
    window->mode = phos_window_loading() ? PHOS_TWIN_LOADING : PHOS_TWIN_COW;
    window->shift = (uint32_t)__builtin_ctz(states->chunk_bytes);
    t->arena = (char *)t->memory + ((sizeof *window + 63) & ~(size_t)63);
    t->arena_end = (char *)t->memory + t->memory_size;
    t->window = window;
    return true;
}

/* ---- twins as they come ---- */

static void free_kernel(struct phos_twin_kernel *kernel)
{
    for (uint32_t i = 0; kernel->variable && i < kernel->variables; i++)
        free(kernel->variable[i]);
    free(kernel->variable);
    free(kernel->variable_at);
    free(kernel->offsets);
    free(kernel->sizes);
    free(kernel->name);
    free(kernel);
}

/* The parameters of a twin: those of its kernel, and the one that is ours. */
static bool ask_parameters(struct phos_twin_kernel *kernel)
{
    size_t offset, size;
    uint32_t count = 0;
    uint32_t *offsets = kernel->offsets = calloc(PHOS_TWIN_PARAMETERS + 1, sizeof *offsets);
    uint32_t *sizes = kernel->sizes = calloc(PHOS_TWIN_PARAMETERS + 1, sizeof *sizes);
    while (offsets && sizes && count <= PHOS_TWIN_PARAMETERS &&
           phos_real.cuKernelGetParamInfo(kernel->handle, count, &offset, &size) == CUDA_SUCCESS) {
        offsets[count] = (uint32_t)offset;
        sizes[count++] = (uint32_t)size;
    }
    if (!count || count > PHOS_TWIN_PARAMETERS || sizes[count - 1] != sizeof(struct phos_twin_launch))
        return false;
    kernel->count = count - 1;
    return true;
}

/* A line of the list behind the text: the kernel's name, then "index:variable" for each variable, tabs between. */
static struct phos_twin_kernel *read_line(uint64_t module, CUlibrary library, char *line)
{
    struct phos_twin_kernel *kernel = calloc(1, sizeof *kernel);
    char *rest = NULL, *word = strtok_r(line, "\t", &rest);
    if (!kernel || !word)
        goto failed;
    kernel->module = module;
    kernel->name = strdup(word);
    kernel->variable = calloc(PHOS_TWIN_VARIABLES, sizeof *kernel->variable);
    kernel->variable_at = calloc(PHOS_TWIN_VARIABLES, sizeof *kernel->variable_at);
    if (!kernel->name || !kernel->variable || !kernel->variable_at)
        goto failed;
    while ((word = strtok_r(NULL, "\t", &rest))) {
        char *name = NULL;
        unsigned long at = strtoul(word, &name, 10);
        if (kernel->variables == PHOS_TWIN_VARIABLES || at >= PHOS_TWIN_VARIABLES || *name != ':' ||
            !(kernel->variable[kernel->variables] = strdup(name + 1)))
            goto failed;
        kernel->variable_at[kernel->variables++] = (uint32_t)at;
    }
    if (phos_real.cuLibraryGetKernel(&kernel->handle, library, kernel->name) != CUDA_SUCCESS || !ask_parameters(kernel))
        goto failed;
    return kernel;
failed:
    if (kernel)
        free_kernel(kernel);
    return NULL;
}

/* With the lock held. */
static void put(struct phos_twin_kernel *kernel)
{
    struct phos_twin_window *window = phos_twins.window;
    struct phos_twin_kernel **bucket = &phos_twins.buckets[phos_twin_bucket(kernel->module, kernel->name)];
    kernel->number = (uint32_t)__atomic_fetch_add(&window->kernels, 1, __ATOMIC_RELAXED);
    if (kernel->number < PHOS_TWIN_NAMES)
        strncpy(window->name[kernel->number], kernel->name, PHOS_TWIN_NAME - 1);
    kernel->next = *bucket;
    *bucket = kernel;
    atomic_fetch_add(&phos_twin_kernels, 1);
}

static void load(const struct order *order)
{
    CUlibrary library;
    uint64_t start = phos_now_ns();
    CUresult result = phos_real.cuLibraryLoadData(&library, order->text, NULL, NULL, 0, NULL, NULL, 0);
    if (result != CUDA_SUCCESS) {
        phos_debug("the driver does not take the twins of module %llu (error %d)", (unsigned long long)order->module, (int)result);
        return;
    }
    struct phos_twin_library *record = calloc(1, sizeof *record);
    if (!record) {
        phos_real.cuLibraryUnload(library);
        return;
    }
    record->library = library;
    size_t at = strlen(order->text) + 1;
    uint32_t count = 0;
    char *rest = NULL;
    for (char *line = at < order->size ? strtok_r(order->text + at, "\n", &rest) : NULL; line;
         line = strtok_r(NULL, "\n", &rest)) {
        struct phos_twin_kernel *kernel = read_line(order->module, library, line);
        PHOS_LOCKED(&phos_twin_lock);
        if (!kernel)
            continue;
        put(kernel);
        count++;
    }
    PHOS_LOCKED(&phos_twin_lock);
    record->next = phos_twins.libraries;
    phos_twins.libraries = record;
    phos_debug("%u kernels of module %llu have twins, %.3f ms", count, (unsigned long long)order->module,
               (double)(phos_now_ns() - start) / 1e6);
}

static void *loader_main(void *argument)
{
    struct order *order = argument;
    prctl(PR_SET_NAME, "phos-twins");
    phos_gate_exempt_self();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    phos_real.cuThreadExchangeStreamCaptureMode(&mode);
    bool entered = phos_enter_context();
    if (entered && !phos_exiting())
        load(order);
    phos_leave_context(entered);
    free(order->text);
    free(order);
    return NULL;
}

static void join_loader(void)
{
    if (loader_runs)
        pthread_join(loader, NULL);
    loader_runs = false;
}

static bool start_loader(struct order *order)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    loader_runs = pthread_create(&loader, &attributes, loader_main, order) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return loader_runs;
}

static char *read_text(int descriptor, size_t *size)
{
    struct stat status;
    if (fstat(descriptor, &status) || status.st_size <= 0 || status.st_size > TEXT_MOST)
        return NULL;
    char *text = malloc((size_t)status.st_size + 2);
    if (!text)
        return NULL;
    *size = 0;
    for (ssize_t got; (off_t)*size < status.st_size; *size += (size_t)got)
        if ((got = pread(descriptor, text + *size, (size_t)status.st_size - *size, (off_t)*size)) <= 0) {
            free(text);
            return NULL;
        }
    text[*size] = text[*size + 1] = 0;
    return text;
}

bool phos_twins_take(uint64_t module, const int *descriptors, size_t count, struct phos_error *error)
{
    if (!phos_window_is_open() || phos_exiting())
        return phos_fail(error, CUDA_SUCCESS, "there is no window any more");
    if (count != 3)
        return phos_fail(error, CUDA_SUCCESS, "%zu descriptors came with twins", count);
    join_loader();
    bool entered = phos_enter_context(), there;
    {
        PHOS_LOCKED(&phos_twin_lock);
        there = phos_twins.retired ? phos_fail(error, CUDA_SUCCESS, "those of the former window still run")
                : phos_twins.window || begin(descriptors[1], descriptors[2], error);
        if (!there && !phos_twins.retired) {
            unmap();
            phos_twins = (struct phos_twins){0};
        }
    }
    phos_leave_context(entered);
    if (!there)
        return false;
    struct order *order = calloc(1, sizeof *order);
    if (order) {
        order->module = module;
        order->text = read_text(descriptors[0], &order->size);
    }
    if (!order || !order->text || !start_loader(order)) {
        if (order)
            free(order->text);
        free(order);
        return phos_fail(error, CUDA_SUCCESS, "their text cannot be read, or no thread be started");
    }
    return true;
}

/* ---- and as they go ---- */

void phos_twins_end(void)
{
    join_loader();
    {
        PHOS_LOCKED(&phos_twin_lock);
        atomic_store(&phos_twin_kernels, 0);
        if (!phos_twins.window)
            return;
        phos_twins.retired = true;
    }
    phos_twins_settle(false);
}

bool phos_twins_left(void)
{
    PHOS_LOCKED(&phos_twin_lock);
    return phos_twins.retired;
}

static bool all_ended(void)
{
    for (uint32_t i = 0; i < phos_twins.stream_count; i++)
        if (phos_twins.streams[i].event && phos_real.cuEventQuery(phos_twins.streams[i].event) == CUDA_ERROR_NOT_READY)
            return false;
    return !phos_twins.unknown;
}

void phos_twins_settle(bool idle)
{
    PHOS_LOCKED(&phos_twin_lock);
    struct phos_twins *t = &phos_twins;
    if (!t->retired || phos_exiting())
        return;
    bool entered = phos_enter_context();
    if (idle || all_ended()) {
        for (uint32_t i = 0; i < t->stream_count; i++)
            if (t->streams[i].event)
                phos_real.cuEventDestroy_v2(t->streams[i].event);
        for (struct phos_twin_library *l = t->libraries, *next; l; l = next) {
            next = l->next;
            if (phos_real.cuLibraryUnload(l->library) != CUDA_SUCCESS)
                phos_debug("a library of twins could not be unloaded");
            free(l);
        }
        for (uint32_t b = 0; b < PHOS_TWIN_BUCKETS; b++)
            for (struct phos_twin_kernel *k = t->buckets[b], *next; k; k = next) {
                next = k->next;
                free_kernel(k);
            }
        unmap();
        *t = (struct phos_twins){0};
    }
    phos_leave_context(entered);
}

/* With the lock held: whether twins run in other contexts than one. */
static bool others_run(CUcontext context)
{
    bool run = phos_twins.launching;
    for (uint32_t i = 0; i < phos_twins.stream_count && !run; i++)
        run = phos_twins.streams[i].event && phos_twins.streams[i].context != context &&
              phos_real.cuEventQuery(phos_twins.streams[i].event) == CUDA_ERROR_NOT_READY;
    return run;
}

void phos_twins_context_may_end(CUcontext context)
{
    for (bool run = true; run;) {
        {
            PHOS_LOCKED(&phos_twin_lock);
            PHOS_RELAXED;
            if (!phos_twins.owner || phos_twins.owner != context)
                return;
            phos_twins.withheld = true;
            run = others_run(context);
        }
        if (run)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

void phos_twins_context_stays(CUcontext context)
{
    PHOS_LOCKED(&phos_twin_lock);
    if (phos_twins.owner == context)
        phos_twins.withheld = false;
}

/* The GPU loses the tables with the context, if it is the one: the next twin's registers them again. */
static void tables_go(CUcontext context, bool gone)
{
    struct phos_twins *t = &phos_twins;
    CUcontext popped;
    if (!t->owner || t->owner != context)
        return;
    if (gone)
        t->memory_registered = t->chunks_registered = false;
    PHOS_RELAXED;
    bool entered = !gone && phos_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    unregister();
    if (entered)
        phos_real.cuCtxPopCurrent_v2(&popped);
    t->withheld = false;
}

void phos_twins_context_ends(CUcontext context, bool gone)
{
    PHOS_LOCKED(&phos_twin_lock);
    tables_go(context, gone);
    for (uint32_t i = 0; i < phos_twins.stream_count; i++) {
        struct phos_twin_stream *stream = &phos_twins.streams[i];
        if (stream->context != context)
            continue;
        if (stream->event && !gone)
            phos_real.cuEventDestroy_v2(stream->event);
        stream->event = NULL;
        stream->gone = true;
    }
    for (uint32_t b = 0; b < PHOS_TWIN_BUCKETS; b++)
        for (struct phos_twin_kernel *k = phos_twins.buckets[b]; k; k = k->next)
            k->resolved &= k->context != context;
}

void phos_twins_unloading(void)
{
    if (!atomic_load_explicit(&phos_twin_kernels, memory_order_acquire))
        return;
    PHOS_LOCKED(&phos_twin_lock);
    for (uint32_t b = 0; b < PHOS_TWIN_BUCKETS; b++)
        for (struct phos_twin_kernel *k = phos_twins.buckets[b]; k; k = k->next)
            k->resolved = false;
}

void phos_twins_stream_ends(CUstream stream)
{
    if (!atomic_load_explicit(&phos_twin_kernels, memory_order_acquire))
        return;
    PHOS_LOCKED(&phos_twin_lock);
    for (uint32_t i = 0; i < phos_twins.stream_count; i++)
        phos_twins.streams[i].gone |= phos_twins.streams[i].stream == stream;
}

bool phos_twins_trapped(void)
{
    PHOS_LOCKED(&phos_twin_lock);
    return phos_twins.window && __atomic_load_n(&phos_twins.window->trapped, __ATOMIC_ACQUIRE);
}

void phos_twins_forked(void)
{
    pthread_mutex_init(&phos_twin_lock, NULL);
    loader_runs = false;
    atomic_store(&phos_twin_kernels, 0);
    if (phos_twins.memory)
        munmap(phos_twins.memory, phos_twins.memory_size);
    if (phos_twins.chunks)
        munmap(phos_twins.chunks, phos_twins.chunks_size);
    phos_twins = (struct phos_twins){0};
}
