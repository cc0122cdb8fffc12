/* A hash table of what PyTorch's allocator has handed out. Only when somebody wants to know what holds an address, in a window, it is
 * put in order, and kept so until phos_parts_rest(). */
#include "parts.h"
#include "cleanup.h"
#include "part_reports.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define SEGMENT_SHIFT 21
#define SEGMENT_LEAST ((uint64_t)1 << SEGMENT_SHIFT) /* what PyTorch asks the driver for at once, at the least */
#define FIRST_PLACES ((size_t)1 << 12)
#define GONE_LEAST 64 /* so many that came back lie in the order before they are dropped */

struct part {
    uint64_t begin, size; /* begin 0: none */
    uint64_t number;      /* a later one is right about memory that both claim: some come back without a report */
};

static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static struct part *places; /* a hash table by `begin`, linear probing, at most half full */
static size_t place_count, part_count;
static uint64_t numbers;
static bool lost;            /* out of host memory once: nothing is known any more */
static struct part *ordered; /* NULL: not now. Of size 0: one that came back; where it began, the next one may well begin */
static size_t ordered_count, ordered_room, ordered_gone; /* gone: how many are of size 0 */
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

static void know_nothing(void)
{
    places = ordered = NULL;
    captured = NULL;
    place_count = part_count = ordered_count = ordered_room = ordered_gone = captured_count = captured_room = 0;
    lost = true;
}

/* ---- in order, with the lock held: by address, none over another, and none that came back within one that did not */

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

static void drop_gone(void)
{
    size_t kept = 0;
    for (size_t i = 0; i < ordered_count; i++)
        if (ordered[i].size)
            ordered[kept++] = ordered[i];
    ordered_count = kept;
    ordered_gone = 0;
}

static bool room_for_one(void)
{
    if (ordered_count < ordered_room)
        return true;
    struct part *grown = realloc(ordered, ordered_room * 2 * sizeof *grown);
    if (!grown)
        return false;
    ordered = grown;
    ordered_room *= 2;
    return true;
}

/* Puts a part that is newer than all others in its place, over which they lose what they claim. Most begin where one came back, so
 * that nothing else has to be moved. */
static bool put_in_order(struct part part)
{
    size_t to = behind(part.begin), from = to;
    while (from && (end_of(&ordered[from - 1]) > part.begin || ordered[from - 1].begin == part.begin))
        ordered_gone -= !ordered[--from].size;
    for (; to < ordered_count && ordered[to].begin < end_of(&part); to++)
        ordered_gone -= !ordered[to].size;
    if (from == to && !room_for_one())
        return false;
    if (to != from + 1)
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
    ordered_count = ordered_gone = 0;
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
            free(places);
            free(ordered);
            free(captured);
            know_nothing();
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
        ordered[next - 1].size = 0;
        if (++ordered_gone > GONE_LEAST + ordered_count / 2)
            drop_gone();
    }
}

/* With parts_lock held: a full sheet of reports goes into the table; with `all` the other one as well. */
static void settle(bool all)
{
    const struct phos_part_report *reports;
    size_t count;
    while ((reports = phos_part_reports_take(all, &count))) {
        for (size_t i = 0; i < count; i++)
            apply(reports[i].address, reports[i].size);
        phos_part_reports_taken();
    }
}

void phos_parts_settle(void)
{
    if (!phos_part_reports_waiting())
        return;
    PHOS_LOCKED(&parts_lock);
    settle(false);
}

/* ---- what others ask */

/* With parts_lock held, in order: the first one from there on that did not come back. */
static size_t held_from(size_t at)
{
    while (at < ordered_count && !ordered[at].size)
        at++;
    return at;
}

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
    size_t behind_it = behind(address), last = behind_it;
    while (last && !ordered[last - 1].size)
        last--;
    const struct part *before = last ? &ordered[last - 1] : NULL;
    if (before && end_of(before) > address) {
        *part = (struct phos_part){before->begin, end_of(before)};
        return PHOS_PART_HELD;
    }
    size_t next = held_from(behind_it);
    part->end = next < ordered_count ? ordered[next].begin : UINT64_MAX;
    part->begin = before ? end_of(before) : 0;
    if (!before || part->begin != address)
        return PHOS_PART_FREE;
    part->begin = before->begin; /* some kernels are given the end of what they touch */
    return PHOS_PART_HELD;
}

bool phos_parts_any(uint64_t begin, uint64_t end)
{
    PHOS_LOCKED(&parts_lock);
    if (!is_in_order())
        return false;
    size_t at = behind(begin);
    bool any = at && end_of(&ordered[at - 1]) > begin;
    for (; !any && at < ordered_count && ordered[at].begin < end; at++)
        any = ordered[at].size;
    return any;
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
    phos_part_reports_note((struct phos_part_report){0, more});
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
    phos_part_reports_forked();
    /* Not freed: another thread may have been in the middle of it. The driver does not work here. */
    know_nothing();
    capturing = 0;
}
