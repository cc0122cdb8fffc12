/* What lanes exchange, and special registers. */
#include <string.h>
#include <time.h>

#include "ptx_exec.h"

void ptx_shuffle(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m) {
    const uint32_t *a = (const uint32_t *)(const void *)ptx_operand(frame, constants, in->a), *b = (const uint32_t *)(const void *)ptx_operand(frame, constants, in->b);
    const uint32_t *c = (const uint32_t *)(const void *)ptx_operand(frame, constants, in->ext->v[0]);
    uint32_t *d = (uint32_t *)(void *)(frame->regs + in->d), r[PTX_WARP], inside = 0;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        uint32_t clamp = c[l] & 31, segment = c[l] >> 8 & 31, low = l & segment, high = low | (clamp & ~segment), by = b[l] & 31, from = l;
        bool ok = false;
        switch (in->sub) {
        case 0: ok = (int32_t)(l - by) >= (int32_t)high; from = l - by; break; /* up: the clamp is the lowest lane */
        case 1: ok = l + by <= high; from = l + by; break;
        case 2: from = l ^ by; ok = from <= high; break;
        default: from = low | (by & ~segment); ok = from <= high; break;
        }
        if (!ok) from = l;
        if (!(m >> from & 1)) from = l; /* reading a lane that takes no part is undefined; ours gets its own value */
        r[l] = a[from];
        inside |= (uint32_t)ok << l;
    }
    for (uint32_t l = 0; l < PTX_WARP; l++) d[l] = m >> l & 1 ? r[l] : d[l];
    if (in->ext->v[1] != PTX_SINK) {
        uint32_t *p = (uint32_t *)(void *)(frame->regs + in->ext->v[1]);
        *p = (*p & ~m) | (inside & m);
    }
}

void ptx_vote(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m) {
    uint32_t p = *(const uint32_t *)(const void *)ptx_operand(frame, constants, in->a) & m;
    if (in->sub == 3) {
        uint32_t *d = (uint32_t *)(void *)(frame->regs + in->d);
        for (uint32_t l = 0; l < PTX_WARP; l++) d[l] = m >> l & 1 ? p : d[l];
        return;
    }
    bool r = in->sub == 0 ? p == m : in->sub == 1 ? p != 0 : p == m || p == 0;
    if (in->d == PTX_SINK) return;
    uint32_t *d = (uint32_t *)(void *)(frame->regs + in->d);
    *d = (*d & ~m) | (r ? m : 0);
}

void ptx_match(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m) {
    const unsigned char *a = ptx_operand(frame, constants, in->a);
    uint32_t r[PTX_WARP] = {0}, *d = (uint32_t *)(void *)(frame->regs + in->d), size = in->aux;
    for (uint32_t l = 0; l < PTX_WARP; l++)
        for (uint32_t k = 0; k < PTX_WARP; k++)
            if (m >> k & 1 && memcmp(a + l * size, a + k * size, size) == 0) r[l] |= 1u << k;
    bool all = r[__builtin_ctz(m)] == m;
    for (uint32_t l = 0; l < PTX_WARP; l++)
        if (m >> l & 1) d[l] = in->sub ? (all ? m : 0) : r[l];
    if (in->imm != PTX_SINK) {
        uint32_t *p = (uint32_t *)(void *)(frame->regs + in->imm);
        *p = (*p & ~m) | (all ? m : 0);
    }
}

void ptx_redux(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m) {
    const uint32_t *a = (const uint32_t *)(const void *)ptx_operand(frame, constants, in->a);
    uint32_t r = a[__builtin_ctz(m)];
    bool is_signed = in->type == PTX_S32;
    for (uint32_t left = m & (m - 1); left != 0; left &= left - 1) {
        uint32_t x = a[__builtin_ctz(left)];
        bool less = is_signed ? (int32_t)x < (int32_t)r : x < r;
        switch (in->sub) {
        case 0: r += x; break;
        case 1: r = less ? x : r; break;
        case 2: r = less ? r : x; break;
        case 3: r &= x; break;
        case 4: r |= x; break;
        default: r ^= x; break;
        }
    }
    uint32_t *d = (uint32_t *)(void *)(frame->regs + in->d);
    for (uint32_t l = 0; l < PTX_WARP; l++) d[l] = m >> l & 1 ? r : d[l];
}

