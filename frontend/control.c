/* The control thread: answers phosd, tells it of memory as it comes and goes. See wire.proto for the messages, and
 * hold.c for what it does while detached.
 *
 * It is the only thread that touches the connection. Others leave word (a block's number, a question) under a lock and
 * wake it through an eventfd that lives as long as the connection: between connections, and so whenever CRIU may look,
 * the frontend holds no descriptor at all. */
#include "control.h"
#include "cleanup.h"
#include "detach.h"
#include "gate.h"
#include "hold.h"
#include "log.h"
#include "memory.h"
#include "module.h"
#include "pool.h"
#include "runtime.h"
#include "track.h"
#include "wire_link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef PHOS_VERSION
#define PHOS_VERSION "0.1.0"
#endif

/* The control thread's own. */
static Phos__Wire__GateState state = PHOS__WIRE__GATE_STATE__OPEN;
static int link_fd = -1;
static dev_t link_device; /* which socket link_fd is: an application may close descriptors that are not its own */
static ino_t link_inode;
static struct phos_packet stash[8]; /* packets that came while the gate was closing */
static size_t stashed;
static struct phos_error attach_error;
static uint64_t uncarried_told;
static uint64_t last_report_ns;
static struct {
    uint64_t count, bytes;
} told[PHOS_UNCARRIED_KINDS];

/* Guarded by phos_memory_lock. */
static uint64_t connection;      /* 0: none; grows with each */
static uint64_t last_connection;
static uint64_t *fresh, *gone;   /* numbers of blocks to tell of */
static size_t fresh_count, fresh_capacity, gone_count, gone_capacity;
static uint64_t gone_told_ns;

static atomic_bool nobody_there; /* the last attempt to connect failed */
static _Atomic int wake_fd = -1;
static atomic_bool wake_set; /* the eventfd is readable: no need to write again */

struct question {
    uint64_t id;
    uint8_t session[16];
    uint64_t block;
    bool asked, answered;
    int descriptor;
    size_t size;
    CUdevice device;
    char error[160];
    struct question *next;
};
static pthread_mutex_t question_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list and what is in it; taken last */
static pthread_cond_t question_answered = PTHREAD_COND_INITIALIZER;
static struct question *questions;
static uint64_t last_question;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
}

void phos_control_kick(void)
{
    int descriptor = atomic_load(&wake_fd);
    if (descriptor < 0 || atomic_exchange(&wake_set, true))
        return;
    uint64_t one = 1;
    if (write(descriptor, &one, sizeof one) < 0) {
        /* Full (it is readable then) or closed by the application: the thread looks by itself now and then. */
    }
}

static bool push(uint64_t **list, size_t *count, size_t *capacity, uint64_t value)
{
    if (*count == *capacity) {
        size_t grown = *capacity ? *capacity * 2 : 64;
        uint64_t *moved = realloc(*list, grown * sizeof **list);
        if (!moved)
            return false;
        *list = moved;
        *capacity = grown;
    }
    (*list)[(*count)++] = value;
    return true;
}

void phos_control_block_new(struct phos_block *block)
{
    if (!connection)
        return; /* connecting tells of every block there is */
    if (!push(&fresh, &fresh_count, &fresh_capacity, block->id))
        phos_warn_once("out of host memory: phosd was not told of a block");
    phos_control_kick();
}

void phos_control_block_gone(struct phos_block *block)
{
    if (!connection || block->registered != connection)
        return;
    if (!push(&gone, &gone_count, &gone_capacity, block->id))
        phos_warn_once("out of host memory: phosd keeps memory that was freed");
    phos_control_kick();
}

uint64_t phos_control_owed(void)
{
    return gone_count + (now_ns() - gone_told_ns < 200000000u);
}

