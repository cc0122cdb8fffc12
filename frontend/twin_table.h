/* What a twin kernel reads and writes besides its kernel's own memory. gpu_engine/ptx_instrument/twin_table.py has the same
 * places as numbers; a test compares them.
 *
 * A twin takes one parameter more than its kernel, the last: a struct phos_twin_launch. It points to two things in host
 * memory that the GPU can reach: the struct phos_twin_window, in a memfd that phosd has made, and behind it in the same
 * file struct phos_twin_map, which says where the chunks of the window's memory are mapped and where their states are
 * (window_table.h). */
#pragma once
#include <stdint.h>

#define PHOS_TWIN_MAGIC 0x314e5754534f4850ull /* "PHOSTWN1" */
#define PHOS_TWIN_RANGES 16u
#define PHOS_TWIN_VARIABLES 32u
#define PHOS_TWIN_REPORTS 64u
#define PHOS_TWIN_NAMES 256u
#define PHOS_TWIN_NAME 120u

enum phos_twin_mode {
    PHOS_TWIN_COW = 0,     /* an access outside is reported, and made */
    PHOS_TWIN_LOADING = 1, /* ... reported, and waits until its chunk is there */
};

struct phos_twin_range {
    uint64_t begin, size;
};

struct phos_twin_launch {
    uint64_t window, map;
    uint32_t ranges;
    uint32_t kernel; /* where its name is in the window's list */
    uint64_t zero;
    struct phos_twin_range range[PHOS_TWIN_RANGES]; /* what is in order without looking further */
    uint64_t variable[PHOS_TWIN_VARIABLES];         /* addresses of the original module's variables */
};

struct phos_twin_place { /* a mapping of a block of the window */
    uint64_t begin, end;
    uint64_t state; /* where the state of the chunk at `begin` is: 32 bits, those of the chunks behind it follow */
    uint64_t delta; /* how far into that chunk `begin` is */
};

struct phos_twin_map {
    uint32_t count, zero[3];
    struct phos_twin_place place[]; /* by address */
};

struct phos_twin_report {
    uint64_t address;
    uint32_t kernel;
    uint32_t site; /* the line of the access in the original's PTX, times two, plus one for a write */
};

struct phos_twin_window {
    uint64_t magic;
    uint64_t closed; /* where the chunk table's `closed` is */
    uint64_t limit_ns;
    uint32_t mode, shift; /* a chunk has 1 << shift bytes */
    uint32_t reports; /* counted by the GPU, until `report` is full or a little further */
    uint32_t trapped; /* by the GPU: data did not come, and the kernel ended itself */
    uint64_t launched, originals, kernels; /* twins launched; launches that the original had to do; kernels with a twin */
    struct phos_twin_report report[PHOS_TWIN_REPORTS];
    char name[PHOS_TWIN_NAMES][PHOS_TWIN_NAME];
};
