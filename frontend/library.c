/* Scopes of library calls: what the documentation says of the launches made inside. All of it belongs to one thread. */
#include "library.h"
#include "window.h"

#include <stdlib.h>
#include <string.h>

enum { SOURCE_NAME = 2, SOURCE_LAYOUT = 3 }; /* as in descriptor.py */

/* NCCL's calls between ncclGroupStart and the outermost ncclGroupEnd. */
struct group {
    unsigned depth;
    bool full; /* memory ran out: nothing is known */
    struct phos_library_range *list;
    size_t count, capacity;
};

__thread struct phos_library_scope *phos_library_innermost __attribute__((tls_model("initial-exec")));
static __thread struct group group __attribute__((tls_model("initial-exec")));

void phos_library_enter(struct phos_library_scope *scope, const char *function)
{
    phos_library_enter_lazily(scope, function, NULL, NULL, NULL);
}

void phos_library_document(struct phos_library_scope *scope, const void *address, size_t size, uint32_t access)
{
    /* gen_library.py refuses a function that documents more than there is room for. */
    if (address && size != PHOS_LIBRARY_NOTHING && scope->count < PHOS_LIBRARY_RANGES)
        scope->ranges[scope->count++] = (struct phos_library_range){(CUdeviceptr)address, size, access};
}

void phos_library_group_start(void)
{
    group.depth++;
}

void phos_library_group_add(const struct phos_library_scope *scope)
{
    if (!group.depth || group.full)
        return;
    if (group.count + scope->count > group.capacity) {
        size_t capacity = 2 * (group.count + scope->count);
        struct phos_library_range *grown = realloc(group.list, capacity * sizeof *grown);
        if (!grown) {
            group.full = true;
            return;
        }
        group.list = grown;
        group.capacity = capacity;
    }
    for (size_t i = 0; i < scope->count; i++)
        group.list[group.count++] = scope->ranges[i];
}

void phos_library_group_end(struct phos_library_scope *scope)
{
    if (group.depth && --group.depth)
        return;
    scope->owned = group.list;
    if (!group.full) {
        scope->list = group.list;
        scope->count = group.count;
    }
    group = (struct group){0};
}

const char *phos_library_call(void)
{
    const struct phos_library_scope *scope = phos_library_live();
    return scope ? scope->function : NULL;
}

/* What the scopes say of one address. */
struct saying {
    bool documented, output, sized;
    CUdeviceptr begin, end; /* of the documented ranges that hold it; where sized */
};

static struct saying said_of(CUdeviceptr address)
{
    struct saying saying = {.sized = true, .begin = address, .end = address};
    for (const struct phos_library_scope *scope = phos_library_innermost; scope; scope = scope->outer) {
        for (size_t i = 0; i < scope->count; i++) {
            const struct phos_library_range *range = &scope->list[i];
            bool writes = range->access & PHOS_WRITES;
            if (range->access & PHOS_PERHAPS)
                continue;
            /* An output of unknown size may reach any address above its own: then an input there is no input only. An
             * input of unknown size is only known at its own address. */
            bool holds = range->size ? address - range->address < range->size
                                     : address == range->address || (writes && address > range->address);
            if (!holds)
                continue;
            saying.documented |= range->size || address == range->address;
            saying.output |= writes;
            saying.sized &= range->size != 0;
            if (range->address < saying.begin)
                saying.begin = range->address;
            if (range->address + range->size > saying.end)
                saying.end = range->address + range->size;
        }
    }
    return saying;
}

/* Of scopes that were entered without a window. */
static void document_all(void)
{
    for (struct phos_library_scope *scope = phos_library_innermost; scope; scope = scope->outer) {
        void (*document)(struct phos_library_scope *) = scope->document;
        scope->document = NULL;
        if (document)
            document(scope);
    }
}

static bool is_blas(const struct phos_library_scope *scope)
{
    return !strncmp(scope->function, "cublas", 6);
}

