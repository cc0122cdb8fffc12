/* What the hostile programs share: the driver opened by hand, as static runtime libraries do it, and a way to fail. */
#pragma once
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long pointer;

static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuCtxSetCurrent)(void *), (*cuCtxSynchronize)(void);
static int (*cuDevicePrimaryCtxRetain)(void **, int), (*cuStreamCreate)(void **, unsigned), (*cuStreamDestroy)(void *);
static int (*cuMemAlloc)(pointer *, size_t), (*cuMemFree)(pointer), (*cuMemsetD8)(pointer, unsigned char, size_t);
static int (*cuMemsetD8Async)(pointer, unsigned char, size_t, void *), (*cuStreamSynchronize)(void *);
static int (*cuMemcpyDtoH)(void *, pointer, size_t), (*cuStreamBeginCapture)(void *, int);
static int (*cuStreamEndCapture)(void *, void **), (*cuGraphDestroy)(void *);

static void *driver, *context;

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), _exit(1))
#define OK(call) \
    do { \
        int code_ = (call); \
        if (code_) \
            FAIL("line %d: %s answered %d", __LINE__, #call, code_); \
    } while (0)

__attribute__((unused)) static void open_driver(void)
{
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        FAIL("%s", dlerror());
#define GET(name, symbol) *(void **)&name = dlsym(driver, symbol)
    GET(cuInit, "cuInit"), GET(cuDeviceGet, "cuDeviceGet"), GET(cuCtxSetCurrent, "cuCtxSetCurrent");
    GET(cuCtxSynchronize, "cuCtxSynchronize"), GET(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    GET(cuStreamCreate, "cuStreamCreate"), GET(cuStreamDestroy, "cuStreamDestroy_v2");
    GET(cuMemAlloc, "cuMemAlloc_v2"), GET(cuMemFree, "cuMemFree_v2"), GET(cuMemsetD8, "cuMemsetD8_v2");
    GET(cuMemsetD8Async, "cuMemsetD8Async"), GET(cuStreamSynchronize, "cuStreamSynchronize");
    GET(cuMemcpyDtoH, "cuMemcpyDtoH_v2"), GET(cuStreamBeginCapture, "cuStreamBeginCapture_v2");
    GET(cuStreamEndCapture, "cuStreamEndCapture"), GET(cuGraphDestroy, "cuGraphDestroy");
}

__attribute__((unused)) static void start(void)
{
    int device;
    open_driver();
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
}

__attribute__((unused)) static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* How long to go on; the runner says. */
__attribute__((unused)) static double duration(void)
{
    const char *text = getenv("HOSTILE_SECONDS");
    return text ? atof(text) : 1.0;
}

/* Allocates, sets, reads back, frees. */
__attribute__((unused)) static void use(size_t size, unsigned char value)
{
    unsigned char seen[2];
    pointer p;
    OK(cuMemAlloc(&p, size));
    OK(cuMemsetD8(p, value, size));
    OK(cuMemcpyDtoH(&seen[0], p, 1));
    OK(cuMemcpyDtoH(&seen[1], p + size - 1, 1));
    if (seen[0] != value || seen[1] != value)
        FAIL("%zu bytes of %d came back as %d and %d", size, value, seen[0], seen[1]);
    OK(cuMemFree(p));
}
