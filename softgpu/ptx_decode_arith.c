/* Decoding of arithmetic, logic, comparison and selection. */
#include "ptx_parse.h"

static uint32_t width_index(enum ptx_type t) {
    uint32_t w = ptx_reg_width(t);
    return w == 8 ? 2 : w == 4 ? 1 : 0;
}

/* u16 s16 u32 s32 u64 s64, the order of the families in ptx_ops.def; untyped bits count as unsigned. */
static uint32_t type_index(enum ptx_type t) {
    switch (t) {
    case PTX_S16: return 1;
    case PTX_U32: case PTX_B32: return 2;
    case PTX_S32: return 3;
    case PTX_U64: case PTX_B64: return 4;
    case PTX_S64: return 5;
    default: return 0;
    }
}

static bool is_int(enum ptx_type t) { return (t >= PTX_U16 && t <= PTX_S64) || (t >= PTX_B16 && t <= PTX_B64); }
static bool is_half(enum ptx_type t) { return t == PTX_F16 || t == PTX_BF16 || t == PTX_F16X2 || t == PTX_BF16X2; }
static bool is_float(enum ptx_type t) { return is_half(t) || t == PTX_F32 || t == PTX_F64; }

/* d, a, b, c of one type each; an operand's type PTX_NO_TYPE: there is none. */
static struct ptx_ins *emit_typed(struct ptx_parser *p, const struct ptx_stmt *s, uint32_t op, enum ptx_type dt, enum ptx_type at, enum ptx_type bt, enum ptx_type ct) {
    uint32_t count = 2u + (bt != PTX_NO_TYPE) + (ct != PTX_NO_TYPE);
    ptx_need(p, s, count);
    if (s->count > count + 1) ptx_fail(p, s->line, "'%.*s' has too many operands", (int)s->op.n, s->op.s);
    int32_t a = ptx_source(p, &s->o[1], at), b = 0, c = 0;
    if (bt != PTX_NO_TYPE) b = ptx_source(p, &s->o[2], bt);
    if (ct != PTX_NO_TYPE) c = ptx_source(p, &s->o[3], ct);
    int32_t d = ptx_dest(p, &s->o[0], dt);
    struct ptx_ins *in = ptx_emit(p, op);
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = c;
    in->type = (uint8_t)at;
    in->width = (uint8_t)ptx_reg_width(dt);
    if (s->o[0].kind == PTX_O_REG && s->o[0].e.slot != d) {
        ptx_dest_done(p, &s->o[0], dt, d);
        in = &p->f->code[p->f->count - 2];
    }
    return in;
}

static bool emit_fp(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_fp_op fp, enum ptx_type t, uint32_t operands, uint32_t fast_f32, uint32_t fast_f64) {
    bool given;
    enum ptx_round round = ptx_stmt_round(s, &given);
    uint32_t flags = (ptx_mod(s, "ftz") ? PTX_FTZ : 0) | (ptx_mod(s, "sat") ? PTX_SAT : 0) | (ptx_mod(s, "NaN") ? PTX_NAN_FLAG : 0) |
                     (ptx_mod(s, "xorsign") ? PTX_XORSIGN : 0) | (ptx_mod(s, "relu") ? PTX_RELU : 0) | (ptx_mod(s, "abs") ? PTX_ABS_FLAG : 0);
    enum ptx_type none = PTX_NO_TYPE, two = operands >= 2 ? t : none, three = operands >= 3 ? t : none;
    uint32_t fast = t == PTX_F32 ? fast_f32 : t == PTX_F64 ? fast_f64 : PTX_FP_OP;
    if (round != PTX_RN || flags != 0) fast = PTX_FP_OP;
    if (operands == 2 && s->count == 4 && (fp == PTX_FP_MIN || fp == PTX_FP_MAX)) return false; /* three-input minimum */
    struct ptx_ins *in = emit_typed(p, s, fast, t, t, two, three);
    in->sub = (uint8_t)fp;
    in->flags = (uint8_t)flags;
    in->aux = (uint8_t)round;
    return true;
}

