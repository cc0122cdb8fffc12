/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS. */
#pragma once

/* A capture has ended: what was put off because of one is done, if there is none any more. No lock is held. */
void phos_sync_memops_settle(void);
