/* What phosd is told, by the control thread. */
#pragma once
#include "runtime.h"
#include "wire_link.h"
#include <stdbool.h>
#include <stddef.h>

#define ENVELOPE(name, number, which, field, body) \
    Phos__Wire__Envelope name = PHOS__WIRE__ENVELOPE__INIT; \
    name.id = number; \
    name.body_case = PHOS__WIRE__ENVELOPE__BODY_##which; \
    name.field = body

/* connection.c: one packet over the connection. False: it is gone. */
bool phos_tell_send(Phos__Wire__Envelope *envelope, const int *descriptors, size_t count);
/* connection.c: the last attempt to connect failed. Any thread. */
bool phos_tell_nobody(void);

struct phos_told_devices {
    Phos__Wire__Device device[PHOS_DEVICES], *list[PHOS_DEVICES];
};
/* The GPUs as messages have them. Returns how many there are; they refer to phos_devices. */
size_t phos_tell_devices(struct phos_told_devices *devices);

/* A new connection: hello, then every block there is (none while detached, phosd has them). */
bool phos_tell_begin(Phos__Wire__GateState state);
void phos_tell_end(void);
/* Modules and kernels are to be told of from the first on: phosd has none of them. */
void phos_tell_anew(void);
/* Everything there is to tell. `now`: totals too, however recent the last report. */
bool phos_tell_all(bool now);
/* Blocks that could not be exported are to be told of once more. */
void phos_tell_again(void);
/* Totals changed and are to be told a little later. */
bool phos_tell_later(void);
/* How long blocks that came or went may still wait to be told of (patience.h). */
uint64_t phos_tell_patience(void);
/* Done came: phosd has let go of what it was told of before it was asked. */
void phos_tell_settled(uint64_t id);
/* phosd knows every block by this connection: it just gave them all. */
void phos_tell_known(void);

/* ask.c: sends what has not been asked yet by this connection. False: it is gone. */
bool phos_ask_all(void);
/* TokenResolved came. */
void phos_tell_answer(struct phos_packet *packet);
/* AccessTable came; as a request it is answered by Done. False: the connection is gone. */
bool phos_tell_access_table(uint64_t id, const struct phos_packet *packet);
/* A new connection: all is to be asked again. */
void phos_ask_again(void);
void phos_ask_forked(void);

void phos_tell_forked(void);
