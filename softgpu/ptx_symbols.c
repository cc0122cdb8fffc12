/* Names, scopes, register slots and constants of the module being loaded. */
#include <stdlib.h>

#include "ptx_parse.h"

/* Memory of a module lives in its arena and goes with it: nothing that the parser makes is freed one by one. */
void *ptx_alloc(struct ptx_parser *p, size_t size) {
    size = (size + 15) & ~(size_t)15;
    struct ptx_arena_block *b = p->module->arena;
    if (b == NULL || b->size - b->used < size) {
        size_t room = size > (64u << 10) ? size : 64u << 10;
        b = malloc(sizeof *b + room);
        if (b == NULL) {
            p->error = PTX_OUT_OF_MEMORY;
            ptx_fail(p, p->line, "there is no memory left for this module");
        }
        b->used = 0;
        b->size = room;
        b->next = p->module->arena;
        p->module->arena = b;
    }
    void *at = b->bytes + b->used;
    b->used += size;
    memset(at, 0, size);
    return at;
}

void *ptx_grow(struct ptx_parser *p, void *old, uint32_t count, uint32_t *room, size_t size) {
    if (count < *room) return old;
    uint32_t more = *room == 0 ? 16 : *room * 2;
    if (more < *room) ptx_fail(p, p->line, "this module is too large");
    void *fresh = ptx_alloc(p, (size_t)more * size);
    if (count != 0) memcpy(fresh, old, (size_t)count * size);
    *room = more;
    return fresh;
}

const char *ptx_copy(struct ptx_parser *p, struct ptx_str s) {
    char *c = ptx_alloc(p, (size_t)s.n + 1);
    memcpy(c, s.s, s.n);
    return c;
}

static uint32_t hash_of(struct ptx_str s) {
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.s[i]) * 16777619u;
    return h ^ h >> 15;
}

void ptx_scope_open(struct ptx_parser *p) {
    if (p->depth + 1 >= sizeof p->scopes / sizeof p->scopes[0]) ptx_fail(p, p->t.line, "braces are nested too deeply");
    p->depth++;
    p->scopes[p->depth] = NULL;
    uint32_t id = p->next_scope++;
    p->scope_parent = ptx_grow(p, p->scope_parent, id, &p->scope_room, sizeof *p->scope_parent);
    p->scope_parent[id] = p->depth > 1 ? p->scope_ids[p->depth - 1] : id;
    p->scope_ids[p->depth] = id;
}

void ptx_scope_close(struct ptx_parser *p) {
    for (struct ptx_symbol *s = p->scopes[p->depth]; s != NULL; s = s->scope_next) {
        struct ptx_symbol **at = &p->hash[hash_of(s->name) % PTX_HASH];
        while (*at != s) at = &(*at)->next;
        *at = s->next;
    }
    p->depth--;
}

static struct ptx_symbol *find(struct ptx_parser *p, struct ptx_str name, enum ptx_symbol_kind kind, bool any) {
    struct ptx_symbol *best = NULL;
    for (struct ptx_symbol *s = p->hash[hash_of(name) % PTX_HASH]; s != NULL; s = s->next) {
        if (s->name.n != name.n || memcmp(s->name.s, name.s, name.n) != 0) continue;
        if (any ? s->kind == PTX_SYM_REGS : s->kind != kind) continue;
        if (best == NULL || s->depth > best->depth) best = s;
    }
    return best;
}

static struct ptx_symbol *add(struct ptx_parser *p, struct ptx_str name, enum ptx_symbol_kind kind, uint32_t depth) {
    struct ptx_symbol *s = ptx_alloc(p, sizeof *s);
    s->name = name;
    s->kind = kind;
    s->depth = depth;
    s->slot = -1;
    struct ptx_symbol **at = &p->hash[hash_of(name) % PTX_HASH];
    s->next = *at;
    *at = s;
    s->scope_next = p->scopes[depth];
    p->scopes[depth] = s;
    return s;
}

struct ptx_symbol *ptx_declare(struct ptx_parser *p, struct ptx_str name, enum ptx_symbol_kind kind) {
    struct ptx_symbol *old = find(p, name, kind, kind != PTX_SYM_REGS);
    if (old != NULL && old->depth == p->depth) ptx_fail(p, p->t.line, "'%.*s' is declared twice", (int)name.n, name.s);
    return add(p, name, kind, p->depth);
}

