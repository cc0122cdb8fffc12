/* Decoding of instructions: what all of it shares, and the choice between its parts. */
#include "ptx_parse.h"
#include "ptx_half.h"

struct ptx_ins *ptx_emit(struct ptx_parser *p, uint32_t op) {
    struct ptx_function *f = p->f;
    f->code = ptx_grow(p, f->code, f->count, &p->code_room, sizeof *f->code);
    struct ptx_ins *in = &f->code[f->count++];
    *in = (struct ptx_ins){.op = (uint16_t)op, .line = p->t.line, .guard = PTX_UNGUARDED};
    if (p->stmt != NULL) {
        in->guard = p->stmt->guard;
        in->negate = p->stmt->guard_negate;
        if (p->stmt->line != 0) in->line = p->stmt->line;
    }
    return in;
}

static bool heed(const struct ptx_stmt *s, uint32_t which) {
    *s->heeded |= 1u << which;
    return true;
}

bool ptx_mod(const struct ptx_stmt *s, const char *name) {
    for (uint32_t i = 0; i < s->mod_count; i++)
        if (ptx_is(s->mods[i], name)) return heed(s, i);
    return false;
}

bool ptx_mod_prefix(const struct ptx_stmt *s, const char *prefix) {
    size_t n = strlen(prefix);
    for (uint32_t i = 0; i < s->mod_count; i++)
        if (s->mods[i].n >= n && memcmp(s->mods[i].s, prefix, n) == 0) return true;
    return false;
}

enum ptx_type ptx_stmt_type(const struct ptx_stmt *s, uint32_t which) {
    for (uint32_t i = 0; i < s->mod_count; i++) {
        enum ptx_type t = ptx_type_named(s->mods[i]);
        if (t != PTX_NO_TYPE && which-- == 0 && heed(s, i)) return t;
    }
    return PTX_NO_TYPE;
}

enum ptx_space ptx_stmt_space(const struct ptx_stmt *s) {
    static const struct { const char *name; enum ptx_space space; } spaces[] = {
        {"global", PTX_GLOBAL}, {"shared", PTX_SHARED}, {"shared::cta", PTX_SHARED}, {"shared::cluster", PTX_SHARED}, {"local", PTX_LOCAL},
        {"param", PTX_PARAM}, {"param::entry", PTX_PARAM}, {"param::func", PTX_PARAM}, {"const", PTX_CONST},
    };
    for (uint32_t i = 0; i < s->mod_count; i++)
        for (size_t k = 0; k < sizeof spaces / sizeof spaces[0]; k++)
            if (ptx_is(s->mods[i], spaces[k].name) && heed(s, i)) return spaces[k].space;
    return PTX_GENERIC;
}

enum ptx_round ptx_stmt_round(const struct ptx_stmt *s, bool *given) {
    static const char *const names[] = {"rn", "rz", "rm", "rp", "rna"};
    for (uint32_t i = 0; i < 5; i++) {
        if (ptx_mod(s, names[i])) {
            *given = true;
            return (enum ptx_round)i;
        }
    }
    *given = false;
    return PTX_RN;
}

void ptx_need(struct ptx_parser *p, const struct ptx_stmt *s, uint32_t operands) {
    if (s->count < operands) ptx_fail(p, s->line, "'%.*s' needs %u operands and has %u", (int)s->op.n, s->op.s, operands, s->count);
}

uint32_t ptx_cvi(uint32_t to_width, uint32_t from_width, enum ptx_type type) {
    uint32_t to = to_width == 8 ? 2 : to_width == 4 ? 1 : 0, from = from_width == 8 ? 2 : from_width == 4 ? 1 : 0;
    return PTX_CVI_16_16_U8 + (to * 3 + from) * 8 + (uint32_t)type;
}

static enum ptx_type unsigned_of(uint32_t width) { return width == 8 ? PTX_U64 : width == 4 ? PTX_U32 : width == 2 ? PTX_U16 : PTX_U8; }

