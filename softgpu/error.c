/* Names and texts of CUresult values. */
#include "softgpu.h"

static const struct {
    CUresult error;
    const char *name, *text;
} errors[] = {
#define ERROR(name, text) {name, #name, text},
#include "errors.def"
#undef ERROR
};

static CUresult find(CUresult error, const char **text, bool name)
{
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].error == error) {
            *text = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult softgpu_cuGetErrorString(CUresult error, const char **pStr)
{
    return find(error, pStr, false);
}

CUresult softgpu_cuGetErrorName(CUresult error, const char **pStr)
{
    return find(error, pStr, true);
}
