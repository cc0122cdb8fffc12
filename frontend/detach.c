/* Detach: take away everything that is carried. Attach: put it back, at the same addresses, with the same access. */
#include "detach.h"
#include "arena.h"
#include "blocks.h"
#include "cleanup.h"
#include "clock.h"
#include "driver_memcpy.h"
#include "driver_shared.h"
#include "driver_vmm.h"
#include "gate.h"
#include "held.h"
#include "host.h"
#include "log.h"
#include "memory.h"
#include "residue.h"
#include "runtime.h"
#include "track.h"

#include <stdlib.h>

static struct phos_context *reduced; /* whose stack limit is to be put back; the control thread's own */
static size_t reduced_count;

/* ---- the stack limit: local memory for every thread that could run is most of what the driver saves itself ---- */

/* After the limit has changed, the driver lets everything that is queued in any stream wait for the first kernel, wherever
 * that stands. Were it one of the application's, in a stream that waits for the application, both would wait for ever: let it
 * be this one. The driver sets as much as this by a kernel, and three bytes by none. */
static CUresult launch_first_kernel(void)
{
    CUdeviceptr memory;
    const size_t size = (size_t)1 << 20;
    CUresult freed, result = phos_real.cuMemAlloc_v2(&memory, size);
    if (result != CUDA_SUCCESS)
        return result;
    result = phos_real.cuMemsetD8Async(memory, 0, size, CU_STREAM_LEGACY);
    if (result == CUDA_SUCCESS)
        result = phos_real.cuStreamSynchronize(CU_STREAM_LEGACY);
    freed = phos_real.cuMemFree_v2(memory);
    return result != CUDA_SUCCESS ? result : freed;
}

static bool set_stack(CUcontext context, size_t value, bool first_kernel)
{
    CUcontext popped;
    if (phos_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return false;
    CUresult result = phos_real.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, value);
    CUresult launched = result == CUDA_SUCCESS && first_kernel ? launch_first_kernel() : CUDA_SUCCESS;
    phos_real.cuCtxPopCurrent_v2(&popped);
    if (launched != CUDA_SUCCESS)
        phos_warn("no kernel could be launched ahead of the application's (CUDA error %d): until its first one is done, "
                  "none of its streams goes on",
                  launched);
    return result == CUDA_SUCCESS;
}

static void stack_restore(void)
{
    /* The last first: a green context's limit is its primary context's (580.159.04, H100), which was 0 already. */
    for (size_t i = reduced_count; i-- > 0;)
        if (reduced[i].stack_reduced && !set_stack(reduced[i].context, reduced[i].stack_limit, true))
            phos_warn("the stack limit of device %d could not be put back to %zu bytes", reduced[i].device,
                      reduced[i].stack_limit);
    free(reduced);
    reduced = NULL;
    reduced_count = 0;
}

static void stack_reduce(void)
{
    reduced = phos_contexts(&reduced_count);
    for (size_t i = 0; i < reduced_count; i++) {
        CUcontext popped;
        if (phos_real.cuCtxPushCurrent_v2(reduced[i].context) != CUDA_SUCCESS)
            continue;
        bool known = phos_real.cuCtxGetLimit(&reduced[i].stack_limit, CU_LIMIT_STACK_SIZE) == CUDA_SUCCESS;
        phos_real.cuCtxPopCurrent_v2(&popped);
        /* Nothing is running, and nothing will before the limit is back. */
        reduced[i].stack_reduced = known && (set_stack(reduced[i].context, 0, false) || set_stack(reduced[i].context, 128, false));
    }
}

/* ---- mapping ---- */

static struct phos_mapping *mapping_at(size_t index)
{
    return (struct phos_mapping *)phos_mappings.items[index];
}

static bool same_access(const struct phos_mapping *a, const struct phos_mapping *b)
{
    if (a->access_count != b->access_count)
        return false;
    for (uint32_t i = 0; i < a->access_count; i++)
        if (a->access[i].location.type != b->access[i].location.type ||
            a->access[i].location.id != b->access[i].location.id || a->access[i].flags != b->access[i].flags)
            return false;
    return true;
}

static CUresult apply_access(const struct phos_mapping *mapping, CUdeviceptr address, size_t size)
{
    CUmemAccessDesc list[PHOS_DEVICES + 8];
    uint32_t count = 0;
    for (uint32_t i = 0; i < mapping->access_count && count < sizeof list / sizeof *list; i++)
        if (mapping->access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) /* which a new mapping has anyway */
            list[count++] = (CUmemAccessDesc){mapping->access[i].location, mapping->access[i].flags};
    return count ? phos_real.cuMemSetAccess(address, size, list, count) : CUDA_SUCCESS;
}

static void opened(struct phos_mapping *mapping)
{
    phos_mappings_shut -= mapping->shut;
    mapping->shut = false;
}

/* Gives access to all mappings, or to those for which `wanted` is true: runs of neighbours with equal access get it by one
 * call. */
