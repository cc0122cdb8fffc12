/* Conversions other than the plain ones of ptx_ops.def. Every source is exact in a double or a 64-bit integer. */
#pragma GCC optimize("rounding-math", "fp-contract=off")
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "ptx_exec.h"
#include "ptx_half.h"

struct value {
    bool real, is_signed;
    double d;
    uint64_t i;
};

static double round_integral(double x, uint32_t round) {
    switch (round) {
    case PTX_RZ: return trunc(x);
    case PTX_RM: return floor(x);
    case PTX_RP: return ceil(x);
    case PTX_RNA: return copysign(floor(fabs(x) + 0.5), x);
    default: { /* to nearest, ties to even, whatever the mode of the processor */
        double low = floor(x), part = x - low;
        if (part < 0.5 || (part == 0.5 && fmod(low, 2) == 0)) return copysign(low, x);
        return copysign(low + 1, x);
    }
    }
}

/* Rounds to `bits` significant bits, none of them below 2^least; the result is exact in a double. */
static double round_format(double x, int bits, int least, uint32_t round) {
    if (x == 0 || !isfinite(x)) return x;
    int e;
    frexp(x, &e);
    int q = e - bits > least ? e - bits : least;
    return ldexp(round_integral(ldexp(x, -q), round), q);
}

/* What becomes of a value beyond the largest of a format. */
static double overflow(double x, double largest, uint32_t round) {
    if (isnan(x) || fabs(x) <= largest || isinf(x)) return x;
    bool inward = round == PTX_RZ || (round == PTX_RM && x > 0) || (round == PTX_RP && x < 0);
    return copysign(inward ? largest : (double)INFINITY, x);
}

static uint16_t to_half(double x, uint32_t round, bool brain) {
    if (isnan(x)) return 0x7fff;
    x = brain ? overflow(round_format(x, 8, -133, round), 0x1.fep127, round) : overflow(round_format(x, 11, -24, round), 65504, round);
    return brain ? ptx_f32_to_bf16((float)x) : ptx_f32_to_f16((float)x);
}

/* The 8-bit formats always saturate to their largest finite value. */
static uint8_t to_fp8(double x, bool e5m2) {
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) return sign | 0x7f;
    double y = fabs(round_format(x, e5m2 ? 3 : 4, e5m2 ? -16 : -9, PTX_RN));
    if (y >= (e5m2 ? 57344.0 : 448.0)) return sign | (e5m2 ? 0x7b : 0x7e);
    if (y == 0) return sign;
    int e, mantissa_bits = e5m2 ? 2 : 3, least = e5m2 ? -14 : -6, bias = e5m2 ? 15 : 7;
    frexp(y, &e);
    e--;
    if (e < least) return sign | (uint8_t)ldexp(y, mantissa_bits - least);
    return sign | (uint8_t)((e + bias) << mantissa_bits) | (uint8_t)((uint32_t)ldexp(y, mantissa_bits - e) & ((1u << mantissa_bits) - 1));
}

static double from_fp8(uint8_t v, bool e5m2) {
    int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, e = v >> mantissa_bits & (e5m2 ? 31 : 15), m = v & ((1 << mantissa_bits) - 1);
    double x;
    if (e5m2 && e == 31) x = m ? (double)NAN : (double)INFINITY;
    else if (!e5m2 && (v & 0x7f) == 0x7f) x = (double)NAN;
    else x = e == 0 ? ldexp(m, 1 - bias - mantissa_bits) : ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
    return v & 0x80 ? -x : x;
}

