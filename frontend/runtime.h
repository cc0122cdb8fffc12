/* The frontend's life: passive until the real cuInit succeeded, serving from then on, passive for ever in a child that
 * was forked after that (the driver does not work there either). */
#pragma once
#include "phos_api.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum phos_mode { PHOS_MODE_WAITING, PHOS_MODE_SERVING, PHOS_MODE_PASSIVE };
extern _Atomic int phos_mode;

static inline bool phos_serving(void)
{
    return atomic_load_explicit(&phos_mode, memory_order_acquire) == PHOS_MODE_SERVING;
}

/* 16 bytes drawn at random when serving starts; they live in this memory, so they survive CRIU. */
extern uint8_t phos_session[16];

#define PHOS_DEVICES 64
struct phos_device {
    CUdevice device;
    unsigned char uuid[16]; /* read by the control thread alone */
    size_t total;        /* bytes of memory */
    size_t granularity;  /* of cuMemCreate */
    bool carried;        /* has VMM with POSIX descriptors */
    bool host_pointers;  /* registered host memory keeps its address */
    bool rdma;           /* GPUDirect RDMA with VMM */
};
/* Written once before serving starts, constant afterwards, but for the UUIDs. */
extern struct phos_device phos_devices[PHOS_DEVICES];
extern int phos_device_count;
extern int phos_driver_version;

/* What to leave to the driver; from the environment, constant once serving. */
struct phos_policy {
    bool carry_device; /* PHOS_CARRY_DEVICE=0 leaves device memory to the driver */
    bool carry_host;   /* PHOS_CARRY_HOST=0: pinned host memory */
    bool carry_pools;  /* PHOS_CARRY_POOLS=0: stream-ordered allocations */
    bool cache_set;
    size_t cache_bytes; /* PHOS_CACHE_BYTES: freed memory that stays mapped, per device */
};
extern struct phos_policy phos_policy;

/* The process is in exit(): no more driver calls from the control thread. */
bool phos_exiting(void);

/* From the cuInit hook. */
void phos_runtime_started(void);
/* After a restore, which may have put other GPUs of the same model in the place of those that there were. */
void phos_devices_restored(void);
