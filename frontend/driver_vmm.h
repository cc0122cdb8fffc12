/* Physical memory that the application made or imported and that stays with the driver: on the host, multicast objects, and what
 * cannot be carried. The driver saves it. But what another process has too, because a handle was exported or imported, it saves and then
 * cannot restore (CUDA_ERROR_NOT_SUPPORTED, DESIGN §2), and the process would be lost: as long as there is any, its process must
 * not be checkpointed.
 *
 * All functions here want phos_memory_lock held. */
#pragma once
#include "phos_api.h"
#include "track.h"

#include <stdbool.h>
#include <stddef.h>

/* A handle that cuMemCreate, cuMulticastCreate or an import has given; `kind`: what it counts as. An imported one is shared. */
void phos_driver_vmm_made(CUmemGenericAllocationHandle handle, enum phos_uncarried kind, size_t size, bool shared);
/* Another reference to it, by an address. */
void phos_driver_vmm_retained(CUmemGenericAllocationHandle handle, CUdeviceptr address);
void phos_driver_vmm_released(CUmemGenericAllocationHandle handle);
void phos_driver_vmm_exported(CUmemGenericAllocationHandle handle);
void phos_driver_vmm_mapped(CUmemGenericAllocationHandle handle, CUdeviceptr address, size_t size);
void phos_driver_vmm_unmapped(CUdeviceptr address, size_t size);

/* How many pieces of memory other processes may have too. */
size_t phos_driver_vmm_shared(void);
