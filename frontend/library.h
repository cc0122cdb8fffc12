/* Calls into NVIDIA's libraries (cuBLAS, cuBLASLt, cuDNN, NCCL), taken at the libraries' own entry points, because their
 * documentation says what they read and write, and their kernels' arguments hardly do.
 *
 * A wrapper adds nothing but knowledge: a call of a listed function (library_api.def) leaves a *scope* with the thread for
 * as long as it lasts; a launch made inside it asks phos_library_refine(). A call may begin before a window and launch in
 * it: what a checkpoint meets with at the gate is, more often than not, a launch in the middle of a matrix multiplication,
 * and the first thing that a restored process does is that launch. So calls of cuBLAS, cuBLASLt and cuDNN leave a scope
 * whether a window is open or not, some nanoseconds each, and what they document is worked out when a launch asks. Of NCCL,
 * whose scopes say less, only calls in a window do: without one its wrappers test one bit and jump to the real function.
 *
 * Standing in front of somebody's cuBLAS must never give it another library's function. So:
 *   - The libraries' symbols carry versions (libcublas.so.13), and so do our wrappers, one for each version: it is the
 *     dynamic linker that tells callers of one from callers of another, as it would without us. A version we do not
 *     list, and a reference without a version, go past us.
 *   - Our versions are not default ones (name@version, not name@@version): dlsym never finds them, so that a program
 *     which asks whether the library is there gets the true answer. What dlsym found in a listed library, through a
 *     handle, is replaced by the wrapper of exactly that library, and by nothing if a second copy of it is loaded.
 *   - NCCL's symbols have no versions; programs also carry copies inside. Callers that are linked against any of these
 *     all reach one wrapper, which looks for every definition in the process: there is almost always one. If there are
 *     more, the caller's own one is looked up as the dynamic linker would (library_bind.c).
 *   - A library we call stays loaded.
 * PHOS_LIBRARIES=off: no scopes, and dlsym's answers are left alone. */
#pragma once
#include "gate.h"
#include "touch.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct phos_library {
    const char *soname;
    bool always;            /* its calls leave scopes outside windows too */
    bool versioned;         /* the version of its symbols is its soname */
    bool linked;            /* reached by callers that the dynamic linker bound */
    _Atomic(void *) handle; /* from dlopen, kept for ever; set once, after base */
    _Atomic(void *) base;
};

struct phos_library_entry {
    _Atomic(void *) target; /* where the wrapper jumps to: what finds the real function, then that itself */
    _Atomic(void *) real;   /* NULL until it is known and can no longer change */
    void *hook;
    const char *function;
    struct phos_library *library;
};

extern struct phos_library phos_libraries[];
extern const size_t phos_library_count;
extern struct phos_library_entry phos_library_entries[];
extern const size_t phos_library_entry_count;
extern const char *const phos_library_functions[]; /* sorted */
extern const size_t phos_library_function_count;

/* ---- the scope: library.c */

struct phos_library_range {
    CUdeviceptr address;
    size_t size;     /* bytes; 0: unknown */
    uint32_t access; /* PHOS_READS | PHOS_WRITES | PHOS_PERHAPS */
};

/* With the others: the call may do this and no documentation says whether it does. It stands for accesses that cannot be
 * known otherwise, and changes nothing of those that are. */
#define PHOS_PERHAPS 4u
#define PHOS_LIBRARY_RANGES 16

/* Lives on the stack of the wrapper. */
struct phos_library_scope {
    struct phos_library_scope *outer; /* a library calls another: the scopes of both hold */
    const char *function;
    const struct phos_library_range *list; /* ranges, or those of a group */
    size_t count;
    void (*document)(struct phos_library_scope *); /* not NULL: what it documents is still to be worked out, from */
    const void *arguments, *real;                  /* the call's arguments, and the function called */
    bool whole;  /* its ranges are all that the call may touch, though no output is documented */
    bool elsewhere; /* it also touches what pointers in device memory name, whatever is documented */
    void *owned; /* to free */
    struct phos_library_range ranges[PHOS_LIBRARY_RANGES];
};

