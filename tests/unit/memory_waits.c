/* The frontend over a driver of this file's own, with its control thread and a phosd that only listens: who unmaps what was
 * freed, and when; and when blocks are told of. The argument names the case. */
#include "blocks.h"
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "memory.h"
#include "patience.h"
#include "pool.h"
#include "runtime.h"
#include "stub_driver.h"
#include "wire_link.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define MiB ((size_t)1 << 20)
#define TOTAL ((size_t)64 << 30)
#define SIZE (40 * MiB)
#define KEPT (100 * MiB) /* two of them */
#define MANY 200
#define LONG_MS 20000

static atomic_uint creates, refused, unmaps, unmaps_here, exports, writes, told;
static _Atomic size_t taken, limit = TOTAL;
static atomic_uint unmap_us;
static atomic_bool quiesced, opened;
static _Atomic int peer = -1;
static size_t sizes[4096];
static bool with_phosd = true;
static pid_t application;

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    (void)flags;
    if (properties->allocFlags.gpuDirectRDMACapable) {
        refused++;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (size > limit - taken)
        return CUDA_ERROR_OUT_OF_MEMORY;
    taken += size;
    *handle = ++creates;
    sizes[*handle % 4096] = size;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    taken -= sizes[handle % 4096];
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t size)
{
    (void)at, (void)size;
    if (unmap_us)
        usleep(unmap_us);
    unmaps++;
    unmaps_here += gettid() == application;
    return CUDA_SUCCESS;
}

static CUresult export(void *descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long flags)
{
    (void)handle, (void)type, (void)flags;
    *(int *)descriptor = memfd_create("block", MFD_CLOEXEC);
    exports++;
    return CUDA_SUCCESS;
}

