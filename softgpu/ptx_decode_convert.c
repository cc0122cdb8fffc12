/* Decoding of moves, conversions of value and of address. */
#include "ptx_parse.h"

static bool is_integer(enum ptx_type t) { return t <= PTX_S64 || (t >= PTX_B8 && t <= PTX_B64); }

static enum ptx_type plain(enum ptx_type t) {
    switch (t) {
    case PTX_B8: return PTX_U8;
    case PTX_B16: return PTX_U16;
    case PTX_B32: return PTX_U32;
    case PTX_B64: return PTX_U64;
    default: return t;
    }
}

/* Between integers, without saturation: one operation on the registers as they are, whatever their widths. */
static bool integer_to_integer(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type dt, enum ptx_type st) {
    const struct ptx_operand *from = &s->o[1], *to = &s->o[0];
    uint32_t from_width = from->kind == PTX_O_REG ? ptx_reg_width(from->e.type) : ptx_reg_width(st);
    int32_t a = from->kind == PTX_O_REG && from->e.type != PTX_PRED ? from->e.slot : ptx_source(p, from, st);
    bool chop = ptx_type_bytes(dt) <= ptx_type_bytes(st);
    int32_t d = ptx_dest(p, to, dt);
    uint32_t width = ptx_reg_width(dt);
    if (from_width == 0) ptx_fail(p, s->line, "a predicate cannot be converted");
    struct ptx_ins *in = ptx_emit(p, ptx_cvi(width, from_width, chop ? dt : st));
    in->d = d;
    in->a = a;
    in->width = (uint8_t)width;
    ptx_dest_done(p, to, dt, d);
    return true;
}

static uint32_t direct_conversion(enum ptx_type dt, enum ptx_type st, enum ptx_round round) {
    if (st >= PTX_U32 && st <= PTX_S64 && round == PTX_RN) {
        if (dt == PTX_F32) return PTX_CVT_F32_U32 + (st - PTX_U32);
        if (dt == PTX_F64) return PTX_CVT_F64_U32 + (st - PTX_U32);
    }
    if (dt == PTX_F64 && st == PTX_F32) return PTX_CVT_F64_F32;
    if (dt == PTX_F32 && st == PTX_F64 && round == PTX_RN) return PTX_CVT_F32_F64;
    if (dt == PTX_S32 && st == PTX_F32 && round == PTX_RZ) return PTX_CVT_S32_F32;
    if (dt == PTX_F32 && st == PTX_F16) return PTX_CVT_F32_F16;
    if (dt == PTX_F16 && st == PTX_F32 && round == PTX_RN) return PTX_CVT_F16_F32;
    return PTX_CVT_OP;
}

static bool decode_cvt(struct ptx_parser *p, const struct ptx_stmt *s) {
    enum ptx_type dt = plain(ptx_stmt_type(s, 0)), st = plain(ptx_stmt_type(s, 1));
    if (dt == PTX_NO_TYPE || st == PTX_NO_TYPE || ptx_mod(s, "pack") || ptx_mod(s, "rs")) return false;
    ptx_need(p, s, 2);
    bool given, integral = false;
    enum ptx_round round = ptx_stmt_round(s, &given);
    static const char *const integral_names[] = {"rni", "rzi", "rmi", "rpi"};
    for (uint32_t i = 0; i < 4; i++)
        if (ptx_mod(s, integral_names[i])) round = (enum ptx_round)i, integral = true;
    uint32_t flags = (ptx_mod(s, "ftz") ? PTX_FTZ : 0) | (ptx_mod(s, "sat") ? PTX_SAT : 0) | (ptx_mod(s, "relu") ? PTX_RELU : 0) |
                     (ptx_mod(s, "satfinite") ? PTX_SATFINITE : 0) | (integral ? PTX_INTEGER : 0);
    if (is_integer(dt) && is_integer(st) && !(flags & PTX_SAT)) return integer_to_integer(p, s, dt, st);
    bool packed = dt == PTX_F16X2 || dt == PTX_BF16X2 || dt == PTX_E4M3X2 || dt == PTX_E5M2X2;
    uint32_t op = flags == 0 || (integral && is_integer(dt) && (flags & ~PTX_INTEGER) == 0) ? direct_conversion(dt, st, round) : PTX_CVT_OP;
    int32_t a = ptx_source(p, &s->o[1], st), b = 0;
    if (packed && st == PTX_F32) {
        ptx_need(p, s, 3);
        b = ptx_source(p, &s->o[2], st);
    } else if (packed && st != PTX_E4M3X2 && st != PTX_E5M2X2 && st != PTX_F16X2 && st != PTX_BF16X2) {
        return false;
    } else if (!packed && (st == PTX_F16X2 || st == PTX_BF16X2 || st == PTX_E4M3X2 || st == PTX_E5M2X2)) {
        return false;
    }
    int32_t d = ptx_dest(p, &s->o[0], dt);
    struct ptx_ins *in = ptx_emit(p, op);
    in->d = d;
    in->a = a;
    in->b = b;
    in->width = (uint8_t)ptx_reg_width(dt);
    in->type = (uint8_t)dt;
    in->sub = (uint8_t)st;
    in->aux = (uint8_t)round;
    in->flags = (uint8_t)flags;
    ptx_dest_done(p, &s->o[0], dt, d);
    return true;
}

