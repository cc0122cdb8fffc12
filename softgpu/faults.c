/* Named faults (faults.def): counting the visits of each point. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "softgpu.h"

static const char *const names[] = {
#define FAULT(symbol, name, text) name,
#include "faults.def"
#undef FAULT
};

static struct {
    bool set, onwards;
    unsigned long at; /* 0: every visit */
    _Atomic unsigned long visits;
} faults[SG_FAULT_COUNT]; /* all but visits written once, under once */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool any; /* written under once */

static void set(char *item)
{
    char *number = strchr(item, ':');
    if (number)
        *number++ = 0;
    for (int i = 0; i < SG_FAULT_COUNT; i++)
        if (!strcmp(names[i], item)) {
            char *end = NULL;
            faults[i].at = number ? strtoul(number, &end, 10) : 0;
            faults[i].onwards = end && *end == '+';
            if (number && i == SG_FAULT_ALLOC_AFTER) {
                faults[i].at++;
                faults[i].onwards = true;
            }
            faults[i].set = any = true;
            return;
        }
    sg_log("SOFTGPU_FAULTS: there is no fault named '%s' (see softgpu/faults.def)", item);
}

static void read_faults(void)
{
    const char *text = getenv("SOFTGPU_FAULTS");
    char *copy = text && *text ? strdup(text) : NULL, *rest = NULL;
    for (char *item = copy ? strtok_r(copy, ", ", &rest) : NULL; item; item = strtok_r(NULL, ", ", &rest))
        set(item);
    free(copy);
}

bool sg_fault(enum sg_fault fault)
{
    pthread_once(&once, read_faults);
    if (!any || !faults[fault].set)
        return false;
    unsigned long visit = atomic_fetch_add(&faults[fault].visits, 1) + 1;
    if (!faults[fault].at)
        return true;
    return faults[fault].onwards ? visit >= faults[fault].at : visit == faults[fault].at;
}
