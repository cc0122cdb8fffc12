// How long a launch and an allocation take, as the application sees it: the driver API called from C, so that nothing
// but the driver (and what was put in front of it) is measured. The program prints READY and then answers each line of its
// input with a line of nanoseconds; between lines it does nothing (bench/turns.py).
//
//   launch COUNT              per launch of an empty kernel, of so many: until all were submitted; until all were done
//   both COUNT                the same through what is in front of the driver and by the driver's own function: submitted,
//                             submitted, done, done. Which goes first alternates
//   memory ROUNDS SIZE...     for each size the medians of cuMemAlloc and of cuMemFree, where each allocation is freed
//                             before the next is made
//   many MEGABYTES SIZE...    likewise, where up to 256 of a size, so many megabytes at most, are alive at once
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

static void launches(unsigned count)
{
    double submitted, done;
    launch_function *launch = (void *)find("cuLaunchKernel");
    batch(launch, 1 + count / 10, &submitted, &done); // GPU and processor were somebody else's before
    batch(launch, count, &submitted, &done);
    printf("%.2f %.2f\n", submitted, done);
}

static void both(unsigned count)
{
    static unsigned turns;
    function own = NULL;
    if (!dl_iterate_phdr(look_into, &own)) {
        fprintf(stderr, "libcuda.so.1 has no cuLaunchKernel of its own\n");
        exit(1);
    }
    launch_function *launch[] = {(void *)find("cuLaunchKernel"), (launch_function *)own};
    double submitted[2], done[2];
    for (unsigned turn = 0; turn < 2; turn++) {
        unsigned which = (turns + turn) % 2;
        batch(launch[which], count, &submitted[which], &done[which]);
    }
    turns++;
    printf("%.2f %.2f %.2f %.2f\n", submitted[0], submitted[1], done[0], done[1]);
}

#define MOST 256

static int (*allocate)(uint64_t *, size_t);
static int (*release)(uint64_t);

static uint64_t timed_allocate(uint64_t *address, unsigned long long size)
{
    uint64_t start = now();
    check(allocate(address, size), "cuMemAlloc");
    return now() - start;
}

static uint64_t timed_release(uint64_t address)
{
    uint64_t start = now();
    check(release(address), "cuMemFree");
    return now() - start;
}

static void print_medians(uint64_t *allocating, uint64_t *freeing, unsigned count)
{
    qsort(allocating, count, sizeof *allocating, by_value);
    qsort(freeing, count, sizeof *freeing, by_value);
    printf("%llu %llu ", (unsigned long long)allocating[count / 2], (unsigned long long)freeing[count / 2]);
}

static void one_by_one(unsigned long long rounds, unsigned long long size)
{
    uint64_t allocating[MOST], freeing[MOST];
    unsigned count = rounds < MOST ? (unsigned)rounds : MOST;
    for (unsigned i = 0; i < count; i++) {
        uint64_t address;
        allocating[i] = timed_allocate(&address, size);
        freeing[i] = timed_release(address);
    }
    print_medians(allocating, freeing, count);
}

static void many(unsigned long long megabytes, unsigned long long size)
{
    uint64_t addresses[MOST], allocating[MOST], freeing[MOST];
    unsigned long long fit = (megabytes << 20) / size;
    unsigned count = fit < 1 ? 1 : fit < MOST ? (unsigned)fit : MOST;
    for (unsigned i = 0; i < count; i++)
        allocating[i] = timed_allocate(&addresses[i], size);
    for (unsigned i = 0; i < count; i++)
        freeing[i] = timed_release(addresses[i]);
    print_medians(allocating, freeing, count);
}

static unsigned long long next_number(void)
{
    const char *word = strtok(NULL, " \n");
    return word ? strtoull(word, NULL, 10) : 0;
}

static void answer(char *question)
{
    const char *task = strtok(question, " \n");
    unsigned long long number = next_number(), size;
    if (!task || !number) {
        fprintf(stderr, "no task with a number\n");
        exit(2);
    }
    if (!strcmp(task, "launch"))
        launches((unsigned)number);
    else if (!strcmp(task, "both"))
        both((unsigned)number);
    else {
        void (*measure)(unsigned long long, unsigned long long) = strcmp(task, "many") ? one_by_one : many;
        while ((size = next_number()))
            measure(number, size);
        printf("\n");
    }
    fflush(stdout);
}

int main(void)
{
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
    find_kernel();
    allocate = (void *)find("cuMemAlloc_v2");
    release = (void *)find("cuMemFree_v2");
    uint64_t kept;
    // A live allocation beside, as every program has: the first one makes the driver set up its pools.
    check(allocate(&kept, 1 << 20), "cuMemAlloc");
    printf("READY\n");
    fflush(stdout);
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0)
        answer(line);
    free(line);
    return 0;
}
