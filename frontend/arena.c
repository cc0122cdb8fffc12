#include "arena.h"
#include "log.h"
#include "runtime.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Where we ask for reservations; only hints, the driver may answer elsewhere. One TiB a device, far from what the kernel
 * and usual allocators hand out, so that the same addresses are free in a restored process. */
#define ARENA_HINT 0x600000000000ull
#define ARENA_STRIDE 0x10000000000ull
#define ARENA_LEAST ((size_t)64 << 30)

struct extent {
    CUdeviceptr address;
    size_t size;
};

struct arena {
    CUdevice device;
    CUdeviceptr address;
    size_t size;
    struct extent *free; /* sorted, never adjacent */
    size_t free_count, free_capacity;
    struct arena *next;
};

static struct arena *arenas; /* guarded by phos_memory_lock */
static CUdeviceptr next_hint[PHOS_DEVICES];

static bool extents_reserve(struct arena *arena)
{
    if (arena->free_count < arena->free_capacity)
        return true;
    size_t capacity = arena->free_capacity ? arena->free_capacity * 2 : 16;
    struct extent *grown = realloc(arena->free, capacity * sizeof *grown);
    if (!grown)
        return false;
    arena->free = grown;
    arena->free_capacity = capacity;
    return true;
}

static CUresult arena_add(CUdevice device, size_t at_least, struct arena **out)
{
    size_t size = 2 * phos_devices[device].total;
    size = size < ARENA_LEAST ? ARENA_LEAST : (size + ((size_t)1 << 30) - 1) & ~(((size_t)1 << 30) - 1);
    if (size < at_least)
        size = at_least;
    struct arena *arena = calloc(1, sizeof *arena);
    if (!arena || !extents_reserve(arena)) {
        free(arena);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!next_hint[device])
        next_hint[device] = ARENA_HINT + (CUdeviceptr)device * ARENA_STRIDE;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    /* A machine with little address space left (ulimit -v, a GPU with 40-bit addresses) may refuse the big one. */
    for (; size >= at_least && result != CUDA_SUCCESS; size /= 2)
        if ((result = phos_real.cuMemAddressReserve(&arena->address, size, 0, next_hint[device], 0)) == CUDA_SUCCESS)
            break;
    if (result != CUDA_SUCCESS) {
        free(arena->free);
        free(arena);
        return result;
    }
    next_hint[device] += size;
    arena->device = device;
    arena->size = size;
    arena->free[arena->free_count++] = (struct extent){arena->address, size};
    arena->next = arenas;
    arenas = arena;
    phos_debug("reserved %zu GiB of addresses at 0x%llx for device %d", size >> 30, arena->address, device);
    *out = arena;
    return CUDA_SUCCESS;
}

/* Lowest address first: it keeps neighbours together, so that attach can set access for long runs at once. */
static bool arena_fit(struct arena *arena, size_t size, CUdeviceptr *address)
{
    for (size_t i = 0; i < arena->free_count; i++) {
        struct extent *extent = &arena->free[i];
        if (extent->size < size)
            continue;
        *address = extent->address;
        extent->address += size;
        extent->size -= size;
        if (!extent->size) {
            arena->free_count--;
            memmove(extent, extent + 1, (arena->free_count - i) * sizeof *extent);
        }
        return true;
    }
    return false;
}

CUresult phos_arena_take(CUdevice device, size_t size, CUdeviceptr *address)
{
    for (struct arena *arena = arenas; arena; arena = arena->next)
        if (arena->device == device && arena_fit(arena, size, address))
            return CUDA_SUCCESS;
    struct arena *arena;
    CUresult result = arena_add(device, size, &arena);
    if (result == CUDA_SUCCESS && !arena_fit(arena, size, address))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    return result;
}

static struct arena *arena_of(CUdeviceptr address)
{
    for (struct arena *arena = arenas; arena; arena = arena->next)
        if (address - arena->address < arena->size)
            return arena;
    return NULL;
}

void phos_arena_give(CUdeviceptr address, size_t size)
{
    struct arena *arena = arena_of(address);
    if (!arena)
        return;
    size_t low = 0, high = arena->free_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (arena->free[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    bool joins_before = low > 0 && arena->free[low - 1].address + arena->free[low - 1].size == address;
    bool joins_after = low < arena->free_count && arena->free[low].address == address + size;
    if (joins_before) {
        arena->free[low - 1].size += size;
        if (joins_after) {
            arena->free[low - 1].size += arena->free[low].size;
            arena->free_count--;
            memmove(&arena->free[low], &arena->free[low + 1], (arena->free_count - low) * sizeof *arena->free);
        }
    } else if (joins_after) {
        arena->free[low].address = address;
        arena->free[low].size += size;
    } else if (extents_reserve(arena)) {
        memmove(&arena->free[low + 1], &arena->free[low], (arena->free_count - low) * sizeof *arena->free);
        arena->free[low] = (struct extent){address, size};
        arena->free_count++;
    } /* else: out of host memory; these addresses are not used again, which harms nobody */
}

CUdeviceptr phos_arena_end(CUdeviceptr address)
{
    struct arena *arena = arena_of(address);
    return arena ? arena->address + arena->size : 0;
}
