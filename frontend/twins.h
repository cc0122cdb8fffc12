/* Twin kernels: while a window is open, a kernel of which phosd has sent a twin (gpu_engine/ptx_instrument/twin.py) is not
 * launched itself; its twin is, which computes the same and looks at every address before it uses it. Outside of windows
 * there are none. */
#pragma once
#include "error.h"
#include "touch.h"

#include <stdatomic.h>

/* The control thread's, with a window open. `descriptors`: the twins' text, the chunk table, the twins' table; they stay
 * the caller's. `module` is the number of the module whose kernels these are twins of. False: they are not used. */
bool phos_twins_take(uint64_t module, const int *descriptors, size_t count, struct phos_error *error) PHOS_CHECKED;
/* The window is over, and nobody is traced: twins that still run are let run, then everything is given back. */
void phos_twins_end(void);
/* What is left of it; the control thread's. `idle`: no context computes, so nothing need be waited for. */
void phos_twins_settle(bool idle);
/* Twins may still be running, or wait to be settled. */
bool phos_twins_left(void);
/* In a forked child. */
void phos_twins_forked(void);
/* A context may be about to end: returns when twins in others can do without it. Then it ends or stays. */
void phos_twins_context_may_end(CUcontext context);
void phos_twins_context_stays(CUcontext context);
/* A context is about to be destroyed, after its work; or, if it is `gone`, has been. */
void phos_twins_context_ends(CUcontext context, bool gone);
/* A stream is about to be destroyed. */
void phos_twins_stream_ends(CUstream stream);
/* Before a module or a library is: what is loaded then may be given its handles, and have its variables elsewhere. */
void phos_twins_unloading(void);

/* A twin ended itself, because what it was to read did not come: an error is not the application's. */
bool phos_twins_trapped(void);

/* How many kernels have a twin. */
extern atomic_uint phos_twin_kernels;

static inline bool phos_twin_wanted(const struct phos_touches *touches)
{
    return __builtin_expect(atomic_load_explicit(&phos_twin_kernels, memory_order_acquire) != 0, 0) && !touches->captured &&
           !touches->anything && touches->module && touches->source != PHOS_SOURCE_NONE;
}

/* Launches of what phos_twin_wanted(): of the twin, or where that cannot be of the original. `real` is the driver's entry
 * point in the spelling that the application called. */
typedef CUresult phos_real_launch(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                                  unsigned int, unsigned int, CUstream, void **, void **);
typedef CUresult phos_real_launch_ex(const CUlaunchConfig *, CUfunction, void **, void **);
typedef CUresult phos_real_cooperative(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                                       unsigned int, unsigned int, CUstream, void **);
CUresult twin_cuLaunchKernel(const struct phos_touches *touches, phos_real_launch *real, CUfunction function,
                             unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                             unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra);
CUresult twin_cuLaunchKernelEx(const struct phos_touches *touches, phos_real_launch_ex *real, const CUlaunchConfig *config,
                               CUfunction function, void **parameters, void **extra);
CUresult twin_cuLaunchCooperativeKernel(const struct phos_touches *touches, phos_real_cooperative *real,
                                        CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                                        unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                                        CUstream stream, void **parameters);
