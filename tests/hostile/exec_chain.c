/* Replaces itself by itself while it holds memory: nothing of ours may leak through, no descriptor, no thread. */
#include "hostile.h"

#include <dirent.h>

static int descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

int main(int count, char **arguments)
{
    int left = count > 1 ? atoi(arguments[1]) : 8, before = count > 2 ? atoi(arguments[2]) : descriptors();
    if (descriptors() != before)
        FAIL("%d descriptors after exec, %d before", descriptors(), before);
    start();
    use(3 << 20, 4);
    pointer p;
    OK(cuMemAlloc(&p, 5 << 20));
    usleep((useconds_t)(duration() * 1e6 / 10));
    if (!left)
        return 0;
    char next[16], first[16];
    snprintf(next, sizeof next, "%d", left - 1);
    snprintf(first, sizeof first, "%d", before);
    execl("/proc/self/exe", arguments[0], next, first, NULL);
    return 1;
}
