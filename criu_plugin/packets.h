#ifndef PHOS_PACKETS_H
#define PHOS_PACKETS_H

#include <stddef.h>
#include <stdint.h>

#include "wire.pb-c.h"

typedef Phos__Wire__Envelope Envelope;

/* One packet, with descriptors beside it. Returns 0, or -errno. */
int phos_send_packet(int connection, const Envelope *envelope, const int *descriptors, size_t count);

/*
 * Waits for the answer to the request of that number. A signal that CRIU handles meanwhile is not the end of the request:
 * EINTR only leads to another look at the clock. NULL: there is none; errno says why.
 */
Envelope *phos_receive_packet(int connection, uint64_t id, int timeout_s);

#endif
