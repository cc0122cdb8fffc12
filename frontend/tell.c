/* What phosd is told without being asked: hello, blocks as they come and go, totals, modules. Other threads leave
 * word here; only the control thread sends.
 *
 * Telling of a block is a driver call, which waits for the application's own (patience.h). What somebody waits for, and
 * what a quiesce needs, is told at once. */
#include "tell.h"
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "functions.h"
#include "held.h"
#include "log.h"
#include "module.h"
#include "patience.h"
#include "runtime.h"
#include "sdk.h"
#include "track.h"
#include "utf8.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef PHOS_VERSION
#define PHOS_VERSION "0.1.0"
#endif

/* The control thread's own. */
static uint64_t uncarried_told;
static uint64_t last_report_ns;
static struct {
    uint64_t count, bytes;
} told[PHOS_UNCARRIED_KINDS];

struct numbers {
    uint64_t *list;
    size_t count, capacity;
};

/* Guarded by phos_memory_lock. */
static uint64_t connection; /* 0: none; grows with each */
static uint64_t last_connection;
static struct numbers fresh, gone;    /* blocks to tell of */
static bool export_failed;            /* for one of those that there are; a quiesce tries again */
static uint64_t gone_ever;            /* how many were put on the second list */
static uint64_t settled;              /* as many of them phosd has let go of */
static bool settle_wanted;
static pthread_cond_t settle_changed = PTHREAD_COND_INITIALIZER;
/* Written with it, read without. */
static _Atomic uint64_t untold_since; /* in ns; 0: there is nothing to tell */

/* The control thread's own: the part of `fresh` that is being told, from `sending_at` on. */
static struct numbers sending;
static size_t sending_at;

static void push(struct numbers *numbers, uint64_t value)
{
    if (!atomic_load_explicit(&untold_since, memory_order_relaxed))
        atomic_store(&untold_since, phos_now_ns());
    if (numbers->count == numbers->capacity) {
        size_t grown = numbers->capacity ? numbers->capacity * 2 : 64;
        uint64_t *moved = realloc(numbers->list, grown * sizeof *moved);
        if (!moved) {
            phos_warn_once("out of host memory: phosd was not told of a block");
            return;
        }
        numbers->list = moved;
        numbers->capacity = grown;
    }
    numbers->list[numbers->count++] = value;
    phos_control_kick();
}

void phos_control_block_new(struct phos_block *block)
{
    if (connection) /* else connecting tells of every block there is */
        push(&fresh, block->id);
}

void phos_control_block_gone(struct phos_block *block)
{
    if (!connection || block->registered != connection)
        return;
    gone_ever++;
    push(&gone, block->id);
}

bool phos_control_settle(unsigned timeout_ms)
{
    uint64_t upto = gone_ever, mine = connection;
    if (!mine || phos_exiting() || (!phos_blocks_lingering && settled >= upto))
        return false;
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    bool lingering = phos_blocks_lingering > 0;
    int waited = 0, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* it would end with the lock held */
    while (waited != ETIMEDOUT && connection == mine && (lingering || settled < upto)) {
        settle_wanted = true;
        phos_control_hurry();
        waited = pthread_cond_timedwait(&settle_changed, &phos_memory_lock, &deadline);
        if (lingering && !phos_blocks_lingering) {
            lingering = false;
            upto = gone_ever;
        }
    }
    pthread_setcancelstate(cancel, &cancel);
    return true;
}

void phos_tell_settled(uint64_t id)
{
    PHOS_LOCKED(&phos_memory_lock);
    if (id > settled && id <= gone_ever)
        settled = id;
    pthread_cond_broadcast(&settle_changed);
}

bool phos_control_wait_registered(uint64_t id, unsigned timeout_ms)
{
    for (unsigned waited = 0; waited < timeout_ms * 5; waited++) {
        {
            PHOS_LOCKED(&phos_memory_lock);
            struct phos_block *block = phos_block_find(id);
            if (!block || (!connection && phos_tell_nobody()))
                return false;
            if (connection && block->registered == connection)
                return true;
        }
        phos_control_hurry();
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return false;
}

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
    PHOS_CLOSES_HELD int descriptor = -1;
    if (exportable) {
        /* It may fail for want of descriptors, which the application may yet close. */
        phos_held_lock();
        CUresult result = phos_real.cuMemExportToShareableHandle(&descriptor, handle,
                                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result == CUDA_SUCCESS)
            phos_held_note(descriptor);
        phos_held_unlock();
        if (result != CUDA_SUCCESS) {
            descriptor = -1;
            /* The program is ending, and its driver with it: phosd need not hear of a block that nobody can hold. */
            if (result == CUDA_ERROR_DEINITIALIZED || phos_exiting()) {
                PHOS_LOCKED(&phos_memory_lock);
                block->pins--;
                return true;
            }
            phos_warn_once("a block of memory could not be exported to phosd (error %d)", (int)result);
        }
    }
    added.descriptor_lost = descriptor < 0 && !added.owner_block;
    ENVELOPE(envelope, 0, BLOCK_ADDED, block_added, &added);
    bool sent = phos_tell_send(&envelope, &descriptor, descriptor >= 0);
    PHOS_LOCKED(&phos_memory_lock);
    block->pins--;
    if (sent)
        block->registered = connection;
    if (sent && descriptor >= 0)
        block->given = true;
    else if (exportable) {
        block->given = false;
        export_failed = true;
    }
    if (phos_block_settle(block) != CUDA_SUCCESS)
        phos_debug("a block freed while phosd was told of it could not be released");
    pthread_cond_broadcast(&settle_changed);
    return sent;
}

