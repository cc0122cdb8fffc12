#include "handles.h"

#include <stdlib.h>

static size_t bucket_of(const void *handle, size_t size)
{
    return (size_t)(((uintptr_t)handle * 0x9e3779b97f4a7c15ull) >> 20) & (size - 1);
}

struct phos_handle *phos_handle_find(const struct phos_handles *handles, const void *handle)
{
    if (!handles->size)
        return NULL;
    struct phos_handle *h = handles->buckets[bucket_of(handle, handles->size)];
    while (h && h->handle != handle)
        h = h->next;
    return h;
}

static bool grow(struct phos_handles *handles)
{
    size_t size = handles->size ? handles->size * 2 : 256;
    struct phos_handle **buckets = calloc(size, sizeof *buckets);
    if (!buckets)
        return handles->size != 0; /* longer chains */
    for (size_t i = 0; i < handles->size; i++)
        for (struct phos_handle *h = handles->buckets[i], *next; h; h = next) {
            size_t at = bucket_of(h->handle, size);
            next = h->next;
            h->next = buckets[at];
            buckets[at] = h;
        }
    free(handles->buckets);
    handles->buckets = buckets;
    handles->size = size;
    return true;
}

struct phos_handle *phos_handle_put(struct phos_handles *handles, const struct phos_handle *what)
{
    struct phos_handle *h = phos_handle_find(handles, what->handle);
    if (h) {
        struct phos_handle *next = h->next;
        *h = *what;
        h->next = next;
        return h;
    }
    if (handles->count >= handles->size && !grow(handles))
        return NULL;
    if (!(h = malloc(sizeof *h)))
        return NULL;
    size_t at = bucket_of(what->handle, handles->size);
    *h = *what;
    h->next = handles->buckets[at];
    handles->buckets[at] = h;
    handles->count++;
    return h;
}

void phos_handles_drop_if(struct phos_handles *handles, bool (*gone)(const struct phos_handle *handle, const void *what),
                          const void *what)
{
    for (size_t i = 0; i < handles->size; i++)
        for (struct phos_handle **link = &handles->buckets[i]; *link;) {
            struct phos_handle *h = *link;
            if (gone(h, what)) {
                *link = h->next;
                free(h);
                handles->count--;
            } else
                link = &h->next;
        }
}

struct end {
    const void *container;
    CUcontext context;
};

static bool ends_with(const struct phos_handle *h, const void *what)
{
    const struct end *end = what;
    return (end->container && (h->container == end->container || h->handle == end->container)) ||
           (end->context && h->context == end->context);
}

void phos_handles_drop(struct phos_handles *handles, const void *container, CUcontext context)
{
    phos_handles_drop_if(handles, ends_with, &(struct end){container, context});
}