static bool access_all(bool (*wanted)(const struct phos_mapping *), struct phos_error *error)
{
    for (size_t i = 0, end; i < phos_mappings.count; i = end) {
        struct phos_mapping *first = mapping_at(i);
        uint64_t size = first->range.size, arena_end = phos_arena_end(first->range.address);
        end = i + 1;
        if (wanted && !wanted(first))
            continue;
        for (; end < phos_mappings.count; end++) {
            struct phos_mapping *m = mapping_at(end);
            if (m->range.address != first->range.address + size || !same_access(first, m) ||
                m->range.address == arena_end || phos_arena_end(m->range.address) != arena_end || (wanted && !wanted(m)))
                break;
            size += m->range.size;
        }
        CUresult result = apply_access(first, first->range.address, size);
        /* Neighbours in different reservations of the application may not share a call. */
        if (result != CUDA_SUCCESS && end > i + 1) {
            result = CUDA_SUCCESS;
            for (size_t k = i; k < end && result == CUDA_SUCCESS; k++)
                result = apply_access(mapping_at(k), mapping_at(k)->range.address, mapping_at(k)->range.size);
        }
        if (result != CUDA_SUCCESS)
            return phos_fail(error, result, "access to memory at 0x%llx cannot be set",
                             (unsigned long long)first->range.address);
        for (size_t k = i; k < end; k++)
            opened(mapping_at(k));
    }
    return true;
}

/* Maps every absent mapping again. `shut`: without access. */
static bool map_all(bool shut, struct phos_error *error)
{
    for (size_t i = 0; i < phos_mappings.count; i++) {
        struct phos_mapping *m = mapping_at(i);
        if (!m->absent)
            continue;
        CUresult result = phos_real.cuMemMap(m->range.address, m->range.size, m->offset, m->block->handle, m->flags);
        if (result != CUDA_SUCCESS)
            return phos_fail(error, result, "block %llu cannot be mapped at 0x%llx", (unsigned long long)m->block->id,
                             (unsigned long long)m->range.address);
        m->absent = false;
        m->shut = shut;
        phos_mappings_shut += shut;
    }
    return shut || access_all(NULL, error);
}

static bool is_shut(const struct phos_mapping *mapping)
{
    return mapping->shut;
}

bool phos_mappings_open(bool (*wanted)(const struct phos_mapping *), struct phos_error *error)
{
    return !phos_mappings_shut || access_all(wanted ? wanted : is_shut, error);
}

bool phos_mapping_open(struct phos_mapping *mapping, struct phos_error *error)
{
    CUresult result = apply_access(mapping, mapping->range.address, mapping->range.size);
    if (result != CUDA_SUCCESS)
        return phos_fail(error, result, "access to memory at 0x%llx cannot be set",
                         (unsigned long long)mapping->range.address);
    opened(mapping);
    return true;
}

static bool unmap_all(struct phos_error *error)
{
    for (size_t i = 0; i < phos_mappings.count; i++) {
        struct phos_mapping *m = mapping_at(i);
        CUresult result = phos_real.cuMemUnmap(m->range.address, m->range.size);
        if (result != CUDA_SUCCESS)
            return phos_fail(error, result, "memory at 0x%llx cannot be unmapped", (unsigned long long)m->range.address);
        opened(m);
        m->absent = true;
    }
    return true;
}

/* Host registration and unmapping want one to be current. */
bool phos_enter_context(void)
{
    size_t count;
    PHOS_FREES struct phos_context *list = phos_contexts(&count);
    for (size_t i = 0; list && i < count; i++)
        if (phos_real.cuCtxPushCurrent_v2(list[i].context) == CUDA_SUCCESS)
            return true;
    return false;
}

void phos_leave_context(bool entered)
{
    CUcontext popped;
    if (entered)
        phos_real.cuCtxPopCurrent_v2(&popped);
}

static bool block_import(struct phos_block *block, int descriptor, struct phos_error *error)
{
    CUresult result = phos_real.cuMemImportFromShareableHandle(&block->handle, (void *)(intptr_t)descriptor,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) {
        block->handle = 0;
        return phos_fail(error, result, "block %llu cannot be imported", (unsigned long long)block->id);
    }
    block->attached_once = block->given = true;
    return true;
}

/* What phosd never got would be gone with its last handle; what the driver has too would be two after the restore; and what
 * it has together with another process it would not restore. */
static bool all_movable(struct phos_error *error)
{
    size_t shared = phos_driver_vmm_shared();
    if (shared)
        return phos_fail(error, CUDA_SUCCESS,
                         "it shares %zu pieces of memory of the driver's own with other processes, which the driver would save "
                         "and could not restore; for NCCL's, start the program with NCCL_CUMEM_HOST_ENABLE=0",
                         shared);
    if (phos_driver_shared())
        return phos_fail(error, CUDA_SUCCESS,
                         "it shares memory with other processes by CUDA IPC or the handle of a pool or a logical endpoint, "
                         "which the driver would save and could not restore; close it before, or start all of them with "
                         "phos-gpu run (IPC)");
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next) {
        if (b->bound)
            return phos_fail(error, CUDA_SUCCESS,
                             "block %llu is part of a sparse array, a multicast object or a logical endpoint, which cannot "
                             "be checkpointed; for NCCL's, start the program with NCCL_NVLS_ENABLE=0",
                             (unsigned long long)b->id);
        if (!b->given && !b->owner_block)
            return phos_fail(error, CUDA_SUCCESS, "block %llu could not be exported to phosd", (unsigned long long)b->id);
    }
    return true;
}

