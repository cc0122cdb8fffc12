/* What a program that only looks at GPUs asks of NVML, for tests. The driver's own library (580.159, on an H100) loads
 * libcuda.so.1, and has from there on device files open, and a thread by which the checkpoint API reaches the process; its
 * calls wait while that is checkpointed, and go on when it is back. Here this library itself stands for it. */
#include "softgpu.h"

#define NVML_SUCCESS 0
#define NVML_ERROR_UNINITIALIZED 1
#define NVML_ERROR_UNKNOWN 999

SG_EXPORT int nvmlInit_v2(void);
SG_EXPORT int nvmlDeviceGetCount_v2(unsigned *count);

int nvmlInit_v2(void)
{
    return softgpu_cuInit(0) == CUDA_SUCCESS ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    CUresult result = sg_enter(0, true, false); /* waits at the gate */
    if (result == CUDA_ERROR_NOT_INITIALIZED)
        return NVML_ERROR_UNINITIALIZED;
    if (result != CUDA_SUCCESS)
        return NVML_ERROR_UNKNOWN;
    *count = (unsigned)sg_settings()->devices;
    sg_leave(true, result);
    return NVML_SUCCESS;
}
