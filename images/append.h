/* Appending chunks of GPU data to a data file of an image. The one implementation: for Python (append.py), and for native
 * code that copies without the interpreter. */
#pragma once
#include <stdint.h>

/* A data file that is appended to. Whoever calls holds its lock; `written` may be read meanwhile. Also in append.py. */
struct phos_stripe {
    int32_t descriptor;
    uint32_t direct;  /* O_DIRECT is on; becomes 0 if the kernel refuses a write for it */
    uint64_t end;     /* where the next chunk goes: a multiple of 4096 */
    uint64_t chunk;   /* bytes of a whole one: a multiple of 4096 */
    uint64_t written; /* bytes of chunks that the file took, those of failed calls too, but not zeros and padding */
    uint64_t missing; /* after a failure: how many more bytes the failed write was to store */
};

#define PHOS_ZEROS UINT64_MAX /* instead of a place: a chunk of zeros, which takes no room */

/* Appends `size` bytes: whole chunks, the last may be shorter.
 *
 * hashes          16 bytes for each chunk: given if `known`, otherwise set here
 * places          set: the file offset of each chunk, or PHOS_ZEROS
 * zero_hash       of a whole chunk of zeros
 * zero_tail_hash  of zeros as long as the last chunk; the same if that is a whole one
 *
 * Returns 0 or an errno; EIO too if the file takes no bytes. After an error `end` is what it was, and the places hold
 * nothing. */
int phos_append(struct phos_stripe *stripe, const unsigned char *data, uint64_t size, int known, unsigned char *hashes,
                uint64_t *places, const unsigned char zero_hash[16], const unsigned char zero_tail_hash[16]);