bool phos_library_in_blas(void)
{
    for (const struct phos_library_scope *scope = phos_library_live(); scope; scope = scope->outer)
        if (is_blas(scope))
            return true;
    return false;
}

/* Their kernels reach memory through tables and tensor maps that no analysis follows; what a call of theirs writes is in
 * its documentation. Not so with arrays of pointers, whose outputs are not, and with NCCL, which has buffers of its own. */
static bool says_all(const struct phos_library_scope *scope)
{
    if (scope->elsewhere || (!is_blas(scope) && strncmp(scope->function, "cudnn", 5)))
        return false;
    for (size_t i = 0; i < scope->count; i++)
        if ((scope->list[i].access & (PHOS_WRITES | PHOS_PERHAPS)) == PHOS_WRITES)
            return true;
    return scope->whole;
}

/* What is still to be taken for what a range says: its own access, or as much of it as is wanted. */
static uint32_t added(const struct phos_library_range *range, uint32_t wanted, uint32_t unknown)
{
    if (range->access & PHOS_PERHAPS)
        return range->access & unknown;
    return range->access & wanted ? range->access : 0;
}

static bool touched_already(const struct phos_touches *touches, const struct phos_library_range *range, uint32_t access)
{
    for (size_t i = 0; i < touches->count; i++) {
        const struct phos_touch *touch = &touches->list[i];
        if ((touch->access & access) != access || touch->address > range->address)
            continue;
        if (touch->address == range->address && !touch->size)
            return true;
        if (range->size && touch->size >= range->size && range->address - touch->address <= touch->size - range->size)
            return true;
    }
    return false;
}

void phos_library_refine(struct phos_touches *touches)
{
    if (!phos_library_live() || touches->nothing)
        return;
    document_all();
    for (size_t i = 0; i < touches->count; i++) {
        struct phos_touch *touch = &touches->list[i];
        struct saying saying = said_of(touch->address);
        if (!saying.documented)
            continue;
        if (!saying.output)
            touch->access = PHOS_READS | (touch->access & (PHOS_READS | PHOS_WRITES) << PHOS_THROUGH);
        /* Through a pointer to a documented matrix no more than the matrix is reached, not all that was allocated with
         * it: an allocator of its own, such as PyTorch's, puts many tensors into one allocation. */
        if (!touch->size && saying.sized) {
            touch->address = saying.begin;
            touch->size = saying.end - saying.begin;
        }
    }
    for (const struct phos_library_scope *scope = phos_library_innermost; scope; scope = scope->outer)
        touches->documented |= says_all(scope);
    /* Of a kernel without data flow the arguments are guessed, and what lies beyond them is not: it may be a tensor map. */
    uint32_t unknown = touches->anything | touches->unsure;
    for (size_t i = 0; i < touches->count; i++)
        unknown |= touches->list[i].access >> PHOS_THROUGH;
    if (touches->guessed || touches->source == SOURCE_NAME || touches->source == SOURCE_LAYOUT)
        unknown |= PHOS_READS | PHOS_WRITES;
    if (phos_window_loading()) /* a table that is not here yet may say so too */
        unknown |= PHOS_READS;
    uint32_t wanted = PHOS_WRITES;
    if (phos_window_loading() || (touches->documented && unknown))
        wanted |= PHOS_READS;
    if (touches->documented) {
        phos_touches_through_nothing(touches);
        touches->anything = 0; /* before ranges are added: that may fail, and then says so here */
    } else {
        touches->anything |= phos_library_in_blas() ? touches->unsure : 0;
        unknown = 0;
    }
    for (const struct phos_library_scope *scope = phos_library_innermost; scope; scope = scope->outer)
        for (size_t i = 0; i < scope->count; i++) {
            const struct phos_library_range *range = &scope->list[i];
            uint32_t access = added(range, wanted, unknown);
            if (access && !touched_already(touches, range, access))
                phos_touches_add(touches, range->address, range->size, access);
        }
}
