/* The connection to phosd: one at a time, touched by the control thread alone but where it says otherwise. Between
 * connections there is no descriptor at all. */
#pragma once
#include "error.h"
#include "wire_link.h"

/* A connection that has just been made; it is closed if that fails. `at_once`: somebody waits (descriptors.h). */
bool phos_connection_take(int link, bool at_once) PHOS_CHECKED;
/* Nobody waits any more: puts its descriptors out of the application's way, if they are not. */
void phos_connection_raise(void);
/* The attempt to make one failed, or did not (phos_tell_nobody). */
void phos_connection_tried(bool failed);
void phos_connection_drop(void);
/* In a forked child. */
void phos_connection_forked(void);

/* After the application's own driver calls: gives back freed memory that is not to be kept, if it `trims`, and tells phosd
 * what there is to tell. False: the connection is gone. */
bool phos_connection_tell(bool trims);
/* How long that may still wait (patience.h). */
uint64_t phos_connection_patience(bool trims);
/* Until there is something to do, at most so long. False: the connection is gone. */
bool phos_connection_wait(int timeout_ms);
/* The next packet, if there is one. Never blocks. */
enum phos_received phos_connection_next(struct phos_packet *packet);

/* For whoever keeps the control thread from its loop. Tells phosd of blocks, and reads the answers to what other threads
 * asked; what else comes is kept for phos_connection_next. False: the connection is gone. */
bool phos_connection_pump(void);
/* The descriptor of a block that phosd holds, to be closed by the caller. What else comes is kept. For the way back from a
 * detach that failed, with phos_memory_lock held and the gate closed. */
bool phos_connection_fetch(const uint8_t session[16], uint64_t block, int *descriptor, struct phos_error *error) PHOS_CHECKED;
