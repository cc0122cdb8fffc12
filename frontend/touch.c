/* Lists of touches. What they mean to a window is window.c's matter. */
#include "touch.h"
#include "blocks.h"
#include "cleanup.h"
#include "library.h"
#include "log.h"
#include "parts.h"
#include "track.h"

#include <stdlib.h>
#include <string.h>

void phos_touches_begin(struct phos_touches *touches, CUstream stream)
{
    /* Not the whole of it: the inline list is most of its size. */
    memset(touches, 0, offsetof(struct phos_touches, inline_list));
    touches->stream = stream;
    touches->list = touches->inline_list;
    touches->capacity = PHOS_TOUCHES_INLINE;
    touches->source = PHOS_SOURCE_NONE;
}

void phos_touches_add(struct phos_touches *touches, CUdeviceptr address, size_t size, uint32_t access)
{
    if (!address || !access)
        return;
    if (touches->count == touches->capacity) {
        size_t capacity = touches->capacity * 2;
        bool moved = touches->list != touches->inline_list;
        struct phos_touch *grown = realloc(moved ? touches->list : NULL, capacity * sizeof *grown);
        if (!grown) { /* more than can be said: then everything */
            touches->anything |= access;
            return;
        }
        if (!moved)
            memcpy(grown, touches->inline_list, sizeof touches->inline_list);
        touches->list = grown;
        touches->capacity = capacity;
    }
    touches->list[touches->count++] = (struct phos_touch){address, size, access, touches->recorded};
}

bool phos_touches_through(const struct phos_touches *touches, uint32_t access)
{
    for (size_t i = 0; i < touches->count; i++)
        if (touches->list[i].access >> PHOS_THROUGH & access)
            return true;
    return false;
}

void phos_touches_through_anything(struct phos_touches *touches)
{
    for (size_t i = 0; i < touches->count; i++) {
        touches->anything |= touches->list[i].access >> PHOS_THROUGH;
        touches->list[i].access &= PHOS_READS | PHOS_WRITES;
    }
}

void phos_touches_through_nothing(struct phos_touches *touches)
{
    for (size_t i = 0; i < touches->count; i++)
        touches->list[i].access &= PHOS_READS | PHOS_WRITES;
}

static bool captured(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    /* An error: a capture elsewhere forbids the legacy stream, and so the call as well. */
    return phos_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* NCCL's buffers, and those of the other ranks that it writes to, are made by cuMemCreate or exported, or imported; its
 * arguments name none of them. With an allocator that uses cuMemCreate too, all of that one's memory is among them, but that
 * PyTorch's segments are known by what it has handed out of them. */
static void add_communicated(struct phos_touches *touches)
{
    CUdeviceptr begin = 0, end = 0;
    PHOS_LOCKED(&phos_memory_lock);
    for (size_t i = 0; i < phos_mappings.count; i++) {
        const struct phos_mapping *mapping = (const struct phos_mapping *)phos_mappings.items[i];
        const struct phos_block *block = mapping->block;
        bool shared = block->owner_block || block->exported;
        if (block->owner != PHOS_OWNER_APPLICATION && !shared)
            continue;
        if (!shared && !touches->recorded && phos_parts_any(mapping->range.address, mapping->range.address + mapping->range.size))
            continue; /* of a segment of PyTorch's NCCL is given what it may touch */
        if (mapping->range.address != end) {
            phos_touches_add(touches, begin, end - begin, PHOS_READS | PHOS_WRITES);
            begin = mapping->range.address;
        }
        end = mapping->range.address + mapping->range.size;
    }
    phos_touches_add(touches, begin, end - begin, PHOS_READS | PHOS_WRITES);
}

void phos_touches_complete(struct phos_touches *touches, bool per_thread, const char *entry_point)
{
    if (touches->stream == CU_STREAM_LEGACY)
        touches->stream = NULL;
    else if (!touches->stream && per_thread)
        touches->stream = CU_STREAM_PER_THREAD;
    if (!touches->kernel)
        touches->kernel = entry_point;
    if (touches->source != PHOS_SOURCE_NONE || touches->unknown) /* of a kernel only a guess is known, of a copy what it does */
        phos_library_refine(touches);
    if (touches->communicates)
        add_communicated(touches);
    touches->captured = phos_captures() && captured(touches->stream);
    touches->nothing = touches->captured || (!touches->count && !touches->anything && !touches->host_copy);
}

void phos_touches_end(struct phos_touches *touches)
{
    if (touches->list != touches->inline_list)
        free(touches->list);
    touches->list = touches->inline_list;
    touches->count = 0;
}
