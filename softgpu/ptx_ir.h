/* The decoded form of a PTX module: what the parser makes and the interpreter runs.
 *
 * A register is 32 lanes side by side: a slot of 64, 128 or 256 bytes (16, 32, 64 bits a lane) at a fixed offset of the frame of its
 * function; a predicate is one 32-bit word, bit l for lane l. An operand is such an offset, or, when negative, the offset from the
 * end of the module's table of constants, which holds each immediate value already spread over 32 lanes: so an operation never asks
 * what kind of operand it has.
 */
#ifndef SOFTGPU_PTX_IR_H
#define SOFTGPU_PTX_IR_H

#include "ptx.h"

#define PTX_WARP 32
#define PTX_FULL 0xffffffffu

/* Generic addresses outside what a host pointer can be; the window's number is in the bits from 48 up. */
#define PTX_WINDOW_SHIFT 48
enum ptx_window { PTX_WINDOW_GLOBAL = 0, PTX_WINDOW_SHARED = 1, PTX_WINDOW_LOCAL = 2, PTX_WINDOW_PARAM = 3, PTX_WINDOW_CODE = 4 };
#define PTX_WINDOW(w) ((uint64_t)(w) << PTX_WINDOW_SHIFT)

/* Limits; each gives a sentence when it is passed. */
#define PTX_MAX_FRAME (64u << 20)         /* bytes of registers of one function, all lanes */
#define PTX_MAX_SHARED (228u << 10)       /* bytes, static and dynamic */
#define PTX_MAX_LOCAL (512u << 10)        /* bytes per thread of one function */
#define PTX_STACK (64u << 10)             /* local bytes per thread added where functions recurse or are called indirectly */
#define PTX_MAX_DEPTH 1024                /* frames of one warp */

enum ptx_type {
    PTX_U8, PTX_S8, PTX_U16, PTX_S16, PTX_U32, PTX_S32, PTX_U64, PTX_S64, /* this order: CVI */
    PTX_B8, PTX_B16, PTX_B32, PTX_B64, PTX_B128,
    PTX_F16, PTX_BF16, PTX_F16X2, PTX_BF16X2, PTX_F32, PTX_F64, PTX_E4M3X2, PTX_E5M2X2, PTX_TF32,
    PTX_PRED, PTX_NO_TYPE
};

enum ptx_space { PTX_GENERIC, PTX_GLOBAL, PTX_SHARED, PTX_LOCAL, PTX_PARAM, PTX_CONST, PTX_REG, PTX_NO_SPACE };

enum ptx_op {
#define PTX_OP1(name, D, A, expr) PTX_##name,
#define PTX_OP2(name, D, A, B, expr) PTX_##name,
#define PTX_OP3(name, D, A, B, C, expr) PTX_##name,
#define PTX_CMP(name, T, expr) PTX_CMP_##name,
#define PTX_OPX(name) PTX_##name##_OP,
#include "ptx_ops.def"
#undef PTX_OP1
#undef PTX_OP2
#undef PTX_OP3
#undef PTX_CMP
#undef PTX_OPX
    PTX_OP_COUNT
};

enum ptx_round { PTX_RN, PTX_RZ, PTX_RM, PTX_RP, PTX_RNA };

/* flags of PTX_FP_OP, PTX_CVT_OP */
#define PTX_FTZ 1u
#define PTX_SAT 2u
#define PTX_NAN_FLAG 4u  /* min, max: a NaN wins */
#define PTX_XORSIGN 8u
#define PTX_RELU 16u
#define PTX_INTEGER 32u  /* cvt: round to an integral value */
#define PTX_ABS_FLAG 64u
#define PTX_SATFINITE 128u /* cvt: what is too large becomes the largest finite value, as it always does in 8 bits */

enum ptx_fp_op {
    PTX_FP_ADD, PTX_FP_SUB, PTX_FP_MUL, PTX_FP_DIV, PTX_FP_MIN, PTX_FP_MAX, PTX_FP_FMA, PTX_FP_NEG, PTX_FP_ABS, PTX_FP_SQRT, PTX_FP_RCP,
    PTX_FP_RSQRT, PTX_FP_SIN, PTX_FP_COS, PTX_FP_LG2, PTX_FP_EX2, PTX_FP_TANH, PTX_FP_COUNT
};

enum ptx_int_op {
    PTX_INT_CARRY_ADD, PTX_INT_CARRY_SUB, PTX_INT_CARRY_MADLO, PTX_INT_CARRY_MADHI, PTX_INT_ADD_SAT, PTX_INT_SUB_SAT, PTX_INT_MADHI_SAT,
    PTX_INT_MUL24, PTX_INT_MAD24, PTX_INT_BFI, PTX_INT_BFIND, PTX_INT_FNS, PTX_INT_PRMT, PTX_INT_DP4A, PTX_INT_DP2A, PTX_INT_BMSK, PTX_INT_SZEXT,
    PTX_INT_MINMAX16X2, PTX_INT_ADD16X2
};

