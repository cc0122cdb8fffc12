/* Which lanes of a warp run next; calls, returns, exits and barriers, all of which move lanes between splits. */
#include <stdlib.h>
#include <string.h>

#include "ptx_exec.h"

bool ptx_add_split(struct ptx_warp *warp, struct ptx_frame *frame, uint32_t pc, uint32_t mask) {
    if (warp->count == PTX_WARP) return false; /* cannot be: masks are disjoint and not empty */
    warp->splits[warp->count++] = (struct ptx_split){.frame = frame, .pc = pc, .mask = mask};
    return true;
}

void ptx_drop_split(struct ptx_warp *warp, struct ptx_split *split) { *split = warp->splits[--warp->count]; }

/* The lanes that a waiting split's exchange names: the same for all of its lanes. */
static uint32_t members(const struct ptx_warp *warp, const struct ptx_split *s) {
    const uint32_t *masks = (const uint32_t *)(const void *)ptx_operand(s->frame, warp->block->worker->constants, s->frame->f->code[s->pc].c);
    return masks[__builtin_ctz(s->mask)];
}

/* Whether a split waits at the same exchange as those in this place that name these members. */
static bool joins(const struct ptx_warp *warp, const struct ptx_split *t, const struct ptx_frame *frame, uint32_t pc, uint32_t named) {
    return t->state == PTX_WAIT_WARP && t->frame == frame && t->pc == pc && members(warp, t) == named;
}

/* Lanes that wait at the same exchange become one split; it may go once none of the members it names is still on its way. */
static bool settle(struct ptx_warp *warp) {
    bool any = false;
    for (uint32_t i = 0; i < warp->count; i++) {
        struct ptx_split *s = &warp->splits[i];
        if (s->state != PTX_WAIT_WARP) continue;
        const struct ptx_ins *in = &s->frame->f->code[s->pc];
        uint32_t named = members(warp, s), need = named & warp->live, here = s->mask;
        bool barrier = in->op == PTX_BAR_WARP_OP;
        for (uint32_t k = 0; k < warp->count; k++) {
            const struct ptx_split *t = &warp->splits[k];
            if (t->state != PTX_WAIT_WARP || k == i) continue;
            if (joins(warp, t, s->frame, s->pc, named) || (barrier && t->frame->f->code[t->pc].op == PTX_BAR_WARP_OP)) here |= t->mask;
        }
        if (need & ~here) continue;
        any = true;
        uint32_t pc = s->pc;
        struct ptx_frame *frame = s->frame;
        for (uint32_t k = 0; k < warp->count;) {
            struct ptx_split *t = &warp->splits[k];
            if (t->state != PTX_WAIT_WARP) {
                k++;
                continue;
            }
            if (barrier && t->frame->f->code[t->pc].op == PTX_BAR_WARP_OP && (t->mask & need)) {
                t->state = PTX_READY;
                t->go = 0;
                t->pc++;
                k++;
            } else if (!barrier && t != s && joins(warp, t, frame, pc, named)) {
                s->mask |= t->mask;
                if (s == &warp->splits[warp->count - 1]) s = t; /* the last one moves into the gap */
                ptx_drop_split(warp, t);
                if (s == t) continue;
            } else {
                k++;
            }
        }
        if (!barrier) {
            for (uint32_t k = 0; k < warp->count; k++) {
                s = &warp->splits[k];
                if (joins(warp, s, frame, pc, named)) {
                    s->state = PTX_READY;
                    s->go = 1;
                }
            }
        }
        i = UINT32_MAX; /* masks and places have changed: look at all again */
    }
    return any;
}

/* Lets an exchange happen with the lanes that are there: the others wait elsewhere and will never come. */
bool ptx_force(struct ptx_warp *warp) {
    for (uint32_t i = 0; i < warp->count; i++) {
        struct ptx_split *s = &warp->splits[i];
        if (s->state != PTX_WAIT_WARP) continue;
        s->state = PTX_READY;
        s->go = 1;
        return true;
    }
    return false;
}

struct ptx_split *ptx_pick(struct ptx_warp *warp, bool fair, uint32_t *stop) {
    if (warp->count == 1 && warp->splits[0].state == PTX_READY) {
        *stop = UINT32_MAX;
        return &warp->splits[0];
    }
    if (fair) settle(warp);
    struct ptx_split *best = NULL;
    for (int round = 0; round < 2 && best == NULL; round++) {
        if (round == 1 && !settle(warp)) return NULL;
        for (uint32_t i = 0; i < warp->count; i++) {
            struct ptx_split *s = &warp->splits[i];
            if (s->state != PTX_READY) continue;
            bool better = best == NULL;
            if (!better && fair) better = s->turn < best->turn;
            else if (!better) better = s->frame->depth > best->frame->depth || (s->frame->depth == best->frame->depth && s->pc < best->pc);
            if (better) best = s;
        }
    }
    if (best == NULL) return NULL;
    *stop = UINT32_MAX;
    for (uint32_t i = 0; i < warp->count;) {
        struct ptx_split *s = &warp->splits[i];
        if (s == best || s->state != PTX_READY || s->frame != best->frame) {
            i++;
        } else if (s->pc == best->pc && !s->go && !best->go) {
            best->mask |= s->mask;
            struct ptx_split *last = &warp->splits[warp->count - 1];
            if (best == last) best = s;
            ptx_drop_split(warp, s);
        } else {
            if (s->pc > best->pc && s->pc < *stop) *stop = s->pc;
            i++;
        }
    }
    best->turn = ++warp->turns;
    return best;
}

