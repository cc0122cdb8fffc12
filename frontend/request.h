/* What phosd asks of this process: closing the gate, detach and attach, windows. By the control thread. */
#pragma once
#include "wire_link.h"

Phos__Wire__GateState phos_request_state(void);
/* The process has its memory back and is about to be opened: who waits for that need not wait for what it has to tell. */
bool phos_request_opens(void);
/* A packet came. False: this connection has served its purpose, or is gone. */
bool phos_request_take(struct phos_packet *packet);
/* The connection ended, and everything is mapped if the process is not detached: the application goes on. */
void phos_request_abandoned(void);
