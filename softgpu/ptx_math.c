/* Floating-point operations that are not worth a loop of their own in the interpreter: directed rounding, flushing of subnormals,
 * saturation, half precision, and the approximate functions, for which the C library's are used (they are closer than asked). */
#pragma GCC optimize("rounding-math", "fp-contract=off")
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "ptx_exec.h"
#include "ptx_half.h"

static float flush(float x) {
    uint32_t bits = ptx_bits_f32(x);
    return (bits & 0x7f800000u) == 0 ? ptx_f32_bits(bits & 0x80000000u) : x;
}

#define MINMAX(T, suffix, nan_bits) \
    static T pick_##suffix(T x, T y, bool max, bool nan_wins) { \
        if (x != x || y != y) { \
            if (nan_wins || (x != x && y != y)) return nan_bits; \
            return x != x ? y : x; \
        } \
        if (x == y) return (signbit(x) != 0) != max ? x : y; \
        return (x < y) != max ? x : y; \
    }
MINMAX(float, f32, ptx_f32_bits(0x7fffffffu))
MINMAX(double, f64, (double)NAN)

static float one_f32(enum ptx_fp_op op, float a, float b, float c, uint32_t flags) {
    switch (op) {
    case PTX_FP_ADD: return a + b;
    case PTX_FP_SUB: return a - b;
    case PTX_FP_MUL: return a * b;
    case PTX_FP_DIV: return a / b;
    case PTX_FP_MIN:
    case PTX_FP_MAX: {
        uint32_t sign = flags & PTX_XORSIGN ? (ptx_bits_f32(a) ^ ptx_bits_f32(b)) & 0x80000000u : 0;
        if (flags & (PTX_XORSIGN | PTX_ABS_FLAG)) a = fabsf(a), b = fabsf(b);
        return ptx_f32_bits(ptx_bits_f32(pick_f32(a, b, op == PTX_FP_MAX, (flags & PTX_NAN_FLAG) != 0)) | sign);
    }
    case PTX_FP_FMA: return fmaf(a, b, c);
    case PTX_FP_NEG: return ptx_f32_bits(ptx_bits_f32(a) ^ 0x80000000u);
    case PTX_FP_ABS: return ptx_f32_bits(ptx_bits_f32(a) & 0x7fffffffu);
    case PTX_FP_SQRT: return sqrtf(a);
    case PTX_FP_RCP: return 1.0f / a;
    case PTX_FP_RSQRT: return (float)(1.0 / sqrt((double)a));
    case PTX_FP_SIN: return sinf(a);
    case PTX_FP_COS: return cosf(a);
    case PTX_FP_LG2: return log2f(a);
    case PTX_FP_EX2: return exp2f(a);
    default: return tanhf(a);
    }
}

static double one_f64(enum ptx_fp_op op, double a, double b, double c, uint32_t flags) {
    switch (op) {
    case PTX_FP_ADD: return a + b;
    case PTX_FP_SUB: return a - b;
    case PTX_FP_MUL: return a * b;
    case PTX_FP_DIV: return a / b;
    case PTX_FP_MIN:
    case PTX_FP_MAX: return pick_f64(a, b, op == PTX_FP_MAX, (flags & PTX_NAN_FLAG) != 0);
    case PTX_FP_FMA: return fma(a, b, c);
    case PTX_FP_NEG: return -a;
    case PTX_FP_ABS: return fabs(a);
    case PTX_FP_SQRT: return sqrt(a);
    case PTX_FP_RCP: return 1.0 / a;
    case PTX_FP_RSQRT: return 1.0 / sqrt(a);
    case PTX_FP_SIN: return sin(a);
    case PTX_FP_COS: return cos(a);
    case PTX_FP_LG2: return log2(a);
    case PTX_FP_EX2: return exp2(a);
    default: return tanh(a);
    }
}

/* a*b is exact in a double. The sum may need more bits than it has: then its last bit is set, so that the final rounding to half
 * cannot take an inexact value for a tie ("round to odd"). */
static double half_fma(double a, double b, double c) {
    double product = a * b, sum = product + c;
    if (!isfinite(sum)) return sum;
    double part = sum - product, error = (product - (sum - part)) + (c - part);
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if (error != 0 && (bits & 1) == 0) {
        bool away = (error > 0) == (sum > 0);
        bits = away ? bits | 1 : bits - 1;
        memcpy(&sum, &bits, 8);
    }
    return sum;
}

