/* What window_ranges.c takes for addresses in segments of an application's own that are thousands of mappings long, as those of
 * PyTorch's expandable segments are: for test_frontend_runs.py. Prints nanoseconds for a call that names several of them. */
#include "blocks.h"
#include "clock.h"
#include "memory.h"
#include "parts.h"
#include "window_private.h"

#include <stdio.h>
#include <stdlib.h>

#define SEGMENTS 4
#define MAPPINGS 3000
#define MAPPING_BYTES ((uint64_t)20 << 20)
#define PART_BYTES ((uint64_t)100 << 20)
#define APART ((uint64_t)1 << 42) /* more than a segment is long */
#define ROUNDS 2000

struct phos_ranges phos_mappings;
struct phos_window phos_window;

struct phos_allocation *phos_allocation_in(const struct phos_mapping *mapping, CUdeviceptr address)
{
    (void)mapping, (void)address;
    return NULL;
}

enum phos_part_kind phos_parts_find(uint64_t address, struct phos_part *part)
{
    part->begin = address - address % APART % PART_BYTES;
    part->end = part->begin + PART_BYTES;
    return PHOS_PART_HELD;
}

bool phos_parts_captured(uint64_t begin, uint64_t end)
{
    if (end - begin != MAPPINGS * MAPPING_BYTES)
        abort(); /* it was asked of something else than a whole segment */
    return false;
}

static uint64_t base_of(size_t segment)
{
    return (segment + 1) * APART;
}

static void visit(struct phos_mapping *mapping, CUdeviceptr begin, CUdeviceptr end, void *cookie)
{
    if (mapping->range.address + mapping->range.size <= begin || mapping->range.address >= end)
        abort();
    ++*(size_t *)cookie;
}

/* Nanoseconds for an address, if calls name one of each of `segments` segments. */
static double cost(size_t segments)
{
    double least = 1e9;
    size_t seen = 0;
    for (int round = 0; round < 5; round++) {
        uint64_t start = phos_now_ns();
        for (size_t i = 0; i < ROUNDS; i++) {
            uint64_t at = base_of(i % segments) + i / segments % (MAPPINGS / 5) * PART_BYTES;
            phos_window_visit(&(struct phos_touch){.address = at + 4096, .access = PHOS_WRITES}, visit, &seen);
        }
        double took = (double)(phos_now_ns() - start) / ROUNDS;
        least = took < least ? took : least;
    }
    if (seen != (size_t)5 * ROUNDS * (PART_BYTES / MAPPING_BYTES))
        abort();
    return least;
}

int main(void)
{
    for (size_t segment = 0; segment < SEGMENTS; segment++)
        for (size_t i = 0; i < MAPPINGS; i++) {
            struct phos_mapping *mapping = calloc(1, sizeof *mapping);
            mapping->range = (struct phos_range){base_of(segment) + i * MAPPING_BYTES, MAPPING_BYTES};
            if (!phos_ranges_add(&phos_mappings, &mapping->range))
                return 1;
        }
    printf("%.0f %.0f\n", cost(1), cost(SEGMENTS));
    return 0;
}
