/* A C program that asks for a checkpoint of itself and counts on meanwhile. CUDA is loaded when it runs: only phos.h is needed to
 * build it. */
#define _DEFAULT_SOURCE
#include <phos.h>

#include <stdio.h>
#include <unistd.h>

typedef int init_function(unsigned);
typedef int device_function(int *, int);
typedef int retain_function(void **, int);
typedef int current_function(void *);

int main(int count, char **words)
{
    if (count != 2)
        return 2;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    init_function *init;
    device_function *get;
    retain_function *retain;
    current_function *set_current;
    *(void **)&init = driver ? dlsym(driver, "cuInit") : NULL;
    *(void **)&get = driver ? dlsym(driver, "cuDeviceGet") : NULL;
    *(void **)&retain = driver ? dlsym(driver, "cuDevicePrimaryCtxRetain") : NULL;
    *(void **)&set_current = driver ? dlsym(driver, "cuCtxSetCurrent") : NULL;
    int device;
    void *context;
    if (!init || !get || !retain || !set_current || init(0) || get(&device, 0) || retain(&context, device) ||
        set_current(context))
        return 3;
    usleep(500000); /* until phosd knows of the process */
    uint64_t request;
    int code = phos_checkpoint(words[1], "stop", PHOS_WAIT_IF_BUSY, &request);
    printf("ASKED %s\n", phos_code_text(code));
    int number = 0;
    while (number < 100) {
        usleep(5000);
        number++;
    }
    struct phos_result result = {.size = sizeof result};
    if (code == PHOS_OK && phos_checkpoint_wait(request, 60000, &result) == PHOS_OK)
        printf("CHECKPOINT %s %s\n", result.state == PHOS_COMMITTED ? "committed" : "not committed", result.error);
    printf("RESULT %d\n", number);
    return 0;
}
