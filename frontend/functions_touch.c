/* What a launch touches, by what phosd says of the kernel or, where it says nothing, by the driver's layout. */
#include "functions_private.h"
#include "arguments.h"
#include "cleanup.h"
#include "library.h"
#include "log.h"
#include "memory.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define ALL ((uint32_t)(PHOS_READS | PHOS_WRITES))

static struct phos_access_table table;
static uint64_t table_version = 1;
/* The range of addresses that hold device memory, or did; guarded by phos_memory_lock. */
static CUdeviceptr device_low = ~0ull, device_high;
static _Atomic uint64_t touch_version = 1; /* any thread */

void phos_device_range(CUdeviceptr *low, CUdeviceptr *high)
{
    PHOS_LOCKED(&phos_memory_lock);
    if (phos_mappings.count) {
        const struct phos_range *first = phos_mappings.items[0], *last = phos_mappings.items[phos_mappings.count - 1];
        CUdeviceptr end = last->address + last->size;
        if (first->address < device_low || end > device_high)
            atomic_fetch_add(&touch_version, 1);
        device_low = first->address < device_low ? first->address : device_low;
        device_high = end > device_high ? end : device_high;
    }
    *low = device_low;
    *high = device_high;
}

uint64_t phos_kernel_touch_version(void)
{
    CUdeviceptr low, high;
    phos_device_range(&low, &high);
    return atomic_load(&touch_version);
}

/* With phos_function_lock held: the current table's row for a kernel. One that has another layout than the driver says is
 * for another kernel of this name. */
static const struct phos_access_kernel *row_of(struct phos_kernel *kernel)
{
    if (kernel->version == table_version)
        return kernel->row;
    kernel->version = table_version;
    kernel->row = kernel->name && kernel->module ? phos_access_find(&table, kernel->module, kernel->name_hash) : NULL;
    if (kernel->row && kernel->layout == PHOS_LAYOUT_KNOWN &&
        (kernel->row->parameters != kernel->count ||
         (kernel->count && memcmp(kernel->parameters, table.parameters + kernel->row->first_parameter,
                                  kernel->count * sizeof *kernel->parameters)))) {
        phos_debug("the descriptor of %s is not for this kernel", kernel->name);
        kernel->row = NULL;
    }
    return kernel->row;
}

/* cuBLAS's kernels keep addresses in shared memory and tensor maps in their workspace, which looks like writing anywhere.
 * Outside of its calls, in a graph, one that also writes through its arguments is taken to write through these only: they
 * are in every training step, and each would wait for all of memory. What this makes wrong is found by its content. */
static bool doubted(const struct phos_kernel *kernel, const struct phos_access_kernel *row)
{
    if (!kernel->of_blas || row->source != PHOS_SOURCE_SASS)
        return false;
    for (uint32_t i = 0; i < row->fields; i++)
        if (table.fields[row->first_field + i].access & PHOS_WRITES &&
            table.fields[row->first_field + i].kind != PHOS_FIELD_TABLE)
            return true;
    return false;
}

void phos_kernel_touch(struct phos_touches *touches, struct phos_kernel *kernel, const struct phos_arguments *arguments)
{
    bool in_blas = phos_library_in_blas();
    struct phos_look look = {.arguments = arguments};
    phos_device_range(&look.low, &look.high);
    PHOS_LOCKED(&phos_function_lock);
    const struct phos_access_kernel *row = row_of(kernel);
    kernel->of_blas |= in_blas;
    touches->kernel = kernel->name;
    touches->module = kernel->module;
    touches->communicates |= kernel->of_nccl;
    if (row) {
        touches->source = row->source;
        bool doubt = doubted(kernel, row);
        touches->anything |= doubt ? row->indirect & ~PHOS_WRITES : row->indirect;
        touches->unsure |= doubt ? row->indirect : 0;
        touches->guessed |= row->guessed;
        look.parameters = table.parameters + row->first_parameter;
        look.count = row->parameters;
        const struct phos_access_field *fields = table.fields + row->first_field;
        for (uint32_t i = 0; i < row->fields; i++)
            if (!doubt || in_blas || fields[i].kind != PHOS_FIELD_TABLE)
                phos_look_field(touches, &look, &fields[i]);
        return;
    }
    if (kernel->layout != PHOS_LAYOUT_KNOWN) {
        touches->anything |= ALL;
        touches->unknown = true;
        return;
    }
    touches->source = PHOS_SOURCE_LAYOUT;
    look.parameters = kernel->parameters;
    look.count = kernel->count;
    for (uint32_t i = 0; i < kernel->count; i++)
        if (kernel->parameters[i].size >= 8)
            phos_look_scan(touches, &look, kernel->parameters[i].offset, kernel->parameters[i].size, ALL);
}

bool phos_kernel_copy(struct phos_kernel *kernel, const struct phos_arguments *arguments, void **block, size_t *size)
{
    PHOS_LOCKED(&phos_function_lock);
    *block = NULL;
    *size = 0;
    if (!arguments->parameters && arguments->block) {
        if (!(*block = malloc(arguments->block_size + 1)))
            return false;
        memcpy(*block, arguments->block, *size = arguments->block_size);
        return true;
    }
    if (kernel->layout != PHOS_LAYOUT_KNOWN)
        return false;
    if (!kernel->block_size)
        return true;
    if (!arguments->parameters || !(*block = calloc(1, kernel->block_size)))
        return false;
    for (uint32_t i = 0; i < kernel->count; i++)
        if (arguments->parameters[i])
            memcpy((char *)*block + kernel->parameters[i].offset, arguments->parameters[i], kernel->parameters[i].size);
    *size = kernel->block_size;
    return true;
}

const char *phos_access_table_take(int descriptor)
{
    struct phos_access_table came;
    const char *problem = phos_access_read(descriptor, &came);
    if (problem)
        return problem;
    {
        PHOS_LOCKED(&phos_function_lock);
        struct phos_access_table former = table;
        table = came;
        came = former;
        table_version++;
    }
    atomic_fetch_add(&touch_version, 1);
    phos_access_free(&came);
    return NULL;
}