static bool emit_int(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_int_op op, enum ptx_type dt, enum ptx_type at, enum ptx_type bt, enum ptx_type ct, uint32_t flags) {
    struct ptx_ins *in = emit_typed(p, s, PTX_INT_OP, dt, at, bt, ct);
    in->sub = (uint8_t)op;
    in->flags = (uint8_t)flags;
    return true;
}

/* add.cc, addc, mad.lo.cc ...: the carry lives in a predicate of the frame. flags: 1 carry in, 2 carry out, 4 signed */
static bool emit_carry(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_int_op op, enum ptx_type t, bool in_carry) {
    if (p->carry < 0) p->carry = ptx_new_pred(p);
    bool three = op == PTX_INT_CARRY_MADLO || op == PTX_INT_CARRY_MADHI;
    uint32_t flags = (in_carry ? 1u : 0) | (ptx_mod(s, "cc") ? 2u : 0) | (t == PTX_S32 || t == PTX_S64 ? 4u : 0);
    struct ptx_ins *in = emit_typed(p, s, PTX_INT_OP, t, t, t, three ? t : PTX_NO_TYPE);
    in->sub = (uint8_t)op;
    in->flags = (uint8_t)flags;
    in->imm = p->carry;
    return true;
}

static bool decode_add(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t) {
    bool sub = s->op.s[0] == 's', carry_in = ptx_is(s->op, "addc") || ptx_is(s->op, "subc");
    if (is_float(t) && ptx_stmt_type(s, 1) == PTX_NO_TYPE) return emit_fp(p, s, sub ? PTX_FP_SUB : PTX_FP_ADD, t, 2, sub ? PTX_SUB_F32 : PTX_ADD_F32, sub ? PTX_SUB_F64 : PTX_ADD_F64);
    if (!is_int(t)) return false;
    if (carry_in || ptx_mod(s, "cc")) return emit_carry(p, s, sub ? PTX_INT_CARRY_SUB : PTX_INT_CARRY_ADD, t, carry_in);
    if (ptx_mod(s, "sat")) return emit_int(p, s, sub ? PTX_INT_SUB_SAT : PTX_INT_ADD_SAT, t, t, t, PTX_NO_TYPE, 0);
    emit_typed(p, s, (sub ? PTX_SUB_16 : PTX_ADD_16) + width_index(t), t, t, t, PTX_NO_TYPE);
    return true;
}

static enum ptx_type wider(enum ptx_type t) {
    switch (t) {
    case PTX_U16: return PTX_U32;
    case PTX_S16: return PTX_S32;
    case PTX_U32: return PTX_U64;
    case PTX_S32: return PTX_S64;
    default: return PTX_NO_TYPE;
    }
}

static bool decode_multiply(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t) {
    bool mad = s->op.n > 2 && s->op.s[0] == 'm' && s->op.s[1] == 'a', fma = ptx_is(s->op, "fma");
    if (is_float(t)) {
        if (mad || fma) return emit_fp(p, s, PTX_FP_FMA, t, 3, PTX_FMA_F32, PTX_FMA_F64);
        return emit_fp(p, s, PTX_FP_MUL, t, 2, PTX_MUL_F32, PTX_MUL_F64);
    }
    if (!is_int(t) || fma) return false;
    enum ptx_type none = PTX_NO_TYPE;
    if (ptx_is(s->op, "mul24") || ptx_is(s->op, "mad24"))
        return emit_int(p, s, mad ? PTX_INT_MAD24 : PTX_INT_MUL24, t, t, t, mad ? t : none, (ptx_mod(s, "hi") ? 1u : 0) | (ptx_mod(s, "sat") ? 2u : 0));
    bool carry_in = ptx_is(s->op, "madc");
    if (carry_in || (mad && ptx_mod(s, "cc"))) return emit_carry(p, s, ptx_mod(s, "hi") ? PTX_INT_CARRY_MADHI : PTX_INT_CARRY_MADLO, t, carry_in);
    if (ptx_mod(s, "wide")) {
        enum ptx_type w = wider(t);
        if (w == none) return false;
        emit_typed(p, s, (mad ? PTX_MADWIDE_U16 : PTX_MULWIDE_U16) + type_index(t), w, t, t, mad ? w : none);
    } else if (ptx_mod(s, "hi")) {
        if (ptx_mod(s, "sat")) return emit_int(p, s, PTX_INT_MADHI_SAT, t, t, t, t, 0);
        emit_typed(p, s, (mad ? PTX_MADHI_U16 : PTX_MULHI_U16) + type_index(t), t, t, t, mad ? t : none);
    } else {
        emit_typed(p, s, (mad ? PTX_MAD_16 : PTX_MUL_16) + width_index(t), t, t, t, mad ? t : none);
    }
    return true;
}

