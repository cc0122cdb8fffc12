/* Threads that ask the driver without any pause: for the state of a stream, for that of an event, each starting another thread now
 * and then; and all the time others, one after the other, about a stream of their own. Whenever CRIU stops the process one of them holds a lock of the driver's, as good as. The main
 * thread computes beside them. Run it without the frontend: no gate keeps them from the driver.
 *
 * spins [--iterations N] [--report FILE] [--until FILE]: prints to the report, or to the standard output, and does not end
 * before the other file is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PER_THREAD ((void *)2) /* CU_STREAM_PER_THREAD */
#define NON_BLOCKING 1

static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *), (*cuStreamCreate)(void **, unsigned), (*cuStreamSynchronize)(void *);
static int (*cuEventCreate)(void **, unsigned), (*cuEventRecord)(void *, void *), (*cuEventQuery)(void *);
static int (*cuStreamQuery)(void *), (*cuStreamGetFlags)(void *, unsigned *), (*cuMemAlloc)(uint64_t *, size_t);
static int (*cuMemcpyHtoD)(uint64_t, const void *, size_t), (*cuMemcpyDtoH)(void *, uint64_t, size_t);

static void *context, *stream, *event; /* written before there are other threads */

static void ok(int result, const char *call)
{
    if (!result)
        return;
    fprintf(stderr, "%s answered %d\n", call, result);
    _exit(3);
}
#define OK(call) ok(call, #call)

static void *function(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        _exit(2);
    }
    return found;
}

static void open_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(2);
    }
    const struct {
        void *to;
        const char *name;
    } functions[] = {
        {&cuInit, "cuInit"}, {&cuDeviceGet, "cuDeviceGet"}, {&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
        {&cuCtxSetCurrent, "cuCtxSetCurrent"}, {&cuStreamCreate, "cuStreamCreate"}, {&cuEventCreate, "cuEventCreate"},
        {&cuStreamSynchronize, "cuStreamSynchronize"}, {&cuEventRecord, "cuEventRecord"}, {&cuEventQuery, "cuEventQuery"},
        {&cuStreamQuery, "cuStreamQuery"}, {&cuStreamGetFlags, "cuStreamGetFlags"}, {&cuMemAlloc, "cuMemAlloc_v2"},
        {&cuMemcpyHtoD, "cuMemcpyHtoD_v2"}, {&cuMemcpyDtoH, "cuMemcpyDtoH_v2"},
    };
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++) {
        void *found = function(driver, functions[i].name);
        memcpy(functions[i].to, &found, sizeof(found));
    }
}

static void *do_nothing(void *unused)
{
    return unused;
}

static void run(void *(*function)(void *))
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, NULL) || pthread_join(thread, NULL))
        _exit(4);
}

static void *ask_for_stream(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    for (unsigned i = 0;; i++) {
        OK(cuStreamQuery(stream));
        if (!(i % 4096)) /* a restored process needs its number, and threads use numbers up */
            run(do_nothing);
    }
    return NULL;
}

static void *ask_for_event(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    for (unsigned i = 0;; i++) {
        OK(cuEventQuery(event));
        if (!(i % 4096))
            run(do_nothing);
    }
    return NULL;
}

static void *ask_once(void *unused)
{
    unsigned flags;
    (void)unused;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamGetFlags(PER_THREAD, &flags));
    return NULL;
}

static void *ask_anew(void *unused)
{
    (void)unused;
    for (;;) {
        run(ask_once);
        usleep(2000);
    }
    return NULL;
}

int main(int count, char **words)
{
    const char *report = NULL, *until = NULL;
    unsigned iterations = 200;
    for (int i = 1; i + 1 < count; i += 2) {
        if (!strcmp(words[i], "--iterations"))
            iterations = (unsigned)atoi(words[i + 1]);
        else if (!strcmp(words[i], "--report"))
            report = words[i + 1];
        else if (!strcmp(words[i], "--until"))
            until = words[i + 1];
    }
    if (report && !freopen(report, "a", stdout))
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    open_driver();
    int device;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, NON_BLOCKING));
    OK(cuEventCreate(&event, 0));
    OK(cuEventRecord(event, stream));
    OK(cuStreamSynchronize(stream));
    void *(*const spinners[])(void *) = {ask_for_stream, ask_for_event, ask_anew};
    for (size_t i = 0; i < sizeof(spinners) / sizeof(*spinners); i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, spinners[i], NULL))
            return 4;
    }
    uint64_t memory, value = 1, back = 0;
    OK(cuMemAlloc(&memory, sizeof(value)));
    OK(cuMemcpyHtoD(memory, &value, sizeof(value)));
    for (unsigned i = 0; i < iterations; i++) {
        OK(cuMemcpyDtoH(&back, memory, sizeof(back)));
        if (back != value)
            return 5;
        value = value * 6364136223846793005u + 1442695040888963407u;
        OK(cuMemcpyHtoD(memory, &value, sizeof(value)));
        printf("ITERATION %u %016llx\n", i + 1, (unsigned long long)value);
        usleep(20000);
    }
    while (until && access(until, F_OK))
        usleep(20000);
    printf("RESULT %016llx\n", (unsigned long long)value);
    return 0;
}
