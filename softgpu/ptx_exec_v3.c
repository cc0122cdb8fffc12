/* The interpreter for x86-64 processors with AVX2, FMA and F16C. */
#include <string.h>
#if defined(__x86_64__) && !defined(PTX_PORTABLE)
#pragma GCC optimize("O3", "no-math-errno", "no-trapping-math", "fp-contract=off")
#pragma GCC target("arch=x86-64-v3")
#define PTX_RUN_WARP ptx_run_warp_v3
#include "ptx_exec.inc"
#else
#include "ptx_exec.h"
enum ptx_stop ptx_run_warp_v3(struct ptx_worker *w, struct ptx_warp *warp) { return ptx_run_warp_base(w, warp); }
#endif
