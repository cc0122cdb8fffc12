// How long a launch and an allocation take, as the application sees it: the driver API called from C, so that nothing
// but the driver (and what was put in front of it) is measured.
//
//   launch_rate launch BATCHES LAUNCHES   one line a batch: nanoseconds per launch of an empty kernel, submission only
//   launch_rate finish BATCHES LAUNCHES   likewise, including the wait for the batch
//   launch_rate both BATCHES LAUNCHES     one line a pair of batches: nanoseconds per launch through what is in front of the
//                                         driver and by the driver's own function, submission only; the same with the
//                                         wait. Which goes first alternates
//   launch_rate memory ROUNDS SIZE...     one line a size: SIZE, median nanoseconds of cuMemAlloc, of cuMemFree, where
//                                         each allocation is freed before the next is made
//   launch_rate many MEGABYTES SIZE...    likewise, where up to 256 of a size, so many megabytes at most, are alive at once
//
// libcuda is opened and its functions are looked up by name, as cudart and PyTorch do.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*function)();

static const char ptx[] =
    ".version 7.0\n"
    ".target sm_80\n"
    ".address_size 64\n"
    ".visible .entry nothing(.param .u64 pointer, .param .u32 number)\n"
    "{\n"
    "  ret;\n"
    "}\n";

static void *library;

static function find(const char *name)
{
    function found = (function)dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libcuda.so.1 has no %s: %s\n", name, dlerror());
        exit(1);
    }
    return found;
}

static void check(int status, const char *what)
{
    if (status) {
        fprintf(stderr, "%s failed with CUDA error %d\n", what, status);
        exit(1);
    }
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// The address of cuLaunchKernel in libcuda's own table of symbols, past whatever answers dlsym (ELF gABI; DT_GNU_HASH).
static int look_into(struct dl_phdr_info *object, size_t size, void *found)
{
    (void)size;
    static const char name[] = "cuLaunchKernel";
    const ElfW(Dyn) *entry = NULL;
    if (!strstr(object->dlpi_name, "/libcuda.so"))
        return 0;
    for (unsigned i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const uint32_t *hashes = NULL;
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB)
            strings = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_GNU_HASH)
            hashes = (const void *)entry->d_un.d_ptr;
    }
    if (!symbols || !strings || !hashes)
        return 0;
    uint32_t wanted = 5381, buckets = hashes[0], first = hashes[1], words = hashes[2];
    for (const char *c = name; *c; c++)
        wanted = wanted * 33 + (unsigned char)*c;
    const uint32_t *bucket = hashes + 4 + words * (sizeof(ElfW(Addr)) / 4), *chain = bucket + buckets;
    uint32_t i = bucket[wanted % buckets];
    for (; i >= first; i++) {
        if (!strcmp(strings + symbols[i].st_name, name)) {
            *(function *)found = (function)(object->dlpi_addr + symbols[i].st_value);
            return 1;
        }
        if (chain[i - first] & 1)
            return 0;
    }
    return 0;
}

typedef int launch_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                            void **);

static int (*synchronize)(void);
static void *kernel;