bool phos_control_wait_registered(uint64_t id, unsigned timeout_ms)
{
    for (unsigned waited = 0; waited < timeout_ms * 5; waited++) {
        {
            PHOS_LOCKED(&phos_memory_lock);
            struct phos_block *block = phos_block_find(id);
            if (!block || (!connection && atomic_load(&nobody_there)))
                return false;
            if (connection && block->registered == connection)
                return true;
        }
        phos_control_kick();
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return false;
}

/* ---- sending ---- */

static bool link_ours(void)
{
    struct stat now;
    return link_fd >= 0 && fstat(link_fd, &now) == 0 && now.st_dev == link_device && now.st_ino == link_inode;
}

static bool send_with(Phos__Wire__Envelope *envelope, const int *descriptors, size_t count)
{
    return link_ours() && phos_link_send(link_fd, envelope, descriptors, count);
}

#define ENVELOPE(name, number, which, field, body) \
    Phos__Wire__Envelope name = PHOS__WIRE__ENVELOPE__INIT; \
    name.id = number; \
    name.body_case = PHOS__WIRE__ENVELOPE__BODY_##which; \
    name.field = body

static bool tell_block(uint64_t id)
{
    Phos__Wire__BlockAdded added = PHOS__WIRE__BLOCK_ADDED__INIT;
    CUmemGenericAllocationHandle handle;
    bool exportable;
    uint8_t owner[16];
    struct phos_block *block;
    {
        PHOS_LOCKED(&phos_memory_lock);
        block = phos_block_find(id);
        if (!block || block->registered == connection)
            return true;
        block->pins++;
        handle = block->handle;
        exportable = !block->imported && !block->attached_once && handle;
        added.block = id;
        added.size = block->size;
        added.device = (uint32_t)(block->device < 0 ? 0 : block->device);
        added.owner = block->owner == PHOS_OWNER_FRONTEND ? PHOS__WIRE__BLOCK_ADDED__OWNER__FRONTEND
                                                          : PHOS__WIRE__BLOCK_ADDED__OWNER__APPLICATION;
        if (block->owner_block) {
            memcpy(owner, block->owner_session, sizeof owner);
            added.owner_session = (ProtobufCBinaryData){sizeof owner, owner};
            added.owner_block = block->owner_block;
        }
    }
    PHOS_CLOSES int descriptor = -1;
    if (exportable) {
        CUresult result = phos_real.cuMemExportToShareableHandle(&descriptor, handle,
                                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result != CUDA_SUCCESS) {
            descriptor = -1;
            phos_warn_once("a block of memory could not be exported to phosd (error %d)", (int)result);
        }
    }
    added.descriptor_lost = descriptor < 0 && !added.owner_block;
    ENVELOPE(envelope, 0, BLOCK_ADDED, block_added, &added);
    bool sent = send_with(&envelope, &descriptor, descriptor >= 0);
    PHOS_LOCKED(&phos_memory_lock);
    block->pins--;
    if (sent)
        block->registered = connection;
    if (phos_block_settle(block) != CUDA_SUCCESS)
        phos_debug("a block freed while phosd was told of it could not be released");
    return sent;
}

static bool tell_gone(void)
{
    PHOS_FREES uint64_t *list = NULL;
    size_t count;
    {
        PHOS_LOCKED(&phos_memory_lock);
        list = gone;
        count = gone_count;
        gone = NULL;
        gone_count = gone_capacity = 0;
        if (count)
            gone_told_ns = now_ns();
    }
    for (size_t i = 0; i < count; i++) {
        Phos__Wire__BlockRemoved removed = PHOS__WIRE__BLOCK_REMOVED__INIT;
        removed.block = list[i];
        ENVELOPE(envelope, 0, BLOCK_REMOVED, block_removed, &removed);
        if (!send_with(&envelope, NULL, 0))
            return false;
    }
    return true;
}

static bool tell_fresh(void)
{
    PHOS_FREES uint64_t *list = NULL;
    size_t count;
    {
        PHOS_LOCKED(&phos_memory_lock);
        list = fresh;
        count = fresh_count;
        fresh = NULL;
        fresh_count = fresh_capacity = 0;
    }
    for (size_t i = 0; i < count; i++)
        if (!tell_block(list[i]))
            return false;
    return true;
}

static bool tell_uncarried(bool now)
{
    uint64_t version = phos_uncarried_version();
    if (version == uncarried_told || (!now && now_ns() - last_report_ns < 100000000u))
        return true;
    uncarried_told = version;
    last_report_ns = now_ns();
    for (int kind = 0; kind < PHOS_UNCARRIED_KINDS; kind++) {
        Phos__Wire__Uncarried total = PHOS__WIRE__UNCARRIED__INIT;
        total.kind = (char *)phos_uncarried_names[kind];
        phos_uncarried_get(kind, &total.count, &total.bytes);
        if (total.count == told[kind].count && total.bytes == told[kind].bytes)
            continue;
        ENVELOPE(envelope, 0, UNCARRIED, uncarried, &total);
        if (!send_with(&envelope, NULL, 0))
            return false;
        told[kind].count = total.count;
        told[kind].bytes = total.bytes;
    }
    return true;
}

static bool send_module(const struct phos_module *module, int descriptor)
{
    Phos__Wire__ModuleLoaded loaded = PHOS__WIRE__MODULE_LOADED__INIT;
    loaded.entry_point = (char *)module->entry_point;
    loaded.size = module->size;
    loaded.path = module->path ? module->path : (char *)"";
    loaded.offset = module->offset;
    ENVELOPE(envelope, 0, MODULE_LOADED, module_loaded, &loaded);
    return send_with(&envelope, &descriptor, descriptor >= 0);
}

static bool ask_questions(void)
{
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next) {
        if (q->asked)
            continue;
        Phos__Wire__TokenResolve resolve = PHOS__WIRE__TOKEN_RESOLVE__INIT;
        resolve.session = (ProtobufCBinaryData){sizeof q->session, q->session};
        resolve.block = q->block;
        ENVELOPE(envelope, q->id, TOKEN_RESOLVE, token_resolve, &resolve);
        if (!send_with(&envelope, NULL, 0))
            return false;
        q->asked = true;
    }
    return true;
}

