/* The gate in front of every driver call that launches work or changes state.
 *
 *     entering                                 closing
 *     thread.state = entry point               word |= CLOSED
 *     (compiler barrier)                       membarrier: every thread of the process orders its stores and loads
 *     if (word) slow path                      until no thread.state names an entry point: look again
 *
 * Of the two sides' "store mine, then load the other's" one must see the other. An ordinary Dekker pair would need a full
 * barrier on both sides; membarrier(2) pays for both on the closing side, so that an open gate costs one thread-local
 * store, one load with a branch, and one thread-local store on the way out: no lock, no atomic read-modify-write, no
 * fence. Where membarrier is missing the FENCED bit stays set, which sends every call through the slow path and its
 * fence: slower, but right.
 *
 * Tracing. In the window of a concurrent checkpoint the TRACED bit is set, which sends every call through the slow path
 * too. There a thread marks itself traced, orders that, and looks at the word again; who clears the bit issues the
 * membarrier, and then waits until no thread is marked. So after the end of tracing nobody is still at work on what the
 * window was about.
 *
 * Lock order: a thread inside the gate may take the memory lock (memory.h); nobody takes the gate's list lock with it.
 * A thread that waits at the gate holds no lock of ours.
 *
 * This header and gate.c know nothing of CUDA, so that they can be tested alone, under ThreadSanitizer. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PHOS_GATE_CLOSED = 1,  /* calls wait */
    PHOS_GATE_LOST = 2,    /* calls fail: the memory is gone for good */
    PHOS_GATE_FENCED = 4,  /* no membarrier here: every call takes the slow path */
    PHOS_GATE_UNBOUND = 8, /* the driver has not been found yet: the first call does it */
    PHOS_GATE_TRACED = 16, /* calls that touch device memory say so first */
};

enum { PHOS_THREAD_NEW = 0, PHOS_THREAD_OUTSIDE = 1, PHOS_THREAD_INSIDE = 2 /* + entry point */ };

struct phos_thread {
    _Atomic uint32_t state;  /* written by its thread alone */
    _Atomic uint32_t traced; /* likewise: it got TRACED_PASS and has not left. Apart from state, which nested calls write */
    int32_t tid;
    uint32_t ends;          /* how often its thread-exit destructor has run */
    struct phos_thread *next, *previous;
};

extern __thread struct phos_thread phos_self __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t phos_gate_word;

enum phos_gate_answer {
    PHOS_GATE_PASS,        /* inside now */
    PHOS_GATE_NESTED,      /* this thread was inside already: the driver, or a callback, called an exported symbol */
    PHOS_GATE_TRACED_PASS, /* inside now, and traced: until phos_gate_untrace_self() */
    PHOS_GATE_REFUSED,     /* lost: fail the call */
    PHOS_GATE_ABSENT,      /* there is no driver */
};

/* What binds the driver when a call finds the gate UNBOUND; answers whether there is one. Set before the first call. */
extern bool (*phos_gate_bind)(void);

enum phos_gate_answer phos_gate_enter_slow(struct phos_thread *self, uint32_t *before, uint32_t entry)
    __attribute__((cold)); /* so that what follows a call of it lies apart from the wrappers, too */

static inline __attribute__((always_inline)) enum phos_gate_answer phos_gate_enter(uint32_t entry, uint32_t *before)
{
    struct phos_thread *self = &phos_self;
    *before = atomic_load_explicit(&self->state, memory_order_relaxed);
    atomic_store_explicit(&self->state, PHOS_THREAD_INSIDE + entry, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    uint32_t word = atomic_load_explicit(&phos_gate_word, memory_order_acquire);
    if (__builtin_expect((*before ^ PHOS_THREAD_OUTSIDE) | word, 0))
        return phos_gate_enter_slow(self, before, entry);
    return PHOS_GATE_PASS;
}

static inline __attribute__((always_inline)) void phos_gate_leave(uint32_t before)
{
    atomic_store_explicit(&phos_self.state, before, memory_order_release);
}

/* After TRACED_PASS, before leaving: the call is through, or has nothing to do with the window. */
static inline void phos_gate_untrace_self(void)
{
    atomic_store_explicit(&phos_self.traced, 0, memory_order_release);
}

/* A thread of ours: never waits at the gate, never counts as inside. */
void phos_gate_exempt_self(void);

void phos_gate_init(void);

/* Who did not leave in time. */
struct phos_gate_straggler {
    int32_t tid;
    uint32_t entry;
};

/* Closes the gate and waits until no thread is inside. False: after timeout_ns one still was; the gate is open again.
 * `pump`, if any, is called while waiting: what a thread inside waits for may be the caller's to do. The wait ends as well when
 * it answers that there is nobody to wait for. */
bool phos_gate_close(uint64_t timeout_ns, struct phos_gate_straggler *straggler, bool (*pump)(void));
void phos_gate_open(void);
/* From now on calls are traced: with the gate closed, so that none is inside untraced. Or no longer; then it returns once
 * no thread is between its TRACED_PASS and phos_gate_untrace_self(). Who waits in there must be let go first, or by
 * `pump`, which is called while waiting, whatever it answers. */
void phos_gate_trace(bool on, bool (*pump)(void));
/* From now on every call is refused, waiting ones too. */
void phos_gate_lose(void);
bool phos_gate_is_closed(void);
/* In a forked child: the one thread that is left, an open gate. */
void phos_gate_forked(void);
