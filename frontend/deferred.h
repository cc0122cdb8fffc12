/* What was freed while a stream was captured. Work that is queued may still use it, and cannot be waited for: that would
 * spoil the capture. So it is given back at a later moment: when its context was waited for anyway, when memory is short,
 * when the process is about to be detached, or with its context.
 *
 * With phos_memory_lock held, all of these but one. */
#pragma once
#include "phos_api.h"
#include <stdbool.h>
#include <stdint.h>

/* How much was ever deferred: to be asked before a context is waited for, so that what is deferred meanwhile stays. */
uint64_t phos_deferred_ever(void);
/* False: out of host memory; nothing has happened. */
bool phos_deferred_add(CUcontext context, void (*release)(void *what), void *what);
/* It is not to be released after all, or has been. */
void phos_deferred_drop(const void *what);
bool phos_deferred_in(CUcontext context);
/* Gives back what was deferred in a context (NULL: in all) that is idle now, up to what phos_deferred_ever() said when it
 * began to be waited for. Answers whether there was anything. It may be unmapped, and must not be copied aside meanwhile:
 * after phos_window_stand_still(), or with the process quiesced. What was pinned is in phos_host_leaving(). */
bool phos_deferred_release(CUcontext context, uint64_t upto);
/* Without the lock: the same for who has waited for the context and does not stand still. */
void phos_deferred_release_idle(CUcontext context, uint64_t upto);
/* Waits for the contexts of what is deferred, for a limited time and not during a capture, and gives back what can be.
 * Releases and retakes the lock. */
bool phos_deferred_settle(uint64_t timeout_ns);
