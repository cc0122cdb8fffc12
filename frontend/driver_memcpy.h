/* The driver's checkpoint and restore move the residue (residue.h) through two buffers of 2 MiB, and one thread of theirs
 * calls memcpy() for it: a third of their time, with PyTorch on an H100 (bench/driver_calls.py). While a process is detached,
 * the driver's memcpy() may be one that lets several threads copy. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* From a detach until its attach, or (false) not: what was copied is counted anew. Control thread. */
void phos_driver_memcpy_begin(bool several);
void phos_driver_memcpy_end(void);
/* In a child of a detached process. */
void phos_driver_memcpy_forked(void);
/* Bytes that several threads may have copied since the last detach. */
uint64_t phos_driver_memcpy_bytes(void);