struct ptx_frame *ptx_frame_new(struct ptx_worker *w, const struct ptx_function *f) {
    uint32_t need = (f->frame_bytes + 64 + 63) & ~63u;
    struct ptx_frame **at = &w->free_frames;
    for (int i = 0; i < 8 && *at != NULL; i++, at = &(*at)->up) {
        struct ptx_frame *frame = *at;
        if (frame->room < need || frame->room / 4 > need) continue;
        *at = frame->up;
        frame->f = f;
        return frame;
    }
    struct ptx_frame *frame = calloc(1, sizeof *frame);
    unsigned char *regs = aligned_alloc(64, need);
    if (frame == NULL || regs == NULL) {
        free(frame);
        free(regs);
        return NULL;
    }
    memset(regs, 0, need);
    frame->regs = regs;
    frame->room = need;
    frame->f = f;
    return frame;
}

void ptx_frame_free(struct ptx_worker *w, struct ptx_frame *frame) {
    frame->up = w->free_frames;
    w->free_frames = frame;
}

static void release(struct ptx_block *block, uint32_t id) {
    struct ptx_barrier *b = &block->barriers[id];
    for (uint32_t i = 0; i < block->warp_count; i++) {
        struct ptx_warp *warp = &block->warps[i];
        for (uint32_t k = 0; k < warp->count; k++) {
            struct ptx_split *s = &warp->splits[k];
            if (s->state != PTX_WAIT_BARRIER || s->barrier != id) continue;
            s->state = PTX_READY;
            const struct ptx_ins *in = &s->frame->f->code[s->pc - 1];
            if (in->sub < 2 || in->d == PTX_SINK) continue;
            uint32_t *d = (uint32_t *)(void *)(s->frame->regs + in->d);
            if (in->sub == 2) {
                for (uint32_t l = 0; l < PTX_WARP; l++)
                    if (s->mask >> l & 1) d[l] = b->count;
            } else {
                *d = (*d & ~s->mask) | ((in->sub == 3 ? b->all : b->any) ? s->mask : 0);
            }
        }
    }
    *b = (struct ptx_barrier){.all = true};
}

static bool complete(const struct ptx_block *block, const struct ptx_barrier *b) {
    return b->expected != 0 ? b->weight >= b->expected : b->waiting >= block->live;
}

int ptx_barrier_arrive(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_split *split, const struct ptx_ins *in, const unsigned char *id, const unsigned char *count, uint32_t pred, uint32_t m, bool *waits) {
    struct ptx_block *block = warp->block;
    uint32_t first = (uint32_t)__builtin_ctz(m), lanes = (uint32_t)__builtin_popcount(m);
    uint32_t number = ((const uint32_t *)(const void *)id)[first], expected = count == NULL ? 0 : ((const uint32_t *)(const void *)count)[first];
    if (number >= PTX_BARRIERS) return ptx_fault(w, warp, in, m, PTX_ILLEGAL_INSTRUCTION, "there is no barrier %u", number);
    if (count != NULL && (expected == 0 || expected % PTX_WARP != 0))
        return ptx_fault(w, warp, in, m, PTX_ILLEGAL_INSTRUCTION, "a barrier for %u threads: not a multiple of the warp size", expected);
    struct ptx_barrier *b = &block->barriers[number];
    if (b->waiting == 0) b->all = true;
    b->waiting += lanes;
    b->weight += m == warp->live ? PTX_WARP : lanes; /* a warp that is not full counts as one */
    b->expected = expected;
    b->count += (uint32_t)__builtin_popcount(pred & m);
    b->all = b->all && (pred & m) == m;
    b->any = b->any || (pred & m) != 0;
    *waits = in->sub != 1;
    if (*waits) {
        split->state = PTX_WAIT_BARRIER;
        split->barrier = (uint8_t)number;
    }
    if (complete(block, b)) {
        release(block, number);
        *waits = false;
    }
    return 0;
}

