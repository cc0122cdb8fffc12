/* The control thread: answers phosd, tells it of memory as it comes and goes. See wire.proto for the messages, and
 * hold.c for what it does while detached.
 *
 * It is the only thread that touches the connection. Others leave word (a block's number, a question) under a lock and
 * wake it through an eventfd that lives as long as the connection: between connections, and so whenever CRIU may look,
 * the frontend holds no descriptor at all. */
#include "control.h"
#include "audit.h"
#include "cleanup.h"
#include "clock.h"
#include "detach.h"
#include "gate.h"
#include "hold.h"
#include "log.h"
#include "memory.h"
#include "pool.h"
#include "residue.h"
#include "runtime.h"
#include "sdk.h"
#include "tell.h"
#include "track.h"
#include "window.h"
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

/* The control thread's own. */
static Phos__Wire__GateState state = PHOS__WIRE__GATE_STATE__OPEN;
static int link_fd = -1;
static dev_t link_device; /* which socket link_fd is: an application may close descriptors that are not its own */
static ino_t link_inode;
static struct phos_packet stash[8]; /* packets that came while the gate was closing */
static size_t stashed;
static struct phos_error attach_error;
static bool residue_spent; /* what was prepared for a toggle has been through it */
static atomic_bool nobody_there; /* the last attempt to connect failed */
static _Atomic int wake_fd = -1;
static atomic_bool wake_set; /* the control thread is awake, or the eventfd readable: no need to write */
static atomic_bool hurried;  /* somebody waits */

static void sleep_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
}

static void wake(int descriptor)
{
    uint64_t one = 1;
    int cancel;
    /* An application's thread must not end in here, where it may hold a lock of ours. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (write(descriptor, &one, sizeof one) < 0) {
        /* Full (it is readable then) or closed by the application: the thread looks by itself now and then. */
    }
    pthread_setcancelstate(cancel, &cancel);
}

void phos_control_kick(void)
{
    int descriptor = atomic_load(&wake_fd);
    if (descriptor < 0 || atomic_exchange(&wake_set, true))
        return;
    wake(descriptor);
}

void phos_control_hurry(void)
{
    int descriptor = atomic_load(&wake_fd);
    if (descriptor < 0 || atomic_exchange(&hurried, true))
        return;
    atomic_store(&wake_set, true);
    wake(descriptor);
}

/* ---- sending ---- */

bool phos_tell_nobody(void)
{
    return atomic_load(&nobody_there);
}

static bool link_ours(void)
{
    struct stat now;
    return link_fd >= 0 && fstat(link_fd, &now) == 0 && now.st_dev == link_device && now.st_ino == link_inode;
}

bool phos_tell_send(Phos__Wire__Envelope *envelope, const int *descriptors, size_t count)
{
    return link_ours() && phos_link_send(link_fd, envelope, descriptors, count);
}

/* ---- what phosd asks ---- */

static void pump(void)
{
    if (!phos_tell_all(false))
        return;
    struct phos_packet packet;
    while (stashed < sizeof stash / sizeof *stash && link_ours() &&
           phos_link_receive(link_fd, &packet) == PHOS_RECEIVED) {
        if (packet.envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED) {
            phos_tell_answer(&packet);
            phos_packet_free(&packet);
        } else if (packet.envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_DONE) {
            phos_tell_settled(packet.envelope->id);
            phos_packet_free(&packet);
        } else
            stash[stashed++] = packet;
    }
}

