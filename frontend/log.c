#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic(phos_log_sink *) phos_log_to;
static _Atomic int log_level = PHOS_LOG_WARN; /* relaxed: a level that changes late loses a line, no more */

void phos_log_init(void)
{
    const char *wanted = getenv("PHOS_LOG");
    if (!wanted)
        return;
    if (!strcmp(wanted, "debug"))
        atomic_store_explicit(&log_level, PHOS_LOG_DEBUG, memory_order_relaxed);
    else if (!strcmp(wanted, "info"))
        atomic_store_explicit(&log_level, PHOS_LOG_INFO, memory_order_relaxed);
}

bool phos_log_wanted(enum phos_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

void phos_log(enum phos_log_level level, const char *format, ...)
{
    if (!phos_log_wanted(level))
        return;
    int saved = errno;
    char line[640];
    int used = snprintf(line, sizeof line, "phos[%d]: ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    size_t length = (size_t)used + (size_t)(more < 0 ? 0 : more);
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    line[length] = 0;
    phos_log_sink *sink = atomic_load(&phos_log_to);
    if (sink)
        sink(level, line);
    else if (write(STDERR_FILENO, line, length) < 0) {
        /* Nobody to tell. */
    }
    errno = saved;
}