/* Everything there is to tell. `now`: totals too, however recent the last report. */
static bool tell_all(bool now)
{
    if (!ask_questions())
        return false;
    if (phos_exiting()) /* the driver may be going away: no more calls to it */
        return true;
    return tell_fresh() && tell_gone() && tell_uncarried(now) && phos_modules_tell(send_module);
}

/* ---- questions of other threads ---- */

bool phos_control_resolve(const uint8_t session[16], uint64_t block, int *descriptor, size_t *size, CUdevice *device,
                          struct phos_error *error)
{
    struct question question = {.block = block, .descriptor = -1};
    memcpy(question.session, session, sizeof question.session);
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 5;
    pthread_mutex_lock(&question_lock);
    question.id = ++last_question;
    question.next = questions;
    questions = &question;
    pthread_mutex_unlock(&question_lock);
    phos_control_kick();
    pthread_mutex_lock(&question_lock);
    while (!question.answered && pthread_cond_timedwait(&question_answered, &question_lock, &deadline) != ETIMEDOUT)
        continue;
    struct question **link = &questions;
    while (*link != &question)
        link = &(*link)->next;
    *link = question.next;
    pthread_mutex_unlock(&question_lock);
    if (!question.answered)
        return phos_fail(error, CUDA_SUCCESS, "phosd did not answer for shared memory");
    if (question.error[0])
        return phos_fail(error, CUDA_SUCCESS, "%s", question.error);
    *descriptor = question.descriptor;
    *size = question.size;
    *device = question.device;
    return true;
}