/* A register narrower or wider than its use: PTX lets conversions, loads and stores do that. Widening follows the type's sign. */
static int32_t resize(struct ptx_parser *p, int32_t slot, uint32_t from, uint32_t to, enum ptx_type type) {
    if (from == to) return slot;
    bool sign = type == PTX_S8 || type == PTX_S16 || type == PTX_S32 || type == PTX_S64;
    enum ptx_type middle = unsigned_of(from < to ? from : to);
    if (sign) middle = (enum ptx_type)(middle + 1);
    int32_t fresh = ptx_new_slot(p, to);
    struct ptx_ins *in = ptx_emit(p, ptx_cvi(to, from, middle));
    in->d = fresh;
    in->a = slot;
    in->width = (uint8_t)to;
    return fresh;
}

static uint64_t immediate(const struct ptx_element *e, enum ptx_type type) {
    float f;
    uint32_t narrow;
    switch (type) {
    case PTX_F32:
    case PTX_TF32:
        if (e->is_float && e->float_width == 4) return e->bits;
        f = e->is_float ? (float)e->real : (float)(int64_t)e->bits;
        memcpy(&narrow, &f, sizeof f);
        return narrow;
    case PTX_F64: {
        double d = e->is_float ? e->real : (double)(int64_t)e->bits;
        uint64_t bits;
        memcpy(&bits, &d, sizeof d);
        return bits;
    }
    case PTX_F16: return e->is_float ? ptx_f32_to_f16((float)e->real) : e->bits;
    case PTX_BF16: return e->is_float ? ptx_f32_to_bf16((float)e->real) : e->bits;
    default:
        if (e->is_float && e->float_width == 0) { /* a decimal fraction where bits are wanted */
            f = (float)e->real;
            memcpy(&narrow, &f, sizeof f);
            return ptx_type_bytes(type) == 8 ? e->bits : narrow;
        }
        return e->bits;
    }
}

int32_t ptx_source_element(struct ptx_parser *p, const struct ptx_element *e, enum ptx_type type) {
    uint32_t width = ptx_reg_width(type);
    if (width == 0 || width > 8) ptx_fail(p, p->stmt->line, "this operand's type is not supported");
    if (e->kind == PTX_O_IMM) return ptx_constant(p, immediate(e, type), width);
    if (e->kind == PTX_O_SREG) {
        uint32_t own = ptx_reg_width(e->type);
        int32_t slot = ptx_new_slot(p, own);
        struct ptx_ins *in = ptx_emit(p, PTX_SREG_OP);
        in->d = slot;
        in->imm = e->slot;
        in->width = (uint8_t)own;
        return resize(p, slot, own, width, PTX_U32);
    }
    if (e->kind != PTX_O_REG) ptx_fail(p, p->stmt->line, "a register or a number was expected as an operand");
    if (e->type == PTX_PRED) ptx_fail(p, p->stmt->line, "a predicate cannot be used as a number");
    return resize(p, e->slot, ptx_reg_width(e->type), width, type);
}

static void use_shared(struct ptx_parser *p, uint32_t index) {
    struct ptx_function *f = p->f;
    for (uint32_t i = 0; i < f->shared_used_count; i++)
        if (f->shared_used[i] == index) return;
    f->shared_used = ptx_grow(p, f->shared_used, f->shared_used_count, &p->shared_used_room, sizeof *f->shared_used);
    f->shared_used[f->shared_used_count++] = index;
}

void ptx_callee(struct ptx_parser *p, uint32_t function) {
    struct ptx_function *f = p->f;
    for (uint32_t i = 0; i < f->callee_count; i++)
        if (f->callees[i] == function) return;
    f->callees = ptx_grow(p, f->callees, f->callee_count, &p->callees_room, sizeof *f->callees);
    f->callees[f->callee_count++] = function;
}

