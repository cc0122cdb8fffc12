/* Libraries: modules that belong to no context. A kernel's function in a context is made when it is first asked for. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

struct sg_kernel {
    struct sg_library *library;
    const struct ptx_kernel *kernel;
    int max_dynamic_shared; /* set before a function exists; -1: not set */
};
struct sg_library {
    struct ptx_module *ptx;
    struct sg_kernel *kernels;
    size_t count;
    pthread_mutex_t lock; /* serialises the making of modules */
    struct sg_module **modules; /* one per context that used it; under sg_library_lock */
    size_t module_count;
};
static pthread_mutex_t sg_library_lock = PTHREAD_MUTEX_INITIALIZER; /* the module lists of all libraries; a leaf */

void sg_library_forget_module(struct sg_library *library, struct sg_module *module)
{
    pthread_mutex_lock(&sg_library_lock);
    for (size_t i = 0; i < library->module_count; i++)
        if (library->modules[i] == module) {
            library->modules[i] = library->modules[--library->module_count];
            break;
        }
    pthread_mutex_unlock(&sg_library_lock);
}

static struct sg_module *existing(struct sg_library *library, const struct sg_context *context)
{
    struct sg_module *found = NULL;
    pthread_mutex_lock(&sg_library_lock);
    for (size_t i = 0; i < library->module_count; i++)
        if (library->modules[i]->context == context)
            found = library->modules[i];
    pthread_mutex_unlock(&sg_library_lock);
    return found;
}

static CUresult module_in(struct sg_library *library, struct sg_context *context, struct sg_module **out)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&library->lock);
    *out = existing(library, context);
    if (!*out)
        result = sg_module_create(context, library->ptx, false, out);
    if (result == CUDA_SUCCESS && !(*out)->library) {
        struct sg_module *module = *out;
        for (size_t i = 0; i < module->function_count; i++) {
            module->functions[i].library_kernel = &library->kernels[i];
            if (library->kernels[i].max_dynamic_shared >= 0)
                module->functions[i].max_dynamic_shared = library->kernels[i].max_dynamic_shared;
        }
        pthread_mutex_lock(&sg_library_lock);
        struct sg_module **grown = realloc(library->modules, (library->module_count + 1) * sizeof(*grown));
        if (grown) {
            library->modules = grown;
            grown[library->module_count++] = module;
            module->library = library;
        } else {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        pthread_mutex_unlock(&sg_library_lock);
        if (result != CUDA_SUCCESS)
            sg_module_destroy(module);
    }
    pthread_mutex_unlock(&library->lock);
    return result;
}

CUresult sg_kernel_function(struct sg_kernel *kernel, struct sg_context *context, struct sg_function **out)
{
    struct sg_module *module;
    CUresult result = context ? CUDA_SUCCESS : sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        result = module_in(kernel->library, context, &module);
    if (result == CUDA_SUCCESS)
        *out = &module->functions[kernel - kernel->library->kernels];
    return result;
}

CUresult sg_function_get(CUfunction handle, struct sg_context *context, struct sg_function **out)
{
    if (sg_handle_is(handle, SG_FUNCTION)) {
        *out = (struct sg_function *)handle;
        return CUDA_SUCCESS;
    }
    if (sg_handle_is(handle, SG_KERNEL))
        return sg_kernel_function((struct sg_kernel *)handle, context, out);
    return CUDA_ERROR_INVALID_HANDLE;
}

static struct sg_library *library_get(CUlibrary handle)
{
    return sg_handle_is(handle, SG_LIBRARY) ? (struct sg_library *)handle : NULL;
}

static struct sg_kernel *kernel_get(CUkernel handle)
{
    return sg_handle_is(handle, SG_KERNEL) ? (struct sg_kernel *)handle : NULL;
}

CUresult softgpu_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues,
                                   unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                   unsigned int numLibraryOptions)
{
    (void)libraryOptions; /* whether the code is kept by the caller: it is parsed at once */
    (void)libraryOptionValues;
    (void)numLibraryOptions;
    char log[1024];
    if (!library || !code)
        return CUDA_ERROR_INVALID_VALUE;
    struct sg_library *made = calloc(1, sizeof(*made));
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = sg_image_load(code, &made->ptx, log, sizeof(log));
    sg_jit_log(result, log, numJitOptions, jitOptions, jitOptionsValues);
    if (result != CUDA_SUCCESS) {
        free(made);
        return result;
    }
    made->count = ptx_module_kernel_count(made->ptx);
    made->kernels = calloc(made->count + 1, sizeof(*made->kernels));
    bool ok = made->kernels && sg_handle_add(made, SG_LIBRARY);
    for (size_t i = 0; ok && i < made->count; i++) {
        made->kernels[i] = (struct sg_kernel){made, ptx_module_kernel(made->ptx, i), -1};
        ok = sg_handle_add(&made->kernels[i], SG_KERNEL);
    }
    if (!ok) {
        for (size_t i = 0; made->kernels && i < made->count; i++)
            sg_handle_remove(&made->kernels[i], SG_KERNEL);
        sg_handle_remove(made, SG_LIBRARY);
        ptx_module_unload(made->ptx);
        free(made->kernels);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&made->lock, NULL);
    *library = (CUlibrary)made;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues,
                                       unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                       unsigned int numLibraryOptions)
{
    char *text;
    size_t size;
    CUresult result = sg_read_file(fileName, &text, &size);
    if (result != CUDA_SUCCESS)
        return result;
    result = softgpu_cuLibraryLoadData(library, text, jitOptions, jitOptionsValues, numJitOptions, libraryOptions,
                                       libraryOptionValues, numLibraryOptions);
    free(text);
    return result;
}

