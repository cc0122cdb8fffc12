#include "ipc.h"
#include "cleanup.h"
#include "clock.h"
#include "control.h"
#include "deferred.h"
#include "driver_shared.h"
#include "gate.h"
#include "held.h"
#include "log.h"
#include "memory.h"
#include "runtime.h"
#include "tell.h"
#include "track.h"
#include "window.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define IMPORT_NS 50000000000u /* while phosd says nothing, or knows no owner, who may connect later */

static const char token_magic[8] = {'P', 'h', 'O', 'S', 't', 'o', 'k', '1'};

static uint64_t token_check(const struct phos_token *token)
{
    const unsigned char *bytes = (const unsigned char *)token;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < offsetof(struct phos_token, check); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

/* With phos_memory_lock held, both. Memory that came from another session is passed on as what it is. */
static uint64_t name_of(const struct phos_block *block, uint8_t session[16])
{
    memcpy(session, block->owner_block ? block->owner_session : phos_session, 16);
    return block->owner_block ? block->owner_block : block->id;
}

static void token_fill(struct phos_token *token, struct phos_block *block, uint64_t offset, uint64_t size)
{
    block->exported = true;
    memcpy(token->magic, token_magic, sizeof token->magic);
    token->block = name_of(block, token->session);
    token->offset = offset;
    token->size = size;
    token->whole = block->size;
    token->check = token_check(token);
}

/* Who exported it may have another session by now. */
static bool token_valid(struct phos_token *token)
{
    if (memcmp(token->magic, token_magic, sizeof token->magic) || token->check != token_check(token))
        return false;
    phos_session_now(token->session);
    return true;
}

/* Whether phosd will hand a block to who has a token of it. That it was told does not say so: whoever gets the token asks
 * over another connection, which phosd may read first. So this process asks as well, before it gives the token away. */
static bool phosd_has(uint64_t id)
{
    phos_gate_untrace_self(); /* as an import does, and why */
    if (!phos_control_wait_registered(id, 1000))
        return false;
    uint8_t session[16];
    uint64_t number;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = phos_block_find(id);
        if (!block)
            return false;
        number = name_of(block, session);
    }
    PHOS_CLOSES_HELD int descriptor = -1;
    size_t size;
    CUdevice device;
    bool coming;
    struct phos_error error = {0};
    if (phos_control_resolve(session, number, &descriptor, &size, &device, &coming, &error))
        return true;
    phos_warn("memory that another process is to have: %s", error.text);
    return false;
}

bool phos_token_export(uint64_t id, void *shareable)
{
    struct phos_token token;
    if (!phosd_has(id))
        return false;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = phos_block_find(id);
        if (!block)
            return false;
        token_fill(&token, block, 0, block->size);
    }
    int file = memfd_create("phos-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0)
        return false;
    if (write(file, &token, sizeof token) != sizeof token ||
        fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        close(file);
        return false;
    }
    *(int *)shareable = file;
    return true;
}

bool phos_token_read(int descriptor, struct phos_token *token)
{
    struct stat status;
    /* Only a sealed memfd of that size is read: the driver's own descriptors are devices. */
    if (fstat(descriptor, &status) || !S_ISREG(status.st_mode) || status.st_size != sizeof *token ||
        fcntl(descriptor, F_GET_SEALS) < 0)
        return false;
    return pread(descriptor, token, sizeof *token, 0) == sizeof *token && token_valid(token);
}

