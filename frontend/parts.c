/* PyTorch's caching allocator reports each part of a segment to a profiler, as it hands it out and as it comes back
 * (c10::reportMemoryUsageToProfiler, declared in c10/core/Allocator.h; called in c10/cuda/CUDACachingAllocator.cpp). This stands in front
 * of that function, which is called whether there is a profiler or not.
 *
 * Training programs ask for memory hundreds of times a step: what is reported is written down, one behind the other, which costs
 * least, and the control thread puts it into a hash table when there is much. Only when somebody wants to know what
 * holds an address, in a window, it is put in order, and kept so until phos_parts_rest(). */
#include "parts.h"
#include "cleanup.h"
#include "control.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SEGMENT_SHIFT 21
#define SEGMENT_LEAST ((uint64_t)1 << SEGMENT_SHIFT) /* what PyTorch asks the driver for at once, at the least */
#define CUDA_DEVICE 1 /* c10::DeviceType::CUDA */
#define FIRST_PLACES ((size_t)1 << 12)
#define REPORT "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"

/* c10::Device; passed in a register like any struct of two bytes. */
struct device {
    int8_t type, index;
};
typedef void report_function(void *address, int64_t size, size_t allocated, size_t reserved, struct device device);

struct part {
    uint64_t begin, size; /* begin 0: none */
    uint64_t number;      /* a later one is right about memory that both claim: some come back without a report */
};

struct report {
    uint64_t address; /* 0: of a capture, which begins (size 1) or has ended (-1) */
    int64_t size;     /* below 0: it came back */
};

#define REPORTS 8192
#define REPORTS_A_LINE (64 / sizeof(struct report))
/* Two sheets: one is written to while what is on the other goes into the table. Guarded by `writing`, which is never held for
 * longer than it takes to write one down; a full sheet, while it is `full`, by parts_lock. */
static struct report sheets[2][REPORTS] __attribute__((aligned(64)));
/* Whatever else a report needs lies in one cache line: a training step leaves none of it in the cache between two of them. */
static struct {
    atomic_flag writing;
    atomic_bool wanted; /* set before `original` */
    unsigned sheet;     /* which is written to */
    size_t written;     /* on that one */
    size_t full;        /* how many are on the other one and not in the table yet; 0: it is empty */
    _Atomic(report_function *) original; /* PyTorch's own; NULL: not looked for yet */
} desk __attribute__((aligned(64)));

static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER; /* taken before `writing`; guards all that follows */
static struct part *places; /* a hash table by `begin`, linear probing, at most half full */
static size_t place_count, part_count;
static uint64_t numbers;
static bool lost;            /* out of host memory once: nothing is known any more */
static struct part *ordered; /* NULL: not now */
static size_t ordered_count, ordered_room;
static int64_t capturing;    /* captures under way, as far as the reports in the table go */
static uint64_t *captured;   /* in order: where parts were handed out meanwhile, in units of SEGMENT_LEAST */
static size_t captured_count, captured_room;

/* ---- the hash table, with the lock held */

static size_t home(uint64_t begin)
{
    return (size_t)(begin * 0x9e3779b97f4a7c15ull >> 32) & (place_count - 1);
}

static size_t place_of(uint64_t begin)
{
    size_t at = home(begin);
    while (places[at].begin && places[at].begin != begin)
        at = (at + 1) & (place_count - 1);
    return at;
}

static bool grow(void)
{
    struct part *former = places;
    size_t count = place_count, larger = count ? count * 2 : FIRST_PLACES;
    struct part *grown = calloc(larger, sizeof *grown);
    if (!grown)
        return false;
    places = grown;
    place_count = larger;
    for (size_t i = 0; i < count; i++)
        if (former[i].begin)
            places[place_of(former[i].begin)] = former[i];
    free(former);
    return true;
}

static void remove_place(size_t hole)
{
    places[hole].begin = 0;
    part_count--;
    for (size_t at = (hole + 1) & (place_count - 1); places[at].begin; at = (at + 1) & (place_count - 1)) {
        size_t wanted = home(places[at].begin);
        /* It may stay where its home lies behind the hole. */
        if (((at - wanted) & (place_count - 1)) < ((at - hole) & (place_count - 1)))
            continue;
        places[hole] = places[at];
        places[at].begin = 0;
        hole = at;
    }
}

static void forget_all(void)
{
    free(places);
    free(ordered);
    free(captured);
    places = ordered = NULL;
    captured = NULL;
    place_count = part_count = ordered_count = ordered_room = captured_count = captured_room = 0;
}

/* ---- in order, with the lock held: by address, none over another */

