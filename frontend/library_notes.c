/* A hash table with chains. cuDNN cannot be asked: cudnnBackendGetAttribute does not give a variant pack's pointers back. */
#include "library_notes.h"
#include "cleanup.h"

#include <stdlib.h>
#include <string.h>

/* cudnnBackendAttributeName_t and cudnnBackendAttributeType_t, cudnn_graph.h 9.28. */
enum { DATA_POINTERS = 1001, INTERMEDIATES = 1002, WORKSPACE = 1003, VOID_POINTER = 6 };
enum { POINTERS_MOST = 4096, BUCKETS = 1024, KINDS = 3 };

struct pointers {
    size_t count, capacity;
    void **list;
};

struct note {
    const void *object;
    struct pointers pointers[KINDS]; /* by attribute; of a handle, the workspace */
    size_t size;                     /* of a handle's workspace */
    bool lost;                       /* memory ran out: not all is known */
    struct note *next;
};

static pthread_mutex_t note_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the table; nothing else is taken under it */
static struct note *buckets[BUCKETS];

static struct note **place_of(const void *object)
{
    uint64_t hash = (uint64_t)(uintptr_t)object * 0x9e3779b97f4a7c15ull;
    struct note **place = &buckets[hash >> 54];
    while (*place && (*place)->object != object)
        place = &(*place)->next;
    return place;
}

static struct note *note_of(const void *object)
{
    struct note **place = place_of(object);
    if (!*place && (*place = calloc(1, sizeof **place)))
        (*place)->object = object;
    return *place;
}

static void take(struct note *note, size_t kind, const void *const *from, size_t count)
{
    struct pointers *to = &note->pointers[kind];
    if (count > to->capacity) {
        void **grown = realloc(to->list, count * sizeof *grown);
        if (!grown) {
            note->lost = true;
            return;
        }
        to->list = grown;
        to->capacity = count;
    }
    to->count = count;
    if (count)
        memcpy(to->list, from, count * sizeof *to->list);
}

void phos_note_attribute(const void *descriptor, int attribute, int type, long long count, const void *elements)
{
    if (attribute < DATA_POINTERS || attribute > WORKSPACE || !descriptor)
        return;
    PHOS_LOCKED(&note_lock);
    struct note *note = note_of(descriptor);
    if (!note)
        return; /* a call with this pack may touch anything */
    if (type != VOID_POINTER || count < 0 || count > POINTERS_MOST || (count && !elements))
        note->lost = true;
    else
        take(note, (size_t)(attribute - DATA_POINTERS), elements, (size_t)count);
}

void phos_note_workspace(const void *handle, const void *workspace, size_t size)
{
    if (!handle)
        return;
    PHOS_LOCKED(&note_lock);
    struct note *note = note_of(handle);
    if (!note)
        return;
    take(note, WORKSPACE - DATA_POINTERS, &workspace, workspace && size ? 1 : 0);
    note->size = size;
}

void phos_note_gone(const void *object)
{
    PHOS_LOCKED(&note_lock);
    struct note **place = place_of(object), *note = *place;
    if (!note)
        return;
    *place = note->next;
    for (size_t i = 0; i < KINDS; i++)
        free(note->pointers[i].list);
    free(note);
}

void phos_note_document_pack(struct phos_library_scope *scope, const void *pack)
{
    PHOS_LOCKED(&note_lock);
    const struct note *note = *place_of(pack);
    /* Without data pointers it is not a pack that we have seen being filled. */
    if (!note || note->lost || !note->pointers[0].count || scope->owned)
        return;
    size_t count = 0;
    for (size_t i = 0; i < KINDS; i++)
        count += note->pointers[i].count;
    struct phos_library_range *list = malloc(count * sizeof *list);
    if (!list)
        return;
    scope->owned = list;
    scope->list = list;
    scope->count = 0;
    for (size_t kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < note->pointers[kind].count; i++)
            if (note->pointers[kind].list[i])
                list[scope->count++] = (struct phos_library_range){(CUdeviceptr)note->pointers[kind].list[i], 0,
                                                                   PHOS_READS | PHOS_WRITES | PHOS_PERHAPS};
    scope->whole = true;
}

void phos_note_document_workspace(struct phos_library_scope *scope, const void *handle)
{
    PHOS_LOCKED(&note_lock);
    const struct note *note = *place_of(handle);
    const struct pointers *workspace = note ? &note->pointers[WORKSPACE - DATA_POINTERS] : NULL;
    if (workspace && workspace->count)
        phos_library_document(scope, workspace->list[0], note->size, PHOS_READS | PHOS_WRITES | PHOS_PERHAPS);
}
