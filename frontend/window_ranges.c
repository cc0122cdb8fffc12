/* Which mapped memory the touches of a call mean, and the order in which chunks are first touched. */
#include "cleanup.h"
#include "memory.h"
#include "window_private.h"

/* An address names the whole allocation that holds it. Of the application's own mappings nobody knows where a buffer ends:
 * everything that is mapped behind it without a gap. */
void phos_window_visit(const struct phos_touch *touch, phos_window_visitor *visit, void *cookie)
{
    CUdeviceptr begin = touch->address, end = touch->address + touch->size;
    if (!touch->size) {
        const struct phos_allocation *allocation = phos_allocation_at(begin);
        const struct phos_mapping *mapping = phos_mapping_at(begin);
        if (!mapping)
            return;
        if (allocation) {
            begin = allocation->address;
            end = begin + (allocation->size ? allocation->size : 1);
        } else if (mapping->span) {
            begin = mapping->range.address;
            end = begin + mapping->range.size;
        } else
            end = ~(CUdeviceptr)0;
    }
    CUdeviceptr expected = 0;
    for (size_t i = phos_ranges_first(&phos_mappings, begin); i < phos_mappings.count; i++) {
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
    uint32_t touched = table->touched; /* written here alone */
    for (uint32_t chunk = chunks.first; chunk < chunks.end && touched < table->order; chunk++) {
        uint64_t bit = (uint64_t)1 << chunk % 64;
        if ((writes ? phos_window.written : phos_window.seen)[chunk / 64] & bit)
            continue;
        phos_window.seen[chunk / 64] |= bit;
        if (writes) {
            phos_window.written[chunk / 64] |= bit;
            __atomic_fetch_sub(&phos_window.unwritten, 1, __ATOMIC_RELAXED);
        }
        list[touched++] = chunk | (writes ? PHOS_TOUCH_WRITES : 0);
    }
    __atomic_store_n(&table->touched, touched, __ATOMIC_RELEASE);
}

static void note_mapping(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    const struct phos_touch *touch = cookie;
    phos_window_note(phos_window_chunks(mapping, begin, end), touch->access & PHOS_WRITES);
}

void phos_window_note_all(const struct phos_touches *touches)
{
    if (!__atomic_load_n(&phos_window.unwritten, __ATOMIC_RELAXED))
        return; /* nothing is touched for the first time any more */
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < touches->count; i++)
        phos_window_visit(&touches->list[i], note_mapping, (void *)&touches->list[i]);
}
