/* A thousand signals a second, handlers without SA_RESTART: no wait of ours may end early or fail because of them. */
#include "hostile.h"

#include <signal.h>
#include <sys/time.h>

static atomic_int handled;

static void handler(int number)
{
    (void)number;
    atomic_fetch_add(&handled, 1);
}

static void *work(void *argument)
{
    double end = seconds() + duration();
    OK(cuCtxSetCurrent(context));
    for (unsigned char n = 1; seconds() < end; n++) {
        use((size_t)n * 50000 + 17, n);
        if (n % 16 == 0)
            pthread_kill(pthread_self(), SIGUSR1);
    }
    return argument;
}

int main(void)
{
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    start();
    struct itimerval every = {{0, 1000}, {0, 1000}};
    setitimer(ITIMER_REAL, &every, NULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < 3; i++)
        while (pthread_join(threads[i], NULL) == EINTR)
            continue;
    if (atomic_load(&handled) < 10)
        FAIL("there was no storm");
    return 0;
}
