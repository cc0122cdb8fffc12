/* One call at a time, with the GPU at rest before and after it. What must not happen is that the audit makes a program
 * wait for ever: work that waits for other work, which is not launched because a launch is awaited here, is left alone
 * after a while (a collective of several threads, a kernel that waits for its host). */
#include "audit.h"
#include "audit_link.h"
#include "blocks.h"
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "gate.h"
#include "library.h"
#include "log.h"
#include "memory.h"
#include "quiesce.h"
#include "runtime.h"
#include "tell.h"
#include "track.h"
#include "window.h"
#include "wire_link.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TURN_SECONDS 20    /* longest wait for another thread's call */
#define WORK_NS 5000000000 /* longest wait for the work of a call */
#define TOLD_NS 10000000000
#define RANGES_A_PACKET 1500 /* of 64 KiB */
#define ARGUMENTS_MOST 4096
#define NAME_MOST 240
#define KERNELS_NAMED 6 /* of a graph */

enum { NOT_AUDITED, HAS_TURN, AUDITED };

atomic_bool phos_audit_on;

static char audit_name[64]; /* written once, before phos_audit_on is set */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool ended;     /* phosd or the audit is gone: nothing more is compared */
static atomic_bool disturbed; /* a thread did not get its turn in time, and made its call meanwhile */
/* Guarded by the turn. */
static uint64_t described;  /* kernels that were known when the table of descriptors was last asked for */
static uint64_t table;      /* number of the table that came then */
static CUevent unfinished;  /* behind the work that was not awaited to its end */
static int cancel_state;    /* of the thread that has the turn */

/* What the call that this thread is about to make is: see phos_audit_arguments(). */
static __thread struct {
    uint64_t table; /* that the touches were worked out by, or an earlier one */
    bool graph;
    uint32_t size;
    char *text; /* the parameter block, or the graph's description; freed with the next note */
} note;

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static void clear_note(void)
{
    free(note.text);
    note.text = NULL;
    note.size = 0;
    note.graph = false;
}

void phos_audit_arguments(struct phos_kernel *kernel, const struct phos_arguments *arguments)
{
    void *block;
    size_t size;
    clear_note();
    if (!phos_kernel_copy(kernel, arguments, &block, &size))
        return;
    note.text = block;
    note.size = (uint32_t)(size < ARGUMENTS_MOST ? size : ARGUMENTS_MOST);
}

void phos_audit_graph(const struct phos_nodes *nodes)
{
    clear_note();
    note.graph = true;
    note.text = calloc(1, NAME_MOST + 1);
    if (!note.text)
        return;
    /* The first by the alphabet: nodes lie in no order that another run would have too. */
    const char *named[KERNELS_NAMED + 1];
    size_t names = 0, at = (size_t)snprintf(note.text, NAME_MOST, "graph of %zu nodes", nodes->count);
    for (size_t i = 0; i < nodes->count; i++) {
        const char *name = nodes->list[i].kernel ? phos_kernel_name(nodes->list[i].kernel) : NULL;
        size_t n = 0;
        while (name && n < names && strcmp(named[n], name) < 0)
            n++;
        if (!name || nodes->list[i].disabled || (n < names && !strcmp(named[n], name)))
            continue;
        memmove(&named[n + 1], &named[n], (names - n) * sizeof *named);
        named[n] = name;
        names = names < KERNELS_NAMED ? names + 1 : KERNELS_NAMED;
    }
    for (size_t n = 0; n < names && at < NAME_MOST; n++)
        at += (size_t)snprintf(note.text + at, NAME_MOST - at, "%s%.60s", n ? ", " : ": ", named[n]);
}

/* ---- turns ---- */

static bool take_turn(void)
{
    struct timespec deadline;
    int cancel;
    if (atomic_load(&ended))
        return false;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += TURN_SECONDS;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* it would end with the turn */
    if (pthread_mutex_timedlock(&turn, &deadline)) {
        atomic_store(&disturbed, true);
        pthread_setcancelstate(cancel, NULL);
        return false;
    }
    cancel_state = cancel;
    return true;
}

static void leave_turn(void)
{
    int cancel = cancel_state;
    pthread_mutex_unlock(&turn);
    pthread_setcancelstate(cancel, NULL);
}

