/* What the parts of the PTX front end (lexer, parser, decoder) share while one module is loaded. */
#ifndef SOFTGPU_PTX_PARSE_H
#define SOFTGPU_PTX_PARSE_H

#include <setjmp.h>
#include <string.h>

#include "ptx_ir.h"

struct ptx_str {
    const char *s;
    uint32_t n;
};

static inline bool ptx_is(struct ptx_str a, const char *b) { return strlen(b) == a.n && memcmp(a.s, b, a.n) == 0; }

enum ptx_token_kind {
    PTX_T_END,
    PTX_T_WORD,   /* identifier or register */
    PTX_T_DOT,    /* .name, text without the dot */
    PTX_T_INT,
    PTX_T_FLOAT,  /* value in `real`; width 4 for 0f..., else 8 */
    PTX_T_STRING,
    PTX_T_PUNCT,
};

struct ptx_token {
    enum ptx_token_kind kind;
    struct ptx_str text;
    uint32_t line;
    uint64_t integer;
    double real;
    uint32_t float_width;
    char punct;
};

enum ptx_symbol_kind { PTX_SYM_REG, PTX_SYM_REGS, PTX_SYM_VAR, PTX_SYM_FUNC, PTX_SYM_TARGETS, PTX_SYM_PROTO };

/* Where the address of a variable comes from. */
enum ptx_place { PTX_PLACE_GLOBAL, PTX_PLACE_SHARED_MODULE, PTX_PLACE_SHARED_OWN, PTX_PLACE_LOCAL, PTX_PLACE_KERNEL_PARAM };

struct ptx_symbol {
    struct ptx_symbol *next, *scope_next;
    struct ptx_str name;
    uint32_t depth;
    enum ptx_symbol_kind kind;
    enum ptx_type type;
    int32_t slot;       /* REG: frame offset, or -1 until used */
    uint32_t count;     /* REGS: how many */
    enum ptx_place place;
    enum ptx_space space;
    uint32_t index;     /* VAR: of a global or module-scope shared variable; FUNC: of the function; TARGETS: of the list */
    uint64_t offset;    /* VAR: in own shared, local memory, or the kernel's parameters */
    uint64_t size;
    uint64_t element;   /* VAR: of an array with one dimension, bytes of an element; else 0 */
};

struct ptx_arena_block {
    struct ptx_arena_block *next;
    size_t used, size;
    unsigned char bytes[] __attribute__((aligned(64)));
};

enum ptx_operand_kind { PTX_O_NONE, PTX_O_REG, PTX_O_IMM, PTX_O_SYM, PTX_O_SREG, PTX_O_MEM, PTX_O_VEC, PTX_O_SINK, PTX_O_NAME };

struct ptx_element {
    enum ptx_operand_kind kind; /* REG, IMM, SINK, SREG */
    int32_t slot;
    enum ptx_type type;
    uint64_t bits;
    double real;
    bool is_float;
    uint32_t float_width;
};

struct ptx_operand {
    enum ptx_operand_kind kind;
    bool negate;               /* !%p */
    struct ptx_element e;      /* REG, IMM, SREG (slot: which) */
    struct ptx_symbol *symbol; /* SYM, and MEM based on one */
    enum ptx_operand_kind base;/* MEM: REG, SYM or IMM */
    int64_t addend;            /* SYM, MEM */
    struct ptx_element v[16];
    uint32_t count;
    struct ptx_str name;       /* NAME: a label or something not declared */
    bool has_second;           /* d|p */
    struct ptx_element second;
};

#define PTX_MAX_MODS 24
#define PTX_MAX_OPERANDS 10
struct ptx_stmt {
    uint32_t line;
    int32_t guard;
    bool guard_negate;
    struct ptx_str op;
    struct ptx_str mods[PTX_MAX_MODS];
    uint32_t mod_count;
    uint32_t *heeded; /* a bit for each modifier that the decoder has found when it looked for it */
    struct ptx_operand o[PTX_MAX_OPERANDS];
    uint32_t count;
};

struct ptx_label {
    struct ptx_label *next;
    struct ptx_str name;
    uint32_t scope, at;
};
struct ptx_fixup {
    struct ptx_fixup *next;
    struct ptx_str name;
    uint32_t scope, line;
    uint32_t at;         /* instruction whose imm is the target, or ... */
    uint32_t *target;    /* ... the place in a branch table */
};
struct ptx_targets {
    struct ptx_targets *next;
    uint32_t *at;
    uint32_t count;
};

#define PTX_HASH 1024
struct ptx_parser {
    const char *p, *end;
    uint32_t line;
    struct ptx_token t; /* the token not consumed yet */
    jmp_buf fail;
    int error;
    char *log;
    size_t log_size;
    struct ptx_module *module;
    uint32_t nesting;
    struct ptx_symbol *hash[PTX_HASH];
    struct ptx_symbol *scopes[64]; /* symbols of each open scope */
    uint32_t scope_ids[64];
    uint32_t depth;
    uint32_t functions_room, variables_room, shared_room;
    /* the constant table: offsets are from its end, so it grows downwards in address; entries are found again by hash */
    uint32_t *const_hash;
    uint32_t const_hash_size;
    struct { uint64_t bits; uint32_t width, offset; } *consts;
    uint32_t const_count, const_room, const_bytes;
    /* the function being decoded */
    struct ptx_function *f;
    uint32_t code_room;
    uint32_t next_scope;
    uint32_t *scope_parent;
    uint32_t scope_room;
    int32_t pred_next;
    uint32_t frame;
    int32_t carry; /* the carry flag's predicate, or -1 */
    uint32_t callees_room, shared_used_room;
    struct ptx_label **labels;
    struct ptx_fixup *fixups;
    const struct ptx_stmt *stmt;
    uint32_t heeded; /* of the instruction being decoded: see ptx_stmt */
};

