#include "held.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FORK_SECONDS 1 /* the longest that a fork waits for a driver call of ours */

static pthread_mutex_t held_lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by held_lock. What a descriptor is stands beside it: the program may close descriptors that are not its own, and
 * open others of the same number. */
static struct held {
    int descriptor;
    dev_t device;
    ino_t inode;
} *list;
static size_t count, capacity;
static __thread bool forking __attribute__((tls_model("initial-exec")));

void phos_held_lock(void)
{
    pthread_mutex_lock(&held_lock);
}

void phos_held_unlock(void)
{
    pthread_mutex_unlock(&held_lock);
}

void phos_held_note(int descriptor)
{
    struct stat status;
    if (fstat(descriptor, &status))
        return;
    if (count == capacity) {
        size_t grown = capacity ? capacity * 2 : 64;
        struct held *moved = realloc(list, grown * sizeof *moved);
        if (!moved)
            return;
        list = moved;
        capacity = grown;
    }
    list[count++] = (struct held){descriptor, status.st_dev, status.st_ino};
}

void phos_held_moved(int descriptor, int now)
{
    for (size_t i = count; i > 0; i--)
        if (list[i - 1].descriptor == descriptor) {
            list[i - 1].descriptor = now;
            break;
        }
}

void phos_held_close(int descriptor)
{
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* close() is where a thread may end */
    phos_held_lock();
    close(descriptor);
    for (size_t i = count; i > 0; i--)
        if (list[i - 1].descriptor == descriptor) {
            list[i - 1] = list[--count];
            break;
        }
    phos_held_unlock();
    pthread_setcancelstate(cancel, &cancel);
}

void phos_held_forking(void)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += FORK_SECONDS;
    forking = pthread_mutex_timedlock(&held_lock, &deadline) == 0;
}

void phos_held_parent(void)
{
    if (forking)
        phos_held_unlock();
    forking = false;
}

void phos_held_child(void)
{
    for (size_t i = 0; forking && i < count; i++) {
        struct stat status;
        if (fstat(list[i].descriptor, &status) == 0 && status.st_dev == list[i].device &&
            status.st_ino == list[i].inode)
            close(list[i].descriptor);
    }
    forking = false;
    count = 0;
    pthread_mutex_init(&held_lock, NULL);
}
