/* Ends by exit, in the middle of other threads' calls, from a thread that is not the first. */
#include "hostile.h"

static void *busy(void *argument)
{
    OK(cuCtxSetCurrent(context));
    for (unsigned char n = 1;; n++) {
        pointer p;
        if (cuMemAlloc(&p, (size_t)n * 30000) || cuMemsetD8(p, n, 100) || cuMemFree(p))
            pause(); /* the driver has shut down: that is all it may do */
    }
    return argument;
}

static void *quit(void *unused)
{
    usleep((useconds_t)(duration() * 1e6));
    exit(0);
    return unused;
}

int main(void)
{
    pthread_t thread;
    start();
    for (int i = 0; i < 3; i++)
        pthread_create(&thread, NULL, busy, NULL);
    pthread_create(&thread, NULL, quit, NULL);
    pause();
    return 1;
}
