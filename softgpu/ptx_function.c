/* Declarations and function bodies. */
#include "ptx_parse.h"

static uint64_t integer(struct ptx_parser *p, const char *what) {
    uint32_t line = p->t.line;
    struct ptx_value v = ptx_expression(p);
    if (v.is_float || v.symbol != NULL) ptx_fail(p, line, "%s must be a whole number", what);
    return v.bits;
}

static void skip_statement(struct ptx_parser *p) {
    while (p->t.kind != PTX_T_END && !ptx_at(p, ';')) ptx_next(p);
    ptx_expect(p, ';');
}

/* The part of a declaration before the name: ".align 8 .v2 .b32", in any order, with pointer attributes. */
struct decl {
    uint64_t align, size; /* of one element */
    enum ptx_type type;
    bool opaque;
};

static struct decl parse_type(struct ptx_parser *p) {
    struct decl d = {.type = PTX_NO_TYPE};
    uint64_t vector = 1;
    bool pointer = false;
    while (p->t.kind == PTX_T_DOT) {
        struct ptx_str s = p->t.text;
        uint32_t line = p->t.line;
        ptx_next(p);
        if (ptx_is(s, "align")) {
            uint64_t align = integer(p, "an alignment");
            if (align == 0 || (align & (align - 1)) != 0 || align > 4096) ptx_fail(p, line, "this alignment is not a power of two up to 4096");
            if (!pointer) d.align = align; /* after .ptr it speaks of the memory pointed to */
        } else if (ptx_is(s, "v2") || ptx_is(s, "v4") || ptx_is(s, "v8")) {
            vector = (uint64_t)(s.s[1] - '0');
        } else if (ptx_is(s, "ptr")) {
            pointer = true;
        } else if (ptx_is(s, "texref") || ptx_is(s, "samplerref") || ptx_is(s, "surfref")) {
            d.opaque = true;
            d.type = PTX_B64;
        } else if (ptx_is(s, "attribute")) {
            ptx_expect(p, '(');
            while (p->t.kind != PTX_T_END && !ptx_at(p, ')')) ptx_next(p);
            ptx_expect(p, ')');
        } else if (ptx_is(s, "global") || ptx_is(s, "const") || ptx_is(s, "shared") || ptx_is(s, "local") || ptx_is(s, "param")) {
            if (!pointer) ptx_fail(p, line, "a second state space in one declaration");
        } else {
            enum ptx_type t = ptx_type_named(s);
            if (t == PTX_NO_TYPE) ptx_fail(p, line, "'.%.*s' is not a type", (int)(s.n > 60 ? 60 : s.n), s.s);
            d.type = t;
        }
    }
    if (d.type == PTX_NO_TYPE) ptx_fail(p, p->t.line, "this declaration has no type");
    d.size = ptx_type_bytes(d.type) * vector;
    if (d.align == 0) d.align = d.size ? d.size : 1;
    return d;
}

/* "[4][8]" multiplied out; *open is set by an empty first dimension. */
static uint64_t parse_dimensions(struct ptx_parser *p, bool *array, bool *open) {
    uint64_t count = 1;
    *array = *open = false;
    while (ptx_accept(p, '[')) {
        *array = true;
        if (ptx_accept(p, ']')) {
            *open = true;
            continue;
        }
        uint64_t n = integer(p, "an array's size");
        if (n > (uint64_t)1 << 40 || count > ((uint64_t)1 << 40) / (n ? n : 1)) ptx_fail(p, p->t.line, "this array is too large");
        count *= n;
        ptx_expect(p, ']');
    }
    return count;
}

struct init {
    struct ptx_variable *v;
    size_t room;
    uint64_t at, limit;
    enum ptx_type type;
};

static void put(struct ptx_parser *p, struct init *in, const struct ptx_value *v) {
    uint32_t size = ptx_type_bytes(in->type);
    if (size == 0 || size > 8) ptx_fail(p, p->t.line, "values of this type cannot be initialised");
    if (in->at + size > in->limit) ptx_fail(p, p->t.line, "there are more values than the variable has room for");
    if (in->at + size > in->room) {
        size_t room = in->room ? in->room * 2 : 256;
        unsigned char *more = ptx_alloc(p, room);
        if (in->v->init != NULL) memcpy(more, in->v->init, in->v->init_size);
        in->v->init = more;
        in->room = room;
    }
    uint64_t bits = v->bits;
    if (v->is_float) {
        if (in->type == PTX_F32) {
            float f = (float)v->real;
            uint32_t narrow;
            memcpy(&narrow, &f, sizeof f);
            bits = v->float_width == 4 ? v->bits : narrow;
        } else {
            memcpy(&bits, &v->real, sizeof bits);
        }
    } else if (in->type == PTX_F32 || in->type == PTX_F64) {
        double d = (double)(int64_t)v->bits;
        float f = (float)d;
        bits = 0;
        if (in->type == PTX_F32) memcpy(&bits, &f, sizeof f);
        else memcpy(&bits, &d, sizeof d);
    }
    if (v->symbol != NULL) {
        struct ptx_reloc *r = ptx_alloc(p, sizeof *r);
        r->offset = in->at;
        r->size = size;
        r->shift = v->mask ? (uint32_t)__builtin_ctzll(v->mask) : 0;
        r->addend = (int64_t)v->bits;
        r->global = r->function = -1;
        if (v->symbol->kind == PTX_SYM_FUNC) r->function = (int32_t)v->symbol->index;
        else if (v->symbol->place == PTX_PLACE_GLOBAL) r->global = (int32_t)v->symbol->index;
        else ptx_fail(p, p->t.line, "only addresses of global variables and functions are known before a launch");
        r->next = in->v->relocs;
        in->v->relocs = r;
        bits = 0;
    }
    memcpy(in->v->init + in->at, &bits, size);
    in->at += size;
    if (in->at > in->v->init_size) in->v->init_size = in->at;
}

