/* Constant expressions and operands. */
#include "ptx_parse.h"

static struct ptx_value expression(struct ptx_parser *p, uint32_t least, uint32_t depth);

static struct ptx_value primary(struct ptx_parser *p, uint32_t depth) {
    if (depth > 64) ptx_fail(p, p->t.line, "this expression is nested too deeply");
    struct ptx_value v = {0};
    if (ptx_accept(p, '(')) {
        if (p->t.kind == PTX_T_DOT) { /* a cast: (.s64) 1 */
            ptx_next(p);
            ptx_expect(p, ')');
            return primary(p, depth + 1);
        }
        v = expression(p, 0, depth + 1);
        ptx_expect(p, ')');
        return v;
    }
    if (p->t.kind == PTX_T_PUNCT && strchr("-~!+", p->t.punct) != NULL) {
        char op = p->t.punct;
        uint32_t line = p->t.line;
        ptx_next(p);
        v = primary(p, depth + 1);
        if (v.symbol != NULL) ptx_fail(p, line, "'%c' cannot be applied to an address", op);
        if (v.is_float) {
            if (op == '-') {
                v.real = -v.real;
                v.bits ^= v.float_width == 4 ? 0x80000000u : (uint64_t)1 << 63;
            }
        } else if (op == '-') {
            v.bits = 0 - v.bits;
        } else if (op == '~') {
            v.bits = ~v.bits;
        } else if (op == '!') {
            v.bits = v.bits == 0;
        }
        return v;
    }
    if (p->t.kind == PTX_T_INT) {
        v.bits = p->t.integer;
        ptx_next(p);
        if (ptx_accept(p, '(')) { /* 0xFF00(symbol): some bytes of an address */
            struct ptx_value inner = expression(p, 0, depth + 1);
            ptx_expect(p, ')');
            if (inner.symbol != NULL) inner.mask = v.bits;
            else inner.bits &= v.bits;
            return inner;
        }
        return v;
    }
    if (p->t.kind == PTX_T_FLOAT) {
        v.is_float = true;
        v.bits = p->t.integer;
        v.real = p->t.real;
        v.float_width = p->t.float_width;
        ptx_next(p);
        return v;
    }
    uint32_t line = p->t.line;
    struct ptx_str name = ptx_word(p, "a number or a name");
    if (ptx_is(name, "WARP_SZ")) {
        v.bits = PTX_WARP;
        return v;
    }
    if (ptx_is(name, "generic") && ptx_accept(p, '(')) {
        v = expression(p, 0, depth + 1);
        ptx_expect(p, ')');
        v.generic = true;
        return v;
    }
    v.symbol = ptx_lookup(p, name);
    if (v.symbol == NULL || (v.symbol->kind != PTX_SYM_VAR && v.symbol->kind != PTX_SYM_FUNC))
        ptx_fail(p, line, "'%.*s' is not declared", (int)(name.n > 100 ? 100 : name.n), name.s);
    if (v.symbol->element && ptx_accept(p, '[')) {
        v.bits = ptx_integer(p, "an index") * v.symbol->element;
        ptx_expect(p, ']');
    }
    return v;
}

/* One binary operator at the current token: its precedence (0: none) and its length in tokens. */
static uint32_t operator_here(const struct ptx_parser *p, char *op) {
    if (p->t.kind != PTX_T_PUNCT) return 0;
    char c = p->t.punct, after = p->p < p->end ? *p->p : '\0';
    *op = c;
    switch (c) {
    case '*': case '/': case '%': return 6;
    case '+': case '-': return 5;
    case '<': case '>': return after == c ? 4 : 0;
    case '&': return after == '&' ? 0 : 3;
    case '^': return 2;
    case '|': return after == '|' ? 0 : 1;
    default: return 0;
    }
}

static struct ptx_value expression(struct ptx_parser *p, uint32_t least, uint32_t depth) {
    if (depth > 64) ptx_fail(p, p->t.line, "this expression is nested too deeply");
    struct ptx_value a = primary(p, depth + 1);
    char op;
    uint32_t level;
    while ((level = operator_here(p, &op)) > least) {
        uint32_t line = p->t.line;
        ptx_next(p);
        if (op == '<' || op == '>') ptx_next(p);
        struct ptx_value b = expression(p, level, depth + 1);
        if (a.is_float || b.is_float) ptx_fail(p, line, "arithmetic on floating-point constants is not supported");
        if (b.symbol != NULL) {
            if (a.symbol != NULL || op != '+') ptx_fail(p, line, "an address can only be added to a number");
            b.bits += a.bits;
            a = b;
            continue;
        }
        if (a.symbol != NULL && op != '+' && op != '-') ptx_fail(p, line, "only '+' and '-' work on an address");
        switch (op) {
        case '*': a.bits *= b.bits; break;
        case '/': a.bits = b.bits ? a.bits / b.bits : 0; break;
        case '%': a.bits = b.bits ? a.bits % b.bits : 0; break;
        case '+': a.bits += b.bits; break;
        case '-': a.bits -= b.bits; break;
        case '<': a.bits = b.bits > 63 ? 0 : a.bits << b.bits; break;
        case '>': a.bits = b.bits > 63 ? 0 : a.bits >> b.bits; break;
        case '&': a.bits &= b.bits; break;
        case '^': a.bits ^= b.bits; break;
        default: a.bits |= b.bits; break;
        }
    }
    return a;
}

