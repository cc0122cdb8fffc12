/* Lazy restore: before a call what it may read or write is waited for; phosd fetches that first (DESIGN §4, "restore").
 *
 * In a strict window nothing has access before all of its data is there: memory is mapped ("shut"), and gets access (is
 * "opened") right ahead of the first call that touches it. Then a call that touches what no guess named faults, instead of
 * computing with whatever was there; phosd is told, ends the process, and the restore is made anew, eagerly. */
#include "cleanup.h"
#include "clock.h"
#include "detach.h"
#include "gate.h"
#include "log.h"
#include "memory.h"
#include "track.h"
#include "window_private.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 20000      /* loading a chunk takes phosd four times as long */
#define END_NS 10000000000 /* phosd ends a process that met with a wrong guess */

atomic_bool phos_window_strict;

/* Chunks that a call has to wait for. */
struct missing {
    uint32_t *list;
    size_t count, capacity;
    bool failed; /* out of host memory */
    bool strict;
    uint32_t inline_list[128];
};

static bool is_there(uint32_t chunk)
{
    return __atomic_load_n(&phos_window.chunks->state[chunk], __ATOMIC_ACQUIRE) == PHOS_CHUNK_SAVED;
}

static void add(struct missing *missing, uint32_t chunk)
{
    if (missing->count == missing->capacity) {
        bool moved = missing->list != missing->inline_list;
        uint32_t *grown = realloc(moved ? missing->list : NULL, missing->capacity * 2 * sizeof *grown);
        if (!grown) {
            missing->failed = true;
            return;
        }
        if (!moved)
            memcpy(grown, missing->inline_list, sizeof missing->inline_list);
        missing->list = grown;
        missing->capacity *= 2;
    }
    missing->list[missing->count++] = chunk;
}

/* A mapping that is shut is opened as a whole: the driver gives access to whole mappings only. */
static void add_mapping(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct missing *missing = cookie;
    struct phos_chunk_range chunks = phos_window_chunks(mapping, begin, end);
    phos_window_note(chunks, false); /* checkpoints of this process see its writes themselves */
    if (mapping->shut)
        chunks = phos_window_chunks(mapping, mapping->range.address, mapping->range.address + mapping->range.size);
    else if (missing->strict)
        return;
    for (uint32_t chunk = chunks.first; chunk < chunks.end; chunk++)
        if (!is_there(chunk))
            add(missing, chunk);
}

static void open_mapping(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    (void)begin, (void)end;
    struct phos_error *error = cookie;
    if (!mapping->shut || error->text[0])
        return;
    uint64_t start = phos_now_ns();
    PHOS_RELAXED;
    if (!phos_mapping_open(mapping, error))
        return;
    phos_count(&phos_window.table->loading.opened, 1);
    phos_count(&phos_window.table->loading.open_ns, phos_now_ns() - start);
}

/* Nothing may compute with memory that it cannot have: the driver's own error is what it gets then, or worse. */
static void refuse(const struct phos_error *error)
{
    phos_warn("memory that was restored could not be opened: %s", error->text);
}

