/* Pinned host memory. With phos_memory_lock held, all of these but one. */
#pragma once
#include "error.h"
#include "phos_api.h"
#include "wire.pb-c.h"

/* Unpins everything that is carried; a failure leaves the rest as it is, to be pinned again by the other one. */
bool phos_host_unregister_all(uint64_t *bytes, struct phos_error *error) PHOS_CHECKED;
bool phos_host_register_all(struct phos_error *error) PHOS_CHECKED;
/* What was made or registered in this context ends with it, as with the driver; `gone`: it has ended already. Of what is left
 * to unpin, see the next. */
void phos_host_context_ends(CUcontext context, bool gone);
/* What has ended with its context, or was deferred and is released, is still pinned: before letting go of the lock to be taken,
 * and without it, as the driver may wait for the device, to be unpinned. */
struct host_memory;
struct host_memory *phos_host_leaving(void);
void phos_host_unpin(struct host_memory *list);
/* One malloc'ed piece; NULL: out of memory. */
Phos__Wire__MemoryMap__HostAllocation **phos_host_list(size_t *count);