struct ptx_value ptx_expression(struct ptx_parser *p) { return expression(p, 0, 0); }

uint64_t ptx_integer(struct ptx_parser *p, const char *what) {
    uint32_t line = p->t.line;
    struct ptx_value v = ptx_expression(p);
    if (v.is_float || v.symbol != NULL) ptx_fail(p, line, "%s must be a whole number", what);
    return v.bits;
}

static void element_value(struct ptx_element *e, const struct ptx_value *v) {
    e->kind = PTX_O_IMM;
    e->bits = v->bits;
    e->real = v->real;
    e->is_float = v->is_float;
    e->float_width = v->float_width;
}

/* A register or a special register, if the word at hand is one; consumes it. */
static bool parse_register(struct ptx_parser *p, struct ptx_element *e) {
    if (p->t.kind != PTX_T_WORD) return false;
    struct ptx_str name = p->t.text;
    if (name.n == 1 && name.s[0] == '_') {
        ptx_next(p);
        e->kind = PTX_O_SINK;
        return true;
    }
    struct ptx_symbol *s = ptx_lookup(p, name);
    if (s != NULL && s->kind == PTX_SYM_REG) {
        ptx_next(p);
        e->kind = PTX_O_REG;
        e->slot = ptx_reg_slot(p, s);
        e->type = s->type;
        return true;
    }
    if (name.s[0] != '%' || s != NULL) return false;
    uint32_t line = p->t.line;
    struct ptx_str full = {name.s + 1, name.n - 1};
    ptx_next(p);
    if (p->t.kind == PTX_T_DOT && p->t.text.n == 1 && p->t.text.s == name.s + name.n + 1) {
        full.n += 2;
        ptx_next(p);
    }
    int which = ptx_sreg_named(full);
    if (which < 0) ptx_fail(p, line, "'%.*s' is not declared", (int)(full.n > 100 ? 100 : full.n + 1), name.s);
    e->kind = PTX_O_SREG;
    e->slot = which;
    bool wide = which == PTX_SREG_CLOCK64 || which == PTX_SREG_TIMER || which == PTX_SREG_GRIDID;
    e->type = wide ? PTX_U64 : PTX_U32;
    return true;
}

static void parse_element(struct ptx_parser *p, struct ptx_element *e) {
    if (parse_register(p, e)) return;
    uint32_t line = p->t.line;
    struct ptx_value v = ptx_expression(p);
    if (v.symbol != NULL) ptx_fail(p, line, "an address cannot stand here");
    element_value(e, &v);
}

static void parse_memory(struct ptx_parser *p, struct ptx_operand *o) {
    o->kind = PTX_O_MEM;
    if (parse_register(p, &o->e)) {
        if (o->e.kind != PTX_O_REG) ptx_fail(p, p->t.line, "this register cannot hold an address");
        o->base = PTX_O_REG;
        if (ptx_at(p, '+') || ptx_at(p, '-')) {
            bool minus = ptx_at(p, '-');
            ptx_next(p);
            struct ptx_value v = ptx_expression(p);
            if (v.symbol != NULL || v.is_float) ptx_fail(p, p->t.line, "an address takes a whole number as its offset");
            o->addend = (int64_t)(minus ? 0 - v.bits : v.bits);
        }
    } else {
        struct ptx_value v = ptx_expression(p);
        if (v.is_float) ptx_fail(p, p->t.line, "an address cannot be a floating-point number");
        o->base = v.symbol != NULL ? PTX_O_SYM : PTX_O_IMM;
        o->symbol = v.symbol;
        o->addend = (int64_t)v.bits;
    }
    ptx_expect(p, ']');
}

void ptx_parse_operand(struct ptx_parser *p, struct ptx_operand *o) {
    memset(o, 0, sizeof *o);
    if (ptx_accept(p, '[')) {
        parse_memory(p, o);
        return;
    }
    if (ptx_accept(p, '{')) {
        o->kind = PTX_O_VEC;
        do {
            if (o->count == sizeof o->v / sizeof o->v[0]) ptx_fail(p, p->t.line, "this vector has too many elements");
            parse_element(p, &o->v[o->count++]);
        } while (ptx_accept(p, ','));
        ptx_expect(p, '}');
        return;
    }
    if (ptx_at(p, '!')) {
        ptx_next(p);
        o->negate = true;
    }
    if (parse_register(p, &o->e)) {
        o->kind = o->e.kind;
        if (ptx_accept(p, '|')) {
            if (!parse_register(p, &o->second)) ptx_fail(p, p->t.line, "a register was expected after '|'");
            o->has_second = true;
        }
        return;
    }
    if (p->t.kind == PTX_T_WORD) {
        struct ptx_symbol *s = ptx_lookup(p, p->t.text);
        bool known = s != NULL && (s->kind == PTX_SYM_VAR || s->kind == PTX_SYM_FUNC);
        if (!known && !ptx_is(p->t.text, "WARP_SZ") && !ptx_is(p->t.text, "generic")) {
            o->kind = PTX_O_NAME;
            o->name = p->t.text;
            o->symbol = s;
            ptx_next(p);
            return;
        }
    }
    struct ptx_value v = ptx_expression(p);
    if (v.symbol != NULL) {
        o->kind = PTX_O_SYM;
        o->symbol = v.symbol;
        o->addend = (int64_t)v.bits;
    } else {
        o->kind = PTX_O_IMM;
        element_value(&o->e, &v);
    }
}