static bool close_gate(uint64_t timeout_ns, struct phos_error *error)
{
    uint64_t start = phos_now_ns(), spent;
    struct phos_gate_straggler who;
    for (;;) {
        /* A context cannot be synchronised while one of its streams is captured, and trying spoils the capture: captures
         * are short, let them end. */
        while (phos_captures() && (spent = phos_now_ns() - start) < timeout_ns) {
            pump();
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
        if (phos_captures())
            return phos_fail(error, CUDA_SUCCESS, "a stream capture did not end in time");
        spent = phos_now_ns() - start;
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
    else if (phos_window_loading())
        phos_fail(&error, CUDA_SUCCESS, "its memory is still being restored");
    else if (phos_audit_active())
        phos_fail(&error, CUDA_SUCCESS, "phos-gpu audit runs it; without that it can be checkpointed");
    else if (state == PHOS__WIRE__GATE_STATE__OPEN) {
        uint64_t start = phos_now_ns();
        if (close_gate((quiesce->timeout_ms ? quiesce->timeout_ms : 10000) * 1000000ull, &error)) {
            uint64_t closed = phos_now_ns();
            done.gate_ns = closed - start;
            if (phos_quiesce(&error)) {
                phos_twins_settle(true);
                done.synchronize_ns = phos_now_ns() - closed;
                state = PHOS__WIRE__GATE_STATE__QUIESCED;
                phos_tell_again();
                if (!phos_tell_all(true))
                    return false;
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

/* For the way back from a detach that failed, with phos_memory_lock held and the gate closed. What else arrives is kept;
 * a Done can only be for a thread that waited for memory, and none is inside. */
static bool fetch_block(const uint8_t session[16], uint64_t block, int *descriptor, struct phos_error *error)
{
    static uint64_t last = (uint64_t)1 << 62; /* far from other threads' questions */
    Phos__Wire__TokenResolve resolve = PHOS__WIRE__TOKEN_RESOLVE__INIT;
    resolve.session = (ProtobufCBinaryData){16, (uint8_t *)session};
    resolve.block = block;
    ENVELOPE(envelope, ++last, TOKEN_RESOLVE, token_resolve, &resolve);
    if (!phos_tell_send(&envelope, NULL, 0))
        return phos_fail(error, CUDA_SUCCESS, "phosd is gone");
    for (uint64_t end = phos_now_ns() + 5000000000u; phos_now_ns() < end && link_ours();) {
        struct phos_packet packet;
        struct pollfd polled = {.fd = link_fd, .events = POLLIN};
        enum phos_received received = phos_link_receive(link_fd, &packet);
        if (received == PHOS_RECEIVED_NOTHING) {
            poll(&polled, 1, 100);
            continue;
        }
        if (received == PHOS_RECEIVED_END)
            break;
        const Phos__Wire__Envelope *e = packet.envelope;
        bool resolved = e->body_case == PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED;
        if (resolved && e->id == last) {
            bool given = packet.descriptor_count && !e->token_resolved->error[0];
            if (given) {
                *descriptor = packet.descriptors[0];
                packet.descriptors[0] = -1;
            } else
                phos_fail(error, CUDA_SUCCESS, "phosd gave no descriptor of block %llu: %s", (unsigned long long)block,
                          e->token_resolved->error);
            phos_packet_free(&packet);
            return given;
        }
        if (resolved)
            phos_tell_answer(&packet);
        else if (e->body_case != PHOS__WIRE__ENVELOPE__BODY_DONE && stashed < sizeof stash / sizeof *stash) {
            stash[stashed++] = packet;
            continue;
        }
        phos_packet_free(&packet);
    }
    return phos_fail(error, CUDA_SUCCESS, "phosd did not answer for block %llu", (unsigned long long)block);
}

static void drop_link(void)
{
    {
        PHOS_LOCKED(&phos_memory_lock); /* with which most wake-ups are made: none goes to a descriptor that is closed */
        int wake = atomic_exchange(&wake_fd, -1);
        if (wake >= 0)
            close(wake);
    }
    if (link_ours())
        close(link_fd);
    link_fd = -1;
    while (stashed)
        phos_packet_free(&stash[--stashed]);
    phos_tell_end();
}

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
        if (!phos_tell_all(true))
            return false;
        struct phos_detached taken = {0};
        map = phos_memory_map();
        if (map < 0)
            phos_fail(&error, CUDA_SUCCESS, "the memory map could not be written: %s", strerror(errno));
        else if (phos_detach(detach->reduce_stack, detach->huge_pages, fetch_block, &taken, &error)) {
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
    if (state != PHOS__WIRE__GATE_STATE__DETACHED)
        phos_fail(&attach_error, CUDA_SUCCESS, "only a detached process can be attached");
    else if (!attach_error.text[0] && phos_attach(attach->blocks, attach->shut, &done.map_ns, &done.undo_ns, &attach_error)) {
        state = PHOS__WIRE__GATE_STATE__QUIESCED;
        residue_spent = true;
        phos_tell_known();
        if (attach->restored)
            phos_sdk_restored();
        if (attach->tell && !phos_tell_all(true))
            return false;
    }
    struct phos_error error = attach_error;
    attach_error = (struct phos_error){0};
    done.error = error.text;
    phos_residue_count(&done.residue_bytes, &done.residue_served);
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
        phos_gate_open();
    }
    ENVELOPE(envelope, id, DONE, done, &done);
    bool sent = phos_tell_send(&envelope, NULL, 0);
    if (state == PHOS__WIRE__GATE_STATE__OPEN && residue_spent) {
        phos_residue_release(); /* nobody waits for this any more */
        residue_spent = false;
    }
    return sent;
}

static bool on_window_begin(uint64_t id, const struct phos_packet *packet)
{
    Phos__Wire__Done done = PHOS__WIRE__DONE__INIT;
    struct phos_error error = {0};
    if (state != PHOS__WIRE__GATE_STATE__QUIESCED)
        phos_fail(&error, CUDA_SUCCESS, "a window begins before the gate is opened");
    else if (phos_window_begin(packet->descriptors, packet->descriptor_count, &error))
        phos_debug("the window of a concurrent checkpoint is open");
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

static void on_twins(const struct phos_packet *packet)
{
    struct phos_error error = {0};
    if (!phos_twins_take(packet->envelope->twins->module, packet->descriptors, packet->descriptor_count, &error))
        phos_debug("twins of module %llu are not used: %s", (unsigned long long)packet->envelope->twins->module, error.text);
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
        rename_sessions(welcome);
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

/* ---- the connection ---- */

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
    atomic_store(&wake_set, true);
    atomic_store(&wake_fd, wake);
    return true;
}

static void drain(int wake)
{
    uint64_t ignored;
    struct pollfd polled = {.fd = wake, .events = POLLIN};
    if (poll(&polled, 1, 0) > 0 && polled.revents & POLLIN && read(wake, &ignored, sizeof ignored) < 0) {
        /* Somebody else's by now; it is made anew with the next connection. */
    }
}

/* Lets the application make its driver calls first (tell.c says why): until it made or freed no block for a
 * millisecond, phosd speaks, somebody waits, or patience ends. Awake, it need not be woken for each of them. */
static void step_aside(int wake)
{
    uint64_t before, after, patience;
    while ((patience = phos_tell_patience(&before)) && !atomic_load(&hurried)) {
        atomic_store(&wake_set, true);
        drain(wake);
        struct pollfd polled[2] = {{.fd = link_fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
        if (poll(polled, 2, 1))
            return;
        phos_tell_patience(&after);
        if (after == before)
            return;
    }
}

/* Answers whether the connection lives. */
static bool tell(int wake)
{
    step_aside(wake);
    drain(wake);
    /* In this order: who leaves word from here on finds both down, and wakes us. */
    atomic_store(&wake_set, false);
    return phos_tell_all(atomic_exchange(&hurried, false));
}

/* Until the connection ends, by either side. */
static void serve_connection(void)
{
    bool going = phos_tell_begin(state);
    while (going) {
        bool detached = state == PHOS__WIRE__GATE_STATE__DETACHED;
        int wake = atomic_load(&wake_fd);
        if (!detached && !tell(wake))
            break;
        struct pollfd polled[2] = {{.fd = link_fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
        /* Totals reported at most ten times a second; and a look every two seconds in case a wake-up got lost. */
        uint64_t changes;
        int timeout = detached || !phos_tell_later() ? 2000 : 100;
        if (!detached && phos_tell_patience(&changes))
            timeout = 1;
        if (phos_twins_left()) {
            phos_twins_settle(false);
            timeout = timeout < 20 ? timeout : 20;
        }
        if (poll(polled, 2, timeout) < 0 && errno != EINTR)
            break;
        if (!link_ours() || polled[0].revents & POLLNVAL)
            break;
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
    phos_window_abandoned();
    drop_link();
    phos_window_end(); /* nobody saves anything any more */
    if (state == PHOS__WIRE__GATE_STATE__QUIESCED) {
        /* phosd is gone, and everything is mapped: the application goes on. */
        state = PHOS__WIRE__GATE_STATE__OPEN;
        phos_gate_open();
    }
    if (state == PHOS__WIRE__GATE_STATE__OPEN)
        phos_residue_release();
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
    phos_window_forked();
    phos_residue_forked();
    phos_tell_forked();
}
