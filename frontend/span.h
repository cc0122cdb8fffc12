/* Spans: runs of mapped addresses with one block of our own behind each, and those that stay mapped after they were
 * freed. For the allocator (slab.c); with phos_memory_lock held, all of these. */
#pragma once
#include "memory.h"

/* Fresh physical memory, mapped; kind LARGE. */
CUresult phos_span_create(CUdevice device, size_t size, struct phos_span **span) PHOS_CHECKED;
/* A span that was freed and has that size, or up to `largest`; or NULL. */
struct phos_span *phos_span_reuse(CUdevice device, size_t size, size_t largest);
/* Freed: kept mapped for the next one. If there are enough of those, some are given back to the driver soon. */
void phos_span_release(struct phos_span *span);
/* Gives every span that waits for reuse back to the driver. */
void phos_span_flush(CUdevice device);
/* Bytes of them. */
size_t phos_span_waiting(CUdevice device);

/* For the control thread, without the lock. */

/* It is there, and will call phos_span_trim: from now on more spans than are to be kept may wait for that. */
void phos_span_trimmed(void);
/* How long those may still wait (patience.h). */
uint64_t phos_span_patience(void);
/* Gives one of them back and pauses for a moment: others want the lock too. False: none is due. *changes, as phos_block_changes
 * was when the application last rested, tells whether it is at work again; NULL: all are due, at once. The gate must be open. */
bool phos_span_trim(uint64_t *changes);

static inline void phos_span_push(struct phos_span **head, struct phos_span *span)
{
    span->previous = NULL;
    span->next = *head;
    if (*head)
        (*head)->previous = span;
    *head = span;
}

static inline void phos_span_unlink(struct phos_span **head, struct phos_span *span)
{
    if (span->previous)
        span->previous->next = span->next;
    else
        *head = span->next;
    if (span->next)
        span->next->previous = span->previous;
    span->next = span->previous = NULL;
}
