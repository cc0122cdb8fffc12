/* The driver's checkpoint and restore move the residue (residue.h) through two buffers of 2 MiB, and one thread of theirs
 * calls memcpy() for it: a third of their time, with PyTorch on an H100 (bench/driver_calls.py). While a process is detached,
 * the driver's memcpy() may be one that lets several threads copy. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* From a detach until its attach; control thread. */
void phos_driver_memcpy_arm(bool arm);
/* Bytes that were copied by several threads since the last detach. */
uint64_t phos_driver_memcpy_bytes(void);