static void answer_question(struct phos_packet *packet)
{
    Phos__Wire__TokenResolved *resolved = packet->envelope->token_resolved;
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next) {
        if (q->id != packet->envelope->id || q->answered)
            continue;
        q->size = resolved->size;
        q->device = (CUdevice)resolved->device;
        snprintf(q->error, sizeof q->error, "%s", resolved->error);
        if (packet->descriptor_count) {
            q->descriptor = packet->descriptors[0];
            packet->descriptors[0] = -1;
        } else if (!q->error[0])
            snprintf(q->error, sizeof q->error, "phosd sent no descriptor for shared memory");
        q->answered = true;
    }
    pthread_cond_broadcast(&question_answered);
}

/* ---- what phosd asks ---- */

static void pump(void)
{
    if (!tell_all(false))
        return;
    struct phos_packet packet;
    while (stashed < sizeof stash / sizeof *stash && link_ours() &&
           phos_link_receive(link_fd, &packet) == PHOS_RECEIVED) {
        if (packet.envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED) {
            answer_question(&packet);
            phos_packet_free(&packet);
        } else
            stash[stashed++] = packet;
    }
}

static bool close_gate(uint64_t timeout_ns, struct phos_error *error)
{
    uint64_t start = now_ns(), spent;
    struct phos_gate_straggler who;
    for (;;) {
        /* A context cannot be synchronised while one of its streams is captured, and trying spoils the capture: captures
         * are short, let them end. */
        while (phos_captures() && (spent = now_ns() - start) < timeout_ns) {
            pump();
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
        if (phos_captures())
            return phos_fail(error, CUDA_SUCCESS, "a stream capture did not end in time");
        spent = now_ns() - start;
        if (!phos_gate_close(spent < timeout_ns ? timeout_ns - spent : 0, &who, pump))
            return phos_fail(error, CUDA_SUCCESS, "thread %d did not leave %s in time", (int)who.tid,
                             who.entry < PHOS_API_COUNT ? phos_api_rows[who.entry].symbol : "the driver");
        if (!phos_captures())
            return true;
        phos_gate_open(); /* one began meanwhile */
    }
}

static bool on_quiesce(uint64_t id, const Phos__Wire__Quiesce *quiesce)
{
    Phos__Wire__QuiesceDone done = PHOS__WIRE__QUIESCE_DONE__INIT;
    struct phos_error error = {0};
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&error, CUDA_SUCCESS, "the process is detached already");
    else if (phos_exiting())
        phos_fail(&error, CUDA_SUCCESS, "the process is exiting");
    else if (state == PHOS__WIRE__GATE_STATE__OPEN) {
        uint64_t start = now_ns();
        if (close_gate((quiesce->timeout_ms ? quiesce->timeout_ms : 10000) * 1000000ull, &error)) {
            uint64_t closed = now_ns();
            done.gate_ns = closed - start;
            if (phos_quiesce(&error)) {
                done.synchronize_ns = now_ns() - closed;
                state = PHOS__WIRE__GATE_STATE__QUIESCED;
                if (!tell_all(true))
                    return false;
            } else
                phos_gate_open();
        }
    }
    done.error = error.text;
    phos_debug("quiesce: %s, gate %.3f ms, synchronise %.3f ms", error.text[0] ? error.text : "done",
               (double)done.gate_ns / 1e6, (double)done.synchronize_ns / 1e6);
    ENVELOPE(envelope, id, QUIESCE_DONE, quiesce_done, &done);
    return send_with(&envelope, NULL, 0);
}

static void drop_link(void)
{
    int wake = atomic_exchange(&wake_fd, -1);
    if (wake >= 0)
        close(wake);
    if (link_ours())
        close(link_fd);
    link_fd = -1;
    while (stashed)
        phos_packet_free(&stash[--stashed]);
    PHOS_LOCKED(&phos_memory_lock);
    connection = 0;
    fresh_count = gone_count = 0;
}

