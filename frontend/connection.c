/* The connection to phosd, and how the control thread is woken.
 *
 * The control thread is the only one that touches the connection. Others leave word (a block's number, a question) under
 * a lock and wake it through an eventfd that lives as long as the connection: between connections, and so whenever CRIU
 * may look, the frontend holds no descriptor at all. */
#include "connection.h"
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "descriptors.h"
#include "held.h"
#include "memory.h"
#include "patience.h"
#include "span.h"
#include "tell.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPENT_NS 100000000
#define TRIM_NS 5000000 /* the longest that phosd and who waits for it are kept waiting for freed memory to be given back */

/* The control thread's own. */
static int link_fd = -1;
static dev_t link_device; /* which socket link_fd is: an application may close descriptors that are not its own */
static ino_t link_inode;
static struct phos_packet stash[64]; /* packets that came while the gate was closing, or something was asked for */
static size_t stashed;
static int spent_wake = -1; /* what wake_fd was a moment ago: who is just waking us may have read it then */
static uint64_t spent_at;
/* Everybody's. */
static atomic_bool nobody_there; /* the last attempt to connect failed */
static _Atomic int wake_fd = -1;
static atomic_bool wake_set; /* the control thread is awake, or the eventfd readable: no need to write */
static atomic_bool hurried;  /* somebody waits */

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

static bool ours(void)
{
    struct stat now;
    return link_fd >= 0 && fstat(link_fd, &now) == 0 && now.st_dev == link_device && now.st_ino == link_inode;
}

bool phos_tell_send(Phos__Wire__Envelope *envelope, const int *descriptors, size_t count)
{
    return ours() && phos_link_send(link_fd, envelope, descriptors, count);
}

void phos_connection_tried(bool failed)
{
    atomic_store(&nobody_there, failed);
}

/* ---- receiving ---- */

static bool stash_full(void)
{
    return stashed == sizeof stash / sizeof *stash;
}

enum phos_received phos_connection_next(struct phos_packet *packet)
{
    if (!stashed)
        return phos_link_receive(link_fd, packet);
    *packet = stash[0];
    memmove(stash, stash + 1, --stashed * sizeof *stash);
    return PHOS_RECEIVED;
}

bool phos_connection_pump(void)
{
    if (!ours() || !phos_tell_all(false))
        return false;
    struct phos_packet packet;
    enum phos_received received = PHOS_RECEIVED_NOTHING;
    while (!stash_full() && ours() && (received = phos_link_receive(link_fd, &packet)) == PHOS_RECEIVED) {
        if (packet.envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_TOKEN_RESOLVED) {
            phos_tell_answer(&packet);
            phos_packet_free(&packet);
        } else if (packet.envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_DONE) {
            phos_tell_settled(packet.envelope->id);
            phos_packet_free(&packet);
        } else
            stash[stashed++] = packet;
    }
    return received != PHOS_RECEIVED_END;
}

/* A Done that comes meanwhile can only be for a thread that waited for memory, and none is inside. */
bool phos_connection_fetch(const uint8_t session[16], uint64_t block, int *descriptor, struct phos_error *error)
{
    static uint64_t last = (uint64_t)1 << 62; /* far from other threads' questions */
    Phos__Wire__TokenResolve resolve = PHOS__WIRE__TOKEN_RESOLVE__INIT;
    resolve.session = (ProtobufCBinaryData){16, (uint8_t *)session};
    resolve.block = block;
    ENVELOPE(envelope, ++last, TOKEN_RESOLVE, token_resolve, &resolve);
    if (!phos_tell_send(&envelope, NULL, 0))
        return phos_fail(error, CUDA_SUCCESS, "phosd is gone");
    for (uint64_t end = phos_now_ns() + 5000000000u; phos_now_ns() < end && ours();) {
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
        else if (e->body_case != PHOS__WIRE__ENVELOPE__BODY_DONE) {
            if (!stash_full()) {
                stash[stashed++] = packet;
                continue;
            }
            /* It may be the one that opens the gate: rather begin anew with phosd than lose it. */
            shutdown(link_fd, SHUT_RDWR);
        }
        phos_packet_free(&packet);
    }
    return phos_fail(error, CUDA_SUCCESS, "phosd did not answer for block %llu", (unsigned long long)block);
}

/* ---- its life ---- */

