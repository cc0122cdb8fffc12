/* Beginning and end of a window: the tables and pools that phosd hands over are mapped, the calls traced, and all of it is
 * put away again. Both are the control thread's. */
#include "window_private.h"
#include "arena.h"
#include "cleanup.h"
#include "clock.h"
#include "connection.h"
#include "detach.h"
#include "gate.h"
#include "log.h"
#include "parts.h"
#include "track.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct phos_window phos_window;
pthread_mutex_t phos_window_lock = PTHREAD_MUTEX_INITIALIZER;
atomic_bool phos_window_over, phos_window_shadows;
static bool is_open; /* the control thread's own */

bool phos_window_is_open(void)
{
    return is_open;
}

bool phos_window_copies(void)
{
    return is_open && phos_window.table->mode != PHOS_WINDOW_WATCH;
}

void phos_window_see(const struct phos_shadow_pool *pool, CUresult result)
{
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY)
        return;
    uint64_t bit = 1ull << pool->index;
    if (!(__atomic_fetch_or(&phos_window.table->faulted, bit, __ATOMIC_RELEASE) & bit))
        phos_warn("a context ended with an error (%d) while the process was being checkpointed", (int)result);
}

void phos_window_look(void)
{
    if (!phos_window_copies() || phos_exiting()) /* the driver may be going away: no more calls to it */
        return;
    PHOS_LOCKED(&phos_window_lock);
    PHOS_RELAXED;
    for (int d = 0; d < phos_device_count; d++)
        if (phos_window.pools[d].copies)
            phos_window_see(&phos_window.pools[d], phos_real.cuStreamQuery(phos_window.pools[d].copies));
}

static void *map_table(int descriptor, size_t least, size_t *size)
{
    struct stat status;
    if (fstat(descriptor, &status) || (size_t)status.st_size < least)
        return NULL;
    void *table = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (table == MAP_FAILED)
        return NULL;
    *size = (size_t)status.st_size;
    return table;
}

/* phosd is trusted; a version of it that counts differently is not. */
static bool tables_agree(void)
{
    const struct phos_chunk_table *chunks = phos_window.chunks;
    const struct phos_window_table *table = phos_window.table;
    size_t whole = phos_window.table_size;
    return chunks->magic == PHOS_CHUNKS_MAGIC && table->magic == PHOS_WINDOW_MAGIC && table->size <= whole &&
           chunks->chunk_bytes && chunks->chunk_bytes % ((uint32_t)2 << 20) == 0 &&
           sizeof *chunks + (uint64_t)chunks->chunks * 4 <= phos_window.chunks_size && chunks->chunks < PHOS_TOUCH_WRITES &&
           table->slots < PHOS_SLOTS_MOST &&
           table->process < PHOS_PROCESSES_MOST && table->pools <= PHOS_DEVICES &&
           table->blocks_at + (uint64_t)table->blocks * sizeof(struct phos_window_block) <= whole &&
           table->pools_at + (uint64_t)table->pools * sizeof(struct phos_window_pool) <= whole &&
           table->slots_at + (uint64_t)table->slots * sizeof(struct phos_window_slot) <= whole &&
           table->transfers_at + PHOS_TRANSFERS * sizeof(struct phos_window_transfer) <= whole &&
           table->queue_at + (uint64_t)table->queue * 4 <= whole &&
           table->order_at + (uint64_t)table->order * 4 <= whole && table->mode <= PHOS_WINDOW_WATCH;
}

/* A pool is phosd's memory: mapped, and in no list of ours. */
static bool map_pool(const struct phos_window_pool *record, uint32_t index, int descriptor, struct phos_error *error)
{
    if (record->device >= (uint32_t)phos_device_count || record->first_slot + record->slots > phos_window.table->slots ||
        record->bytes < PHOS_POOL_FLAGS + (uint64_t)record->slots * phos_window.chunks->chunk_bytes)
        return phos_fail(error, CUDA_SUCCESS, "a shadow pool's record makes no sense");
    struct phos_shadow_pool *pool = &phos_window.pools[record->device];
    CUdevice device = phos_devices[record->device].device;
    CUmemGenericAllocationHandle handle;
    CUresult result = phos_real.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)descriptor,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS)
        return phos_fail(error, result, "a shadow pool could not be imported");
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    result = phos_real.cuMemAddressReserve(&address, record->bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = phos_real.cuMemMap(address, record->bytes, 0, handle, 0);
        if (result == CUDA_SUCCESS) {
            result = phos_real.cuMemSetAccess(address, record->bytes, &access, 1);
            if (result != CUDA_SUCCESS)
                phos_real.cuMemUnmap(address, record->bytes);
        }
        if (result != CUDA_SUCCESS)
            phos_real.cuMemAddressFree(address, record->bytes);
    }
    phos_real.cuMemRelease(handle); /* the mapping keeps the memory */
    if (result != CUDA_SUCCESS)
        return phos_fail(error, result, "a shadow pool of %llu bytes could not be mapped", (unsigned long long)record->bytes);
    *pool = (struct phos_shadow_pool){.address = address,
                                      .size = record->bytes,
                                      .index = index,
                                      .first_slot = record->first_slot,
                                      .slots = record->slots,
                                      .next = record->first_slot};
    return true;
}