/* "%r12" is either a name of its own or the thirteenth register of a declaration "%r<N>", whichever scope is the inner one. */
struct ptx_symbol *ptx_lookup(struct ptx_parser *p, struct ptx_str name) {
    struct ptx_symbol *exact = find(p, name, PTX_SYM_REG, true), *range = NULL;
    uint64_t number = 0, scale = 1;
    for (uint32_t n = name.n; n > 1; n--) {
        char c = name.s[n - 1];
        if (c < '0' || c > '9' || name.n - n >= 9) break;
        number += (uint64_t)(c - '0') * scale;
        scale *= 10;
        if (c == '0' && n != name.n) continue; /* a leading zero is no index */
        struct ptx_symbol *s = find(p, (struct ptx_str){name.s, n - 1}, PTX_SYM_REGS, false);
        if (s != NULL && number < s->count && (range == NULL || s->depth > range->depth)) range = s;
    }
    if (range == NULL || (exact != NULL && exact->depth >= range->depth)) return exact;
    struct ptx_symbol *made = add(p, name, PTX_SYM_REG, range->depth);
    made->type = range->type;
    return made;
}

int32_t ptx_new_slot(struct ptx_parser *p, uint32_t width) {
    uint32_t at = p->frame;
    p->frame += width * PTX_WARP;
    if (p->frame > PTX_MAX_FRAME) ptx_fail(p, p->t.line, "this function uses too many registers");
    return (int32_t)at;
}

/* Sixteen predicates share one 64-byte line. */
int32_t ptx_new_pred(struct ptx_parser *p) {
    if (p->pred_next % 64 == 0) p->pred_next = ptx_new_slot(p, 2);
    int32_t at = p->pred_next;
    p->pred_next += 4;
    return at;
}

int32_t ptx_reg_slot(struct ptx_parser *p, struct ptx_symbol *s) {
    if (s->slot < 0) s->slot = s->type == PTX_PRED ? ptx_new_pred(p) : ptx_new_slot(p, ptx_reg_width(s->type));
    return s->slot;
}

int32_t ptx_constant(struct ptx_parser *p, uint64_t bits, uint32_t width) {
    if (width < 2) width = 2;
    if (width < 8) bits &= ((uint64_t)1 << width * 8) - 1;
    if (p->const_count * 2 >= p->const_hash_size) {
        uint32_t size = p->const_hash_size ? p->const_hash_size * 2 : 256;
        p->const_hash = ptx_alloc(p, size * sizeof *p->const_hash);
        p->const_hash_size = size;
        for (uint32_t i = 0; i < p->const_count; i++) {
            uint64_t h = (p->consts[i].bits + p->consts[i].width) * 0x9e3779b97f4a7c15u >> 32;
            while (p->const_hash[h % size] != 0) h++;
            p->const_hash[h % size] = i + 1;
        }
    }
    uint64_t h = (bits + width) * 0x9e3779b97f4a7c15u >> 32;
    for (;; h++) {
        uint32_t *slot = &p->const_hash[h % p->const_hash_size];
        if (*slot != 0) {
            uint32_t i = *slot - 1;
            if (p->consts[i].bits == bits && p->consts[i].width == width) return -(int32_t)p->consts[i].offset;
            continue;
        }
        p->consts = ptx_grow(p, p->consts, p->const_count, &p->const_room, sizeof *p->consts);
        p->const_bytes += width * PTX_WARP;
        if (p->const_bytes > PTX_MAX_FRAME * 4) ptx_fail(p, p->t.line, "this module uses too many different constants");
        p->consts[p->const_count].bits = bits;
        p->consts[p->const_count].width = width;
        p->consts[p->const_count].offset = p->const_bytes;
        *slot = ++p->const_count;
        return -(int32_t)p->const_bytes;
    }
}

