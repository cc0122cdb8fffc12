/* system, popen and posix_spawn from threads that also use the GPU. */
#include "hostile.h"

static double end;

static void *spawn(void *argument)
{
    OK(cuCtxSetCurrent(context));
    for (unsigned char n = 1; seconds() < end; n++) {
        if (system("exit 0"))
            FAIL("system failed");
        FILE *pipe = popen("echo hello", "r");
        char line[16] = "";
        if (!pipe || !fgets(line, sizeof line, pipe) || strcmp(line, "hello\n") || pclose(pipe))
            FAIL("popen failed");
        use((size_t)n * 1000 + 1, n);
    }
    return argument;
}

int main(void)
{
    pthread_t threads[2];
    start();
    end = seconds() + duration();
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, spawn, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