static int compare_index(struct ptx_str name) {
    static const char *const names[] = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
    static const char *const unsigned_names[] = {"lo", "ls", "hi", "hs"};
    for (int i = 0; i < 14; i++)
        if (ptx_is(name, names[i])) return i;
    for (int i = 0; i < 4; i++)
        if (ptx_is(name, unsigned_names[i])) return i + 2;
    return -1;
}

/* Emits the comparison; d and imm are the slots of the two results. */
static bool emit_compare(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t, int32_t d, int32_t q) {
    int cmp = s->mod_count ? compare_index(s->mods[0]) : -1;
    if (cmp < 0) return false;
    *s->heeded |= 1;
    ptx_need(p, s, 3);
    uint32_t boolean = ptx_mod(s, "and") ? 1 : ptx_mod(s, "or") ? 2 : ptx_mod(s, "xor") ? 3 : 0;
    int32_t a = ptx_source(p, &s->o[1], t), b = ptx_source(p, &s->o[2], t), c = 0;
    if (boolean != 0) {
        ptx_need(p, s, 4);
        c = ptx_source_pred(p, &s->o[3]);
    }
    uint32_t op;
    if (is_int(t)) {
        if (cmp > 5) return false;
        op = PTX_CMP_EQ_U16 + type_index(t) * 6 + (uint32_t)cmp;
    } else if (t == PTX_F64 || (t == PTX_F32 && !ptx_mod(s, "ftz"))) {
        op = (t == PTX_F32 ? PTX_CMP_EQ_F32 : PTX_CMP_EQ_F64) + (uint32_t)cmp;
    } else if (is_float(t)) {
        op = PTX_SETP_HALF_OP;
    } else {
        return false;
    }
    struct ptx_ins *in = ptx_emit(p, op);
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = c;
    in->imm = q;
    in->sub = (uint8_t)boolean;
    in->type = (uint8_t)t;
    in->aux = (uint8_t)cmp;
    in->flags = ptx_mod(s, "ftz") ? PTX_FTZ : 0;
    return true;
}

static bool decode_setp(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 3);
    int32_t q = s->o[0].has_second ? ptx_dest_pred(p, &s->o[0].second) : PTX_SINK;
    return emit_compare(p, s, ptx_stmt_type(s, 0), ptx_dest_pred(p, &s->o[0].e), q);
}

static void emit_selp(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t, int32_t a, int32_t b, int32_t pred) {
    int32_t d = ptx_dest(p, &s->o[0], t);
    struct ptx_ins *in = ptx_emit(p, PTX_SELP_16_OP + width_index(t));
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = pred;
    in->width = (uint8_t)ptx_reg_width(t);
    ptx_dest_done(p, &s->o[0], t, d);
}

static bool decode_set(struct ptx_parser *p, const struct ptx_stmt *s) {
    enum ptx_type dt = ptx_stmt_type(s, 0), st = ptx_stmt_type(s, 1);
    if (ptx_reg_width(dt) == 0 || st == PTX_NO_TYPE || st == PTX_F16X2 || st == PTX_BF16X2) return false;
    int32_t pred = ptx_new_pred(p);
    if (!emit_compare(p, s, st, pred, PTX_SINK)) return false;
    uint64_t yes = dt == PTX_F32 ? 0x3f800000u : dt == PTX_F16 ? 0x3c00u : dt == PTX_BF16 ? 0x3f80u : ~(uint64_t)0;
    emit_selp(p, s, dt, ptx_constant(p, yes, ptx_reg_width(dt)), ptx_constant(p, 0, ptx_reg_width(dt)), pred);
    return true;
}

