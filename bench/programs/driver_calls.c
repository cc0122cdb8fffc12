// What the driver asks of the system and of the C library, and how long each call takes: preloaded into a program, it
// writes a record for each into a file that it shares, $PHOS_DRIVER_CALLS/<pid>, which bench/driver_calls.py reads.
//
// Recorded are ioctl(), munmap(), and memcpy() of 64 KiB and more, whoever calls them. What does not fit
// into the file any more is counted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RECORDS (1u << 18)
#define LARGE 65536u

enum kind { IOCTL = 1, MUNMAP, MEMCPY };

struct record {
    uint64_t began, took; // ns, CLOCK_MONOTONIC
    uint32_t kind;
    uint32_t request, class; // of an ioctl; the class of what the resource manager makes
    uint32_t zero;
    uint64_t bytes;
};

static struct {
    atomic_ulong count;
    struct record records[];
} *file;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

__attribute__((constructor)) static void begin(void)
{
    const char *folder = getenv("PHOS_DRIVER_CALLS");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/%d", folder, getpid()) >= (int)sizeof path)
        return;
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    size_t size = sizeof *file + RECORDS * sizeof(struct record);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)size))
        return;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped != MAP_FAILED)
        file = mapped;
}

static void add(struct record record)
{
    if (!file)
        return;
    record.took = now() - record.began;
    unsigned long at = atomic_fetch_add(&file->count, 1);
    if (at < RECORDS)
        file->records[at] = record;
}

int ioctl(int descriptor, unsigned long request, ...)
{
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    struct record record = {.kind = IOCTL, .request = (uint32_t)request, .began = now()};
    // NV_ESC_RM_ALLOC: the class stands behind three handles.
    if (((request >> 8) & 0xff) == 'F' && (request & 0xff) == 0x2b)
        record.class = ((uint32_t *)argument)[3];
    int answer = (int)syscall(SYS_ioctl, descriptor, request, argument);
    add(record);
    return answer;
}

int munmap(void *address, size_t bytes)
{
    struct record record = {.kind = MUNMAP, .bytes = bytes, .began = now()};
    int answer = (int)syscall(SYS_munmap, address, bytes);
    if (bytes >= LARGE)
        add(record);
    return answer;
}

void *memcpy(void *restrict to, const void *restrict from, size_t bytes)
{
    static _Atomic(void *(*)(void *, const void *, size_t)) real;
    if (bytes < LARGE || !file) { // dlsym() may call this one
        void *at = to;
        __asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(bytes) : : "memory");
        return to;
    }
    if (!atomic_load(&real))
        atomic_store(&real, (void *(*)(void *, const void *, size_t))dlsym(RTLD_NEXT, "memcpy"));
    struct record record = {.kind = MEMCPY, .bytes = bytes, .began = now()};
    atomic_load(&real)(to, from, bytes);
    add(record);
    return to;
}