_Noreturn void ptx_fail(struct ptx_parser *p, uint32_t line, const char *format, ...) __attribute__((format(printf, 3, 4)));
void *ptx_alloc(struct ptx_parser *p, size_t size);
void *ptx_grow(struct ptx_parser *p, void *old, uint32_t count, uint32_t *room, size_t size);
const char *ptx_copy(struct ptx_parser *p, struct ptx_str s);

/* ptx_lex.c */
void ptx_next(struct ptx_parser *p);
void ptx_skip_line(struct ptx_parser *p);
bool ptx_at(const struct ptx_parser *p, char punct);
bool ptx_accept(struct ptx_parser *p, char punct);
void ptx_expect(struct ptx_parser *p, char punct);
struct ptx_str ptx_word(struct ptx_parser *p, const char *what);

/* ptx_symbols.c */
void ptx_scope_open(struct ptx_parser *p);
void ptx_scope_close(struct ptx_parser *p);
struct ptx_symbol *ptx_declare(struct ptx_parser *p, struct ptx_str name, enum ptx_symbol_kind kind);
struct ptx_symbol *ptx_lookup(struct ptx_parser *p, struct ptx_str name);
int32_t ptx_new_slot(struct ptx_parser *p, uint32_t width);
int32_t ptx_new_pred(struct ptx_parser *p);
int32_t ptx_reg_slot(struct ptx_parser *p, struct ptx_symbol *s);
int32_t ptx_constant(struct ptx_parser *p, uint64_t bits, uint32_t width);
enum ptx_type ptx_type_named(struct ptx_str s);
uint32_t ptx_type_bytes(enum ptx_type t);
uint32_t ptx_reg_width(enum ptx_type t); /* bytes of a lane in a register of the type; 0: predicate */
int ptx_sreg_named(struct ptx_str s);    /* "tid.x" without the percent sign; -1: none */

/* ptx_expr.c */
struct ptx_value {
    bool is_float;
    uint64_t bits;
    double real;
    uint32_t float_width;
    struct ptx_symbol *symbol;
    uint64_t mask; /* of a mask(symbol) expression, else 0 */
    bool generic;
};
struct ptx_value ptx_expression(struct ptx_parser *p);
uint64_t ptx_integer(struct ptx_parser *p, const char *what); /* an expression that must be a whole number; `what` names it */
void ptx_parse_operand(struct ptx_parser *p, struct ptx_operand *o);

/* ptx_declaration.c */
void ptx_parse_variable(struct ptx_parser *p, enum ptx_space space, bool external);
void ptx_parse_reg(struct ptx_parser *p);
void ptx_parse_params(struct ptx_parser *p, struct ptx_param **list, uint32_t *count);

/* ptx_function.c */
void ptx_parse_function(struct ptx_parser *p, bool entry);
void ptx_fixup_branch(struct ptx_parser *p, struct ptx_str name, uint32_t at, uint32_t *target);

/* ptx_decode*.c */
struct ptx_ins *ptx_emit(struct ptx_parser *p, uint32_t op);
void ptx_decode(struct ptx_parser *p, const struct ptx_stmt *s);
bool ptx_decode_arith(struct ptx_parser *p, const struct ptx_stmt *s);
bool ptx_decode_convert(struct ptx_parser *p, const struct ptx_stmt *s);
bool ptx_decode_memory(struct ptx_parser *p, const struct ptx_stmt *s);
bool ptx_decode_control(struct ptx_parser *p, const struct ptx_stmt *s);
void ptx_parse_call(struct ptx_parser *p, struct ptx_stmt *s);
bool ptx_mod(const struct ptx_stmt *s, const char *name);
bool ptx_mod_prefix(const struct ptx_stmt *s, const char *prefix);
enum ptx_type ptx_stmt_type(const struct ptx_stmt *s, uint32_t which);
enum ptx_space ptx_stmt_space(const struct ptx_stmt *s);
enum ptx_round ptx_stmt_round(const struct ptx_stmt *s, bool *given);
int32_t ptx_source(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type);
int32_t ptx_source_element(struct ptx_parser *p, const struct ptx_element *e, enum ptx_type type);
int32_t ptx_source_pred(struct ptx_parser *p, const struct ptx_operand *o);
int32_t ptx_address(struct ptx_parser *p, const struct ptx_operand *o, int64_t *addend, uint32_t *width, enum ptx_space *space);
/* The register to write a result of `type` to; *narrow is the operation that must follow when the register is wider. */
int32_t ptx_dest(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type);
void ptx_dest_done(struct ptx_parser *p, const struct ptx_operand *o, enum ptx_type type, int32_t slot);
int32_t ptx_dest_pred(struct ptx_parser *p, const struct ptx_element *e);
void ptx_need(struct ptx_parser *p, const struct ptx_stmt *s, uint32_t operands);
uint32_t ptx_cvi(uint32_t to_width, uint32_t from_width, enum ptx_type type);
void ptx_callee(struct ptx_parser *p, uint32_t function);

#endif
