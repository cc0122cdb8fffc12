#include "ranges.h"

#include <stdlib.h>
#include <string.h>

size_t phos_ranges_first(const struct phos_ranges *ranges, uint64_t address)
{
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges->ends[middle] <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool phos_ranges_add(struct phos_ranges *ranges, struct phos_range *range)
{
    if (ranges->count == ranges->capacity) {
        size_t capacity = ranges->capacity ? ranges->capacity * 2 : 64;
        struct phos_range **items = realloc(ranges->items, capacity * sizeof *items);
        if (!items)
            return false;
        ranges->items = items;
        uint64_t *ends = realloc(ranges->ends, capacity * sizeof *ends);
        if (!ends)
            return false;
        ranges->ends = ends;
        ranges->capacity = capacity;
    }
    size_t at = phos_ranges_first(ranges, range->address);
    memmove(ranges->items + at + 1, ranges->items + at, (ranges->count - at) * sizeof *ranges->items);
    memmove(ranges->ends + at + 1, ranges->ends + at, (ranges->count - at) * sizeof *ranges->ends);
    ranges->items[at] = range;
    ranges->ends[at] = range->address + range->size;
    ranges->count++;
    ranges->changes++;
    return true;
}

void phos_ranges_remove(struct phos_ranges *ranges, const struct phos_range *range)
{
    size_t at = phos_ranges_first(ranges, range->address);
    if (at >= ranges->count || ranges->items[at] != range)
        return;
    ranges->count--;
    ranges->changes++;
    memmove(ranges->items + at, ranges->items + at + 1, (ranges->count - at) * sizeof *ranges->items);
    memmove(ranges->ends + at, ranges->ends + at + 1, (ranges->count - at) * sizeof *ranges->ends);
}

struct phos_range *phos_ranges_find(const struct phos_ranges *ranges, uint64_t address)
{
    size_t at = phos_ranges_first(ranges, address);
    if (at >= ranges->count || ranges->items[at]->address > address)
        return NULL;
    return ranges->items[at];
}
