/* One log call for the frontend. Lives inside other people's processes: quiet unless something is wrong, and never
 * through stdio (the application may hold its locks, or be in the middle of exit). PHOS_LOG=warn|info|debug. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>

enum phos_log_level { PHOS_LOG_WARN, PHOS_LOG_INFO, PHOS_LOG_DEBUG };

/* Replaceable by tests; NULL means standard error. */
typedef void phos_log_sink(enum phos_log_level level, const char *line);
extern _Atomic(phos_log_sink *) phos_log_to;

void phos_log_init(void);
bool phos_log_wanted(enum phos_log_level level);
__attribute__((format(printf, 2, 3))) void phos_log(enum phos_log_level level, const char *format, ...);

#define phos_debug(...) \
    do { \
        if (phos_log_wanted(PHOS_LOG_DEBUG)) \
            phos_log(PHOS_LOG_DEBUG, __VA_ARGS__); \
    } while (0)
#define phos_warn(...) phos_log(PHOS_LOG_WARN, __VA_ARGS__)
/* The same place warns once in the life of a process. */
#define phos_warn_once(...) \
    do { \
        static atomic_flag warned_ = ATOMIC_FLAG_INIT; \
        if (!atomic_flag_test_and_set(&warned_)) \
            phos_log(PHOS_LOG_WARN, __VA_ARGS__); \
    } while (0)
