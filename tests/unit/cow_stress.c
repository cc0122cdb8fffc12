/* The two sides of a window against each other: the frontend's (window_shadow.c), called by threads with streams, and
 * phosd's (chunk_table.c), called by copying threads. The GPU is a thread for each stream, memory is the host's, so that
 * ThreadSanitizer sees every access. Built and run by test_cow_stress.py.
 *
 * Usage: cow_stress ROUNDS SLOTS SEED FAILING. FAILING: every so manieth copy is refused, and some events are; 0: none. Such a
 * copy may be made in part, and then reads what it likes: that is a race, and harmless. Exit status 0: what was saved is what
 * was there when each window began. */
#include "blocks.h"
#include "memory.h"
#include "track.h"
#include "window_private.h"

#include "../../gpu_engine/cow/chunk_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHUNK 4096u
#define THREADS 3
#define STREAMS (THREADS * 2) /* two each */
#define BLOCKS 5
#define COPIERS 2

/* ---- phosd's side, as chunk_table.py declares it ---- */

extern uint64_t phos_chunks_size(uint32_t chunks);
extern void phos_chunks_begin(struct phos_chunk_table *table, uint32_t chunk_bytes, uint32_t chunks);
extern uint32_t phos_chunks_state(const struct phos_chunk_table *table, uint32_t chunk);
extern void phos_chunks_close(struct phos_chunk_table *table);
extern uint64_t phos_window_size(uint32_t blocks, uint32_t pools, uint32_t slots, uint32_t queue, uint32_t order);
/* The frontend has another function of this name, in window.c, which is not here. */
extern void table_begin(struct phos_window_view *view, struct phos_window_table *table, uint32_t process, uint32_t blocks,
                        uint32_t pools, uint32_t slots, uint32_t queue, uint32_t order, uint32_t prioritise, uint32_t mode)
    __asm__("phos_window_begin");
extern void phos_window_set_pool(struct phos_window_table *table, uint32_t index, uint32_t device, uint32_t first_slot,
                                 uint32_t slots, uint64_t bytes);
extern int64_t phos_window_next_touched(const struct phos_window_view *view, uint32_t *head);
extern uint32_t phos_window_ticket(const struct phos_window_view *view, uint32_t slot);
extern void phos_window_free_slot(const struct phos_window_view *view, uint32_t slot);
extern uint32_t phos_window_transferring(const struct phos_window_view *view, uint32_t pool, uint32_t slots,
                                         const uint32_t *flags);

static struct phos_window_view view;

static void check(bool holds, const char *what)
{
    if (holds)
        return;
    printf("%s\n", what);
    fflush(stdout);
    _Exit(1);
}

static unsigned draw(uint64_t *seed, unsigned below)
{
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((*seed >> 33) % below);
}

/* ---- a GPU ---- */

struct event { /* guarded by gpu_lock */
    uint64_t recorded, reached;
    bool destroyed;
    struct event *next; /* of those that were destroyed in this window */
};
enum kind { COPY, SET, RECORD, WAIT, KERNEL };
struct work {
    enum kind kind;
    char *to;
    const char *from;
    size_t size;
    uint32_t value;
    struct event *event;
    uint64_t number;
};
#define QUEUE 4u /* often full */
struct stream {
    struct work queue[QUEUE];
    uint64_t head, tail; /* guarded by gpu_lock */
    unsigned number;
    pthread_t thread;
    bool end;
};
static struct stream streams[STREAMS + 1]; /* the application's, and that of the copies */
static pthread_mutex_t gpu_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gpu_changed = PTHREAD_COND_INITIALIZER;
static atomic_uint failing = 0; /* one copy in so many is refused */
static atomic_uint copies, events;
static atomic_bool copying; /* there is a stream for copies */
#define GARBAGE ((CUevent)8)
#define HERE ((CUcontext)1)
#define THERE ((CUcontext)2) /* a second one on the same device */
#define ELSEWHERE ((CUcontext)3)
static __thread CUcontext current = HERE;

