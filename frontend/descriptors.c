#include "descriptors.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OURS 8 /* how many we need at a time, and some */

static int raise_to(int low, int floor)
{
    int high = low < floor ? fcntl(low, F_DUPFD_CLOEXEC, floor) : -1;
    if (high < 0)
        return low;
    close(low);
    return high;
}

int phos_descriptor_raise(int low)
{
    return raise_to(low, PHOS_DESCRIPTOR_FLOOR);
}

/* How many descriptors the table has room for as it is; 0 if that cannot be told. */
static int table_size(void)
{
    char text[2048];
    int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    ssize_t length = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0)
        close(file);
    text[length > 0 ? length : 0] = 0;
    const char *at = strstr(text, "\nFDSize:");
    return at ? atoi(at + 8) : 0;
}

int phos_descriptor_raise_at_once(int low)
{
    int floor = table_size() - OURS;
    return raise_to(low, floor > 0 && floor < PHOS_DESCRIPTOR_FLOOR ? floor : PHOS_DESCRIPTOR_FLOOR);
}
