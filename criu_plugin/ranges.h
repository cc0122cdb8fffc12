/* Ranges of memory in an array, by address, none of which overlap. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The first of `count` structures of `each` bytes, which begin with an address and a size, that ends behind an address. */
static inline size_t phos_first_behind(const void *ranges, size_t each, size_t count, uint64_t address)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = (low + high) / 2;
		const uint64_t *range = (const void *)((const char *)ranges + middle * each);

		if (range[0] + range[1] <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}