static bool decode_logic(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t, uint32_t op, uint32_t pred_op) {
    if (t == PTX_PRED) {
        ptx_need(p, s, pred_op == PTX_PNOT_OP ? 2 : 3);
        int32_t a = ptx_source_pred(p, &s->o[1]), b = pred_op == PTX_PNOT_OP ? 0 : ptx_source_pred(p, &s->o[2]);
        int32_t d = ptx_dest_pred(p, &s->o[0].e);
        if (d == PTX_SINK) d = ptx_new_pred(p);
        struct ptx_ins *in = ptx_emit(p, pred_op);
        in->d = d;
        in->a = a;
        in->b = b;
        return true;
    }
    if (ptx_reg_width(t) == 0 || ptx_reg_width(t) > 8) return false;
    emit_typed(p, s, op + width_index(t), t, t, pred_op == PTX_PNOT_OP ? PTX_NO_TYPE : t, PTX_NO_TYPE);
    return true;
}

static bool decode_bits(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t) {
    enum ptx_type none = PTX_NO_TYPE;
    bool wide = ptx_reg_width(t) == 8;
    struct ptx_str op = s->op;
    if (!is_int(t)) return false;
    if (ptx_is(op, "popc")) emit_typed(p, s, wide ? PTX_POPC_64 : PTX_POPC_32, PTX_U32, t, none, none);
    else if (ptx_is(op, "clz")) emit_typed(p, s, wide ? PTX_CLZ_64 : PTX_CLZ_32, PTX_U32, t, none, none);
    else if (ptx_is(op, "brev")) emit_typed(p, s, wide ? PTX_BREV_64 : PTX_BREV_32, t, t, none, none);
    else if (ptx_is(op, "bfind")) emit_int(p, s, PTX_INT_BFIND, PTX_U32, t, none, none, ptx_mod(s, "shiftamt") ? 1 : 0);
    else if (ptx_is(op, "bfe")) emit_typed(p, s, (wide ? PTX_BFE_U64 : PTX_BFE_U32) + (t == PTX_S32 || t == PTX_S64), t, t, PTX_U32, PTX_U32);
    else if (ptx_is(op, "bmsk")) emit_int(p, s, PTX_INT_BMSK, t, t, PTX_U32, none, ptx_mod(s, "wrap") ? 1 : 0);
    else if (ptx_is(op, "szext")) emit_int(p, s, PTX_INT_SZEXT, t, t, PTX_U32, none, ptx_mod(s, "wrap") ? 1 : 0);
    else if (ptx_is(op, "fns")) emit_int(p, s, PTX_INT_FNS, PTX_B32, PTX_B32, PTX_U32, PTX_S32, 0);
    else if (ptx_is(op, "bfi")) {
        ptx_need(p, s, 5);
        int32_t length = ptx_source(p, &s->o[4], PTX_U32), d, a = ptx_source(p, &s->o[1], t), b = ptx_source(p, &s->o[2], t), c = ptx_source(p, &s->o[3], PTX_U32);
        d = ptx_dest(p, &s->o[0], t);
        struct ptx_ins *in = ptx_emit(p, PTX_INT_OP);
        *in = (struct ptx_ins){.op = PTX_INT_OP, .width = (uint8_t)ptx_reg_width(t), .negate = in->negate, .guard = in->guard, .d = d, .a = a, .b = b, .c = c, .sub = PTX_INT_BFI, .type = (uint8_t)t, .line = in->line, .imm = length};
        ptx_dest_done(p, &s->o[0], t, d);
    } else return false;
    return true;
}

static bool decode_lop3(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 5);
    if (s->count > 5 || s->o[4].kind != PTX_O_IMM || s->o[0].has_second) return false;
    int32_t a = ptx_source(p, &s->o[1], PTX_B32), b = ptx_source(p, &s->o[2], PTX_B32), c = ptx_source(p, &s->o[3], PTX_B32), d = ptx_dest(p, &s->o[0], PTX_B32);
    struct ptx_ins *in = ptx_emit(p, PTX_LOP3_OP);
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = c;
    in->width = 4;
    in->aux = (uint8_t)s->o[4].e.bits;
    ptx_dest_done(p, &s->o[0], PTX_B32, d);
    return true;
}

