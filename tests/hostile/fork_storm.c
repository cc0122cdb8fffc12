/* Forks from several threads without pause, before and after the driver is started; children call CUDA and end anyhow. */
#include "hostile.h"

static double end;

static void *fork_on(void *unused)
{
    for (int i = 0; seconds() < end; i++) {
        pid_t child = fork();
        if (child == 0) {
            pointer p;
            cuMemAlloc(&p, 1000); /* whatever it answers, it must return */
            cuCtxSynchronize();
            if (i % 3 == 0)
                execl("/bin/true", "true", NULL);
            i % 3 == 1 ? _exit(0) : exit(0);
        }
        int status;
        if (child > 0 && (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status)))
            FAIL("a child ended with %x", status);
    }
    return unused;
}

int main(void)
{
    pthread_t threads[3];
    open_driver();
    pid_t early = fork();
    if (early == 0) {
        start();
        use(5 << 20, 3);
        _exit(0);
    }
    int status;
    waitpid(early, &status, 0);
    if (status)
        FAIL("the child forked before cuInit ended with %x", status);
    start();
    end = seconds() + duration();
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, fork_on, NULL);
    for (unsigned char n = 1; seconds() < end; n++)
        use((size_t)n * 40000 + 1, n);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
