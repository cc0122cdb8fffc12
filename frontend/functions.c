/* What kernel a handle stands for. Handles are noted as the application gets them; those that came past us (through the
 * driver's private tables) are asked for at the first launch that is looked at.
 *
 * One lock, function_lock, guards everything here. It is taken inside the gate; under it only the lock of the tensor maps
 * is taken, and no driver call is made. */
#include "functions.h"
#include "access.h"
#include "arguments.h"
#include "cleanup.h"
#include "control.h"
#include "handles.h"
#include "library.h"
#include "log.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#define SOURCE_SASS 1u /* as in descriptor.py */
#define SOURCE_LAYOUT 3u
#define ALL ((uint32_t)(PHOS_READS | PHOS_WRITES))
#define PARAMETERS_MOST 4096
#define NAMES_MOST 256 /* a packet */
#define NAME_BYTES_MOST 32768

enum layout { LAYOUT_NOT_ASKED, LAYOUT_KNOWN, LAYOUT_UNKNOWN };

struct phos_kernel {
    uint64_t module;    /* its number; 0: unknown */
    uint64_t name_hash;
    const char *name;   /* NULL: unknown */
    CUfunction handle;  /* one that it was last seen under, to ask the driver with */
    bool handle_is_kernel;
    bool told;
    bool of_blas; /* seen in calls of cuBLAS */
    uint8_t layout;
    uint32_t count, block_size;
    struct phos_access_parameter *parameters; /* the driver's */
    uint64_t version;                         /* of the table that `row` is from */
    const struct phos_access_kernel *row;     /* NULL: none */
    struct phos_kernel *chain;                /* those of the same bucket */
    struct phos_kernel *next;                 /* all, in order of their coming */
};

static pthread_mutex_t function_lock = PTHREAD_MUTEX_INITIALIZER;
static struct phos_handles containers, functions;
static struct phos_kernel *buckets[4096]; /* by module and name */
static struct phos_kernel *kernels, *kernels_last;
static struct phos_access_table table;
static uint64_t table_version = 1;
static bool kernels_untold;
static uint64_t kernels_told; /* names, over this connection */
/* The range of addresses that hold device memory, or did; guarded by phos_memory_lock. */
static CUdeviceptr device_low = ~0ull, device_high;
static _Atomic uint64_t touch_version = 1;

static uint64_t hash_name(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = (hash ^ *c) * 0x100000001b3ull;
    return hash;
}

/* With function_lock held. */
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
    kernel->chain = *bucket;
    *bucket = kernel;
    if (kernels_last)
        kernels_last->next = kernel;
    else
        kernels = kernel;
    kernels_last = kernel;
    if (module && name)
        kernels_untold = true;
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
    PHOS_LOCKED(&function_lock);
    phos_handle_put(&containers, &(struct phos_handle){.handle = module, .context = context, .module = number});
}

void phos_functions_library(CUlibrary library, uint64_t number)
{
    PHOS_LOCKED(&function_lock);
    phos_handle_put(&containers, &(struct phos_handle){.handle = library, .module = number, .library_kind = true});
}

void phos_functions_context_ends(CUcontext context)
{
    PHOS_LOCKED(&function_lock);
    phos_handles_drop(&functions, NULL, context);
    phos_handles_drop(&containers, NULL, context);
}

static void drop_container(const void *container)
{
    PHOS_LOCKED(&function_lock);
    phos_handles_drop(&functions, container, NULL);
    phos_handles_drop(&containers, container, NULL);
}