void ptx_elect(const struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m) {
    uint32_t leader = (uint32_t)__builtin_ctz(m), *d = (uint32_t *)(void *)(frame->regs + in->d);
    for (uint32_t l = 0; l < PTX_WARP; l++) d[l] = m >> l & 1 ? leader : d[l];
    if (in->imm == PTX_SINK) return;
    uint32_t *p = (uint32_t *)(void *)(frame->regs + in->imm);
    *p = (*p & ~m) | (m & 1u << leader);
}

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void ptx_special(struct ptx_worker *w, struct ptx_warp *warp, const struct ptx_ins *in, void *d) {
    const struct ptx_launch *launch = w->launch;
    uint32_t which = (uint32_t)in->imm, part = which & 3, *d32 = d;
    uint64_t v = 0;
    if (which < PTX_SREG_LANEID) {
        switch (which & ~3u) {
        case PTX_SREG_TID:
            if (part < 3) {
                memcpy(d, warp->tid[part], sizeof warp->tid[part]);
                return;
            }
            break;
        case PTX_SREG_NTID: v = part < 3 ? launch->block[part] : 1; break;
        case PTX_SREG_CTAID: case PTX_SREG_CLUSTERID: v = part < 3 ? warp->block->id[part] : 0; break; /* clusters are single blocks */
        case PTX_SREG_NCTAID: case PTX_SREG_NCLUSTERID: v = part < 3 ? launch->grid[part] : 1; break;
        case PTX_SREG_CLUSTER_NCTAID: v = 1; break;
        default: break;
        }
    } else {
        switch (which) {
        case PTX_SREG_WARPID: v = warp->index; break;
        case PTX_SREG_NWARPID: v = 64; break;
        case PTX_SREG_SMID: v = w->index; break;
        case PTX_SREG_NSMID: v = launch->threads ? launch->threads : 1; break;
        case PTX_SREG_GRIDID: v = 1; break;
        case PTX_SREG_CLOCK: case PTX_SREG_CLOCK64: v = nanoseconds(CLOCK_MONOTONIC); break;
        case PTX_SREG_CLOCK_HI: v = nanoseconds(CLOCK_MONOTONIC) >> 32; break;
        case PTX_SREG_TIMER: case PTX_SREG_TIMER_LO: v = nanoseconds(CLOCK_REALTIME); break;
        case PTX_SREG_TIMER_HI: v = nanoseconds(CLOCK_REALTIME) >> 32; break;
        case PTX_SREG_DYNAMIC_SMEM: v = launch->dynamic_shared; break;
        case PTX_SREG_TOTAL_SMEM: v = w->shared_bytes; break;
        case PTX_SREG_ENVREG1: v = w->workspace >> 32; break;
        case PTX_SREG_ENVREG2: v = w->workspace; break;
        case PTX_SREG_CLUSTER_NCTARANK: v = 1; break;
        case PTX_SREG_LANEID: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = l; return;
        case PTX_SREG_LANEMASK_EQ: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = 1u << l; return;
        case PTX_SREG_LANEMASK_LT: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = (1u << l) - 1; return;
        case PTX_SREG_LANEMASK_LE: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = (2u << l) - 1; return;
        case PTX_SREG_LANEMASK_GE: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = PTX_FULL << l; return;
        case PTX_SREG_LANEMASK_GT: for (uint32_t l = 0; l < PTX_WARP; l++) d32[l] = ~((2u << l) - 1); return;
        default: break;
        }
    }
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        if (in->width == 8) ((uint64_t *)d)[l] = v;
        else d32[l] = (uint32_t)v;
    }
}

static uint64_t read_lane(const unsigned char *p, uint32_t width, uint32_t l) {
    uint64_t v = 0;
    memcpy(&v, p + (size_t)l * width, width);
    return v;
}

void ptx_pack(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, void *d) {
    uint64_t r[PTX_WARP] = {0}, mask = ((uint64_t)1 << in->aux * 8) - 1;
    for (uint32_t i = 0; i < in->ext->count; i++) {
        const unsigned char *e = ptx_operand(frame, constants, in->ext->v[i]);
        for (uint32_t l = 0; l < PTX_WARP; l++) r[l] |= (read_lane(e, in->ext->width[i], l) & mask) << i * in->aux * 8;
    }
    for (uint32_t l = 0; l < PTX_WARP; l++) memcpy((unsigned char *)d + (size_t)l * in->width, &r[l], in->width);
}

void ptx_unpack(const struct ptx_frame *frame, const unsigned char *constants, const struct ptx_ins *in, uint32_t m) {
    uint32_t width = (uint32_t)in->imm;
    uint64_t r[PTX_WARP], mask = ((uint64_t)1 << in->aux * 8) - 1;
    const unsigned char *a = ptx_operand(frame, constants, in->a);
    for (uint32_t l = 0; l < PTX_WARP; l++) r[l] = read_lane(a, width, l); /* first: a part may be the source itself */
    for (uint32_t i = 0; i < in->ext->count; i++) {
        if (in->ext->v[i] == PTX_SINK) continue;
        for (uint32_t left = m; left != 0; left &= left - 1) {
            uint32_t l = (uint32_t)__builtin_ctz(left);
            uint64_t v = r[l] >> i * in->aux * 8 & mask;
            memcpy(frame->regs + in->ext->v[i] + (size_t)l * in->ext->width[i], &v, in->ext->width[i]);
        }
    }
}
