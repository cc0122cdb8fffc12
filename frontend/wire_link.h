/* One packet at a time over phosd's socket: an Envelope of wire.proto, and descriptors beside it. */
#pragma once
#include "wire.pb-c.h"
#include <stdbool.h>
#include <stddef.h>

#define PHOS_PACKET_MAX 65536
#define PHOS_PACKET_DESCRIPTORS 200

struct phos_packet {
    Phos__Wire__Envelope *envelope;
    int descriptors[PHOS_PACKET_DESCRIPTORS];
    size_t descriptor_count;
};

enum phos_received { PHOS_RECEIVED, PHOS_RECEIVED_NOTHING, PHOS_RECEIVED_END };

/* -1: nobody listens there. `at_once`: somebody waits (descriptors.h). To be closed with phos_held_close(). */
int phos_link_connect(const char *path, bool at_once);
/* False: the connection is gone. Blocks while the peer is slow. Descriptors stay the caller's. */
bool phos_link_send(int link, const Phos__Wire__Envelope *envelope, const int *descriptors, size_t count);
/* Never blocks. */
enum phos_received phos_link_receive(int link, struct phos_packet *packet);
/* Frees the message and closes what was not taken (set to -1). */
void phos_packet_free(struct phos_packet *packet);