/* With function_lock held. */
static struct phos_kernel *put(const void *function, struct phos_kernel *kernel, const void *container, CUcontext context,
                               bool is_kernel)
{
    if (!kernel)
        return NULL;
    kernel->handle = (CUfunction)function;
    kernel->handle_is_kernel = is_kernel;
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
        PHOS_LOCKED(&function_lock);
        struct phos_handle *holder = container ? phos_handle_find(&containers, container) : NULL;
        struct phos_handle *former = phos_handle_find(&functions, function);
        uint64_t module = holder ? holder->module : 0;
        if (former && former->container == container && former->kernel->module == module && name &&
            former->kernel->name && !strcmp(former->kernel->name, name))
            return former->kernel;
        kernel = put(function, intern(module, name), container, context, is_kernel);
        if (kernel && phos_library_in_blas())
            kernel->of_blas = true;
        fresh = kernels_untold && kernel && !kernel->told;
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
    PHOS_LOCKED(&function_lock);
    struct phos_handle *holder = phos_handle_find(&containers, library);
    struct phos_handle what = {
        .handle = *module, .container = library, .context = context, .module = holder ? holder->module : 0};
    phos_handle_put(&containers, &what);
    return result;
}

CUresult serve_cuLibraryUnload(CUlibrary library)
{
    drop_container(library);
    return phos_real.cuLibraryUnload(library);
}

CUresult serve_cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CUresult result = phos_real.cuKernelGetFunction(function, kernel);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = current_context();
    phos_kernel_of((CUfunction)kernel);
    PHOS_LOCKED(&function_lock);
    struct phos_handle *known = phos_handle_find(&functions, kernel);
    if (known && (const void *)*function != (const void *)kernel)
        put(*function, known->kernel, known->container, context, false);
    return result;
}

/* ---- handles at a launch ---- */

/* A handle that came past us. */
static struct phos_kernel *ask(CUfunction function)
{
    const char *name = NULL;
    if (phos_real.cuFuncGetName(&name, function) == CUDA_SUCCESS && name) {
        CUmodule module = NULL;
        if (phos_real.cuFuncGetModule(&module, function) != CUDA_SUCCESS)
            module = NULL;
        return seen(function, module, name, false);
    }
    if (phos_real.cuKernelGetName(&name, (CUkernel)function) == CUDA_SUCCESS && name) {
        CUlibrary library = NULL;
        if (phos_real.cuKernelGetLibrary(&library, (CUkernel)function) != CUDA_SUCCESS)
            library = NULL;
        return seen(function, library, name, true);
    }
    /* An old driver knows no names; the layout will do. Such a handle is noted for its context's life. */
    size_t offset, size;
    CUresult result = phos_real.cuFuncGetParamInfo(function, 0, &offset, &size);
    return result == CUDA_ERROR_NOT_SUPPORTED ? NULL : seen(function, NULL, NULL, false);
}

