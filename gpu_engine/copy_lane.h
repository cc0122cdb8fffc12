/* A worker's stream on one GPU, for native copies in both directions (copy_loop.c, fill_loop.c). copy_loop.py and
 * fill_plan.py describe the same structures. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define SLOTS 2

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

/* CUDA driver API documentation; handles are opaque here, and device addresses 64 bits wide. */
struct phos_copy_driver {
    int (*memcpy_to_device)(uint64_t device, const void *host, size_t size, void *stream);
    int (*memcpy_to_host)(void *host, uint64_t device, size_t size, void *stream);
    int (*memset_8)(uint64_t device, unsigned char value, size_t size, void *stream);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra);
    int (*record)(void *event, void *stream);
    int (*wait)(void *event);
    int (*query)(void *event);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
};

struct phos_copy_lane {
    const struct phos_copy_driver *driver;
    void *stream;
    void *events[SLOTS];
    unsigned char *slots[SLOTS]; /* page-locked */
};

/* What went wrong, besides the status. */
enum { READING = 1, APPENDING, CHANGED, MEMCPY_TO_DEVICE, MEMCPY_TO_HOST, MEMSET, LAUNCH, RECORD, WAIT, QUERY, STREAM_WAIT };

struct phos_copy_failure {
    uint32_t call;
    int32_t code;    /* READING: an errno, or 0 at the file's end. APPENDING: an errno. CHANGED: the chunk's number in its
                        piece. Else the driver's status */
    uint32_t number; /* of the piece, in what was given; READING and CHANGED in a plan: of the place */
};

static inline int phos_copy_fails(struct phos_copy_failure *failure, uint32_t call, int code)
{
    failure->call = call;
    failure->code = code;
    return -1;
}
