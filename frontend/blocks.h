/* Blocks and mappings: the physical memory of this process and where it is mapped, whoever asked for it. Everything in
 * here that is carried can be taken away (detach) and put back (attach) without the application noticing.
 *
 * One lock, phos_memory_lock, guards all memory bookkeeping (blocks, mappings, arenas, spans, pools, host allocations).
 * It is taken inside the gate, by application threads, or by the control thread; never while waiting for the GPU. */
#pragma once
#include "cleanup.h"
#include "error.h"
#include "phos_api.h"
#include "ranges.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

extern pthread_mutex_t phos_memory_lock;

/* Takes it, and has the control thread, which takes it again and again to give memory back, keep off until then: a mutex goes
 * to whoever is awake, not to who has waited. For what programs call often. */
pthread_mutex_t *phos_memory_taken(void);
#define PHOS_MEMORY_LOCKED \
    __attribute__((cleanup(phos_cleanup_unlock), unused)) pthread_mutex_t *memory_locked_ = phos_memory_taken()
extern atomic_uint phos_memory_wanted; /* how many wait so; read and written without the lock */

enum phos_owner { PHOS_OWNER_FRONTEND = 1, PHOS_OWNER_APPLICATION = 2 }; /* as in wire.proto */

/* One physical allocation: one cuMemCreate, or one import. */
struct phos_block {
    uint64_t id; /* never reused */
    size_t size;
    CUdevice device;
    enum phos_owner owner;
    CUmemGenericAllocationHandle handle; /* the driver's; 0 while detached */
    CUmemAllocationProp properties;      /* as the application gave them, or ours */
    uint32_t references;                 /* handles the application holds */
    uint32_t mappings;
    uint32_t pins;                       /* the control thread is exporting it */
    bool imported;                       /* the handle came from a descriptor: cannot be exported (again) */
    bool attached_once;                  /* likewise, by attach */
    bool given;                          /* phosd, this one or a former, has had a descriptor of it */
    bool lingers;                        /* gone but for the pins */
    bool exported;                       /* a token of it was given away: other processes may have it */
    bool bound;                          /* a sparse array, multicast object or endpoint of the driver has it too: see vmm.c */
    uint64_t registered;                 /* the connection on which phosd was told, 0: not yet */
    uint8_t owner_session[16];           /* of memory first exported by another session, and its number there */
    uint64_t owner_block;
    uint32_t window_first, window_chunks; /* in a window: its place in the chunk table; 0 chunks: it is not in the image */
    struct phos_block *next, *previous;  /* all blocks */
    struct phos_block *chain;            /* those whose numbers share a bucket */
};

struct phos_access {
    CUmemLocation location;
    CUmemAccess_flags flags;
};

struct phos_mapping {
    struct phos_range range;
    size_t offset; /* in the block */
    struct phos_block *block;
    unsigned long long flags;
    struct phos_access *access;
    uint32_t access_count;
    bool absent;            /* unmapped by detach */
    bool shut;              /* mapped, but without access until its data is there: see window_lazy.c */
    struct phos_span *span; /* what our allocator keeps there; NULL: the application's */
};

extern struct phos_block phos_blocks;      /* head of the list */
extern struct phos_ranges phos_mappings;   /* of struct phos_mapping */
extern uint64_t phos_block_bytes;          /* of all blocks */
extern size_t phos_blocks_lingering;       /* blocks that only a pin keeps */
extern size_t phos_mappings_shut;          /* mappings that are shut */
/* Grows as blocks that are in a window are mapped, unmapped, and given or taken access; with phos_memory_lock, read without. */
extern _Atomic uint64_t phos_mappings_version;
/* Grows as blocks come and go, and as more are freed than are to be kept; read without the lock. */
extern _Atomic uint64_t phos_block_changes;

/* What a session is called now. Takes phos_memory_lock. */
void phos_session_now(uint8_t *session);

/* All of these: with phos_memory_lock held. */

/* Creates physical memory and tells phosd soon. */
CUresult phos_block_create(size_t size, const CUmemAllocationProp *properties, unsigned long long flags,
                           enum phos_owner owner, struct phos_block **block) PHOS_CHECKED;
/* A handle that was imported; `session` NULL: from a descriptor that is not one of our tokens. */
struct phos_block *phos_block_adopt(CUmemGenericAllocationHandle handle, size_t size, CUdevice device,
                                    const uint8_t *session, uint64_t number);
/* Gives physical memory back once nothing refers to it. */
CUresult phos_block_settle(struct phos_block *block);
struct phos_block *phos_block_find(uint64_t id);
struct phos_block *phos_block_of(const uint8_t *session, uint64_t number);

/* A session, this process's own or one whose memory it may map, is called differently from now on. */
void phos_session_renamed(const uint8_t *old, const uint8_t *now);

CUresult phos_map(CUdeviceptr address, size_t size, size_t offset, struct phos_block *block, unsigned long long flags,
                  struct phos_mapping **mapping) PHOS_CHECKED;
CUresult phos_unmap(struct phos_mapping *mapping) PHOS_CHECKED;
/* The record of one that the driver has unmapped. */
CUresult phos_unmapped(struct phos_mapping *mapping) PHOS_CHECKED;
/* Sets access in the driver and, if it agrees, in the record of every mapping in the range. */
CUresult phos_set_access(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) PHOS_CHECKED;
struct phos_mapping *phos_mapping_at(CUdeviceptr address);

/* Stream captures: our own driver calls must neither fail because of one nor spoil it, also if it begins between two of them. */
struct phos_relaxed {
    bool changed;
    CUstreamCaptureMode before;
};
struct phos_relaxed phos_relax(void);
void phos_unrelax(struct phos_relaxed *relaxed);
/* What we do in the driver's place must not succeed where the driver would refuse it, and end the capture: memory that is
 * freed again after the capture would be in the graph. Its answer; CUDA_SUCCESS: no capture forbids it. `context`: of who needs
 * no current one; else NULL. */
CUresult phos_capture_permits(CUcontext context);
#define PHOS_PERMITTED(call) \
    ({ \
        CUresult permitted_ = phos_capture_permits(NULL); \
        permitted_ == CUDA_SUCCESS ? (call) : permitted_; \
    })
#define PHOS_RELAXED __attribute__((cleanup(phos_unrelax), unused)) struct phos_relaxed relaxed_ = phos_relax()
