/* What every exported function does first and last: is the driver initialized, is this a forked child, is the checkpoint API
 * holding calls back, is a fault due. The exported functions themselves are generated (gen_stubs.py). */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "softgpu.h"

_Thread_local struct sg_thread sg_thread;

static atomic_bool initialized, forked, over;
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;

/* The gate: a call adds one to `active`, then looks at `gate`; the closer sets `gate`, then waits for `active` to fall to 0.
 * Sequentially consistent, so one of the two sees the other. */
enum { GATE_OPEN, GATE_CLOSED, GATE_FAILED };
static _Atomic uint32_t gate;   /* futex word of the calls that wait */
static _Atomic uint32_t active; /* futex word of the closer */
static atomic_bool away;        /* nothing of this process is on the GPU */
static pthread_mutex_t poll_lock = PTHREAD_MUTEX_INITIALIZER;

static void futex_wait(_Atomic uint32_t *word, uint32_t value, const struct timespec *timeout)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

bool sg_initialized(void)
{
    return atomic_load(&initialized);
}

bool sg_forked(void)
{
    return atomic_load(&forked);
}

static void gate_exit(void)
{
    if (atomic_fetch_sub(&active, 1) == 1 && atomic_load(&gate) != GATE_OPEN)
        futex_wake(&active);
}

CUresult sg_enter(unsigned index, bool gated, bool per_thread)
{
    (void)index;
    if (!atomic_load_explicit(&initialized, memory_order_acquire) || atomic_load_explicit(&forked, memory_order_relaxed))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load_explicit(&over, memory_order_relaxed))
        return CUDA_ERROR_DEINITIALIZED;
    if (gated) {
        if (sg_thread.in_callback)
            return CUDA_ERROR_NOT_PERMITTED;
        if (!sg_thread.depth) {
            pthread_testcancel(); /* a driver opens files, for one; but not with a lock of its own */
            pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &sg_thread.cancel);
        }
        if (sg_thread.depth++ == 0)
            for (;;) {
                atomic_fetch_add(&active, 1);
                uint32_t state = atomic_load(&gate);
                if (state == GATE_OPEN)
                    break;
                gate_exit();
                if (state == GATE_FAILED) {
                    sg_thread.depth--;
                    pthread_setcancelstate(sg_thread.cancel, &sg_thread.cancel);
                    return CUDA_ERROR_DEVICE_UNAVAILABLE;
                }
                futex_wait(&gate, GATE_CLOSED, NULL);
            }
    }
    sg_thread.per_thread_default = per_thread;
    return CUDA_SUCCESS;
}

CUresult sg_leave(bool gated, CUresult result)
{
    if (gated && --sg_thread.depth == 0) {
        gate_exit();
        pthread_setcancelstate(sg_thread.cancel, &sg_thread.cancel);
    }
    return result;
}

void sg_set_away(bool is_away)
{
    atomic_store(&away, is_away);
}

void sg_polls_stop(void)
{
    pthread_mutex_lock(&poll_lock);
}

void sg_polls_go(void)
{
    pthread_mutex_unlock(&poll_lock);
}

/* What the driver does (measured with 580.159 on an H100): the lock is one of its mutexes, and the thread that carries a
 * checkpoint or a restore out waits for whoever holds it, for ever if that one is stopped. */
void sg_poll_begin(unsigned index)
{
    sg_polls_stop();
    uint64_t until = sg_now_ns() + (uint64_t)sg_settings()->poll_us * 1000u;
    while (sg_now_ns() < until)
        ; /* at work, not asleep */
    if (!atomic_load(&away))
        return;
    sg_log("%s was called while process %d is checkpointed: the driver of a GPU crashes here", sg_entries[index].symbol,
           (int)getpid());
    raise(SIGSEGV);
}

void sg_poll_end(void)
{
    sg_polls_go();
}

CUresult sg_unsupported(unsigned index)
{
    (void)index;
    if (!sg_initialized() || sg_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    return CUDA_ERROR_NOT_SUPPORTED;
}

bool sg_gate_close(uint64_t deadline)
{
    atomic_store(&gate, GATE_CLOSED);
    for (;;) {
        uint32_t running = atomic_load(&active);
        if (!running)
            return true;
        uint64_t now = sg_now_ns();
        if (deadline && now >= deadline) {
            sg_gate_open();
            return false;
        }
        /* At most 50 ms a time: a call that looked at the gate before it closed leaves without waking anybody. */
        uint64_t left = 50000000u;
        if (deadline && deadline - now < left)
            left = deadline - now;
        struct timespec timeout = {.tv_nsec = (long)left};
        futex_wait(&active, running, &timeout);
    }
}

void sg_gate_open(void)
{
    atomic_store(&gate, GATE_OPEN);
    futex_wake(&gate);
}

void sg_gate_fail(void)
{
    atomic_store(&gate, GATE_FAILED);
    futex_wake(&gate);
}

/* In the child of fork: no CUDA, no descriptor of ours but the one that CRIU refuses, no control thread (threads are not
 * inherited). No lock is taken: one may be held by a thread that does not exist here. */
static void after_fork(void)
{
    if (!atomic_load(&initialized))
        return;
    atomic_store(&forked, true);
    sg_control_forget();
}

static void process_exits(void)
{
    atomic_store(&over, true);
}

CUresult softgpu_cuInit(unsigned int Flags)
{
    if (Flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (sg_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&init_lock);
    CUresult result = CUDA_SUCCESS;
    if (!atomic_load(&initialized)) {
        if (sg_settings()->devices <= 0)
            result = CUDA_ERROR_NO_DEVICE;
        else if (!sg_devices_init() || !sg_memory_init() || !sg_guard_open() || !sg_control_start())
            result = CUDA_ERROR_OPERATING_SYSTEM;
        else {
            pthread_atfork(NULL, NULL, after_fork);
            atexit(process_exits);
            atomic_store_explicit(&initialized, true, memory_order_release);
        }
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

CUresult softgpu_cuDriverGetVersion(int *driverVersion)
{
    if (!driverVersion)
        return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = sg_settings()->driver_version;
    return CUDA_SUCCESS;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include "softgpu_api.inc"
#pragma GCC diagnostic pop