/* Which chunks the blocks have; what is created from now on has none. False: a block is not as phosd says; one that was
 * freed before its process could be watched is no matter. */
static bool mark_blocks(struct phos_error *error)
{
    const struct phos_window_block *records =
        (const void *)((const char *)phos_window.table + phos_window.table->blocks_at);
    PHOS_LOCKED(&phos_memory_lock);
    for (uint32_t i = 0; i < phos_window.table->blocks; i++) {
        const struct phos_window_block *record = &records[i];
        struct phos_block *block = phos_block_find(record->block);
        uint64_t chunks = (record->size + phos_window.chunks->chunk_bytes - 1) / phos_window.chunks->chunk_bytes;
        if (!block && phos_window.table->mode == PHOS_WINDOW_WATCH)
            continue;
        if (!block || block->size != record->size || record->first_chunk + chunks > phos_window.chunks->chunks)
            return phos_fail(error, CUDA_SUCCESS, "phosd means to save block %llu, which is not what it thinks",
                             (unsigned long long)record->block);
        block->window_chunks = (uint32_t)chunks;
        block->window_first = record->first_chunk;
        phos_window.unwritten += (uint32_t)chunks;
    }
    return true;
}

static bool all_there(const struct phos_mapping *mapping)
{
    struct phos_chunk_range range =
        phos_window_chunks(mapping, mapping->range.address, mapping->range.address + mapping->range.size);
    for (uint32_t chunk = range.first; chunk < range.end; chunk++)
        if (__atomic_load_n(&phos_window.chunks->state[chunk], __ATOMIC_ACQUIRE) != PHOS_CHUNK_SAVED)
            return false;
    return true;
}

static bool on_its_way(CUresult result)
{
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
        phos_debug("what was to be written to a shadow pool ended with an error");
    return result == CUDA_ERROR_NOT_READY;
}

/* False: something is still on its way to a pool. */
static bool pools_left(void)
{
    PHOS_LOCKED(&phos_window_lock);
    if (!phos_window.slots)
        return true;
    struct phos_slot *transfers = phos_window.slots + phos_window.table->slots, *end = transfers + PHOS_TRANSFERS;
    for (int d = 0; d < phos_device_count; d++)
        if (phos_window.pools[d].copies && on_its_way(phos_real.cuStreamQuery(phos_window.pools[d].copies)))
            return false;
    for (struct phos_slot *slot = transfers; slot < end; slot++)
        if (slot->event && on_its_way(phos_real.cuEventQuery(slot->event)))
            return false;
    for (int d = 0; d < phos_device_count; d++) {
        if (phos_window.pools[d].copies)
            phos_real.cuStreamDestroy_v2(phos_window.pools[d].copies);
        phos_window.pools[d].copies = NULL;
    }
    for (struct phos_slot *slot = phos_window.slots; slot < end; slot++)
        if (slot->event)
            phos_real.cuEventDestroy_v2(slot->event);
    free(phos_window.slots);
    phos_window.slots = NULL;
    atomic_store(&phos_window_shadows, false);
    return true;
}

/* phosd has read what it wanted; but a copy or a flag that nobody wants any more may still be on its way. And what is queued
 * before a transfer's flag may wait for a thread that waits for an answer of this one, or for the window's lock. */
