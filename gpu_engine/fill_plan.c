/* The order in which GPU memory is loaded. Asked by every worker before every piece, twelve thousand times a second in all:
 * Python, which lets one thread run at a time, spent half of its time on that, and who had to attach a process meanwhile
 * waited for it. */
#include "fill_plan.h"

#include "copy_lane.h"
#include "cow/chunk_table.h"

#include <string.h>

#define ZEROS_AT_ONCE 64 /* places that are cleared by one call: a GPU does that a hundred times as fast as it takes data */

EXPORT uint64_t phos_fill_plan_size(void)
{
    return sizeof(struct phos_fill_plan);
}

/* All else is set. */
EXPORT void phos_fill_begin(struct phos_fill_plan *plan)
{
    pthread_mutex_init(&plan->lock, NULL);
}

EXPORT void phos_fill_end(struct phos_fill_plan *plan)
{
    pthread_mutex_destroy(&plan->lock);
}

static bool is_mapped(const struct phos_fill_plan *plan, uint32_t place)
{
    uint32_t block = plan->places[place].block;
    if (__atomic_load_n(&plan->mapped[block], __ATOMIC_ACQUIRE))
        return true;
    __atomic_store_n(&plan->needed[block], 1, __ATOMIC_RELAXED);
    return false;
}

/* The block is mapped at its address. */
EXPORT void phos_fill_map(struct phos_fill_plan *plan, uint32_t block)
{
    __atomic_store_n(&plan->mapped[block], 1, __ATOMIC_RELEASE);
}

/* Of so many blocks, one of which something is due and which is not mapped; -1: there is none. */
EXPORT int64_t phos_fill_due(struct phos_fill_plan *plan, uint32_t blocks)
{
    for (uint32_t block = 0; block < blocks; block++)
        if (__atomic_load_n(&plan->needed[block], __ATOMIC_RELAXED) &&
            !__atomic_load_n(&plan->mapped[block], __ATOMIC_RELAXED))
            return block;
    return -1;
}

EXPORT void phos_fill_break(struct phos_fill_plan *plan)
{
    __atomic_store_n(&plan->broken, 1, __ATOMIC_RELEASE);
}

/* ---- what somebody waits for ---- */

static void ask(struct phos_fill_plan *plan, uint32_t place)
{
    if (plan->state[place] & (PHOS_FILL_GIVEN | PHOS_FILL_ASKED))
        return;
    plan->state[place] |= PHOS_FILL_ASKED;
    struct phos_fill_queue *queue = &plan->queues[plan->places[place].queue];
    queue->asked[queue->tail++ % queue->count] = place;
}

/* A process that writes nonsense into its list harms nobody. */
static void listen(struct phos_fill_plan *plan)
{
    for (uint32_t i = 0; i < plan->window_count; i++) {
        int64_t chunk;
        while ((chunk = phos_window_next(plan->windows[i].view, &plan->windows[i].head)) >= 0) {
            if (chunk >= plan->count || plan->state[chunk] & (PHOS_FILL_GIVEN | PHOS_FILL_HEARD))
                continue;
            plan->state[chunk] |= PHOS_FILL_HEARD;
            plan->on_demand++;
            plan->on_demand_bytes += plan->places[chunk].size;
            ask(plan, (uint32_t)chunk);
        }
    }
}

/* Somebody waits for these places, who has no window. */
EXPORT void phos_fill_want(struct phos_fill_plan *plan, uint32_t first, uint32_t count)
{
    pthread_mutex_lock(&plan->lock);
    for (uint32_t i = 0; i < count; i++)
        ask(plan, first + i);
    pthread_mutex_unlock(&plan->lock);
}

bool phos_fill_asked(struct phos_fill_plan *plan, uint32_t queue)
{
    bool asked = false;
    pthread_mutex_lock(&plan->lock);
    listen(plan);
    const struct phos_fill_queue *of = &plan->queues[queue];
    for (uint64_t at = of->head; at != of->tail && !asked; at++) {
        uint32_t place = of->asked[at % of->count];
        asked = !(plan->state[place] & PHOS_FILL_GIVEN) &&
                __atomic_load_n(&plan->mapped[plan->places[place].block], __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&plan->lock);
    return asked;
}

EXPORT void phos_fill_counts(struct phos_fill_plan *plan, uint64_t *on_demand, uint64_t *bytes)
{
    pthread_mutex_lock(&plan->lock);
    *on_demand = plan->on_demand;
    *bytes = plan->on_demand_bytes;
    pthread_mutex_unlock(&plan->lock);
}

/* ---- pieces ---- */

static void give(struct phos_fill_plan *plan, struct phos_fill_queue *queue, uint32_t place, struct phos_fill_piece *piece)
{
    plan->state[place] |= PHOS_FILL_GIVEN;
    if (plan->table)
        phos_chunks_claim(plan->table, place);
    queue->left--;
    piece->count++;
    piece->bytes += plan->places[place].size;
}

static bool joins(const struct phos_fill_plan *plan, const struct phos_fill_piece *piece, uint32_t place)
{
    const struct phos_fill_place *first = &plan->places[piece->first], *next = &plan->places[place];
    if (plan->state[place] & PHOS_FILL_GIVEN || next->block != first->block || next->descriptor != first->descriptor ||
        next->address != first->address + piece->bytes)
        return false;
    if (first->descriptor == PHOS_FILL_ZEROS)
        return piece->count < ZEROS_AT_ONCE;
    return first->descriptor != PHOS_FILL_ELSEWHERE && next->source == first->source + piece->bytes &&
           piece->bytes + next->size <= plan->join_bytes;
}

/* Of what is wanted, the first that can be had; what cannot stays wanted. */
static bool take_asked(struct phos_fill_plan *plan, struct phos_fill_queue *queue, struct phos_fill_piece *piece)
{
    for (uint64_t looked = queue->tail - queue->head; looked; looked--) {
        uint32_t place = queue->asked[queue->head++ % queue->count];
        if (plan->state[place] & PHOS_FILL_GIVEN)
            continue;
        if (!is_mapped(plan, place)) {
            queue->asked[queue->tail++ % queue->count] = place;
            continue;
        }
        *piece = (struct phos_fill_piece){.first = place, .urgent = true};
        give(plan, queue, place, piece);
        return true;
    }
    return false;
}

static bool take_following(struct phos_fill_plan *plan, struct phos_fill_queue *queue, struct phos_fill_piece *piece)
{
    while (queue->next < queue->count && plan->state[queue->order[queue->next]] & PHOS_FILL_GIVEN)
        queue->next++;
    if (queue->next == queue->count || !is_mapped(plan, queue->order[queue->next]))
        return false;
    uint32_t place = queue->order[queue->next++];
    *piece = (struct phos_fill_piece){.first = place};
    give(plan, queue, place, piece);
    while (queue->next < queue->count && queue->order[queue->next] == place + piece->count &&
           joins(plan, piece, place + piece->count))
        give(plan, queue, queue->order[queue->next++], piece);
    return true;
}

enum phos_fill_taken phos_fill_take(struct phos_fill_plan *plan, uint32_t number, struct phos_fill_piece *piece)
{
    struct phos_fill_queue *queue = &plan->queues[number];
    pthread_mutex_lock(&plan->lock);
    listen(plan);
    enum phos_fill_taken taken = !queue->left ? PHOS_FILL_NOTHING_LEFT : PHOS_FILL_NOTHING_YET;
    if (queue->left && (take_asked(plan, queue, piece) || take_following(plan, queue, piece)))
        taken = PHOS_FILL_TAKEN;
    pthread_mutex_unlock(&plan->lock);
    return taken;
}
