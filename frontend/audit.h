/* Audits (phos-gpu audit): PHOS_AUDIT in the environment names one. Then every call is traced for the whole life of the
 * process; they are made one at a time, and phosd compares device memory before and after each with what the call was
 * predicted to write. Slow, and no checkpoint can be taken meanwhile.
 *
 * Lock order: the audit's turn, then whatever else; who has the turn is inside the gate and may wait for phosd and for
 * the GPU. Threads that wait for their turn hold no other lock. */
#pragma once
#include "functions.h"
#include "graph_nodes.h"
#include "touch.h"

#include <stdatomic.h>
#include <stdbool.h>

extern atomic_bool phos_audit_on;

static inline bool phos_audit_active(void)
{
    return atomic_load_explicit(&phos_audit_on, memory_order_relaxed);
}

/* Once the frontend serves. */
void phos_audit_start(void);
/* In a forked child, which makes no calls. */
void phos_audit_forked(void);

/* Notes of this thread for the call that it is about to make. */
void phos_audit_arguments(struct phos_kernel *kernel, const struct phos_arguments *arguments);
void phos_audit_graph(const struct phos_nodes *nodes);

/* There are new descriptors, and the touches, put away, are to be worked out again. */
bool phos_audit_again(struct phos_touches *touches);
void phos_audit_before(struct phos_touches *touches);
void phos_audit_after(struct phos_touches *touches, CUresult result);