static void find_kernel(void)
{
    void *module;
    synchronize = (void *)find("cuCtxSynchronize");
    check(((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, ptx), "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))find("cuModuleGetFunction"))(&kernel, module, "nothing"),
          "cuModuleGetFunction");
}

// Nanoseconds a launch, of `count`: until all were submitted, and until all were done.
static void batch(launch_function *launch, unsigned count, double *submitted, double *done)
{
    uint64_t pointer = 0;
    uint32_t number = 0;
    void *arguments[] = {&pointer, &number};
    check(synchronize(), "cuCtxSynchronize");
    uint64_t start = now();
    for (unsigned i = 0; i < count; i++)
        check(launch(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL), "cuLaunchKernel");
    *submitted = (double)(now() - start) / count;
    check(synchronize(), "cuCtxSynchronize");
    *done = (double)(now() - start) / count;
}

static void launches(unsigned batches, unsigned count, int finish)
{
    launch_function *launch = (void *)find("cuLaunchKernel");
    find_kernel();
    for (unsigned i = 0; i < batches + 2; i++) { // the first two warm up
        double submitted, done;
        batch(launch, count, &submitted, &done);
        if (i >= 2)
            printf("%.2f\n", finish ? done : submitted);
    }
}

static void both(unsigned batches, unsigned count)
{
    function own = NULL;
    if (!dl_iterate_phdr(look_into, &own)) {
        fprintf(stderr, "libcuda.so.1 has no cuLaunchKernel of its own\n");
        exit(1);
    }
    launch_function *launch[] = {(void *)find("cuLaunchKernel"), (launch_function *)own};
    find_kernel();
    for (unsigned i = 0; i < batches + 2; i++) {
        double submitted[2], done[2];
        for (unsigned turn = 0; turn < 2; turn++) {
            unsigned which = (i + turn) % 2;
            batch(launch[which], count, &submitted[which], &done[which]);
        }
        if (i >= 2)
            printf("%.2f %.2f %.2f %.2f\n", submitted[0], submitted[1], done[0], done[1]);
    }
}

static void memory(unsigned rounds, unsigned long long size, uint64_t *allocating, uint64_t *freeing)
{
    int (*allocate)(uint64_t *, size_t) = (void *)find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (void *)find("cuMemFree_v2");
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t address, start = now();
        check(allocate(&address, size), "cuMemAlloc");
        uint64_t middle = now();
        check(release(address), "cuMemFree");
        allocating[round] = middle - start;
        freeing[round] = now() - middle;
    }
    qsort(allocating, rounds, sizeof *allocating, by_value);
    qsort(freeing, rounds, sizeof *freeing, by_value);
    printf("%llu %llu %llu\n", size, (unsigned long long)allocating[rounds / 2], (unsigned long long)freeing[rounds / 2]);
}

static void many(unsigned long long megabytes, unsigned long long size)
{
    int (*allocate)(uint64_t *, size_t) = (void *)find("cuMemAlloc_v2");
    int (*release)(uint64_t) = (void *)find("cuMemFree_v2");
    uint64_t addresses[256], allocating[256], freeing[256];
    unsigned long long fit = (megabytes << 20) / size;
    unsigned count = fit < 1 ? 1 : fit < 256 ? (unsigned)fit : 256;
    for (unsigned i = 0; i < count; i++) {
        uint64_t start = now();
        check(allocate(&addresses[i], size), "cuMemAlloc");
        allocating[i] = now() - start;
    }
    for (unsigned i = 0; i < count; i++) {
        uint64_t start = now();
        check(release(addresses[i]), "cuMemFree");
        freeing[i] = now() - start;
    }
    qsort(allocating, count, sizeof *allocating, by_value);
    qsort(freeing, count, sizeof *freeing, by_value);
    printf("%llu %llu %llu\n", size, (unsigned long long)allocating[count / 2], (unsigned long long)freeing[count / 2]);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: launch_rate launch|finish|both BATCHES LAUNCHES | memory ROUNDS SIZE... | many MEGABYTES SIZE...\n");
        return 2;
    }
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int device;
    void *context;
    check(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
    check(((int (*)(int *, int))find("cuDeviceGet"))(&device, 0), "cuDeviceGet");
    check(((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, device), "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    unsigned rounds = (unsigned)atoi(argv[2]);
    if (!strcmp(argv[1], "many")) {
        for (int i = 3; i < argc; i++)
            many(rounds, strtoull(argv[i], NULL, 10));
    } else if (!strcmp(argv[1], "memory")) {
        uint64_t *allocating = calloc(rounds, sizeof *allocating), *freeing = calloc(rounds, sizeof *freeing);
        uint64_t kept;
        // A live allocation beside, as every program has: the first one makes the driver set up its pools.
        check(((int (*)(uint64_t *, size_t))find("cuMemAlloc_v2"))(&kept, 1 << 20), "cuMemAlloc");
        for (int i = 3; i < argc; i++)
            memory(rounds, strtoull(argv[i], NULL, 10), allocating, freeing);
        free(allocating);
        free(freeing);
    } else if (!strcmp(argv[1], "both")) {
        both(rounds, (unsigned)atoi(argv[3]));
    } else {
        launches(rounds, (unsigned)atoi(argv[3]), !strcmp(argv[1], "finish"));
    }
    return 0;
}
