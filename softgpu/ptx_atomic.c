/* atom and red: really atomic, since other host threads run other blocks. Lanes go in order, so one host thread gives one result. */
#include <string.h>

#include "ptx_exec.h"
#include "ptx_half.h"

#define INTEGER(T, S) \
    static T atomic_##T(T *p, T b, T c, enum ptx_atom op, bool is_signed) { \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED), new; \
        switch (op) { \
        case PTX_ATOM_ADD: return __atomic_fetch_add(p, b, __ATOMIC_ACQ_REL); \
        case PTX_ATOM_AND: return __atomic_fetch_and(p, b, __ATOMIC_ACQ_REL); \
        case PTX_ATOM_OR: return __atomic_fetch_or(p, b, __ATOMIC_ACQ_REL); \
        case PTX_ATOM_XOR: return __atomic_fetch_xor(p, b, __ATOMIC_ACQ_REL); \
        case PTX_ATOM_EXCH: return __atomic_exchange_n(p, b, __ATOMIC_ACQ_REL); \
        case PTX_ATOM_CAS: \
            old = b; \
            __atomic_compare_exchange_n(p, &old, c, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); \
            return old; \
        default: break; \
        } \
        do { \
            switch (op) { \
            case PTX_ATOM_MIN: new = is_signed ? ((S)b < (S)old ? b : old) : b < old ? b : old; break; \
            case PTX_ATOM_MAX: new = is_signed ? ((S)b > (S)old ? b : old) : b > old ? b : old; break; \
            case PTX_ATOM_INC: new = old >= b ? 0 : (T)(old + 1); break; \
            default: new = old == 0 || old > b ? b : (T)(old - 1); break; \
            } \
        } while (!__atomic_compare_exchange_n(p, &old, new, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)); \
        return old; \
    }
INTEGER(uint16_t, int16_t)
INTEGER(uint32_t, int32_t)
INTEGER(uint64_t, int64_t)

static uint16_t half_op(uint16_t x, uint16_t y, enum ptx_atom op, bool brain) {
    float a = brain ? ptx_bf16_to_f32(x) : ptx_f16_to_f32(x), b = brain ? ptx_bf16_to_f32(y) : ptx_f16_to_f32(y), r;
    if (op == PTX_ATOM_ADD) r = a + b;
    else if (a != a || b != b) r = a != a ? b : a;
    else r = op == PTX_ATOM_MIN ? (b < a ? b : a) : (b > a ? b : a);
    return brain ? ptx_f32_to_bf16(r) : ptx_f32_to_f16(r);
}

static uint64_t real_op(uint64_t old, uint64_t b, enum ptx_type type, enum ptx_atom op) {
    if (type == PTX_F32) {
        float r = ptx_canonical(ptx_f32_bits((uint32_t)old) + ptx_f32_bits((uint32_t)b));
        return ptx_bits_f32(r);
    }
    if (type == PTX_F64) {
        double x, y;
        memcpy(&x, &old, 8);
        memcpy(&y, &b, 8);
        x += y;
        memcpy(&old, &x, 8);
        return old;
    }
    bool brain = type == PTX_BF16 || type == PTX_BF16X2;
    uint64_t r = half_op((uint16_t)old, (uint16_t)b, op, brain);
    if (type == PTX_F16X2 || type == PTX_BF16X2) r |= (uint64_t)half_op((uint16_t)(old >> 16), (uint16_t)(b >> 16), op, brain) << 16;
    return r;
}

static uint64_t atomic_real(unsigned char *p, uint64_t b, enum ptx_type type, enum ptx_atom op, uint32_t size) {
    if (size == 8) {
        uint64_t *q = (uint64_t *)(void *)p, old = __atomic_load_n(q, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(q, &old, real_op(old, b, type, op), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
        return old;
    }
    if (size == 4) {
        uint32_t *q = (uint32_t *)(void *)p, old = __atomic_load_n(q, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(q, &old, (uint32_t)real_op(old, b, type, op), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
        return old;
    }
    uint16_t *q = (uint16_t *)(void *)p, old = __atomic_load_n(q, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(q, &old, (uint16_t)real_op(old, b, type, op), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return old;
}

static uint32_t size_of(enum ptx_type t) {
    switch (t) {
    case PTX_U64: case PTX_S64: case PTX_B64: case PTX_F64: return 8;
    case PTX_U16: case PTX_S16: case PTX_B16: case PTX_F16: case PTX_BF16: return 2;
    default: return 4;
    }
}

int ptx_atomic(struct ptx_worker *w, struct ptx_warp *warp, struct ptx_frame *frame, const struct ptx_ins *in, uint32_t m) {
    uint64_t address[PTX_WARP];
    unsigned char *host[PTX_WARP];
    enum ptx_type type = (enum ptx_type)in->type;
    enum ptx_atom op = (enum ptx_atom)in->aux;
    uint32_t size = size_of(type);
    bool is_signed = type == PTX_S32 || type == PTX_S64;
    bool real = op != PTX_ATOM_EXCH && (type == PTX_F32 || type == PTX_F64 || (type >= PTX_F16 && type <= PTX_BF16X2));
    ptx_addresses(in, ptx_operand(frame, w->constants, in->a), m, address);
    int error = ptx_resolve(w, warp, frame, in, in->sub, m, address, size, true, host);
    if (error != 0) return error;
    const unsigned char *bs = ptx_operand(frame, w->constants, in->b), *cs = ptx_operand(frame, w->constants, in->c);
    for (; m != 0; m &= m - 1) {
        uint32_t l = (uint32_t)__builtin_ctz(m);
        uint64_t b = 0, c = 0, old;
        memcpy(&b, bs + l * size, size);
        memcpy(&c, cs + l * size, size);
        if (real) old = atomic_real(host[l], b, type, op, size);
        else if (size == 8) old = atomic_uint64_t((uint64_t *)(void *)host[l], b, c, op, is_signed);
        else if (size == 4) old = atomic_uint32_t((uint32_t *)(void *)host[l], (uint32_t)b, (uint32_t)c, op, is_signed);
        else old = atomic_uint16_t((uint16_t *)(void *)host[l], (uint16_t)b, (uint16_t)c, op, false);
        if (in->d != PTX_SINK) memcpy(frame->regs + in->d + l * size, &old, size);
    }
    return 0;
}