/* A 64-bit slot that holds the address of a variable or function in its own space, plus a number. */
static int32_t symbol_address(struct ptx_parser *p, const struct ptx_symbol *s, int64_t addend) {
    if (s->kind == PTX_SYM_FUNC) {
        ptx_callee(p, s->index);
        return ptx_constant(p, PTX_WINDOW(PTX_WINDOW_CODE) + s->index + 1, 8);
    }
    if (s->kind != PTX_SYM_VAR) ptx_fail(p, p->stmt->line, "'%.*s' has no address", (int)(s->name.n > 100 ? 100 : s->name.n), s->name.s);
    if (s->place == PTX_PLACE_SHARED_OWN || s->place == PTX_PLACE_KERNEL_PARAM) return ptx_constant(p, s->offset + (uint64_t)addend, 8);
    int32_t slot = ptx_new_slot(p, 8);
    struct ptx_ins *in = ptx_emit(p, s->place == PTX_PLACE_GLOBAL ? PTX_GLOBAL_ADDRESS_OP : s->place == PTX_PLACE_LOCAL ? PTX_LOCAL_ADDRESS_OP : PTX_SHARED_ADDRESS_OP);
    in->d = slot;
    in->width = 8;
    in->imm = addend + (s->place == PTX_PLACE_LOCAL ? (int64_t)s->offset : 0);
    in->a = (int32_t)s->index;
    if (s->place == PTX_PLACE_SHARED_MODULE) use_shared(p, s->index);
    return slot;
}

int32_t ptx_source(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type) {
    if (o->kind == PTX_O_SYM) return resize(p, symbol_address(p, o->symbol, o->addend), 8, ptx_reg_width(type), PTX_U64);
    if (o->negate) {
        if (o->kind == PTX_O_IMM) {
            struct ptx_element e = o->e;
            e.bits = e.bits == 0;
            return ptx_source_element(p, &e, type);
        }
        ptx_fail(p, p->stmt->line, "'!' can only stand before a predicate");
    }
    if (o->kind != PTX_O_REG && o->kind != PTX_O_IMM && o->kind != PTX_O_SREG) {
        if (o->kind == PTX_O_NAME) ptx_fail(p, p->stmt->line, "'%.*s' is not declared", (int)(o->name.n > 100 ? 100 : o->name.n), o->name.s);
        ptx_fail(p, p->stmt->line, "a register or a number was expected as an operand of '%.*s'", (int)p->stmt->op.n, p->stmt->op.s);
    }
    return ptx_source_element(p, &o->e, type);
}

int32_t ptx_source_pred(struct ptx_parser *p, const struct ptx_operand *o) {
    if (o->kind == PTX_O_IMM) return ptx_constant(p, (o->e.bits != 0) != o->negate ? PTX_FULL : 0, 4);
    if (o->kind != PTX_O_REG || o->e.type != PTX_PRED) ptx_fail(p, p->stmt->line, "a predicate was expected as an operand of '%.*s'", (int)p->stmt->op.n, p->stmt->op.s);
    if (!o->negate) return o->e.slot;
    int32_t slot = ptx_new_pred(p);
    struct ptx_ins *in = ptx_emit(p, PTX_PNOT_OP);
    in->d = slot;
    in->a = o->e.slot;
    return slot;
}

/* The base register and number of an address. *frame is set when the base of the frame's local memory must be added. */
int32_t ptx_address(struct ptx_parser *p, const struct ptx_operand *o, int64_t *addend, uint32_t *width, enum ptx_space *space) {
    *width = 8;
    if (o->kind != PTX_O_MEM) ptx_fail(p, p->stmt->line, "an address in brackets was expected as an operand of '%.*s'", (int)p->stmt->op.n, p->stmt->op.s);
    *addend = o->addend;
    if (o->base == PTX_O_IMM) return ptx_constant(p, 0, 8);
    if (o->base == PTX_O_REG) {
        *width = ptx_reg_width(o->e.type);
        if (*width == 2 || *width == 0) ptx_fail(p, p->stmt->line, "an address must be a register of 32 or 64 bits");
        if (*space == PTX_PARAM) *space = p->f->entry ? PTX_PARAM : PTX_LOCAL;
        return o->e.slot;
    }
    if (*space == PTX_GENERIC && o->symbol->kind == PTX_SYM_VAR) /* [name] without a space: the name says which */
        *space = o->symbol->space == PTX_PARAM ? PTX_PARAM : o->symbol->space;
    if (*space == PTX_PARAM && o->symbol->place == PTX_PLACE_LOCAL) *space = PTX_LOCAL;
    *addend = 0;
    return symbol_address(p, o->symbol, o->addend);
}

