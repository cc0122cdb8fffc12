/* Preloaded before the frontend: its control thread waits before it sends anything, as long as the file $SENDING_HELD_UP is
 * there, and says so by emptying it. */
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

ssize_t sendmsg(int socket, const struct msghdr *message, int flags)
{
    char thread[16] = "";
    const char *file = getenv("SENDING_HELD_UP");
    prctl(PR_GET_NAME, thread);
    if (file && !strcmp(thread, "phos") && !truncate(file, 0))
        while (!access(file, F_OK))
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return syscall(SYS_sendmsg, socket, message, flags);
}
