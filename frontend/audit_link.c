/* The audit's connection, and what ties a process's addresses to the blocks that phosd knows. */
#include "audit_link.h"
#include "cleanup.h"
#include "control.h"
#include "held.h"
#include "hold.h"
#include "log.h"
#include "memory.h"
#include "window.h"
#include "wire_link.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ANSWER_MS 300000 /* analysing a large module may take minutes */
#define TOLD_MS 5000

static int link_fd = -1;     /* guarded by the audit's turn, as is all here */
static uint64_t last_number; /* of a question */

void phos_audit_hang_up(void)
{
    if (link_fd >= 0)
        phos_held_close(link_fd);
    link_fd = -1;
}

static bool send(Phos__Wire__Envelope *envelope, int body, uint64_t id)
{
    if (link_fd < 0)
        link_fd = phos_link_connect(phos_hold_socket(), false);
    envelope->id = id;
    envelope->body_case = (Phos__Wire__Envelope__BodyCase)body;
    if (link_fd >= 0 && phos_link_send(link_fd, envelope, NULL, 0))
        return true;
    phos_audit_hang_up();
    return false;
}

bool phos_audit_send(Phos__Wire__Envelope *envelope, int body)
{
    return send(envelope, body, 0);
}

bool phos_audit_ask(Phos__Wire__Envelope *question, int body, Phos__Wire__Envelope__BodyCase answer_kind,
                    struct phos_packet *answer)
{
    if (!send(question, body, ++last_number))
        return false;
    for (;;) {
        struct pollfd polled = {.fd = link_fd, .events = POLLIN};
        int ready = poll(&polled, 1, ANSWER_MS);
        enum phos_received received = ready > 0 ? phos_link_receive(link_fd, answer) : PHOS_RECEIVED_NOTHING;
        if (!ready || received == PHOS_RECEIVED_END) {
            phos_audit_hang_up();
            return false;
        }
        if (received == PHOS_RECEIVED_NOTHING)
            continue; /* a signal */
        if (answer->envelope->id == last_number && answer->envelope->body_case == answer_kind)
            return true;
        bool refused = answer->envelope->body_case == PHOS__WIRE__ENVELOPE__BODY_DONE;
        if (refused)
            phos_warn("phosd does not go on with the audit: %s", answer->envelope->done->error);
        phos_packet_free(answer);
        if (refused)
            return false;
    }
}

/* ---- places ---- */

struct ranges {
    struct phos_audit_range *list;
    size_t count, capacity;
    bool failed;
};

static void add(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    struct ranges *ranges = cookie;
    CUdeviceptr limit = mapping->range.address + mapping->range.size;
    begin = begin > mapping->range.address ? begin : mapping->range.address;
    end = end < limit ? end : limit;
    if (begin >= end)
        return;
    if (ranges->count == ranges->capacity) {
        size_t capacity = ranges->capacity ? ranges->capacity * 2 : 64;
        struct phos_audit_range *grown = realloc(ranges->list, capacity * sizeof *grown);
        if (!grown) {
            ranges->failed = true;
            return;
        }
        ranges->list = grown;
        ranges->capacity = capacity;
    }
    uint64_t offset = begin - mapping->range.address + mapping->offset;
    ranges->list[ranges->count++] = (struct phos_audit_range){mapping->block->id, offset, end - begin};
}

static int by_place(const void *one, const void *other)
{
    const struct phos_audit_range *a = one, *b = other;
    if (a->block != b->block)
        return a->block < b->block ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

struct phos_audit_range *phos_audit_ranges(const struct phos_touches *touches, size_t *count, bool *failed)
{
    struct ranges ranges = {0};
    {
        PHOS_LOCKED(&phos_memory_lock);
        for (size_t i = 0; i < touches->count; i++)
            if (touches->list[i].access & PHOS_WRITES)
                phos_window_visit(&touches->list[i], add, &ranges);
    }
    size_t kept = 0;
    if (ranges.count)
        qsort(ranges.list, ranges.count, sizeof *ranges.list, by_place);
    for (size_t i = 0; i < ranges.count; i++) {
        struct phos_audit_range *last = kept ? &ranges.list[kept - 1] : NULL, *next = &ranges.list[i];
        if (last && last->block == next->block && next->offset <= last->offset + last->size) {
            uint64_t end = next->offset + next->size;
            last->size = end > last->offset + last->size ? end - last->offset : last->size;
        } else
            ranges.list[kept++] = *next;
    }
    *count = kept;
    *failed = ranges.failed;
    return ranges.list;
}

#define STEP 512 /* no two allocations begin nearer to each other */

bool phos_audit_place(const Phos__Wire__AuditRange *range, Phos__Wire__AuditWrong__Place *place)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < phos_mappings.count; i++) {
        const struct phos_mapping *mapping = (const struct phos_mapping *)phos_mappings.items[i];
        if (mapping->block->id != range->block || range->offset < mapping->offset ||
            range->offset - mapping->offset >= mapping->range.size)
            continue;
        CUdeviceptr begin = mapping->range.address + (range->offset - mapping->offset);
        place->address = begin;
        for (CUdeviceptr at = begin; at < begin + range->size; at += STEP) {
            const struct phos_allocation *allocation = phos_allocation_at(at);
            if (!allocation)
                continue;
            place->allocation = allocation->address;
            place->size = allocation->size;
            place->entry_point = (char *)(allocation->entry_point ? allocation->entry_point : "");
            return true;
        }
        if (!mapping->span) {
            place->allocation = mapping->range.address;
            place->size = mapping->range.size;
            place->entry_point = (char *)"cuMemMap";
        }
        return true;
    }
    return false;
}

uint64_t phos_audit_newest_block(void)
{
    uint64_t newest = 0;
    {
        PHOS_LOCKED(&phos_memory_lock);
        for (const struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
            newest = b->id > newest ? b->id : newest;
    }
    return newest && phos_control_wait_registered(newest, TOLD_MS) ? newest : 0;
}
