/* Decoding of loads, stores, atomics and matrix instructions. */
#include "ptx_parse.h"

static uint32_t order_flags(const struct ptx_stmt *s) {
    uint32_t flags = 0;
    if (ptx_mod(s, "acquire") || ptx_mod(s, "acq_rel")) flags |= PTX_MEM_ACQUIRE;
    if (ptx_mod(s, "release") || ptx_mod(s, "acq_rel")) flags |= PTX_MEM_RELEASE;
    return flags;
}

static bool decode_ld_st(struct ptx_parser *p, const struct ptx_stmt *s, bool store) {
    ptx_need(p, s, 2);
    enum ptx_type t = ptx_stmt_type(s, 0);
    enum ptx_space space = ptx_stmt_space(s);
    uint32_t size = ptx_type_bytes(t);
    if (size == 0 || size > 8) return false;
    const struct ptx_operand *value = &s->o[store ? 1 : 0], *memory = &s->o[store ? 0 : 1];
    uint32_t lanes = ptx_mod(s, "v2") ? 2 : ptx_mod(s, "v4") ? 4 : ptx_mod(s, "v8") ? 8 : 1;
    if ((value->kind == PTX_O_VEC ? value->count : 1) != lanes) ptx_fail(p, s->line, "this needs %u elements", lanes);
    if (value->kind != PTX_O_VEC && value->kind != PTX_O_REG && value->kind != PTX_O_IMM && value->kind != PTX_O_SINK && !(store && value->kind == PTX_O_SREG))
        ptx_fail(p, s->line, "a register was expected as an operand of '%.*s'", (int)s->op.n, s->op.s);
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    ext->count = lanes;
    for (uint32_t i = 0; i < lanes; i++) {
        const struct ptx_element *e = value->kind == PTX_O_VEC ? &value->v[i] : &value->e;
        struct ptx_element sink = {.kind = PTX_O_SINK};
        if (value->kind == PTX_O_SINK) e = &sink;
        if (e->kind == PTX_O_REG && e->type == PTX_PRED) ptx_fail(p, s->line, "a predicate cannot be loaded or stored");
        if (e->kind == PTX_O_REG && ptx_reg_width(e->type) >= size) {
            ext->v[i] = e->slot;
            ext->width[i] = (uint8_t)ptx_reg_width(e->type);
        } else if (store) {
            ext->v[i] = ptx_source_element(p, e, t);
            ext->width[i] = (uint8_t)ptx_reg_width(t);
        } else if (e->kind == PTX_O_SINK) {
            ext->v[i] = ptx_new_slot(p, ptx_reg_width(t));
            ext->width[i] = (uint8_t)ptx_reg_width(t);
        } else {
            ptx_fail(p, s->line, "this register is too narrow for what is loaded");
        }
    }
    int64_t addend;
    uint32_t width;
    int32_t a = ptx_address(p, memory, &addend, &width, &space);
    bool local_symbol = memory->base == PTX_O_SYM && memory->symbol->kind == PTX_SYM_VAR && memory->symbol->place == PTX_PLACE_LOCAL;
    uint32_t op = store ? PTX_ST_OP : PTX_LD_OP;
    if (space == PTX_PARAM && memory->base == PTX_O_SYM) {
        if (store) ptx_fail(p, s->line, "a kernel's parameters cannot be written");
        op = PTX_LD_PARAM_OP;
        addend = (int64_t)memory->symbol->offset + memory->addend;
        if (addend < 0 || (uint64_t)addend + (uint64_t)size * lanes > p->f->param_bytes) ptx_fail(p, s->line, "this is outside the kernel's parameters");
    } else if (lanes == 1 && size == 4 && ext->width[0] == 4 && width == 8 && order_flags(s) == 0) {
        if (space == PTX_GLOBAL) op = store ? PTX_ST_GLOBAL_32_OP : PTX_LD_GLOBAL_32_OP;
        if (space == PTX_SHARED) op = store ? PTX_ST_SHARED_32_OP : PTX_LD_SHARED_32_OP;
    }
    struct ptx_ins *in = ptx_emit(p, op);
    in->ext = ext;
    in->d = ext->v[0];
    in->a = a;
    in->imm = addend;
    in->type = (uint8_t)t;
    in->sub = (uint8_t)(space == PTX_CONST ? PTX_GLOBAL : space);
    in->aux = (uint8_t)size;
    in->flags = (uint8_t)(order_flags(s) | (width == 4 ? PTX_MEM_ADDRESS_32 : 0));
    (void)local_symbol;
    return true;
}

