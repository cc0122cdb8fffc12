/* See driver_vmm.h. As for the driver, memory is there as long as a handle or a mapping is. */
#include "driver_vmm.h"
#include "ranges.h"

#include <stdlib.h>

struct memory {
    struct memory *next, *previous;
    CUmemGenericAllocationHandle handle; /* while there are references: afterwards the driver may give it to others */
    enum phos_uncarried kind;
    size_t size;
    bool shared;
    unsigned references, mappings;
};

struct mapped {
    struct phos_range range; /* first: see ranges.h */
    struct memory *memory;
};

/* Guarded by phos_memory_lock. */
static struct memory all = {.next = &all, .previous = &all};
static struct phos_ranges mappings;
static size_t forgotten; /* for want of host memory: perhaps shared, for ever */

static struct memory *memory_of(CUmemGenericAllocationHandle handle)
{
    for (struct memory *m = all.next; m != &all; m = m->next)
        if (m->references && m->handle == handle)
            return m;
    return NULL;
}

static struct mapped *mapped_at(CUdeviceptr address)
{
    return (struct mapped *)phos_ranges_find(&mappings, address);
}

static void settle(struct memory *memory)
{
    if (memory->references || memory->mappings)
        return;
    phos_uncarried_add(memory->kind, -1, -(int64_t)memory->size);
    memory->next->previous = memory->previous;
    memory->previous->next = memory->next;
    free(memory);
}

void phos_driver_vmm_made(CUmemGenericAllocationHandle handle, enum phos_uncarried kind, size_t size, bool shared)
{
    struct memory *memory = memory_of(handle);
    if (memory) { /* imported once more */
        memory->references++;
        memory->shared |= shared;
        return;
    }
    phos_uncarried_add(kind, 1, (int64_t)size);
    memory = malloc(sizeof *memory);
    if (!memory) {
        forgotten++;
        return;
    }
    *memory = (struct memory){.next = all.next,
                              .previous = &all,
                              .handle = handle,
                              .kind = kind,
                              .size = size,
                              .shared = shared,
                              .references = 1};
    all.next->previous = memory;
    all.next = memory;
}

void phos_driver_vmm_retained(CUmemGenericAllocationHandle handle, CUdeviceptr address)
{
    struct mapped *mapped = mapped_at(address);
    if (!mapped)
        return;
    mapped->memory->handle = handle;
    mapped->memory->references++;
}

void phos_driver_vmm_released(CUmemGenericAllocationHandle handle)
{
    struct memory *memory = memory_of(handle);
    if (!memory)
        return;
    memory->references--;
    settle(memory);
}

void phos_driver_vmm_exported(CUmemGenericAllocationHandle handle)
{
    struct memory *memory = memory_of(handle);
    if (memory)
        memory->shared = true;
}

void phos_driver_vmm_mapped(CUmemGenericAllocationHandle handle, CUdeviceptr address, size_t size)
{
    struct memory *memory = memory_of(handle);
    if (!memory)
        return;
    memory->mappings++; /* also one that cannot be noted: then it counts as mapped for ever */
    struct mapped *mapped = malloc(sizeof *mapped);
    if (!mapped)
        return;
    *mapped = (struct mapped){{address, size}, memory};
    if (!phos_ranges_add(&mappings, &mapped->range))
        free(mapped);
}

void phos_driver_vmm_unmapped(CUdeviceptr address, size_t size)
{
    for (size_t i = phos_ranges_first(&mappings, address);
         i < mappings.count && mappings.items[i]->address < address + size;) {
        struct mapped *mapped = (struct mapped *)mappings.items[i];
        phos_ranges_remove(&mappings, &mapped->range);
        mapped->memory->mappings--;
        settle(mapped->memory);
        free(mapped);
    }
}

size_t phos_driver_vmm_shared(void)
{
    size_t count = forgotten;
    for (struct memory *m = all.next; m != &all; m = m->next)
        count += m->shared;
    return count;
}