/* Answers whether to go on with this connection. */
static bool on_detach(uint64_t id, const Phos__Wire__Detach *detach)
{
    Phos__Wire__DetachDone done = PHOS__WIRE__DETACH_DONE__INIT;
    struct phos_error error = {0};
    PHOS_CLOSES int map = -1;
    if (state != PHOS__WIRE__GATE_STATE__QUIESCED)
        phos_fail(&error, CUDA_SUCCESS, "only a quiesced process can be detached");
    else {
        {
            /* Freed memory that was only kept in reserve need not be carried. */
            PHOS_LOCKED(&phos_memory_lock);
            for (int d = 0; d < phos_device_count; d++)
                phos_pool_reclaim(d);
            phos_cache_flush(-1);
        }
        if (!tell_all(true))
            return false;
        struct phos_detached taken = {0};
        map = phos_memory_map();
        if (map < 0)
            phos_fail(&error, CUDA_SUCCESS, "the memory map could not be written: %s", strerror(errno));
        else if (phos_detach(detach->reduce_stack, detach->huge_pages, &taken, &error)) {
            state = PHOS__WIRE__GATE_STATE__DETACHED;
            attach_error = (struct phos_error){0};
        }
        done.unmap_ns = taken.unmap_ns;
        done.reduce_ns = taken.reduce_ns;
        done.blocks = taken.blocks;
        done.bytes = taken.bytes;
        done.host_bytes = taken.host_bytes;
    }
    done.error = error.text;
    phos_debug("detach: %s, %llu blocks, unmap %.3f ms, reduce %.3f ms", error.text[0] ? error.text : "done",
               (unsigned long long)done.blocks, (double)done.unmap_ns / 1e6, (double)done.reduce_ns / 1e6);
    ENVELOPE(envelope, id, DETACH_DONE, detach_done, &done);
    bool sent = send_with(&envelope, &map, map >= 0 && !error.text[0]);
    return sent && state != PHOS__WIRE__GATE_STATE__DETACHED;
}

static void on_attach_blocks(struct phos_packet *packet)
{
    const Phos__Wire__AttachBlocks *blocks = packet->envelope->attach_blocks;
    if (blocks->n_block != packet->descriptor_count)
        phos_fail(&attach_error, CUDA_SUCCESS, "%zu blocks came with %zu descriptors", blocks->n_block,
                  packet->descriptor_count);
    for (size_t i = 0; i < blocks->n_block && !attach_error.text[0]; i++) {
        int descriptor = packet->descriptors[i];
        packet->descriptors[i] = -1;
        if (!phos_attach_block(blocks->block[i], descriptor, &attach_error))
            break;
    }
}

static bool on_attach(uint64_t id, const Phos__Wire__Attach *attach)
{
    Phos__Wire__AttachDone done = PHOS__WIRE__ATTACH_DONE__INIT;
    if (state != PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&attach_error, CUDA_SUCCESS, "only a detached process can be attached");
    else if (!attach_error.text[0] && phos_attach(attach->blocks, &done.map_ns, &done.undo_ns, &attach_error)) {
        state = PHOS__WIRE__GATE_STATE__QUIESCED;
        PHOS_LOCKED(&phos_memory_lock);
        for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
            b->registered = connection;
    }
    struct phos_error error = attach_error;
    attach_error = (struct phos_error){0};
    done.error = error.text;
    phos_debug("attach: %s, map %.3f ms, undo %.3f ms", error.text[0] ? error.text : "done", (double)done.map_ns / 1e6,
               (double)done.undo_ns / 1e6);
    ENVELOPE(envelope, id, ATTACH_DONE, attach_done, &done);
    return send_with(&envelope, NULL, 0);
}

static bool on_open(uint64_t id)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        done.error = (char *)"a detached process must be attached before it is opened";
    else {
        state = PHOS__WIRE__GATE_STATE__OPEN;
        phos_gate_open();
    }
    ENVELOPE(envelope, id, DONE, done, &done);
    return send_with(&envelope, NULL, 0);
}

