/* What is done before a call that writes to memory which is not saved yet: shadows, and where there is no room for them,
 * waiting. */
#include "audit.h"
#include "cleanup.h"
#include "clock.h"
#include "library.h"
#include "log.h"
#include "memory.h"
#include "track.h"
#include "window_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TRANSFER_LEAST ((size_t)1 << 20) /* a chunk of phosd's in front of it takes longer than a smaller one itself */
#define SPIN_NS 20000 /* copying a chunk takes phosd four times as long */

/* A chunk that a call may write to. */
struct target {
    CUdeviceptr address; /* of its first byte; 0: it is not mapped as a whole */
    uint64_t devices;    /* bit d: device d has access to it there */
    uint32_t chunk, size, slot;
    uint32_t behind; /* the call's stream goes on behind the event of this slot; PHOS_SLOT_NONE: not copied aside */
};

struct targets {
    struct target *list;
    size_t count, capacity;
    bool failed; /* out of host memory */
    bool writes; /* the touch that is being looked at */
    bool notes;  /* something may be touched for the first time */
    bool copies; /* not only watched */
    uint64_t version; /* of the mappings that they were found in */
    struct target inline_list[64];
};

bool phos_window_closed(void)
{
    return atomic_load_explicit(&phos_window_over, memory_order_acquire) ||
           __atomic_load_n(&phos_window.chunks->closed, __ATOMIC_ACQUIRE);
}

static uint32_t chunk_state(uint32_t chunk)
{
    return __atomic_load_n(&phos_window.chunks->state[chunk], __ATOMIC_ACQUIRE);
}

static void set_chunk(uint32_t chunk, uint32_t state)
{
    __atomic_store_n(&phos_window.chunks->state[chunk], state, __ATOMIC_RELEASE);
}

static uint32_t shadowed(uint32_t slot)
{
    return PHOS_CHUNK_SHADOWED + (phos_window.table->process << 16) + slot;
}

