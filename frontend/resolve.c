/* Finding the real driver, and standing in front of it.
 *
 * A program reaches the driver by one of four ways:
 *   1. it is linked against libcuda.so.1: the dynamic linker binds its calls to the first definition in load order, and a
 *      preloaded library comes first, so exporting the symbols is enough;
 *   2. it opens libcuda.so.1 itself and asks dlsym(handle, "cuLaunchKernel"), which looks into that library only, past
 *      every preloaded one: hence the exported dlsym;
 *   3. it asks the driver's own cuGetProcAddress, found by way 1 or 2: hence the wrappers of both its forms. The runtime
 *      library (static in most programs, and once more in each of cuBLAS, cuDNN, cuFFT ...) works like this;
 *   4. cudaGetDriverEntryPoint, which is way 3 inside the runtime library.
 * In each we ask the real resolver first and replace only what it found: a symbol the driver lacks stays absent, and
 * what is not in our table (a newer driver's entry points, cuGetExportTable's private tables) goes to the driver.
 *
 * dlsym is delicate:
 *   - glibc has two versions of the symbol (2.2.5, or 2.17 on other machines than x86-64, and 2.34 when libdl became part
 *     of libc). An unversioned definition in a preloaded library satisfies references to either. The real one cannot be
 *     found by dlsym, of course; dlvsym is not interposed and is asked for both versions.
 *   - the real dlsym looks at its return address to see which library asks: RTLD_NEXT and RTLD_DEFAULT mean different
 *     things to different callers. Whatever is not ours to answer is therefore *tail-called*: the jump leaves the
 *     caller's return address in place, as if we were not there.
 *   - names are matched whole. A prefix such as "cu" also begins cuDNN's cudnnCreate and many an application's function.
 *   - the caller's handle is respected: only what was found in libcuda itself (dladdr) is replaced, so a program that
 *     opens some other library with a function of the same name gets that one.
 *   - a function of cuBLAS, cuDNN or NCCL that is in library_api.def is replaced in the same way (library_bind.c).
 *   - a program that merely asks whether CUDA is there, by dlsym(RTLD_DEFAULT, "cuInit"), must not find our exported
 *     symbol when no driver is loaded.
 *
 * cuGetProcAddress takes a name without suffixes, a CUDA version and flags; several exported symbols share a name
 * (cuMemcpyHtoD: the 32-bit form of 2.0, _v2 of 3.2, _v2_ptds for the per-thread default stream). The form is the newest
 * that is not newer than the version asked for, of the stream kind that the flags ask for, by cuda_api.def. The answer
 * is cross-checked: where the driver's pointer equals what dlsym finds for one of the candidates, that one is it. */
#include "resolve.h"
#include "gate.h"
#include "library.h"
#include "log.h"
#include "runtime.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define PHOS_EXPORT __attribute__((visibility("default")))
/* Runs before a sanitizer's own start, which asks dlsym: it must not be instrumented. */
#define PHOS_EARLY __attribute__((no_sanitize("address", "undefined", "thread")))

typedef void *dlsym_function(void *restrict, const char *restrict);

/* Each slot is written once, by whoever finds it first; all have been when it is bound. No lock is held over the search
 * (library_bind.c says why), and who needs the driver meanwhile searches as well: it may be a child without the others. */
union phos_real phos_real;
static _Atomic(void *) chosen_base; /* load address of the libcuda that phos_real is to stand for, the first one asked for */
static _Atomic(void *) bound_base;  /* the same once it does, NULL while unbound */
static _Atomic(dlsym_function *) dlsym_found;

static PHOS_EARLY __attribute__((noinline)) dlsym_function *dlsym_find(void)
{
    /* dlvsym may allocate, an allocator preloaded beside us may call dlsym from its first malloc, and here we are again:
     * such a call is told that there is no such symbol, as allocators must expect this early. */
    static __thread bool searching __attribute__((tls_model("initial-exec")));
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    if (searching)
        return NULL;
    searching = true;
    dlsym_function *found = NULL;
    for (size_t i = 0; i < sizeof versions / sizeof *versions && !found; i++)
        found = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    atomic_store(&dlsym_found, found);
    searching = false;
    return found;
}

