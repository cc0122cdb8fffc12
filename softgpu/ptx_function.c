/* Functions: their heads, and of their bodies the statements, labels and scopes. */
#include "ptx_parse.h"

static void skip_statement(struct ptx_parser *p) {
    while (p->t.kind != PTX_T_END && !ptx_at(p, ';')) ptx_next(p);
    ptx_expect(p, ';');
}

static void add_label(struct ptx_parser *p, struct ptx_str name) {
    uint32_t h = 5381;
    for (uint32_t i = 0; i < name.n; i++) h = h * 33 + (unsigned char)name.s[i];
    struct ptx_label **at = &p->labels[h % 256];
    for (struct ptx_label *l = *at; l != NULL; l = l->next)
        if (l->scope == p->scope_ids[p->depth] && l->name.n == name.n && memcmp(l->name.s, name.s, name.n) == 0)
            ptx_fail(p, p->t.line, "the label '%.*s' is there twice", (int)(name.n > 100 ? 100 : name.n), name.s);
    struct ptx_label *l = ptx_alloc(p, sizeof *l);
    *l = (struct ptx_label){*at, name, p->scope_ids[p->depth], p->f->count};
    *at = l;
}

static uint32_t find_label(struct ptx_parser *p, const struct ptx_fixup *f) {
    uint32_t h = 5381;
    for (uint32_t i = 0; i < f->name.n; i++) h = h * 33 + (unsigned char)f->name.s[i];
    for (uint32_t scope = f->scope;; scope = p->scope_parent[scope]) {
        for (struct ptx_label *l = p->labels[h % 256]; l != NULL; l = l->next)
            if (l->scope == scope && l->name.n == f->name.n && memcmp(l->name.s, f->name.s, f->name.n) == 0) return l->at;
        if (p->scope_parent[scope] == scope) break;
    }
    ptx_fail(p, f->line, "there is no label '%.*s'", (int)(f->name.n > 100 ? 100 : f->name.n), f->name.s);
}

void ptx_fixup_branch(struct ptx_parser *p, struct ptx_str name, uint32_t at, uint32_t *target) {
    struct ptx_fixup *f = ptx_alloc(p, sizeof *f);
    *f = (struct ptx_fixup){p->fixups, name, p->scope_ids[p->depth], p->t.line, at, target};
    p->fixups = f;
}

/* "name: .branchtargets A, B;" and "name: .callprototype ...;" */
static void labelled_directive(struct ptx_parser *p, struct ptx_str name) {
    bool targets = ptx_is(p->t.text, "branchtargets");
    if (!targets && !ptx_is(p->t.text, "callprototype")) ptx_fail(p, p->t.line, "this directive cannot have a label");
    ptx_next(p);
    struct ptx_symbol *s = ptx_declare(p, name, targets ? PTX_SYM_TARGETS : PTX_SYM_PROTO);
    if (!targets) {
        skip_statement(p);
        return;
    }
    struct ptx_targets *t = ptx_alloc(p, sizeof *t);
    struct ptx_str names[1];
    uint32_t room = 0;
    struct ptx_str *all = NULL;
    do {
        names[0] = ptx_word(p, "a label");
        all = ptx_grow(p, all, t->count, &room, sizeof *all);
        all[t->count++] = names[0];
    } while (ptx_accept(p, ','));
    ptx_expect(p, ';');
    t->at = ptx_alloc(p, (size_t)t->count * sizeof *t->at);
    for (uint32_t i = 0; i < t->count; i++) ptx_fixup_branch(p, all[i], 0, &t->at[i]);
    s->size = t->count;
    s->offset = (uint64_t)(uintptr_t)t->at;
}