static bool decode_pack(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t) {
    bool unpack = s->o[0].kind == PTX_O_VEC;
    const struct ptx_operand *vec = &s->o[unpack ? 0 : 1];
    uint32_t part = vec->count ? ptx_type_bytes(t) / vec->count : 0;
    if (part == 0 || part * vec->count != ptx_type_bytes(t) || ptx_type_bytes(t) > 8) return false;
    enum ptx_type pt = part == 4 ? PTX_B32 : part == 2 ? PTX_B16 : PTX_B8;
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    ext->count = vec->count;
    int32_t other = unpack ? ptx_source(p, &s->o[1], t) : ptx_dest(p, &s->o[0], t);
    for (uint32_t i = 0; i < vec->count; i++) {
        const struct ptx_element *e = &vec->v[i];
        ext->width[i] = (uint8_t)ptx_reg_width(pt);
        if (unpack && e->kind == PTX_O_SINK) {
            ext->v[i] = PTX_SINK;
        } else if (unpack) {
            if (e->kind != PTX_O_REG || ptx_reg_width(e->type) != ptx_reg_width(pt)) ptx_fail(p, s->line, "the parts of this vector must be registers of %u bits", part * 8);
            ext->v[i] = e->slot;
        } else {
            ext->v[i] = ptx_source_element(p, e, pt);
        }
    }
    struct ptx_ins *in = ptx_emit(p, unpack ? PTX_UNPACK_OP : PTX_PACK_OP);
    in->ext = ext;
    in->aux = (uint8_t)part;
    in->type = (uint8_t)t;
    if (unpack) {
        in->a = other;
        in->imm = ptx_reg_width(t);
    } else {
        in->d = other;
        in->width = (uint8_t)ptx_reg_width(t);
        ptx_dest_done(p, &s->o[0], t, other);
    }
    return true;
}

static bool decode_mov(struct ptx_parser *p, const struct ptx_stmt *s) {
    enum ptx_type t = ptx_stmt_type(s, 0);
    ptx_need(p, s, 2);
    if (t == PTX_PRED) {
        int32_t a = ptx_source_pred(p, &s->o[1]), d = ptx_dest_pred(p, &s->o[0].e);
        if (d == PTX_SINK) d = ptx_new_pred(p);
        struct ptx_ins *in = ptx_emit(p, PTX_PMOV_OP);
        in->d = d;
        in->a = a;
        return true;
    }
    if (s->o[0].kind == PTX_O_VEC && s->o[1].kind == PTX_O_VEC) return false;
    if (s->o[0].kind == PTX_O_VEC || s->o[1].kind == PTX_O_VEC) return decode_pack(p, s, t);
    uint32_t width = ptx_reg_width(t);
    if (width == 0 || width > 8) return false;
    if (s->o[1].kind == PTX_O_SREG && s->o[0].kind == PTX_O_REG && ptx_reg_width(s->o[0].e.type) == ptx_reg_width(s->o[1].e.type)) {
        struct ptx_ins *in = ptx_emit(p, PTX_SREG_OP);
        in->d = s->o[0].e.slot;
        in->imm = s->o[1].e.slot;
        in->width = (uint8_t)ptx_reg_width(s->o[1].e.type);
        return true;
    }
    int32_t a = ptx_source(p, &s->o[1], t), d = ptx_dest(p, &s->o[0], t);
    struct ptx_ins *in = ptx_emit(p, width == 8 ? PTX_MOV_64 : width == 4 ? PTX_MOV_32 : PTX_MOV_16);
    in->d = d;
    in->a = a;
    in->width = (uint8_t)width;
    ptx_dest_done(p, &s->o[0], t, d);
    return true;
}

/* Generic addresses of global and constant memory are the addresses themselves; the others carry their window above bit 48. */
static bool decode_cvta(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 2);
    enum ptx_space space = ptx_stmt_space(s);
    enum ptx_type t = ptx_stmt_type(s, 0);
    if (t != PTX_U64) return false;
    int32_t a = ptx_source(p, &s->o[1], t), d = ptx_dest(p, &s->o[0], t);
    uint32_t op = PTX_MOV_64;
    int32_t b = 0;
    if (space == PTX_SHARED || space == PTX_LOCAL || space == PTX_PARAM) {
        enum ptx_window w = space == PTX_SHARED ? PTX_WINDOW_SHARED : space == PTX_LOCAL || !p->f->entry ? PTX_WINDOW_LOCAL : PTX_WINDOW_PARAM;
        bool to = ptx_mod(s, "to");
        op = to ? PTX_AND_64 : PTX_ADD_64;
        b = ptx_constant(p, to ? PTX_WINDOW(1) - 1 : PTX_WINDOW(w), 8);
    }
    struct ptx_ins *in = ptx_emit(p, op);
    in->d = d;
    in->a = a;
    in->b = b;
    in->width = 8;
    ptx_dest_done(p, &s->o[0], t, d);
    return true;
}

bool ptx_decode_convert(struct ptx_parser *p, const struct ptx_stmt *s) {
    if (ptx_is(s->op, "mov")) return decode_mov(p, s);
    if (ptx_is(s->op, "cvt")) return decode_cvt(p, s);
    if (ptx_is(s->op, "cvta")) return decode_cvta(p, s);
    if (ptx_is(s->op, "isspacep")) {
        ptx_need(p, s, 2);
        enum ptx_space space = ptx_stmt_space(s);
        int32_t a = ptx_source(p, &s->o[1], PTX_U64), d = ptx_dest_pred(p, &s->o[0].e);
        struct ptx_ins *in = ptx_emit(p, PTX_ISSPACEP_OP);
        in->a = a;
        in->d = d;
        in->aux = space == PTX_SHARED ? PTX_WINDOW_SHARED : space == PTX_LOCAL ? PTX_WINDOW_LOCAL : space == PTX_PARAM ? PTX_WINDOW_PARAM : space == PTX_CONST ? 255 : PTX_WINDOW_GLOBAL;
        return true;
    }
    return false;
}
