/* The interpreter for any processor. */
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off")
#define PTX_RUN_WARP ptx_run_warp_base
#include <string.h>

#include "ptx_exec.inc"
