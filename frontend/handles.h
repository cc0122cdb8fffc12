/* Which kernel a handle stands for: two hash tables with chains. No lock of their own: phos_function_lock. */
#pragma once
#include "phos_api.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_kernel;

/* A module or library, or a function of one. */
struct phos_handle {
    const void *handle;
    const void *container;     /* the CUmodule or CUlibrary it goes away with; NULL: none that we know */
    CUcontext context;         /* the context it goes away with; NULL: none */
    struct phos_kernel *kernel; /* of a function */
    uint64_t module;           /* of a module or library: its number */
    bool library_kind;         /* a CUlibrary, or a CUkernel */
    struct phos_handle *next;
};

struct phos_handles {
    struct phos_handle **buckets;
    size_t count, size; /* a power of two, or 0 */
};

struct phos_handle *phos_handle_find(const struct phos_handles *handles, const void *handle);
/* Replaces one of the same value: the driver uses the values of those that are gone again. NULL: out of host memory. */
struct phos_handle *phos_handle_put(struct phos_handles *handles, const struct phos_handle *what);
/* Those of a container, or of a context (the other is NULL), and the container itself. */
void phos_handles_drop(struct phos_handles *handles, const void *container, CUcontext context);
void phos_handles_drop_if(struct phos_handles *handles, bool (*gone)(const struct phos_handle *handle, const void *what),
                          const void *what);
