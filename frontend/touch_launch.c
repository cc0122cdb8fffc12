/* What launches touch. */
#include "audit.h"
#include "functions.h"
#include "graphs.h"
#include "touch_parts.h"

#define ALL (PHOS_READS | PHOS_WRITES)

static void anything(struct phos_touches *touches, CUstream stream)
{
    phos_touches_begin(touches, stream);
    touches->anything = ALL;
}

static void kernel(struct phos_touches *touches, CUstream stream, CUfunction function, void **parameters, void **extra)
{
    phos_touches_begin(touches, stream);
    phos_touch_launch(touches, function, parameters, extra);
}

void phos_touch_launch(struct phos_touches *touches, CUfunction function, void **parameters, void **extra)
{
    struct phos_kernel *found = phos_kernel_of(function);
    if (found) {
        struct phos_arguments arguments = phos_arguments_of(parameters, extra);
        phos_kernel_touch(touches, found, &arguments);
        if (phos_audit_active())
            phos_audit_arguments(found, &arguments);
    } else {
        touches->anything = ALL;
        touches->unknown = true;
    }
}

void touch_cuLaunchKernel(struct phos_touches *touches, CUfunction function, unsigned int gx, unsigned int gy,
                          unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                          CUstream stream, void **parameters, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
    kernel(touches, stream, function, parameters, extra);
}

void touch_cuLaunchKernelEx(struct phos_touches *touches, const CUlaunchConfig *config, CUfunction function,
                            void **parameters, void **extra)
{
    kernel(touches, config ? config->hStream : NULL, function, parameters, extra);
}

void touch_cuLaunchCooperativeKernel(struct phos_touches *touches, CUfunction function, unsigned int gx, unsigned int gy,
                                     unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                                     unsigned int shared, CUstream stream, void **parameters)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
    kernel(touches, stream, function, parameters, NULL);
}

/* One launch a device, each in a stream of its own; gone from newer drivers. */
void touch_cuLaunchCooperativeKernelMultiDevice(struct phos_touches *touches, CUDA_LAUNCH_PARAMS_v1 *list,
                                                unsigned int devices, unsigned int flags)
{
    (void)flags;
    anything(touches, list && devices ? list->hStream : NULL);
}

/* The arguments were left with the driver, piece by piece. */
void touch_cuLaunch(struct phos_touches *touches, CUfunction function)
{
    (void)function;
    anything(touches, NULL);
}

void touch_cuLaunchGrid(struct phos_touches *touches, CUfunction function, int width, int height)
{
    (void)function, (void)width, (void)height;
    anything(touches, NULL);
}

void touch_cuLaunchGridAsync(struct phos_touches *touches, CUfunction function, int width, int height, CUstream stream)
{
    (void)function, (void)width, (void)height;
    anything(touches, stream);
}

void touch_cuGraphLaunch(struct phos_touches *touches, CUgraphExec graph, CUstream stream)
{
    phos_touches_begin(touches, stream);
    phos_graph_touch(touches, graph);
}
