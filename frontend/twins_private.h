/* Shared by twins.c (what twins there are: they come, and go) and twins_launch.c (launching them). */
#pragma once
#include "twin_table.h"
#include "twins.h"

#include <pthread.h>

#define PHOS_TWIN_PARAMETERS 256u
#define PHOS_TWIN_STREAMS 64u

struct phos_twin_kernel {
    uint64_t module;
    char *name;
    CUkernel handle;
    uint32_t number; /* of its name in the window */
    uint32_t count;  /* parameters of the original */
    uint32_t *offsets, *sizes;
    uint32_t variables;
    char **variable;
    uint32_t *variable_at;
    /* For whom the addresses of the variables were looked up, and what was found. */
    CUfunction original;
    CUcontext context;
    bool resolved;
    bool unusable; /* they cannot be had */
    /* How many blocks of the twin and of its original a multiprocessor holds, and of which shape; 0 threads: not asked yet. */
    uint64_t threads;
    size_t shared;
    int resident, resident_original;
    uint64_t address[PHOS_TWIN_VARIABLES];
    struct phos_twin_kernel *next; /* in its bucket */
};

/* A stream in which a twin was launched. */
struct phos_twin_stream {
    CUstream stream;
    CUcontext context;
    int32_t thread; /* of a per-thread default stream; 0: another kind */
    bool gone;      /* the stream has been destroyed */
    CUevent event;  /* behind the last twin; NULL: it ended with its context */
};

struct phos_twin_library {
    CUlibrary library;
    struct phos_twin_library *next;
};

#define PHOS_TWIN_BUCKETS 256u

/* All of it: guarded by phos_twin_lock, which is taken before phos_memory_lock. */
struct phos_twins {
    struct phos_twin_window *window; /* NULL: none */
    struct phos_twin_map *map;       /* the newest */
    uint64_t map_version;            /* phos_mappings_version when it was made */
    char *arena, *arena_end;         /* room for further maps */
    void *memory, *chunks;
    size_t memory_size, chunks_size;
    bool memory_registered, chunks_registered;
    CUcontext owner;    /* that both were registered in, and with which the GPU loses them; NULL: none now */
    bool withheld;      /* that context may be about to end: no twins in others */
    uint32_t launching; /* twins that no event stands behind yet */
    bool full;    /* no room for a map, or for a stream: originals from here on */
    bool retired; /* the window is over */
    bool unknown; /* twins run that no event stands behind */
    struct phos_twin_library *libraries;
    struct phos_twin_kernel *buckets[PHOS_TWIN_BUCKETS];
    struct phos_twin_stream streams[PHOS_TWIN_STREAMS];
    uint32_t stream_count;
};
extern struct phos_twins phos_twins;
extern pthread_mutex_t phos_twin_lock;

/* twins.c, with the lock held: lets the GPU reach the tables, by way of the current context. */
bool phos_twins_register(void);

static inline uint32_t phos_twin_bucket(uint64_t module, const char *name)
{
    uint64_t hash = module * 0x9e3779b97f4a7c15ull;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = (hash ^ *c) * 0x100000001b3ull;
    return (uint32_t)(hash >> 32) % PHOS_TWIN_BUCKETS;
}
