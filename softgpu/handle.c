/* The set of live handles. CUDA's handles are pointers that programs keep, copy and free twice: looking one up here before
 * following it turns every such mistake into CUDA_ERROR_INVALID_HANDLE. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "softgpu.h"

struct slot {
    const void *object; /* null: never used; TOMBSTONE: removed */
    enum sg_kind kind;
};
static char tombstone;
#define TOMBSTONE ((const void *)&tombstone)

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct slot *slots;        /* open addressing; under lock */
static size_t capacity, occupied; /* under lock; occupied counts tombstones */

static size_t hash(const void *object)
{
    return (size_t)(((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20);
}

/* Under lock: where the object is, or null. */
static struct slot *find(const void *object)
{
    if (!capacity || !object)
        return NULL;
    for (size_t i = hash(object);; i++) {
        struct slot *slot = &slots[i & (capacity - 1)];
        if (slot->object == object)
            return slot;
        if (!slot->object)
            return NULL;
    }
}

static void place(struct slot *table, size_t size, const void *object, enum sg_kind kind)
{
    size_t i = hash(object);
    while (table[i & (size - 1)].object)
        i++;
    table[i & (size - 1)] = (struct slot){object, kind};
}

static bool grow(void)
{
    size_t live = 0;
    for (size_t i = 0; i < capacity; i++)
        live += slots[i].object && slots[i].object != TOMBSTONE;
    size_t size = 256;
    while (size < live * 4)
        size *= 2;
    struct slot *table = calloc(size, sizeof(*table));
    if (!table)
        return false;
    for (size_t i = 0; i < capacity; i++)
        if (slots[i].object && slots[i].object != TOMBSTONE)
            place(table, size, slots[i].object, slots[i].kind);
    free(slots);
    slots = table;
    capacity = size;
    occupied = live;
    return true;
}

bool sg_handle_add(void *object, enum sg_kind kind)
{
    pthread_rwlock_wrlock(&lock);
    bool ok = occupied * 2 < capacity || grow();
    if (ok) {
        place(slots, capacity, object, kind);
        occupied++;
    }
    pthread_rwlock_unlock(&lock);
    return ok;
}

bool sg_handle_is(const void *object, enum sg_kind kind)
{
    pthread_rwlock_rdlock(&lock);
    struct slot *slot = find(object);
    bool is = slot && slot->kind == kind;
    pthread_rwlock_unlock(&lock);
    return is;
}

bool sg_handle_remove(const void *object, enum sg_kind kind)
{
    pthread_rwlock_wrlock(&lock);
    struct slot *slot = find(object);
    bool was = slot && slot->kind == kind;
    if (was)
        slot->object = TOMBSTONE;
    pthread_rwlock_unlock(&lock);
    return was;
}
