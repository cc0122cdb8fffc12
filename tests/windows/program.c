/* A program that does at random what programs do with device memory, in several threads and streams, on all GPUs that there
 * are, and knows what must come out: of every 4096 bytes the first word has a model on the host. Built and run by windows.py.
 *
 * Usage: program KERNELS.ptx SEED THREADS MEGABYTES NAP_US RARE. It says READY, and runs until SIGUSR1: then it compares
 * all of its memory with the models, says GOOD and ends with 0. SIGUSR2: it ends at once, in one of several ways. What is
 * not as it must be, it says, and ends with 3. RARE: one operation in so many writes where no argument says (then a
 * window lets nothing pass before it is over); 0: none does. */
#include "program.h"

#include <signal.h>
#include <sys/wait.h>

char *ptx;
struct gpu gpus[GPUS];
unsigned gpu_count;
atomic_int stop; /* SIGUSR1: 1, SIGUSR2: 2 */
static unsigned nap, rare;
static bool race;                       /* PLANT_RACE: the sanitizer has something to find */
static volatile unsigned long operations; /* then: of all threads, and nothing guards it */
static pthread_mutex_t target_lock = PTHREAD_MUTEX_INITIALIZER; /* the module's variable `target` */
pthread_rwlock_t capturing = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

void check_at(CUresult result, const char *what, int line)
{
    if (result == CUDA_SUCCESS)
        return;
    while (result == CUDA_ERROR_DEINITIALIZED && atomic_load(&stop) == 2)
        pause(); /* another thread is in exit(), and the driver has seen it */
    printf("BAD %s in line %d: error %d\n", what, line, result);
    fflush(stdout);
    _exit(3);
}

unsigned draw(struct worker *w, unsigned below)
{
    w->seed = w->seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((w->seed >> 33) % below);
}

static struct buffer *any_buffer(struct worker *w)
{
    return &w->buffers[draw(w, w->count)];
}

CUstream any_stream(struct worker *w)
{
    return w->streams[draw(w, STREAMS)];
}

/* A range of a buffer, in pages; mostly a part, sometimes all. */
struct range any_range(struct worker *w, const struct buffer *b)
{
    if (!draw(w, 3))
        return (struct range){0, b->pages};
    unsigned first = draw(w, b->pages);
    return (struct range){first, 1 + draw(w, b->pages - first)};
}

void begin_use(struct buffer *b, CUstream stream)
{
    if (b->last != stream)
        CHECK(cuStreamWaitEvent(stream, b->event, 0));
}

void end_use(struct buffer *b, CUstream stream)
{
    CHECK(cuEventRecord(b->event, stream));
    b->last = stream;
}

void note(struct buffer *b, const char *what, struct range range, uint32_t value, CUstream stream)
{
    struct note *n = &b->notes[b->noted++ % NOTES];
    *n = (struct note){what, range, value, stream, {0}};
    clock_gettime(CLOCK_MONOTONIC, &n->when);
}

static void bad(const struct buffer *b, unsigned number, uint32_t found)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("BAD page %u of %u of a buffer at %llx (%s): %x instead of %x\n", number, b->pages, b->address, b->kind, found,
           b->model[number]);
    for (unsigned i = b->noted < NOTES ? 0 : b->noted - NOTES; i < b->noted; i++) {
        const struct note *n = &b->notes[i % NOTES];
        double ago = (double)(now.tv_sec - n->when.tv_sec) + 1e-9 * (double)(now.tv_nsec - n->when.tv_nsec);
        printf("  %.6f s ago: %s, pages %u to %u, value %x, stream %p\n", ago, n->what, n->range.first,
               n->range.first + n->range.pages - 1, n->value, (void *)n->stream);
    }
    fflush(stdout);
    _exit(3);
}

CUdeviceptr page(const struct buffer *b, unsigned number)
{
    return b->address + (CUdeviceptr)number * PAGE;
}