/* Answers whether to go on with this connection. */
static bool on_welcome(const Phos__Wire__Welcome *welcome)
{
    if (state != PHOS__WIRE__GATE_STATE__DETACHED)
        return true;
    switch (welcome->action) {
    case PHOS__WIRE__WELCOME__ACTION__RETRY:
        drop_link();
        sleep_ms(welcome->retry_ms ? welcome->retry_ms : 10);
        return false;
    case PHOS__WIRE__WELCOME__ACTION__LOST:
        phos_warn("the GPU memory of this process is lost: %s; every CUDA call fails from now on", welcome->error);
        phos_gate_lose();
        return true;
    default:
        return true;
    }
}

static bool on_packet(struct phos_packet *packet)
{
    Phos__Wire__Envelope *e = packet->envelope;
    switch (e->body_case) {
    case PHOS__WIRE__ENVELOPE__BODY_WELCOME:
        return on_welcome(e->welcome);
    case PHOS__WIRE__ENVELOPE__BODY_QUIESCE:
        return on_quiesce(e->id, e->quiesce);
    case PHOS__WIRE__ENVELOPE__BODY_DETACH:
        return on_detach(e->id, e->detach);
    case PHOS__WIRE__ENVELOPE__BODY_ATTACH_BLOCKS:
        on_attach_blocks(packet);
        return true;
    case PHOS__WIRE__ENVELOPE__BODY_ATTACH:
        return on_attach(e->id, e->attach);
    case PHOS__WIRE__ENVELOPE__BODY_OPEN:
        return on_open(e->id);
    case PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED:
        answer_question(packet);
        return true;
    default: /* a newer phosd's; a Done that nobody waits for */
        return true;
    }
}

/* ---- the connection ---- */

static bool say_hello(uint64_t blocks)
{
    Phos__Wire__Hello hello = PHOS__WIRE__HELLO__INIT;
    static char executable[512];
    if (!executable[0]) {
        ssize_t length = readlink("/proc/self/exe", executable, sizeof executable - 1);
        executable[length > 0 ? length : 0] = 0;
    }
    Phos__Wire__Device devices[PHOS_DEVICES], *pointers[PHOS_DEVICES];
    for (int d = 0; d < phos_device_count; d++) {
        devices[d] = (Phos__Wire__Device)PHOS__WIRE__DEVICE__INIT;
        devices[d].ordinal = (uint32_t)d;
        devices[d].uuid = (ProtobufCBinaryData){16, phos_devices[d].uuid};
        pointers[d] = &devices[d];
    }
    hello.session = (ProtobufCBinaryData){sizeof phos_session, phos_session};
    hello.protocol = 1;
    hello.pid = getpid();
    hello.state = state;
    hello.executable = executable;
    hello.driver_version = (uint32_t)phos_driver_version;
    hello.n_devices = (size_t)phos_device_count;
    hello.devices = pointers;
    hello.blocks = blocks;
    hello.frontend_version = (char *)PHOS_VERSION;
    /* A request: Welcome is its reply. */
    ENVELOPE(envelope, 1, HELLO, hello, &hello);
    return send_with(&envelope, NULL, 0);
}

/* Every block there is now, pinned, so that exactly as many BlockAdded follow as Hello says. */
static uint64_t *pin_all(size_t *count)
{
    PHOS_LOCKED(&phos_memory_lock);
    connection = ++last_connection;
    fresh_count = gone_count = 0;
    *count = 0;
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        return NULL; /* phosd has them */
    size_t there = 0;
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
        there++;
    uint64_t *list = malloc((there + 1) * sizeof *list);
    for (struct phos_block *b = phos_blocks.next; list && b != &phos_blocks; b = b->next) {
        b->pins++;
        list[(*count)++] = b->id;
    }
    return list;
}

static bool introduce(void)
{
    size_t count;
    PHOS_FREES uint64_t *list = pin_all(&count);
    bool ok = say_hello(count);
    for (size_t i = 0; i < count; i++) {
        ok = ok && !phos_exiting() && tell_block(list[i]);
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = phos_block_find(list[i]);
        block->pins--;
        if (phos_block_settle(block) != CUDA_SUCCESS)
            phos_debug("a block freed while phosd was told of it could not be released");
    }
    memset(told, 0, sizeof told);
    uncarried_told = 0;
    phos_modules_untell();
    PHOS_LOCKED(&question_lock);
    for (struct question *q = questions; q; q = q->next)
        q->asked = false;
    return ok;
}

