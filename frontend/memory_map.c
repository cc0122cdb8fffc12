/* The memory map: what a detached process had mapped, for the image. */
#include "blocks.h"
#include "cleanup.h"
#include "detach.h"
#include "host.h"
#include "memory.h"
#include "track.h"
#include "wire.pb-c.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct collected {
    Phos__Wire__MemoryMap__Allocation **list;
    size_t count, capacity;
    bool failed;
};

static void collect(struct phos_allocation *allocation, void *cookie)
{
    struct collected *all = cookie;
    if (allocation->state != PHOS_LIVE)
        return;
    if (all->count == all->capacity) {
        size_t capacity = all->capacity ? all->capacity * 2 : 256;
        void *grown = realloc(all->list, capacity * sizeof *all->list);
        if (!grown) {
            all->failed = true;
            return;
        }
        all->list = grown;
        all->capacity = capacity;
    }
    Phos__Wire__MemoryMap__Allocation *a = malloc(sizeof *a);
    if (!a) {
        all->failed = true;
        return;
    }
    phos__wire__memory_map__allocation__init(a);
    a->address = allocation->address;
    a->size = allocation->size;
    a->block = allocation->span->mapping->block->id;
    a->offset = allocation->address - allocation->span->mapping->range.address;
    a->entry_point = (char *)allocation->entry_point;
    all->list[all->count++] = a;
}

/* The application's own mappings: one allocation each. */
static void collect_mappings(struct collected *all)
{
    for (size_t i = 0; i < phos_mappings.count; i++) {
        struct phos_mapping *m = (struct phos_mapping *)phos_mappings.items[i];
        if (m->span && m->span->kind != PHOS_SPAN_IMPORTED)
            continue;
        struct phos_span span = {.mapping = m};
        struct phos_allocation a = {.address = m->range.address,
                                    .size = m->range.size,
                                    .state = PHOS_LIVE,
                                    .span = &span,
                                    .entry_point = m->span ? "cuIpcOpenMemHandle" : "cuMemMap"};
        size_t before = all->count;
        collect(&a, all);
        if (all->count > before)
            all->list[before]->offset = m->offset;
    }
}

static int write_memfd(const void *bytes, size_t size)
{
    int file = memfd_create("phos-memory-map", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    for (size_t done = 0; file >= 0 && done < size;) {
        ssize_t wrote = write(file, (const char *)bytes + done, size - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            int saved = errno;
            close(file);
            errno = saved;
            return -1;
        }
        done += (size_t)wrote;
    }
    if (file >= 0)
        lseek(file, 0, SEEK_SET);
    return file;
}

int phos_memory_map(void)
{
    Phos__Wire__MemoryMap map = PHOS__WIRE__MEMORY_MAP__INIT;
    struct collected all = {0};
    PHOS_LOCKED(&phos_memory_lock);
    phos_each_allocation(collect, &all);
    collect_mappings(&all);
    size_t block_count = 0, at = 0;
    for (struct phos_block *b = phos_blocks.next; b != &phos_blocks; b = b->next)
        block_count++;
    PHOS_FREES Phos__Wire__MemoryMap__Block *blocks = calloc(block_count + 1, sizeof *blocks);
    PHOS_FREES Phos__Wire__MemoryMap__Block **block_list = calloc(block_count + 1, sizeof *block_list);
    for (struct phos_block *b = phos_blocks.next; blocks && block_list && b != &phos_blocks; b = b->next, at++) {
        phos__wire__memory_map__block__init(&blocks[at]);
        blocks[at].block = b->id;
        blocks[at].size = b->size;
        blocks[at].device = (uint32_t)(b->device < 0 ? 0 : b->device);
        if (b->owner_block) {
            blocks[at].owner_session = (ProtobufCBinaryData){sizeof b->owner_session, b->owner_session};
            blocks[at].owner_block = b->owner_block;
        }
        block_list[at] = &blocks[at];
    }
    Phos__Wire__Uncarried kinds[PHOS_UNCARRIED_KINDS], *kind_list[PHOS_UNCARRIED_KINDS];
    size_t kind_count = 0;
    for (int k = 0; k < PHOS_UNCARRIED_KINDS; k++) {
        Phos__Wire__Uncarried *u = &kinds[kind_count];
        phos__wire__uncarried__init(u);
        u->kind = (char *)phos_uncarried_names[k];
        phos_uncarried_get(k, &u->count, &u->bytes);
        if (u->count)
            kind_list[kind_count++] = u;
    }
    size_t host_count;
    PHOS_FREES Phos__Wire__MemoryMap__HostAllocation **host_list = phos_host_list(&host_count);
    map.blocks = block_list;
    map.n_blocks = block_count;
    map.allocations = all.list;
    map.n_allocations = all.count;
    map.uncarried = kind_list;
    map.n_uncarried = kind_count;
    map.host_allocations = host_list;
    map.n_host_allocations = host_count;
    size_t size = phos__wire__memory_map__get_packed_size(&map);
    PHOS_FREES uint8_t *bytes = malloc(size + 1);
    int file = -1;
    errno = ENOMEM;
    if (blocks && block_list && host_list && bytes && !all.failed) {
        phos__wire__memory_map__pack(&map, bytes);
        file = write_memfd(bytes, size);
    }
    for (size_t i = 0; i < all.count; i++)
        free(all.list[i]);
    free(all.list);
    return file;
}