static CUresult enqueue(CUstream handle, struct work work)
{
    struct stream *stream = (struct stream *)handle;
    pthread_mutex_lock(&gpu_lock);
    while (stream->tail - stream->head == QUEUE)
        pthread_cond_wait(&gpu_changed, &gpu_lock);
    check(work.event || (work.kind != RECORD && work.kind != WAIT), "an event is used that could not be made");
    check(!work.event || !work.event->destroyed, "an event is used that has been destroyed");
    if (work.kind == RECORD)
        work.number = ++work.event->recorded;
    if (work.kind == WAIT)
        work.number = work.event->recorded;
    stream->queue[stream->tail++ % QUEUE] = work;
    pthread_cond_broadcast(&gpu_changed);
    pthread_mutex_unlock(&gpu_lock);
    return CUDA_SUCCESS;
}

/* Each stream has words of its own, for the application orders its streams in no way. */
static void run_kernel(const struct stream *stream, const struct work *work)
{
    for (uint64_t *word = (uint64_t *)work->to; (char *)word < work->to + work->size; word++)
        if ((uintptr_t)word / 8 % STREAMS == stream->number)
            *word = *word * 3 + work->value;
}

static void *run_stream(void *argument)
{
    struct stream *stream = argument;
    uint64_t seed = stream->number;
    pthread_mutex_lock(&gpu_lock);
    for (;;) {
        while (stream->head == stream->tail && !stream->end)
            pthread_cond_wait(&gpu_changed, &gpu_lock);
        if (stream->head == stream->tail)
            break;
        struct work work = stream->queue[stream->head % QUEUE];
        while (work.kind == WAIT && work.event->reached < work.number)
            pthread_cond_wait(&gpu_changed, &gpu_lock);
        pthread_mutex_unlock(&gpu_lock);
        if (!draw(&seed, work.kind == COPY ? 3 : 16))
            nanosleep(&(struct timespec){.tv_nsec = draw(&seed, 300000)}, NULL);
        if (work.kind == COPY)
            memcpy(work.to, work.from, work.size);
        else if (work.kind == SET)
            for (size_t i = 0; i < work.size; i++)
                __atomic_store_n((uint32_t *)work.to + i, work.value, __ATOMIC_RELEASE);
        else if (work.kind == KERNEL)
            run_kernel(stream, &work);
        pthread_mutex_lock(&gpu_lock);
        if (work.kind == RECORD && work.event->reached < work.number) /* it may be recorded anew, elsewhere */
            work.event->reached = work.number;
        stream->head++;
        pthread_cond_broadcast(&gpu_changed);
    }
    pthread_mutex_unlock(&gpu_lock);
    return NULL;
}