static void leave_pools(void)
{
    while (!pools_left()) {
        phos_connection_pump();
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void put_away(void)
{
    {
        PHOS_LOCKED(&phos_memory_lock);
        for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
            b->window_chunks = b->window_first = 0;
    }
    leave_pools();
    for (int d = 0; d < phos_device_count; d++) {
        struct phos_shadow_pool *pool = &phos_window.pools[d];
        if (!pool->address)
            continue;
        if (phos_real.cuMemUnmap(pool->address, pool->size) != CUDA_SUCCESS ||
            phos_real.cuMemAddressFree(pool->address, pool->size) != CUDA_SUCCESS)
            phos_warn_once("a shadow pool could not be unmapped; its memory stays in use until the process ends");
    }
    free(phos_window.seen);
    free(phos_window.written);
    free(phos_window.queued);
    if (phos_window.chunks)
        munmap(phos_window.chunks, phos_window.chunks_size);
    if (phos_window.table)
        munmap(phos_window.table, phos_window.table_size);
    PHOS_LOCKED(&phos_window_lock); /* who has not been traced may ask whether there are pools */
    phos_window = (struct phos_window){0};
}

static bool begin(const int *descriptors, size_t count, bool computes, struct phos_error *error)
{
    if (count < 2)
        return phos_fail(error, CUDA_SUCCESS, "the tables of the window are missing");
    phos_window.chunks = map_table(descriptors[0], sizeof *phos_window.chunks, &phos_window.chunks_size);
    phos_window.table = map_table(descriptors[1], sizeof *phos_window.table, &phos_window.table_size);
    if (!phos_window.chunks || !phos_window.table || !tables_agree())
        return phos_fail(error, CUDA_SUCCESS, "the tables of the window cannot be used");
    if (computes != (phos_window.table->mode == PHOS_WINDOW_WATCH))
        return phos_fail(error, CUDA_SUCCESS, "a window begins before the gate is opened, and only watching after that");
    if (phos_window.table->pools != count - 2)
        return phos_fail(error, CUDA_SUCCESS, "%u shadow pools came with %zu descriptors", phos_window.table->pools, count - 2);
    PHOS_FREES struct phos_slot *slots = calloc(phos_window.table->slots + PHOS_TRANSFERS, sizeof *slots);
    size_t words = phos_window.chunks->chunks / 64 + 1;
    phos_window.seen = calloc(words, sizeof *phos_window.seen);
    phos_window.written = calloc(words, sizeof *phos_window.written);
    phos_window.queued = calloc(words, sizeof *phos_window.queued);
    if (!slots || !phos_window.seen || !phos_window.written || !phos_window.queued)
        return phos_fail(error, CUDA_SUCCESS, "out of host memory");
    for (uint32_t i = 0; i < phos_window.table->pools; i++)
        if (!map_pool(&phos_window_pools()[i], i, descriptors[2 + i], error))
            return false;
    if (!mark_blocks(error))
        return false;
    {
        PHOS_LOCKED(&phos_window_lock);
        phos_window.slots = slots;
        slots = NULL;
        atomic_store(&phos_window_shadows, true);
    }
    PHOS_LOCKED(&phos_memory_lock);
    return phos_window.table->mode != PHOS_WINDOW_STRICT || phos_mappings_open(all_there, error);
}

bool phos_window_begin(const int *descriptors, size_t count, bool computes, struct phos_error *error)
{
    if (is_open)
        return phos_fail(error, CUDA_SUCCESS, "a window is open already");
    bool entered = phos_enter_context();
    is_open = begin(descriptors, count, computes, error);
    if (is_open) {
        atomic_store(&phos_window_over, false);
        atomic_store(&phos_window_strict, phos_window.table->mode == PHOS_WINDOW_STRICT);
        phos_gate_trace(true, NULL);
    } else
        put_away();
    phos_leave_context(entered);
    return is_open;
}

void phos_window_end(void)
{
    if (!is_open)
        return;
    bool exiting = phos_exiting(); /* the driver may be going away: no more calls to it, and all of this goes with the process */
    bool entered = !exiting && phos_enter_context();
    if (!exiting && !phos_window_loaded()) {
        phos_leave_context(entered);
        return;
    }
    atomic_store(&phos_window_over, true);
    phos_gate_trace(false, phos_connection_pump); /* a traced call may wait for an answer of phosd */
    if (!exiting)
        put_away();
    phos_leave_context(entered);
    is_open = false;
    phos_parts_rest();
    phos_twins_end();
}

void phos_window_before_import(void)
{
    bool traced = atomic_load_explicit(&phos_self.traced, memory_order_relaxed); /* else the window may end at any time */
    if (!traced || !phos_window.table || phos_window.table->mode != PHOS_WINDOW_COW || phos_window_closed())
        return;
    uint64_t start = phos_now_ns();
    while (!phos_window_closed())
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    phos_count(&phos_window.table->counts.waits, 1);
    phos_count(&phos_window.table->counts.wait_ns, phos_now_ns() - start);
}

void phos_window_watched(void)
{
    if (is_open && phos_window.table->mode == PHOS_WINDOW_WATCH)
        phos_window_end();
}

void phos_window_forked(void)
{
    /* The driver does not work in a child; the tables are the parent's business. */
    atomic_store(&phos_window_over, true);
    atomic_store(&phos_window_strict, false);
    atomic_store(&phos_window_shadows, false);
    pthread_mutex_init(&phos_window_lock, NULL);
    if (phos_window.chunks)
        munmap(phos_window.chunks, phos_window.chunks_size);
    if (phos_window.table)
        munmap(phos_window.table, phos_window.table_size);
    phos_window = (struct phos_window){0};
    is_open = false;
    phos_twins_forked();
}