static uint16_t half_from_double(double x, bool brain) {
    /* double to float, to odd, then to half, to nearest */
    float f = (float)x;
    uint32_t bits = ptx_bits_f32(f);
    if (isfinite(x) && (double)f != x) {
        if (isinf(f)) bits = (bits & 0x80000000u) | 0x7f7fffffu;
        else if ((bits & 1) == 0) bits = fabs((double)f) > fabs(x) ? bits - 1 : bits | 1;
        f = ptx_f32_bits(bits);
    }
    return brain ? ptx_f32_to_bf16(f) : ptx_f32_to_f16(f);
}

static uint16_t flush_half(uint16_t x) { return x & 0x7c00u ? x : x & 0x8000u; }

static uint16_t one_half(enum ptx_fp_op op, uint16_t a, uint16_t b, uint16_t c, bool brain, uint32_t flags) {
    bool ftz = (flags & PTX_FTZ) && !brain;
    if (ftz) a = flush_half(a), b = flush_half(b), c = flush_half(c);
    if (op == PTX_FP_NEG) return a ^ 0x8000u;
    if (op == PTX_FP_ABS) return a & 0x7fffu;
    float x = brain ? ptx_bf16_to_f32(a) : ptx_f16_to_f32(a), y = brain ? ptx_bf16_to_f32(b) : ptx_f16_to_f32(b), z = brain ? ptx_bf16_to_f32(c) : ptx_f16_to_f32(c);
    uint16_t r;
    if (op == PTX_FP_FMA) r = half_from_double(half_fma((double)x, (double)y, (double)z), brain);
    else if (op == PTX_FP_ADD || op == PTX_FP_SUB || op == PTX_FP_MUL) r = half_from_double(op == PTX_FP_MUL ? (double)x * (double)y : op == PTX_FP_ADD ? half_fma(1, (double)x, (double)y) : half_fma(1, (double)x, -(double)y), brain);
    else {
        float f = one_f32(op, x, y, z, flags);
        r = brain ? ptx_f32_to_bf16(f) : ptx_f32_to_f16(f);
    }
    uint16_t infinity = brain ? 0x7f80u : 0x7c00u, one = brain ? 0x3f80u : 0x3c00u;
    bool nan = (r & 0x7fffu) > infinity;
    if (ftz) r = flush_half(r);
    if (flags & PTX_SAT) r = nan || (r & 0x8000u) ? 0 : r > one ? one : r;
    if ((flags & PTX_RELU) && !nan && (r & 0x8000u)) r = 0;
    return r;
}

static int rounding_mode(uint32_t round) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    return modes[round < 5 ? round : 0];
}

static __attribute__((noinline)) void loop_f32(const struct ptx_ins *in, float *d, const float *a, const float *b, const float *c) {
    enum ptx_fp_op op = (enum ptx_fp_op)in->sub;
    bool ftz = in->flags & PTX_FTZ, two = op <= PTX_FP_FMA, three = op == PTX_FP_FMA;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        float x = a[l], y = two ? b[l] : 0, z = three ? c[l] : 0;
        if (ftz) x = flush(x), y = flush(y), z = flush(z);
        float r = one_f32(op, x, y, z, in->flags);
        if (ftz) r = flush(r);
        if (in->flags & PTX_SAT) r = r > 0 ? (r > 1 ? 1 : r) : 0;
        d[l] = ptx_canonical(r);
    }
}

/* The common flushing operations of code compiled with fast math, each a plain loop. */
static bool loop_ftz(const struct ptx_ins *in, float *d, const float *a, const float *b, const float *c) {
    if (in->aux != PTX_RN || in->flags != PTX_FTZ) return false;
#define FTZ_LOOP(expr) \
    for (uint32_t l = 0; l < PTX_WARP; l++) { \
        float x = flush(a[l]), y = flush(b[l]); \
        d[l] = ptx_canonical(flush(expr)); \
    } \
    return true
    switch (in->sub) {
    case PTX_FP_ADD: FTZ_LOOP(x + y);
    case PTX_FP_SUB: FTZ_LOOP(x - y);
    case PTX_FP_MUL: FTZ_LOOP(x * y);
    case PTX_FP_FMA: FTZ_LOOP(fmaf(x, y, flush(c[l])));
    default: return false;
    }
}

static __attribute__((noinline)) void loop_f64(const struct ptx_ins *in, double *d, const double *a, const double *b, const double *c) {
    enum ptx_fp_op op = (enum ptx_fp_op)in->sub;
    bool two = op <= PTX_FP_FMA, three = op == PTX_FP_FMA;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        double r = one_f64(op, a[l], two ? b[l] : 0, three ? c[l] : 0, in->flags);
        if (in->flags & PTX_SAT) r = r > 0 ? (r > 1 ? 1 : r) : 0;
        d[l] = r;
    }
}