static inline PHOS_EARLY dlsym_function *dlsym_real(void)
{
    dlsym_function *found = atomic_load_explicit(&dlsym_found, memory_order_relaxed);
    return __builtin_expect(found != NULL, 1) ? found : dlsym_find();
}

static CUresult absent_entry(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

PHOS_EARLY int phos_resolve_symbol(const char *symbol)
{
    int low = 0, high = PHOS_API_COUNT - 1;
    while (low <= high) {
        int middle = (low + high) / 2, row = phos_api_by_symbol[middle];
        int order = strcmp(symbol, phos_api_rows[row].symbol);
        if (!order)
            return row;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return -1;
}

static bool is_libcuda(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    return !strncmp(name, "libcuda.so", 10) && (name[10] == 0 || name[10] == '.');
}

/* `handle`: of the libcuda at `base`; kept for ever, so that dlclose never pulls the driver from under us. */
static void bind_to(void *handle, void *base)
{
    for (int row = 0; row < PHOS_API_COUNT; row++) {
        void *found = dlsym_real()(handle, phos_api_rows[row].symbol), *none = NULL;
        __atomic_compare_exchange_n(&phos_real.slot[row], &none, found ? found : (void *)absent_entry, false,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
    dlerror(); /* whoever's dlsym this is in must not hear of what an older driver lacks */
    atomic_store_explicit(&bound_base, base, memory_order_release);
    atomic_fetch_and(&phos_gate_word, ~(uint32_t)PHOS_GATE_UNBOUND);
    phos_debug("bound to the driver library at %p", base);
}

/* Answers whether phos_real stands for the library that holds `address`; binds to it if nothing is bound yet. */
static bool bind_holder_of(void *address)
{
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname || !is_libcuda(info.dli_fname))
        return false;
    void *base = atomic_load_explicit(&bound_base, memory_order_acquire);
    if (!base) {
        void *handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        if (!handle)
            return false;
        if (atomic_compare_exchange_strong(&chosen_base, &base, info.dli_fbase))
            base = info.dli_fbase;
        if (base == info.dli_fbase)
            bind_to(handle, base);
    }
    if (base != info.dli_fbase)
        phos_warn_once("a second CUDA driver library, %s, was opened: calls to it are not carried", info.dli_fname);
    return base == info.dli_fbase;
}

bool phos_resolve_bind(void)
{
    if (atomic_load_explicit(&bound_base, memory_order_acquire))
        return true;
    void *found = dlsym_real() ? dlsym_real()(RTLD_NEXT, "cuInit") : NULL;
    if (found && bind_holder_of(found))
        return true;
    /* Loaded where only some library sees it (RTLD_LOCAL), and that library is linked against it. */
    void *handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return false;
    found = dlsym_real()(handle, "cuInit");
    return found && bind_holder_of(found);
}

static bool is_ours(void *address)
{
    Dl_info theirs, ours;
    return dladdr(address, &theirs) && dladdr((void *)is_ours, &ours) && theirs.dli_fbase == ours.dli_fbase;
}

static __attribute__((noinline)) void *dlsym_driver(void *handle, const char *name, int row)
{
    void *found = dlsym_real()(handle, name);
    if (!found)
        return NULL;
    void *wrapper = phos_api_rows[row].wrapper;
    if (is_ours(found)) {
        if (phos_resolve_bind() && phos_real.slot[row] != (void *)absent_entry)
            return found;
        /* Finds nothing, and says so through dlerror. Not a tail call: RTLD_NEXT must mean "after us" here. */
        void *volatile none = dlsym_real()(RTLD_NEXT, name);
        return none;
    }
    return wrapper && bind_holder_of(found) ? wrapper : found;
}

static __attribute__((noinline)) void *dlsym_library(void *handle, const char *name)
{
    void *found = dlsym_real()(handle, name);
    return found ? phos_library_answer(name, found) : NULL;
}

PHOS_EXPORT PHOS_EARLY void *dlsym(void *restrict handle, const char *restrict name)
{
    dlsym_function *real = dlsym_real();
    if (!real)
        return NULL;
    if (__builtin_expect(name[0] == 'c' && name[1] == 'u' && handle != RTLD_NEXT, 0)) {
        int row = phos_resolve_symbol(name);
        if (row >= 0)
            return dlsym_driver(handle, name, row);
        /* RTLD_DEFAULT depends on the caller, and our wrappers are not to be found that way (library.h). */
        if (handle != RTLD_DEFAULT && phos_library_named(name))
            return dlsym_library(handle, name);
    } else if (__builtin_expect(name[0] == 'n' && name[1] == 'c' && handle != RTLD_NEXT && handle != RTLD_DEFAULT, 0)) {
        if (phos_library_named(name))
            return dlsym_library(handle, name);
    }
    return real(handle, name);
}

void *phos_resolve_dlsym(void *handle, const char *name)
{
    dlsym_function *real = dlsym_real();
    void *volatile found = real ? real(handle, name) : NULL; /* not a tail call: RTLD_NEXT means "after us" */
    return found;
}

int phos_resolve_requested(const char *name, int version, bool per_thread, const void *real)
{
    int best = -1, equal = -1;
    bool named = false;
    for (int row = 0; row < PHOS_API_COUNT; row++) {
        const struct phos_api_row *r = &phos_api_rows[row];
        if (strcmp(r->name, name))
            continue;
        named = true;
        bool absent = phos_real.slot[row] == (void *)absent_entry;
        bool right_stream = r->stream == '-' || (r->stream == 'p') == per_thread;
        if (real == phos_real.slot[row] && (equal < 0 || right_stream))
            equal = row;
        if (!absent && r->since <= version && right_stream && (best < 0 || r->since > phos_api_rows[best].since))
            best = row;
    }
    if (equal >= 0)
        return equal;
    if (!named)
        return phos_resolve_symbol(name); /* asked for by its exact spelling */
    /* Asked for at a version newer than the table, and not a form we know: its prototype may be another. */
    return version > PHOS_API_NEWEST ? -1 : best;
}

static void replace_requested(const char *name, void **pointer, int version, cuuint64_t flags)
{
    if (!name || !pointer || !*pointer)
        return;
    int row = phos_resolve_requested(name, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, *pointer);
    if (row < 0) {
        phos_debug("%s (version %d) goes straight to the driver", name, version);
        return;
    }
    /* A form that is reached this way only. The slot is constant for whoever reads it from now on: nobody could call its
     * wrapper before. */
    if (phos_real.slot[row] == (void *)absent_entry)
        phos_real.slot[row] = *pointer;
    if (phos_api_rows[row].wrapper)
        *pointer = phos_api_rows[row].wrapper;
}

CUresult serve_cuGetProcAddress_v2(const char *symbol, void **pfn, int driverVersion, cuuint64_t flags,
                                   CUdriverProcAddressQueryResult *symbolFound)
{
    if (!phos_resolve_bind())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = phos_real.cuGetProcAddress_v2(symbol, pfn, driverVersion, flags, symbolFound);
    if (result == CUDA_SUCCESS)
        replace_requested(symbol, pfn, driverVersion, flags);
    return result;
}

CUresult serve_cuGetProcAddress(const char *symbol, void **pfn, int driverVersion, cuuint64_t flags)
{
    if (!phos_resolve_bind())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = phos_real.cuGetProcAddress(symbol, pfn, driverVersion, flags);
    if (result == CUDA_SUCCESS)
        replace_requested(symbol, pfn, driverVersion, flags);
    return result;
}

CUresult serve_cuInit(unsigned int flags)
{
    if (!phos_resolve_bind())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = phos_real.cuInit(flags);
    if (result == CUDA_SUCCESS)
        phos_runtime_started();
    return result;
}

__attribute__((constructor)) static void resolve_early(void)
{
    phos_gate_bind = phos_resolve_bind;
    dlsym_real();
}