CUresult phos_token_block(const struct phos_token *token, struct phos_block **out)
{
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_block *block = memcmp(token->session, phos_session, sizeof phos_session)
                                       ? phos_block_of(token->session, token->block)
                                       : phos_block_find(token->block);
        if (block) {
            block->references++;
            *out = block;
            return CUDA_SUCCESS;
        }
    }
    phos_window_before_import();
    /* The window may end before this call: if phosd dies it does, before the control thread connects to another, which is to
     * answer. A mapping of this block is none of the window's. */
    phos_gate_untrace_self();
    PHOS_CLOSES_HELD int descriptor = -1;
    size_t size = 0;
    CUdevice device = 0;
    struct phos_error error = {0};
    bool resolved = false, coming;
    /* A phosd that has just begun learns whose the memory is when its owner connects, which may be after us. One that is
     * not there, or does not answer, is asked no further: each such question takes seconds by itself. While it restores the
     * memory, or a checkpoint has it, it says that it will come: that takes as long as it takes. */
    uint64_t end = phos_now_ns() + IMPORT_NS;
    for (int try = 0; try < 50 && !resolved && !(try && phos_tell_nobody()) && phos_now_ns() < end; try++) {
        error = (struct phos_error){0};
        resolved = phos_control_resolve(token->session, token->block, &descriptor, &size, &device, &coming, &error);
        if (!resolved)
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        if (coming) {
            end = phos_now_ns() + IMPORT_NS;
            try = 0;
        }
    }
    if (!resolved) {
        phos_warn("shared memory cannot be imported: %s", error.text);
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUmemGenericAllocationHandle handle;
    CUresult result = phos_real.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS)
        return result;
    /* Our numbering of devices, not the exporter's. */
    CUmemAllocationProp properties = {0};
    if (phos_real.cuMemGetAllocationPropertiesFromHandle(&properties, handle) == CUDA_SUCCESS &&
        properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        device = properties.location.id;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_block *block = phos_block_adopt(handle, token->whole, device, token->session, token->block);
    if (!block) {
        phos_real.cuMemRelease(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->references++;
    *out = block;
    return CUDA_SUCCESS;
}

/* ---- the older form: a 64-byte handle that travels by whatever means ---- */

CUresult serve_cuIpcGetMemHandle(CUipcMemHandle_v1 *handle, CUdeviceptr_v2 address)
{
    uint64_t id = 0;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_allocation *allocation = handle ? phos_allocation_at(address) : NULL;
        if (allocation && !allocation->pool)
            id = allocation->span->mapping->block->id;
    }
    if (!id) {
        CUresult result = phos_real.cuIpcGetMemHandle(handle, address);
        CUdeviceptr whole = address;
        CUcontext context = NULL;
        if (result == CUDA_SUCCESS) {
            phos_real.cuMemGetAddressRange_v2(&whole, NULL, address);
            phos_real.cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address);
            PHOS_LOCKED(&phos_memory_lock);
            phos_driver_shared_add(PHOS_SHARED_EXPORTED, whole, context);
        }
        return result;
    }
    if (!phosd_has(id)) {
        phos_warn_once("memory cannot be shared between processes while phosd does not hold it");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_allocation *allocation = phos_allocation_at(address);
    if (!allocation)
        return CUDA_ERROR_INVALID_VALUE;
    struct phos_token token;
    token_fill(&token, allocation->span->mapping->block, allocation->address - allocation->span->mapping->range.address,
               allocation->size);
    memcpy(handle, &token, sizeof token);
    return CUDA_SUCCESS;
}

/* What was there before its owner has freed. Out of host memory: questions about it are answered for all that is mapped. */
static void note_opened(struct phos_span *span, CUdeviceptr address, size_t size)
{
    for (struct phos_opened **link = &span->opened; *link;) {
        struct phos_opened *before = *link;
        if (before->address + before->size <= address || address + size <= before->address) {
            link = &before->next;
            continue;
        }
        *link = before->next;
        free(before);
    }
    struct phos_opened *opened = malloc(sizeof *opened);
    if (!opened)
        return;
    *opened = (struct phos_opened){address, size, span->opened};
    span->opened = opened;
}

static CUresult open_token(CUdeviceptr *address, const struct phos_token *token)
{
    CUcontext context;
    CUdevice device;
    CUresult result = phos_current(&context, &device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!memcmp(token->session, phos_session, sizeof phos_session))
        return CUDA_ERROR_INVALID_CONTEXT; /* the driver refuses its own handles likewise */
    phos_context_seen(context, device);
    struct phos_block *block;
    result = phos_token_block(token, &block);
    if (result != CUDA_SUCCESS)
        return result;
    PHOS_RELAXED;
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_span *span = NULL;
    for (size_t i = 0; i < phos_mappings.count && !span; i++) {
        struct phos_mapping *mapping = (struct phos_mapping *)phos_mappings.items[i];
        if (mapping->block == block && mapping->span && mapping->span->kind == PHOS_SPAN_IMPORTED)
            span = mapping->span;
    }
    bool fresh = !span;
    if (fresh)
        result = phos_map_imported(block, &span);
    if (result == CUDA_SUCCESS && device != block->device) {
        CUmemAccessDesc access = {{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        result = phos_set_access(span->mapping->range.address, span->mapping->range.size, &access, 1);
    }
    block->references--; /* the mapping keeps it */
    if (result != CUDA_SUCCESS) {
        /* What nobody has opened nobody would close. */
        if ((fresh && span ? phos_unmap_imported(span) : phos_block_settle(block)) != CUDA_SUCCESS)
            phos_debug("imported memory could not be released");
        return result;
    }
    context = phos_context_whole(context);
    span->opener = !span->opens || span->opener == context ? context : NULL;
    span->opens++;
    *address = span->mapping->range.address + token->offset;
    note_opened(span, *address, token->size);
    return CUDA_SUCCESS;
}

static CUresult ipc_open(CUdeviceptr_v2 *address, CUipcMemHandle_v1 handle, unsigned int flags,
                         CUresult (*call)(CUdeviceptr_v2 *, CUipcMemHandle_v1, unsigned int))
{
    struct phos_token token;
    memcpy(&token, &handle, sizeof token);
    if (address && token_valid(&token))
        return open_token(address, &token);
    CUcontext context = NULL;
    CUresult result = call(address, handle, flags);
    if (result == CUDA_SUCCESS) {
        phos_real.cuCtxGetCurrent(&context);
        PHOS_LOCKED(&phos_memory_lock);
        phos_driver_shared_add(PHOS_SHARED_OPENED, *address, context);
    }
    return result;
}

CUresult serve_cuIpcOpenMemHandle_v2(CUdeviceptr_v2 *address, CUipcMemHandle_v1 handle, unsigned int flags)
{
    return ipc_open(address, handle, flags, phos_real.cuIpcOpenMemHandle_v2);
}

CUresult serve_cuIpcOpenMemHandle(CUdeviceptr_v2 *address, CUipcMemHandle_v1 handle, unsigned int flags)
{
    return ipc_open(address, handle, flags, phos_real.cuIpcOpenMemHandle);
}

static struct phos_span *imported_at(CUdeviceptr address)
{
    struct phos_mapping *mapping = phos_mapping_at(address);
    return mapping && mapping->span && mapping->span->kind == PHOS_SPAN_IMPORTED ? mapping->span : NULL;
}

static void release(void *what)
{
    struct phos_span *span = what;
    if (!span->opens && phos_unmap_imported(span) != CUDA_SUCCESS)
        phos_debug("memory of another process that was closed during a capture could not be unmapped");
}

/* `captured`: nobody could wait for the work that may use it. */
static CUresult close_last(CUdeviceptr address, CUcontext context, bool captured)
{
    PHOS_LOCKED(&phos_memory_lock);
    struct phos_span *span = imported_at(address);
    if (!span || !span->opens)
        return CUDA_ERROR_INVALID_VALUE;
    if (--span->opens)
        return CUDA_SUCCESS;
    phos_deferred_drop(span); /* from an earlier time, after which it was opened again */
    if (!captured)
        return phos_unmap_imported(span);
    if (phos_deferred_add(context, release, span))
        return CUDA_SUCCESS;
    span->opens++;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void phos_ipc_context_ends(CUcontext context)
{
    for (size_t i = phos_mappings.count; i-- > 0;) {
        struct phos_span *span = ((struct phos_mapping *)phos_mappings.items[i])->span;
        if (!span || span->kind != PHOS_SPAN_IMPORTED || !span->opens || span->opener != context)
            continue;
        phos_deferred_drop(span);
        if (phos_unmap_imported(span) != CUDA_SUCCESS)
            phos_debug("memory of another process could not be unmapped with the context that had opened it");
    }
}

CUresult serve_cuIpcCloseMemHandle(CUdeviceptr_v2 address)
{
    CUcontext context = NULL;
    CUdevice device;
    bool ours;
    {
        PHOS_LOCKED(&phos_memory_lock);
        struct phos_span *span = imported_at(address);
        ours = span;
        if (ours && !span->opens)
            return CUDA_ERROR_INVALID_VALUE;
        if (ours && span->opens > 1) {
            span->opens--;
            return CUDA_SUCCESS;
        }
    }
    if (!ours) {
        CUresult result = phos_real.cuIpcCloseMemHandle(address); /* not under the lock: the driver waits for the device */
        if (result == CUDA_SUCCESS) {
            PHOS_LOCKED(&phos_memory_lock);
            phos_driver_shared_drop(PHOS_SHARED_OPENED, address);
        }
        return result;
    }
    bool captured = false;
    if (phos_current(&context, &device) == CUDA_SUCCESS && phos_synchronize(context, &captured) != CUDA_SUCCESS)
        phos_debug("memory of another process is closed with an error pending");
    PHOS_RELAXED;
    phos_window_stand_still();
    CUresult result = close_last(address, context, captured);
    phos_window_go_on();
    return result;
}

CUresult serve_cuIpcGetEventHandle(CUipcEventHandle_v1 *handle, CUevent event)
{
    CUresult result = phos_real.cuIpcGetEventHandle(handle, event);
    if (result == CUDA_SUCCESS)
        phos_uncarried_add(PHOS_UNCARRIED_IPC_EVENT, 1, 0);
    return result;
}
