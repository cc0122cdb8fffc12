/* The control thread and its connection to phosd. */
#pragma once
#include "blocks.h"
#include "phos_api.h"
#include <stdbool.h>
#include <stdint.h>

void phos_control_start(void);
/* In a forked child: forget thread and sockets. */
void phos_control_forked(void);

/* There is something new to tell phosd. Cheap: a system call only if the control thread sleeps; any thread. */
void phos_control_kick(void);
/* Likewise, and somebody waits for it. */
void phos_control_hurry(void);

/* With phos_memory_lock held: a block came, or is going. No round trip, no descriptor is held: the control thread
 * exports it, sends it and closes the descriptor as soon as it gets to it. */
void phos_control_block_new(struct phos_block *block);
void phos_control_block_gone(struct phos_block *block);
/* With phos_memory_lock held, which is let go of meanwhile: waits until phosd holds nothing any more of what was given back
 * to the driver, or it goes away, or the time is over. False: there was nothing to wait for. */
bool phos_control_settle(unsigned timeout_ms);

/* Waits until phosd was told of a block. False: no phosd, or not in time. Not with phos_memory_lock held. */
bool phos_control_wait_registered(uint64_t block, unsigned timeout_ms);
/* Exchanges a token for the real descriptor, to be closed by the caller. False: `error` says why. Likewise. Waits for as long as
 * phosd says that it will come, and sets `coming` if it has said so. */
bool phos_control_resolve(const uint8_t session[16], uint64_t block, int *descriptor, size_t *size, CUdevice *device,
                          bool *coming, struct phos_error *error) PHOS_CHECKED;
