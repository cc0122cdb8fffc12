#include "blocks.h"
#include "cleanup.h"
#include "runtime.h"
#include "control.h"
#include "log.h"
#include "track.h"
#include "window.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t phos_memory_lock = PTHREAD_MUTEX_INITIALIZER;
atomic_uint phos_memory_wanted;
struct phos_block phos_blocks = {.next = &phos_blocks, .previous = &phos_blocks};
struct phos_ranges phos_mappings;
uint64_t phos_block_bytes;
size_t phos_blocks_lingering;
size_t phos_mappings_shut;
_Atomic uint64_t phos_mappings_version = 1;
_Atomic uint64_t phos_block_changes;
static uint64_t last_id;

#define BUCKETS 4096
static struct phos_block *by_id[BUCKETS]; /* guarded by phos_memory_lock */

pthread_mutex_t *phos_memory_taken(void)
{
    if (pthread_mutex_trylock(&phos_memory_lock)) {
        phos_memory_wanted++;
        pthread_mutex_lock(&phos_memory_lock);
        phos_memory_wanted--;
    }
    return &phos_memory_lock;
}

static __thread unsigned relaxed_scopes __attribute__((tls_model("initial-exec"))); /* that this thread is in */

struct phos_relaxed phos_relax(void)
{
    struct phos_relaxed relaxed = {false, CU_STREAM_CAPTURE_MODE_RELAXED};
    if (!relaxed_scopes++)
        relaxed.changed = phos_real.cuThreadExchangeStreamCaptureMode(&relaxed.before) == CUDA_SUCCESS;
    return relaxed;
}

void phos_unrelax(struct phos_relaxed *relaxed)
{
    relaxed_scopes--;
    if (relaxed->changed)
        phos_real.cuThreadExchangeStreamCaptureMode(&relaxed->before);
}

CUresult phos_capture_permits(CUcontext context)
{
    CUcontext current = NULL;
    if (!phos_captures())
        return CUDA_SUCCESS;
    bool enter = context && phos_real.cuCtxGetCurrent(&current) == CUDA_SUCCESS && !current &&
                 phos_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    CUresult result = phos_real.cuMemFree_v2(0); /* freeing nothing is refused like freeing something */
    if (enter)
        phos_real.cuCtxPopCurrent_v2(&current);
    bool refused = result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    return refused ? result : CUDA_SUCCESS;
}

static struct phos_block *block_new(size_t size, CUdevice device, enum phos_owner owner)
{
    struct phos_block *block = calloc(1, sizeof *block);
    if (!block)
        return NULL;
    block->id = ++last_id;
    block->size = size;
    block->device = device;
    block->owner = owner;
    block->next = &phos_blocks;
    block->previous = phos_blocks.previous;
    phos_blocks.previous->next = block;
    phos_blocks.previous = block;
    block->chain = by_id[block->id % BUCKETS];
    by_id[block->id % BUCKETS] = block;
    phos_block_bytes += size;
    phos_block_changes++;
    return block;
}

static void block_delete(struct phos_block *block)
{
    block->next->previous = block->previous;
    block->previous->next = block->next;
    struct phos_block **link = &by_id[block->id % BUCKETS];
    while (*link != block)
        link = &(*link)->chain;
    *link = block->chain;
    phos_block_bytes -= block->size;
    phos_block_changes++;
    phos_blocks_lingering -= block->lingers;
    phos_control_block_gone(block);
    free(block);
}

