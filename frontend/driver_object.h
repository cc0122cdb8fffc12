/* The driver as the dynamic linker has loaded it. */
#pragma once
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_driver_object {
    uintptr_t begin, end;             /* of all its segments */
    uintptr_t base;                   /* what addresses in the file are relative to */
    uintptr_t relro_begin, relro_end; /* read-only since it was relocated; equal: nothing is */
    const ElfW(Dyn) *dynamic;
};

/* NULL: no driver is bound. Any thread. */
const struct phos_driver_object *phos_driver_object(void);

#define PHOS_SLOTS 4
/* Where it keeps the address of a function that it takes from another library; how many, of which `slots` gets the first. */
size_t phos_driver_slots(const struct phos_driver_object *driver, const char *name, void **slots[PHOS_SLOTS]);
