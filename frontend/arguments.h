/* Finding addresses among the arguments of a launch. */
#pragma once
#include "access_table.h"
#include "functions.h"

/* One look at the arguments of a launch. */
struct phos_look {
    const struct phos_arguments *arguments;
    const struct phos_access_parameter *parameters;
    uint32_t count, at;    /* `at`: the parameter of the last read, to begin with 0 */
    CUdeviceptr low, high; /* where device memory is */
};

/* Adds every aligned 8 bytes of a part of the block that may be an address of device memory; whole tensor maps too. */
void phos_look_scan(struct phos_touches *touches, struct phos_look *look, uint32_t offset, uint32_t size, uint32_t access);
/* Adds what a field of a descriptor says. */
void phos_look_field(struct phos_touches *touches, struct phos_look *look, const struct phos_access_field *field);
