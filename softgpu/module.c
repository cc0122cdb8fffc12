/* Modules: a parsed PTX module in one context, its globals in device memory, its functions. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

static size_t aligned(size_t at, size_t alignment)
{
    return alignment > 1 ? (at + alignment - 1) / alignment * alignment : at;
}

/* All globals of a module lie in one allocation. */
static CUresult place_globals(struct sg_module *module)
{
    size_t count = ptx_module_global_count(module->ptx), total = 0;
    if (!count)
        return CUDA_SUCCESS;
    module->addresses = calloc(count, sizeof(*module->addresses));
    if (!module->addresses)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < count; i++) {
        const struct ptx_global *global = ptx_module_global(module->ptx, i);
        total = aligned(total, global->align > 16 ? global->align : 16);
        module->addresses[i] = total;
        total += global->size;
    }
    CUresult result = sg_allocate(module->context, total ? total : 1, NULL, &module->memory);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t i = 0; i < count; i++)
        module->addresses[i] += module->memory;
    for (size_t i = 0; i < count; i++)
        ptx_module_global_init(module->ptx, i, module->addresses, (void *)(uintptr_t)module->addresses[i]);
    return CUDA_SUCCESS;
}

CUresult sg_module_create(struct sg_context *context, struct ptx_module *ptx, bool owns_ptx, struct sg_module **out)
{
    struct sg_module *module = calloc(1, sizeof(*module));
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->context = context;
    module->ptx = ptx;
    size_t count = ptx_module_kernel_count(ptx);
    module->functions = calloc(count + 1, sizeof(*module->functions));
    CUresult result = module->functions && sg_handle_add(module, SG_MODULE) ? place_globals(module) : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        module->functions[i].module = module;
        module->functions[i].kernel = ptx_module_kernel(ptx, i);
        module->functions[i].carveout = -1;
        if (!sg_handle_add(&module->functions[i], SG_FUNCTION))
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else
            module->function_count++;
    }
    pthread_mutex_lock(&context->lock);
    module->next = context->modules;
    context->modules = module;
    pthread_mutex_unlock(&context->lock);
    if (result != CUDA_SUCCESS) {
        sg_module_destroy(module);
        return result;
    }
    module->owns_ptx = owns_ptx; /* only now: after a failure the caller still has it */
    *out = module;
    return CUDA_SUCCESS;
}

void sg_module_destroy(struct sg_module *module)
{
    struct sg_context *context = module->context;
    sg_handle_remove(module, SG_MODULE);
    for (size_t i = 0; i < module->function_count; i++)
        sg_handle_remove(&module->functions[i], SG_FUNCTION);
    pthread_mutex_lock(&context->lock);
    for (struct sg_module **link = &context->modules; *link; link = &(*link)->next)
        if (*link == module) {
            *link = module->next;
            break;
        }
    pthread_mutex_unlock(&context->lock);
    if (module->library)
        sg_library_forget_module(module->library, module);
    if (module->memory)
        sg_free(module->memory, NULL);
    if (module->owns_ptx)
        ptx_module_unload(module->ptx);
    free(module->addresses);
    free(module->functions);
    free(module);
}