static const struct {
    const char *name;
    enum ptx_type type;
    uint8_t bytes;
} types[] = {
    {"u8", PTX_U8, 1}, {"s8", PTX_S8, 1}, {"b8", PTX_B8, 1}, {"u16", PTX_U16, 2}, {"s16", PTX_S16, 2}, {"b16", PTX_B16, 2},
    {"u32", PTX_U32, 4}, {"s32", PTX_S32, 4}, {"b32", PTX_B32, 4}, {"u64", PTX_U64, 8}, {"s64", PTX_S64, 8}, {"b64", PTX_B64, 8},
    {"b128", PTX_B128, 16}, {"f16", PTX_F16, 2}, {"bf16", PTX_BF16, 2}, {"f16x2", PTX_F16X2, 4}, {"bf16x2", PTX_BF16X2, 4},
    {"f32", PTX_F32, 4}, {"f64", PTX_F64, 8}, {"pred", PTX_PRED, 0}, {"e4m3x2", PTX_E4M3X2, 2}, {"e5m2x2", PTX_E5M2X2, 2}, {"tf32", PTX_TF32, 4},
};

enum ptx_type ptx_type_named(struct ptx_str s) {
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (ptx_is(s, types[i].name)) return types[i].type;
    return PTX_NO_TYPE;
}

uint32_t ptx_type_bytes(enum ptx_type t) {
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (types[i].type == t) return types[i].bytes;
    return 0;
}

uint32_t ptx_reg_width(enum ptx_type t) {
    uint32_t bytes = ptx_type_bytes(t);
    return bytes == 1 ? 2 : bytes;
}

static const struct {
    const char *name;
    uint16_t sreg;
    bool vector;
} sregs[] = {
    {"tid", PTX_SREG_TID, true}, {"ntid", PTX_SREG_NTID, true}, {"ctaid", PTX_SREG_CTAID, true}, {"nctaid", PTX_SREG_NCTAID, true},
    {"cluster_ctaid", PTX_SREG_CLUSTER_CTAID, true}, {"cluster_nctaid", PTX_SREG_CLUSTER_NCTAID, true},
    {"clusterid", PTX_SREG_CLUSTERID, true}, {"nclusterid", PTX_SREG_NCLUSTERID, true},
    {"laneid", PTX_SREG_LANEID, false}, {"warpid", PTX_SREG_WARPID, false}, {"nwarpid", PTX_SREG_NWARPID, false},
    {"smid", PTX_SREG_SMID, false}, {"nsmid", PTX_SREG_NSMID, false}, {"gridid", PTX_SREG_GRIDID, false},
    {"clock", PTX_SREG_CLOCK, false}, {"clock_hi", PTX_SREG_CLOCK_HI, false}, {"clock64", PTX_SREG_CLOCK64, false},
    {"globaltimer", PTX_SREG_TIMER, false}, {"globaltimer_lo", PTX_SREG_TIMER_LO, false}, {"globaltimer_hi", PTX_SREG_TIMER_HI, false},
    {"lanemask_eq", PTX_SREG_LANEMASK_EQ, false}, {"lanemask_le", PTX_SREG_LANEMASK_LE, false}, {"lanemask_lt", PTX_SREG_LANEMASK_LT, false},
    {"lanemask_ge", PTX_SREG_LANEMASK_GE, false}, {"lanemask_gt", PTX_SREG_LANEMASK_GT, false},
    {"dynamic_smem_size", PTX_SREG_DYNAMIC_SMEM, false}, {"total_smem_size", PTX_SREG_TOTAL_SMEM, false},
    {"aggr_smem_size", PTX_SREG_TOTAL_SMEM, false}, {"envreg1", PTX_SREG_ENVREG1, false}, {"envreg2", PTX_SREG_ENVREG2, false},
    {"is_explicit_cluster", PTX_SREG_ZERO, false}, {"cluster_ctarank", PTX_SREG_CLUSTER_CTARANK, false},
    {"cluster_nctarank", PTX_SREG_CLUSTER_NCTARANK, false}, {"reserved_smem_offset_begin", PTX_SREG_ZERO, false},
};

int ptx_sreg_named(struct ptx_str s) {
    int part = -1;
    if (s.n > 2 && s.s[s.n - 2] == '.') {
        if (memchr("xyzw", s.s[s.n - 1], 4) == NULL) return -1;
        part = s.s[s.n - 1] == 'w' ? 3 : s.s[s.n - 1] - 'x';
        s.n -= 2;
    }
    for (size_t i = 0; i < sizeof sregs / sizeof sregs[0]; i++)
        if (ptx_is(s, sregs[i].name) && sregs[i].vector == (part >= 0)) return sregs[i].sreg + (part > 0 ? part : 0);
    return -1;
}