/* The gate stays traced: only a window has what its other half needs. */
static void give_up(const char *why)
{
    if (why)
        phos_warn("the audit ends here: %s", why);
    phos_audit_hang_up();
    atomic_store(&ended, true);
}

/* ---- the GPU at rest ---- */

/* False: it has not been reached within the time, and is `unfinished` from now on. */
static bool reached(CUevent event, uint64_t limit_ns)
{
    uint64_t start = phos_now_ns();
    CUresult result;
    while ((result = phos_real.cuEventQuery(event)) == CUDA_ERROR_NOT_READY && phos_now_ns() - start < limit_ns)
        nap();
    if (result == CUDA_ERROR_NOT_READY) {
        unfinished = event;
        return false;
    }
    unfinished = NULL;
    phos_real.cuEventDestroy_v2(event);
    return result == CUDA_SUCCESS;
}

/* Everything that was queued, in all contexts. False: something cannot be waited for now. */
static bool all_at_rest(void)
{
    PHOS_RELAXED;
    if (unfinished && !reached(unfinished, 0))
        return false;
    size_t count;
    PHOS_FREES struct phos_context *contexts = phos_contexts_seen(&count);
    for (size_t i = 0; i < count; i++) {
        CUresult result;
        CUevent event = phos_event_behind(contexts[i].context, &result);
        if (event ? !reached(event, WORK_NS) : result != CUDA_SUCCESS)
            return false;
    }
    return true;
}

/* Why the work of a call is not known to be done; NULL: it is. */
static const char *await(const struct phos_touches *touches)
{
    uint64_t start = phos_now_ns();
    for (;;) {
        if (phos_captures())
            return "another stream is being captured";
        CUresult result;
        {
            PHOS_RELAXED;
            result = phos_real.cuStreamQuery(touches->stream);
        }
        if (result == CUDA_SUCCESS)
            return NULL;
        if (result != CUDA_ERROR_NOT_READY)
            return "the call or its work failed";
        if (phos_now_ns() - start > WORK_NS)
            break;
        nap();
    }
    PHOS_RELAXED;
    CUevent event; /* what a call that failed leaves there is not one */
    if (!unfinished && phos_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
        if (phos_real.cuEventRecord(event, touches->stream) == CUDA_SUCCESS)
            unfinished = event;
        else
            phos_real.cuEventDestroy_v2(event); /* of another context's stream; all_at_rest() finds it by itself */
    }
    return "its work waits for something that comes later";
}

/* ---- descriptors ---- */

/* With the turn: all kernels that there are have been told of, and their descriptors are here. */
static void fetch_descriptors(void)
{
    uint64_t known, told, start = phos_now_ns();
    while (!phos_kernels_count(&known, &told)) {
        if (phos_now_ns() - start > TOLD_NS)
            break; /* no connection, or a module that cannot be told of */
        phos_control_hurry();
        nap();
    }
    described = known;
    Phos__Wire__AuditDescribe describe = PHOS__WIRE__AUDIT_DESCRIBE__INIT;
    describe.audit = audit_name;
    describe.session = (ProtobufCBinaryData){sizeof phos_session, phos_session};
    describe.kernels = told;
    Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
    envelope.audit_describe = &describe;
    struct phos_packet answer;
    if (!phos_audit_ask(&envelope, PHOS__WIRE__ENVELOPE__BODY_AUDIT_DESCRIBE, PHOS__WIRE__ENVELOPE__BODY_ACCESS_TABLE,
                        &answer)) {
        give_up("phosd has no descriptors for it");
        return;
    }
    const char *problem = answer.descriptor_count == 1 ? phos_access_table_take(answer.descriptors[0]) : "none came";
    if (problem)
        phos_warn("the table of access descriptors cannot be used: %s", problem);
    table++;
    phos_packet_free(&answer);
}

bool phos_audit_again(struct phos_touches *touches)
{
    uint64_t known, told;
    /* Not only of what touches something: by its layout alone, a kernel without pointers touches nothing. */
    if (!take_turn())
        return false;
    phos_kernels_count(&known, &told);
    if (known != described && !atomic_load(&ended))
        fetch_descriptors();
    bool fresh = note.table != table; /* or another thread has fetched it meanwhile */
    note.table = table;
    leave_turn();
    if (fresh) {
        clear_note();
        phos_touches_end(touches);
    }
    return fresh;
}

