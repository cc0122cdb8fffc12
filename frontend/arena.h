/* Address space for what we allocate: a few big reservations a device, so that no allocation reserves for itself and
 * addresses stay what they are over detach and attach. All with phos_memory_lock held. */
#pragma once
#include "phos_api.h"
#include <stdbool.h>
#include <stddef.h>

/* `size` must be a multiple of 2 MiB. */
CUresult phos_arena_take(CUdevice device, size_t size, CUdeviceptr *address);
void phos_arena_give(CUdeviceptr address, size_t size);
/* Where the reservation that holds the address ends; 0 if it is none of ours. */
CUdeviceptr phos_arena_end(CUdeviceptr address);
