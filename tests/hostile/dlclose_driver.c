/* Opens and closes the driver library over and over, keeps pointers across, and asks dlsym for what is not there. */
#include "hostile.h"

int main(void)
{
    for (int i = 0; i < 50; i++) {
        open_driver();
        if (dlsym(driver, "cuDoesNotExist") || !dlerror())
            FAIL("a symbol that does not exist was found, or its absence not said");
        dlclose(driver);
    }
    start();
    for (double end = seconds() + duration(); seconds() < end;) {
        void *again = dlopen("libcuda.so.1", RTLD_LAZY);
        int (*allocate)(pointer *, size_t) = (int (*)(pointer *, size_t))dlsym(again, "cuMemAlloc_v2");
        pointer p;
        OK(allocate(&p, 4096));
        dlclose(again);
        OK(cuMemFree(p));
        use(100000, 9);
    }
    return 0;
}