/* ---- one call ---- */

static Phos__Wire__AuditBegin__Kind kind_of(const struct phos_touches *touches)
{
    if (note.graph)
        return PHOS__WIRE__AUDIT_BEGIN__KIND__GRAPH;
    if (touches->source != PHOS_SOURCE_NONE)
        return PHOS__WIRE__AUDIT_BEGIN__KIND__KERNEL;
    const char *name = touches->kernel ? touches->kernel : "cuLaunch";
    bool launch = !strncmp(name, "cuLaunch", 8) || !strncmp(name, "cuGraph", 7);
    return launch || touches->module ? PHOS__WIRE__AUDIT_BEGIN__KIND__UNKNOWN : PHOS__WIRE__AUDIT_BEGIN__KIND__CALL;
}

/* False: there is no phosd any more. */
static bool send_ranges(Phos__Wire__AuditRange *list, size_t count)
{
    Phos__Wire__AuditRange *pointers[RANGES_A_PACKET];
    for (size_t i = 0; i < count; i += RANGES_A_PACKET) {
        Phos__Wire__AuditRanges ranges = PHOS__WIRE__AUDIT_RANGES__INIT;
        ranges.n_range = count - i < RANGES_A_PACKET ? count - i : RANGES_A_PACKET;
        for (size_t n = 0; n < ranges.n_range; n++)
            pointers[n] = &list[i + n];
        ranges.range = pointers;
        Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
        envelope.audit_ranges = &ranges;
        if (!phos_audit_send(&envelope, PHOS__WIRE__ENVELOPE__BODY_AUDIT_RANGES))
            return false;
    }
    return true;
}

/* Says what is about to happen. True: phosd knows what memory looks like before it. `why` it is not to be compared, or
 * NULL. */
static bool begin(const struct phos_touches *touches, uint64_t newest, const char *why)
{
    size_t count;
    bool failed;
    PHOS_FREES struct phos_audit_range *ranges = phos_audit_ranges(touches, &count, &failed);
    PHOS_FREES Phos__Wire__AuditRange *messages = calloc(count + 1, sizeof *messages);
    if (failed || !messages)
        return false;
    for (size_t i = 0; i < count; i++) {
        messages[i] = (Phos__Wire__AuditRange)PHOS__WIRE__AUDIT_RANGE__INIT;
        messages[i].block = ranges[i].block;
        messages[i].offset = ranges[i].offset;
        messages[i].size = ranges[i].size;
    }
    const char *library = touches->source != PHOS_SOURCE_NONE ? phos_library_call() : NULL;
    Phos__Wire__AuditBegin begin = PHOS__WIRE__AUDIT_BEGIN__INIT;
    begin.audit = audit_name;
    begin.session = (ProtobufCBinaryData){sizeof phos_session, phos_session};
    begin.kernel = (char *)(note.graph && note.text ? note.text : touches->kernel ? touches->kernel : "unknown");
    begin.module = touches->module;
    begin.kind = kind_of(touches);
    begin.source = touches->source;
    begin.library = (char *)(library ? library : "");
    begin.anything = touches->anything & PHOS_WRITES;
    if (!note.graph)
        begin.arguments = (ProtobufCBinaryData){note.text ? note.size : 0, (uint8_t *)note.text};
    begin.newest_block = newest;
    begin.skipped = (char *)(why ? why : "");
    Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
    envelope.audit_begin = &begin;
    struct phos_packet answer;
    if (!send_ranges(messages, count) || !phos_audit_ask(&envelope, PHOS__WIRE__ENVELOPE__BODY_AUDIT_BEGIN,
                                                         PHOS__WIRE__ENVELOPE__BODY_AUDIT_READY, &answer)) {
        give_up("phosd is gone");
        return false;
    }
    bool wanted = answer.envelope->audit_ready->wanted, over = answer.envelope->audit_ready->over;
    phos_packet_free(&answer);
    if (over)
        give_up(NULL);
    return wanted;
}

