/* The control thread: answers phosd (request.c), and tells it of memory as it comes and goes (tell.c), over one connection
 * after the other (connection.c). hold.c says what it does while detached. */
#include "control.h"
#include "clock.h"
#include "connection.h"
#include "descriptors.h"
#include "gate.h"
#include "hold.h"
#include "log.h"
#include "parts.h"
#include "patience.h"
#include "pool.h"
#include "request.h"
#include "residue.h"
#include "runtime.h"
#include "span.h"
#include "tell.h"
#include "thread.h"
#include "window.h"

#include <string.h>
#include <sys/prctl.h>

#define RETRY_MS 100 /* between attempts to connect */

static bool detached(void)
{
    return phos_request_state() == PHOS__WIRE__GATE_STATE__DETACHED;
}

static bool is_open(void)
{
    return phos_request_state() == PHOS__WIRE__GATE_STATE__OPEN;
}

/* Whether freed memory may be given back. Not while it may be copied aside because a kernel's arguments still name it. */
static bool may_trim(void)
{
    return is_open() && !phos_window_copies();
}

/* How long to sleep if nothing comes. Totals are reported at most ten times a second; and a look every two seconds in case
 * a wake-up got lost. */
static int patience(void)
{
    int timeout = detached() || !phos_tell_later() ? 2000 : 100;
    if (!detached() && !phos_exiting() && phos_connection_patience(may_trim()) != PHOS_NOTHING_WAITS)
        timeout = 1;
    phos_parts_settle();
    if (phos_window_copies()) {
        phos_window_look();
        timeout = timeout < 100 ? timeout : 100;
    }
    if (phos_twins_left()) {
        phos_twins_settle(false);
        timeout = timeout < 20 ? timeout : 20;
    }
    return timeout;
}

/* Everything that has come. False: the connection has served its purpose, or is gone. */
static bool serve_packets(void)
{
    struct phos_packet packet;
    for (;;) {
        enum phos_received received = phos_connection_next(&packet);
        if (received != PHOS_RECEIVED)
            return received == PHOS_RECEIVED_NOTHING;
        bool going = phos_request_take(&packet);
        phos_packet_free(&packet);
        if (!going)
            return false;
    }
}

static bool tell(void)
{
    if (phos_request_opens())
        return true;
    if (is_open())
        phos_connection_raise();
    if (may_trim())
        phos_pool_rest();
    return phos_connection_tell(may_trim());
}

/* Until the next attempt to connect. Without a connection there is nothing by which freed memory could wake us. */
static void rest(void)
{
    phos_sleep_ms(RETRY_MS);
    if (may_trim())
        phos_pool_rest();
    for (uint64_t end = phos_now_ns() + RETRY_MS * 1000000u;
         may_trim() && phos_span_patience() != PHOS_NOTHING_WAITS && phos_now_ns() < end;) {
        uint64_t changes = phos_block_changes;
        phos_sleep_ms(PHOS_QUIET_MS);
        while (phos_now_ns() < end && phos_span_trim(&changes))
            ;
    }
}

/* Until the connection ends, by either side. */
static void serve_connection(void)
{
    if (phos_tell_begin(phos_request_state()))
        while ((detached() || tell()) && phos_connection_wait(patience()) && serve_packets())
            ;
    phos_window_abandoned();
    phos_connection_drop();
    phos_window_end(); /* nobody saves anything any more */
    phos_request_abandoned();
}

static void *control_main(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "phos");
    phos_gate_exempt_self();
    /* Our driver calls must neither fail because some thread captures a stream nor spoil its capture. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    phos_real.cuThreadExchangeStreamCaptureMode(&mode);
    phos_span_trimmed();
    for (;;) {
        int link = detached() ? phos_hold_wait() : phos_link_connect(phos_hold_socket(), false);
        phos_connection_tried(link < 0);
        if (link >= 0 && phos_connection_take(link, detached()))
            serve_connection();
        else
            rest();
    }
    return NULL;
}

void phos_control_start(void)
{
    phos_hold_init();
    int error = phos_thread_start(control_main, NULL);
    if (error)
        phos_warn("no control thread (%s): this process cannot be checkpointed by PhOS", strerror(error));
}

void phos_control_forked(void)
{
    phos_descriptors_lower();
    phos_connection_forked();
    phos_window_forked();
    phos_residue_forked();
    phos_tell_forked();
    phos_parts_forked();
}
