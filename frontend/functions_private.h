/* Between functions.c, functions_touch.c and functions_tell.c. */
#pragma once
#include "access.h"
#include "functions.h"

#include <pthread.h>

#define PHOS_SOURCE_LAYOUT 3u /* as in descriptor.py */

enum phos_layout { PHOS_LAYOUT_NOT_ASKED, PHOS_LAYOUT_KNOWN, PHOS_LAYOUT_UNKNOWN };

/* Guarded by phos_function_lock. */
struct phos_kernel {
    uint64_t module;    /* its number; 0: unknown */
    uint64_t name_hash;
    const char *name;   /* NULL: unknown */
    bool told;
    bool of_blas; /* seen in calls of cuBLAS */
    bool of_nccl;
    uint8_t layout;
    uint32_t count, block_size;
    struct phos_access_parameter *parameters; /* the driver's */
    uint64_t version;                         /* of the table that `row` is from */
    const struct phos_access_kernel *row;     /* NULL: none */
    struct phos_kernel *chain;                /* those of the same bucket */
    struct phos_kernel *next;                 /* all, in order of their coming */
};

/* Guards everything in these files but where it says otherwise. It is taken inside the gate; under it only the lock of the
 * tensor maps is taken, and no driver call is made. */
extern pthread_mutex_t phos_function_lock;
extern struct phos_kernel *phos_kernels; /* all */
extern bool phos_kernels_untold;         /* phosd was not told of some */
