/* Threads are cancelled in the middle of calls, wherever that happens. */
#include "hostile.h"

static void *busy(void *argument)
{
    size_t size = (size_t)argument;
    OK(cuCtxSetCurrent(context));
    for (;;) {
        use(size, 3);
        pthread_testcancel();
    }
    return argument;
}

int main(void)
{
    enum { THREADS = 4 };
    start();
    for (double end = seconds() + duration(); seconds() < end;) {
        pthread_t threads[THREADS];
        for (size_t i = 0; i < THREADS; i++) /* more than is kept for the next allocation */
            if (pthread_create(&threads[i], NULL, busy, (void *)((i + 1) * (3u << 20))))
                FAIL("no thread");
        usleep((useconds_t)(rand() % 3000));
        for (int i = 0; i < THREADS; i++)
            pthread_cancel(threads[i]);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        use(100000, 7);
    }
    return 0;
}
