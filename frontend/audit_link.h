/* The audit's own connection to phosd. Whoever has the audit's turn uses it, nobody else. */
#pragma once
#include "touch.h"
#include "wire.pb-c.h"

#include <stdbool.h>
#include <stddef.h>

/* One question, one answer; `answer` is freed by phos_packet_free(). False: phosd is gone, or takes too long. */
struct phos_packet;
bool phos_audit_ask(Phos__Wire__Envelope *question, int body, Phos__Wire__Envelope__BodyCase answer_kind,
                    struct phos_packet *answer);
/* Nothing is answered. */
bool phos_audit_send(Phos__Wire__Envelope *envelope, int body);
void phos_audit_hang_up(void);

/* Where in which blocks a call may write: sorted, each byte once. *failed: there is no host memory to say so. */
struct phos_audit_range {
    uint64_t block, offset, size;
};
struct phos_audit_range *phos_audit_ranges(const struct phos_touches *touches, size_t *count, bool *failed);
/* What lies at a place of a block, in this process. False: it is not mapped any more. */
bool phos_audit_place(const Phos__Wire__AuditRange *range, Phos__Wire__AuditWrong__Place *place);
/* Waits until phosd has been told of all blocks; the newest one's number, 0: there is none, or phosd was not told. */
uint64_t phos_audit_newest_block(void);