void launch(struct worker *w, CUfunction function, unsigned threads, CUstream stream, void **parameters)
{
    unsigned block = 32u << draw(w, 3), blocks = (threads + block - 1) / block;
    CUlaunchConfig config = {.gridDimX = blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = block, .blockDimY = 1,
                             .blockDimZ = 1, .hStream = stream};
    switch (draw(w, 4)) {
    case 0:
        CHECK(cuLaunchKernelEx(&config, function, parameters, NULL));
        break;
    case 1:
        CHECK(cuLaunchCooperativeKernel(function, blocks, 1, 1, block, 1, 1, 0, stream, parameters));
        break;
    default:
        CHECK(cuLaunchKernel(function, blocks, 1, 1, block, 1, 1, 0, stream, parameters, NULL));
    }
}

void model_set(struct buffer *b, struct range r, uint32_t value, bool counting)
{
    for (unsigned i = 0; i < r.pages; i++)
        b->model[r.first + i] = value + (counting ? i : 0);
}

void model_add(struct buffer *b, struct range r, uint32_t value)
{
    for (unsigned i = 0; i < r.pages; i++)
        b->model[r.first + i] += value;
}

static void simple_kernel(struct worker *w, const struct kernels *from)
{
    struct buffer *b = any_buffer(w);
    struct range r = any_range(w, b);
    CUstream stream = any_stream(w);
    CUdeviceptr to = page(b, r.first);
    uint32_t value = draw(w, 1u << 30), kind = draw(w, 3);
    void *parameters[] = {&to, &r.pages, &value};
    begin_use(b, stream);
    note(b, kind == 0 ? "fill" : kind == 1 ? "add" : "count_up", r, value, stream);
    launch(w, kind == 0 ? from->fill : kind == 1 ? from->add : from->count_up, r.pages, stream, parameters);
    end_use(b, stream);
    if (kind)
        model_add(b, r, value);
    else
        model_set(b, r, value, true);
}

/* Two buffers and a range that both have; the same buffer twice is none. */
static bool pair(struct worker *w, struct buffer **to, struct buffer **from, struct range *r)
{
    *to = any_buffer(w);
    *from = any_buffer(w);
    *r = any_range(w, (*to)->pages < (*from)->pages ? *to : *from);
    return *to != *from;
}

static void struct_kernel(struct worker *w)
{
    struct buffer *to, *from;
    struct range r;
    if (!pair(w, &to, &from, &r))
        return;
    CUstream stream = any_stream(w);
    struct {
        CUdeviceptr to, from;
        uint32_t count, value;
    } both = {page(to, r.first), page(from, r.first), r.pages, draw(w, 1000)};
    void *parameters[] = {&both};
    begin_use(to, stream);
    note(to, "derive", r, both.value, stream);
    begin_use(from, stream);
    launch(w, w->gpu->kernels.derive, r.pages, stream, parameters);
    end_use(to, stream);
    end_use(from, stream);
    for (unsigned i = r.first; i < r.first + r.pages; i++)
        to->model[i] = from->model[i] + both.value;
}

static void device_copy(struct worker *w)
{
    struct buffer *to, *from;
    struct range r;
    if (!pair(w, &to, &from, &r))
        return;
    CUstream stream = any_stream(w);
    CUdeviceptr a = page(to, r.first), b = page(from, r.first);
    size_t bytes = (size_t)r.pages * PAGE;
    CUDA_MEMCPY2D plane = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = b, .srcPitch = PAGE,
                           .dstMemoryType = CU_MEMORYTYPE_UNIFIED, .dstDevice = a, .dstPitch = PAGE,
                           .WidthInBytes = 4 * (1 + draw(w, 1024)), .Height = r.pages};
    CUDA_MEMCPY3D cube = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = b, .srcPitch = PAGE, .srcHeight = r.pages,
                          .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = a, .dstPitch = PAGE, .dstHeight = r.pages,
                          .WidthInBytes = 64, .Height = r.pages, .Depth = 1};
    unsigned kind = draw(w, 7);
    note(to, "copy", r, kind, stream);
    begin_use(to, stream);
    begin_use(from, stream);
    switch (kind) {
    case 0:
        CHECK(cuMemcpy2DAsync(&plane, stream));
        break;
    case 1:
        CHECK(cuMemcpy3DAsync(&cube, stream));
        break;
    case 2:
        CHECK(cuMemcpyAsync(a, b, bytes, stream));
        break;
    case 3:
        CHECK(cuMemcpyPeerAsync(a, to->gpu->context, b, from->gpu->context, bytes, stream));
        break;
    case 4: /* in the legacy stream, behind what is queued in that one */
        UNSAFE(cuStreamSynchronize(stream));
        CHECK(cuMemcpyDtoD(a, b, bytes));
        break;
    case 5:
        UNSAFE(cuStreamSynchronize(stream));
        CHECK(cuMemcpy2DUnaligned(&plane));
        break;
    default:
        CHECK(cuMemcpyDtoDAsync(a, b, bytes, stream));
    }
    /* The synchronous ones wait for nobody when both sides are on the device. */
    UNSAFE(cuStreamSynchronize(CU_STREAM_LEGACY));
    end_use(to, stream);
    end_use(from, stream);
    memcpy(to->model + r.first, from->model + r.first, r.pages * sizeof *to->model);
}

