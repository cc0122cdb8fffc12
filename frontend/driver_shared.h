/* Memory and pools of the driver's that another process has too: by CUDA IPC, where phosd does not hold the memory or the
 * other process does not run under PhOS, and by a pool's handle. The driver saves a process that has opened such memory or has
 * imported a pool, and fails to restore it, with which the process is lost; what a process has exported comes back as memory
 * of its own, which the others do not see any more (bench/driver_sharing.py). So as long as there is any, its process must not
 * be checkpointed. Logical endpoints are taken to be like pools. IPC events are restored.
 *
 * All functions here want phos_memory_lock held. */
#pragma once
#include "phos_api.h"

#include <stdbool.h>

enum phos_shared {
    PHOS_SHARED_OPENED,   /* by cuIpcOpenMemHandle, as often as it was; by its address */
    PHOS_SHARED_EXPORTED, /* by cuIpcGetMemHandle; by the address of the whole of it */
    PHOS_SHARED_POINTER,  /* of a pool, exported or imported; by its address */
    PHOS_SHARED_POOL,     /* exported or imported; by its handle */
    PHOS_SHARED_ENDPOINT, /* likewise; by its number */
};

/* `context`: with which it ends, or null. Once more is as once, but for what is opened. */
void phos_driver_shared_add(enum phos_shared kind, uint64_t key, CUcontext context);
/* False: there was none. */
bool phos_driver_shared_drop(enum phos_shared kind, uint64_t key);
void phos_driver_shared_context_ends(CUcontext context);

/* Memory that is freed with the driver: dropped before, as its address may be anything's right afterwards. */
CUresult phos_driver_shared_free(CUdeviceptr address, CUresult (*call)(CUdeviceptr_v2));

bool phos_driver_shared(void);
