/* The window of a concurrent checkpoint: from the moment the application runs on until all of its memory is saved; or of a
 * lazy restore: until all of its memory is there. In it every call that touches device memory comes through here first (gate.h:
 * PHOS_GATE_TRACED). What such a call may write and phosd has not saved yet is copied aside first, and the call's stream
 * waits for that copy (DESIGN §4, "cow").
 *
 * Lock order: the window's lock, then phos_memory_lock. No lock is held while waiting for phosd, nor while queueing in a stream
 * of the application's: if that is full the driver waits, and it may wait for a thread that waits for the lock. */
#pragma once
#include "error.h"
#include "touch.h"
#include "twins.h"

#include <stdatomic.h>

/* Before the call: makes sure that what it is about to write has been saved, or is copied aside first. */
void phos_window_before(struct phos_touches *touches);
/* After it, whatever its result. */
void phos_window_after(struct phos_touches *touches, CUresult result);

/* The control thread's. `descriptors`: chunk table, window table, one for each pool; they are the window's. `computes`: the
 * gate is open, so that the process can only be watched. False: there is no window, and nothing is traced. */
bool phos_window_begin(const int *descriptors, size_t count, bool computes, struct phos_error *error) PHOS_CHECKED;
/* All is saved, or phosd is gone: nobody waits in here any more, and nothing of the window is left. */
void phos_window_end(void);
bool phos_window_is_open(void);
/* One in which what a call's arguments name is copied aside or loaded, be it freed. The control thread's to ask. */
bool phos_window_copies(void);
/* It may be about to end: what is copied aside in it has been when this returns, and nobody has a stream there. */
void phos_window_context_may_end(CUcontext context);
/* All work in the context has ended, and with it will all that is in it; or, if it is `gone`, has. */
void phos_window_context_ends(CUcontext context, bool gone);
/* To be called now and then while a window is open: a context with an error copies nothing aside any more, nor writes to
 * anything, which phosd has to know. */
void phos_window_look(void);
/* What is copied aside may be memory that nobody uses any more. Before such memory is unmapped: these copies end, and until
 * phos_window_go_on() no other begins, nor is the thread cancelled. To be called before phos_memory_lock is taken. */
void phos_window_stand_still(void);
void phos_window_go_on(void);
/* Before a block of another process becomes this one's: what is mapped only in the window, the window knows nothing of, so all
 * has to be saved first. To be called with no lock held. */
void phos_window_before_import(void);
/* With the gate closed for a checkpoint: it has been watched long enough. */
void phos_window_watched(void);
/* The open window is a lazy restore's: memory is still being loaded. */
bool phos_window_loading(void);
/* The connection to phosd has ended: does not return if memory is missing that only phosd could have brought. */
void phos_window_abandoned(void);
/* The same is known already. Does not return. */
void phos_window_hopeless(void);

/* Memory is copied aside, or may yet be by what is queued. */
extern atomic_bool phos_window_shadows;

/* Nothing may be accessed before its data is there; an error that says that something was is not the application's. */
extern atomic_bool phos_window_strict;
/* Whether memory of this block must not be given access now; with phos_memory_lock held. */
struct phos_block;
bool phos_window_shuts(const struct phos_block *block);
/* Does not return if a wrong guess is what a call's error comes from. */
void phos_window_failed(CUresult result);
static inline CUresult phos_window_result(CUresult result)
{
    if (__builtin_expect(result != CUDA_SUCCESS && (atomic_load_explicit(&phos_window_strict, memory_order_relaxed) ||
                                                    atomic_load_explicit(&phos_twin_kernels, memory_order_relaxed)),
                         0))
        phos_window_failed(result);
    return result;
}

/* In a forked child, which has nothing to do with it. */
void phos_window_forked(void);

struct phos_mapping;
typedef void phos_window_visitor(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie);
/* Each mapping that a touch reaches, with phos_memory_lock held, window or no window. [begin, end) may reach beyond the
 * mapping. */
void phos_window_visit(const struct phos_touch *touch, phos_window_visitor *visit, void *cookie);
/* Reads the tables of a call (access_table.h, PHOS_FIELD_TABLE) through which something of the access is done, and adds what
 * lies in them to its touches. What cannot be read may be anything. `rested`: nothing is queued that could write to them; else what is in the call's stream is waited
 * for, or the window's end. */
void phos_window_follow(struct phos_touches *touches, uint32_t access, bool rested);