static void set_memory(struct worker *w)
{
    struct buffer *b = any_buffer(w);
    struct range r = any_range(w, b);
    CUstream stream = any_stream(w);
    CUdeviceptr to = page(b, r.first);
    uint32_t value = draw(w, 1u << 30);
    begin_use(b, stream);
    switch (draw(w, 5)) {
    case 0:
        value = (value & 0xff) * 0x01010101u;
        CHECK(cuMemsetD8Async(to, (unsigned char)value, (size_t)r.pages * PAGE, stream));
        break;
    case 1:
        value = (value & 0xffff) * 0x00010001u;
        CHECK(cuMemsetD16Async(to, (unsigned short)value, (size_t)r.pages * PAGE / 2, stream));
        break;
    case 2:
        CHECK(cuMemsetD2D32Async(to, PAGE, value, 1 + draw(w, 1024), r.pages, stream));
        break;
    case 3:
        r.pages = 1;
        CHECK(cuStreamWriteValue32(stream, to, value, 0));
        break;
    default:
        CHECK(cuMemsetD32Async(to, value, (size_t)r.pages * PAGE / 4, stream));
    }
    end_use(b, stream);
    model_set(b, r, value, false);
    note(b, "set", r, value, stream);
}

static void upload(struct worker *w)
{
    struct buffer *b = any_buffer(w);
    struct range r = any_range(w, b);
    if (r.pages > HOST_PAGES)
        r.pages = HOST_PAGES;
    CUstream stream = any_stream(w);
    uint32_t value = draw(w, 1u << 30);
    bool pinned = draw(w, 2);
    char *host = pinned ? w->pinned : w->pageable;
    UNSAFE(cuStreamSynchronize(w->pinned_in)); /* its content is wanted no more */
    for (unsigned i = 0; i < r.pages; i++)
        *(uint32_t *)(host + (size_t)i * PAGE) = value + i;
    begin_use(b, stream);
    if (draw(w, 3))
        CHECK(cuMemcpyHtoDAsync(page(b, r.first), host, (size_t)r.pages * PAGE, stream));
    else {
        UNSAFE(cuStreamSynchronize(stream));
        CHECK(cuMemcpyHtoD(page(b, r.first), host, (size_t)r.pages * PAGE));
        UNSAFE(cuStreamSynchronize(CU_STREAM_LEGACY));
    }
    if (pinned)
        w->pinned_in = stream;
    end_use(b, stream);
    model_set(b, r, value, true);
    note(b, pinned ? "upload of pinned memory" : "upload", r, value, stream);
}

void verify(struct worker *w, struct buffer *b, struct range r, CUstream stream)
{
    uint32_t *words = w->words;
    CUDA_MEMCPY2D plane = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = page(b, r.first), .srcPitch = PAGE,
                           .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = words, .dstPitch = 4,
                           .WidthInBytes = 4, .Height = r.pages};
    begin_use(b, stream);
    CHECK(cuMemcpy2DAsync(&plane, stream));
    end_use(b, stream);
    UNSAFE(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < r.pages; i++)
        if (words[i] != b->model[r.first + i])
            bad(b, r.first + i, words[i]);
}