/* Not part of a range: nothing is touched. */
#define PHOS_LIBRARY_NOTHING SIZE_MAX

/* False: PHOS_LIBRARIES=off. */
extern _Atomic int phos_library_setting; /* 0: not asked yet, 1: on, 2: off */
int phos_library_ask_setting(void);
static inline bool phos_library_enabled(void)
{
    int answer = atomic_load_explicit(&phos_library_setting, memory_order_relaxed);
    return (answer ? answer : phos_library_ask_setting()) == 1;
}

static inline bool phos_library_traced(void)
{
    return atomic_load_explicit(&phos_gate_word, memory_order_relaxed) & PHOS_GATE_TRACED && phos_library_enabled();
}

extern __thread struct phos_library_scope *phos_library_innermost __attribute__((tls_model("initial-exec")));

/* A scope that was left by longjmp lies below the frame that is running now. */
static inline struct phos_library_scope *phos_library_live(void)
{
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    while (phos_library_innermost && (uintptr_t)phos_library_innermost < here)
        phos_library_innermost = phos_library_innermost->outer;
    return phos_library_innermost;
}

void phos_library_enter(struct phos_library_scope *scope, const char *function);
/* The same, documenting nothing yet. With phos_library_leave it is all that a call costs outside windows. */
static inline void phos_library_enter_lazily(struct phos_library_scope *scope, const char *function,
                                             void (*document)(struct phos_library_scope *), const void *arguments,
                                             const void *real)
{
    /* Not phos_library_live(): the scope may be in the frame that asks. */
    while (phos_library_innermost && (uintptr_t)phos_library_innermost <= (uintptr_t)scope)
        phos_library_innermost = phos_library_innermost->outer;
    scope->outer = phos_library_innermost;
    scope->function = function;
    scope->list = scope->ranges;
    scope->count = 0;
    scope->owned = NULL;
    scope->whole = scope->elsewhere = false;
    scope->document = document;
    scope->arguments = arguments;
    scope->real = real;
    phos_library_innermost = scope;
}
void phos_library_document(struct phos_library_scope *scope, const void *address, size_t size, uint32_t access);
static inline void phos_library_leave(struct phos_library_scope *scope)
{
    phos_library_innermost = scope->outer;
    if (scope->owned)
        free(scope->owned);
}

/* A group of NCCL calls of this thread: its work is queued by the call that ends it. */
void phos_library_group_start(void);
void phos_library_group_add(const struct phos_library_scope *scope);
void phos_library_group_end(struct phos_library_scope *scope);

/* For a launch: turns accesses to what this thread's library call documents as input only into reads, narrows accesses
 * of whole allocations to documented sizes, and adds documented outputs. Where the outputs are documented, or all that
 * the call was given is known, what a kernel may do through addresses that nobody knows is taken for that: inputs are added
 * too, and `documented` says so. In a call that says less a kernel of which we are unsure may touch anything. Anything else
 * stays as it is. */
void phos_library_refine(struct phos_touches *touches);
/* Whether this thread is in a call of cuBLAS or cuBLASLt. */
bool phos_library_in_blas(void);
/* The innermost library call that this thread is in, or NULL: for reports. */
const char *phos_library_call(void);

/* ---- finding the real functions: library_bind.c */

/* `caller`: an address in whoever called the wrapper. NULL: there is no such library. */
void *phos_library_find(struct phos_library_entry *entry, const void *caller);
static inline void *phos_library_real(struct phos_library_entry *entry, const void *caller)
{
    void *real = atomic_load_explicit(&entry->real, memory_order_acquire);
    return real ? real : phos_library_find(entry, caller);
}
/* Another function of the library that holds `real`; NULL: it has none of that name. */
void *phos_library_sibling(const void *real, const char *name);
/* Whether dlsym's answers for this name may be ours. Safe at any time. */
bool phos_library_named(const char *name);
/* What to answer for `found`, which dlsym found under this name: our wrapper, or `found`. */
void *phos_library_answer(const char *name, void *found);
/* The real dlsym: resolve.c. */
void *phos_resolve_dlsym(void *handle, const char *name);
