#include "descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

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
    int floor = table_size() - PHOS_DESCRIPTORS_AT_A_TIME;
    return raise_to(low, floor > 0 && floor < PHOS_DESCRIPTOR_FLOOR ? floor : PHOS_DESCRIPTOR_FLOOR);
}

static struct rlimit own_limit; /* the program's; while lifted */
static atomic_bool lifted;      /* a child forked at any moment finds it as it was then */

void phos_descriptors_lift(void)
{
    struct rlimit now;
    if (atomic_load(&lifted) || getrlimit(RLIMIT_NOFILE, &now) || now.rlim_cur >= now.rlim_max)
        return;
    own_limit = now;
    now.rlim_cur = now.rlim_max;
    atomic_store(&lifted, true); /* before: a child forked just then lowers it */
    if (setrlimit(RLIMIT_NOFILE, &now))
        atomic_store(&lifted, false);
}

void phos_descriptors_lower(void)
{
    struct rlimit now;
    /* Not if the program has set it meanwhile. */
    if (atomic_load(&lifted) && getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == own_limit.rlim_max &&
        now.rlim_max == own_limit.rlim_max)
        setrlimit(RLIMIT_NOFILE, &own_limit);
    atomic_store(&lifted, false);
}

size_t phos_descriptors_left(size_t enough)
{
    struct rlimit now;
    if (getrlimit(RLIMIT_NOFILE, &now) || now.rlim_max == RLIM_INFINITY)
        return enough;
    size_t table = (size_t)table_size(), limit = now.rlim_max, there = 0;
    if (table && table + enough <= limit)
        return enough;
    DIR *folder = opendir("/proc/self/fd");
    if (!folder)
        return 0;
    while (readdir(folder))
        there++;
    closedir(folder);
    there -= 3; /* ".", "..", and the folder's own */
    size_t left = there < limit ? limit - there : 0;
    return left < enough ? left : enough;
}
