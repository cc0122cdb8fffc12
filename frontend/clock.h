/* Time. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t phos_clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Since some moment in the past; a restored process may be in a time namespace of its own. */
static inline uint64_t phos_now_ns(void)
{
    return phos_clock_ns(CLOCK_MONOTONIC);
}

static inline void phos_sleep_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
}
