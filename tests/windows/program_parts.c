/* Parts of the random program: buffers that come and go, and graphs. */
#include "program.h"

char *read_text(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = calloc(1, 1 << 20);
    if (!file || !text || !fread(text, 1, (1 << 20) - 1, file)) {
        printf("BAD %s cannot be read\n", path);
        _exit(2);
    }
    fclose(file);
    return text;
}

void load_kernels(struct kernels *to)
{
    CHECK(cuModuleLoadData(&to->module, ptx));
    CHECK(cuModuleGetFunction(&to->fill, to->module, "fill"));
    CHECK(cuModuleGetFunction(&to->add, to->module, "add"));
    CHECK(cuModuleGetFunction(&to->count_up, to->module, "count_up"));
    CHECK(cuModuleGetFunction(&to->derive, to->module, "derive"));
    CHECK(cuModuleGetFunction(&to->scatter, to->module, "scatter"));
    CHECK(cuModuleGetFunction(&to->aim, to->module, "aim"));
    CHECK(cuModuleGetFunction(&to->shoot, to->module, "shoot"));
}

/* ---- buffers ---- */

/* Of the program's own making, in one physical part or two of different size. */
static void map_own(struct worker *w, struct buffer *b)
{
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = b->gpu->number}};
    const size_t unit = (size_t)2 << 20;
    size_t size = ((size_t)b->pages * PAGE + unit - 1) / unit * unit;
    size_t first = size > unit && draw(w, 2) ? unit * (1 + draw(w, (unsigned)(size / unit) - 1)) : size;
    CUmemAccessDesc access[] = {{.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                                {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    access[1].location.id = w->gpu->number;
    CHECK(cuMemAddressReserve(&b->address, size, 0, 0, 0));
    for (size_t at = 0; at < size; at += at ? size - first : first) {
        size_t part = at ? size - first : first;
        CUmemGenericAllocationHandle handle;
        CHECK(cuMemCreate(&handle, part, &properties, 0));
        CHECK(cuMemMap(b->address + at, part, 0, handle, 0));
        CHECK(cuMemRelease(handle));
    }
    CHECK(cuMemSetAccess(b->address, size, access, b->gpu == w->gpu ? 1 : 2));
    b->mapped = size;
}

static void unmap_own(struct buffer *b)
{
    CHECK(cuMemUnmap(b->address, b->mapped));
    CHECK(cuMemAddressFree(b->address, b->mapped));
}

static void make_buffer(struct worker *w, struct buffer *b)
{
    static const unsigned sizes[] = {1, 16, 64, 128, 128, 256, 300, 512, 1024, 1024, 1500, MOST_PAGES};
    do
        b->pages = sizes[draw(w, sizeof sizes / sizeof *sizes)];
    while (b->pages > 1 && w->pages + b->pages > w->most);
    w->pages += b->pages;
    size_t bytes = (size_t)b->pages * PAGE;
    CUstream stream = any_stream(w);
    b->mapped = 0;
    b->gpu = gpu_count > 1 && !draw(w, 4) ? &gpus[draw(w, gpu_count)] : w->gpu;
    switch (b->gpu == w->gpu ? draw(w, 4) : 1 + draw(w, 3)) {
    case 0:
        b->kind = "cuMemAllocAsync";
        UNSAFE(cuMemAllocAsync(&b->address, bytes, stream));
        break;
    case 1:
        b->kind = "cuMemMap";
        map_own(w, b);
        break;
    default:
        b->kind = "cuMemAlloc";
        CHECK(cuCtxPushCurrent(b->gpu->context));
        UNSAFE(cuMemAlloc(&b->address, bytes));
        CHECK(cuCtxPopCurrent(NULL));
    }
    b->model = calloc(b->pages, sizeof *b->model);
    CHECK(cuMemsetD8Async(b->address, 0, bytes, stream));
    b->noted = 0;
    note(b, "make", (struct range){0, b->pages}, 0, stream);
    CHECK(cuEventCreate(&b->event, CU_EVENT_DISABLE_TIMING));
    end_use(b, stream);
}

static void drop_graph(struct worker *w)
{
    if (!w->runnable)
        return;
    UNSAFE(cuGraphExecDestroy(w->runnable));
    CHECK(cuGraphDestroy(w->graph));
    w->runnable = NULL;
}

void replace_buffer(struct worker *w, unsigned which)
{
    struct buffer *b = &w->buffers[which];
    if (w->runnable && (b == w->in_graph[0] || b == w->in_graph[1]))
        drop_graph(w);
    CUstream stream = any_stream(w);
    begin_use(b, stream);
    if (!strcmp(b->kind, "cuMemAllocAsync") && draw(w, 3))
        UNSAFE(cuMemFreeAsync(b->address, stream));
    else {
        UNSAFE(cuStreamSynchronize(stream));
        if (b->mapped)
            unmap_own(b);
        else
            UNSAFE(cuMemFree(b->address));
    }
    CHECK(cuEventDestroy(b->event));
    free(b->model);
    w->pages -= b->pages;
    make_buffer(w, b);
}

void set_up(struct worker *w, unsigned most)
{
    w->most = most;
    w->streams[0] = CU_STREAM_LEGACY;
    CHECK(cuStreamCreate(&w->streams[1], CU_STREAM_DEFAULT));
    CHECK(cuStreamCreate(&w->streams[2], CU_STREAM_NON_BLOCKING));
    w->streams[3] = CU_STREAM_PER_THREAD;
    w->pinned_in = CU_STREAM_LEGACY;
    UNSAFE(cuMemAllocHost((void **)&w->pinned, (size_t)HOST_PAGES * PAGE));
    w->pageable = malloc((size_t)HOST_PAGES * PAGE);
    w->words = malloc(MOST_PAGES * sizeof *w->words);
    UNSAFE(cuMemAlloc(&w->table, 64));
    for (w->count = 0; w->count < BUFFERS / 2 || (w->count < BUFFERS && w->pages < most); w->count++)
        make_buffer(w, &w->buffers[w->count]);
    for (unsigned i = 0; i < w->count; i++)
        if (w->buffers[i].last == CU_STREAM_PER_THREAD)
            w->buffers[i].last = GONE; /* of the thread that sets up */
    CHECK(cuCtxSynchronize());
}

/* ---- graphs ---- */

static CUDA_KERNEL_NODE_PARAMS adding(struct buffer *b, struct worker *w, void **parameters, CUdeviceptr *to)
{
    *to = page(b, w->add_to.first);
    parameters[0] = to;
    parameters[1] = &w->add_to.pages;
    parameters[2] = &w->value;
    return (CUDA_KERNEL_NODE_PARAMS){.func = w->gpu->kernels.add, .gridDimX = (w->add_to.pages + 127) / 128, .gridDimY = 1,
                                     .gridDimZ = 1, .blockDimX = 128, .blockDimY = 1, .blockDimZ = 1,
                                     .kernelParams = parameters};
}

/* Adds to one buffer and sets another: made node by node, or captured. */
static void make_graph(struct worker *w, struct buffer *a, struct buffer *b)
{
    void *parameters[3];
    CUdeviceptr to;
    w->in_graph[0] = a;
    w->in_graph[1] = b;
    w->add_to = any_range(w, a);
    w->set_to = any_range(w, b);
    w->value = draw(w, 1000);
    w->value_set = draw(w, 1u << 30);
    CUDA_KERNEL_NODE_PARAMS kernel = adding(a, w, parameters, &to);
    if (draw(w, 2)) {
        CUDA_MEMSET_NODE_PARAMS set = {.dst = page(b, w->set_to.first), .value = w->value_set, .elementSize = 4,
                                       .width = (size_t)w->set_to.pages * PAGE / 4, .height = 1};
        CUgraphNode second;
        CHECK(cuGraphCreate(&w->graph, 0));
        CHECK(cuGraphAddKernelNode(&w->node, w->graph, NULL, 0, &kernel));
        CHECK(cuGraphAddMemsetNode(&second, w->graph, &w->node, 1, &set, w->gpu->context));
    } else {
        CUstream stream = w->streams[2];
        size_t nodes = 1;
        bool alone = !draw(w, 4);
        if (alone)
            pthread_rwlock_wrlock(&capturing);
        else
            pthread_rwlock_rdlock(&capturing);
        CHECK(cuStreamBeginCapture(stream, alone ? CU_STREAM_CAPTURE_MODE_GLOBAL : CU_STREAM_CAPTURE_MODE_RELAXED));
        CHECK(cuLaunchKernel(kernel.func, kernel.gridDimX, 1, 1, kernel.blockDimX, 1, 1, 0, stream, parameters, NULL));
        CHECK(cuMemsetD32Async(page(b, w->set_to.first), w->value_set, (size_t)w->set_to.pages * PAGE / 4, stream));
        if (alone) /* while other threads copy, and launch */
            nanosleep(&(struct timespec){.tv_nsec = draw(w, 3000) * 1000}, NULL);
        CHECK(cuStreamEndCapture(stream, &w->graph));
        pthread_rwlock_unlock(&capturing);
        CHECK(cuGraphGetRootNodes(w->graph, &w->node, &nodes));
    }
    UNSAFE(cuGraphInstantiate(&w->runnable, w->graph, 0));
}

void use_graph(struct worker *w, struct buffer *a, struct buffer *b)
{
    if (w->runnable && !draw(w, 4))
        drop_graph(w);
    if (!w->runnable) {
        if (a == b)
            return;
        make_graph(w, a, b);
    } else if (draw(w, 2) && a != w->in_graph[1]) { /* from now on it adds elsewhere */
        void *parameters[3];
        CUdeviceptr to;
        w->in_graph[0] = a;
        w->add_to = any_range(w, a);
        w->value = draw(w, 1000);
        CUDA_KERNEL_NODE_PARAMS kernel = adding(a, w, parameters, &to);
        CHECK(cuGraphExecKernelNodeSetParams(w->runnable, w->node, &kernel));
    }
    CUstream stream = any_stream(w);
    begin_use(w->in_graph[0], stream);
    begin_use(w->in_graph[1], stream);
    CHECK(cuGraphLaunch(w->runnable, stream));
    note(w->in_graph[0], "add of a graph", w->add_to, w->value, stream);
    note(w->in_graph[1], "set of a graph", w->set_to, w->value_set, stream);
    end_use(w->in_graph[0], stream);
    end_use(w->in_graph[1], stream);
    model_add(w->in_graph[0], w->add_to, w->value);
    model_set(w->in_graph[1], w->set_to, w->value_set, false);
}

/* ---- polling ---- */

static void *ask_own(void *unused)
{
    unsigned flags;
    (void)unused;
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuStreamGetFlags(CU_STREAM_PER_THREAD, &flags));
    return NULL;
}

static void ask(unsigned poll, CUstream stream, CUevent event)
{
    CUstreamCaptureStatus status;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUcontext context;
    pthread_t other;
    unsigned flags;
    int active;
    switch (poll) {
    case 0:
        CHECK(cuEventQuery(event));
        break;
    case 1:
        CHECK(cuStreamQuery(stream));
        break;
    case 2: /* the first question about a thread's own stream makes it */
        if (!pthread_create(&other, NULL, ask_own, NULL))
            pthread_join(other, NULL);
        break;
    default:
        CHECK(cuStreamIsCapturing(stream, &status));
        CHECK(cuStreamGetCtx(stream, &context));
        CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
        CHECK(cuThreadExchangeStreamCaptureMode(&mode));
        CHECK(cuThreadExchangeStreamCaptureMode(&mode));
        if (status != CU_STREAM_CAPTURE_STATUS_NONE || context != gpus[0].context || !active) {
            fprintf(stderr, "a poll was answered wrongly\n");
            abort();
        }
    }
}

/* As watchdogs do: all the time, and so at every moment of a checkpoint; a thread for each question, as one that waits asks for
 * nothing else. Asked while the process is away, the first three crash, with this driver as with a GPU's. */
void *poll_always(void *number)
{
    CUstream stream;
    CUevent event;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* it waits for no capture's end */
    CHECK(cuThreadExchangeStreamCaptureMode(&mode));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuEventRecord(event, stream));
    UNSAFE(cuStreamSynchronize(stream));
    while (!atomic_load(&stop)) {
        ask((unsigned)(uintptr_t)number, stream, event);
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    return NULL;
}