static bool release_all(struct phos_error *error)
{
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next) {
        CUresult result = b->handle ? phos_real.cuMemRelease(b->handle) : CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            return phos_fail(error, result, "block %llu cannot be released", (unsigned long long)b->id);
        b->handle = 0;
    }
    return true;
}

/* What was released before something failed, only phosd has. */
static bool take_back(phos_fetch *fetch, struct phos_error *error)
{
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next) {
        if (b->handle)
            continue;
        PHOS_CLOSES_HELD int descriptor = -1;
        if (!fetch(b->owner_block ? b->owner_session : phos_session, b->owner_block ? b->owner_block : b->id, &descriptor,
                   error) ||
            !block_import(b, descriptor, error))
            return false;
    }
    return true;
}

static void detach_undo(phos_fetch *fetch)
{
    struct phos_error undo = {0};
    if (!take_back(fetch, &undo) || !map_all(false, &undo)) {
        phos_warn("after a failed detach the GPU memory of this process could not be mapped again: %s; every CUDA call "
                  "fails from now on",
                  undo.text);
        phos_gate_lose();
    } else if (!phos_host_register_all(&undo))
        phos_warn("pinned memory is pageable from now on: %s", undo.text);
}

bool phos_detach(const struct phos_reducers *reducers, phos_fetch *fetch, struct phos_detached *done,
                 struct phos_error *error)
{
    bool entered = phos_enter_context();
    PHOS_LOCKED(&phos_memory_lock);
    uint64_t start = phos_now_ns();
    if (!all_movable(error)) {
        phos_leave_context(entered);
        return false;
    }
    if (!phos_host_unregister_all(&done->host_bytes, error) || !unmap_all(error) || !release_all(error)) {
        detach_undo(fetch);
        phos_leave_context(entered);
        return false;
    }
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next) {
        done->blocks++;
        done->bytes += b->size;
    }
    done->unmap_ns = phos_now_ns() - start;
    start = phos_now_ns();
    if (reducers->stack)
        stack_reduce();
    phos_mmap_arm(true, reducers->huge_pages);
    phos_driver_memcpy_begin(reducers->copy_threads);
    done->reduce_ns = phos_now_ns() - start;
    phos_leave_context(entered);
    return true;
}

bool phos_attach_block(uint64_t id, int descriptor, struct phos_error *error)
{
    PHOS_CLOSES_HELD int closed = descriptor;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = phos_block_find(id);
    if (!block)
        return phos_fail(error, CUDA_SUCCESS, "phosd sent block %llu, which this process does not have",
                         (unsigned long long)id);
    if (block->handle)
        return true; /* from a connection that broke before all had come */
    return block_import(block, descriptor, error);
}

bool phos_attach(uint64_t blocks, bool shut, uint64_t *map_ns, uint64_t *undo_ns, struct phos_error *error)
{
    bool entered = phos_enter_context();
    PHOS_LOCKED(&phos_memory_lock);
    uint64_t start = phos_now_ns(), there = 0;
    bool ok = true;
    for (struct phos_block *b = phos_blocks.next; ok && b != &phos_blocks; b = b->next) {
        there++;
        if (!b->handle)
            ok = phos_fail(error, CUDA_SUCCESS, "phosd did not send block %llu", (unsigned long long)b->id);
    }
    if (ok && blocks && there != blocks)
        ok = phos_fail(error, CUDA_SUCCESS, "phosd has %llu blocks of this process, the process %llu",
                       (unsigned long long)blocks, (unsigned long long)there);
    if (ok && !map_all(shut, error)) {
        ok = false;
        for (size_t i = 0; i < phos_mappings.count; i++) {
            struct phos_mapping *m = mapping_at(i);
            if (!m->absent && phos_real.cuMemUnmap(m->range.address, m->range.size) == CUDA_SUCCESS) {
                opened(m);
                m->absent = true;
            }
        }
    }
    *map_ns = phos_now_ns() - start;
    start = phos_now_ns();
    if (ok) {
        phos_mmap_arm(false, false);
        phos_driver_memcpy_end();
        phos_residue_settle();
        stack_restore();
        struct phos_error host = {0};
        if (!phos_host_register_all(&host))
            phos_warn("pinned memory is pageable from now on: %s", host.text);
    }
    *undo_ns = phos_now_ns() - start;
    phos_leave_context(entered);
    return ok;
}