static bool take_link(int link)
{
    struct stat now;
    int low = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int wake = low >= 0 ? fcntl(low, F_DUPFD_CLOEXEC, 512) : -1;
    if (wake >= 0)
        close(low);
    else
        wake = low;
    if (wake < 0 || fstat(link, &now)) {
        if (wake >= 0)
            close(wake);
        close(link);
        return false;
    }
    link_fd = link;
    link_device = now.st_dev;
    link_inode = now.st_ino;
    atomic_store(&wake_set, false);
    atomic_store(&wake_fd, wake);
    return true;
}

/* Until the connection ends, by either side. */
static void serve_connection(void)
{
    bool going = introduce();
    while (going) {
        bool detached = state == PHOS__WIRE__GATE_STATE__DETACHED;
        if (!detached && !tell_all(false))
            break;
        int wake = atomic_load(&wake_fd);
        struct pollfd polled[2] = {{.fd = link_fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
        /* Totals reported at most ten times a second; and a look every two seconds in case a wake-up got lost. */
        bool later = !detached && phos_uncarried_version() != uncarried_told;
        if (poll(polled, 2, later ? 100 : 2000) < 0 && errno != EINTR)
            break;
        if (!link_ours() || polled[0].revents & POLLNVAL)
            break;
        if (polled[1].revents & POLLIN) {
            uint64_t ignored;
            if (read(wake, &ignored, sizeof ignored) < 0) {
                /* Somebody else's by now; it is made anew with the next connection. */
            }
            atomic_store(&wake_set, false);
        }
        for (;;) {
            struct phos_packet packet;
            if (stashed) {
                packet = stash[0];
                memmove(stash, stash + 1, --stashed * sizeof *stash);
            } else {
                enum phos_received received = phos_link_receive(link_fd, &packet);
                if (received != PHOS_RECEIVED) {
                    going = received == PHOS_RECEIVED_NOTHING;
                    break;
                }
            }
            going = on_packet(&packet);
            phos_packet_free(&packet);
            if (!going)
                break;
        }
    }
    drop_link();
    if (state == PHOS__WIRE__GATE_STATE__QUIESCED) {
        /* phosd is gone, and everything is mapped: the application goes on. */
        state = PHOS__WIRE__GATE_STATE__OPEN;
        phos_gate_open();
    }
}

static void *control_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "phos");
    phos_gate_exempt_self();
    /* Our driver calls must neither fail because some thread captures a stream nor spoil its capture. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    phos_real.cuThreadExchangeStreamCaptureMode(&mode);
    for (;;) {
        int link = state == PHOS__WIRE__GATE_STATE__DETACHED ? phos_hold_wait() : phos_link_connect(phos_hold_socket());
        atomic_store(&nobody_there, link < 0);
        if (link >= 0 && take_link(link))
            serve_connection();
        else
            sleep_ms(100);
    }
    return NULL;
}

void phos_control_start(void)
{
    phos_hold_init();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    int error = pthread_create(&thread, &attributes, control_main, NULL);
    if (error) { /* thread-local storage of large programs does not fit a small stack */
        pthread_attr_setstacksize(&attributes, 8 << 20);
        error = pthread_create(&thread, &attributes, control_main, NULL);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        phos_warn("no control thread (%s): this process cannot be checkpointed by PhOS", strerror(error));
}

void phos_control_forked(void)
{
    int wake = atomic_exchange(&wake_fd, -1);
    if (wake >= 0)
        close(wake);
    if (link_ours())
        close(link_fd);
    link_fd = -1;
    connection = 0;
    pthread_mutex_init(&question_lock, NULL);
    questions = NULL;
}