int32_t ptx_dest(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type) {
    uint32_t width = ptx_reg_width(type);
    if (width == 0 || width > 8) ptx_fail(p, p->stmt->line, "this result's type is not supported");
    if (o->kind == PTX_O_SINK) return ptx_new_slot(p, width);
    if (o->kind != PTX_O_REG || o->e.type == PTX_PRED || o->negate)
        ptx_fail(p, p->stmt->line, "a register was expected as the result of '%.*s'", (int)p->stmt->op.n, p->stmt->op.s);
    return ptx_reg_width(o->e.type) == width ? o->e.slot : ptx_new_slot(p, width);
}

void ptx_dest_done(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type, int32_t slot) {
    if (o->kind != PTX_O_REG || o->e.slot == slot) return;
    uint32_t from = ptx_reg_width(type), to = ptx_reg_width(o->e.type);
    bool sign = type == PTX_S8 || type == PTX_S16 || type == PTX_S32 || type == PTX_S64;
    enum ptx_type middle = unsigned_of(from < to ? from : to);
    struct ptx_ins *in = ptx_emit(p, ptx_cvi(to, from, sign ? (enum ptx_type)(middle + 1) : middle));
    in->d = o->e.slot;
    in->a = slot;
    in->width = (uint8_t)to;
}

int32_t ptx_dest_pred(struct ptx_parser *p, const struct ptx_element *e) {
    if (e->kind == PTX_O_SINK) return PTX_SINK;
    if (e->kind != PTX_O_REG || e->type != PTX_PRED) ptx_fail(p, p->stmt->line, "a predicate register was expected as the result of '%.*s'", (int)p->stmt->op.n, p->stmt->op.s);
    return e->slot;
}

/* Modifiers that change nothing here: everything is at least as ordered, as near and as exact as they ask for; or the instruction has
 * no other form, or that one has a name that the decoder looks for. */
static bool indifferent(struct ptx_str mod) {
    static const char *const names[] = {
        "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "cta", "cluster", "gpu", "sys",
        "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified",
        "sync", "aligned", "uni", "approx", "full", "noftz", "lo", "l", "clamp", "wrap", "any", "or", "idx", "to", "global", "shared", "shared::cta",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (ptx_is(mod, names[i])) return true;
    return mod.n > 4 && mod.s[0] == 'L' && (mod.s[1] == '1' || mod.s[1] == '2') && mod.s[2] == ':'; /* cache hints */
}

/* Whether a modifier is left over that the decoder did not look for: it would change what the instruction does. */
static bool left_over(const struct ptx_stmt *s) {
    bool typed = false; /* where no type was asked for there is only one */
    for (uint32_t i = 0; i < s->mod_count; i++) typed = typed || (*s->heeded >> i & 1 && ptx_type_named(s->mods[i]) != PTX_NO_TYPE);
    for (uint32_t i = 0; i < s->mod_count; i++) {
        if (*s->heeded >> i & 1 || indifferent(s->mods[i]) || (!typed && ptx_type_named(s->mods[i]) != PTX_NO_TYPE)) continue;
        return true;
    }
    return false;
}

/* Hints, and fences, which are all full ones: whatever their modifiers. */
static bool hint(struct ptx_str op) {
    static const char *const names[] = {"prefetch", "prefetchu", "discard", "pmevent", "griddepcontrol", "setmaxnreg", "createpolicy", "fence", "membar"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (ptx_is(op, names[i])) return true;
    return false;
}

void ptx_decode(struct ptx_parser *p, const struct ptx_stmt *s) {
    p->stmt = s;
    uint32_t count = p->f->count;
    bool known = ptx_decode_memory(p, s) || ptx_decode_arith(p, s) || ptx_decode_convert(p, s) || ptx_decode_control(p, s);
    if (known && (hint(s->op) || !left_over(s))) return;
    p->f->count = count;
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    struct ptx_str whole = s->op;
    if (s->mod_count != 0) whole.n = (uint32_t)(s->mods[s->mod_count - 1].s + s->mods[s->mod_count - 1].n - s->op.s);
    ext->text = ptx_copy(p, whole);
    ptx_emit(p, PTX_ILLEGAL_OP)->ext = ext;
}
