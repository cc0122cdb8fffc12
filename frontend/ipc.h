/* Exported memory. What leaves the process is a token, not the driver's descriptor: the peer's frontend exchanges it at
 * phosd for the real one. So sharing survives detach, dump and restore, which the driver's own does not. */
#pragma once
#include "blocks.h"
#include <stdbool.h>
#include <stdint.h>

/* As it is written into a sealed memfd or the 64 bytes of a CUipcMemHandle. Little-endian, no padding.
 *
 *      0        8                        24       32       40       48       56      64
 *      | magic  | session                | block  | offset | size   | whole  | check |
 *      "PhOStok1", who exported it, which of its blocks, where in the block the memory begins, how much of it, how
 *      large the block is; check is an FNV-1a hash of the 56 bytes before it. */
struct phos_token {
    char magic[8];
    uint8_t session[16];
    uint64_t block, offset, size, whole, check;
};
_Static_assert(sizeof(struct phos_token) == 64, "the layout is the format");

/* Writes a descriptor of a token for the block to *shareable. False: phosd does not know it, use the driver's. */
bool phos_token_export(uint64_t block, void *shareable);
bool phos_token_read(int descriptor, struct phos_token *token);
/* What was opened in no other context goes with this one; with phos_memory_lock held. */
void phos_ipc_context_ends(CUcontext context);
/* The block behind a token, one more reference held. */
CUresult phos_token_block(const struct phos_token *token, struct phos_block **block) PHOS_CHECKED;
