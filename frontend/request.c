/* What phosd asks of this process. See wire.proto for the messages. */
#include "request.h"
#include "audit.h"
#include "cleanup.h"
#include "clock.h"
#include "connection.h"
#include "deferred.h"
#include "descriptors.h"
#include "detach.h"
#include "driver_memcpy.h"
#include "gate.h"
#include "host.h"
#include "hold.h"
#include "log.h"
#include "memory.h"
#include "module.h"
#include "pool.h"
#include "quiesce.h"
#include "residue.h"
#include "runtime.h"
#include "sdk.h"
#include "span.h"
#include "tell.h"
#include "track.h"
#include "window.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define TRIM_NS 50000000 /* a quiesce has little time, and what is freed when it comes is little most of the time */

/* The control thread's own. */
static Phos__Wire__GateState state = PHOS__WIRE__GATE_STATE__OPEN;
static struct phos_error attach_error;
static bool residue_spent; /* what was prepared for a toggle has been through it */
static bool data_comes;    /* attached, and what it maps may still be empty: it computes in a window, or when all is there */
static bool opens;         /* attached, and Open is to come */

Phos__Wire__GateState phos_request_state(void)
{
    return state;
}

bool phos_request_opens(void)
{
    return opens;
}

/* ---- the gate ---- */