static bool tell_gone(void)
{
    PHOS_FREES uint64_t *list = NULL;
    size_t count;
    uint64_t upto = 0;
    {
        PHOS_LOCKED(&phos_memory_lock);
        list = gone.list;
        count = gone.count;
        gone = (struct numbers){0};
        if (!fresh.count && sending_at == sending.count)
            atomic_store(&untold_since, 0);
        if (settle_wanted)
            upto = gone_ever;
        settle_wanted = false;
    }
    for (size_t i = 0; i < count; i++) {
        Phos__Wire__BlockRemoved removed = PHOS__WIRE__BLOCK_REMOVED__INIT;
        removed.block = list[i];
        ENVELOPE(envelope, 0, BLOCK_REMOVED, block_removed, &removed);
        if (!phos_tell_send(&envelope, NULL, 0))
            return false;
    }
    if (!upto)
        return true;
    /* No block: phosd answers when it is through with those before. */
    Phos__Wire__BlockRemoved none = PHOS__WIRE__BLOCK_REMOVED__INIT;
    ENVELOPE(envelope, upto, BLOCK_REMOVED, block_removed, &none);
    return phos_tell_send(&envelope, NULL, 0);
}

/* `now`: all of them, and no pause for the application's own driver calls. */
static bool tell_fresh(bool now)
{
    uint64_t before = phos_block_changes;
    for (;;) {
        if (sending_at == sending.count) {
            free(sending.list);
            sending_at = 0;
            PHOS_LOCKED(&phos_memory_lock);
            sending = fresh;
            fresh = (struct numbers){0};
        }
        if (sending_at == sending.count)
            return true;
        if (!tell_block(sending.list[sending_at++]))
            return false;
        if (!now && phos_tell_patience() && phos_block_changes != before)
            return true; /* it allocates again */
    }
}

uint64_t phos_tell_patience(void)
{
    return phos_patience_left(atomic_load(&untold_since));
}

static bool tell_uncarried(bool now)
{
    uint64_t version = phos_uncarried_version();
    if (version == uncarried_told || (!now && phos_now_ns() - last_report_ns < 100000000u))
        return true;
    uncarried_told = version;
    last_report_ns = phos_now_ns();
    for (int kind = 0; kind < PHOS_UNCARRIED_KINDS; kind++) {
        Phos__Wire__Uncarried total = PHOS__WIRE__UNCARRIED__INIT;
        total.kind = (char *)phos_uncarried_names[kind];
        phos_uncarried_get(kind, &total.count, &total.bytes);
        if (total.count == told[kind].count && total.bytes == told[kind].bytes)
            continue;
        ENVELOPE(envelope, 0, UNCARRIED, uncarried, &total);
        if (!phos_tell_send(&envelope, NULL, 0))
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
    if (module->path)
        phos_utf8_mend(module->path); /* phosd and people read it, nobody opens it */
    loaded.path = module->path ? module->path : (char *)"";
    loaded.offset = module->offset;
    loaded.module = module->number;
    loaded.digest = module->path ? 0 : module->digest;
    if (module->path) {
        loaded.device = module->file.device;
        loaded.inode = module->file.inode;
        loaded.mtime_ns = module->file.mtime_ns;
        loaded.file_size = module->file.size;
        loaded.build_id = (ProtobufCBinaryData){module->file.build_id_size, (uint8_t *)module->file.build_id};
    }
    ENVELOPE(envelope, 0, MODULE_LOADED, module_loaded, &loaded);
    return phos_tell_send(&envelope, &descriptor, descriptor >= 0);
}

static bool send_kernels(uint64_t module, const char *const *names, size_t count)
{
    Phos__Wire__KernelsSeen seen = PHOS__WIRE__KERNELS_SEEN__INIT;
    seen.module = module;
    seen.n_kernel = count;
    seen.kernel = (char **)names;
    ENVELOPE(envelope, 0, KERNELS_SEEN, kernels_seen, &seen);
    return phos_tell_send(&envelope, NULL, 0);
}

void phos_tell_again(void)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (struct phos_block *b = phos_blocks.next; export_failed && b != &phos_blocks; b = b->next)
        if (!b->given && !b->owner_block && b->registered) {
            b->registered = 0;
            push(&fresh, b->id);
        }
    export_failed = false;
}