static bool claim(uint32_t chunk)
{
    uint32_t unsaved = PHOS_CHUNK_UNSAVED, shadowing = shadowed(PHOS_SLOT_NONE);
    return __atomic_compare_exchange_n(&phos_window.chunks->state[chunk], &unsaved, shadowing, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* ---- which chunks ---- */

static void add(struct targets *targets, struct target target)
{
    if (targets->count == targets->capacity) {
        bool moved = targets->list != targets->inline_list;
        struct target *grown = realloc(moved ? targets->list : NULL, targets->capacity * 2 * sizeof *grown);
        if (!grown) {
            targets->failed = true;
            return;
        }
        if (!moved)
            memcpy(grown, targets->inline_list, sizeof targets->inline_list);
        targets->list = grown;
        targets->capacity *= 2;
    }
    targets->list[targets->count++] = target;
}

static uint64_t devices_of(const struct phos_mapping *mapping)
{
    uint64_t devices = 0;
    for (uint32_t i = 0; i < mapping->access_count; i++)
        if (mapping->access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && mapping->access[i].flags)
            devices |= 1ull << mapping->access[i].location.id % PHOS_DEVICES;
    return devices;
}

/* Notes the chunks in [begin, end) of one mapping as touched, and adds those that are not saved and about to change. */
static void add_mapping(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct targets *targets = cookie;
    const struct phos_block *block = mapping->block;
    uint32_t unit = phos_window.chunks->chunk_bytes;
    struct phos_chunk_range range = phos_window_chunks(mapping, begin, end);
    if (targets->notes)
        phos_window_note(range, targets->writes);
    if (!targets->writes || !targets->copies)
        return;
    uint64_t devices = devices_of(mapping);
    for (uint32_t chunk = range.first; chunk < range.end; chunk++) {
        if (chunk_state(chunk) == PHOS_CHUNK_SAVED)
            continue;
        uint64_t offset = (uint64_t)(chunk - block->window_first) * unit;
        uint64_t size = block->size - offset < unit ? block->size - offset : unit;
        bool whole = offset >= mapping->offset && offset + size <= mapping->offset + mapping->range.size;
        add(targets, (struct target){.address = whole ? mapping->range.address + (offset - mapping->offset) : 0,
                                     .devices = devices,
                                     .chunk = chunk,
                                     .size = (uint32_t)size});
    }
}

static int by_chunk(const void *a, const void *b)
{
    const struct target *x = a, *y = b;
    return x->chunk < y->chunk ? -1 : x->chunk > y->chunk;
}

/* By number, each once. What is touched is noted on the way. */
static void find_targets(struct targets *targets, const struct phos_touches *touches)
{
    targets->notes = __atomic_load_n(&phos_window.unwritten, __ATOMIC_RELAXED);
    {
        PHOS_LOCKED(&phos_memory_lock);
        targets->version = phos_mappings_version;
        for (size_t i = 0; i < touches->count; i++) {
            targets->writes = touches->list[i].access & PHOS_WRITES;
            if ((targets->writes && targets->copies) || targets->notes)
                phos_window_visit(&touches->list[i], add_mapping, targets);
        }
    }
    if (targets->count < 2)
        return;
    qsort(targets->list, targets->count, sizeof *targets->list, by_chunk);
    size_t kept = 1;
    for (size_t i = 1; i < targets->count; i++)
        if (targets->list[i].chunk != targets->list[kept - 1].chunk)
            targets->list[kept++] = targets->list[i];
    targets->count = kept;
}

/* ---- shadows, with the window's lock held ---- */

void phos_window_ask(uint32_t chunk)
{
    struct phos_window_table *table = phos_window.table;
    uint32_t tail = table->tail; /* written here alone */
    if (tail == table->queue)
        return; /* it comes in its turn */
    ((uint32_t *)((char *)table + table->queue_at))[tail] = chunk;
    __atomic_store_n(&table->tail, tail + 1, __ATOMIC_RELEASE);
}

static uint32_t find_slot(struct phos_shadow_pool *pool)
{
    struct phos_window_slot *slots = phos_window_slots();
    for (uint32_t i = 0; i < pool->slots; i++) {
        uint32_t slot = pool->next;
        pool->next = slot + 1 < pool->first_slot + pool->slots ? slot + 1 : pool->first_slot;
        if (!__atomic_load_n(&slots[slot].ticket, __ATOMIC_ACQUIRE) && !atomic_load(&phos_window.slots[slot].held))
            return slot;
    }
    return UINT32_MAX;
}

static uint32_t next_ticket(void)
{
    phos_window.ticket = phos_window.ticket < UINT32_MAX - 1 ? phos_window.ticket + 1 : 1;
    return phos_window.ticket;
}

static bool event_in(struct phos_slot *slot, CUcontext context)
{
    slot->ends = false;
    if (slot->event && slot->context == context)
        return true;
    if (slot->event)
        phos_real.cuEventDestroy_v2(slot->event);
    slot->context = context;
    if (phos_real.cuEventCreate(&slot->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        slot->event = NULL; /* whatever is there now is not one */
    return slot->event;
}

static bool faulted(const struct phos_shadow_pool *pool)
{
    return __atomic_load_n(&phos_window.table->faulted, __ATOMIC_RELAXED) >> pool->index & 1;
}

/* What is in the stream are copies, which wait for nothing. With an error pending they are not made any more. */
static void finish_copies(const struct phos_shadow_pool *pool)
{
    if (!pool->copies)
        return;
    CUcontext popped;
    CUresult result = phos_real.cuCtxPushCurrent_v2(pool->context);
    if (result == CUDA_SUCCESS) {
        result = phos_real.cuStreamSynchronize(pool->copies);
        phos_real.cuCtxPopCurrent_v2(&popped);
    }
    phos_window_see(pool, result);
}

static void end_copies(struct phos_shadow_pool *pool)
{
    finish_copies(pool);
    if (pool->copies)
        phos_real.cuStreamDestroy_v2(pool->copies);
    pool->copies = NULL;
}

/* False: nothing can be copied to the pool. After an error nothing is, in whatever context: phosd takes what is not copied yet
 * from its place. */
static bool stream_in(struct phos_shadow_pool *pool, CUcontext context)
{
    if (pool->context != context)
        end_copies(pool);
    if (faulted(pool))
        return false;
    if (pool->copies)
        return true;
    pool->context = context;
    if (phos_real.cuStreamCreate(&pool->copies, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        pool->copies = NULL;
    return pool->copies;
}

static int cancel_before; /* whether who stands still could be cancelled; with the window's lock */

void phos_window_stand_still(void)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* it would end with the lock held */
    pthread_mutex_lock(&phos_window_lock);
    cancel_before = cancel;
    PHOS_RELAXED;
    for (int d = 0; phos_window.slots && d < phos_device_count; d++)
        finish_copies(&phos_window.pools[d]);
}

void phos_window_go_on(void)
{
    int cancel = cancel_before;
    pthread_mutex_unlock(&phos_window_lock);
    pthread_setcancelstate(cancel, &cancel);
}

/* What is copied in the context has been when this returns, and of its events those are destroyed that nobody uses. False: some
 * are used. */
static bool leave_context(CUcontext context, uint32_t transfers)
{
    PHOS_LOCKED(&phos_window_lock);
    PHOS_RELAXED;
    if (!phos_window.slots)
        return true; /* not in a window */
    bool left = true;
    for (int d = 0; d < phos_device_count; d++)
        if (phos_window.pools[d].context == context)
            end_copies(&phos_window.pools[d]);
    for (uint32_t s = 0; s < phos_window.table->slots + transfers; s++) {
        struct phos_slot *slot = &phos_window.slots[s];
        if (!slot->event || slot->context != context)
            continue;
        slot->ends = atomic_load(&slot->held);
        left &= !slot->ends;
        if (slot->ends)
            continue;
        phos_real.cuEventDestroy_v2(slot->event);
        slot->event = NULL;
    }
    return left;
}

/* The flags of transfers are not waited for: who queues in a context that may end has to see to that himself. */
void phos_window_context_may_end(CUcontext context)
{
    while (!leave_context(context, 0))
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
}

void phos_window_context_ends(CUcontext context, bool gone)
{
    while (!gone && !leave_context(context, PHOS_TRANSFERS))
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    if (!gone)
        return;
    PHOS_LOCKED(&phos_window_lock);
    if (!phos_window.slots)
        return;
    for (int d = 0; d < phos_device_count; d++)
        if (phos_window.pools[d].context == context)
            phos_window.pools[d].copies = NULL;
    for (uint32_t s = 0; s < phos_window.table->slots + PHOS_TRANSFERS; s++)
        if (phos_window.slots[s].context == context)
            phos_window.slots[s].event = NULL;
}

/* Queues the copies of chunks whose slots are taken, neighbours in one; then the flags; then the event. Nobody has written
 * to these chunks since t1, nor is about to before this event: the copies need not wait for anything. */
static bool queue_copies(struct phos_shadow_pool *pool, const struct target *list, size_t count, uint32_t ticket,
                         CUcontext context)
{
    struct phos_slot *leader = &phos_window.slots[list[0].slot];
    if (!event_in(leader, context))
        return false;
    CUstream stream = pool->copies;
    for (size_t i = 0, j; i < count; i = j) {
        size_t size = list[i].size;
        /* A block's last chunk may be shorter than the slot that it goes to. */
        for (j = i + 1; j < count && list[j - 1].size == phos_window.chunks->chunk_bytes &&
                        list[j].slot == list[j - 1].slot + 1 && list[j].address == list[i].address + size;
             j++)
            size += list[j].size;
        if (phos_real.cuMemcpyDtoDAsync_v2(phos_slot_address(pool, list[i].slot), list[i].address, size, stream) !=
            CUDA_SUCCESS)
            return false;
    }
    for (size_t i = 0, j; i < count; i = j) {
        for (j = i + 1; j < count && list[j].slot == list[j - 1].slot + 1; j++)
            ;
        CUdeviceptr flag = pool->address + (CUdeviceptr)(list[i].slot - pool->first_slot) * sizeof(uint32_t);
        if (phos_real.cuMemsetD32Async(flag, ticket, j - i, stream) != CUDA_SUCCESS)
            return false;
    }
    return phos_real.cuEventRecord(leader->event, stream) == CUDA_SUCCESS;
}

/* A copy peer to peer is made without access to the other's memory; ours is not one. */
static bool can_copy(const struct target *target, CUdevice device)
{
    return target->address && target->devices >> device & 1;
}

/* Copies aside what it can of what is not yet. */
static void shadow(struct target *list, size_t count)
{
    CUcontext context;
    CUdevice device;
    struct phos_shadow_pool *pool = NULL;
    if (phos_current(&context, &device) == CUDA_SUCCESS)
        for (int d = 0; d < phos_device_count; d++)
            if (phos_devices[d].device == device && phos_window.pools[d].address)
                pool = &phos_window.pools[d];
    if (pool && (!pool->slots || !stream_in(pool, context)))
        pool = NULL;
    size_t taken = 0;
    PHOS_FREES struct target *mine = pool ? malloc(count * sizeof *mine) : NULL;
    for (size_t i = 0; mine && i < count; i++) {
        if (list[i].behind != PHOS_SLOT_NONE || !can_copy(&list[i], device))
            continue;
        uint32_t slot = find_slot(pool);
        if (slot == UINT32_MAX || !claim(list[i].chunk))
            continue;
        mine[taken] = list[i];
        mine[taken++].slot = slot;
        /* Not found again; no flag says this. */
        __atomic_store_n(&phos_window_slots()[slot].ticket, UINT32_MAX, __ATOMIC_RELAXED);
    }
    if (!taken)
        return;
    uint32_t ticket = next_ticket();
    bool queued = queue_copies(pool, mine, taken, ticket, context);
    for (size_t i = 0, at = 0; i < taken; i++) {
        struct phos_window_slot *slot = &phos_window_slots()[mine[i].slot];
        if (!queued) {
            /* Some copy may yet be made: the slot is not used again in this window. */
            set_chunk(mine[i].chunk, PHOS_CHUNK_UNSAVED);
            continue;
        }
        phos_window.slots[mine[i].slot].leader = mine[0].slot;
        slot->chunk = mine[i].chunk;
        __atomic_store_n(&slot->ticket, ticket, __ATOMIC_RELEASE);
        set_chunk(mine[i].chunk, shadowed(mine[i].slot));
        phos_window_ask(mine[i].chunk);
        while (list[at].chunk != mine[i].chunk)
            at++;
        list[at].behind = mine[0].slot;
    }
    phos_count(queued ? &phos_window.table->counts.shadowed : &phos_window.table->counts.failures, taken);
}

/* Finds the chunks that this process has copied aside already, perhaps for another stream: this stream is to go on behind that
 * copy. What is saved, or certainly copied, is left out: answers how many are not, and in `alone` how many are not copied aside. */
static size_t follow(struct target *list, size_t count, size_t *alone)
{
    size_t kept = 0;
    uint32_t last = PHOS_SLOT_NONE;
    bool lost = __atomic_load_n(&phos_window.table->faulted, __ATOMIC_RELAXED); /* some may never be made */
    *alone = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t state = chunk_state(list[i].chunk);
        if (state == PHOS_CHUNK_SAVED)
            continue;
        list[kept] = list[i];
        list[kept].behind = PHOS_SLOT_NONE;
        if (lost || state - (state & 0xffff) != shadowed(0) || (state & 0xffff) >= phos_window.table->slots) {
            kept++;
            ++*alone;
            continue;
        }
        uint32_t leader = phos_window.slots[state & 0xffff].leader;
        if (!phos_window.slots[leader].event || phos_window.slots[leader].ends) /* the copy had ended before its context */
            continue;
        list[kept++].behind = leader;
        phos_count(&phos_window.table->counts.stream_waits, leader != last);
        last = leader;
    }
    return kept;
}

/* Without the lock, with the events held: lets the stream go on behind the copies. Moves the chunks for which there is none, or
 * that is not possible, to the front, and answers how many those are. */
static size_t go_behind(struct target *list, size_t count, CUstream stream)
{
    PHOS_RELAXED;
    size_t left = 0;
    uint32_t last = PHOS_SLOT_NONE;
    for (size_t i = 0; i < count; i++) {
        uint32_t behind = list[i].behind;
        struct phos_slot *slot = behind == PHOS_SLOT_NONE ? NULL : &phos_window.slots[behind];
        /* Between follow() and now the slot may have been taken for another copy, whose event could not be made. */
        if (slot && slot->event && behind != last && phos_real.cuStreamWaitEvent(stream, slot->event, 0) == CUDA_SUCCESS)
            last = behind;
        if (slot)
            atomic_fetch_sub(&slot->held, 1);
        if (slot ? behind != last : chunk_state(list[i].chunk) != PHOS_CHUNK_SAVED)
            list[left++] = list[i];
    }
    return left;
}

static void wait_saved(const struct target *list, size_t count)
{
    if (!count)
        return;
    uint64_t start = phos_now_ns();
    for (size_t i = 0; i < count; i++)
        while (!phos_window_closed() && chunk_state(list[i].chunk) != PHOS_CHUNK_SAVED)
            nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    phos_count(&phos_window.table->counts.waits, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
}

static void wait_for_everything(void)
{
    uint64_t start = phos_now_ns();
    while (!phos_window_closed())
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    phos_count(&phos_window.table->counts.anything, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
}

void phos_window_blame(const struct phos_touches *touches)
{
    uint32_t nobody = 0;
    if (!__atomic_compare_exchange_n(&phos_window.table->waited_for_all, &nobody, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return;
    const char *library = phos_library_call();
    snprintf(phos_window.table->culprit, PHOS_RECENT_NAME, "%s%s%.100s", library ? library : "", library ? ": " : "",
             touches->kernel ? touches->kernel : "?");
}

/* False: what they were found in has been unmapped since, or mapped anew. Nothing is unmapped while the lock is held
 * (phos_window_stand_still). */
static bool copy_aside(struct targets *targets, CUstream stream)
{
    struct target *list = targets->list;
    size_t count, alone;
    {
        PHOS_LOCKED(&phos_window_lock);
        PHOS_RELAXED;
        if (targets->version != phos_mappings_version)
            return false;
        count = follow(list, targets->count, &alone);
        if (alone)
            shadow(list, count);
        for (size_t i = 0; i < count; i++)
            if (list[i].behind != PHOS_SLOT_NONE)
                atomic_fetch_add(&phos_window.slots[list[i].behind].held, 1);
            else if (chunk_state(list[i].chunk) == PHOS_CHUNK_UNSAVED)
                phos_window_ask(list[i].chunk);
    }
    wait_saved(list, go_behind(list, count, stream));
    return true;
}

static void secure(const struct phos_touches *touches)
{
    /* Not the whole of it: the inline list is most of its size. */
    struct targets targets;
    targets.list = targets.inline_list;
    targets.capacity = sizeof targets.inline_list / sizeof(struct target);
    targets.failed = false;
    targets.copies = phos_window.table->mode != PHOS_WINDOW_WATCH;
    bool done;
    do {
        targets.count = 0;
        find_targets(&targets, touches);
        done = true;
        if (!targets.copies)
            return;
        if (touches->anything & PHOS_WRITES) {
            if (!phos_window_closed())
                phos_window_blame(touches);
            wait_for_everything();
        } else if (targets.failed)
            wait_for_everything();
        else if (targets.count)
            done = copy_aside(&targets, touches->stream);
    } while (!done);
    if (targets.list != targets.inline_list)
        free(targets.list);
}

/* Reading back a loss waits for the GPU far longer than for phosd's copies, and would stop these meanwhile. */
static bool transfer_matters(const struct phos_touches *touches)
{
    for (size_t i = 0; i < touches->count; i++)
        if (!touches->list[i].size || touches->list[i].size >= TRANSFER_LEAST)
            return true;
    return false;
}

void phos_window_before(struct phos_touches *touches)
{
    if (phos_audit_active()) { /* then there are no windows */
        phos_audit_before(touches);
        return;
    }
    if (phos_window.table->mode == PHOS_WINDOW_LAZY || phos_window.table->mode == PHOS_WINDOW_STRICT) {
        phos_window_load(touches);
        return;
    }
    if (touches->nothing)
        return;
    if (phos_window_closed())
        return;
    uint64_t start = phos_now_ns();
    if (phos_window.table->mode != PHOS_WINDOW_WATCH && !(touches->anything & PHOS_WRITES) &&
        phos_touches_through(touches, PHOS_WRITES))
        phos_window_follow(touches, PHOS_WRITES, false);
    secure(touches);
    phos_count(&phos_window.table->counts.calls, 1);
    phos_count(&phos_window.table->counts.call_ns, phos_now_ns() - start);
    /* Not before: while the call waits for a chunk to be saved, phosd must not wait for the call. */
    touches->window = touches->host_copy && phos_window.table->prioritise && transfer_matters(touches);
    if (touches->window)
        __atomic_fetch_add(&phos_window.table->transferring, 1, __ATOMIC_RELEASE);
}

/* The number of a transfer record that nobody has, with an event; it is held. PHOS_TRANSFERS: none. */
static uint32_t transfer_begins(CUcontext context, uint32_t *ticket)
{
    PHOS_LOCKED(&phos_window_lock);
    for (uint32_t i = 0; i < PHOS_TRANSFERS; i++) {
        uint32_t at = phos_window.transfer++ % PHOS_TRANSFERS;
        struct phos_slot *behind = &phos_window.slots[phos_window.table->slots + at];
        if (__atomic_load_n(&phos_window_transfers()[at].ticket, __ATOMIC_ACQUIRE) || atomic_load(&behind->held))
            continue;
        if (!event_in(behind, context))
            return PHOS_TRANSFERS;
        atomic_fetch_add(&behind->held, 1);
        *ticket = next_ticket();
        return at;
    }
    return PHOS_TRANSFERS; /* as many are under way: phosd steps aside anyway */
}

/* phosd steps aside until the GPU has set the flag behind a transfer. Not behind a synchronous one: what other threads queued
 * while it lasted may wait for this one, and in a default stream the flag would come behind that, and other streams behind
 * the flag. */
static void note_transfer(CUstream stream)
{
    CUcontext context, current;
    CUdevice device;
    /* Copies, other than kernels, may go to a stream of another context; an event of this one does not stand behind them,
     * and its GPU may have no access to the pool. */
    if (phos_real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || !phos_stream_context(stream, &context, &device) ||
        context != current)
        return;
    struct phos_window_transfer *transfers = phos_window_transfers();
    for (int d = 0; d < phos_device_count; d++) {
        const struct phos_shadow_pool *pool = &phos_window.pools[d];
        if (phos_devices[d].device != device || !pool->address)
            continue;
        uint32_t ticket, at = transfer_begins(context, &ticket);
        if (at == PHOS_TRANSFERS)
            return;
        struct phos_slot *behind = &phos_window.slots[phos_window.table->slots + at];
        CUdeviceptr flag = pool->address + (CUdeviceptr)(pool->slots + at) * sizeof(uint32_t);
        if (phos_real.cuMemsetD32Async(flag, ticket, 1, stream) == CUDA_SUCCESS &&
            phos_real.cuEventRecord(behind->event, stream) == CUDA_SUCCESS) {
            transfers[at].pool = pool->index;
            __atomic_store_n(&transfers[at].ticket, ticket, __ATOMIC_RELEASE);
        }
        atomic_fetch_sub(&behind->held, 1);
    }
}

void phos_window_after(struct phos_touches *touches, CUresult result)
{
    phos_audit_after(touches, result);
    phos_window_result(result);
    if (!touches->window)
        return;
    if (result == CUDA_SUCCESS && !touches->synchronous && !phos_window_closed())
        note_transfer(touches->stream);
    __atomic_fetch_sub(&phos_window.table->transferring, 1, __ATOMIC_RELEASE);
}