/* Through a table of addresses in memory, or through a variable of the module. */
static void hidden_write(struct worker *w)
{
    struct buffer *a, *b;
    struct range r;
    CUstream stream = any_stream(w);
    uint32_t value = draw(w, 1u << 30), two = 2;
    if (!pair(w, &a, &b, &r))
        return;
    begin_use(a, stream);
    begin_use(b, stream);
    if (draw(w, 2)) {
        CUdeviceptr both[] = {page(a, r.first), page(b, r.first)};
        void *parameters[] = {&w->table, &two, &r.pages, &value};
        CHECK(cuMemcpyHtoDAsync(w->table, both, sizeof both, stream));
        launch(w, w->gpu->kernels.scatter, r.pages, stream, parameters);
        UNSAFE(cuStreamSynchronize(stream)); /* the table is used again */
        model_set(b, r, value, true);
        model_set(a, r, value, true);
        note(b, "scatter", r, value, stream);
        note(a, "scatter", r, value, stream);
    } else {
        CUdeviceptr to = page(a, r.first);
        void *aimed[] = {&to}, *parameters[] = {&r.pages, &value};
        pthread_mutex_lock(&target_lock);
        launch(w, w->gpu->kernels.aim, 1, stream, aimed);
        launch(w, w->gpu->kernels.shoot, r.pages, stream, parameters);
        UNSAFE(cuStreamSynchronize(stream));
        pthread_mutex_unlock(&target_lock);
        model_add(a, r, value);
        note(a, "shoot", r, value, stream);
    }
    end_use(a, stream);
    end_use(b, stream);
}

/* CUDA refuses it while a stream of the context is captured, by whatever thread. */
static void synchronize_context(void)
{
    pthread_rwlock_wrlock(&capturing);
    CHECK(cuCtxSynchronize());
    pthread_rwlock_unlock(&capturing);
}

static void new_module(struct worker *w)
{
    struct kernels own;
    load_kernels(&own);
    simple_kernel(w, &own);
    synchronize_context();
    UNSAFE(cuModuleUnload(own.module));
}

static void new_process(void)
{
    pid_t child = fork();
    if (!child)
        _exit(0);
    if (child > 0)
        waitpid(child, NULL, 0);
}