static CUresult fake_copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    unsigned one_in = atomic_load(&failing);
    if (one_in && atomic_fetch_add(&copies, 1) % one_in == one_in - 1)
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, (struct work){.kind = COPY, .to = (char *)to, .from = (const char *)from, .size = size});
}
static CUresult fake_set(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    return enqueue(stream, (struct work){.kind = SET, .to = (char *)to, .value = value, .size = count});
}
static CUresult fake_event_create(CUevent *event, unsigned flags)
{
    (void)flags;
    static atomic_uint made;
    if (atomic_load(&failing) && atomic_fetch_add(&made, 1) % 4 == 3) {
        *event = GARBAGE; /* as the driver may */
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *event = (CUevent)calloc(1, sizeof(struct event));
    atomic_fetch_add(&events, 1);
    return CUDA_SUCCESS;
}
static struct event *destroyed;
static CUresult fake_event_destroy(CUevent event)
{
    check(event != GARBAGE, "an event is destroyed that was never made");
    atomic_fetch_sub(&events, 1);
    pthread_mutex_lock(&gpu_lock);
    ((struct event *)event)->destroyed = true;
    ((struct event *)event)->next = destroyed; /* freed once all streams are idle */
    destroyed = (struct event *)event;
    pthread_mutex_unlock(&gpu_lock);
    return CUDA_SUCCESS;
}
static CUresult fake_record(CUevent event, CUstream stream)
{
    check(event != GARBAGE, "an event is recorded that was never made");
    return enqueue(stream, (struct work){.kind = RECORD, .event = (struct event *)event});
}
static CUresult fake_wait(CUstream stream, CUevent event, unsigned flags)
{
    (void)flags;
    return enqueue(stream, (struct work){.kind = WAIT, .event = (struct event *)event});
}

static CUresult fake_stream_create(CUstream *stream, unsigned flags)
{
    check(flags & CU_STREAM_NON_BLOCKING, "copies wait for the application's default stream");
    check(!atomic_exchange(&copying, true), "there is a second stream for copies");
    *stream = (CUstream)&streams[STREAMS];
    return CUDA_SUCCESS;
}
static CUresult fake_synchronize(CUstream stream)
{
    check(stream == (CUstream)&streams[STREAMS], "a stream is waited for that is not ours");
    pthread_mutex_lock(&gpu_lock);
    while (streams[STREAMS].head != streams[STREAMS].tail)
        pthread_cond_wait(&gpu_changed, &gpu_lock);
    pthread_mutex_unlock(&gpu_lock);
    return CUDA_SUCCESS;
}
static CUresult fake_push(CUcontext context)
{
    check(context == HERE || context == THERE, "what copies is in another context");
    return CUDA_SUCCESS;
}
static CUresult fake_pop(CUcontext *context)
{
    *context = current;
    return CUDA_SUCCESS;
}
static CUresult fake_stream_destroy(CUstream stream)
{
    check(stream == (CUstream)&streams[STREAMS] && atomic_exchange(&copying, false), "a stream ends that is not ours");
    return CUDA_SUCCESS;
}

/* ---- the rest of the frontend ---- */

union phos_real phos_real;
struct phos_window phos_window;
pthread_mutex_t phos_window_lock = PTHREAD_MUTEX_INITIALIZER;
atomic_bool phos_window_over;
pthread_mutex_t phos_memory_lock = PTHREAD_MUTEX_INITIALIZER;
struct phos_ranges phos_mappings;
_Atomic uint64_t phos_mappings_version;
struct phos_device phos_devices[PHOS_DEVICES];
int phos_device_count = 1;

struct phos_allocation *phos_allocation_in(const struct phos_mapping *mapping, CUdeviceptr address)
{
    (void)mapping, (void)address;
    return NULL;
}
bool phos_stream_context(CUstream stream, CUcontext *context, CUdevice *device)
{
    (void)stream;
    return phos_current(context, device) == CUDA_SUCCESS;
}
CUresult phos_current(CUcontext *context, CUdevice *device)
{
    *context = current;
    *device = 0;
    return CUDA_SUCCESS;
}
struct phos_relaxed phos_relax(void)
{
    return (struct phos_relaxed){0};
}
void phos_unrelax(struct phos_relaxed *relaxed)
{
    (void)relaxed;
}
void phos_window_see(const struct phos_shadow_pool *copied_to, CUresult result)
{
    (void)copied_to;
    check(result == CUDA_SUCCESS, "a context has an error");
}
atomic_bool phos_audit_on, phos_window_strict;
void phos_window_failed(CUresult result)
{
    (void)result;
}
void phos_window_load(struct phos_touches *touches)
{
    (void)touches;
}
void phos_audit_before(struct phos_touches *touches)
{
    (void)touches;
}
void phos_audit_after(struct phos_touches *touches, CUresult result)
{
    (void)touches, (void)result;
}

/* ---- memory ---- */

static struct phos_block blocks[BLOCKS];
static struct phos_mapping mappings[BLOCKS];
static struct phos_access access_of_all = {{.type = CU_MEM_LOCATION_TYPE_DEVICE}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
static uint32_t chunk_count;
static char *memory;
static size_t memory_size;
static char *image, *original; /* what was saved; what was there when the window began */

static void make_memory(void)
{
    static const unsigned halves[BLOCKS] = {1, 14, 1, 31, 80}; /* of chunks; one block behind the other */
    for (int b = 0; b < BLOCKS; b++)
        memory_size += halves[b] * CHUNK / 2;
    memory = aligned_alloc(CHUNK, (memory_size + CHUNK) / CHUNK * CHUNK);
    char *at = memory;
    for (int b = 0; b < BLOCKS; b++) {
        size_t size = halves[b] * CHUNK / 2;
        uint32_t chunks = (halves[b] + 1) / 2;
        for (size_t i = 0; i < size / 8; i++)
            ((uint64_t *)at)[i] = i * 0x9e3779b97f4a7c15ull + (uint64_t)b;
        blocks[b] = (struct phos_block){.id = (uint64_t)b + 1, .size = size, .window_first = chunk_count,
                                        .window_chunks = chunks};
        mappings[b] = (struct phos_mapping){
            .range = {(uint64_t)at, size}, .block = &blocks[b], .access = &access_of_all, .access_count = 1};
        check(phos_ranges_add(&phos_mappings, &mappings[b].range), "no memory");
        chunk_count += chunks;
        at += size;
    }
    image = calloc(chunk_count, CHUNK);
    original = calloc(chunk_count, CHUNK);
}

static char *chunk_address(uint32_t chunk, size_t *size)
{
    for (int b = 0; b < BLOCKS; b++)
        if (chunk - blocks[b].window_first < blocks[b].window_chunks) {
            size_t at = (size_t)(chunk - blocks[b].window_first) * CHUNK;
            *size = blocks[b].size - at < CHUNK ? blocks[b].size - at : CHUNK;
            return (char *)mappings[b].range.address + at;
        }
    check(false, "a chunk that there is not");
    return NULL;
}

/* ---- threads of the application ---- */

static atomic_bool stop;
static _Atomic uint64_t launches;

static void *compute(void *argument)
{
    unsigned number = (unsigned)(uintptr_t)argument;
    uint64_t seed = number + 77;
    current = number ? HERE : THERE;
    while (!atomic_load(&stop)) {
        CUstream stream = (CUstream)&streams[number * 2 + draw(&seed, 2)];
        /* Often a chunk or two, sometimes much, across blocks. */
        size_t first = draw(&seed, (unsigned)memory_size / 8) * 8;
        size_t size = 8 + 8 * draw(&seed, draw(&seed, 4) ? CHUNK / 4 : CHUNK * 2);
        size = size < memory_size - first ? size : memory_size - first;
        CUdeviceptr to = (CUdeviceptr)memory + first;
        struct phos_touches touches = {.stream = stream, .list = touches.inline_list, .count = 2,
                                       .capacity = PHOS_TOUCHES_INLINE, .host_copy = !draw(&seed, 4)};
        touches.list[0] = (struct phos_touch){.address = to, .size = size, .access = PHOS_WRITES};
        CUdeviceptr other = (CUdeviceptr)memory + draw(&seed, (unsigned)memory_size - 8);
        touches.list[1] = (struct phos_touch){.address = other, .size = 8, .access = PHOS_READS};
        phos_window_before(&touches);
        enqueue(stream, (struct work){.kind = KERNEL, .to = (char *)to, .size = size,
                                      .value = draw(&seed, 1000)});
        phos_window_after(&touches, CUDA_SUCCESS);
        atomic_fetch_add(&launches, 1);
        if (!draw(&seed, 50))
            phos_window_context_may_end(draw(&seed, 2) ? HERE : THERE);
        if (!draw(&seed, 8))
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    return NULL;
}

/* ---- copiers ---- */

static struct phos_shadow_pool *pool;
static pthread_mutex_t take_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static uint32_t *order, cursor, head, given_count;
static bool *given;
static uint64_t copier_seed;

struct piece {
    uint32_t chunk;
    size_t size;
    int64_t slot;
    const char *from;
};

static bool give(uint32_t chunk, int64_t slot, struct piece *piece)
{
    size_t size;
    const char *from = chunk_address(chunk, &size);
    if (slot >= 0)
        from = (const char *)phos_slot_address(pool, (uint32_t)slot);
    check(!given[chunk], "a chunk is saved twice");
    given[chunk] = true;
    given_count++;
    *piece = (struct piece){chunk, size, slot, from};
    return true;
}

static bool take(struct piece *piece)
{
    int64_t wanted;
    while ((wanted = phos_window_next(&view, &head)) >= 0) {
        if (given[wanted])
            continue;
        if (phos_chunks_claim(phos_window.chunks, (uint32_t)wanted) == PHOS_CHUNK_UNSAVED)
            return give((uint32_t)wanted, -1, piece);
    }
    for (uint32_t i = 0; i < chunk_count; i++) {
        uint32_t chunk = i, state = phos_chunks_state(phos_window.chunks, chunk);
        if (given[chunk] || state < PHOS_CHUNK_SHADOWED || (state & 0xffff) == PHOS_SLOT_NONE)
            continue;
        uint32_t slot = state & 0xffff;
        uint32_t *flag = (uint32_t *)pool->address + slot;
        if (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == phos_window_ticket(&view, slot))
            return give(chunk, slot, piece);
    }
    if (draw(&copier_seed, 3))
        return false; /* slower than the application */
    while (cursor < chunk_count) {
        uint32_t chunk = order[cursor++];
        if (phos_chunks_claim(phos_window.chunks, chunk) == PHOS_CHUNK_UNSAVED)
            return give(chunk, -1, piece);
    }
    for (uint32_t i = 0; i < chunk_count; i++) /* what was taken and given back */
        if (!given[i] && phos_chunks_claim(phos_window.chunks, i) == PHOS_CHUNK_UNSAVED)
            return give(i, -1, piece);
    return false;
}

static void *copy_out(void *unused)
{
    for (;;) {
        struct piece piece;
        pthread_mutex_lock(&take_lock);
        bool done = given_count == chunk_count, found = !done && take(&piece);
        pthread_mutex_unlock(&take_lock);
        if (done)
            return unused;
        if (!found) {
            nanosleep(&(struct timespec){.tv_nsec = 30000}, NULL);
            continue;
        }
        memcpy(image + (size_t)piece.chunk * CHUNK, piece.from, piece.size);
        phos_chunks_saved(phos_window.chunks, piece.chunk);
        if (piece.slot >= 0)
            phos_window_free_slot(&view, (uint32_t)piece.slot);
    }
}

/* ---- windows ---- */

static void wait_idle(void)
{
    pthread_mutex_lock(&gpu_lock);
    for (int s = 0; s <= STREAMS; s++)
        while (streams[s].head != streams[s].tail)
            pthread_cond_wait(&gpu_changed, &gpu_lock);
    pthread_mutex_unlock(&gpu_lock);
}

static struct phos_window_counts total;
static unsigned char *noted; /* what the list of first touches has said of each chunk */
static uint64_t all_touched, all_written; /* in one window the copiers may have been done before a thread of the application ran */

static void window(uint32_t slots)
{
    uint32_t queue = chunk_count * 4;
    size_t size = phos_window_size(0, 1, slots, queue, chunk_count * 2);
    uint64_t pool_bytes = PHOS_POOL_FLAGS + (uint64_t)slots * CHUNK;
    phos_window.chunks = calloc(1, phos_chunks_size(chunk_count));
    phos_window.table = calloc(1, size);
    phos_chunks_begin(phos_window.chunks, CHUNK, chunk_count);
    table_begin(&view, phos_window.table, 5, 0, 1, slots, queue, chunk_count * 2, 1, PHOS_WINDOW_COW);
    phos_window.seen = calloc(chunk_count / 64 + 1, sizeof *phos_window.seen);
    phos_window.written = calloc(chunk_count / 64 + 1, sizeof *phos_window.written);
    phos_window.unwritten = chunk_count;
    phos_window_set_pool(phos_window.table, 0, 0, 0, slots, pool_bytes);
    phos_window.slots = calloc(slots + PHOS_TRANSFERS, sizeof *phos_window.slots);
    pool = &phos_window.pools[0];
    *pool = (struct phos_shadow_pool){.address = (CUdeviceptr)aligned_alloc(CHUNK, pool_bytes), .size = pool_bytes,
                                      .slots = slots};
    memset((void *)pool->address, 0, PHOS_POOL_FLAGS);
    for (uint32_t i = 0; i < chunk_count; i++) {
        size_t bytes;
        const char *from = chunk_address(i, &bytes);
        memcpy(original + (size_t)i * CHUNK, from, bytes);
        order[i] = (i * 31 + 7) % chunk_count;
    }
    memset(given, 0, chunk_count);
    cursor = head = given_count = 0;
    atomic_store(&stop, false);
    pthread_t threads[THREADS], copiers[COPIERS];
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, compute, (void *)i);
    for (int i = 0; i < COPIERS; i++)
        pthread_create(&copiers[i], NULL, copy_out, NULL);
    for (int i = 0; i < COPIERS; i++)
        pthread_join(copiers[i], NULL);
    phos_chunks_close(phos_window.chunks);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    wait_idle();
    check(!memcmp(image, original, (size_t)chunk_count * CHUNK), "what was saved is not what was there");
    uint32_t touched = 0;
    check(!phos_window.table->transferring, "a transfer has not ended");
    uint32_t free_of = phos_window_transferring(&view, 0, slots, (const uint32_t *)pool->address);
    check(!(free_of & 1), "a transfer is said to be under way");
    total.shadowed += phos_window.table->counts.shadowed;
    total.waits += phos_window.table->counts.waits;
    total.stream_waits += phos_window.table->counts.stream_waits;
    total.failures += phos_window.table->counts.failures;
    unsigned had = atomic_load(&events);
    phos_window_context_ends(ELSEWHERE, false);
    check(atomic_load(&events) == had && !pool->copies == !atomic_load(&copying), "a context took another's along");
    phos_window_context_ends(HERE, false);
    phos_window_context_ends(THERE, false);
    check(!atomic_load(&events) && !pool->copies && !atomic_load(&copying), "a context left something behind");
    for (struct event *event = destroyed, *next; event; event = next) {
        next = event->next;
        free(event);
    }
    destroyed = NULL;
    free((void *)pool->address);
    memset(noted, 0, chunk_count);
    for (int64_t touch; (touch = phos_window_next_touched(&view, &touched)) >= 0;) {
        uint32_t chunk = (uint32_t)touch & ~PHOS_TOUCH_WRITES;
        bool writes = (uint32_t)touch & PHOS_TOUCH_WRITES;
        check(chunk < chunk_count, "a chunk that there is not is touched");
        enum { TOUCHED = 1, WRITTEN } now = writes ? WRITTEN : TOUCHED;
        check(noted[chunk] < now, "a chunk is touched, or written to, for the first time twice");
        noted[chunk] = (unsigned char)now;
        all_written += writes;
    }
    all_touched += touched;
    free(phos_window.seen);
    free(phos_window.written);
    free(phos_window.slots);
    free(phos_window.table);
    free(phos_window.chunks);
    phos_window = (struct phos_window){0};
}

/* Random ranges over several words: each chunk comes once when it is first touched, once more when it is first written to
 * after that, in order of its number within a range. */
static void note_ranges(void)
{
    enum { CHUNKS = 300, NOTES = 200 };
    unsigned char said[CHUNKS] = {0};
    uint32_t expected[CHUNKS * 2], count = 0, unwritten = CHUNKS;
    uint64_t seed = 5;
    phos_window.table = calloc(1, phos_window_size(0, 0, 0, 0, CHUNKS * 2));
    table_begin(&view, phos_window.table, 5, 0, 0, 0, 0, CHUNKS * 2, 1, PHOS_WINDOW_COW);
    phos_window.seen = calloc(CHUNKS / 64 + 1, sizeof *phos_window.seen);
    phos_window.written = calloc(CHUNKS / 64 + 1, sizeof *phos_window.written);
    phos_window.unwritten = CHUNKS;
    for (int i = 0; i < NOTES; i++) {
        uint32_t first = draw(&seed, CHUNKS), most = i % 4 ? 3 : CHUNKS - first + 1;
        uint32_t end = first + draw(&seed, most < CHUNKS - first + 1 ? most : CHUNKS - first + 1);
        bool writes = draw(&seed, 2);
        for (uint32_t chunk = first; chunk < end; chunk++)
            if (said[chunk] < 1 + writes) {
                said[chunk] = 1 + writes;
                unwritten -= writes;
                expected[count++] = chunk | (writes ? PHOS_TOUCH_WRITES : 0);
            }
        phos_window_note((struct phos_chunk_range){first, end}, writes);
    }
    uint32_t at = 0;
    for (int64_t touch; (touch = phos_window_next_touched(&view, &at)) >= 0;)
        check(at <= count && expected[at - 1] == (uint32_t)touch, "first touches are not in order");
    check(at == count && count > CHUNKS, "first touches are missing");
    check(phos_window.unwritten == unwritten, "chunks that were not written to are miscounted");
    free(phos_window.seen);
    free(phos_window.written);
    free(phos_window.table);
    phos_window = (struct phos_window){0};
}

/* Several threads are only watched: what they touch is noted, and nothing is done about it. */
static void watch(void)
{
    phos_window.chunks = calloc(1, phos_chunks_size(chunk_count));
    phos_window.table = calloc(1, phos_window_size(0, 0, 0, 0, chunk_count * 2));
    phos_chunks_begin(phos_window.chunks, CHUNK, chunk_count);
    table_begin(&view, phos_window.table, 5, 0, 0, 0, 0, chunk_count * 2, 0, PHOS_WINDOW_WATCH);
    phos_window.seen = calloc(chunk_count / 64 + 1, sizeof *phos_window.seen);
    phos_window.written = calloc(chunk_count / 64 + 1, sizeof *phos_window.written);
    phos_window.unwritten = chunk_count;
    uint64_t before = atomic_load(&launches);
    atomic_store(&stop, false);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, compute, (void *)i);
    while (atomic_load(&launches) < before + 100)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    struct phos_touches anywhere = {.list = anywhere.inline_list, .anything = PHOS_READS | PHOS_WRITES};
    phos_window_before(&anywhere); /* waits for nobody: nobody saves anything */
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    wait_idle();
    const struct phos_window_counts *counts = &phos_window.table->counts;
    check(counts->calls > 100 && !counts->shadowed && !counts->waits && !counts->anything, "who is watched was disturbed");
    for (uint32_t i = 0; i < chunk_count; i++)
        check(phos_chunks_state(phos_window.chunks, i) == PHOS_CHUNK_UNSAVED, "a chunk of who is watched was taken");
    uint32_t touched = 0, written = 0;
    for (int64_t touch; (touch = phos_window_next_touched(&view, &touched)) >= 0;)
        written += ((uint32_t)touch & PHOS_TOUCH_WRITES) != 0;
    check(touched && written && phos_window.unwritten == chunk_count - written, "what was seen was not noted");
    free(phos_window.seen);
    free(phos_window.written);
    free(phos_window.table);
    free(phos_window.chunks);
    phos_window = (struct phos_window){0};
}

/* What the frontend has besides; here is no library and no twin. */
atomic_uint phos_twin_kernels;

void phos_control_kick(void)
{
}

/* No touch here is through a table. */
bool phos_touches_through(const struct phos_touches *touches, uint32_t access)
{
    (void)touches, (void)access;
    return false;
}

void phos_window_follow(struct phos_touches *touches, uint32_t access, bool rested)
{
    (void)touches, (void)access, (void)rested;
}

const char *phos_library_call(void)
{
    return NULL;
}

int main(int count, char **words)
{
    if (count != 5)
        return 2;
    phos_real.cuMemcpyDtoDAsync_v2 = fake_copy;
    phos_real.cuMemsetD32Async = fake_set;
    phos_real.cuEventCreate = fake_event_create;
    phos_real.cuEventDestroy_v2 = fake_event_destroy;
    phos_real.cuEventRecord = fake_record;
    phos_real.cuStreamWaitEvent = fake_wait;
    phos_real.cuStreamCreate = fake_stream_create;
    phos_real.cuStreamDestroy_v2 = fake_stream_destroy;
    phos_real.cuStreamSynchronize = fake_synchronize;
    phos_real.cuCtxPushCurrent_v2 = fake_push;
    phos_real.cuCtxPopCurrent_v2 = fake_pop;
    note_ranges();
    make_memory();
    order = calloc(chunk_count, sizeof *order);
    given = calloc(chunk_count, sizeof *given);
    noted = calloc(chunk_count, sizeof *noted);
    check(chunk_count % 31 != 0, "the order has every chunk once");
    copier_seed = strtoull(words[3], NULL, 10);
    for (unsigned s = 0; s <= STREAMS; s++) {
        streams[s].number = s;
        pthread_create(&streams[s].thread, NULL, run_stream, &streams[s]);
    }
    watch();
    for (int round = 0; round < atoi(words[1]); round++) {
        atomic_store(&failing, round % 2 ? (unsigned)atoi(words[4]) : 0u);
        window((uint32_t)atoi(words[2]));
    }
    pthread_mutex_lock(&gpu_lock);
    for (int s = 0; s <= STREAMS; s++)
        streams[s].end = true;
    pthread_cond_broadcast(&gpu_changed);
    pthread_mutex_unlock(&gpu_lock);
    for (int s = 0; s <= STREAMS; s++)
        pthread_join(streams[s].thread, NULL);
    check(all_written && all_written < all_touched, "nothing was written to, or nothing read before it was");
    printf("%llu launches, %llu shadowed, %llu waits, %llu stream_waits, %llu failures\n",
           (unsigned long long)atomic_load(&launches), (unsigned long long)total.shadowed, (unsigned long long)total.waits,
           (unsigned long long)total.stream_waits, (unsigned long long)total.failures);
    return 0;
}