static bool decode_atomic(struct ptx_parser *p, const struct ptx_stmt *s, bool red) {
    static const char *const names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    enum ptx_type t = ptx_stmt_type(s, 0);
    enum ptx_space space = ptx_stmt_space(s);
    uint32_t size = ptx_type_bytes(t), first = red ? 0 : 1, op = 10;
    if (size < 2 || size > 8 || ptx_mod(s, "v2") || ptx_mod(s, "v4") || ptx_mod(s, "v8")) return false;
    for (uint32_t i = 0; i < 10; i++)
        if (ptx_mod(s, names[i])) op = i;
    if (op == 10) return false;
    bool real = t == PTX_F32 || t == PTX_F64 || (t >= PTX_F16 && t <= PTX_BF16X2);
    bool wrong = real ? (op > PTX_ATOM_MAX && op != PTX_ATOM_EXCH) || (op != PTX_ATOM_ADD && (t == PTX_F32 || t == PTX_F64) && op != PTX_ATOM_EXCH)
                      : (op == PTX_ATOM_INC || op == PTX_ATOM_DEC) && t != PTX_U32;
    if (wrong || (size == 2 && op != PTX_ATOM_CAS && op != PTX_ATOM_EXCH && !real)) return false;
    ptx_need(p, s, first + 2 + (op == PTX_ATOM_CAS));
    int64_t addend;
    uint32_t width;
    int32_t b = ptx_source(p, &s->o[first + 1], t), c = op == PTX_ATOM_CAS ? ptx_source(p, &s->o[first + 2], t) : b;
    int32_t a = ptx_address(p, &s->o[first], &addend, &width, &space);
    int32_t d = red ? PTX_SINK : ptx_dest(p, &s->o[0], t);
    struct ptx_ins *in = ptx_emit(p, PTX_ATOM_OP);
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = c;
    in->imm = addend;
    in->type = (uint8_t)t;
    in->sub = (uint8_t)(space == PTX_CONST ? PTX_GLOBAL : space);
    in->aux = (uint8_t)op;
    in->flags = (uint8_t)(width == 4 ? PTX_MEM_ADDRESS_32 : 0);
    if (!red) ptx_dest_done(p, &s->o[0], t, d);
    return true;
}

static bool decode_cp_async(struct ptx_parser *p, const struct ptx_stmt *s) {
    if (!ptx_mod(s, "async")) return false;
    if (ptx_mod(s, "commit_group") || ptx_mod(s, "wait_group") || ptx_mod(s, "wait_all")) {
        ptx_emit(p, PTX_NOP_OP);
        return true;
    }
    if (!ptx_mod(s, "global")) return false;
    ptx_need(p, s, 3);
    if (s->o[2].kind != PTX_O_IMM || (s->o[2].e.bits != 4 && s->o[2].e.bits != 8 && s->o[2].e.bits != 16)) return false;
    int64_t to_addend, from_addend;
    uint32_t to_width, from_width;
    enum ptx_space to = PTX_SHARED, from = PTX_GLOBAL;
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    int32_t d = ptx_address(p, &s->o[0], &to_addend, &to_width, &to), a = ptx_address(p, &s->o[1], &from_addend, &from_width, &from);
    bool sized = s->count > 3 && (s->o[3].kind == PTX_O_IMM || (s->o[3].kind == PTX_O_REG && ptx_reg_width(s->o[3].e.type) == 4));
    if (s->count > 3 && s->o[3].kind == PTX_O_REG && s->o[3].e.type == PTX_PRED) return false;
    int32_t b = sized ? ptx_source(p, &s->o[3], PTX_U32) : ptx_constant(p, s->o[2].e.bits, 4);
    if (from_width != 8) return false;
    ext->v[0] = d;
    struct ptx_ins *in = ptx_emit(p, PTX_CP_ASYNC_OP);
    in->ext = ext;
    in->a = a;
    in->b = b;
    in->imm = from_addend;
    in->c = (int32_t)to_addend;
    in->aux = (uint8_t)s->o[2].e.bits;
    in->flags = (uint8_t)(to_width == 4 ? PTX_MEM_ADDRESS_32 : 0);
    return true;
}

/* ldmatrix.sync.aligned.m8n8.x4{.trans}.shared.b16 {r, ...}, [p] */
static bool decode_ldmatrix(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 2);
    uint32_t count = ptx_mod(s, "x1") ? 1 : ptx_mod(s, "x2") ? 2 : ptx_mod(s, "x4") ? 4 : 0, width;
    if (!ptx_mod(s, "m8n8") || !ptx_mod(s, "b16") || count == 0) return false;
    if (s->o[0].kind != PTX_O_VEC || s->o[0].count != count) ptx_fail(p, s->line, "ldmatrix.x%u needs a vector of %u registers", count, count);
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    ext->count = count;
    for (uint32_t i = 0; i < count; i++) {
        const struct ptx_element *e = &s->o[0].v[i];
        if (e->kind != PTX_O_REG || ptx_reg_width(e->type) != 4) ptx_fail(p, s->line, "ldmatrix needs registers of 32 bits");
        ext->v[i] = e->slot;
    }
    int64_t addend;
    enum ptx_space space = ptx_stmt_space(s);
    int32_t a = ptx_address(p, &s->o[1], &addend, &width, &space);
    struct ptx_ins *in = ptx_emit(p, PTX_LDMATRIX_OP);
    in->a = a;
    in->ext = ext;
    in->imm = addend;
    in->sub = (uint8_t)space;
    in->aux = ptx_mod(s, "trans");
    in->flags = (uint8_t)(width == 4 ? PTX_MEM_ADDRESS_32 : 0);
    in->c = ptx_constant(p, PTX_FULL, 4);
    return true;
}

