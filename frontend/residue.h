/* The residue: what the driver's checkpoint saves into memory of the process, hundreds of megabytes. phosd prepares a file
 * for it before the quiesce; mapped shared, it is populated when the driver asks for memory, and CRIU stores its path
 * instead of its pages. */
#pragma once
#include "error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Maps the file, which must be the one with these numbers. What was prepared before is let go. Control thread. */
bool phos_residue_prepare(const char *path, uint64_t bytes, uint64_t device, uint64_t inode,
                          struct phos_error *error) PHOS_CHECKED;
/* mmap.c, in a thread of the driver's: that much zeroed memory out of the file, or NULL. `caller` is code of whoever asks:
 * nobody but the driver is served. */
void *phos_residue_serve(size_t bytes, const void *caller);
/* From a detach on: counts what is asked for and served from zero. */
void phos_residue_count(uint64_t *asked, uint64_t *served);
void phos_residue_reset(void);
/* After an attach, before the gate opens: what the driver has not given back becomes ordinary memory, for the file goes. */
void phos_residue_settle(void);
/* Unmaps what nobody was given; control thread. Takes milliseconds: for after the gate has opened. */
void phos_residue_release(void);
void phos_residue_forked(void);
