/* Finding the real driver, and standing in front of it. */
#pragma once
#include "phos_api.h"
#include <stdbool.h>

/* Fills phos_real from the libcuda that this process uses. False: there is none (yet). Safe to call again. */
bool phos_resolve_bind(void);
/* The row of an exported symbol, or -1. */
int phos_resolve_symbol(const char *symbol);
/* Which row cuGetProcAddress means by a name at a version, or -1. `real` is what the driver answered. */
int phos_resolve_requested(const char *name, int version, bool per_thread, const void *real);