/* mma.sync.aligned.m16n8k{8,16}.row.col.{f32,f16}.{f16,bf16}.{f16,bf16}.{f32,f16} d, a, b, c */
static bool decode_mma(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 4);
    uint32_t k = ptx_mod(s, "m16n8k16") ? 16 : ptx_mod(s, "m16n8k8") ? 8 : 0, at = 0;
    enum ptx_type dt = ptx_stmt_type(s, 0), t = ptx_stmt_type(s, 1), bt = ptx_stmt_type(s, 2), ct = ptx_stmt_type(s, 3);
    if (k == 0 || !ptx_mod(s, "row") || !ptx_mod(s, "col") || (t != PTX_F16 && t != PTX_BF16) || bt != t || dt != ct || (dt != PTX_F32 && (dt != PTX_F16 || t != PTX_F16)))
        return false;
    uint32_t sums = dt == PTX_F32 ? 4 : 2, counts[4] = {k / 4, k / 8, sums, sums};
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    for (uint32_t i = 0; i < 4; i++) {
        const struct ptx_operand *o = &s->o[(i + 1) % 4]; /* a, b, c, then d */
        uint32_t count = o->kind == PTX_O_VEC ? o->count : 1;
        if (count != counts[i]) ptx_fail(p, s->line, "a factor of this product needs %u registers and has %u", counts[i], count);
        for (uint32_t e = 0; e < count; e++) {
            const struct ptx_element *r = o->kind == PTX_O_VEC ? &o->v[e] : &o->e;
            bool reg = r->kind == PTX_O_REG && (o->kind == PTX_O_VEC || o->kind == PTX_O_REG);
            if (i == 3 && (!reg || ptx_reg_width(r->type) != 4)) ptx_fail(p, s->line, "the result of a product needs registers of 32 bits");
            if (i != 3 && o->kind != PTX_O_VEC && !reg) ptx_fail(p, s->line, "a factor of a product must be a register");
            ext->v[at++] = i == 3 ? r->slot : ptx_source_element(p, r, i == 2 && dt == PTX_F32 ? PTX_F32 : PTX_B32);
        }
    }
    struct ptx_ins *in = ptx_emit(p, PTX_MMA_OP);
    in->ext = ext;
    in->c = ptx_constant(p, PTX_FULL, 4);
    in->type = (uint8_t)t;
    in->sub = (uint8_t)dt;
    in->aux = (uint8_t)k;
    return true;
}

bool ptx_decode_memory(struct ptx_parser *p, const struct ptx_stmt *s) {
    struct ptx_str op = s->op;
    if (ptx_is(op, "ld") || ptx_is(op, "ldu")) return decode_ld_st(p, s, false);
    if (ptx_is(op, "st")) return decode_ld_st(p, s, true);
    if (ptx_is(op, "atom")) return decode_atomic(p, s, false);
    if (ptx_is(op, "red")) return decode_atomic(p, s, true);
    if (ptx_is(op, "ldmatrix")) return decode_ldmatrix(p, s);
    if (ptx_is(op, "mma")) return decode_mma(p, s);
    if (ptx_is(op, "cp")) return decode_cp_async(p, s);
    if (ptx_is(op, "prefetch") || ptx_is(op, "prefetchu") || ptx_is(op, "discard") || ptx_is(op, "pmevent") || ptx_is(op, "griddepcontrol") || ptx_is(op, "setmaxnreg")) {
        ptx_emit(p, PTX_NOP_OP);
        return true;
    }
    if (ptx_is(op, "createpolicy")) { /* a cache hint: any value does */
        ptx_need(p, s, 1);
        int32_t d = ptx_dest(p, &s->o[0], PTX_B64);
        struct ptx_ins *in = ptx_emit(p, PTX_MOV_64);
        in->d = d;
        in->a = ptx_constant(p, 0, 8);
        in->width = 8;
        return true;
    }
    if (ptx_is(op, "membar") || ptx_is(op, "fence")) {
        ptx_emit(p, PTX_FENCE_OP);
        return true;
    }
    return false;
}