static void parse_init(struct ptx_parser *p, struct init *in, uint32_t depth) {
    if (depth > 16) ptx_fail(p, p->t.line, "braces are nested too deeply");
    if (ptx_accept(p, '{')) {
        if (ptx_accept(p, '}')) return;
        do parse_init(p, in, depth + 1);
        while (ptx_accept(p, ','));
        ptx_expect(p, '}');
    } else if (p->t.kind == PTX_T_STRING) {
        for (uint32_t i = 0; i < p->t.text.n; i++) {
            struct ptx_value v = {.bits = (unsigned char)p->t.text.s[i]};
            put(p, in, &v);
        }
        ptx_next(p);
    } else {
        struct ptx_value v = ptx_expression(p);
        put(p, in, &v);
    }
}

static uint64_t align_up(uint64_t x, uint64_t align) { return (x + align - 1) & ~(align - 1); }

/* A variable in the local memory of the function at hand: .local, and .param other than a kernel's own. */
static struct ptx_symbol *declare_local(struct ptx_parser *p, struct ptx_str name, uint64_t size, uint64_t align) {
    struct ptx_symbol *s = ptx_declare(p, name, PTX_SYM_VAR);
    s->place = PTX_PLACE_LOCAL;
    s->space = PTX_LOCAL;
    s->size = size;
    if (align < 8) align = 8;
    s->offset = align_up(p->f->local_bytes, align);
    if (size > PTX_MAX_LOCAL || s->offset + size > PTX_MAX_LOCAL) ptx_fail(p, p->t.line, "a thread's local memory would pass %u bytes", PTX_MAX_LOCAL);
    p->f->local_bytes = (uint32_t)(s->offset + size);
    return s;
}

/* Consumes ".space" already; handles "type name[dims] = init, name...;". */
void ptx_parse_variable(struct ptx_parser *p, enum ptx_space space, bool external) {
    struct decl d = parse_type(p);
    do {
        uint32_t line = p->t.line;
        struct ptx_str name = ptx_word(p, "a variable's name");
        if (ptx_at(p, '<')) { /* .param .b32 p<4>; : numbered like registers; rare, spelt out */
            ptx_fail(p, line, "numbered variables are not supported");
        }
        bool array, open;
        uint64_t count = parse_dimensions(p, &array, &open), size = d.size * (open ? 0 : count);
        if (size > (uint64_t)1 << 40) ptx_fail(p, line, "this variable is too large");
        struct ptx_symbol *old = ptx_lookup(p, name);
        bool again = old != NULL && old->kind == PTX_SYM_VAR && old->depth == p->depth && (old->place == PTX_PLACE_GLOBAL || old->place == PTX_PLACE_SHARED_MODULE);
        if (space == PTX_GLOBAL || space == PTX_CONST) {
            struct ptx_symbol *s = again ? old : ptx_declare(p, name, PTX_SYM_VAR);
            if (!again) {
                s->place = PTX_PLACE_GLOBAL;
                s->space = space;
                s->index = p->module->variable_count;
                p->module->variables = ptx_grow(p, p->module->variables, s->index, &p->variables_room, sizeof *p->module->variables);
                p->module->variables[s->index] = ptx_alloc(p, sizeof **p->module->variables);
                p->module->variable_count++;
            }
            struct ptx_variable *v = p->module->variables[s->index];
            struct init in = {.v = v, .limit = open ? (uint64_t)1 << 40 : size, .type = d.type};
            if (ptx_accept(p, '=')) {
                v->init = NULL;
                v->init_size = 0;
                v->relocs = NULL;
                parse_init(p, &in, 0);
            }
            if (open) size = in.at;
            (void)external;
            v->info = (struct ptx_global){ptx_copy(p, name), size > v->info.size ? size : v->info.size, d.align, space == PTX_CONST};
            s->size = size;
        } else if (space == PTX_SHARED) {
            bool dynamic = external || open;
            if (size > PTX_MAX_SHARED) ptx_fail(p, line, "shared memory would pass %u bytes", PTX_MAX_SHARED);
            if (again) continue;
            struct ptx_symbol *s = ptx_declare(p, name, PTX_SYM_VAR);
            s->space = PTX_SHARED;
            s->size = size;
            if (p->f != NULL && p->f->entry && !dynamic) {
                s->place = PTX_PLACE_SHARED_OWN;
                s->offset = align_up(p->f->own_shared, d.align);
                p->f->own_shared = s->offset + size;
                if (p->f->own_shared > PTX_MAX_SHARED) ptx_fail(p, line, "shared memory would pass %u bytes", PTX_MAX_SHARED);
            } else {
                s->place = PTX_PLACE_SHARED_MODULE;
                s->index = p->module->shared_count;
                p->module->shared = ptx_grow(p, p->module->shared, s->index, &p->shared_room, sizeof *p->module->shared);
                struct ptx_shared *sh = p->module->shared[s->index] = ptx_alloc(p, sizeof *sh);
                p->module->shared_count++;
                *sh = (struct ptx_shared){ptx_copy(p, name), size, d.align, dynamic};
            }
            if (ptx_accept(p, '=')) ptx_fail(p, line, "shared memory cannot be initialised");
        } else {
            if (p->f == NULL) ptx_fail(p, line, "this variable can only be declared inside a function");
            declare_local(p, name, size, d.align);
        }
    } while (ptx_accept(p, ','));
    ptx_expect(p, ';');
}

