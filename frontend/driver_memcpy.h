/* The driver's checkpoint and restore move the residue (residue.h) through two buffers of 2 MiB, and one thread of theirs
 * calls memcpy() for it, at 5 to 7 GB/s: 52 to 70 of 160 to 190 ms each, with PyTorch on an H100 (driver 580). While a process
 * is detached, the driver's memcpy() is one that lets several threads copy. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* From a detach until its attach; control thread. */
void phos_driver_memcpy_arm(bool arm);
/* Bytes that were copied by several threads since the last detach. */
uint64_t phos_driver_memcpy_bytes(void);
