/* How the frontend waits while it is detached: without a descriptor, without the driver, and ready to be dumped and
 * restored, on this machine or another, at any instruction. */
#pragma once

void phos_hold_init(void);
/* phos_session has changed. */
void phos_hold_renamed(void);
/* Where phosd listens: PHOS_SOCKET or the usual places. */
const char *phos_hold_socket(void);
/* Until phosd may be asked: a connection to it. */
int phos_hold_wait(void);
