/* Modules that were loaded, for later analysis of what their kernels touch. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_module {
    const char *entry_point;
    char *path;   /* the file that holds it, or NULL: then `bytes` is a copy */
    uint64_t offset, size;
    void *bytes;
    struct phos_module *next;
    bool told;
};

/* Sends what phosd was not told of yet, each by `send` (a memfd beside if the module is in no file). False: `send` did. */
bool phos_modules_tell(bool (*send)(const struct phos_module *module, int descriptor));
/* A new connection: all are to be told of again. */
void phos_modules_untell(void);
