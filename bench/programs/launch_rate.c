// How long a launch and an allocation take, as the application sees it: the driver API called from C, so that nothing
// but the driver (and what was put in front of it) is measured.
//
//   launch_rate launch BATCHES LAUNCHES   one line a batch: nanoseconds per launch of an empty kernel, submission only
//   launch_rate finish BATCHES LAUNCHES   likewise, including the wait for the batch
//   launch_rate memory ROUNDS SIZE...     one line a size: SIZE, median nanoseconds of cuMemAlloc, of cuMemFree, where
//                                         each allocation is freed before the next is made
//   launch_rate many MEGABYTES SIZE...    likewise, where up to 256 of a size, so many megabytes at most, are alive at once
//
// libcuda is opened and its functions are looked up by name, as cudart and PyTorch do.
#include <dlfcn.h>
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

static void launches(unsigned batches, unsigned count, int finish)
{
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        (void *)find("cuLaunchKernel");
    int (*synchronize)(void) = (void *)find("cuCtxSynchronize");
    void *module, *kernel;
    check(((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, ptx), "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))find("cuModuleGetFunction"))(&kernel, module, "nothing"),
          "cuModuleGetFunction");
    uint64_t pointer = 0;
    uint32_t number = 0;
    void *arguments[] = {&pointer, &number};
    for (unsigned batch = 0; batch < batches + 2; batch++) { // the first two warm up
        check(synchronize(), "cuCtxSynchronize");
        uint64_t start = now();
        for (unsigned i = 0; i < count; i++)
            check(launch(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL), "cuLaunchKernel");
        uint64_t submitted = now();
        check(synchronize(), "cuCtxSynchronize");
        uint64_t end = finish ? now() : submitted;
        if (batch >= 2)
            printf("%.2f\n", (double)(end - start) / count);
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
        fprintf(stderr, "usage: launch_rate launch|finish BATCHES LAUNCHES | memory ROUNDS SIZE... | many MEGABYTES SIZE...\n");
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
    } else {
        launches(rounds, (unsigned)atoi(argv[3]), !strcmp(argv[1], "finish"));
    }
    return 0;
}
