/* Decoding of branches, calls, barriers and of what the lanes of a warp exchange. */
#include "ptx_parse.h"

static int32_t member_mask(struct ptx_parser *p, const struct ptx_operand *o) { return ptx_source(p, o, PTX_B32); }

static bool decode_branch(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 1);
    if (s->o[0].kind != PTX_O_NAME) ptx_fail(p, s->line, "a branch needs a label");
    ptx_emit(p, PTX_BRA_OP);
    ptx_fixup_branch(p, s->o[0].name, p->f->count - 1, NULL);
    return true;
}

static bool decode_brx(struct ptx_parser *p, const struct ptx_stmt *s) {
    ptx_need(p, s, 2);
    struct ptx_symbol *list = s->o[1].symbol;
    if (s->o[1].kind != PTX_O_NAME || list == NULL || list->kind != PTX_SYM_TARGETS) ptx_fail(p, s->line, "brx.idx needs the name of a list of branch targets");
    int32_t a = ptx_source(p, &s->o[0], PTX_U32);
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    ext->targets = (const uint32_t *)(uintptr_t)list->offset;
    ext->target_count = (uint32_t)list->size;
    struct ptx_ins *in = ptx_emit(p, PTX_BRX_OP);
    in->a = a;
    in->ext = ext;
    return true;
}

/* bar.sync a, b;  bar.arrive a, b;  bar.red.popc.u32 d, a, b, p;  bar.red.and.pred p, a, b, q;  and barrier{.cta}.… */
static bool decode_bar(struct ptx_parser *p, const struct ptx_stmt *s) {
    if (ptx_mod(s, "cluster")) {
        bool wait = ptx_mod(s, "wait");
        if (!wait && !ptx_mod(s, "arrive")) return false;
        ptx_emit(p, PTX_BAR_CLUSTER_OP)->sub = wait;
        return true;
    }
    if (ptx_mod(s, "warp")) {
        ptx_need(p, s, 1);
        int32_t mask = member_mask(p, &s->o[0]);
        ptx_emit(p, PTX_BAR_WARP_OP)->c = mask;
        return true;
    }
    bool red = ptx_mod(s, "red"), arrive = ptx_mod(s, "arrive");
    if (!red && !arrive && !ptx_mod(s, "sync")) return false;
    uint32_t at = red ? 1 : 0, left = s->count;
    ptx_need(p, s, red ? 3 : arrive ? 2 : 1);
    enum { SYNC, ARRIVE, POPC, AND, OR } kind = arrive ? ARRIVE : !red ? SYNC : ptx_mod(s, "popc") ? POPC : ptx_mod(s, "and") ? AND : OR;
    int32_t id = ptx_source(p, &s->o[at], PTX_U32), count = PTX_SINK, pred = 0, d = PTX_SINK;
    if (left - at > (red ? 2u : 1u)) count = ptx_source(p, &s->o[at + 1], PTX_U32);
    if (red) {
        pred = ptx_source_pred(p, &s->o[left - 1]);
        d = kind == POPC ? ptx_dest(p, &s->o[0], PTX_U32) : ptx_dest_pred(p, &s->o[0].e);
    }
    struct ptx_ins *in = ptx_emit(p, PTX_BAR_OP);
    in->a = id;
    in->b = count;
    in->c = pred;
    in->d = d;
    in->sub = (uint8_t)kind;
    return true;
}

static bool decode_shfl(struct ptx_parser *p, const struct ptx_stmt *s) {
    static const char *const modes[] = {"up", "down", "bfly", "idx"};
    bool sync = ptx_mod(s, "sync");
    ptx_need(p, s, sync ? 5 : 4);
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    uint32_t mode = 4;
    for (uint32_t i = 0; i < 4; i++)
        if (ptx_mod(s, modes[i])) mode = i;
    if (mode == 4) return false;
    int32_t a = ptx_source(p, &s->o[1], PTX_B32), b = ptx_source(p, &s->o[2], PTX_B32), mask = PTX_SINK;
    ext->v[0] = ptx_source(p, &s->o[3], PTX_B32);
    ext->v[1] = s->o[0].has_second ? ptx_dest_pred(p, &s->o[0].second) : PTX_SINK;
    if (sync) mask = member_mask(p, &s->o[4]);
    int32_t d = ptx_dest(p, &s->o[0], PTX_B32);
    struct ptx_ins *in = ptx_emit(p, PTX_SHFL_OP);
    in->d = d;
    in->a = a;
    in->b = b;
    in->c = mask;
    in->sub = (uint8_t)mode;
    in->ext = ext;
    ptx_dest_done(p, &s->o[0], PTX_B32, d);
    return true;
}

