/* Tensor maps: 128 opaque bytes that a kernel gets by value, and that stand for the address they were made from. */
#pragma once
#include "phos_api.h"

#include <stdatomic.h>
#include <stdbool.h>

extern _Atomic uint32_t phos_tensor_map_count;

/* Whether there were ever any. */
static inline bool phos_tensor_maps_any(void)
{
    return atomic_load_explicit(&phos_tensor_map_count, memory_order_relaxed) != 0;
}

bool phos_tensor_map_find(const CUtensorMap *map, CUdeviceptr *address);