static void wait_for_all(void)
{
    uint64_t start = phos_now_ns();
    while (!phos_window_closed())
        nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    phos_count(&phos_window.table->counts.anything, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
}

static void wait_for(const struct missing *missing)
{
    if (missing->failed) {
        wait_for_all();
        return;
    }
    uint64_t start = phos_now_ns();
    {
        PHOS_LOCKED(&phos_window_lock);
        for (size_t i = 0; i < missing->count; i++) {
            uint32_t chunk = missing->list[i];
            uint64_t bit = (uint64_t)1 << chunk % 64;
            if (phos_window.queued[chunk / 64] & bit)
                continue;
            phos_window.queued[chunk / 64] |= bit;
            phos_window_ask(chunk);
        }
    }
    for (size_t i = 0; i < missing->count; i++)
        while (!is_there(missing->list[i]) && !phos_window_closed())
            nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    phos_count(&phos_window.table->counts.waits, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
}

/* Everything that is there by now, and in the end that is everything. */
static void load_anything(void)
{
    struct phos_error error = {0};
    wait_for_all();
    PHOS_LOCKED(&phos_memory_lock);
    PHOS_RELAXED;
    if (!phos_mappings_open(NULL, &error))
        refuse(&error);
}

/* What is mapped where may change while nobody holds the lock: look again after each wait. */
static void load(const struct phos_touches *touches)
{
    for (;;) {
        struct missing missing; /* not all of it set: the inline list is most of its size */
        missing.list = missing.inline_list;
        missing.count = 0;
        missing.capacity = sizeof missing.inline_list / sizeof *missing.inline_list;
        missing.failed = false;
        missing.strict = phos_window.table->mode == PHOS_WINDOW_STRICT;
        {
            PHOS_LOCKED(&phos_memory_lock);
            for (size_t i = 0; i < touches->count; i++)
                phos_window_visit(&touches->list[i], add_mapping, &missing);
            if (!missing.count && !missing.failed) {
                struct phos_error error = {0};
                for (size_t i = 0; missing.strict && i < touches->count; i++)
                    phos_window_visit(&touches->list[i], open_mapping, &error);
                if (error.text[0])
                    refuse(&error);
                return;
            }
        }
        wait_for(&missing);
        if (missing.list != missing.inline_list)
            free(missing.list);
    }
}

void phos_window_launched(const struct phos_touches *touches)
{
    struct phos_window_loading *loading = &phos_window.table->loading;
    const char *name = touches->kernel ? touches->kernel : "?";
    bool launch = touches->source != PHOS_SOURCE_NONE || !strncmp(name, "cuLaunch", 8) || !strncmp(name, "cuGraphLaunch", 13);
    if (!launch)
        return;
    uint64_t none = 0;
    if (!__atomic_load_n(&loading->first_launch_ns, __ATOMIC_RELAXED))
        __atomic_compare_exchange_n(&loading->first_launch_ns, &none, phos_clock_ns(CLOCK_REALTIME), false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
    uint32_t at = __atomic_fetch_add(&loading->launches, 1, __ATOMIC_RELAXED) % PHOS_RECENT;
    char *recent = loading->recent[at];
    memset(recent, 0, PHOS_RECENT_NAME);
    memcpy(recent, name, strnlen(name, PHOS_RECENT_NAME - 1));
}

void phos_window_load(struct phos_touches *touches)
{
    uint64_t start = phos_now_ns();
    phos_count(&phos_window.table->counts.calls, 1); /* before it waits: phosd may read the counts when the wait is over */
    /* Of a kernel whose code nobody has seen, or can follow, only the arguments are known. A strict window finds out
     * what it does besides; here nothing would. */
    bool unseen = (touches->guessed || (touches->source != PHOS_SOURCE_NONE && touches->source > PHOS_SOURCE_SASS)) &&
                  !touches->documented && phos_window.table->mode != PHOS_WINDOW_STRICT;
    if ((touches->anything || unseen) && !touches->nothing) {
        phos_window_blame(touches);
        load_anything();
    } else if (!touches->nothing) {
        load(touches);
        if (phos_touches_through(touches, PHOS_READS | PHOS_WRITES)) {
            phos_window_follow(touches, PHOS_READS | PHOS_WRITES, false);
            if (touches->anything)
                load_anything();
            else
                load(touches);
        }
    }
    phos_window_launched(touches);
    phos_count(&phos_window.table->counts.call_ns, phos_now_ns() - start);
}

/* ---- wrong guesses ---- */

static bool is_fault(CUresult result)
{
    return result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED ||
           result == CUDA_ERROR_INVALID_ADDRESS_SPACE;
}

static void say_fault(CUresult result)
{
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(&phos_window.table->loading.fault, &none, (uint32_t)result, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        phos_warn("work on the GPU touched memory that was not restored yet (error %d): a guess was wrong", (int)result);
}

void phos_window_failed(CUresult result)
{
    if (!phos_twins_trapped()) {
        if (!is_fault(result) || !atomic_load(&phos_window_strict))
            return;
        PHOS_LOCKED(&phos_memory_lock); /* with which the window's end clears the flag */
        if (!atomic_load(&phos_window_strict))
            return;
        say_fault(result);
    } /* else phosd has read of it */
    /* The application must not act on an error that is ours. */
    for (uint64_t start = phos_now_ns(); phos_now_ns() - start < END_NS;)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    phos_warn("phosd did not end this process, whose restore failed: it ends itself");
    kill(getpid(), SIGKILL);
}

/* What was queued while something was shut may have faulted already. */
static void look_for_faults(void)
{
    size_t count;
    PHOS_FREES struct phos_context *list = phos_contexts(&count);
    for (size_t i = 0; list && i < count; i++) {
        CUcontext popped;
        CUstream stream;
        if (phos_real.cuCtxPushCurrent_v2(list[i].context) != CUDA_SUCCESS)
            continue;
        /* A stream of its own: asking the application's would disturb its captures. */
        CUresult result = phos_real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
        if (result == CUDA_SUCCESS) {
            result = phos_real.cuStreamQuery(stream);
            phos_real.cuStreamDestroy_v2(stream);
        }
        if (is_fault(result))
            say_fault(result);
        phos_real.cuCtxPopCurrent_v2(&popped);
    }
}

bool phos_window_loaded(void)
{
    if (phos_window.table->mode != PHOS_WINDOW_STRICT)
        return true;
    struct phos_error error = {0};
    {
        PHOS_LOCKED(&phos_memory_lock);
        phos_window.no_longer_shut = true;
        if (!phos_mappings_open(NULL, &error))
            refuse(&error);
    }
    look_for_faults();
    PHOS_LOCKED(&phos_memory_lock);
    if (__atomic_load_n(&phos_window.table->loading.fault, __ATOMIC_ACQUIRE))
        return false;
    atomic_store(&phos_window_strict, false);
    return true;
}

bool phos_window_shuts(const struct phos_block *block)
{
    return block->window_chunks && atomic_load(&phos_window_strict) && !phos_window.no_longer_shut;
}

bool phos_window_loading(void)
{
    return phos_window_is_open() &&
           (phos_window.table->mode == PHOS_WINDOW_LAZY || phos_window.table->mode == PHOS_WINDOW_STRICT);
}

void phos_window_abandoned(void)
{
    if (phos_window_loading() && !__atomic_load_n(&phos_window.chunks->closed, __ATOMIC_ACQUIRE))
        phos_window_hopeless();
}

void phos_window_hopeless(void)
{
    phos_warn("the connection to phosd ended while the GPU memory of this process was still being restored; what is not "
              "there cannot come any more, so the process ends: restore it again");
    kill(getpid(), SIGKILL);
}