void ptx_parse_reg(struct ptx_parser *p) {
    enum ptx_type type = PTX_NO_TYPE;
    uint32_t line = p->t.line;
    while (p->t.kind == PTX_T_DOT) {
        type = ptx_type_named(p->t.text);
        if (type == PTX_NO_TYPE || type == PTX_B128) ptx_fail(p, line, "registers of the type '.%.*s' are not supported", (int)(p->t.text.n > 60 ? 60 : p->t.text.n), p->t.text.s);
        ptx_next(p);
    }
    if (type == PTX_NO_TYPE) ptx_fail(p, line, "this register has no type");
    do {
        struct ptx_str name = ptx_word(p, "a register's name");
        if (ptx_accept(p, '<')) {
            uint64_t count = integer(p, "a number of registers");
            ptx_expect(p, '>');
            struct ptx_symbol *s = ptx_declare(p, name, PTX_SYM_REGS);
            s->type = type;
            s->count = count > UINT32_MAX ? UINT32_MAX : (uint32_t)count;
        } else {
            ptx_declare(p, name, PTX_SYM_REG)->type = type;
        }
    } while (ptx_accept(p, ','));
    ptx_expect(p, ';');
}

/* One list of parameters, "(" consumed. Of a kernel they lie in its parameter buffer; of a function in its local memory. */
static void parse_params(struct ptx_parser *p, struct ptx_param **list, uint32_t *count) {
    uint32_t room = 0;
    *list = NULL;
    *count = 0;
    if (ptx_accept(p, ')')) return;
    do {
        if (p->t.kind != PTX_T_DOT || !(ptx_is(p->t.text, "param") || ptx_is(p->t.text, "reg"))) ptx_fail(p, p->t.line, "'.param' was expected here");
        bool reg = ptx_is(p->t.text, "reg");
        ptx_next(p);
        if (reg && p->f->entry) ptx_fail(p, p->t.line, "a kernel's parameters cannot be registers");
        struct decl d = parse_type(p);
        struct ptx_str name = ptx_word(p, "a parameter's name");
        bool array, open;
        uint64_t n = parse_dimensions(p, &array, &open), size = open ? 0 : d.size * n;
        if (reg) ptx_fail(p, p->t.line, "registers as parameters of a function are not supported");
        if (size > 65536) ptx_fail(p, p->t.line, "this parameter is too large");
        *list = ptx_grow(p, *list, *count, &room, sizeof **list);
        struct ptx_param *q = &(*list)[(*count)++];
        q->size = (uint32_t)size;
        q->align = (uint32_t)d.align;
        if (p->f->entry) {
            struct ptx_symbol *s = ptx_declare(p, name, PTX_SYM_VAR);
            s->place = PTX_PLACE_KERNEL_PARAM;
            s->space = PTX_PARAM;
            s->size = size;
            s->offset = align_up(p->f->param_bytes, d.align);
            if (s->offset + size > 65536) ptx_fail(p, p->t.line, "this kernel's parameters are too large");
            p->f->param_bytes = (uint32_t)(s->offset + size);
            q->offset = (uint32_t)s->offset;
        } else {
            q->offset = (uint32_t)declare_local(p, name, size, d.align)->offset;
        }
    } while (ptx_accept(p, ','));
    ptx_expect(p, ')');
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
    if (!entry && ptx_accept(p, '(')) parse_params(p, &f->results, &f->result_count);
    struct ptx_str name = ptx_word(p, "a function's name");
    f->name = ptx_copy(p, name);
    if (ptx_accept(p, '(')) parse_params(p, &f->params, &f->param_count);
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
                uint64_t v = integer(p, "a number of threads");
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
