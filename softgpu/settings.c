/* The software GPU's settings (SOFTGPU_*), its clock and its one way to speak to a person. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "softgpu.h"

static struct sg_settings settings;                      /* written once, under settings_once */
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

void sg_log(const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    if (length > 0)
        fprintf(stderr, "softgpu: %s\n", line);
}

uint64_t sg_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void sg_sleep_until_ns(uint64_t when)
{
    struct timespec until = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
}

void sg_sleep_ns(uint64_t duration)
{
    if (duration)
        sg_sleep_until_ns(sg_now_ns() + duration);
}

/* A number with an optional K, M, G or T (powers of 1024). A value that is none is named on stderr and not used. */
static double number(const char *name, double preset)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return preset;
    char *end;
    double value = strtod(text, &end);
    static const char suffixes[] = "KMGT";
    const char *suffix = *end ? strchr(suffixes, *end & ~0x20) : NULL;
    if (suffix && *suffix) {
        for (long i = 0; i <= suffix - suffixes; i++)
            value *= 1024;
        end++;
    }
    if (end == text || (*end && strcmp(end, "iB") && strcmp(end, "B") && strcmp(end, "/s")) || !(value >= 0)) {
        sg_log("%s=%s is not a number of at least 0 (K, M, G and T may follow); using %.0f", name, text, preset);
        return preset;
    }
    return value;
}

static void path(char *to, size_t size, const char *name)
{
    const char *text = getenv(name);
    if (text && strlen(text) >= size)
        sg_log("%s=%s is longer than %zu bytes; it holds nothing", name, text, size - 1);
    else
        snprintf(to, size, "%s", text ? text : "");
}

static void settings_read(void)
{
    settings.devices = (int)number("SOFTGPU_DEVICES", 1);
    if (settings.devices > SG_MAX_DEVICES) {
        sg_log("SOFTGPU_DEVICES=%d is more than %d; using %d", settings.devices, SG_MAX_DEVICES, SG_MAX_DEVICES);
        settings.devices = SG_MAX_DEVICES;
    }
    settings.memory = (uint64_t)number("SOFTGPU_MEMORY", (double)((uint64_t)4 << 30));
    settings.copy_bandwidth = number("SOFTGPU_COPY_BANDWIDTH", 0);
    path(settings.copy_hold, sizeof(settings.copy_hold), "SOFTGPU_COPY_HOLD");
    settings.copy_hold_bytes = (uint64_t)number("SOFTGPU_COPY_HOLD_BYTES", 0);
    settings.launch_latency = (unsigned)number("SOFTGPU_LAUNCH_LATENCY", 0);
    settings.queue = (unsigned)number("SOFTGPU_QUEUE", 0);
    settings.registers = (unsigned)number("SOFTGPU_REGISTERS", 0);
    settings.driver_version = (int)number("SOFTGPU_DRIVER_VERSION", 13000);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    settings.threads = (unsigned)number("SOFTGPU_THREADS", cores > 0 ? (double)cores : 1);
    if (settings.threads == 0)
        settings.threads = 1;
    settings.toggle_ms = (unsigned)number("SOFTGPU_TOGGLE_MS", 0);
    settings.poll_us = (unsigned)number("SOFTGPU_POLL_US", 0);
    path(settings.toggle_hold, sizeof(settings.toggle_hold), "SOFTGPU_TOGGLE_HOLD");
    settings.residue = (uint64_t)number("SOFTGPU_RESIDUE", (double)(12u << 20));
    const char *name = getenv("SOFTGPU_NAME");
    snprintf(settings.name, sizeof(settings.name), "%s", name && *name ? name : "PhOS Software GPU");
    const char *machine = getenv("SOFTGPU_MACHINE");
    snprintf(settings.machine, sizeof(settings.machine), "%s", machine ? machine : "");
    settings.machine[strcspn(settings.machine, " /")] = 0; /* it becomes part of a name in /proc/PID/maps */
}

const struct sg_settings *sg_settings(void)
{
    pthread_once(&settings_once, settings_read);
    return &settings;
}