/* Index of the first part that begins behind the address. */
static size_t behind(uint64_t address)
{
    size_t low = 0, high = ordered_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ordered[middle].begin > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static uint64_t end_of(const struct part *part)
{
    return part->begin + part->size;
}

/* Puts a part that is newer than all others in its place, over which they lose what they claim. */
static bool put_in_order(struct part part)
{
    size_t to = behind(part.begin), from = to;
    while (from && end_of(&ordered[from - 1]) > part.begin)
        from--;
    while (to < ordered_count && ordered[to].begin < end_of(&part))
        to++;
    if (from == to && ordered_count == ordered_room) {
        size_t room = ordered_room * 2;
        struct part *grown = realloc(ordered, room * sizeof *grown);
        if (!grown)
            return false;
        ordered = grown;
        ordered_room = room;
    }
    memmove(&ordered[from + 1], &ordered[to], (ordered_count - to) * sizeof *ordered);
    ordered_count = ordered_count - (to - from) + 1;
    ordered[from] = part;
    return true;
}

static int by_begin(const void *one, const void *other)
{
    const struct part *a = one, *b = other;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

static bool put_all_in_order(void)
{
    ordered_room = part_count + 64;
    ordered_count = 0;
    if (!(ordered = malloc(ordered_room * sizeof *ordered)))
        return false;
    for (size_t i = 0; i < place_count; i++)
        if (places[i].begin)
            ordered[ordered_count++] = places[i];
    qsort(ordered, ordered_count, sizeof *ordered, by_begin);
    size_t kept = 0;
    for (size_t i = 0; i < ordered_count; i++) {
        struct part next = ordered[i];
        bool older = false;
        while (kept && !older && end_of(&ordered[kept - 1]) > next.begin) {
            older = ordered[kept - 1].number > next.number;
            kept -= !older;
        }
        if (!older)
            ordered[kept++] = next;
    }
    ordered_count = kept;
    return true;
}

/* Index of the first that is not below a unit. */
static size_t captured_from(uint64_t unit)
{
    size_t low = 0, high = captured_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (captured[middle] < unit)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool mark_captured(uint64_t begin)
{
    uint64_t unit = begin >> SEGMENT_SHIFT;
    size_t at = captured_from(unit);
    if (at < captured_count && captured[at] == unit)
        return true;
    if (captured_count == captured_room) {
        size_t room = captured_room ? captured_room * 2 : 64;
        uint64_t *grown = realloc(captured, room * sizeof *grown);
        if (!grown)
            return false;
        captured = grown;
        captured_room = room;
    }
    memmove(&captured[at + 1], &captured[at], (captured_count - at) * sizeof *captured);
    captured[at] = unit;
    captured_count++;
    return true;
}

static void unmark_captured(uint64_t begin, uint64_t size)
{
    /* Of whole units: one that is not gone as a whole may be another segment's as well. */
    size_t from = captured_from((begin + SEGMENT_LEAST - 1) >> SEGMENT_SHIFT), to = captured_from((begin + size) >> SEGMENT_SHIFT);
    if (from >= to)
        return;
    memmove(&captured[from], &captured[to], (captured_count - to) * sizeof *captured);
    captured_count -= to - from;
}

static void apply(uint64_t begin, int64_t size)
{
    if (!begin) {
        capturing += size;
        return;
    }
    if (lost)
        return;
    if (size > 0) {
        if ((part_count >= place_count / 2 && !grow()) || (capturing > 0 && !mark_captured(begin))) {
            lost = true;
            forget_all();
            return;
        }
        struct part *place = &places[place_of(begin)];
        part_count += !place->begin;
        *place = (struct part){begin, (uint64_t)size, ++numbers};
        if (ordered && !put_in_order(*place)) {
            free(ordered);
            ordered = NULL;
        }
        return;
    }
    size_t at = place_count ? place_of(begin) : 0;
    if (!place_count || !places[at].begin)
        return;
    uint64_t number = places[at].number;
    remove_place(at);
    size_t next = ordered ? behind(begin) : 0;
    if (next && ordered[next - 1].number == number) {
        memmove(&ordered[next - 1], &ordered[next], (ordered_count - next) * sizeof *ordered);
        ordered_count--;
    }
}

/* ---- what is written down, without the lock but where it says so */

static bool may_write(void)
{
    return !atomic_flag_test_and_set_explicit(&desk.writing, memory_order_acquire);
}

static __attribute__((noinline, cold)) void wait_to_write(void)
{
    for (unsigned tries = 1; !may_write(); tries++)
        /* Whoever is writing may be waiting for this very processor, which a thread with a real-time priority only gives away
         * asleep. No function of the C library's does that without being a place where threads are cancelled. */
        if (tries % 1024 == 0)
            syscall(SYS_nanosleep, &(struct timespec){.tv_nsec = 20000}, NULL);
}

static inline __attribute__((always_inline)) void begin_writing(void)
{
    if (__builtin_expect(!may_write(), 0))
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

/* With parts_lock held: a full sheet goes into the table; with `all` the other one as well. */
static void settle(bool all)
{
    for (;;) {
        begin_writing();
        bool some = desk.full || (all && turn_over() && desk.full);
        const struct report *reports = sheets[desk.sheet ^ 1];
        size_t count = desk.full;
        end_writing();
        if (!some)
            return;
        for (size_t i = 0; i < count; i++)
            apply(reports[i].address, reports[i].size);
        begin_writing();
        desk.full = 0;
        end_writing();
    }
}

void phos_parts_settle(void)
{
    begin_writing();
    bool some = desk.full;
    end_writing();
    if (!some)
        return;
    PHOS_LOCKED(&parts_lock);
    settle(false);
}

/* With `writing`, which ends. */
static void put_down(struct report report)
{
    struct report *place = &sheets[desk.sheet][desk.written++];
    *place = report;
    /* The next one finds its cache line there: a store that waits for its line holds up the next atomic operation, and PyTorch's
     * mutex is one. */
    if (desk.written % REPORTS_A_LINE == 0)
        __builtin_prefetch(place + 1, 1);
    end_writing();
}

/* With `writing`, which ends: the sheet is full. */
static __attribute__((noinline, cold)) void note_overleaf(struct report report)
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

static void note(uint64_t begin, int64_t size)
{
    struct report report = {begin, size};
    begin_writing();
    if (__builtin_expect(desk.written == REPORTS, 0))
        note_overleaf(report);
    else
        put_down(report);
}

/* ---- */

/* With parts_lock held: all that was reported is in order. False: nothing was, or there is no host memory for it. */
static bool is_in_order(void)
{
    settle(true);
    return part_count && (ordered || put_all_in_order());
}

enum phos_part_kind phos_parts_find(uint64_t address, struct phos_part *part)
{
    PHOS_LOCKED(&parts_lock);
    if (!is_in_order())
        return PHOS_PART_UNKNOWN;
    size_t next = behind(address);
    if (next && end_of(&ordered[next - 1]) > address) {
        *part = (struct phos_part){ordered[next - 1].begin, end_of(&ordered[next - 1])};
        return PHOS_PART_HELD;
    }
    part->end = next < ordered_count ? ordered[next].begin : UINT64_MAX;
    part->begin = next ? end_of(&ordered[next - 1]) : 0;
    if (!next || part->begin != address)
        return PHOS_PART_FREE;
    part->begin = ordered[next - 1].begin; /* some kernels are given the end of what they touch */
    return PHOS_PART_HELD;
}

bool phos_parts_any(uint64_t begin, uint64_t end)
{
    PHOS_LOCKED(&parts_lock);
    if (!is_in_order())
        return false;
    size_t next = behind(begin);
    return (next && end_of(&ordered[next - 1]) > begin) || (next < ordered_count && ordered[next].begin < end);
}

bool phos_parts_captured(uint64_t begin, uint64_t end)
{
    PHOS_LOCKED(&parts_lock);
    settle(true);
    size_t at = captured_from(begin >> SEGMENT_SHIFT);
    return at < captured_count && captured[at] <= (end - 1) >> SEGMENT_SHIFT;
}

void phos_parts_capture(int more)
{
    note(0, more);
}

void phos_parts_gone(uint64_t address, uint64_t size)
{
    if (size < SEGMENT_LEAST)
        return;
    PHOS_LOCKED(&parts_lock);
    settle(true);
    unmark_captured(address, size);
    bool gone = false;
    for (size_t i = 0; part_count && i < place_count; i++)
        while (places[i].begin && places[i].begin - address < size) { /* another may come in its place */
            remove_place(i);
            gone = true;
        }
    if (gone) {
        free(ordered);
        ordered = NULL;
    }
}

void phos_parts_rest(void)
{
    PHOS_LOCKED(&parts_lock);
    free(ordered);
    ordered = NULL;
}

void phos_parts_forked(void)
{
    pthread_mutex_init(&parts_lock, NULL);
    end_writing();
    /* Another thread may have been in the middle of it; and the driver does not work here. */
    places = ordered = NULL;
    captured = NULL;
    place_count = part_count = ordered_count = ordered_room = captured_count = captured_room = 0;
    desk.written = desk.full = 0;
    capturing = 0;
    lost = true;
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
        note((uint64_t)(uintptr_t)address, size);
    original(address, size, allocated, reserved, device);
}
