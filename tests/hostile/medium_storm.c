/* Threads share slabs: all sizes from one unit to two slabs, in a GPU so small that it runs out again and again. What one
 * holds another must never see, running out is the only error, and in the end all memory can be had in one piece. */
#include "hostile.h"

#define THREADS 6
#define HELD 12
#define UNIT ((size_t)2 << 20)
#define OUT_OF_MEMORY 2

static double end;
static int (*cuMemGetInfo)(size_t *, size_t *);
static atomic_ulong refused;

static void *storm(void *argument)
{
    struct {
        pointer address;
        size_t size;
    } held[HELD] = {{0, 0}};
    unsigned char mine = (unsigned char)((uintptr_t)argument + 1), seen[2];
    unsigned seed = mine;
    OK(cuCtxSetCurrent(context));
    while (seconds() < end) {
        int at = rand_r(&seed) % HELD;
        if (held[at].size) {
            OK(cuMemcpyDtoH(&seen[0], held[at].address, 1));
            OK(cuMemcpyDtoH(&seen[1], held[at].address + held[at].size - 1, 1));
            if (seen[0] != mine || seen[1] != mine)
                FAIL("thread %d found %d and %d in its memory", mine, seen[0], seen[1]);
            OK(cuMemFree(held[at].address));
            held[at].size = 0;
            continue;
        }
        size_t size = UNIT / 2 + 1 + (size_t)rand_r(&seed) % ((rand_r(&seed) % 20 ? 8 : 32) * UNIT);
        int code = cuMemAlloc(&held[at].address, size);
        if (code == OUT_OF_MEMORY) {
            atomic_fetch_add(&refused, 1);
            continue;
        }
        OK(code);
        held[at].size = size;
        OK(cuMemsetD8(held[at].address, mine, 1));
        OK(cuMemsetD8(held[at].address + size - 1, mine, 1));
        OK(cuCtxSynchronize());
    }
    for (int at = 0; at < HELD; at++)
        if (held[at].size)
            OK(cuMemFree(held[at].address));
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    pointer everything;
    size_t free_bytes, total;
    setenv("SOFTGPU_MEMORY", "256M", 1);
    start();
    *(void **)&cuMemGetInfo = dlsym(driver, "cuMemGetInfo_v2");
    OK(cuMemGetInfo(&free_bytes, &total));
    end = seconds() + duration();
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, storm, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (!atomic_load(&refused))
        FAIL("memory never ran out: nothing was tested");
    OK(cuMemAlloc(&everything, free_bytes));
    OK(cuMemFree(everything));
    return 0;
}
