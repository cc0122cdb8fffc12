/* Checkpoints that the application asks for (include/phos.h); for the control thread. */
#pragma once
#include "wire_link.h"

/* Sends a request that this connection has not seen. False: the connection is gone. */
bool phos_sdk_tell(void);
/* A new connection: phosd may be another one, and what it said may have been lost. */
void phos_sdk_again(void);
void phos_sdk_result(const Phos__Wire__CheckpointResult *result);
/* This process comes from an image: what it had asked for is that image, or was the affair of the process that was dumped. */
void phos_sdk_restored(void);
void phos_sdk_forked(void);
