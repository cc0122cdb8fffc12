/* What kernel a handle stands for. Handles are noted as the application gets them; those that came past us (through the
 * driver's private tables) are asked for at the first launch that is looked at. */
#include "functions_private.h"
#include "blocks.h"
#include "cleanup.h"
#include "control.h"
#include "handles.h"
#include "library.h"
#include "twins.h"

#include <stdlib.h>
#include <string.h>

#define PARAMETERS_MOST 4096

pthread_mutex_t phos_function_lock = PTHREAD_MUTEX_INITIALIZER;
struct phos_kernel *phos_kernels;
bool phos_kernels_untold;
static struct phos_handles containers, functions;
static struct phos_kernel *buckets[4096]; /* by module and name */
static struct phos_kernel *kernels_last;
/* Who asks the driver about libraries of others holds it, and who unloads one before: nobody asks about one that is gone.
 * Taken before phos_function_lock. */
static pthread_rwlock_t asking_lock = PTHREAD_RWLOCK_INITIALIZER;

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = (hash ^ *c) * 0x100000001b3ull;
    return hash;
}

/* With phos_function_lock held. */
static struct phos_kernel *intern(uint64_t module, const char *name)
{
    uint64_t hash = name ? hash_name(name) : 0;
    struct phos_kernel **bucket = &buckets[(hash ^ module * 0x9e3779b97f4a7c15ull) % (sizeof buckets / sizeof *buckets)];
    /* Two modules that nobody can number may have kernels of the same name: each handle has a record of its own. */
    for (struct phos_kernel *k = module && name ? *bucket : NULL; k; k = k->chain)
        if (k->module == module && k->name_hash == hash && k->name && !strcmp(k->name, name))
            return k;
    struct phos_kernel *kernel = calloc(1, sizeof *kernel);
    char *copy = name ? strdup(name) : NULL;
    if (!kernel || (name && !copy)) {
        free(kernel);
        free(copy);
        return NULL;
    }
    kernel->module = module;
    kernel->name = copy;
    kernel->name_hash = hash;
    kernel->of_nccl = copy && strstr(copy, "nccl");
    kernel->chain = *bucket;
    *bucket = kernel;
    if (kernels_last)
        kernels_last->next = kernel;
    else
        phos_kernels = kernel;
    kernels_last = kernel;
    if (module && name)
        phos_kernels_untold = true;
    return kernel;
}

static CUcontext current_context(void)
{
    CUcontext context = NULL;
    phos_real.cuCtxGetCurrent(&context);
    return context;
}

/* ---- handles as they come and go ---- */

void phos_functions_module(CUmodule module, uint64_t number)
{
    CUcontext context = current_context();
    PHOS_LOCKED(&phos_function_lock);
    phos_handle_put(&containers, &(struct phos_handle){.handle = module, .context = context, .module = number});
}

void phos_functions_library(CUlibrary library, uint64_t number)
{
    PHOS_LOCKED(&phos_function_lock);
    phos_handle_put(&containers, &(struct phos_handle){.handle = library, .module = number, .library_kind = true});
}

void phos_functions_context_ends(CUcontext context)
{
    PHOS_LOCKED(&phos_function_lock);
    phos_handles_drop(&functions, NULL, context);
    phos_handles_drop(&containers, NULL, context);
}

static void drop_container(const void *container)
{
    PHOS_LOCKED(&phos_function_lock);
    phos_handles_drop(&functions, container, NULL);
    phos_handles_drop(&containers, container, NULL);
}

static bool has_kernel(const void *library, const struct phos_kernel *like)
{
    for (size_t i = 0; i < functions.size; i++)
        for (const struct phos_handle *h = functions.buckets[i]; h; h = h->next)
            if (h->container == library && h->kernel->name_hash == like->name_hash)
                return true;
    return false;
}

/* A library's kernels are known under further handles as well, as in the nodes of a graph, for which the driver names a module
 * of that library, but not the library: those are told by their names. One of another library is asked for again. */
static bool may_be_of(const struct phos_handle *function, const void *library)
{
    if (function->container == library)
        return false;
    const struct phos_handle *module = function->container ? phos_handle_find(&containers, function->container) : NULL;
    return module ? module->container == library : has_kernel(library, function->kernel);
}

static void drop_library(const void *library)
{
    pthread_rwlock_wrlock(&asking_lock);
    {
        PHOS_LOCKED(&phos_function_lock);
        phos_handles_drop_if(&functions, may_be_of, library);
        phos_handles_drop(&functions, library, NULL);
        phos_handles_drop(&containers, library, NULL);
    }
    pthread_rwlock_unlock(&asking_lock);
}

/* With phos_function_lock held. */
static struct phos_kernel *put(const void *function, struct phos_kernel *kernel, const void *container, CUcontext context,
                               bool is_kernel)
{
    if (!kernel)
        return NULL;
    struct phos_handle what = {
        .handle = function, .container = container, .context = context, .kernel = kernel, .library_kind = is_kernel};
    phos_handle_put(&functions, &what);
    return kernel;
}

