/* Prints, for a table of descriptors that has not grown: its size, where a descriptor is put while somebody waits, the
 * size after that, where it is put then, and the size at the end. See test_frontend_descriptors.py. */
#define _GNU_SOURCE
#include "descriptors.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int size(void)
{
    char line[256];
    int found = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, "FDSize:", 7))
            found = atoi(line + 7);
    if (file)
        fclose(file);
    return found;
}

int main(void)
{
    int first = size(), low = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int near = phos_descriptor_raise_at_once(low), after = size();
    bool moved = near != low && fcntl(low, F_GETFD) < 0 && fcntl(near, F_GETFD) == FD_CLOEXEC;
    int high = phos_descriptor_raise(near);
    moved &= fcntl(near, F_GETFD) < 0 && fcntl(high, F_GETFD) == FD_CLOEXEC;
    printf("%d %d %d %d %d %d %d\n", first, near, after, high, size(), moved, phos_descriptor_raise(high) == high);
}
