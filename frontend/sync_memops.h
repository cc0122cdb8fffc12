/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS. */
#pragma once
#include "phos_api.h"

/* A capture has ended, with its stream or before: what was put off because of one is done, if there is none any more. What one
 * held up that ends with its thread or context is done after the next. No lock is held. */
void phos_sync_memops_settle(void);
/* With phos_memory_lock held. */
void phos_sync_memops_context_ends(CUcontext context);
