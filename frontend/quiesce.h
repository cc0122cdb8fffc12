/* The GPU at rest: waiting for work that is queued, for a limited time. */
#pragma once
#include "error.h"
#include "phos_api.h"
#include <stdbool.h>
#include <stdint.h>

/* An event behind all that was queued in a context; the caller destroys it. NULL: there can be none; *result says whether
 * the context was waited for instead. */
CUevent phos_event_behind(CUcontext context, CUresult *result);

/* Waits until the work of a context is done, or `end`: then CUDA_ERROR_NOT_READY. Also an error if a stream is captured
 * when it begins; a capture that begins meanwhile is not spoilt. `pump`, if any, is called while waiting; if it answers that there is
 * nobody to wait for, that is the end. */
CUresult phos_wait(CUcontext context, uint64_t end, bool (*pump)(void)) PHOS_CHECKED;

/* Waits for the work of every context, with the gate closed, by the control thread. Work may wait for what the program
 * does next, and the program for the gate: false after timeout_ns. */
bool phos_quiesce(uint64_t timeout_ns, struct phos_error *error) PHOS_CHECKED;
