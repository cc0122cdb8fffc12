/* Threads that live for one call, in three generations at a time; some end by pthread_exit out of a destructor's reach. */
#include "hostile.h"

static double end;

static void *once(void *argument)
{
    OK(cuCtxSetCurrent(context));
    use(1000 + (size_t)(uintptr_t)argument, (unsigned char)(uintptr_t)argument);
    if ((uintptr_t)argument & 1)
        pthread_exit(NULL);
    return NULL;
}

static void *breed(void *argument)
{
    for (uintptr_t n = (uintptr_t)argument; seconds() < end; n += 7) {
        pthread_t child;
        if (pthread_create(&child, NULL, once, (void *)n))
            continue;
        if (n % 5)
            pthread_join(child, NULL);
        else
            pthread_detach(child);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[3];
    start();
    end = seconds() + duration();
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, breed, (void *)(i * 100));
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    usleep(100000); /* the detached ones */
    return 0;
}