CUresult softgpu_cuLibraryUnload(CUlibrary handle)
{
    SG_UNSAFE(NULL);
    if (!sg_handle_remove(handle, SG_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    struct sg_library *library = (struct sg_library *)handle;
    for (size_t i = 0; i < library->count; i++)
        sg_handle_remove(&library->kernels[i], SG_KERNEL);
    while (library->module_count) {
        struct sg_module *module = library->modules[0];
        sg_context_synchronize(module->context);
        sg_module_destroy(module);
    }
    ptx_module_unload(library->ptx);
    pthread_mutex_destroy(&library->lock);
    free(library->modules);
    free(library->kernels);
    free(library);
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary handle, const char *name)
{
    struct sg_library *library = library_get(handle);
    if (!pKernel || !name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!library)
        return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; i < library->count; i++)
        if (!strcmp(ptx_kernel_name(library->kernels[i].kernel), name)) {
            *pKernel = (CUkernel)&library->kernels[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult softgpu_cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)
{
    struct sg_library *library = library_get(lib);
    if (!count || !library)
        return count ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *count = (unsigned)library->count;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)
{
    struct sg_library *library = library_get(lib);
    if (!kernels || !library)
        return kernels ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < numKernels && i < library->count; i++)
        kernels[i] = (CUkernel)&library->kernels[i];
    return CUDA_SUCCESS;
}

CUresult softgpu_cuLibraryGetModule(CUmodule *pMod, CUlibrary handle)
{
    struct sg_library *library = library_get(handle);
    struct sg_context *context;
    struct sg_module *module;
    if (!pMod || !library)
        return pMod ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_context_current(&context);
    if (result == CUDA_SUCCESS)
        result = module_in(library, context, &module);
    if (result == CUDA_SUCCESS)
        *pMod = (CUmodule)module;
    return result;
}

CUresult softgpu_cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
    CUmodule module;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = softgpu_cuLibraryGetModule(&module, library);
    return result == CUDA_SUCCESS ? softgpu_cuModuleGetGlobal_v2(dptr, bytes, module, name) : result;
}

CUresult softgpu_cuKernelGetFunction(CUfunction *pFunc, CUkernel handle)
{
    struct sg_kernel *kernel = kernel_get(handle);
    struct sg_function *function;
    if (!pFunc || !kernel)
        return pFunc ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    CUresult result = sg_kernel_function(kernel, NULL, &function);
    if (result == CUDA_SUCCESS)
        *pFunc = (CUfunction)function;
    return result;
}

CUresult softgpu_cuKernelGetLibrary(CUlibrary *pLib, CUkernel handle)
{
    struct sg_kernel *kernel = kernel_get(handle);
    if (!pLib || !kernel)
        return pLib ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *pLib = (CUlibrary)kernel->library;
    return CUDA_SUCCESS;
}

CUresult softgpu_cuKernelGetName(const char **name, CUkernel handle)
{
    struct sg_kernel *kernel = kernel_get(handle);
    if (!name || !kernel)
        return name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *name = ptx_kernel_name(kernel->kernel);
    return CUDA_SUCCESS;
}

static CUresult on_device(CUkernel handle, CUdevice dev, struct sg_function **function)
{
    struct sg_kernel *kernel = kernel_get(handle);
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sg_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    struct sg_context *context = sg_context_first(dev);
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return sg_kernel_function(kernel, context, function);
}

CUresult softgpu_cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
    struct sg_function *function;
    if (!pi)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = on_device(kernel, dev, &function);
    return result == CUDA_SUCCESS ? sg_function_attribute(function, attrib, pi) : result;
}

CUresult softgpu_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
    struct sg_function *function;
    CUresult result = on_device(kernel, dev, &function);
    if (result != CUDA_SUCCESS)
        return result;
    if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        ((struct sg_kernel *)kernel)->max_dynamic_shared = val;
    return sg_function_set_attribute(function, attrib, val);
}

CUresult softgpu_cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
    struct sg_function *function;
    (void)config;
    return on_device(kernel, dev, &function);
}

CUresult softgpu_cuKernelGetParamInfo(CUkernel handle, size_t paramIndex, size_t *paramOffset, size_t *paramSize)
{
    struct sg_kernel *kernel = kernel_get(handle);
    size_t offset, size;
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!paramOffset || paramIndex >= ptx_kernel_param_count(kernel->kernel))
        return CUDA_ERROR_INVALID_VALUE;
    ptx_kernel_param(kernel->kernel, paramIndex, &offset, &size);
    *paramOffset = offset;
    if (paramSize)
        *paramSize = size;
    return CUDA_SUCCESS;
}