static bool decode_vote(struct ptx_parser *p, const struct ptx_stmt *s) {
    static const char *const modes[] = {"all", "any", "uni", "ballot"};
    bool sync = ptx_mod(s, "sync");
    ptx_need(p, s, sync ? 3 : 2);
    uint32_t mode = 4;
    for (uint32_t i = 0; i < 4; i++)
        if (ptx_mod(s, modes[i])) mode = i;
    if (mode == 4) return false;
    int32_t a = ptx_source_pred(p, &s->o[1]), mask = sync ? member_mask(p, &s->o[2]) : PTX_SINK;
    int32_t d = mode == 3 ? ptx_dest(p, &s->o[0], PTX_B32) : ptx_dest_pred(p, &s->o[0].e);
    struct ptx_ins *in = ptx_emit(p, PTX_VOTE_OP);
    in->d = d;
    in->a = a;
    in->c = mask;
    in->sub = (uint8_t)mode;
    return true;
}

static bool decode_match(struct ptx_parser *p, const struct ptx_stmt *s) {
    enum ptx_type t = ptx_stmt_type(s, 0);
    ptx_need(p, s, 3);
    if (t != PTX_B32 && t != PTX_B64) return false;
    int32_t a = ptx_source(p, &s->o[1], t), mask = member_mask(p, &s->o[2]), d = ptx_dest(p, &s->o[0], PTX_B32);
    int32_t q = s->o[0].has_second ? ptx_dest_pred(p, &s->o[0].second) : PTX_SINK;
    struct ptx_ins *in = ptx_emit(p, PTX_MATCH_OP);
    in->d = d;
    in->a = a;
    in->c = mask;
    in->imm = q;
    in->sub = ptx_mod(s, "all");
    in->aux = (uint8_t)ptx_reg_width(t);
    return true;
}

static bool decode_redux(struct ptx_parser *p, const struct ptx_stmt *s) {
    static const char *const modes[] = {"add", "min", "max", "and", "or", "xor"};
    enum ptx_type t = ptx_stmt_type(s, 0);
    ptx_need(p, s, 3);
    if (ptx_reg_width(t) != 4 || t == PTX_F32) return false;
    for (uint32_t i = 0; i < 6; i++) {
        if (!ptx_mod(s, modes[i])) continue;
        int32_t a = ptx_source(p, &s->o[1], t), mask = member_mask(p, &s->o[2]), d = ptx_dest(p, &s->o[0], t);
        struct ptx_ins *in = ptx_emit(p, PTX_REDUX_OP);
        in->d = d;
        in->a = a;
        in->c = mask;
        in->sub = (uint8_t)i;
        in->type = (uint8_t)t;
        return true;
    }
    return false;
}

/* The local variable behind an argument or result of a call. */
static uint32_t call_variable(struct ptx_parser *p, const struct ptx_operand *o, uint32_t *size) {
    if (o->kind != PTX_O_SYM || o->symbol->place != PTX_PLACE_LOCAL || o->symbol->kind != PTX_SYM_VAR)
        ptx_fail(p, p->stmt->line, "only .param variables can be passed to a function here");
    *size = (uint32_t)o->symbol->size;
    return (uint32_t)o->symbol->offset;
}

static uint32_t call_list(struct ptx_parser *p, struct ptx_move **moves) {
    uint32_t count = 0, room = 0;
    *moves = NULL;
    if (ptx_accept(p, ')')) return 0;
    do {
        struct ptx_operand o;
        ptx_parse_operand(p, &o);
        *moves = ptx_grow(p, *moves, count, &room, sizeof **moves);
        (*moves)[count].from = call_variable(p, &o, &(*moves)[count].size);
        count++;
    } while (ptx_accept(p, ','));
    ptx_expect(p, ')');
    return count;
}

static uint32_t builtin_named(const char *name) {
    static const char *const names[] = {"vprintf", "__assertfail", "malloc", "free"};
    for (uint32_t i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) return i;
    return PTX_BUILTIN_NONE;
}

