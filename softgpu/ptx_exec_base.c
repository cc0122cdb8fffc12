/* The interpreter for any processor. */
#ifndef PTX_PORTABLE /* sanitized builds: one variant, quickly compiled */
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off")
#else
#pragma GCC optimize("fp-contract=off")
#endif
#define PTX_RUN_WARP ptx_run_warp_base
#include <string.h>

#include "ptx_exec.inc"
