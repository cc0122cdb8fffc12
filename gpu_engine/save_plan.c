/* The order in which GPU memory is saved. Native, because it is asked twelve thousand times a second while a process computes
 * that waits for some of it: a thread that has to get Python's lock first comes up to a millisecond late, in which 50 MB
 * could have been copied. */
#include "save_plan.h"

#include "../frontend/clock.h"
#include "../frontend/window_table.h"
#include "copy_lane.h"

#define PAGE ((uint64_t)4096) /* ALIGNMENT of images/formats.py */

EXPORT uint64_t phos_save_plan_size(void)
{
    return sizeof(struct phos_save_plan);
}

/* All else is set. */
EXPORT void phos_save_begin(struct phos_save_plan *plan)
{
    pthread_mutex_init(&plan->lock, NULL);
}

EXPORT void phos_save_end(struct phos_save_plan *plan)
{
    pthread_mutex_destroy(&plan->lock);
}

static uint32_t load(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* ---- the applications' own transfers ---- */

static bool transferring(struct phos_save_plan *plan)
{
    bool queued = false;
    for (uint32_t i = 0; i < plan->pool_count; i++) {
        const struct phos_save_pool *pool = &plan->pools[i];
        const struct phos_save_window *window = &plan->windows[pool->window];
        if (load(&window->dead))
            continue;
        uint32_t answer = phos_window_transferring(window->view, pool->number, pool->slots, pool->flags);
        if (answer & 1)
            return true;
        queued = queued || answer & 2;
    }
    if (queued)
        __atomic_store_n(&plan->asked, 1, __ATOMIC_RELEASE);
    return queued;
}

static bool step_aside(struct phos_save_plan *plan)
{
    uint64_t now = phos_now_ns();
    if (now < plan->aside_again)
        return false;
    if (!transferring(plan)) {
        plan->aside_since = 0;
        return false;
    }
    if (!plan->aside_since)
        plan->aside_since = now;
    if (now - plan->aside_since <= plan->aside_ns)
        return true;
    plan->aside_since = 0;
    plan->aside_again = now + plan->again_ns;
    return false;
}

/* ---- what processes have taken ---- */

static void owe(struct phos_save_plan *plan, uint32_t chunk)
{
    if (plan->state[chunk] & PHOS_SAVE_PENDING)
        return;
    plan->state[chunk] |= PHOS_SAVE_PENDING;
    plan->pending++;
    plan->owed[plan->owed_tail++ % plan->count] = chunk;
}

static void settle(struct phos_save_plan *plan, uint32_t chunk)
{
    plan->pending -= (plan->state[chunk] & PHOS_SAVE_PENDING) != 0;
    plan->state[chunk] &= (unsigned char)~PHOS_SAVE_PENDING;
}

/* The next chunk of which it is to be found out where it is; -1: there is none. */
EXPORT int64_t phos_save_owed(struct phos_save_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    int64_t chunk = plan->owed_head == plan->owed_tail ? -1 : (int64_t)plan->owed[plan->owed_head++ % plan->count];
    pthread_mutex_unlock(&plan->lock);
    return chunk;
}

EXPORT int phos_save_owes(struct phos_save_plan *plan)
{
    pthread_mutex_lock(&plan->lock);
    int owes = plan->owed_head != plan->owed_tail;
    pthread_mutex_unlock(&plan->lock);
    return owes;
}

/* A chunk that was owed can be had. */
EXPORT void phos_save_made(struct phos_save_plan *plan, uint32_t queue, uint32_t chunk, uint64_t address, uint32_t slot)
{
    struct phos_save_queue *of = &plan->queues[queue == UINT32_MAX ? plan->places[chunk].queue : queue];
    pthread_mutex_lock(&plan->lock);
    of->made[of->made_tail++ % plan->count] = (struct phos_save_made){address, chunk, slot};
    pthread_mutex_unlock(&plan->lock);
}

/* A chunk that was owed is in other hands. */
EXPORT void phos_save_settled(struct phos_save_plan *plan, uint32_t chunk)
{
    pthread_mutex_lock(&plan->lock);
    settle(plan, chunk);
    pthread_mutex_unlock(&plan->lock);
}

/* ---- pieces ---- */

static bool claim(struct phos_save_plan *plan, uint32_t chunk)
{
    return !plan->table || phos_chunks_claim(plan->table, chunk) == PHOS_CHUNK_UNSAVED;
}

static void give(struct phos_save_plan *plan, uint32_t chunk, struct phos_save_piece *piece)
{
    plan->state[chunk] |= PHOS_SAVE_GIVEN;
    plan->left--;
    plan->queues[plan->places[chunk].queue].left--;
    piece->count++;
    piece->bytes += plan->places[chunk].size;
}

static bool joins(const struct phos_save_plan *plan, const struct phos_save_piece *piece, uint32_t chunk)
{
    if (chunk == plan->count || plan->state[chunk] & PHOS_SAVE_GIVEN)
        return false;
    const struct phos_save_place *first = &plan->places[piece->first], *next = &plan->places[chunk];
    if (next->block != first->block || !next->address != !first->address)
        return false;
    if (!first->address)
        return piece->count < plan->zeros_at_once;
    return piece->bytes + next->size <= plan->join_bytes;
}

/* A chunk that has just been claimed, with those behind it that nobody has. */
static void give_from_place(struct phos_save_plan *plan, uint32_t chunk, bool urgent, struct phos_save_piece *piece)
{
    *piece = (struct phos_save_piece){
        .address = plan->places[chunk].address, .first = chunk, .slot = PHOS_SAVE_IN_PLACE, .urgent = urgent};
    do
        give(plan, chunk, piece);
    while (joins(plan, piece, ++chunk) && claim(plan, chunk));
}

/* A process that writes nonsense into its list harms nobody. */
static void listen(struct phos_save_plan *plan)
{
    for (uint32_t i = 0; i < plan->window_count; i++) {
        int64_t chunk;
        while ((chunk = phos_window_next(plan->windows[i].view, &plan->windows[i].head)) >= 0) {
            if (chunk >= plan->count || plan->state[chunk] & PHOS_SAVE_GIVEN)
                continue;
            struct phos_save_queue *of = &plan->queues[plan->places[chunk].queue];
            if (of->asked_tail - of->asked_head < plan->count) /* full of chunks that are asked for twice: it comes in its turn */
                of->asked[of->asked_tail++ % plan->count] = (uint32_t)chunk;
        }
    }
}

static bool take_asked(struct phos_save_plan *plan, struct phos_save_queue *queue, struct phos_save_piece *piece)
{
    while (queue->asked_head != queue->asked_tail) {
        uint32_t chunk = queue->asked[queue->asked_head++ % plan->count];
        if (plan->state[chunk] & PHOS_SAVE_GIVEN)
            continue;
        if (claim(plan, chunk)) {
            give_from_place(plan, chunk, true, piece); /* who writes to one soon writes to the next */
            return true;
        }
        owe(plan, chunk);
    }
    return false;
}

static bool take_made(struct phos_save_plan *plan, struct phos_save_queue *queue, struct phos_save_piece *piece)
{
    while (queue->made_head != queue->made_tail) {
        struct phos_save_made made = queue->made[queue->made_head++ % plan->count];
        settle(plan, made.chunk);
        if (plan->state[made.chunk] & PHOS_SAVE_GIVEN)
            continue;
        const struct phos_save_place *place = &plan->places[made.chunk];
        *piece = (struct phos_save_piece){.first = made.chunk, .slot = made.slot};
        if (place->address) /* else what it was is known, whatever it has become */
            piece->address = made.slot == PHOS_SAVE_IN_PLACE ? place->address : made.address;
        give(plan, made.chunk, piece);
        return true;
    }
    return false;
}

static bool take_following(struct phos_save_plan *plan, struct phos_save_queue *queue, struct phos_save_piece *piece)
{
    while (queue->next < queue->count) {
        uint32_t chunk = queue->order[queue->next++];
        if (plan->state[chunk] & PHOS_SAVE_GIVEN || !claim(plan, chunk))
            continue;
        give_from_place(plan, chunk, false, piece);
        return true;
    }
    /* What is left of it was taken by processes; a list that was full says nothing of that. */
    if (!plan->pending && queue->left)
        for (uint32_t i = 0; i < queue->count; i++)
            if (!(plan->state[queue->order[i]] & PHOS_SAVE_GIVEN))
                owe(plan, queue->order[i]);
    return false;
}

static bool held(const struct phos_save_plan *plan)
{
    uint64_t until = __atomic_load_n(&plan->hold_until, __ATOMIC_RELAXED);
    return until && phos_now_ns() < until;
}

EXPORT int phos_save_take(struct phos_save_plan *plan, uint32_t number, struct phos_save_piece *piece)
{
    struct phos_save_queue *queue = &plan->queues[number];
    enum phos_save_taken taken = PHOS_SAVE_NOTHING_YET;
    pthread_mutex_lock(&plan->lock);
    if (!plan->left)
        taken = PHOS_SAVE_NOTHING_LEFT;
    else if (!plan->prioritise || !step_aside(plan)) {
        listen(plan);
        if (take_asked(plan, queue, piece) || take_made(plan, queue, piece) ||
            (!held(plan) && take_following(plan, queue, piece)))
            taken = PHOS_SAVE_TAKEN;
    }
    pthread_mutex_unlock(&plan->lock);
    return taken;
}

EXPORT int phos_save_landed(struct phos_save_plan *plan, const struct phos_save_piece *piece)
{
    /* Looked at when the bytes have come: memory that may change from here on may have done so before. */
    int changing = load(&plan->changing) != 0;
    for (uint32_t i = 0; plan->table && i < piece->count; i++)
        phos_chunks_saved(plan->table, piece->first + i);
    if (piece->slot != PHOS_SAVE_IN_PLACE) {
        uint32_t process = piece->slot >> 16;
        phos_window_free_slot(plan->windows[process].view, piece->slot & PHOS_SLOT_NONE);
    }
    __atomic_fetch_add(&plan->landed, piece->bytes, __ATOMIC_RELAXED);
    return changing;
}

uint64_t phos_save_room(struct phos_save_plan *plan, uint64_t bytes)
{
    pthread_mutex_lock(&plan->lock);
    uint64_t at = plan->room_end, address = 0;
    if (at / plan->segment != (at + bytes - 1) / plan->segment)
        at = (at / plan->segment + 1) * plan->segment;
    if (at + bytes <= plan->room_size) {
        address = plan->room + at;
        plan->room_end = (at + bytes + PAGE - 1) / PAGE * PAGE;
    }
    pthread_mutex_unlock(&plan->lock);
    return address;
}
