/* Closes every descriptor it does not know, as daemons do, and opens files in their place: nothing of ours may be written
 * to them. */
#include "hostile.h"

#include <fcntl.h>
#include <sys/stat.h>

int main(void)
{
    start();
    double end = seconds() + duration();
    for (unsigned char n = 1; seconds() < end; n++) {
        /* The software GPU holds descriptors of its own that stand for the device; those are not ours to close. */
        for (int d = 512; d < 1024; d++) {
            char path[64], target[64];
            snprintf(path, sizeof path, "/proc/self/fd/%d", d);
            ssize_t length = readlink(path, target, sizeof target - 1);
            if (length <= 0)
                continue;
            target[length] = 0;
            if (!strncmp(target, "socket:", 7)) {
                int file = open("/tmp", O_TMPFILE | O_RDWR, 0600);
                dup2(file, d);
                close(file);
            }
        }
        use((size_t)n * 30000 + 5, n);
        for (int d = 512; d < 1024; d++) {
            struct stat status;
            if (fstat(d, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0) {
                if (status.st_size)
                    FAIL("%ld bytes were written to a file of the application", (long)status.st_size);
                close(d);
            }
        }
        usleep(5000);
    }
    return 0;
}