/* Clusters are single blocks: their barrier is complete when every thread of the block that has not ended has arrived. */
static bool complete_cluster(struct ptx_block *block) {
    for (uint32_t i = 0; i < block->warp_count; i++)
        if (block->warps[i].live & ~block->warps[i].arrived) return false;
    for (uint32_t i = 0; i < block->warp_count; i++) {
        struct ptx_warp *warp = &block->warps[i];
        warp->arrived = 0;
        for (uint32_t k = 0; k < warp->count; k++)
            if (warp->splits[k].state == PTX_WAIT_BARRIER && warp->splits[k].barrier == PTX_BARRIERS) warp->splits[k].state = PTX_READY;
    }
    return true;
}

bool ptx_cluster_arrive(struct ptx_warp *warp, uint32_t m) {
    warp->arrived |= m;
    return complete_cluster(warp->block);
}

bool ptx_cluster_wait(struct ptx_warp *warp, struct ptx_split *split) {
    if ((split->mask & warp->arrived) == 0) return false; /* those that it arrived with have all come meanwhile */
    split->state = PTX_WAIT_BARRIER;
    split->barrier = PTX_BARRIERS;
    return true;
}

static void leave(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, uint32_t m) {
    while (frame != NULL) {
        struct ptx_frame *up = frame->up;
        frame->mask &= ~m;
        if (frame->mask == 0 && frame != warp->base) ptx_frame_free(w, frame);
        frame = up;
    }
}

/* True when the warp has no lane left. */
bool ptx_exit_lanes(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, uint32_t m) {
    struct ptx_block *block = warp->block;
    warp->live &= ~m;
    block->live -= (uint32_t)__builtin_popcount(m);
    leave(w, warp, frame, m);
    for (uint32_t i = 0; i < PTX_BARRIERS; i++) {
        struct ptx_barrier *b = &block->barriers[i];
        if (b->waiting != 0 && b->expected == 0 && complete(block, b)) release(block, i);
    }
    complete_cluster(block);
    return warp->live == 0;
}

static void move_lanes(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_move *move, uint32_t from_base, uint32_t to_base, uint32_t m) {
    for (; m != 0; m &= m - 1) {
        unsigned char *lane = warp->local + (size_t)__builtin_ctz(m) * w->stride;
        memmove(lane + to_base + move->to, lane + from_base + move->from, move->size);
    }
}

int ptx_call(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_split *split, const struct ptx_ins *in, const struct ptx_function *f, uint32_t m) {
    struct ptx_frame *up = split->frame;
    const struct ptx_ext *call = in->ext;
    uint32_t base = up->local_base + ((up->f->local_bytes + 15) & ~15u);
    if (!f->defined) return ptx_fault(w, warp, in, m, PTX_ILLEGAL_INSTRUCTION, "the function '%s' has no body in this module", f->name);
    if (in->op == PTX_CALL_INDIRECT_OP && (f->param_count != call->in_count || f->result_count != call->out_count))
        return ptx_fault(w, warp, in, m, PTX_ILLEGAL_INSTRUCTION, "an indirect call does not fit the function '%s'", f->name);
    if (up->depth + 1 >= PTX_MAX_DEPTH || (uint64_t)base + f->local_bytes > w->local_bytes)
        return ptx_fault(w, warp, in, m, PTX_STACK_ERROR, "the stack is used up in the function '%s', %u calls deep", f->name, up->depth + 1);
    struct ptx_frame *frame = ptx_frame_new(w, f);
    if (frame == NULL) return ptx_fault(w, warp, in, m, PTX_OUT_OF_MEMORY, "there is no memory for another call");
    frame->up = up;
    frame->local_base = base;
    frame->mask = m;
    frame->return_pc = split->pc;
    frame->depth = up->depth + 1;
    frame->call = call;
    for (uint32_t i = 0; i < call->in_count; i++) {
        struct ptx_move move = call->in[i];
        if (in->op == PTX_CALL_INDIRECT_OP) {
            move.to = f->params[i].offset;
            if (f->params[i].size < move.size) move.size = f->params[i].size;
        }
        move_lanes(w, warp, &move, up->local_base, base, m);
    }
    split->frame = frame;
    split->pc = 0;
    return 0;
}

/* The lanes go back to their caller; the split that brought them here goes with them. */
void ptx_return(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, uint32_t m) {
    struct ptx_frame *up = frame->up;
    const struct ptx_ext *call = frame->call;
    for (uint32_t i = 0; i < call->out_count; i++) {
        struct ptx_move move = call->out[i];
        if (call->indirect) { /* the caller's variable is in `from`, the function's own result was not known */
            move.to = move.from;
            move.from = frame->f->results[i].offset;
            if (frame->f->results[i].size < move.size) move.size = frame->f->results[i].size;
        }
        move_lanes(w, warp, &move, frame->local_base, up->local_base, m);
    }
    for (uint32_t i = 0; i < warp->count; i++) {
        struct ptx_split *s = &warp->splits[i];
        if (s->frame != frame || s->mask != m || s->state != PTX_READY) continue;
        s->frame = up;
        s->pc = frame->return_pc;
        break;
    }
    frame->mask &= ~m;
    if (frame->mask == 0) ptx_frame_free(w, frame);
}