CUresult phos_block_create(size_t size, const CUmemAllocationProp *properties, unsigned long long flags,
                           enum phos_owner owner, struct phos_block **out)
{
    CUmemAllocationProp wanted = *properties;
    wanted.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle;
    CUresult result = phos_real.cuMemCreate(&handle, size, &wanted, flags);
    if (result != CUDA_SUCCESS)
        return result;
    struct phos_block *block = block_new(size, properties->location.id, owner);
    if (!block) {
        phos_real.cuMemRelease(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->handle = handle;
    block->properties = *properties;
    *out = block;
    phos_control_block_new(block);
    return CUDA_SUCCESS;
}

struct phos_block *phos_block_adopt(CUmemGenericAllocationHandle handle, size_t size, CUdevice device,
                                    const uint8_t *session, uint64_t number)
{
    struct phos_block *block = block_new(size, device, PHOS_OWNER_APPLICATION);
    if (!block)
        return NULL;
    block->handle = handle;
    block->imported = true;
    if (session) {
        memcpy(block->owner_session, session, sizeof block->owner_session);
        block->owner_block = number;
    }
    phos_real.cuMemGetAllocationPropertiesFromHandle(&block->properties, handle);
    phos_control_block_new(block);
    return block;
}

CUresult phos_block_settle(struct phos_block *block)
{
    if (block->references || block->mappings) {
        /* Opened again while a pin kept it: nobody need wait for its end any more. */
        phos_blocks_lingering -= block->lingers;
        block->lingers = false;
        return CUDA_SUCCESS;
    }
    if (block->pins) {
        phos_blocks_lingering += !block->lingers;
        block->lingers = true;
        return CUDA_SUCCESS;
    }
    CUresult result = block->handle ? phos_real.cuMemRelease(block->handle) : CUDA_SUCCESS;
    block_delete(block);
    return result;
}

struct phos_block *phos_block_find(uint64_t id)
{
    for (struct phos_block *b = by_id[id % BUCKETS]; b; b = b->chain)
        if (b->id == id)
            return b;
    return NULL;
}

struct phos_block *phos_block_of(const uint8_t *session, uint64_t number)
{
    for (struct phos_block *b = phos_blocks.previous; b != &phos_blocks; b = b->previous)
        if (b->owner_block == number && !memcmp(b->owner_session, session, sizeof b->owner_session))
            return b;
    return NULL;
}

struct phos_mapping *phos_mapping_at(CUdeviceptr address)
{
    return (struct phos_mapping *)phos_ranges_find(&phos_mappings, address);
}

CUresult phos_map(CUdeviceptr address, size_t size, size_t offset, struct phos_block *block, unsigned long long flags,
                  struct phos_mapping **out)
{
    struct phos_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = phos_real.cuMemMap(address, size, offset, block->handle, flags);
    if (result == CUDA_SUCCESS) {
        *mapping = (struct phos_mapping){
            .range = {address, size}, .offset = offset, .block = block, .flags = flags,
            .shut = phos_window_shuts(block)};
        if (phos_ranges_add(&phos_mappings, &mapping->range)) {
            phos_mappings_shut += mapping->shut;
            phos_mappings_version += block->window_chunks != 0;
            block->mappings++;
            if (out)
                *out = mapping;
            return CUDA_SUCCESS;
        }
        phos_real.cuMemUnmap(address, size);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    free(mapping);
    return result;
}

CUresult phos_unmap(struct phos_mapping *mapping)
{
    CUresult result = phos_real.cuMemUnmap(mapping->range.address, mapping->range.size);
    return result == CUDA_SUCCESS ? phos_unmapped(mapping) : result;
}

CUresult phos_unmapped(struct phos_mapping *mapping)
{
    phos_ranges_remove(&phos_mappings, &mapping->range);
    struct phos_block *block = mapping->block;
    phos_mappings_shut -= mapping->shut;
    phos_mappings_version += block->window_chunks != 0;
    free(mapping->access);
    free(mapping);
    block->mappings--;
    return phos_block_settle(block);
}

static bool access_record(struct phos_mapping *mapping, const CUmemAccessDesc *access)
{
    for (uint32_t i = 0; i < mapping->access_count; i++)
        if (mapping->access[i].location.type == access->location.type &&
            mapping->access[i].location.id == access->location.id) {
            mapping->access[i].flags = access->flags;
            return true;
        }
    struct phos_access *grown = realloc(mapping->access, (mapping->access_count + 1) * sizeof *grown);
    if (!grown)
        return false;
    mapping->access = grown;
    mapping->access[mapping->access_count++] = (struct phos_access){access->location, access->flags};
    return true;
}

/* What is shut gets its access when it is opened. Whether the driver would take it is seen only then. */
static CUresult set_access_of_open(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    bool shut = false;
    for (size_t at = phos_ranges_first(&phos_mappings, address); at < phos_mappings.count && !shut; at++) {
        const struct phos_mapping *mapping = (const struct phos_mapping *)phos_mappings.items[at];
        if (mapping->range.address >= address + size)
            break;
        shut = mapping->shut;
    }
    if (!shut)
        return phos_real.cuMemSetAccess(address, size, access, count);
    for (CUdeviceptr at = address; at < address + size;) {
        const struct phos_mapping *mapping = phos_mapping_at(at);
        if (!mapping || mapping->range.address != at || mapping->range.size > address + size - at)
            return CUDA_ERROR_INVALID_VALUE;
        CUresult result =
            mapping->shut ? CUDA_SUCCESS : phos_real.cuMemSetAccess(at, mapping->range.size, access, count);
        if (result != CUDA_SUCCESS)
            return result;
        at += mapping->range.size;
    }
    return CUDA_SUCCESS;
}

CUresult phos_set_access(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    CUresult result = phos_mappings_shut ? set_access_of_open(address, size, access, count)
                                         : phos_real.cuMemSetAccess(address, size, access, count);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t at = phos_ranges_first(&phos_mappings, address); at < phos_mappings.count; at++) {
        struct phos_mapping *mapping = (struct phos_mapping *)phos_mappings.items[at];
        if (mapping->range.address >= address + size)
            break;
        phos_mappings_version += mapping->block->window_chunks != 0;
        for (size_t i = 0; i < count; i++)
            if (!access_record(mapping, &access[i]))
                return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Every name that a session of this process's image has had, and its last. With phos_memory_lock held. */
#define RENAMED 256
static uint8_t renamed[RENAMED][2][16];
static size_t renamed_count;

void phos_session_renamed(const uint8_t *old, const uint8_t *now)
{
    for (size_t i = 0; i < renamed_count; i++)
        if (!memcmp(renamed[i][1], old, 16))
            memcpy(renamed[i][1], now, 16);
    /* Full: what was exported longest ago is not found under its old name any more. */
    size_t at = renamed_count < RENAMED ? renamed_count++ : RENAMED - 1;
    memmove(renamed + 1, renamed, at * sizeof *renamed);
    memcpy(renamed[0][0], old, 16);
    memcpy(renamed[0][1], now, 16);
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
        if (b->owner_block && !memcmp(b->owner_session, old, 16))
            memcpy(b->owner_session, now, 16);
    if (!memcmp(phos_session, old, 16))
        memcpy(phos_session, now, 16);
}

void phos_session_now(uint8_t *session)
{
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < renamed_count; i++)
        if (!memcmp(renamed[i][0], session, 16)) {
            memcpy(session, renamed[i][1], 16);
            return;
        }
}