/* Everything there is to tell. `now`: totals too, however recent the last report. */
bool phos_tell_all(bool now)
{
    if (!phos_ask_all() || !phos_sdk_tell())
        return false;
    if (phos_exiting()) /* the driver may be going away: no more calls to it */
        return true;
    return tell_fresh(now) && tell_gone() && tell_uncarried(now) && phos_modules_tell(send_module) &&
           phos_kernels_tell(phos_modules_told(), send_kernels);
}

size_t phos_tell_devices(struct phos_told_devices *devices)
{
    for (int d = 0; d < phos_device_count; d++) {
        devices->device[d] = (Phos__Wire__Device)PHOS__WIRE__DEVICE__INIT;
        devices->device[d].ordinal = (uint32_t)d;
        devices->device[d].uuid = (ProtobufCBinaryData){16, phos_devices[d].uuid};
        devices->list[d] = &devices->device[d];
    }
    return (size_t)phos_device_count;
}

static bool say_hello(uint64_t blocks, Phos__Wire__GateState state)
{
    Phos__Wire__Hello hello = PHOS__WIRE__HELLO__INIT;
    static char executable[512];
    if (!executable[0]) {
        ssize_t length = readlink("/proc/self/exe", executable, sizeof executable - 1);
        executable[length > 0 ? length : 0] = 0;
        phos_utf8_mend(executable);
    }
    struct phos_told_devices devices;
    hello.session = (ProtobufCBinaryData){sizeof phos_session, phos_session};
    hello.protocol = 1;
    hello.pid = getpid();
    hello.state = state;
    hello.executable = executable;
    hello.driver_version = (uint32_t)phos_driver_version;
    hello.n_devices = phos_tell_devices(&devices);
    hello.devices = devices.list;
    hello.blocks = blocks;
    hello.frontend_version = (char *)PHOS_VERSION;
    hello.residue = true;
    /* A request: Welcome is its reply. */
    ENVELOPE(envelope, 1, HELLO, hello, &hello);
    return phos_tell_send(&envelope, NULL, 0);
}

/* With phos_memory_lock held. */
static void forget_numbers(void)
{
    fresh.count = gone.count = sending.count = sending_at = 0;
    atomic_store(&untold_since, 0);
    settled = gone_ever;
    settle_wanted = false;
}

/* Every block there is now, pinned, so that exactly as many BlockAdded follow as Hello says. */
static uint64_t *pin_all(size_t *count, bool detached)
{
    PHOS_LOCKED(&phos_memory_lock);
    connection = ++last_connection;
    forget_numbers();
    *count = 0;
    if (detached)
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

void phos_tell_anew(void)
{
    phos_modules_untell();
    phos_kernels_untell();
}

bool phos_tell_begin(Phos__Wire__GateState state)
{
    size_t count;
    PHOS_FREES uint64_t *list = pin_all(&count, state == PHOS__WIRE__GATE_STATE__DETACHED);
    bool ok = say_hello(count, state);
    for (size_t i = 0; i < count; i++) {
        ok = ok && !phos_exiting() && tell_block(list[i]);
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = phos_block_find(list[i]);
        block->pins--;
        if (phos_block_settle(block) != CUDA_SUCCESS)
            phos_debug("a block freed while phosd was told of it could not be released");
        pthread_cond_broadcast(&settle_changed);
    }
    memset(told, 0, sizeof told);
    uncarried_told = 0;
    if (state != PHOS__WIRE__GATE_STATE__DETACHED) /* else it says so when it attaches */
        phos_tell_anew();
    phos_ask_again();
    phos_sdk_again();
    return ok;
}

bool phos_tell_access_table(uint64_t id, const struct phos_packet *packet)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    const char *problem = phos_access_table_take(packet->descriptor_count ? packet->descriptors[0] : -1);
    if (problem)
        phos_warn("phosd's table of what kernels touch was not taken: %s", problem);
    if (!id)
        return true;
    done.error = (char *)(problem ? problem : "");
    ENVELOPE(envelope, id, DONE, done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

void phos_tell_end(void)
{
    PHOS_LOCKED(&phos_memory_lock);
    connection = 0;
    forget_numbers();
    pthread_cond_broadcast(&settle_changed);
}

void phos_tell_known(void)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
        b->registered = connection;
}

bool phos_tell_later(void)
{
    return phos_uncarried_version() != uncarried_told;
}

void phos_tell_forked(void)
{
    connection = 0;
    pthread_cond_init(&settle_changed, NULL);
    phos_ask_forked();
    phos_sdk_forked();
}
