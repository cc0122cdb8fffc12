/* Included ahead of every C source (see the Makefile).
 *
 * With _GNU_SOURCE, glibc 2.38 and later turn strtol and its kin into __isoc23_strtol, which older ones lack: a library
 * built on Debian 13 or Ubuntu 24.04 would not load on Ubuntu 22.04 (2.35). The C23 forms differ only in reading "0b1",
 * which nothing here needs. features.h decides once, so deciding again right after it holds for all later headers. */
#ifndef PHOS_PORTABLE_H
#define PHOS_PORTABLE_H
#include <features.h>
#ifdef __GLIBC_USE_C2X_STRTOL
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#endif
#ifdef __GLIBC_USE_C23_STRTOL
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0
#endif
#endif