CUresult sg_module_global(struct sg_module *module, const char *name, uint64_t *address, size_t *size)
{
    for (size_t i = 0; i < ptx_module_global_count(module->ptx); i++) {
        const struct ptx_global *global = ptx_module_global(module->ptx, i);
        if (strcmp(global->name, name))
            continue;
        if (address)
            *address = module->addresses[i];
        if (size)
            *size = global->size;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

struct sg_function *sg_module_function(struct sg_module *module, const char *name)
{
    for (size_t i = 0; i < module->function_count; i++)
        if (!strcmp(ptx_kernel_name(module->functions[i].kernel), name))
            return &module->functions[i];
    return NULL;
}

static struct sg_module *module_get(CUmodule handle)
{
    return sg_handle_is(handle, SG_MODULE) ? (struct sg_module *)handle : NULL;
}

/* Hands the compiler's log to the caller's buffers (CU_JIT_*_LOG_BUFFER and their sizes), where there are any. */
CUresult sg_jit_log(CUresult result, const char *log, unsigned count, CUjit_option *options, void **values)
{
    char *buffers[2] = {NULL, NULL}; /* information, errors */
    size_t *sizes[2] = {NULL, NULL};
    for (unsigned i = 0; options && values && i < count; i++)
        switch ((int)options[i]) {
        case CU_JIT_INFO_LOG_BUFFER:
            buffers[0] = values[i];
            break;
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
            sizes[0] = (size_t *)&values[i];
            break;
        case CU_JIT_ERROR_LOG_BUFFER:
            buffers[1] = values[i];
            break;
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
            sizes[1] = (size_t *)&values[i];
            break;
        default:
            break;
        }
    for (int i = 0; i < 2; i++) {
        const char *text = i ? log : "";
        size_t room = sizes[i] ? *sizes[i] & 0xffffffffu : 0;
        if (!buffers[i] || !room)
            continue;
        size_t length = strlen(text) < room ? strlen(text) : room - 1;
        memcpy(buffers[i], text, length);
        buffers[i][length] = 0;
        *sizes[i] = length;
    }
    return result;
}

CUresult softgpu_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
                                    void **optionValues)
{
    struct sg_context *context;
    struct ptx_module *ptx;
    struct sg_module *made;
    char log[1024];
    CUresult result = sg_context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!module || !image)
        return CUDA_ERROR_INVALID_VALUE;
    result = sg_image_load(image, &ptx, log, sizeof(log));
    sg_jit_log(result, log, numOptions, options, optionValues);
    if (result != CUDA_SUCCESS)
        return result;
    result = sg_module_create(context, ptx, true, &made);
    if (result == CUDA_SUCCESS)
        *module = (CUmodule)made;
    else
        ptx_module_unload(ptx);
    return result;
}

CUresult softgpu_cuModuleLoadData(CUmodule *module, const void *image)
{
    return softgpu_cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

CUresult softgpu_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    return softgpu_cuModuleLoadDataEx(module, fatCubin, 0, NULL, NULL);
}

CUresult softgpu_cuModuleLoad(CUmodule *module, const char *fname)
{
    char *text;
    size_t size;
    CUresult result = sg_read_file(fname, &text, &size);
    if (result != CUDA_SUCCESS)
        return result;
    result = softgpu_cuModuleLoadDataEx(module, text, 0, NULL, NULL);
    free(text);
    return result;
}

CUresult softgpu_cuModuleUnload(CUmodule hmod)
{
    struct sg_module *module = module_get(hmod);
    if (!module || module->library)
        return CUDA_ERROR_INVALID_HANDLE;
    SG_UNSAFE(NULL);
    sg_context_synchronize(module->context);
    sg_module_destroy(module);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    struct sg_module *module = module_get(hmod);
    if (!hfunc || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    struct sg_function *function = sg_module_function(module, name);
    if (!function)
        return CUDA_ERROR_NOT_FOUND;
    *hfunc = (CUfunction)function;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
    struct sg_module *module = module_get(hmod);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t address;
    CUresult result = sg_module_global(module, name, &address, bytes);
    if (result == CUDA_SUCCESS && dptr)
        *dptr = address;
    return result;
}

CUresult softgpu_cuModuleGetFunctionCount(unsigned int *count, CUmodule hmod)
{
    struct sg_module *module = module_get(hmod);
    if (!count || !module)
        return count ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *count = (unsigned)module->function_count;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)
{
    struct sg_module *module = module_get(mod);
    if (!functions || !module)
        return functions ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < numFunctions && i < module->function_count; i++)
        functions[i] = (CUfunction)&module->functions[i];
    return CUDA_SUCCESS;
}

CUresult softgpu_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}