/* The driver's layout, asked once. */
static void ask_layout(struct phos_kernel *kernel)
{
    CUfunction function;
    bool is_kernel;
    {
        PHOS_LOCKED(&function_lock);
        if (kernel->layout != LAYOUT_NOT_ASKED)
            return;
        function = kernel->handle;
        is_kernel = kernel->handle_is_kernel;
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
    PHOS_LOCKED(&function_lock);
    if (kernel->layout != LAYOUT_NOT_ASKED || !known) {
        free(list);
        if (kernel->layout == LAYOUT_NOT_ASKED)
            kernel->layout = LAYOUT_UNKNOWN;
        return;
    }
    kernel->parameters = list;
    kernel->count = (uint32_t)count;
    kernel->block_size = (uint32_t)end;
    kernel->layout = LAYOUT_KNOWN;
}

struct phos_kernel *phos_kernel_of(CUfunction function)
{
    struct phos_kernel *kernel = NULL;
    bool asked = false;
    {
        PHOS_LOCKED(&function_lock);
        struct phos_handle *known = phos_handle_find(&functions, function);
        if (known) {
            kernel = known->kernel;
            asked = kernel->layout != LAYOUT_NOT_ASKED;
            if (!asked) { /* with a handle that is alive */
                kernel->handle = function;
                kernel->handle_is_kernel = known->library_kind;
            }
        }
    }
    if (!kernel && !(kernel = ask(function)))
        return NULL;
    if (!asked)
        ask_layout(kernel);
    return kernel;
}

/* ---- what a launch touches ---- */

/* Where device memory is, or was: a number in an argument that lies elsewhere is no address. */
static void device_range(CUdeviceptr *low, CUdeviceptr *high)
{
    PHOS_LOCKED(&phos_memory_lock);
    if (phos_mappings.count) {
        const struct phos_range *first = phos_mappings.items[0], *last = phos_mappings.items[phos_mappings.count - 1];
        CUdeviceptr end = last->address + last->size;
        if (first->address < device_low || end > device_high)
            atomic_fetch_add(&touch_version, 1);
        device_low = first->address < device_low ? first->address : device_low;
        device_high = end > device_high ? end : device_high;
    }
    *low = device_low;
    *high = device_high;
}

uint64_t phos_kernel_touch_version(void)
{
    CUdeviceptr low, high;
    device_range(&low, &high);
    return atomic_load(&touch_version);
}

/* With function_lock held: the current table's row for a kernel. One that has another layout than the driver says is for
 * another kernel of this name. */
static const struct phos_access_kernel *row_of(struct phos_kernel *kernel)
{
    if (kernel->version == table_version)
        return kernel->row;
    kernel->version = table_version;
    kernel->row = kernel->name && kernel->module ? phos_access_find(&table, kernel->module, kernel->name_hash) : NULL;
    if (kernel->row && kernel->layout == LAYOUT_KNOWN &&
        (kernel->row->parameters != kernel->count ||
         (kernel->count && memcmp(kernel->parameters, table.parameters + kernel->row->first_parameter,
                                  kernel->count * sizeof *kernel->parameters)))) {
        phos_debug("the descriptor of %s is not for this kernel", kernel->name);
        kernel->row = NULL;
    }
    return kernel->row;
}

/* cuBLAS's kernels keep addresses in shared memory and tensor maps in their workspace, which looks like writing anywhere.
 * Outside of its calls, in a graph, one that also writes through its arguments is taken to write through these only: they
 * are in every training step, and each would wait for all of memory. What this makes wrong is found by its content. */
static bool doubted(const struct phos_kernel *kernel, const struct phos_access_kernel *row)
{
    if (!kernel->of_blas || row->source != SOURCE_SASS)
        return false;
    for (uint32_t i = 0; i < row->fields; i++)
        if (table.fields[row->first_field + i].access & PHOS_WRITES)
            return true;
    return false;
}

void phos_kernel_touch(struct phos_touches *touches, struct phos_kernel *kernel, const struct phos_arguments *arguments)
{
    bool in_blas = phos_library_in_blas();
    struct phos_look look = {.arguments = arguments};
    device_range(&look.low, &look.high);
    PHOS_LOCKED(&function_lock);
    const struct phos_access_kernel *row = row_of(kernel);
    kernel->of_blas |= in_blas;
    touches->kernel = kernel->name;
    touches->module = kernel->module;
    if (row) {
        touches->source = row->source;
        bool doubt = doubted(kernel, row);
        touches->anything |= doubt ? row->indirect & ~PHOS_WRITES : row->indirect;
        touches->unsure |= doubt ? row->indirect : 0;
        touches->guessed |= row->guessed;
        look.parameters = table.parameters + row->first_parameter;
        look.count = row->parameters;
        const struct phos_access_field *fields = table.fields + row->first_field;
        for (uint32_t i = 0; i < row->fields; i++)
            phos_look_field(touches, &look, &fields[i]);
        return;
    }
    if (kernel->layout != LAYOUT_KNOWN) {
        touches->anything |= ALL;
        touches->unknown = true;
        return;
    }
    touches->source = SOURCE_LAYOUT;
    look.parameters = kernel->parameters;
    look.count = kernel->count;
    for (uint32_t i = 0; i < kernel->count; i++)
        if (kernel->parameters[i].size >= 8)
            phos_look_scan(touches, &look, kernel->parameters[i].offset, kernel->parameters[i].size, ALL);
}

bool phos_kernel_copy(struct phos_kernel *kernel, const struct phos_arguments *arguments, void **block, size_t *size)
{
    PHOS_LOCKED(&function_lock);
    *block = NULL;
    *size = 0;
    if (!arguments->parameters && arguments->block) {
        if (!(*block = malloc(arguments->block_size + 1)))
            return false;
        memcpy(*block, arguments->block, *size = arguments->block_size);
        return true;
    }
    if (kernel->layout != LAYOUT_KNOWN)
        return false;
    if (!kernel->block_size)
        return true;
    if (!arguments->parameters || !(*block = calloc(1, kernel->block_size)))
        return false;
    for (uint32_t i = 0; i < kernel->count; i++)
        if (arguments->parameters[i])
            memcpy((char *)*block + kernel->parameters[i].offset, arguments->parameters[i], kernel->parameters[i].size);
    *size = kernel->block_size;
    return true;
}

/* ---- phosd ---- */

const char *phos_access_table_take(int descriptor)
{
    struct phos_access_table came;
    const char *problem = phos_access_read(descriptor, &came);
    if (problem)
        return problem;
    {
        PHOS_LOCKED(&function_lock);
        struct phos_access_table former = table;
        table = came;
        came = former;
        table_version++;
    }
    atomic_fetch_add(&touch_version, 1);
    phos_access_free(&came);
    return NULL;
}

bool phos_kernels_tell(uint64_t upto, bool (*send)(uint64_t module, const char *const *names, size_t count))
{
    /* Records are never freed, and only this thread marks them; the lock guards the links. */
    pthread_mutex_lock(&function_lock);
    struct phos_kernel *start = kernels_untold ? kernels : NULL;
    kernels_untold = false;
    bool left = false;
    for (bool more = true; more;) {
        const char *names[NAMES_MOST];
        struct phos_kernel *chosen[NAMES_MOST];
        size_t count = 0, bytes = 0;
        uint64_t module = 0;
        more = false;
        for (struct phos_kernel *k = start; k; k = k->next) {
            if (k->told || !k->module || !k->name) {
                if (k == start)
                    start = k->next;
                continue;
            }
            if (k->module > upto) {
                left = true; /* its module comes first */
                continue;
            }
            size_t length = strlen(k->name) + 8;
            if (module && (k->module != module || count == NAMES_MOST || bytes + length > NAME_BYTES_MOST)) {
                more = true;
                continue;
            }
            if (length > NAME_BYTES_MOST) { /* no packet holds it: its layout will do */
                k->told = true;
                continue;
            }
            module = k->module;
            bytes += length;
            chosen[count] = k;
            names[count++] = k->name;
        }
        if (!count)
            break;
        pthread_mutex_unlock(&function_lock);
        bool sent = send(module, names, count);
        pthread_mutex_lock(&function_lock);
        if (!sent) {
            kernels_untold = true;
            pthread_mutex_unlock(&function_lock);
            return false;
        }
        for (size_t i = 0; i < count; i++)
            chosen[i]->told = true;
        kernels_told += count;
    }
    kernels_untold |= left;
    pthread_mutex_unlock(&function_lock);
    return true;
}

void phos_kernels_untell(void)
{
    PHOS_LOCKED(&function_lock);
    for (struct phos_kernel *k = kernels; k; k = k->next)
        k->told = false;
    kernels_untold = kernels != NULL;
    kernels_told = 0;
}

bool phos_kernels_count(uint64_t *count, uint64_t *told)
{
    PHOS_LOCKED(&function_lock);
    bool all = true;
    *count = 0;
    for (struct phos_kernel *k = kernels; k; k = k->next) {
        *count += k->module && k->name;
        all &= k->told || !k->module || !k->name;
    }
    *told = kernels_told;
    return all;
}

const char *phos_kernel_name(const struct phos_kernel *kernel)
{
    return kernel->name;
}
