/* cuLink: PTX texts put together. What comes out is PTX again, which is what this GPU's modules are loaded from. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

struct sg_link {
    char *text;
    size_t size;
};

CUresult softgpu_cuLinkCreate_v2(unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut)
{
    struct sg_context *context;
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!stateOut)
        return CUDA_ERROR_INVALID_VALUE;
    sg_jit_log(CUDA_SUCCESS, "", numOptions, options, optionValues);
    struct sg_link *link = calloc(1, sizeof(*link));
    if (!link || !sg_handle_add(link, SG_LINK)) {
        free(link);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *stateOut = (CUlinkState)link;
    return CUDA_SUCCESS;
}

/* The directives that may stand only once, at the top. */
static bool is_header(const char *line)
{
    line += strspn(line, " \t");
    return !strncmp(line, ".version", 8) || !strncmp(line, ".target", 7) || !strncmp(line, ".address_size", 13);
}

CUresult softgpu_cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                                  unsigned int numOptions, CUjit_option *options, void **optionValues)
{
    (void)name;
    (void)numOptions;
    (void)options;
    (void)optionValues;
    (void)size;
    struct sg_link *link = (struct sg_link *)state;
    if (!sg_handle_is(link, SG_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    if (type != CU_JIT_INPUT_PTX && type != CU_JIT_INPUT_FATBINARY) {
        sg_log("cuLinkAddData: the software GPU links PTX and fatbins that hold PTX, not input type %d", (int)type);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    char *text;
    size_t length;
    CUresult result = sg_image_ptx(data, &text, &length);
    if (result != CUDA_SUCCESS)
        return result;
    char *grown = realloc(link->text, link->size + length + 2);
    if (!grown) {
        free(text);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    bool first = !link->size;
    link->text = grown;
    for (char *line = text; *line;) {
        size_t span = strcspn(line, "\n");
        span += line[span] == '\n';
        if (first || !is_header(line)) {
            memcpy(link->text + link->size, line, span);
            link->size += span;
        }
        line += span;
    }
    link->text[link->size] = 0;
    free(text);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions,
                                  CUjit_option *options, void **optionValues)
{
    char *text;
    size_t size;
    CUresult result = sg_read_file(path, &text, &size);
    if (result != CUDA_SUCCESS)
        return result;
    result = softgpu_cuLinkAddData_v2(state, type, text, size, path, numOptions, options, optionValues);
    free(text);
    return result;
}

CUresult softgpu_cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
    struct sg_link *link = (struct sg_link *)state;
    if (!sg_handle_is(link, SG_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!cubinOut || !link->text)
        return CUDA_ERROR_INVALID_VALUE;
    *cubinOut = link->text;
    if (sizeOut)
        *sizeOut = link->size + 1;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLinkDestroy(CUlinkState state)
{
    struct sg_link *link = (struct sg_link *)state;
    if (!sg_handle_remove(link, SG_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    free(link->text);
    free(link);
    return CUDA_SUCCESS;
}
