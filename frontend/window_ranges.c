/* Which mapped memory the touches of a call mean, and the order in which chunks are first touched. */
#include "cleanup.h"
#include "memory.h"
#include "parts.h"
#include "window_private.h"

#include <string.h>

/* What ends right before an address where no allocation begins: some kernels are given the end of what they touch. `first`: the
 * mapping that holds the address, or the next one. */
static void visit_ending(size_t first, CUdeviceptr address, bool mapped, phos_window_visitor *visit, void *cookie)
{
    struct phos_range *const *items = phos_mappings.items;
    size_t at = first < phos_mappings.count && items[first]->address < address ? first : first - 1; /* of the byte before */
    if (at >= phos_mappings.count || address - items[at]->address > items[at]->size)
        return;
    struct phos_mapping *mapping = (struct phos_mapping *)items[at];
    if (mapping->span) {
        const struct phos_allocation *allocation = phos_allocation_in(mapping, address - 1);
        if (allocation && allocation->address + allocation->size == address)
            visit(mapping, allocation->address, address, cookie);
    } else if (!mapped) { /* the end of the application's own, which lies before it without a gap */
        for (CUdeviceptr end = address; at < first && items[at]->address + items[at]->size == end; end = items[at--]->address) {
            mapping = (struct phos_mapping *)items[at];
            if (mapping->span)
                break;
            visit(mapping, items[at]->address, end, cookie);
        }
    }
}

/* Where the mappings begin that lie before `first` without a gap, as far as they reach down to an address; `first` is the
 * lowest of them then. */
static CUdeviceptr run_before(size_t *first, CUdeviceptr down_to)
{
    struct phos_range *const *items = phos_mappings.items;
    while (*first && items[*first]->address > down_to &&
           items[*first - 1]->address + items[*first - 1]->size == items[*first]->address)
        --*first;
    return items[*first]->address;
}

#define RUNS 8

/* All that is mapped around an address without a gap, of the application's own: mostly one segment with expandable_segments,
 * of which PyTorch has one for each of its pools. It may be thousands of mappings, and calls ask for the same few again and
 * again. */
static struct phos_part run_around(size_t at)
{
    static struct phos_part runs[RUNS]; /* with phos_memory_lock, as all here */
    static size_t oldest;
    static uint64_t changes; /* of the mappings, when the runs were found */
    struct phos_range *const *items = phos_mappings.items;
    CUdeviceptr address = items[at]->address;
    if (changes != phos_mappings.changes)
        memset(runs, 0, sizeof runs);
    changes = phos_mappings.changes;
    for (size_t i = 0; i < RUNS; i++)
        if (address - runs[i].begin < runs[i].end - runs[i].begin)
            return runs[i];
    struct phos_part *run = &runs[oldest++ % RUNS];
    size_t first = at, last = at;
    run->begin = run_before(&first, 0);
    while (last + 1 < phos_mappings.count && phos_mappings.ends[last] == items[last + 1]->address)
        last++;
    run->end = phos_mappings.ends[last];
    return *run;
}

/* An address names the whole allocation that holds it, or the part of one that PyTorch has handed out. Of the application's
 * own mappings nobody else knows where a buffer ends: everything that is mapped behind it without a gap. So it is where parts are
 * handed out in graphs. */
void phos_window_visit(const struct phos_touch *touch, phos_window_visitor *visit, void *cookie)
{
    CUdeviceptr begin = touch->address, end = touch->address + touch->size;
    size_t first = phos_ranges_first(&phos_mappings, begin);
    if (!touch->size) {
        struct phos_part part;
        enum phos_part_kind kind = touch->recorded ? PHOS_PART_UNKNOWN : phos_parts_find(begin, &part);
        const struct phos_mapping *mapping = first < phos_mappings.count ? (void *)phos_mappings.items[first] : NULL;
        bool mapped = mapping && mapping->range.address <= begin;
        /* In the same mapping as a whole, as is a span: `first` stays the first. */
        const struct phos_allocation *allocation = mapped ? phos_allocation_in(mapping, begin) : NULL;
        if (!allocation)
            visit_ending(first, begin, mapped, visit, cookie);
        if (!mapped)
            return;
        if (allocation) {
            begin = allocation->address;
            end = begin + (allocation->size ? allocation->size : 1);
        } else if (mapping->span) {
            begin = mapping->range.address;
            end = begin + mapping->range.size;
        }
        bool own = !allocation && !mapping->span;
        if (kind != PHOS_PART_UNKNOWN) {
            struct phos_part segment = own ? run_around(first) : (struct phos_part){begin, end};
            if (phos_parts_captured(segment.begin, segment.end))
                kind = PHOS_PART_UNKNOWN;
        }
        if (own) {
            if (kind == PHOS_PART_HELD)
                begin = run_before(&first, part.begin);
            end = ~(CUdeviceptr)0;
        }
        if (kind != PHOS_PART_UNKNOWN) {
            begin = part.begin > begin ? part.begin : begin;
            end = part.end < end ? part.end : end;
        }
    }
    CUdeviceptr expected = 0;
    for (size_t i = first; i < phos_mappings.count; i++) {
        struct phos_mapping *mapping = (struct phos_mapping *)phos_mappings.items[i];
        if (mapping->range.address >= end || (!touch->size && expected && mapping->range.address != expected))
            break;
        visit(mapping, begin, end, cookie);
        expected = mapping->range.address + mapping->range.size;
    }
}

struct phos_chunk_range phos_window_chunks(const struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end)
{
    uint32_t unit = phos_window.chunks->chunk_bytes;
    const struct phos_block *block = mapping->block;
    CUdeviceptr limit = mapping->range.address + mapping->range.size;
    begin = begin > mapping->range.address ? begin : mapping->range.address;
    end = end < limit ? end : limit;
    uint64_t from = (begin - mapping->range.address + mapping->offset) / unit;
    uint64_t to = (end - 1 - mapping->range.address + mapping->offset) / unit + 1;
    to = to < block->window_chunks ? to : block->window_chunks;
    return (struct phos_chunk_range){block->window_first + (uint32_t)from, block->window_first + (uint32_t)(from < to ? to : from)};
}

void phos_window_note(struct phos_chunk_range chunks, bool writes)
{
    struct phos_window_table *table = phos_window.table;
    uint32_t *list = (uint32_t *)((char *)table + table->order_at);
    uint32_t touched = table->touched, written = 0; /* written here alone */
    uint64_t *before = writes ? phos_window.written : phos_window.seen;
    for (uint32_t chunk = chunks.first, next; chunk < chunks.end; chunk = next) {
        uint32_t word = chunk / 64;
        next = (word + 1) * 64 < chunks.end ? (word + 1) * 64 : chunks.end;
        uint64_t mask = ~(uint64_t)0 >> (64 - (next - chunk)) << chunk % 64;
        for (uint64_t fresh = mask & ~before[word]; fresh && touched < table->order; fresh &= fresh - 1) {
            uint64_t bit = fresh & -fresh;
            phos_window.seen[word] |= bit;
            if (writes) {
                phos_window.written[word] |= bit;
                written++;
            }
            list[touched++] = (word * 64 + (uint32_t)__builtin_ctzll(fresh)) | (writes ? PHOS_TOUCH_WRITES : 0);
        }
    }
    if (written)
        __atomic_fetch_sub(&phos_window.unwritten, written, __ATOMIC_RELAXED);
    if (touched != table->touched)
        __atomic_store_n(&table->touched, touched, __ATOMIC_RELEASE);
}