static struct value fetch(uint32_t type, const void *a, uint32_t l, bool ftz) {
    struct value v = {0};
    switch (type) {
    case PTX_U8: v.i = (uint8_t)((const uint16_t *)a)[l]; break;
    case PTX_S8: v.i = (uint64_t)(int64_t)(int8_t)((const uint16_t *)a)[l]; v.is_signed = true; break;
    case PTX_U16: v.i = ((const uint16_t *)a)[l]; break;
    case PTX_S16: v.i = (uint64_t)(int64_t)((const int16_t *)a)[l]; v.is_signed = true; break;
    case PTX_U32: v.i = ((const uint32_t *)a)[l]; break;
    case PTX_S32: v.i = (uint64_t)(int64_t)((const int32_t *)a)[l]; v.is_signed = true; break;
    case PTX_U64: v.i = ((const uint64_t *)a)[l]; break;
    case PTX_S64: v.i = ((const uint64_t *)a)[l]; v.is_signed = true; break;
    default:
        v.real = true;
        if (type == PTX_F64) v.d = ((const double *)a)[l];
        else if (type == PTX_F16) v.d = (double)ptx_f16_to_f32(((const uint16_t *)a)[l]);
        else if (type == PTX_BF16) v.d = (double)ptx_bf16_to_f32(((const uint16_t *)a)[l]);
        else {
            v.d = (double)((const float *)a)[l];
            if (ftz && fabs(v.d) < 0x1p-126) v.d = copysign(0, v.d);
        }
    }
    return v;
}

static uint64_t to_integer(struct value v, uint32_t type, uint32_t from, uint32_t round) {
    static const int64_t low[] = {0, INT8_MIN, 0, INT16_MIN, 0, INT32_MIN, 0, INT64_MIN};
    static const uint64_t high[] = {UINT8_MAX, INT8_MAX, UINT16_MAX, INT16_MAX, UINT32_MAX, INT32_MAX, UINT64_MAX, INT64_MAX};
    if (!v.real) { /* only reached for .sat */
        if (v.is_signed && (int64_t)v.i < 0) return (int64_t)v.i < low[type] ? (uint64_t)low[type] : v.i;
        return v.i > high[type] ? high[type] : v.i;
    }
    if (isnan(v.d)) {
        if (from != PTX_F64 && type < PTX_U64) return 0;
        return low[type] != 0 ? (uint64_t)low[type] : (high[type] >> 1) + 1;
    }
    double x = round_integral(v.d, round);
    if (x <= (double)low[type]) return (uint64_t)low[type];
    if (x >= (type == PTX_U64 ? 0x1p64 : type == PTX_S64 ? 0x1p63 : (double)high[type])) return high[type];
    return x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
}

static double saturate(double x) { return x > 0 ? (x > 1 ? 1 : x) : 0; }
static double cut_to_finite(double x, uint32_t type) {
    double largest = type == PTX_TF32 ? 0x1.ffcp127 : type == PTX_BF16 || type == PTX_BF16X2 ? 0x1.fep127 : 65504;
    return x > largest ? largest : x < -largest ? -largest : x; /* a NaN stays one */
}
static double rectify(double x) { return x < 0 ? 0 : x; }

/* An integer to a half in one rounding: it is cut to what a double holds first, to odd. */
static double integer_value(struct value v) {
    bool negative = v.is_signed && (int64_t)v.i < 0;
    uint64_t size = negative ? 0 - v.i : v.i;
    if (size >> 52 != 0) size = (size >> 12 | ((size & 0xfff) != 0)) << 12;
    return negative ? -(double)size : (double)size;
}

