/* Modules that were loaded, for later analysis of what their kernels touch. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PHOS_BUILD_ID_MOST 64

/* Which file it is. phosd opens the path, maybe hours later: it must not take what has been put there since for it. */
struct phos_file {
    uint64_t device, inode; /* zeros after a restore: the files of another host have other numbers */
    uint64_t mtime_ns, size;
    uint8_t build_id[PHOS_BUILD_ID_MOST]; /* of a mapped library that has one */
    uint64_t build_id_size;
};

struct phos_module {
    uint64_t number; /* from 1; the same bytes loaded again are the same module */
    const char *entry_point;
    char *path;   /* the file that holds it, or NULL: then `bytes` is a copy, until phosd has been told */
    uint64_t offset, size;
    struct phos_file file;
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
/* The process was restored. */
void phos_modules_restored(void);
/* A new connection: all are to be told of again. */
void phos_modules_untell(void);