/* Names of instructions that the decoder looks at; anything else is taken over unread and faults if it is executed. */
static bool known(struct ptx_str op) {
    static const char *const names[] = {
        "abs", "activemask", "add", "addc", "and", "atom", "bar", "barrier", "bfe", "bfi", "bfind", "bmsk", "bra", "brev", "brkpt", "brx", "call", "clz",
        "cnot", "copysign", "cos", "cp", "createpolicy", "cvt", "cvta", "discard", "div", "dp2a", "dp4a", "elect", "ex2", "exit", "fence", "fma", "fns",
        "griddepcontrol", "isspacep", "ld", "ldmatrix", "ldu", "lg2", "lop3", "mad", "mad24", "madc", "match", "max", "membar", "min", "mma", "mov", "mul", "mul24",
        "nanosleep", "neg", "not", "or", "pmevent", "popc", "prefetch", "prefetchu", "prmt", "rcp", "red", "redux", "rem", "ret", "rsqrt", "sad",
        "selp", "set", "setmaxnreg", "setp", "shf", "shfl", "shl", "shr", "sin", "slct", "sqrt", "st", "sub", "subc", "szext", "tanh", "testp", "trap",
        "vote", "xor",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (ptx_is(op, names[i])) return true;
    return false;
}

static void parse_instruction(struct ptx_parser *p, struct ptx_stmt *s) {
    s->line = p->t.line;
    s->op = ptx_word(p, "an instruction");
    s->mod_count = s->count = 0;
    *s->heeded = 0;
    while (p->t.kind == PTX_T_DOT) {
        if (s->mod_count == PTX_MAX_MODS) ptx_fail(p, s->line, "this instruction has too many parts");
        s->mods[s->mod_count++] = p->t.text;
        ptx_next(p);
    }
    bool foreign = !known(s->op) || ptx_mod_prefix(s, "bulk") || ptx_mod_prefix(s, "mbarrier") || ptx_mod(s, "cluster") || ptx_mod_prefix(s, "sp");
    if (ptx_is(s->op, "barrier") && ptx_mod(s, "cluster")) foreign = false;
    if (ptx_is(s->op, "fence") || ptx_is(s->op, "membar")) { /* whatever its operands: a full fence */
        while (p->t.kind != PTX_T_END && !ptx_at(p, ';')) ptx_next(p);
        foreign = false;
    }
    if (foreign && (ptx_is(s->op, "ld") || ptx_is(s->op, "st") || ptx_is(s->op, "atom") || ptx_is(s->op, "red"))) foreign = ptx_mod_prefix(s, "async") || ptx_mod_prefix(s, "bulk");
    if (foreign) {
        struct ptx_ins *in = ptx_emit(p, PTX_ILLEGAL_OP);
        struct ptx_ext *ext = ptx_alloc(p, sizeof *ext);
        struct ptx_str whole = s->op;
        if (s->mod_count != 0) whole.n = (uint32_t)(s->mods[s->mod_count - 1].s + s->mods[s->mod_count - 1].n - s->op.s);
        ext->text = ptx_copy(p, whole);
        in->ext = ext;
        skip_statement(p);
        return;
    }
    if (ptx_is(s->op, "call")) {
        ptx_parse_call(p, s);
        return;
    }
    if (!ptx_at(p, ';')) {
        do {
            if (s->count == PTX_MAX_OPERANDS) ptx_fail(p, s->line, "this instruction has too many operands");
            ptx_parse_operand(p, &s->o[s->count++]);
        } while (ptx_accept(p, ','));
    }
    ptx_expect(p, ';');
    ptx_decode(p, s);
}

static void parse_directive(struct ptx_parser *p) {
    struct ptx_str s = p->t.text;
    if (ptx_is(s, "loc") || ptx_is(s, "file")) {
        ptx_skip_line(p);
        ptx_next(p);
        return;
    }
    ptx_next(p);
    if (ptx_is(s, "reg")) ptx_parse_reg(p);
    else if (ptx_is(s, "local")) ptx_parse_variable(p, PTX_LOCAL, false);
    else if (ptx_is(s, "param")) ptx_parse_variable(p, PTX_PARAM, false);
    else if (ptx_is(s, "shared")) ptx_parse_variable(p, PTX_SHARED, false);
    else if (ptx_is(s, "global")) ptx_parse_variable(p, PTX_GLOBAL, false);
    else if (ptx_is(s, "const")) ptx_parse_variable(p, PTX_CONST, false);
    else if (ptx_is(s, "extern") && p->t.kind == PTX_T_DOT && ptx_is(p->t.text, "shared")) {
        ptx_next(p);
        ptx_parse_variable(p, PTX_SHARED, true);
    } else if (ptx_is(s, "pragma")) skip_statement(p);
    else ptx_fail(p, p->t.line, "'.%.*s' has no meaning inside a function", (int)(s.n > 60 ? 60 : s.n), s.s);
}

static void parse_body(struct ptx_parser *p) {
    struct ptx_stmt *s = ptx_alloc(p, sizeof *s);
    s->heeded = &p->heeded;
    p->stmt = s;
    uint32_t base = p->depth;
    while (p->depth >= base) {
        s->guard = PTX_UNGUARDED;
        s->guard_negate = false;
        if (p->t.kind == PTX_T_END) ptx_fail(p, p->t.line, "the text ends inside the function '%s'", p->f->name);
        if (ptx_at(p, '{')) {
            ptx_scope_open(p);
            ptx_next(p);
        } else if (ptx_at(p, '}')) {
            if (p->depth > base) {
                ptx_scope_close(p);
                ptx_next(p);
            } else {
                break;
            }
        } else if (ptx_accept(p, ';')) {
            continue;
        } else if (p->t.kind == PTX_T_DOT) {
            parse_directive(p);
        } else if (ptx_accept(p, '@')) {
            s->guard_negate = ptx_accept(p, '!');
            struct ptx_operand o;
            ptx_parse_operand(p, &o);
            if (o.kind != PTX_O_REG || o.e.type != PTX_PRED) ptx_fail(p, p->t.line, "a guard must be a predicate register");
            s->guard = o.e.slot;
            parse_instruction(p, s);
        } else if (p->t.kind == PTX_T_WORD) {
            struct ptx_token first = p->t;
            const char *at = p->p;
            uint32_t line = p->line;
            ptx_next(p);
            if (ptx_accept(p, ':')) {
                if (p->t.kind == PTX_T_DOT && (ptx_is(p->t.text, "branchtargets") || ptx_is(p->t.text, "callprototype"))) labelled_directive(p, first.text);
                else add_label(p, first.text);
            } else {
                p->t = first;
                p->p = at;
                p->line = line;
                parse_instruction(p, s);
            }
        } else {
            ptx_fail(p, p->t.line, "an instruction was expected here");
        }
    }
}

void ptx_parse_function(struct ptx_parser *p, bool entry) {
    struct ptx_function *f = ptx_alloc(p, sizeof *f);
    uint32_t line = p->t.line;
    f->entry = entry;
    f->max_threads = 1024;
    f->cluster = 1;
    f->line = line;
    p->f = f;
    p->code_room = p->callees_room = p->shared_used_room = 0;
    p->frame = 0;
    p->pred_next = 0;
    p->carry = -1;
    p->next_scope = 0;
    p->fixups = NULL;
    p->labels = ptx_alloc(p, 256 * sizeof *p->labels);
    ptx_scope_open(p); /* parameters; the body opens another */
    while (p->t.kind == PTX_T_DOT && !entry) { /* .noreturn, .attribute(...) before the name */
        bool list = ptx_is(p->t.text, "attribute");
        ptx_next(p);
        if (list) {
            while (p->t.kind != PTX_T_END && !ptx_at(p, ')')) ptx_next(p);
            ptx_expect(p, ')');
        }
    }
    if (!entry && ptx_accept(p, '(')) ptx_parse_params(p, &f->results, &f->result_count);
    struct ptx_str name = ptx_word(p, "a function's name");
    f->name = ptx_copy(p, name);
    if (ptx_accept(p, '(')) ptx_parse_params(p, &f->params, &f->param_count);
    /* known before its body is read: it may call itself */
    uint32_t depth = p->depth;
    struct ptx_symbol *s = ptx_lookup(p, name);
    if (s != NULL && s->kind == PTX_SYM_FUNC) {
        f->index = s->index;
        if (p->module->functions[s->index]->defined) {
            struct ptx_function *old = p->module->functions[s->index];
            p->module->functions[s->index] = f; /* a second body is an error below; a mere declaration after it is not */
            f = old;
        } else {
            p->module->functions[s->index] = f;
        }
    } else {
        struct ptx_symbol *keep = p->scopes[depth];
        p->depth = 0;
        s = ptx_declare(p, name, PTX_SYM_FUNC);
        p->depth = depth;
        p->scopes[depth] = keep;
        s->index = f->index = p->module->function_count;
        p->module->functions = ptx_grow(p, p->module->functions, s->index, &p->functions_room, sizeof *p->module->functions);
        p->module->functions[p->module->function_count++] = f;
    }
    while (p->t.kind == PTX_T_DOT) {
        struct ptx_str d = p->t.text;
        ptx_next(p);
        bool max = ptx_is(d, "maxntid"), required = ptx_is(d, "reqntid");
        uint64_t product = 1, n = 0, values[3] = {1, 1, 1};
        if (p->t.kind == PTX_T_INT) {
            do {
                uint64_t v = ptx_integer(p, "a number of threads");
                if (n < 3) values[n] = v > 1u << 20 ? 1u << 20 : v;
                if (n < 3) product *= values[n];
                n++;
            } while (ptx_accept(p, ','));
        } else if (p->t.kind == PTX_T_STRING) {
            ptx_next(p);
            ptx_accept(p, ';');
        } else if (ptx_is(d, "attribute") && ptx_accept(p, '(')) {
            while (p->t.kind != PTX_T_END && !ptx_at(p, ')')) ptx_next(p);
            ptx_expect(p, ')');
        }
        if (ptx_is(d, "reqnctapercluster") && n != 0) p->f->cluster = (uint32_t)product;
        if (max || required) p->f->max_threads = product > 1024 ? 1024 : (unsigned)product;
        if (required)
            for (int i = 0; i < 3; i++) p->f->required[i] = (uint32_t)values[i];
    }
    if (ptx_accept(p, ';')) {
        if (f != p->f) p->module->functions[f->index] = f;
        ptx_scope_close(p);
        p->f = NULL;
        return;
    }
    if (f != p->f) ptx_fail(p, line, "the function '%s' is defined twice", f->name);
    ptx_expect(p, '{');
    f->defined = true;
    ptx_scope_open(p);
    parse_body(p);
    ptx_emit(p, entry ? PTX_EXIT_OP : PTX_RET_OP)->guard = PTX_UNGUARDED; /* falling off the end */
    for (struct ptx_fixup *x = p->fixups; x != NULL; x = x->next) {
        uint32_t at = find_label(p, x);
        if (x->target != NULL) *x->target = at;
        else f->code[x->at].imm = at;
    }
    f->frame_bytes = p->frame;
    ptx_scope_close(p);
    ptx_scope_close(p);
    ptx_expect(p, '}');
    p->f = NULL;
}
