/* Modules that were loaded, for later analysis of what their kernels touch. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_module {
    uint64_t number; /* from 1; the same bytes loaded again are the same module */
    const char *entry_point;
    char *path;   /* the file that holds it, or NULL: then `bytes` is a copy, until phosd has been told */
    uint64_t offset, size;
    uint64_t file[3]; /* which file it is: device, inode, time of its last change in ns */
    uint64_t digest;  /* of a module in memory */
    void *bytes;
    bool kept; /* `bytes` is PTX, and stays */
    struct phos_module *next;
    bool told;
};

/* Sends what phosd was not told of yet, each by `send` (a memfd beside if the module is in no file). False: `send` did. */
bool phos_modules_tell(bool (*send)(const struct phos_module *module, int descriptor));
/* The highest number that phosd was told of. For the control thread. */
uint64_t phos_modules_told(void);
/* A new connection: all are to be told of again. */
void phos_modules_untell(void);
