/* See thread.h. */
#define _GNU_SOURCE
#include "thread.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

int phos_thread_start(void *(*main)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, (size_t)512 << 10);
    int error = pthread_create(&thread, &attributes, main, argument);
    if (error) { /* thread-local storage of large programs does not fit a small stack */
        pthread_attr_setstacksize(&attributes, (size_t)8 << 20);
        error = pthread_create(&thread, &attributes, main, argument);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}