static struct phos_kernel *seen(const void *function, const void *container, const char *name, bool is_kernel)
{
    CUcontext context = is_kernel ? NULL : current_context();
    bool fresh;
    struct phos_kernel *kernel;
    {
        PHOS_LOCKED(&phos_function_lock);
        struct phos_handle *holder = container ? phos_handle_find(&containers, container) : NULL;
        struct phos_handle *former = phos_handle_find(&functions, function);
        uint64_t module = holder ? holder->module : 0;
        if (former && former->container == container && former->kernel->module == module && name &&
            former->kernel->name && !strcmp(former->kernel->name, name))
            return former->kernel;
        kernel = put(function, intern(module, name), container, context, is_kernel);
        if (kernel && phos_library_in_blas())
            kernel->of_blas = true;
        fresh = phos_kernels_untold && kernel && !kernel->told;
    }
    if (fresh)
        phos_control_kick();
    return kernel;
}

CUresult serve_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    CUresult result = phos_real.cuModuleGetFunction(function, module, name);
    if (result == CUDA_SUCCESS)
        seen(*function, module, name, false);
    return result;
}

CUresult serve_cuModuleEnumerateFunctions(CUfunction *list, unsigned int count, CUmodule module)
{
    CUresult result = phos_real.cuModuleEnumerateFunctions(list, count, module);
    unsigned int there = 0;
    if (result != CUDA_SUCCESS || !list || phos_real.cuModuleGetFunctionCount(&there, module) != CUDA_SUCCESS)
        return result;
    const char *name;
    for (unsigned int i = 0; i < count && i < there; i++)
        if (list[i] && phos_real.cuFuncGetName(&name, list[i]) == CUDA_SUCCESS)
            seen(list[i], module, name, false);
    return result;
}

CUresult serve_cuModuleUnload(CUmodule module)
{
    drop_container(module); /* before: once it is gone, another thread may be given the same handles */
    phos_twins_unloading();
    return phos_real.cuModuleUnload(module);
}

CUresult serve_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    CUresult result = phos_real.cuLibraryGetKernel(kernel, library, name);
    if (result == CUDA_SUCCESS)
        seen(*kernel, library, name, true);
    return result;
}

CUresult serve_cuLibraryEnumerateKernels(CUkernel *list, unsigned int count, CUlibrary library)
{
    CUresult result = phos_real.cuLibraryEnumerateKernels(list, count, library);
    unsigned int there = 0;
    if (result != CUDA_SUCCESS || !list || phos_real.cuLibraryGetKernelCount(&there, library) != CUDA_SUCCESS)
        return result;
    const char *name;
    for (unsigned int i = 0; i < count && i < there; i++)
        if (list[i] && phos_real.cuKernelGetName(&name, list[i]) == CUDA_SUCCESS)
            seen(list[i], library, name, true);
    return result;
}

CUresult serve_cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CUresult result = phos_real.cuLibraryGetModule(module, library);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = current_context();
    PHOS_LOCKED(&phos_function_lock);
    struct phos_handle *holder = phos_handle_find(&containers, library);
    struct phos_handle what = {
        .handle = *module, .container = library, .context = context, .module = holder ? holder->module : 0};
    phos_handle_put(&containers, &what);
    return result;
}

CUresult serve_cuLibraryUnload(CUlibrary library)
{
    drop_library(library);
    phos_twins_unloading();
    return phos_real.cuLibraryUnload(library);
}

CUresult serve_cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CUresult result = phos_real.cuKernelGetFunction(function, kernel);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = current_context();
    phos_kernel_of((CUfunction)kernel);
    PHOS_LOCKED(&phos_function_lock);
    struct phos_handle *known = phos_handle_find(&functions, kernel);
    if (known && (const void *)*function != (const void *)kernel)
        put(*function, known->kernel, known->container, context, false);
    return result;
}

/* ---- handles at a launch ---- */

/* Kernels of libraries that have a name; to be freed. */
static struct phos_handle *kernels_called(const char *name, size_t *count)
{
    uint64_t hash = hash_name(name);
    struct phos_handle *list = NULL;
    *count = 0;
    PHOS_LOCKED(&phos_function_lock);
    for (int put = 0; put < 2; put++) {
        size_t found = 0;
        for (size_t i = 0; i < functions.size; i++)
            for (const struct phos_handle *h = functions.buckets[i]; h; h = h->next) {
                if (!h->library_kind || !h->container || h->kernel->name_hash != hash || !h->kernel->name ||
                    strcmp(h->kernel->name, name))
                    continue;
                if (put)
                    list[found] = *h;
                found++;
            }
        if (put || !found || !(list = malloc(found * sizeof *list)))
            break;
        *count = found;
    }
    return list;
}

/* Which library a function is of that the program was not given: the driver names the kernels of libraries so in the nodes
 * of graphs, by another one in each context. The first that asks for a library's module, or for the function of a kernel,
 * has it loaded into the context; where the function is from, it has been. NULL: none that we know. */
