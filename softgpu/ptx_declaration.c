/* Declarations: variables with their initial values, registers, lists of parameters. */
#include "ptx_parse.h"

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
            uint64_t align = ptx_integer(p, "an alignment");
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
static uint64_t parse_dimensions(struct ptx_parser *p, uint32_t *dimensions, bool *open) {
    uint64_t count = 1;
    *dimensions = 0;
    *open = false;
    while (ptx_accept(p, '[')) {
        ++*dimensions;
        if (ptx_accept(p, ']')) {
            *open = true;
            continue;
        }
        uint64_t n = ptx_integer(p, "an array's size");
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
        uint32_t dimensions;
        bool open;
        uint64_t count = parse_dimensions(p, &dimensions, &open), size = d.size * (open ? 0 : count);
        if (size > (uint64_t)1 << 40) ptx_fail(p, line, "this variable is too large");
        struct ptx_symbol *old = ptx_lookup(p, name);
        struct ptx_symbol *s;
        bool again = old != NULL && old->kind == PTX_SYM_VAR && old->depth == p->depth && (old->place == PTX_PLACE_GLOBAL || old->place == PTX_PLACE_SHARED_MODULE);
        if (space == PTX_GLOBAL || space == PTX_CONST) {
            s = again ? old : ptx_declare(p, name, PTX_SYM_VAR);
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
            s = ptx_declare(p, name, PTX_SYM_VAR);
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
            s = declare_local(p, name, size, d.align);
        }
        s->element = dimensions == 1 ? d.size : 0;
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
            uint64_t count = ptx_integer(p, "a number of registers");
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
void ptx_parse_params(struct ptx_parser *p, struct ptx_param **list, uint32_t *count) {
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
        uint32_t dimensions;
        bool open;
        uint64_t n = parse_dimensions(p, &dimensions, &open), size = open ? 0 : d.size * n;
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