void ptx_fp(const struct ptx_ins *in, void *d, const void *a, const void *b, const void *c) {
    enum ptx_fp_op op = (enum ptx_fp_op)in->sub;
    bool two = op <= PTX_FP_FMA, three = op == PTX_FP_FMA;
    switch (in->type) {
    case PTX_F32:
    case PTX_F64: {
        int mode = rounding_mode(in->aux);
        if (in->type == PTX_F32 && two && loop_ftz(in, d, a, b, c)) return;
        if (mode != FE_TONEAREST) fesetround(mode);
        if (in->type == PTX_F32) loop_f32(in, d, a, b, c);
        else loop_f64(in, d, a, b, c);
        if (mode != FE_TONEAREST) fesetround(FE_TONEAREST);
        return;
    }
    case PTX_F16:
    case PTX_BF16: {
        const uint16_t *x = a, *y = b, *z = c;
        uint16_t *r = d;
        for (uint32_t l = 0; l < PTX_WARP; l++) r[l] = one_half(op, x[l], two ? y[l] : 0, three ? z[l] : 0, in->type == PTX_BF16, in->flags);
        return;
    }
    default: {
        const uint32_t *x = a, *y = b, *z = c;
        uint32_t *r = d;
        bool brain = in->type == PTX_BF16X2;
        for (uint32_t l = 0; l < PTX_WARP; l++) {
            uint32_t p = x[l], q = two ? y[l] : 0, s = three ? z[l] : 0;
            uint32_t low = one_half(op, (uint16_t)p, (uint16_t)q, (uint16_t)s, brain, in->flags);
            r[l] = low | (uint32_t)one_half(op, (uint16_t)(p >> 16), (uint16_t)(q >> 16), (uint16_t)(s >> 16), brain, in->flags) << 16;
        }
    }
    }
}

static bool compare(uint32_t cmp, float x, float y) {
    bool nan = x != x || y != y;
    switch (cmp) {
    case 0: return x == y;
    case 1: return !nan && x != y;
    case 2: return x < y;
    case 3: return x <= y;
    case 4: return x > y;
    case 5: return x >= y;
    case 6: return nan || x == y;
    case 7: return nan || x != y;
    case 8: return nan || x < y;
    case 9: return nan || x <= y;
    case 10: return nan || x > y;
    case 11: return nan || x >= y;
    case 12: return !nan;
    default: return nan;
    }
}

uint32_t ptx_compare_half(const struct ptx_ins *in, const void *a, const void *b, uint32_t *second) {
    uint32_t r = 0, s = 0;
    bool brain = in->type == PTX_BF16 || in->type == PTX_BF16X2, ftz = (in->flags & PTX_FTZ) && !brain;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        if (in->type == PTX_F32) {
            r |= (uint32_t)compare(in->aux, flush(((const float *)a)[l]), flush(((const float *)b)[l])) << l;
            continue;
        }
        bool pair = in->type == PTX_F16X2 || in->type == PTX_BF16X2;
        uint32_t x = pair ? ((const uint32_t *)a)[l] : ((const uint16_t *)a)[l], y = pair ? ((const uint32_t *)b)[l] : ((const uint16_t *)b)[l];
        for (uint32_t half = 0; half < (pair ? 2 : 1); half++, x >>= 16, y >>= 16) {
            if (ftz) x = (x & 0xffff0000u) | flush_half((uint16_t)x), y = (y & 0xffff0000u) | flush_half((uint16_t)y);
            float u = brain ? ptx_bf16_to_f32((uint16_t)x) : ptx_f16_to_f32((uint16_t)x), v = brain ? ptx_bf16_to_f32((uint16_t)y) : ptx_f16_to_f32((uint16_t)y);
            *(half ? &s : &r) |= (uint32_t)compare(in->aux, u, v) << l;
        }
    }
    *second = s;
    return r;
}

uint32_t ptx_testp(const struct ptx_ins *in, const void *a) {
    uint32_t r = 0;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        int kind = in->type == PTX_F32 ? fpclassify(((const float *)a)[l]) : fpclassify(((const double *)a)[l]);
        bool is = in->sub == 0 ? kind != FP_NAN && kind != FP_INFINITE : in->sub == 1 ? kind == FP_INFINITE : in->sub == 2 ? kind != FP_NAN
                : in->sub == 3 ? kind == FP_NAN : in->sub == 4 ? kind == FP_NORMAL : kind == FP_SUBNORMAL;
        r |= (uint32_t)is << l;
    }
    return r;
}
