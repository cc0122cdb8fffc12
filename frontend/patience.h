/* What the control thread does with the driver of its own accord: telling phosd of a block takes an export, giving freed
 * memory back an unmapping. The driver lets one thread in at a time, so these come after the application's own calls: when
 * it has made, freed or given back no memory for a while, or else when patience ends. */
#pragma once
#include "clock.h"
#include <stdint.h>

#define PHOS_QUIET_MS 2
#define PHOS_PATIENCE_NS 20000000u
#define PHOS_NOTHING_WAITS UINT64_MAX

/* How long what has been waiting since then, 0 if there is nothing, may still wait, in ns. */
static inline uint64_t phos_patience_left(uint64_t since)
{
    if (!since)
        return PHOS_NOTHING_WAITS;
    uint64_t waited = phos_now_ns() - since;
    return waited < PHOS_PATIENCE_NS ? PHOS_PATIENCE_NS - waited : 0;
}