static CUresult current(CUcontext *context)
{
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

static CUresult done(void)
{
    return CUDA_SUCCESS;
}

static CUresult pushed(CUcontext context)
{
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult no_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = (CUevent)8; /* as the driver may */
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult destroy_event(CUevent event)
{
    (void)event;
    fprintf(stderr, "an event is destroyed that was never made\n");
    exit(1);
}

static CUresult no_primary(CUdevice device, unsigned int *flags, int *active)
{
    (void)device;
    *flags = *active = 0;
    return CUDA_SUCCESS;
}

/* The frontend's too: how often it wakes its control thread. */
ssize_t write(int descriptor, const void *bytes, size_t count)
{
    writes += count == sizeof(uint64_t) && gettid() == application;
    return syscall(SYS_write, descriptor, bytes, count);
}

static void check(bool good, const char *what, int line)
{
    if (good)
        return;
    fprintf(stderr, "line %d: not so: %s\n", line, what);
    fprintf(stderr, "%u creates, %u unmaps, %u of them by the application, %u exports, %u told, %zu bytes taken\n",
            creates, unmaps, unmaps_here, exports, told, taken);
    exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

/* Waits until it holds. */
#define EVENTUALLY(condition) \
    do { \
        for (uint64_t end_ = phos_now_ns() + LONG_MS * 1000000ull; !(condition) && phos_now_ns() < end_;) \
            phos_sleep_ms(1); \
        CHECK(condition); \
    } while (0)

static CUdeviceptr allocate(size_t size)
{
    CUdeviceptr at = 0;
    CHECK(serve_cuMemAlloc_v2(&at, size) == CUDA_SUCCESS);
    return at;
}

static void give_back(CUdeviceptr at)
{
    CHECK(serve_cuMemFree_v2(at) == CUDA_SUCCESS);
}

static size_t kept(void)
{
    PHOS_LOCKED(&phos_memory_lock);
    return phos_cache_bytes(0);
}

/* ---- a phosd ---- */

static void *listens(void *listener)
{
    int link = accept((int)(intptr_t)listener, NULL, NULL);
    peer = link;
    struct phos_packet packet;
    for (;;) {
        enum phos_received received = phos_link_receive(link, &packet);
        if (received == PHOS_RECEIVED_END)
            return NULL;
        if (received == PHOS_RECEIVED_NOTHING) {
            poll(&(struct pollfd){.fd = link, .events = POLLIN}, 1, 1000);
            continue;
        }
        Phos__Wire__Envelope__BodyCase body = packet.envelope->body_case;
        told += body == PHOS__WIRE__ENVELOPE__BODY_BLOCK_ADDED;
        if (body == PHOS__WIRE__ENVELOPE__BODY_QUIESCE_DONE)
            quiesced = !packet.envelope->quiesce_done->error[0];
        if (body == PHOS__WIRE__ENVELOPE__BODY_DONE)
            opened = true;
        phos_packet_free(&packet);
    }
}

static void ask(Phos__Wire__Envelope__BodyCase body)
{
    Phos__Wire__Quiesce quiesce = PHOS__WIRE__QUIESCE__INIT;
    Phos__Wire__Open open = PHOS__WIRE__OPEN__INIT;
    Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
    envelope.id = 7;
    envelope.body_case = body;
    if (body == PHOS__WIRE__ENVELOPE__BODY_QUIESCE)
        envelope.quiesce = &quiesce;
    else
        envelope.open = &open;
    CHECK(phos_link_send(peer, &envelope, NULL, 0));
}

/* The control thread, and a phosd. */
static void begin(void)
{
    const char *path = getenv("PHOS_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (with_phosd) {
        pthread_t thread;
        int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 1) == 0);
        CHECK(pthread_create(&thread, NULL, listens, (void *)(intptr_t)listener) == 0);
    }
    phos_control_start();
    if (with_phosd) {
        EVENTUALLY(peer >= 0);
        allocate(SIZE); /* one that stays, told of: from now on it is connected */
        EVENTUALLY(told == 1);
        phos_sleep_ms(5);
    } else
        phos_sleep_ms(50); /* it looks for a phosd in vain */
}

/* ---- freeing ---- */

static void freed(void)
{
    CUdeviceptr at[MANY];
    begin();
    for (int i = 0; i < MANY; i++)
        at[i] = allocate(SIZE);
    unsigned before = unmaps, made = creates;
    uint64_t start = phos_now_ns();
    for (int i = 0; i < MANY; i++)
        give_back(at[i]);
    bool disturbed = phos_now_ns() - start > 1000000; /* by whoever else is on this machine */
    CHECK(disturbed || unmaps == before);
    CHECK(!unmaps_here);
    /* What waits is used again. */
    for (int i = 0; i < 10; i++)
        at[i] = allocate(SIZE);
    CHECK(disturbed || (creates == made && unmaps == before));
    for (int i = 0; i < 10; i++)
        give_back(at[i]);
    EVENTUALLY(kept() <= KEPT);
    phos_sleep_ms(50);
    CHECK(kept() == 2 * SIZE && taken == (2 + with_phosd) * SIZE);
    CHECK(!unmaps_here);
}

/* What is larger than the limit is not kept, and pushes out nothing that is. */
static void large(void)
{
    begin();
    CUdeviceptr small[2] = {allocate(SIZE), allocate(SIZE)}, big = allocate(KEPT + 2 * MiB);
    for (int i = 0; i < 2; i++)
        give_back(small[i]);
    give_back(big);
    CHECK(!unmaps_here);
    EVENTUALLY(unmaps == 1);
    phos_sleep_ms(50);
    CHECK(unmaps == 1 && kept() == 2 * SIZE);
}

/* A program that allocates and frees the same all the time keeps it, however large. */
static void again(void)
{
    begin();
    CUdeviceptr at = allocate(2 * KEPT);
    unsigned made = creates, woken = writes, kept_from_it = 0;
    for (uint64_t end = phos_now_ns() + 100000000u; phos_now_ns() < end;) {
        uint64_t start = phos_now_ns();
        give_back(at);
        at = allocate(2 * KEPT);
        kept_from_it += phos_now_ns() - start > PHOS_QUIET_MS * 1000000u / 2; /* by whoever else is on this machine */
    }
    CHECK(creates <= made + 1 + kept_from_it);
    CHECK(writes - woken <= 100);
    give_back(at);
    EVENTUALLY(!kept());
}

/* No more than a part of the memory waits. */
static void bounded(void)
{
    begin();
    size_t size = TOTAL / 32;
    CUdeviceptr at[30];
    for (int i = 0; i < 30; i++)
        at[i] = allocate(size);
    for (int i = 0; i < 30; i++) {
        give_back(at[i]);
        CHECK(kept() <= TOTAL / 2 + KEPT);
    }
    CHECK(unmaps >= 13);
    EVENTUALLY(!kept());
}

/* Who allocates while much is given back waits for one or two of those that are, not for all. */
static void in_between(void)
{
    CUdeviceptr at[MANY];
    begin();
    for (int i = 0; i < MANY; i++)
        at[i] = allocate(SIZE);
    unmap_us = 3000;
    for (int i = 0; i < MANY; i++)
        give_back(at[i]);
    EVENTUALLY(unmaps >= 3);
    unsigned before = unmaps;
    for (int i = 0; i < 10; i++)
        allocate(2 * MiB);
    CHECK(unmaps < MANY / 2 && unmaps <= before + 15);
    unmap_us = 0;
    EVENTUALLY(kept() <= KEPT);
}

/* Who runs out of memory gets what waits at once. */
static void short_of_memory(void)
{
    begin();
    CUdeviceptr at[MANY];
    unmap_us = 100;
    limit = (MANY + 2) * SIZE;
    for (int i = 0; i < MANY; i++)
        at[i] = allocate(SIZE);
    for (int i = 0; i < MANY; i++)
        give_back(at[i]);
    allocate(MANY / 2 * SIZE);
    CHECK(kept() <= KEPT);
}

static void nothing_kept(void)
{
    phos_policy.cache_bytes = 0;
    begin();
    give_back(allocate(SIZE));
    CHECK(unmaps_here == 1 && !kept());
}

/* No thread will come for it. */
static void no_control_thread(void)
{
    CUdeviceptr at[10];
    for (int i = 0; i < 10; i++)
        at[i] = allocate(SIZE);
    for (int i = 0; i < 10; i++) {
        give_back(at[i]);
        CHECK(kept() <= KEPT);
    }
}

/* A quiesce does not wait for everything to be given back, and with the gate closed nothing is. */
static void gate(void)
{
    CUdeviceptr at[MANY];
    begin();
    for (int i = 0; i < MANY; i++)
        at[i] = allocate(SIZE);
    unmap_us = 1000;
    ask(PHOS__WIRE__ENVELOPE__BODY_QUIESCE);
    for (int i = 0; i < MANY; i++)
        give_back(at[i]);
    EVENTUALLY(quiesced);
    unsigned before = unmaps;
    size_t waiting = kept();
    phos_sleep_ms(100);
    CHECK(unmaps == before && kept() == waiting);
    ask(PHOS__WIRE__ENVELOPE__BODY_OPEN);
    EVENTUALLY(opened && kept() == 2 * SIZE);
    CHECK(!unmaps_here);
    /* If little waits it is given back before the gate closes: a checkpoint finds nothing that is not to be kept. */
    CUdeviceptr few[12];
    unmap_us = 0;
    for (int i = 0; i < 12; i++)
        few[i] = allocate(SIZE);
    for (int i = 0; i < 12; i++)
        give_back(few[i]);
    quiesced = false;
    ask(PHOS__WIRE__ENVELOPE__BODY_QUIESCE);
    EVENTUALLY(quiesced);
    CHECK(kept() == 2 * SIZE);
}

/* ---- allocating ---- */

static void pause_us(unsigned us)
{
    for (uint64_t end = phos_now_ns() + us * 1000u; phos_now_ns() < end;)
        ;
}

/* Blocks that come one after the other, with pauses, are told of when all are there. Answers whether the machine gave this
 * thread the time to see that. */
static bool burst(void)
{
    unsigned before = exports, woken = writes;
    uint64_t start = phos_now_ns(), last = start, longest = 0;
    for (int i = 0; i < 10; i++) {
        allocate(SIZE);
        uint64_t now = phos_now_ns();
        longest = now - last > longest ? now - last : longest;
        last = now;
        bool early = exports != before;
        if (early && longest < 1700000 && now - start < 17000000)
            CHECK(!"it was told of while others came");
        pause_us(1300);
    }
    unsigned woke = writes - woken;
    bool seen = longest < 1700000 && last - start < 17000000;
    EVENTUALLY(exports >= before + 10 && told == exports);
    CHECK(!seen || woke <= 2);
    phos_sleep_ms(5);
    return seen;
}

static void bursts(void)
{
    begin();
    setpriority(PRIO_PROCESS, 0, -20); /* of this thread; whoever may not do that needs more tries */
    int seen = 0;
    for (uint64_t end = phos_now_ns() + LONG_MS * 1000000ull; seen < 3 && phos_now_ns() < end;)
        seen += burst();
    CHECK(seen);
}

/* Somebody who never rests is told of all the same. */
static void endless(void)
{
    begin();
    unsigned before = exports;
    uint64_t start = phos_now_ns();
    while (exports < before + 10 && phos_now_ns() - start < LONG_MS * 1000000ull) {
        allocate(SIZE);
        pause_us(200);
    }
    CHECK(exports >= before + 10);
}

/* ---- freeing in a stream ---- */

static enum { WORKS, FAILS, ENDS } recording; /* what becomes of it; ENDS: of its context */
static CUdeviceptr being_freed;
static bool event_lives, happened;

static CUresult usual_pool(CUmemoryPool *pool, CUdevice device)
{
    (void)device;
    *pool = (CUmemoryPool)3;
    return CUDA_SUCCESS;
}

static CUresult stream_id(CUstream stream, unsigned long long *number)
{
    *number = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

static CUresult not_its_own(CUdeviceptr at, CUstream stream)
{
    (void)at, (void)stream;
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult not_freed(CUdeviceptr at)
{
    (void)at;
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult make_event(CUevent *event, unsigned int flags)
{
    (void)flags;
    *event = (CUevent)9;
    event_lives = true;
    return CUDA_SUCCESS;
}

static CUresult ask_event(CUevent event)
{
    CHECK(event && event_lives);
    return happened ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUdeviceptr allocate_in_stream(void)
{
    CUdeviceptr at = 0;
    CHECK(serve_cuMemAllocAsync(&at, SIZE, NULL) == CUDA_SUCCESS);
    return at;
}

/* Whatever other threads do meanwhile. */
static CUresult record_event(CUevent event, CUstream stream)
{
    CHECK(event && event_lives && !stream);
    CHECK(pthread_mutex_trylock(&phos_memory_lock) == 0);
    if (recording == ENDS) {
        phos_pool_context_ends((CUcontext)1);
        phos_free_context((CUcontext)1);
        event_lives = false;
    }
    pthread_mutex_unlock(&phos_memory_lock);
    CHECK(serve_cuMemFreeAsync(being_freed, NULL) == CUDA_ERROR_INVALID_VALUE);
    CHECK(serve_cuMemFree_v2(being_freed) == CUDA_ERROR_INVALID_VALUE);
    happened = true; /* the last time it was recorded */
    CHECK(allocate_in_stream() != being_freed && allocate(SIZE) != being_freed);
    happened = false;
    return recording == FAILS ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static void freed_in_a_stream(void)
{
    phos_real.cuDeviceGetMemPool = phos_real.cuDeviceGetDefaultMemPool = usual_pool;
    phos_real.cuStreamGetId = stream_id;
    phos_real.cuMemFreeAsync = not_its_own;
    phos_real.cuMemFree_v2 = not_freed;
    phos_real.cuEventCreate = make_event;
    phos_real.cuEventRecord = record_event;
    phos_real.cuEventQuery = ask_event;
    phos_policy.carry_pools = true;
    for (int pooled = 0; pooled < 2; pooled++) {
        CUdeviceptr at = being_freed = pooled ? allocate_in_stream() : allocate(SIZE);
        recording = FAILS;
        CHECK(serve_cuMemFreeAsync(at, NULL) == CUDA_ERROR_UNKNOWN);
        recording = WORKS;
        CHECK(serve_cuMemFreeAsync(at, NULL) == CUDA_SUCCESS); /* for it still was the program's */
        CHECK(allocate(SIZE) != at);
        CHECK(allocate_in_stream() == at);
        being_freed = at = pooled ? at : allocate(SIZE);
        recording = ENDS;
        CHECK(serve_cuMemFreeAsync(at, NULL) == CUDA_SUCCESS);
        CHECK(allocate(SIZE) == at);
    }
}

static void rdma_is_refused_once(void)
{
    phos_devices[0].rdma = true;
    for (int i = 0; i < 5; i++)
        allocate(SIZE);
    CHECK(refused == 1 && creates == 5);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"freed", freed},     {"alone", freed},     {"large", large},
        {"again", again},     {"bounded", bounded}, {"short_of_memory", short_of_memory},
        {"nothing_kept", nothing_kept},             {"no_control_thread", no_control_thread},
        {"gate", gate},       {"bursts", bursts},   {"endless", endless},
        {"rdma_is_refused_once", rdma_is_refused_once}, {"in_between", in_between},
        {"freed_in_a_stream", freed_in_a_stream},
    };
    phos_real.cuMemCreate = create;
    phos_real.cuMemRelease = release;
    phos_real.cuMemAddressReserve = reserve;
    phos_real.cuMemMap = map;
    phos_real.cuMemUnmap = unmap;
    phos_real.cuMemSetAccess = set_access;
    phos_real.cuMemExportToShareableHandle = export;
    phos_real.cuCtxGetCurrent = current;
    phos_real.cuCtxGetDevice = current_device;
    phos_real.cuCtxGetApiVersion = context_version;
    phos_real.cuCtxSynchronize = done;
    phos_real.cuCtxPushCurrent_v2 = pushed;
    phos_real.cuCtxPopCurrent_v2 = current;
    phos_real.cuEventCreate = no_event;
    phos_real.cuEventDestroy_v2 = destroy_event;
    phos_real.cuDevicePrimaryCtxGetState = no_primary;
    phos_real.cuThreadExchangeStreamCaptureMode = exchanged;
    phos_policy = (struct phos_policy){.carry_device = true, .cache_set = true, .cache_bytes = KEPT};
    phos_device_count = 1;
    phos_devices[0] = (struct phos_device){.total = TOTAL, .granularity = 2 * MiB, .carried = true};
    application = gettid();
    with_phosd = argc < 2 || strcmp(argv[1], "alone");
    for (size_t i = 0; argc > 1 && i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            fflush(NULL);
            _exit(0);
        }
    fprintf(stderr, "no such case\n");
    return 2;
}