/* call{.uni} (results), name, (arguments), prototype; everything but the name may be missing. */
void ptx_parse_call(struct ptx_parser *p, struct ptx_stmt *s) {
    struct ptx_move *in = NULL, *out = NULL;
    uint32_t in_count = 0, out_count = 0;
    p->stmt = s;
    if (ptx_accept(p, '(')) {
        out_count = call_list(p, &out);
        ptx_expect(p, ',');
    }
    struct ptx_operand target;
    ptx_parse_operand(p, &target);
    if (ptx_accept(p, ',')) {
        if (ptx_accept(p, '(')) {
            in_count = call_list(p, &in);
            if (ptx_accept(p, ',')) (void)ptx_word(p, "a prototype's name");
        } else {
            (void)ptx_word(p, "a prototype's name");
        }
    }
    ptx_expect(p, ';');
    struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
    ext->in = in;
    ext->out = out;
    ext->in_count = in_count;
    ext->out_count = out_count;
    if (target.kind == PTX_O_REG) {
        int32_t a = ptx_source(p, &target, PTX_U64);
        p->f->indirect = true;
        ext->indirect = true;
        struct ptx_ins *i = ptx_emit(p, PTX_CALL_INDIRECT_OP);
        i->a = a;
        i->ext = ext;
        return;
    }
    if (target.kind != PTX_O_SYM || target.symbol->kind != PTX_SYM_FUNC) ptx_fail(p, s->line, "this function is not declared");
    ext->function = target.symbol->index;
    struct ptx_function *callee = p->module->functions[ext->function];
    if (callee->entry) ptx_fail(p, s->line, "a kernel cannot be called");
    ext->builtin = callee->defined || callee == p->f ? PTX_BUILTIN_NONE : builtin_named(callee->name);
    if (callee->param_count != in_count || callee->result_count != out_count) ptx_fail(p, s->line, "this call does not fit the declaration of '%s'", callee->name);
    for (uint32_t i = 0; i < in_count; i++) {
        in[i].to = callee->params[i].offset;
        if (in[i].size != callee->params[i].size) ptx_fail(p, s->line, "argument %u of this call has another size than '%s' declares", i + 1, callee->name);
    }
    for (uint32_t i = 0; i < out_count; i++) {
        out[i].to = out[i].from;
        out[i].from = callee->results[i].offset;
        if (out[i].size != callee->results[i].size) ptx_fail(p, s->line, "result %u of this call has another size than '%s' declares", i + 1, callee->name);
    }
    if (ext->builtin == PTX_BUILTIN_NONE) ptx_callee(p, ext->function);
    ptx_emit(p, ext->builtin == PTX_BUILTIN_NONE ? PTX_CALL_OP : PTX_CALL_BUILTIN_OP)->ext = ext;
}

bool ptx_decode_control(struct ptx_parser *p, const struct ptx_stmt *s) {
    struct ptx_str op = s->op;
    if (ptx_is(op, "bra")) return decode_branch(p, s);
    if (ptx_is(op, "brx")) return decode_brx(p, s);
    if (ptx_is(op, "bar") || ptx_is(op, "barrier")) return decode_bar(p, s);
    if (ptx_is(op, "shfl")) return decode_shfl(p, s);
    if (ptx_is(op, "vote")) return decode_vote(p, s);
    if (ptx_is(op, "match")) return decode_match(p, s);
    if (ptx_is(op, "redux")) return decode_redux(p, s);
    if (ptx_is(op, "activemask")) {
        ptx_need(p, s, 1);
        int32_t d = ptx_dest(p, &s->o[0], PTX_B32);
        ptx_emit(p, PTX_ACTIVEMASK_OP)->d = d;
        return true;
    }
    if (ptx_is(op, "elect")) {
        ptx_need(p, s, 2);
        int32_t mask = member_mask(p, &s->o[1]), d = ptx_dest(p, &s->o[0], PTX_B32);
        if (!s->o[0].has_second) ptx_fail(p, s->line, "elect.sync needs a predicate");
        int32_t q = ptx_dest_pred(p, &s->o[0].second);
        struct ptx_ins *in = ptx_emit(p, PTX_ELECT_OP);
        in->d = d;
        in->c = mask;
        in->imm = q;
        return true;
    }
    static const struct { const char *name; uint32_t op; } plain[] = {
        {"exit", PTX_EXIT_OP}, {"trap", PTX_TRAP_OP}, {"brkpt", PTX_TRAP_OP}, {"nanosleep", PTX_YIELD_OP},
    };
    if (ptx_is(op, "ret")) return ptx_emit(p, p->f->entry ? PTX_EXIT_OP : PTX_RET_OP) != NULL;
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++)
        if (ptx_is(op, plain[i].name)) return ptx_emit(p, plain[i].op) != NULL;
    return false;
}