enum ptx_sreg {
    PTX_SREG_TID, PTX_SREG_NTID = 4, PTX_SREG_CTAID = 8, PTX_SREG_NCTAID = 12, /* + 0, 1, 2 for x, y, z; 3: w, zero */
    PTX_SREG_CLUSTER_CTAID = 16, PTX_SREG_CLUSTER_NCTAID = 20, PTX_SREG_CLUSTERID = 24, PTX_SREG_NCLUSTERID = 28,
    PTX_SREG_LANEID = 32, PTX_SREG_WARPID, PTX_SREG_NWARPID, PTX_SREG_SMID, PTX_SREG_NSMID, PTX_SREG_GRIDID, PTX_SREG_CLOCK, PTX_SREG_CLOCK_HI,
    PTX_SREG_CLOCK64, PTX_SREG_TIMER, PTX_SREG_TIMER_LO, PTX_SREG_TIMER_HI, PTX_SREG_LANEMASK_EQ, PTX_SREG_LANEMASK_LE, PTX_SREG_LANEMASK_LT,
    PTX_SREG_LANEMASK_GE, PTX_SREG_LANEMASK_GT, PTX_SREG_DYNAMIC_SMEM, PTX_SREG_TOTAL_SMEM, PTX_SREG_ENVREG1, PTX_SREG_ENVREG2, PTX_SREG_ZERO,
    PTX_SREG_CLUSTER_CTARANK, PTX_SREG_CLUSTER_NCTARANK
};

enum ptx_atom {
    PTX_ATOM_ADD, PTX_ATOM_MIN, PTX_ATOM_MAX, PTX_ATOM_AND, PTX_ATOM_OR, PTX_ATOM_XOR, PTX_ATOM_EXCH, PTX_ATOM_CAS, PTX_ATOM_INC, PTX_ATOM_DEC
};

/* flags of memory operations */
#define PTX_MEM_ADDRESS_32 1u
#define PTX_MEM_ACQUIRE 2u
#define PTX_MEM_RELEASE 4u

enum ptx_builtin { PTX_BUILTIN_VPRINTF, PTX_BUILTIN_ASSERTFAIL, PTX_BUILTIN_MALLOC, PTX_BUILTIN_FREE, PTX_BUILTIN_NONE };

/* A value that moves between .param variables: offsets in the local memory of the caller's and the callee's frame. */
struct ptx_move {
    uint32_t from, to, size;
};

/* What does not fit in an instruction. */
struct ptx_ext {
    int32_t v[16];           /* vector elements, further operands; PTX_SINK where nothing is wanted */
    uint8_t width[16];       /* their register widths in bytes */
    uint32_t count;
    uint32_t function;       /* CALL: index in the module */
    uint32_t builtin;
    uint32_t in_count, out_count;
    bool indirect;
    const struct ptx_move *in, *out; /* CALL: arguments and results; for an indirect call `to` is worked out at run time */
    const uint32_t *targets; /* BRX: code indices */
    uint32_t target_count;
    const char *text;        /* ILLEGAL: the instruction's name */
};
#define PTX_SINK INT32_MIN
#define PTX_UNGUARDED INT32_MIN

struct ptx_ins {
    uint16_t op;
    uint8_t width;  /* bytes per lane of d, 0: the operation deals with masks itself */
    uint8_t negate; /* of the guard */
    int32_t guard;  /* offset of a predicate, or PTX_UNGUARDED */
    int32_t d, a, b, c;
    uint8_t sub, type, flags, aux;
    uint32_t line;
    int64_t imm;
    const struct ptx_ext *ext;
};

/* A shared variable that more than one kernel may use; its offset is the kernel's business. */
struct ptx_shared {
    const char *name;
    uint64_t size, align;
    bool dynamic;
};

struct ptx_reloc {
    uint64_t offset;   /* in the variable */
    uint32_t size;     /* bytes written */
    uint32_t shift;    /* right shift in bits: mask expressions pick bytes out of an address */
    int64_t addend;
    int32_t global;    /* index, or -1 */
    int32_t function;  /* index, or -1 */
    struct ptx_reloc *next;
};

struct ptx_variable {
    struct ptx_global info;
    unsigned char *init; /* init_size bytes; the rest is zero */
    size_t init_size;
    struct ptx_reloc *relocs;
};

struct ptx_param {
    uint32_t offset, size, align;
};

struct ptx_function {
    const char *name;
    bool entry, defined;
    uint32_t index, line;
    struct ptx_ins *code;
    uint32_t count;
    uint32_t frame_bytes;  /* registers */
    uint32_t local_bytes;  /* .local and .param variables, per thread */
    struct ptx_param *params;
    uint32_t param_count, param_bytes;
    struct ptx_param *results; /* of a .func: offsets in its local memory, as are its params */
    uint32_t result_count;
    uint32_t *callees;
    uint32_t callee_count;
    bool indirect;         /* makes indirect calls */
    uint64_t own_shared;   /* bytes of the variables declared inside */
    uint32_t *shared_used; /* indices of module-scope variables that the body names */
    uint32_t shared_used_count;
    unsigned max_threads;
    uint32_t required[3];
    uint32_t cluster;      /* blocks of a cluster that it has to run in */
};

struct ptx_kernel {
    const struct ptx_module *module;
    const struct ptx_function *function;
    uint32_t static_shared;  /* dynamic shared memory starts here */
    uint32_t *shared_offset; /* of each module-scope shared variable; a dynamic one: static_shared */
    uint32_t stack;          /* local bytes per thread */
};

struct ptx_arena_block;
struct ptx_module {
    struct ptx_arena_block *arena;
    struct ptx_function **functions;
    uint32_t function_count;
    struct ptx_kernel *kernels;
    uint32_t kernel_count;
    struct ptx_variable **variables;
    uint32_t variable_count;
    struct ptx_shared **shared;
    uint32_t shared_count;
    unsigned char *constants; /* aligned to 64 */
    uint32_t constant_bytes;
};

#endif
