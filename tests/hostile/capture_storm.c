/* Captures without pause in one thread, allocation and quiesces beside them: no capture may be spoilt. */
#include "hostile.h"

static double end;

static void *capture(void *argument)
{
    void *stream, *graph;
    pointer p;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&p, 100000));
    while (seconds() < end) {
        OK(cuStreamBeginCapture(stream, 2)); /* relaxed */
        for (int i = 0; i < 5; i++)
            OK(cuMemsetD8Async(p, 1, 100000, stream));
        OK(cuStreamEndCapture(stream, &graph));
        OK(cuGraphDestroy(graph));
        usleep(500);
    }
    OK(cuMemFree(p));
    OK(cuStreamDestroy(stream));
    return argument;
}

int main(void)
{
    pthread_t thread;
    start();
    end = seconds() + duration();
    pthread_create(&thread, NULL, capture, NULL);
    while (seconds() < end) {
        pointer p;
        OK(cuMemAlloc(&p, 3 << 20));
        OK(cuMemFree(p));
        OK(cuMemAlloc(&p, 300));
        OK(cuMemFree(p));
    }
    pthread_join(thread, NULL);
    return 0;
}