bool phos_connection_take(int link, bool at_once)
{
    struct stat now;
    int low = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int wake = low < 0 ? low : at_once ? phos_descriptor_raise_at_once(low) : phos_descriptor_raise(low);
    if (wake < 0 || fstat(link, &now)) {
        if (wake >= 0)
            close(wake);
        phos_held_close(link);
        return false;
    }
    link_fd = link;
    link_device = now.st_dev;
    link_inode = now.st_ino;
    atomic_store(&wake_set, true);
    atomic_store(&wake_fd, wake);
    return true;
}

static void close_spent(void)
{
    if (spent_wake >= 0)
        close(spent_wake);
    spent_wake = -1;
}

static void close_wake(void)
{
    int wake = atomic_exchange(&wake_fd, -1);
    if (wake >= 0)
        close(wake);
    close_spent();
}

/* As far as can be told: one of the application's cannot be told from ours. */
static bool is_eventfd(int descriptor)
{
    char path[40], target[40] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    return readlink(path, target, sizeof target - 1) > 0 && !strcmp(target, "anon_inode:[eventfd]");
}

void phos_connection_raise(void)
{
    if (spent_wake >= 0 && phos_now_ns() - spent_at > SPENT_NS)
        close_spent();
    if (link_fd >= PHOS_DESCRIPTOR_FLOOR || !ours())
        return;
    phos_held_lock();
    int link = phos_descriptor_raise(link_fd);
    phos_held_moved(link_fd, link);
    link_fd = link;
    phos_held_unlock();
    int wake = atomic_load(&wake_fd);
    int high = wake < PHOS_DESCRIPTOR_FLOOR && is_eventfd(wake) ? fcntl(wake, F_DUPFD_CLOEXEC, PHOS_DESCRIPTOR_FLOOR) : -1;
    if (high < 0)
        return;
    close_spent();
    spent_wake = wake;
    spent_at = phos_now_ns();
    atomic_store(&wake_fd, high);
}

static void close_link(void)
{
    if (ours())
        phos_held_close(link_fd);
    link_fd = -1;
}

void phos_connection_drop(void)
{
    {
        PHOS_LOCKED(&phos_memory_lock); /* with which most wake-ups are made: none goes to a descriptor that is closed */
        close_wake();
    }
    close_link();
    while (stashed)
        phos_packet_free(&stash[--stashed]);
    phos_tell_end();
}

void phos_connection_forked(void)
{
    close_wake();
    close_link();
}

/* ---- waiting ---- */

static void drain(int wake)
{
    uint64_t ignored;
    struct pollfd polled = {.fd = wake, .events = POLLIN};
    if (poll(&polled, 1, 0) > 0 && polled.revents & POLLIN && read(wake, &ignored, sizeof ignored) < 0) {
        /* Somebody else's by now; it is made anew with the next connection. */
    }
}

uint64_t phos_connection_patience(bool trims)
{
    uint64_t telling = phos_tell_patience(), trimming = trims ? phos_span_patience() : PHOS_NOTHING_WAITS;
    return telling < trimming ? telling : trimming;
}

/* Lets the application make its driver calls first (patience.h says why): until it rests, phosd speaks, somebody waits, or
 * patience ends. Awake, it need not be woken for each of them. Answers phos_block_changes as it then was. */
static uint64_t step_aside(int wake, bool trims)
{
    for (;;) {
        uint64_t before = phos_block_changes, patience = phos_connection_patience(trims);
        if (!patience || patience == PHOS_NOTHING_WAITS || atomic_load(&hurried))
            return before;
        atomic_store(&wake_set, true);
        drain(wake);
        struct pollfd polled[2] = {{.fd = link_fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
        if (poll(polled, 2, PHOS_QUIET_MS) || phos_block_changes == before)
            return before;
    }
}

bool phos_connection_tell(bool trims)
{
    int wake = atomic_load(&wake_fd);
    uint64_t changes = step_aside(wake, trims);
    drain(wake);
    /* In this order: who leaves word from here on finds both down, and wakes us. */
    atomic_store(&wake_set, false);
    /* First: what is gone need not be told of. */
    if (trims)
        for (uint64_t end = phos_now_ns() + TRIM_NS; !atomic_load(&hurried) && phos_now_ns() < end && phos_span_trim(&changes);)
            ;
    return phos_tell_all(atomic_exchange(&hurried, false));
}

bool phos_connection_wait(int timeout_ms)
{
    struct pollfd polled[2] = {{.fd = link_fd, .events = POLLIN}, {.fd = atomic_load(&wake_fd), .events = POLLIN}};
    if (poll(polled, 2, timeout_ms) < 0 && errno != EINTR)
        return false;
    return ours() && !(polled[0].revents & POLLNVAL);
}