void phos_audit_before(struct phos_touches *touches)
{
    bool writes = touches->anything & PHOS_WRITES;
    for (size_t i = 0; i < touches->count && !writes; i++)
        writes = touches->list[i].access & (PHOS_WRITES | PHOS_WRITES << PHOS_THROUGH);
    if (touches->nothing) {
        clear_note();
        return;
    }
    if (!take_turn())
        return;
    touches->audit = HAS_TURN;
    /* A copy out of device memory, or a wait for a value there, says all there is to know. It is awaited all the same:
     * it may be what the next call would wait for in vain. */
    if (touches->source == PHOS_SOURCE_NONE && !writes) {
        clear_note();
        return;
    }
    atomic_store(&disturbed, false);
    const char *why = all_at_rest() ? NULL : "other work could not be waited for";
    uint64_t newest = why ? 0 : phos_audit_newest_block();
    if (!why && !newest)
        why = "phosd was not told of all memory";
    if (why)
        phos_touches_through_nothing(touches); /* it is not judged */
    else if (phos_touches_through(touches, PHOS_WRITES))
        phos_window_follow(touches, PHOS_WRITES, true);
    if (begin(touches, newest, why))
        touches->audit = AUDITED;
    else if (why) { /* nor can this call's work be */
        touches->audit = NOT_AUDITED;
        leave_turn();
    }
    clear_note();
}

/* Names what lies where nothing was predicted. */
static void name_places(const Phos__Wire__AuditCompared *compared)
{
    size_t count = compared->n_wrong;
    PHOS_FREES Phos__Wire__AuditWrong__Place *places = calloc(count + 1, sizeof *places);
    PHOS_FREES Phos__Wire__AuditWrong__Place **pointers = calloc(count + 1, sizeof *pointers);
    Phos__Wire__AuditWrong wrong = PHOS__WIRE__AUDIT_WRONG__INIT;
    for (size_t i = 0; places && pointers && i < count; i++) {
        places[i] = (Phos__Wire__AuditWrong__Place)PHOS__WIRE__AUDIT_WRONG__PLACE__INIT;
        pointers[i] = &places[i];
        if (!phos_audit_place(compared->wrong[i], &places[i]))
            phos_debug("what an audit found is not mapped any more");
        wrong.n_place = i + 1;
    }
    wrong.place = pointers;
    Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
    envelope.audit_wrong = &wrong;
    struct phos_packet answer;
    if (phos_audit_ask(&envelope, PHOS__WIRE__ENVELOPE__BODY_AUDIT_WRONG, PHOS__WIRE__ENVELOPE__BODY_DONE, &answer))
        phos_packet_free(&answer);
    else
        give_up("phosd is gone");
}

void phos_audit_after(struct phos_touches *touches, CUresult result)
{
    if (touches->audit == NOT_AUDITED)
        return;
    const char *skipped = result == CUDA_SUCCESS ? await(touches) : "the call failed";
    if (atomic_load(&disturbed) && !skipped)
        skipped = "another thread made a call meanwhile";
    if (touches->audit == AUDITED && !atomic_load(&ended)) {
        Phos__Wire__AuditEnd end = PHOS__WIRE__AUDIT_END__INIT;
        end.skipped = (char *)(skipped ? skipped : "");
        Phos__Wire__Envelope envelope = PHOS__WIRE__ENVELOPE__INIT;
        envelope.audit_end = &end;
        struct phos_packet answer;
        if (!phos_audit_ask(&envelope, PHOS__WIRE__ENVELOPE__BODY_AUDIT_END, PHOS__WIRE__ENVELOPE__BODY_AUDIT_COMPARED,
                            &answer))
            give_up("phosd is gone");
        else {
            if (answer.envelope->audit_compared->n_wrong)
                name_places(answer.envelope->audit_compared);
            phos_packet_free(&answer);
        }
    }
    touches->audit = NOT_AUDITED;
    leave_turn();
}

void phos_audit_start(void)
{
    const char *name = getenv("PHOS_AUDIT");
    if (!name || !*name || strlen(name) >= sizeof audit_name)
        return;
    strcpy(audit_name, name);
    atomic_store(&phos_audit_on, true);
    phos_gate_trace(true, NULL);
}

void phos_audit_forked(void)
{
    atomic_store(&phos_audit_on, false);
    pthread_mutex_init(&turn, NULL);
    phos_audit_hang_up();
}