static bool close_gate(uint64_t timeout_ns, struct phos_error *error)
{
    uint64_t start = phos_now_ns(), spent;
    struct phos_gate_straggler who;
    for (;;) {
        /* A context cannot be synchronised while one of its streams is captured, and trying spoils the capture: captures
         * are short, let them end. */
        while (phos_captures() && (spent = phos_now_ns() - start) < timeout_ns && phos_connection_pump())
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        if (phos_captures())
            return phos_fail(error, CUDA_SUCCESS, "a stream capture did not end in time");
        spent = phos_now_ns() - start;
        if (!phos_gate_close(spent < timeout_ns ? timeout_ns - spent : 0, &who, phos_connection_pump))
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
    else if (phos_window_loading())
        phos_fail(&error, CUDA_SUCCESS, "its memory is still being restored");
    else if (phos_audit_active())
        phos_fail(&error, CUDA_SUCCESS, "phos-gpu audit runs it; without that it can be checkpointed");
    else if (state == PHOS__WIRE__GATE_STATE__OPEN) {
        /* A detach gives back all that is kept of freed memory. What need not be kept goes while the application computes. */
        for (uint64_t end = phos_now_ns() + TRIM_NS; !phos_window_copies() && phos_now_ns() < end && phos_span_trim(NULL);)
            ;
        uint64_t start = phos_now_ns(), timeout_ns = (quiesce->timeout_ms ? quiesce->timeout_ms : 10000) * 1000000ull;
        if (close_gate(timeout_ns, &error)) {
            uint64_t closed = phos_now_ns();
            done.gate_ns = closed - start;
            if (phos_quiesce(timeout_ns, &error)) {
                phos_twins_settle(true);
                phos_window_watched();
                done.synchronize_ns = phos_now_ns() - closed;
                state = PHOS__WIRE__GATE_STATE__QUIESCED;
                phos_tell_again();
                phos_descriptors_lift();
                if (!phos_tell_all(true))
                    return false;
                phos_descriptors_lower();
            } else
                phos_gate_open();
        }
    }
    done.error = error.text;
    phos_debug("quiesce: %s, gate %.3f ms, synchronise %.3f ms", error.text[0] ? error.text : "done",
               (double)done.gate_ns / 1e6, (double)done.synchronize_ns / 1e6);
    ENVELOPE(envelope, id, QUIESCE_DONE, quiesce_done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

/* ---- detach and attach ---- */

static bool on_prepare_residue(uint64_t id, const Phos__Wire__PrepareResidue *prepare)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    struct phos_error error = {0};
    uint64_t start = phos_now_ns();
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&error, CUDA_SUCCESS, "the process is detached already");
    else if (!prepare->path[0])
        phos_residue_release();
    else if (phos_residue_prepare(prepare->path, prepare->bytes, prepare->device, prepare->inode, &error))
        phos_debug("residue: %s is mapped, %.3f ms", prepare->path, (double)(phos_now_ns() - start) / 1e6);
    done.error = error.text;
    ENVELOPE(envelope, id, DONE, done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

/* What it takes to get the memory back: a packet's descriptors, and the connection's. Two are closed with this one. */
static bool can_return(struct phos_error *error)
{
    size_t blocks = 0;
    {
        PHOS_LOCKED(&phos_memory_lock);
        for (struct phos_block *b = phos_blocks.next; b != &phos_blocks && blocks < PHOS_PACKET_DESCRIPTORS; b = b->next)
            blocks++;
    }
    size_t wanted = blocks + PHOS_DESCRIPTORS_AT_A_TIME, left = phos_descriptors_left(wanted);
    return left >= wanted ||
           phos_fail(error, CUDA_SUCCESS,
                     "too many files are open: with %zu descriptors left its GPU memory could not be given back, which "
                     "takes %zu; close some, or start it with a larger hard limit (ulimit -Hn)",
                     left, wanted);
}

/* Answers whether to go on with this connection. */
static bool on_detach(uint64_t id, const Phos__Wire__Detach *detach)
{
    Phos__Wire__DetachDone done = PHOS__WIRE__DETACH_DONE__INIT;
    struct phos_error error = {0};
    PHOS_CLOSES int map = -1;
    phos_descriptors_lift();
    if (state != PHOS__WIRE__GATE_STATE__QUIESCED)
        phos_fail(&error, CUDA_SUCCESS, "only a quiesced process can be detached");
    else {
        struct host_memory *pinned;
        {
            /* Freed memory that was only kept in reserve need not be carried. */
            PHOS_LOCKED(&phos_memory_lock);
            phos_deferred_release(NULL, UINT64_MAX);
            pinned = phos_host_leaving();
            for (int d = 0; d < phos_device_count; d++)
                phos_pool_reclaim(d);
            phos_cache_flush(-1);
        }
        phos_host_unpin(pinned);
        if (!phos_tell_all(true))
            return false;
        struct phos_detached taken = {0};
        struct phos_reducers reducers = {detach->reduce_stack, detach->huge_pages, detach->copy_threads};
        if (can_return(&error) && (map = phos_memory_map()) < 0)
            phos_fail(&error, CUDA_SUCCESS, "the memory map could not be written: %s", strerror(errno));
        if (!error.text[0] && phos_detach(&reducers, phos_connection_fetch, &taken, &error)) {
            state = PHOS__WIRE__GATE_STATE__DETACHED;
            opens = false; /* it was not, then */
            attach_error = (struct phos_error){0};
        }
        done.unmap_ns = taken.unmap_ns;
        done.reduce_ns = taken.reduce_ns;
        done.blocks = taken.blocks;
        done.bytes = taken.bytes;
        done.host_bytes = taken.host_bytes;
    }
    phos_descriptors_lower();
    done.error = error.text;
    phos_debug("detach: %s, %llu blocks, unmap %.3f ms, reduce %.3f ms", error.text[0] ? error.text : "done",
               (unsigned long long)done.blocks, (double)done.unmap_ns / 1e6, (double)done.reduce_ns / 1e6);
    ENVELOPE(envelope, id, DETACH_DONE, detach_done, &done);
    bool sent = phos_tell_send(&envelope, &map, map >= 0 && !error.text[0]);
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
    struct phos_told_devices devices;
    if (state != PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&attach_error, CUDA_SUCCESS, "only a detached process can be attached");
    else if (!attach_error.text[0] && phos_attach(attach->blocks, attach->shut, &done.map_ns, &done.undo_ns, &attach_error)) {
        state = PHOS__WIRE__GATE_STATE__QUIESCED;
        phos_descriptors_lower();
        data_comes = attach->loads;
        opens = true;
        residue_spent = true;
        phos_tell_known();
        if (attach->restored) {
            phos_devices_restored();
            done.n_devices = phos_tell_devices(&devices);
            done.devices = devices.list;
            phos_modules_restored();
            phos_sdk_restored();
        }
        if (!attach->remembers)
            phos_tell_anew();
        if (attach->tell && !phos_tell_all(true))
            return false;
    }
    struct phos_error error = attach_error;
    attach_error = (struct phos_error){0};
    done.error = error.text;
    done.code = error.code;
    phos_residue_count(&done.residue_bytes, &done.residue_served);
    done.residue_shared = phos_driver_memcpy_bytes();
    phos_debug("attach: %s, map %.3f ms, undo %.3f ms", error.text[0] ? error.text : "done", (double)done.map_ns / 1e6,
               (double)done.undo_ns / 1e6);
    ENVELOPE(envelope, id, ATTACH_DONE, attach_done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

/* All memory was there before a window could be opened. */
static void open_what_is_shut(struct phos_error *error)
{
    PHOS_LOCKED(&phos_memory_lock);
    if (!phos_window_is_open() && !phos_mappings_open(NULL, error))
        phos_warn("memory that was restored could not be opened: %s", error->text);
}

static bool on_open(uint64_t id)
{
    struct phos_error error = {0};
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        done.error = (char *)"a detached process must be attached before it is opened";
    else {
        open_what_is_shut(&error);
        done.error = error.text;
        state = PHOS__WIRE__GATE_STATE__OPEN;
        data_comes = opens = false;
    }
    ENVELOPE(envelope, id, DONE, done, &done);
    bool sent = phos_tell_send(&envelope, NULL, 0);
    if (state != PHOS__WIRE__GATE_STATE__OPEN)
        return sent;
    phos_gate_open(); /* after the answer: the program may have nothing to do but end */
    if (residue_spent) {
        phos_residue_release(); /* nobody waits for this any more */
        residue_spent = false;
    }
    return sent;
}

/* Several processes may have come from the image that this one comes from: phosd gives each a session of its own. */
static void rename_sessions(const Phos__Wire__Welcome *welcome)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < welcome->n_session; i++) {
        const Phos__Wire__SessionName *name = welcome->session[i];
        if (name->old.len == sizeof phos_session && name->now.len == sizeof phos_session)
            phos_session_renamed(name->old.data, name->now.data);
    }
    phos_hold_renamed();
}

/* Answers whether to go on with this connection. */
static bool on_welcome(const Phos__Wire__Welcome *welcome)
{
    if (state != PHOS__WIRE__GATE_STATE__DETACHED)
        return true;
    switch (welcome->action) {
    case PHOS__WIRE__WELCOME__ACTION__RETRY:
        phos_connection_drop();
        phos_sleep_ms(welcome->retry_ms ? welcome->retry_ms : 10);
        return false;
    case PHOS__WIRE__WELCOME__ACTION__LOST:
        phos_warn("the GPU memory of this process is lost: %s; every CUDA call fails from now on", welcome->error);
        phos_gate_lose();
        return true;
    default:
        rename_sessions(welcome);
        return true;
    }
}

/* ---- windows ---- */

static bool on_window_begin(uint64_t id, const struct phos_packet *packet)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    struct phos_error error = {0};
    if (state == PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&error, CUDA_SUCCESS, "a detached process has no memory to trace");
    else if (phos_audit_active())
        phos_fail(&error, CUDA_SUCCESS, "phos-gpu audit traces the process already");
    else if (phos_window_begin(packet->descriptors, packet->descriptor_count, state == PHOS__WIRE__GATE_STATE__OPEN, &error)) {
        phos_debug("the window is open");
        data_comes = false; /* who computes now waits for it */
    }
    done.error = error.text;
    ENVELOPE(envelope, id, DONE, done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

static bool on_window_end(uint64_t id)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    phos_window_end();
    ENVELOPE(envelope, id, DONE, done, &done);
    return phos_tell_send(&envelope, NULL, 0);
}

static void on_twins(const struct phos_packet *packet)
{
    struct phos_error error = {0};
    if (!phos_twins_take(packet->envelope->twins->module, packet->descriptors, packet->descriptor_count, &error))
        phos_debug("twins of module %llu are not used: %s", (unsigned long long)packet->envelope->twins->module, error.text);
}

/* ---- all of them ---- */

bool phos_request_take(struct phos_packet *packet)
{
    Phos__Wire__Envelope *e = packet->envelope;
    switch (e->body_case) {
    case PHOS__WIRE__ENVELOPE__BODY_WELCOME:
        return on_welcome(e->welcome);
    case PHOS__WIRE__ENVELOPE__BODY_QUIESCE:
        return on_quiesce(e->id, e->quiesce);
    case PHOS__WIRE__ENVELOPE__BODY_PREPARE_RESIDUE:
        return on_prepare_residue(e->id, e->prepare_residue);
    case PHOS__WIRE__ENVELOPE__BODY_DETACH:
        return on_detach(e->id, e->detach);
    case PHOS__WIRE__ENVELOPE__BODY_ATTACH_BLOCKS:
        on_attach_blocks(packet);
        return true;
    case PHOS__WIRE__ENVELOPE__BODY_ATTACH:
        return on_attach(e->id, e->attach);
    case PHOS__WIRE__ENVELOPE__BODY_OPEN:
        return on_open(e->id);
    case PHOS__WIRE__ENVELOPE__BODY_ACCESS_TABLE:
        return phos_tell_access_table(e->id, packet);
    case PHOS__WIRE__ENVELOPE__BODY_WINDOW_BEGIN:
        return on_window_begin(e->id, packet);
    case PHOS__WIRE__ENVELOPE__BODY_WINDOW_END:
        return on_window_end(e->id);
    case PHOS__WIRE__ENVELOPE__BODY_TWINS:
        on_twins(packet);
        return true;
    case PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED:
        phos_tell_answer(packet);
        return true;
    case PHOS__WIRE__ENVELOPE__BODY_CHECKPOINT_RESULT:
        phos_sdk_result(e->checkpoint_result);
        return true;
    case PHOS__WIRE__ENVELOPE__BODY_DONE:
        phos_tell_settled(e->id);
        return true;
    default: /* a newer phosd's */
        return true;
    }
}

void phos_request_abandoned(void)
{
    if (state == PHOS__WIRE__GATE_STATE__QUIESCED) {
        if (data_comes)
            phos_window_hopeless();
        opens = false;
        state = PHOS__WIRE__GATE_STATE__OPEN;
        phos_gate_open();
    }
    if (state == PHOS__WIRE__GATE_STATE__OPEN) {
        phos_residue_release();
        phos_descriptors_lower();
    }
}
