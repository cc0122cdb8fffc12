/* Many threads allocate and free all sizes; what one holds another must never see. */
#include "hostile.h"

#define THREADS 12
#define HELD 40

static double end;

static void *storm(void *argument)
{
    struct {
        pointer address;
        size_t size;
    } held[HELD] = {{0, 0}};
    unsigned char mine = (unsigned char)((uintptr_t)argument + 1), seen[64];
    unsigned seed = mine;
    OK(cuCtxSetCurrent(context));
    while (seconds() < end) {
        int at = rand_r(&seed) % HELD;
        if (held[at].size) {
            size_t length = held[at].size < sizeof seen ? held[at].size : sizeof seen;
            OK(cuMemcpyDtoH(seen, held[at].address + held[at].size - length, length));
            for (size_t i = 0; i < length; i++)
                if (seen[i] != mine)
                    FAIL("thread %d found a byte of thread %d", mine, seen[i]);
            OK(cuMemFree(held[at].address));
            held[at].size = 0;
            continue;
        }
        held[at].size = (size_t)1 << (rand_r(&seed) % 22);
        held[at].size += (size_t)rand_r(&seed) % held[at].size;
        OK(cuMemAlloc(&held[at].address, held[at].size));
        OK(cuMemsetD8(held[at].address, mine, held[at].size));
    }
    for (int at = 0; at < HELD; at++)
        if (held[at].size)
            OK(cuMemFree(held[at].address));
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    start();
    end = seconds() + duration();
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, storm, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