static __attribute__((noinline)) void store(const struct ptx_ins *in, void *d, uint32_t l, struct value v) {
    uint32_t type = in->type, round = in->aux;
    if (type <= PTX_S64) {
        uint64_t x = to_integer(v, type, in->sub, round);
        if (type <= PTX_S16) ((uint16_t *)d)[l] = (uint16_t)x;
        else if (type <= PTX_S32) ((uint32_t *)d)[l] = (uint32_t)x;
        else ((uint64_t *)d)[l] = x;
        return;
    }
    if (v.real) {
        if (in->flags & PTX_INTEGER) v.d = round_integral(v.d, round);
        if (in->flags & PTX_SAT) v.d = saturate(v.d);
        if (in->flags & PTX_RELU) v.d = rectify(v.d);
        if (in->flags & PTX_SATFINITE) v.d = cut_to_finite(v.d, type);
    }
    if (type == PTX_F64) {
        ((double *)d)[l] = v.real ? v.d : v.is_signed ? (double)(int64_t)v.i : (double)v.i;
    } else if (type == PTX_F32) {
        float f = v.real ? (float)v.d : v.is_signed ? (float)(int64_t)v.i : (float)v.i;
        if ((in->flags & PTX_SAT) && !v.real) f = (float)saturate((double)f);
        if ((in->flags & PTX_FTZ) && (ptx_bits_f32(f) & 0x7f800000u) == 0) f = ptx_f32_bits(ptx_bits_f32(f) & 0x80000000u);
        if (f != f) f = ptx_f32_bits(0x7fffffffu);
        ((float *)d)[l] = f;
    } else if (type == PTX_TF32) {
        ((float *)d)[l] = (float)round_format(v.d, 11, -136, round);
    } else {
        ((uint16_t *)d)[l] = to_half(v.real ? v.d : integer_value(v), round, type == PTX_BF16);
    }
}

/* Two values to one register: a is the upper half, b the lower. */
static void pack(const struct ptx_ins *in, void *d, const void *a, const void *b) {
    bool relu = in->flags & PTX_RELU;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        double high, low;
        if (in->sub == PTX_F32) {
            high = (double)((const float *)a)[l];
            low = (double)((const float *)b)[l];
        } else if (in->sub == PTX_E4M3X2 || in->sub == PTX_E5M2X2) {
            uint16_t x = ((const uint16_t *)a)[l];
            high = from_fp8((uint8_t)(x >> 8), in->sub == PTX_E5M2X2);
            low = from_fp8((uint8_t)x, in->sub == PTX_E5M2X2);
        } else {
            uint32_t x = ((const uint32_t *)a)[l];
            bool brain = in->sub == PTX_BF16X2;
            high = (double)(brain ? ptx_bf16_to_f32((uint16_t)(x >> 16)) : ptx_f16_to_f32((uint16_t)(x >> 16)));
            low = (double)(brain ? ptx_bf16_to_f32((uint16_t)x) : ptx_f16_to_f32((uint16_t)x));
        }
        if (relu) high = rectify(high), low = rectify(low);
        if (in->type == PTX_E4M3X2 || in->type == PTX_E5M2X2) {
            bool e5m2 = in->type == PTX_E5M2X2;
            ((uint16_t *)d)[l] = (uint16_t)(to_fp8(high, e5m2) << 8 | to_fp8(low, e5m2));
        } else {
            bool brain = in->type == PTX_BF16X2;
            if (in->flags & PTX_SATFINITE) high = cut_to_finite(high, in->type), low = cut_to_finite(low, in->type);
            ((uint32_t *)d)[l] = (uint32_t)to_half(high, in->aux, brain) << 16 | to_half(low, in->aux, brain);
        }
    }
}

void ptx_cvt(const struct ptx_ins *in, void *d, const void *a, const void *b) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    if (in->type == PTX_F16X2 || in->type == PTX_BF16X2 || in->type == PTX_E4M3X2 || in->type == PTX_E5M2X2) {
        pack(in, d, a, b);
        return;
    }
    struct value v[PTX_WARP];
    for (uint32_t l = 0; l < PTX_WARP; l++) v[l] = fetch(in->sub, a, l, (in->flags & PTX_FTZ) != 0);
    bool directed = in->aux != PTX_RN && (in->type == PTX_F32 || in->type == PTX_F64) && !(in->flags & PTX_INTEGER);
    if (directed) fesetround(modes[in->aux]);
    for (uint32_t l = 0; l < PTX_WARP; l++) store(in, d, l, v[l]);
    if (directed) fesetround(FE_TONEAREST);
}
