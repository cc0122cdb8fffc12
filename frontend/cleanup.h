/* Scope guards: a variable marked with one of these is put away when its scope ends, however it ends. */
#pragma once
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static inline void phos_cleanup_fd(int *descriptor)
{
    if (*descriptor >= 0)
        close(*descriptor);
}
static inline void phos_cleanup_free(void *pointer)
{
    free(*(void **)pointer);
}
static inline void phos_cleanup_unlock(pthread_mutex_t **lock)
{
    if (*lock)
        pthread_mutex_unlock(*lock);
}
static inline pthread_mutex_t *phos_lock_taken(pthread_mutex_t *lock)
{
    pthread_mutex_lock(lock);
    return lock;
}

#define PHOS_CLOSES __attribute__((cleanup(phos_cleanup_fd)))
#define PHOS_FREES __attribute__((cleanup(phos_cleanup_free)))
#define PHOS_LOCKED_(lock, line) \
    __attribute__((cleanup(phos_cleanup_unlock), unused)) pthread_mutex_t *locked_##line = phos_lock_taken(lock)
#define PHOS_LOCKED__(lock, line) PHOS_LOCKED_(lock, line)
/* Holds the mutex until the scope ends. */
#define PHOS_LOCKED(lock) PHOS_LOCKED__(lock, __LINE__)