static const void *library_of(CUfunction function, CUmodule module, const char *name)
{
    const void *found = NULL;
    {
        PHOS_LOCKED(&phos_function_lock);
        if (module && phos_handle_find(&containers, module))
            return NULL; /* that will do */
    }
    PHOS_RELAXED;
    pthread_rwlock_rdlock(&asking_lock);
    size_t count;
    PHOS_FREES struct phos_handle *like = kernels_called(name, &count);
    for (size_t i = 0; i < count && !found; i++) {
        CUmodule of = NULL;
        CUfunction same = NULL;
        if ((module && phos_real.cuLibraryGetModule(&of, (CUlibrary)like[i].container) == CUDA_SUCCESS && of == module) ||
            (phos_real.cuKernelGetFunction(&same, (CUkernel)like[i].handle) == CUDA_SUCCESS && same == function))
            found = like[i].container;
    }
    pthread_rwlock_unlock(&asking_lock);
    return found;
}

/* A handle that came past us. */
static struct phos_kernel *ask(CUfunction function, bool *is_kernel)
{
    const char *name = NULL;
    *is_kernel = false;
    if (phos_real.cuFuncGetName(&name, function) == CUDA_SUCCESS && name) {
        CUmodule module = NULL;
        if (phos_real.cuFuncGetModule(&module, function) != CUDA_SUCCESS)
            module = NULL;
        const void *library = library_of(function, module, name);
        return seen(function, library ? library : module, name, false);
    }
    if (phos_real.cuKernelGetName(&name, (CUkernel)function) == CUDA_SUCCESS && name) {
        CUlibrary library = NULL;
        if (phos_real.cuKernelGetLibrary(&library, (CUkernel)function) != CUDA_SUCCESS)
            library = NULL;
        *is_kernel = true;
        return seen(function, library, name, true);
    }
    /* An old driver knows no names; the layout will do. Such a handle is noted for its context's life. */
    size_t offset, size;
    CUresult result = phos_real.cuFuncGetParamInfo(function, 0, &offset, &size);
    return result == CUDA_ERROR_NOT_SUPPORTED ? NULL : seen(function, NULL, NULL, false);
}

/* The driver's layout, asked once; with the caller's handle, which is alive: others of the same kernel may go meanwhile. */
static void ask_layout(struct phos_kernel *kernel, CUfunction function, bool is_kernel)
{
    {
        PHOS_LOCKED(&phos_function_lock);
        if (kernel->layout != PHOS_LAYOUT_NOT_ASKED)
            return;
    }
    struct phos_access_parameter *list = NULL;
    size_t count = 0, capacity = 0, end = 0;
    CUresult result;
    for (;;) {
        size_t offset = 0, size = 0;
        result = is_kernel ? phos_real.cuKernelGetParamInfo((CUkernel)function, count, &offset, &size)
                           : phos_real.cuFuncGetParamInfo(function, count, &offset, &size);
        if (result != CUDA_SUCCESS || count == PARAMETERS_MOST)
            break;
        if (count == capacity) {
            capacity = capacity ? capacity * 2 : 16;
            struct phos_access_parameter *grown = realloc(list, capacity * sizeof *grown);
            if (!grown)
                break;
            list = grown;
        }
        if (offset < end || offset > UINT16_MAX || size > UINT16_MAX)
            break;
        end = offset + size;
        list[count++] = (struct phos_access_parameter){(uint32_t)offset, (uint32_t)size};
    }
    /* Past the last one it says that the value is invalid. */
    bool known = result == CUDA_ERROR_INVALID_VALUE;
    PHOS_LOCKED(&phos_function_lock);
    if (kernel->layout != PHOS_LAYOUT_NOT_ASKED || !known) {
        free(list);
        if (kernel->layout == PHOS_LAYOUT_NOT_ASKED)
            kernel->layout = PHOS_LAYOUT_UNKNOWN;
        return;
    }
    kernel->parameters = list;
    kernel->count = (uint32_t)count;
    kernel->block_size = (uint32_t)end;
    kernel->layout = PHOS_LAYOUT_KNOWN;
}

struct phos_kernel *phos_kernel_of(CUfunction function)
{
    struct phos_kernel *kernel = NULL;
    bool asked = false, is_kernel = false;
    {
        PHOS_LOCKED(&phos_function_lock);
        struct phos_handle *known = phos_handle_find(&functions, function);
        if (known) {
            kernel = known->kernel;
            asked = kernel->layout != PHOS_LAYOUT_NOT_ASKED;
            is_kernel = known->library_kind;
        }
    }
    if (!kernel && !(kernel = ask(function, &is_kernel)))
        return NULL;
    if (!asked)
        ask_layout(kernel, function, is_kernel);
    return kernel;
}

const char *phos_kernel_name(const struct phos_kernel *kernel)
{
    return kernel->name;
}