static void new_stream(struct worker *w)
{
    unsigned which = 1 + draw(w, 2);
    CUstream former = w->streams[which];
    for (unsigned i = 0; i < w->count; i++)
        if (w->buffers[i].last == former)
            w->buffers[i].last = GONE;
    if (w->pinned_in == former) {
        UNSAFE(cuStreamSynchronize(former));
        w->pinned_in = CU_STREAM_LEGACY;
    }
    CHECK(cuStreamDestroy(former));
    CHECK(cuStreamCreate(&w->streams[which], which == 1 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
}

static void one_operation(struct worker *w)
{
    unsigned kind = draw(w, 100);
    if (rare && !draw(w, rare))
        hidden_write(w);
    else if (kind < 30)
        simple_kernel(w, &w->gpu->kernels);
    else if (kind < 40)
        struct_kernel(w);
    else if (kind < 52)
        device_copy(w);
    else if (kind < 66)
        set_memory(w);
    else if (kind < 74)
        upload(w);
    else if (kind < 80) {
        struct buffer *b = any_buffer(w);
        verify(w, b, any_range(w, b), any_stream(w));
    } else if (kind < 88)
        replace_buffer(w, draw(w, w->count));
    else if (kind < 96)
        use_graph(w, any_buffer(w), any_buffer(w));
    else if (kind < 97)
        new_stream(w);
    else if (kind < 98)
        draw(w, 4) ? (void)UNSAFE(cuStreamSynchronize(any_stream(w))) : synchronize_context();
    else if (kind < 99)
        draw(w, 4) ? (void)0 : new_module(w);
    else if (!getenv("NO_FORK"))
        draw(w, 4) ? (void)0 : new_process();
}

/* With much queued, and chunks that were copied aside behind it. */
static void become_another(struct worker *w)
{
    struct range all = {0, w->buffers[0].pages};
    CUdeviceptr to = w->buffers[0].address;
    uint32_t value = 1;
    void *parameters[] = {&to, &all.pages, &value};
    for (unsigned i = 0; i < 300; i++)
        launch(w, w->gpu->kernels.add, all.pages, w->streams[2], parameters);
    for (unsigned i = 0; i < w->count; i++)
        CHECK(cuMemsetD8Async(w->buffers[i].address, 1, PAGE, w->streams[2]));
    execlp("sleep", "sleep", "60", NULL);
}

static void leave_at_once(struct worker *w)
{
    const char *other = getenv("BECOME_ANOTHER");
    if (other && *other)
        become_another(w);
    switch (draw(w, 3)) {
    case 0:
        _exit(0);
    case 1:
        raise(SIGKILL);
    }
    exit(0);
}

/* Threads come and go, too. */
static void *work(void *argument)
{
    struct worker *w = argument;
    CHECK(cuCtxSetCurrent(w->gpu->context));
    for (unsigned i = 500 + draw(w, 1000); i && !atomic_load(&stop); i--) {
        one_operation(w);
        if (race)
            operations++;
        if (nap)
            nanosleep(&(struct timespec){.tv_nsec = draw(w, 2 * nap) * 1000}, NULL);
    }
    if (atomic_load(&stop) == 2)
        leave_at_once(w);
    for (unsigned i = 0; i < w->count; i++) /* the thread's own stream ends with it */
        if (w->buffers[i].last == CU_STREAM_PER_THREAD)
            w->buffers[i].last = GONE;
    UNSAFE(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    if (w->pinned_in == CU_STREAM_PER_THREAD)
        w->pinned_in = CU_STREAM_LEGACY;
    return NULL;
}

static void on_signal(int number)
{
    atomic_store(&stop, number == SIGUSR1 ? 1 : 2);
}

static void wait_for_end(struct worker *workers, unsigned count)
{
    for (bool ending = false; !ending;) {
        ending = atomic_load(&stop); /* once for all of them: who is started anew is joined again */
        for (unsigned i = 0; i < count; i++) {
            pthread_join(workers[i].thread, NULL);
            if (!ending)
                pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        }
    }
}

/* Each may touch the others' memory. */
static void set_up_gpus(void)
{
    int present;
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&present));
    for (; (int)gpu_count < present && gpu_count < GPUS; gpu_count++) {
        CUdevice device;
        gpus[gpu_count].number = (int)gpu_count;
        CHECK(cuDeviceGet(&device, (int)gpu_count));
        CHECK(cuDevicePrimaryCtxRetain(&gpus[gpu_count].context, device));
    }
    for (unsigned i = 0; i < gpu_count; i++) {
        CHECK(cuCtxSetCurrent(gpus[i].context));
        load_kernels(&gpus[i].kernels);
        for (unsigned j = 0; j < gpu_count; j++)
            if (i != j)
                CHECK(cuCtxEnablePeerAccess(gpus[j].context, 0));
    }
}

int main(int count, char **words)
{
    static struct worker workers[16];
    pthread_t polls[POLLS];
    if (count != 7)
        return 2;
    unsigned threads = (unsigned)atoi(words[3]), pages = (unsigned)atoi(words[4]) * 256 / threads;
    nap = (unsigned)atoi(words[5]);
    rare = (unsigned)atoi(words[6]);
    race = getenv("PLANT_RACE") != NULL;
    ptx = read_text(words[1]);
    set_up_gpus();
    for (unsigned i = 0; i < threads; i++) {
        workers[i].gpu = &gpus[i % gpu_count];
        workers[i].seed = strtoull(words[2], NULL, 10) * 1000003 + i;
        CHECK(cuCtxSetCurrent(workers[i].gpu->context));
        set_up(&workers[i], pages);
    }
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    for (unsigned i = 0; i < threads; i++)
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    for (uintptr_t i = 0; i < POLLS; i++)
        pthread_create(&polls[i], NULL, poll_always, (void *)i);
    puts("READY");
    fflush(stdout);
    wait_for_end(workers, threads);
    for (unsigned i = 0; i < POLLS; i++)
        pthread_join(polls[i], NULL);
    for (unsigned i = 0; i < threads; i++) {
        CHECK(cuCtxSetCurrent(workers[i].gpu->context));
        for (unsigned j = 0; j < workers[i].count; j++)
            verify(&workers[i], &workers[i].buffers[j], (struct range){0, workers[i].buffers[j].pages}, NULL);
    }
    puts("GOOD");
    return 0;
}
