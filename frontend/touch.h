/* What a driver call that is about to be made reads and writes in device memory. The touch_<entry point>() functions
 * fill this in from the call's arguments; window.c acts on it. Only called while the gate is traced. */
#pragma once
#include "access_table.h"
#include "phos_api.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_touch {
    CUdeviceptr address;
    size_t size;     /* bytes from address on; 0: the whole allocation that holds it */
    uint32_t access; /* PHOS_READS | PHOS_WRITES, and the same << PHOS_THROUGH: through addresses that lie there */
    bool recorded;   /* the address was an argument long ago: what had been handed out then (parts.h) nobody knows */
};
#define PHOS_THROUGH 2

#define PHOS_TOUCHES_INLINE 32
#define PHOS_SOURCE_NONE 255u
#define PHOS_SOURCE_SASS 1u /* as in descriptor.py: what is better or as good comes from the code */

struct phos_touches {
    CUstream stream;        /* where the work is queued, CU_STREAM_PER_THREAD for that one; NULL: the legacy stream */
    bool nothing;           /* the stream is being captured, or the call does nothing: it passes untraced */
    bool captured;          /* the stream is being captured */
    uint32_t anything;      /* PHOS_READS | PHOS_WRITES through addresses that cannot be known: all memory */
    uint32_t unsure;        /* the same, in a kernel of cuBLAS; outside of its calls it is taken not to happen */
    bool guessed;           /* the kernel's code cannot be followed: nobody knows what it does beyond its arguments. Of
                             * a graph: that of one of its kernels cannot, or was not */
    bool host_copy;         /* moves data between host and device: transfers of ours step aside */
    bool synchronous;       /* returns when the work is done, or nearly: from the host the last of it may be staged */
    bool unknown;           /* a launch of a kernel of which not even the arguments are known */
    bool recorded;          /* so is all that is added from now on */
    bool communicates;      /* a kernel of NCCL's: through tables of its own it reaches buffers that processes share */
    bool documented;        /* what the library call that it is made in documents is all that it touches besides */
    bool window;            /* window_shadow.c's own */
    uint8_t audit;          /* audit.c's own */
    const char *kernel;     /* for reports: the kernel's name, or the entry point's; NULL: unknown */
    uint64_t module;        /* the kernel's module, 0: none */
    uint32_t source;        /* of the kernel's descriptor, as in descriptor.py; PHOS_SOURCE_NONE: not a kernel */
    size_t count, capacity;
    struct phos_touch *list; /* inline_list, or allocated */
    struct phos_touch inline_list[PHOS_TOUCHES_INLINE];
};

void phos_touches_begin(struct phos_touches *touches, CUstream stream);
void phos_touches_add(struct phos_touches *touches, CUdeviceptr address, size_t size, uint32_t access);
/* Whether something of the access is done through addresses that lie in memory; that this may be any address; or that it
 * is known from elsewhere what is done. */
bool phos_touches_through(const struct phos_touches *touches, uint32_t access);
void phos_touches_through_anything(struct phos_touches *touches);
void phos_touches_through_nothing(struct phos_touches *touches);
/* After touch_<entry point>(): `per_thread`, the call's stream 0 is the calling thread's own. Sees whether the stream is
 * being captured. */
void phos_touches_complete(struct phos_touches *touches, bool per_thread, const char *entry_point);
void phos_touches_end(struct phos_touches *touches);
