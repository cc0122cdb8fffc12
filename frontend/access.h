/* The table of access descriptors (access_table.h), checked once when it comes and trusted from then on. */
#pragma once
#include "access_table.h"

#include <stddef.h>

struct phos_access_table {
    void *memory; /* a copy of the file: an application that is dumped must hold nothing of ours */
    uint32_t count;
    const struct phos_access_kernel *kernels;
    const struct phos_access_parameter *parameters;
    const struct phos_access_field *fields;
};

/* NULL, and *table is there; or a sentence why not. */
const char *phos_access_read(int descriptor, struct phos_access_table *table);
void phos_access_free(struct phos_access_table *table);
const struct phos_access_kernel *phos_access_find(const struct phos_access_table *table, uint64_t module, uint64_t hash);
