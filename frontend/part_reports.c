/* PyTorch's caching allocator reports each part of a segment to a profiler, as it hands it out and as it comes back
 * (c10::reportMemoryUsageToProfiler, declared in c10/core/Allocator.h; called in c10/cuda/CUDACachingAllocator.cpp). This stands in front
 * of that function, which is called whether there is a profiler or not.
 *
 * Training programs ask for memory hundreds of times a step: what is reported is written down, one behind the other, which costs
 * least, and the control thread has it put into a table when there is much. */
#include "part_reports.h"
#include "control.h"
#include "parts.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CUDA_DEVICE 1 /* c10::DeviceType::CUDA */
#define REPORT "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
#define REPORTS 8192
#define REPORTS_A_LINE (64 / sizeof(struct phos_part_report))

/* c10::Device; passed in a register like any struct of two bytes. */
struct device {
    int8_t type, index;
};
typedef void report_function(void *address, int64_t size, size_t allocated, size_t reserved, struct device device);

/* Two sheets: one is written to while what is on the other goes into the table. Guarded by `writing`, which is never held for
 * longer than it takes to write one down; a full sheet, while it is `full`, by parts.c's parts_lock, which is taken before `writing`. */
static struct phos_part_report sheets[2][REPORTS] __attribute__((aligned(64)));
/* Whatever else a report needs lies in one cache line: a training step leaves none of it in the cache between two of them. */
static struct {
    atomic_flag writing;
    atomic_bool wanted; /* set before `original` */
    unsigned sheet;     /* which is written to */
    size_t written;     /* on that one */
    size_t full;        /* how many are on the other one and not in the table yet; 0: it is empty */
    _Atomic(report_function *) original; /* PyTorch's own; NULL: not looked for yet */
} desk __attribute__((aligned(64)));

static bool took_it_to_write(void)
{
    return !atomic_flag_test_and_set_explicit(&desk.writing, memory_order_acquire);
}

static __attribute__((noinline, cold)) void wait_to_write(void)
{
    for (unsigned tries = 1; !took_it_to_write(); tries++)
        /* Whoever is writing may be waiting for this very processor, which a thread with a real-time priority only gives away
         * asleep. No function of the C library's does that without being a place where threads are cancelled. */
        if (tries % 1024 == 0)
            syscall(SYS_nanosleep, &(struct timespec){.tv_nsec = 20000}, NULL);
}

static inline __attribute__((always_inline)) void begin_writing(void)
{
    if (__builtin_expect(!took_it_to_write(), 0))
        wait_to_write();
}

static void end_writing(void)
{
    atomic_flag_clear_explicit(&desk.writing, memory_order_release);
}

/* With `writing`: the sheet is full, the other one will be written to. False: that one is not in the table yet. */
static bool turn_over(void)
{
    if (desk.full)
        return false;
    desk.full = desk.written;
    desk.written = 0;
    desk.sheet ^= 1;
    return true;
}

bool phos_part_reports_waiting(void)
{
    begin_writing();
    bool some = desk.full;
    end_writing();
    return some;
}

const struct phos_part_report *phos_part_reports_take(bool all, size_t *count)
{
    begin_writing();
    bool some = desk.full || (all && turn_over() && desk.full);
    const struct phos_part_report *reports = sheets[desk.sheet ^ 1];
    *count = desk.full;
    end_writing();
    return some ? reports : NULL;
}

void phos_part_reports_taken(void)
{
    begin_writing();
    desk.full = 0;
    end_writing();
}

/* With `writing`, which ends. */
static void put_down(struct phos_part_report report)
{
    struct phos_part_report *place = &sheets[desk.sheet][desk.written++];
    *place = report;
    /* The next one finds its cache line there: a store that waits for its line holds up the next atomic operation, and PyTorch's
     * mutex is one. */
    if (desk.written % REPORTS_A_LINE == 0)
        __builtin_prefetch(place + 1, 1);
    end_writing();
}

/* With `writing`, which ends: the sheet is full. */
static __attribute__((noinline, cold)) void note_overleaf(struct phos_part_report report)
{
    bool turned = false;
    while (desk.written == REPORTS && !(turned = turn_over())) {
        end_writing(); /* faster than the control thread, or there is none */
        phos_parts_settle();
        begin_writing();
    }
    put_down(report);
    if (turned)
        phos_control_kick();
}

static inline __attribute__((always_inline)) void note(struct phos_part_report report)
{
    begin_writing();
    if (__builtin_expect(desk.written == REPORTS, 0))
        note_overleaf(report);
    else
        put_down(report);
}

void phos_part_reports_note(struct phos_part_report report)
{
    note(report);
}

void phos_part_reports_forked(void)
{
    end_writing();
    desk.written = desk.full = 0;
}

/* ---- the function that PyTorch calls */

static void nobody(void *address, int64_t size, size_t allocated, size_t reserved, struct device device)
{
    (void)address, (void)size, (void)allocated, (void)reserved, (void)device;
}

/* The first time. Whoever else does this as well finds the same: what the library that calls would without us. Its name may be any,
 * and it may have been loaded for itself (RTLD_LOCAL). */
static __attribute__((noinline, cold)) report_function *look_for_original(const void *caller)
{
    const char *value = getenv("PHOS_PYTORCH");
    atomic_store_explicit(&desk.wanted, !value || strcmp(value, "off"), memory_order_relaxed);
    Dl_info info;
    struct link_map *map = NULL;
    bool known = dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) && map && *map->l_name; /* else it is the program */
    void *library = known ? dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD) : RTLD_NEXT;
    report_function *found = library ? (report_function *)dlsym(library, REPORT) : NULL;
    found = found ? found : nobody;
    atomic_store_explicit(&desk.original, found, memory_order_release);
    return found;
}

extern report_function phos_report __asm__(REPORT) __attribute__((visibility("default")));

/* hot: it lies with the hooks of launches, between which it is called. Without prfchw, a prefetch does not ask for the line to
 * write to it, and the store would wait all the same while another processor has it; processors that lack it do nothing then. */
#if defined(__x86_64__)
__attribute__((target("prfchw")))
#endif
__attribute__((hot)) void phos_report(void *address, int64_t size, size_t allocated, size_t reserved, struct device device)
{
    report_function *original = atomic_load_explicit(&desk.original, memory_order_acquire);
    if (__builtin_expect(!original, 0))
        original = look_for_original(__builtin_return_address(0));
    if (device.type == CUDA_DEVICE && address && size && atomic_load_explicit(&desk.wanted, memory_order_relaxed))
        note((struct phos_part_report){(uint64_t)(uintptr_t)address, size});
    original(address, size, allocated, reserved, device);
}