static bool decode_unary_fp(struct ptx_parser *p, const struct ptx_stmt *s, enum ptx_type t) {
    static const struct { const char *name; enum ptx_fp_op fp; uint32_t f32, f64; } ops[] = {
        {"sqrt", PTX_FP_SQRT, PTX_SQRT_F32, PTX_SQRT_F64}, {"rcp", PTX_FP_RCP, PTX_RCP_F32, PTX_RCP_F64}, {"rsqrt", PTX_FP_RSQRT, PTX_FP_OP, PTX_FP_OP},
        {"sin", PTX_FP_SIN, PTX_FP_OP, PTX_FP_OP}, {"cos", PTX_FP_COS, PTX_FP_OP, PTX_FP_OP}, {"lg2", PTX_FP_LG2, PTX_FP_OP, PTX_FP_OP},
        {"ex2", PTX_FP_EX2, PTX_FP_OP, PTX_FP_OP}, {"tanh", PTX_FP_TANH, PTX_FP_OP, PTX_FP_OP},
    };
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
        if (ptx_is(s->op, ops[i].name)) return is_float(t) && emit_fp(p, s, ops[i].fp, t, 1, ops[i].f32, ops[i].f64);
    return false;
}

bool ptx_decode_arith(struct ptx_parser *p, const struct ptx_stmt *s) {
    enum ptx_type t = ptx_stmt_type(s, 0), none = PTX_NO_TYPE;
    struct ptx_str op = s->op;
    if (ptx_is(op, "add") || ptx_is(op, "sub") || ptx_is(op, "addc") || ptx_is(op, "subc")) return decode_add(p, s, t);
    if (ptx_is(op, "mul") || ptx_is(op, "mad") || ptx_is(op, "fma") || ptx_is(op, "madc") || ptx_is(op, "mul24") || ptx_is(op, "mad24")) return decode_multiply(p, s, t);
    if (ptx_is(op, "setp")) return decode_setp(p, s);
    if (ptx_is(op, "set")) return decode_set(p, s);
    if (ptx_is(op, "and")) return decode_logic(p, s, t, PTX_AND_16, PTX_PAND_OP);
    if (ptx_is(op, "or")) return decode_logic(p, s, t, PTX_OR_16, PTX_POR_OP);
    if (ptx_is(op, "xor")) return decode_logic(p, s, t, PTX_XOR_16, PTX_PXOR_OP);
    if (ptx_is(op, "not")) return decode_logic(p, s, t, PTX_NOT_16, PTX_PNOT_OP);
    if (ptx_is(op, "cnot") && is_int(t)) return emit_typed(p, s, PTX_CNOT_16 + width_index(t), t, t, none, none) != NULL;
    if (ptx_is(op, "shl") && is_int(t)) return emit_typed(p, s, PTX_SHL_16 + width_index(t), t, t, PTX_U32, none) != NULL;
    if (ptx_is(op, "shr") && is_int(t)) return emit_typed(p, s, PTX_SHR_U16 + type_index(t), t, t, PTX_U32, none) != NULL;
    if (ptx_is(op, "rem") && is_int(t)) return emit_typed(p, s, PTX_REM_U16 + type_index(t), t, t, t, none) != NULL;
    if (ptx_is(op, "sad") && is_int(t)) return emit_typed(p, s, PTX_SAD_U16 + type_index(t), t, t, t, t) != NULL;
    if (ptx_is(op, "div")) {
        if (is_int(t)) return emit_typed(p, s, PTX_DIV_U16 + type_index(t), t, t, t, none) != NULL;
        return is_float(t) && emit_fp(p, s, PTX_FP_DIV, t, 2, PTX_DIV_F32, PTX_DIV_F64);
    }
    if (ptx_is(op, "min") || ptx_is(op, "max")) {
        bool max = op.s[1] == 'a';
        if (is_int(t)) return emit_typed(p, s, (max ? PTX_MAX_U16 : PTX_MIN_U16) + type_index(t), t, t, t, none) != NULL;
        return is_float(t) && emit_fp(p, s, max ? PTX_FP_MAX : PTX_FP_MIN, t, 2, max ? PTX_MAX_F32 : PTX_MIN_F32, max ? PTX_MAX_F64 : PTX_MIN_F64);
    }
    if (ptx_is(op, "neg") || ptx_is(op, "abs")) {
        bool neg = op.s[0] == 'n';
        if (is_int(t)) return emit_typed(p, s, (neg ? PTX_NEG_16 : PTX_ABS_16) + width_index(t), t, t, none, none) != NULL;
        return is_float(t) && emit_fp(p, s, neg ? PTX_FP_NEG : PTX_FP_ABS, t, 1, neg ? PTX_NEG_F32 : PTX_ABS_F32, neg ? PTX_NEG_F64 : PTX_ABS_F64);
    }
    if (ptx_is(op, "copysign") && (t == PTX_F32 || t == PTX_F64)) return emit_typed(p, s, t == PTX_F32 ? PTX_COPYSIGN_F32 : PTX_COPYSIGN_F64, t, t, t, none) != NULL;
    if (ptx_is(op, "selp")) {
        ptx_need(p, s, 4);
        if (ptx_reg_width(t) == 0 || ptx_reg_width(t) > 8) return false;
        int32_t a = ptx_source(p, &s->o[1], t), b = ptx_source(p, &s->o[2], t);
        emit_selp(p, s, t, a, b, ptx_source_pred(p, &s->o[3]));
        return true;
    }
    if (ptx_is(op, "slct")) {
        enum ptx_type ct = ptx_stmt_type(s, 1);
        if (ct != PTX_S32 && ct != PTX_F32) return false;
        return emit_typed(p, s, (ct == PTX_S32 ? PTX_SLCT_16 : PTX_SLCTF_16) + width_index(t), t, t, t, ct) != NULL;
    }
    if (ptx_is(op, "shf")) {
        uint32_t o = ptx_mod(s, "clamp") ? PTX_SHFL_CLAMP : PTX_SHFL_WRAP;
        return emit_typed(p, s, o + ptx_mod(s, "r"), PTX_B32, PTX_B32, PTX_B32, PTX_U32) != NULL;
    }
    if (ptx_is(op, "lop3")) return decode_lop3(p, s);
    if (ptx_is(op, "prmt")) {
        static const char *const modes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
        uint32_t mode = 0;
        for (uint32_t i = 1; i < 7; i++)
            if (ptx_mod(s, modes[i])) mode = i;
        return emit_int(p, s, PTX_INT_PRMT, PTX_B32, PTX_B32, PTX_B32, PTX_B32, mode);
    }
    if (ptx_is(op, "dp4a") || ptx_is(op, "dp2a")) {
        uint32_t flags = (ptx_stmt_type(s, 0) == PTX_S32 ? 1u : 0) | (ptx_stmt_type(s, 1) == PTX_S32 ? 2u : 0) | (ptx_mod(s, "hi") ? 4u : 0);
        return emit_int(p, s, op.s[2] == '4' ? PTX_INT_DP4A : PTX_INT_DP2A, PTX_B32, PTX_B32, PTX_B32, PTX_B32, flags);
    }
    if (ptx_is(op, "testp")) {
        static const char *const tests[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
        if (t != PTX_F32 && t != PTX_F64) return false;
        ptx_need(p, s, 2);
        for (uint32_t i = 0; i < 6; i++) {
            if (!ptx_mod(s, tests[i])) continue;
            int32_t a = ptx_source(p, &s->o[1], t), d = ptx_dest_pred(p, &s->o[0].e);
            struct ptx_ins *in = ptx_emit(p, PTX_TESTP_OP);
            in->d = d;
            in->a = a;
            in->sub = (uint8_t)i;
            in->type = (uint8_t)t;
            return true;
        }
        return false;
    }
    return decode_bits(p, s, t) || decode_unary_fp(p, s, t);
}
