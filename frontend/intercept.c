/* The expanded hooks: no policy here. What each one does follows from cuda_api.def and own_code.py. */
#include "audit.h"
#include "gate.h"
#include "log.h"
#include "memory.h"
#include "phos_api.h"
#include "runtime.h"
#include "touch.h"
#include "window.h"

#include <pthread.h>
#include <stddef.h>

#define HOOK_EXPORT(symbol, parameters) \
    extern CUresult export_##symbol parameters __asm__(#symbol) \
        __attribute__((alias("hook_" #symbol), visibility("default")))

/* ABSENT: a program that was linked against libcuda, or that kept a pointer, but there is none to call. */
static CUresult refused(enum phos_gate_answer answer)
{
    return answer == PHOS_GATE_REFUSED ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_ERROR_NOT_INITIALIZED;
}

/* A thread that is being cancelled ends in the next call that is a cancellation point, be it one of the driver's: here it would
 * end with a lock of ours, and everybody would wait for that. */
#define HOOK_WHOLE(call) \
    ({ \
        int cancel_; \
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_); \
        __typeof__(call) whole_ = call; \
        pthread_setcancelstate(cancel_, &cancel_); \
        whole_; \
    })

/* For PHOS_RETRIED, of any call: what the driver lacks may be memory that was freed and is kept here. Not of a nested one: it
 * may be made with the lock held that this takes. */
static __attribute__((noinline, cold)) bool gave_back(enum phos_gate_answer answer, unsigned *step)
{
    return answer != PHOS_GATE_NESTED && phos_serving() && HOOK_WHOLE(phos_driver_recover(PHOS_DEVICE_HERE, step));
}

#define HOOK_PASS(entry, call) \
    uint32_t before_; \
    enum phos_gate_answer answer_ = phos_gate_enter(entry, &before_); \
    if (__builtin_expect(answer_ > PHOS_GATE_NESTED, 0)) { \
        if (answer_ > PHOS_GATE_TRACED_PASS) \
            return refused(answer_); \
        phos_gate_untrace_self(); /* it may wait for the GPU, which the end of a window must not do for it */ \
        CUresult traced_ = phos_window_result(call); \
        phos_gate_leave(before_); \
        return traced_; \
    } \
    CUresult result_ = call; \
    phos_gate_leave(before_); \
    return result_

/* A call that a window has to know of from its beginning to its end: then it is `traced` and stays marked; else it is
 * `plain`. */
#define HOOK_MARKED(entry, plain, traced) \
    uint32_t before_; \
    CUresult result_; \
    enum phos_gate_answer answer_ = phos_gate_enter(entry, &before_); \
    if (__builtin_expect(answer_ > PHOS_GATE_NESTED, 0)) { \
        if (answer_ > PHOS_GATE_TRACED_PASS) \
            return refused(answer_); \
        result_ = traced; \
        phos_gate_untrace_self(); \
    } else \
        result_ = plain; \
    phos_gate_leave(before_); \
    return result_

/* Nested calls go to the driver itself: they are the driver's own business, or made with a lock of ours held. So do
 * calls while the frontend is not serving (before cuInit succeeded; in a forked child; after a failure of ours). In a
 * window they stay marked to their end: memory that comes or goes is the window's business. */
#define HOOK_SERVE(entry, call, direct) \
    HOOK_MARKED(entry, answer_ == PHOS_GATE_PASS && phos_serving() ? HOOK_WHOLE(call) : direct, \
                phos_window_result(phos_serving() ? HOOK_WHOLE(call) : direct))

/* What touches device memory. `traced` is a function of its own, out of the way of an open, untraced gate: it has the
 * list of touches on its stack. */
#define HOOK_TOUCH(entry, call, traced) HOOK_MARKED(entry, call, HOOK_WHOLE(traced))

/* An audit may learn of better descriptors by the call itself, which was the first to name a kernel. */
#define HOOK_TRACED(touch, per_thread, name, call) \
    struct phos_touches touches_; \
    do { \
        touch; \
        phos_touches_complete(&touches_, per_thread, name); \
    } while (phos_audit_active() && phos_audit_again(&touches_)); \
    phos_window_before(&touches_); \
    CUresult result_ = call; \
    phos_window_after(&touches_, result_); \
    phos_touches_end(&touches_); \
    return result_

static inline CUstream phos_per_thread(CUstream stream)
{
    return stream ? stream : CU_STREAM_PER_THREAD;
}

static inline bool phos_is_own(CUstream stream)
{
    return stream == CU_STREAM_PER_THREAD;
}

/* A question about a stream. The first one about a thread's own makes it, and crashes while the process is checkpointed.
 * `real`: NULL until the driver has been bound, which the gate does. */
#define HOOK_QUERY(entry, own, real, call) \
    if (__builtin_expect(!(own) && real, 1)) \
        return call; \
    HOOK_PASS(entry, call)

#include "phos_hooks.inc"
