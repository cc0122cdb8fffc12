/* A sorted array of address ranges: lookup by binary search, insertion at the end in constant time (addresses are handed
 * out upwards), elsewhere by two memmoves. Tens of thousands of entries are fine. No lock of its own. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* First member of whatever is kept in such an array. */
struct phos_range {
    uint64_t address;
    uint64_t size;
};

struct phos_ranges {
    struct phos_range **items;
    uint64_t *ends; /* of each item, side by side: searching them fetches no item */
    size_t count, capacity;
    uint64_t changes; /* how often one came or went */
};

/* False: out of host memory. Ranges must not overlap, and stay as they are while they are in here. */
bool phos_ranges_add(struct phos_ranges *ranges, struct phos_range *range);
void phos_ranges_remove(struct phos_ranges *ranges, const struct phos_range *range);
/* The range that contains the address, or NULL. */
struct phos_range *phos_ranges_find(const struct phos_ranges *ranges, uint64_t address);
/* Index of the first range that ends above the address. */
size_t phos_ranges_first(const struct phos_ranges *ranges, uint64_t address);
