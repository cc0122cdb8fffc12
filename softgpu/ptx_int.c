/* Integer operations that are rare: carries, saturation, bit fields, byte permutation, dot products. */
#include <string.h>

#include "ptx_exec.h"
#include "ptx_half.h"

static uint32_t width_of(uint32_t type) {
    switch (type) {
    case PTX_U64: case PTX_S64: case PTX_B64: return 64;
    case PTX_U16: case PTX_S16: case PTX_B16: return 16;
    default: return 32;
    }
}

static uint64_t get(const void *p, uint32_t width, uint32_t l) {
    return width == 64 ? ((const uint64_t *)p)[l] : width == 32 ? ((const uint32_t *)p)[l] : ((const uint16_t *)p)[l];
}

static void put(void *p, uint32_t width, uint32_t l, uint64_t v) {
    if (width == 64) ((uint64_t *)p)[l] = v;
    else if (width == 32) ((uint32_t *)p)[l] = (uint32_t)v;
    else ((uint16_t *)p)[l] = (uint16_t)v;
}

/* flags: 1 carry in, 2 carry out, 4 signed (matters for the high half of a product). A borrow is a carry, as in PTX's CC.CF. */
static uint64_t with_carry(const struct ptx_ins *in, uint32_t width, uint64_t a, uint64_t b, uint64_t c, bool carry, bool *out) {
    unsigned __int128 sum;
    uint64_t extra = in->flags & 1 && carry;
    if (in->sub == PTX_INT_CARRY_SUB) {
        sum = (unsigned __int128)a - b - extra;
    } else if (in->sub == PTX_INT_CARRY_ADD) {
        sum = (unsigned __int128)a + b + extra;
    } else {
        unsigned __int128 product = (unsigned __int128)a * b;
        if (in->flags & 4) product = width == 64 ? (unsigned __int128)((__int128)(int64_t)a * (int64_t)b) : (unsigned __int128)(__int128)((int64_t)(int32_t)a * (int32_t)b);
        uint64_t mask = width == 64 ? UINT64_MAX : UINT32_MAX;
        uint64_t part = in->sub == PTX_INT_CARRY_MADLO ? (uint64_t)product & mask : (uint64_t)(product >> width) & mask;
        sum = (unsigned __int128)part + c + extra;
    }
    *out = (sum >> width & 1) != 0;
    return (uint64_t)sum;
}

static uint32_t permute(uint32_t a, uint32_t b, uint32_t c, uint32_t mode) {
    uint64_t all = (uint64_t)b << 32 | a;
    uint32_t r = 0, s = c & 3;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t pick;
        switch (mode) {
        case 0: pick = c >> 4 * i & 15; break;
        case 1: pick = (s + i) & 7; break;          /* f4e */
        case 2: pick = (s - i) & 7; break;          /* b4e */
        case 3: pick = s; break;                    /* rc8 */
        case 4: pick = i < s ? s : i; break;        /* ecl */
        case 5: pick = i > s ? s : i; break;        /* ecr */
        default: pick = (s & 1) * 2 + (i & 1); break; /* rc16 */
        }
        uint32_t byte = (uint32_t)(all >> 8 * (pick & 7)) & 255;
        if (mode == 0 && (pick & 8)) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}

static uint32_t find_bit(uint64_t a, uint32_t width, bool is_signed, bool amount) {
    if (is_signed && a >> (width - 1) & 1) a = ~a;
    if (width == 32) a &= UINT32_MAX;
    if (a == 0) return UINT32_MAX;
    uint32_t bit = 63 - (uint32_t)__builtin_clzll(a);
    return amount ? width - 1 - bit : bit;
}

static uint32_t find_nth(uint32_t mask, uint32_t base, int32_t offset) {
    base &= 31;
    if (offset == 0) return mask >> base & 1 ? base : UINT32_MAX;
    int32_t step = offset > 0 ? 1 : -1, left = offset > 0 ? offset : -offset;
    for (int32_t at = (int32_t)base; at >= 0 && at < 32; at += step)
        if (mask >> at & 1 && --left == 0) return (uint32_t)at;
    return UINT32_MAX;
}

/* flags: 1 a is signed, 2 b is signed, 4 the upper two bytes of b (dp2a) */
static uint32_t dot(uint32_t a, uint32_t b, uint32_t c, uint32_t flags, bool four) {
    int64_t sum = 0;
    for (uint32_t i = 0; i < (four ? 4 : 2); i++) {
        uint32_t y = b >> 8 * (i + (!four && flags & 4 ? 2 : 0)) & 255;
        int64_t u = four ? (flags & 1 ? (int8_t)(a >> 8 * i) : (int64_t)(a >> 8 * i & 255)) : (flags & 1 ? (int16_t)(a >> 16 * i) : (int64_t)(a >> 16 * i & 65535));
        sum += u * (flags & 2 ? (int64_t)(int8_t)y : (int64_t)y);
    }
    return c + (uint32_t)sum;
}

static int64_t clamp32(int64_t x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x; }

static uint64_t mul24(const struct ptx_ins *in, uint32_t a, uint32_t b) {
    int64_t x = a & 0xffffff, y = b & 0xffffff;
    if (in->type == PTX_S32) x = (int32_t)(a << 8) >> 8, y = (int32_t)(b << 8) >> 8;
    return in->flags & 1 ? (uint64_t)(x * y) >> 16 : (uint64_t)(x * y);
}

static uint64_t insert(uint64_t a, uint64_t b, uint32_t position, uint32_t length, uint32_t width) {
    uint32_t pos = position & 255, len = length & 255;
    if (len == 0 || pos >= width) return b;
    uint64_t field = (len > 63 ? UINT64_MAX : ((uint64_t)1 << len) - 1) << pos;
    return (b & ~field) | (a << pos & field);
}

static uint64_t one(const struct ptx_ins *in, uint32_t width, uint64_t a, uint64_t b, uint64_t c, uint32_t e) {
    bool is_signed = in->type == PTX_S16 || in->type == PTX_S32 || in->type == PTX_S64;
    switch (in->sub) {
    case PTX_INT_ADD_SAT: return (uint64_t)clamp32((int64_t)(int32_t)a + (int32_t)b);
    case PTX_INT_SUB_SAT: return (uint64_t)clamp32((int64_t)(int32_t)a - (int32_t)b);
    case PTX_INT_MADHI_SAT: return (uint64_t)clamp32(((int64_t)(int32_t)a * (int32_t)b >> 32) + (int32_t)c);
    case PTX_INT_MUL24: return mul24(in, (uint32_t)a, (uint32_t)b);
    case PTX_INT_MAD24: return in->flags & 2 ? (uint64_t)clamp32((int64_t)(int32_t)mul24(in, (uint32_t)a, (uint32_t)b) + (int32_t)c) : mul24(in, (uint32_t)a, (uint32_t)b) + c;
    case PTX_INT_BFIND: return find_bit(a, width, is_signed, in->flags & 1);
    case PTX_INT_FNS: return find_nth((uint32_t)a, (uint32_t)b, (int32_t)c);
    case PTX_INT_PRMT: return permute((uint32_t)a, (uint32_t)b, (uint32_t)c, in->flags);
    case PTX_INT_DP4A: return dot((uint32_t)a, (uint32_t)b, (uint32_t)c, in->flags, true);
    case PTX_INT_DP2A: return dot((uint32_t)a, (uint32_t)b, (uint32_t)c, in->flags, false);
    case PTX_INT_BFI: return insert(a, b, (uint32_t)c, e, width);
    case PTX_INT_BMSK: {
        uint32_t pos = (uint32_t)a, len = (uint32_t)b;
        if (in->flags & 1) pos &= 31, len &= 31;
        uint64_t ones = len > 31 ? UINT32_MAX : ((uint64_t)1 << len) - 1;
        return pos > 31 ? 0 : ones << pos;
    }
    default: { /* szext: extend from bit `b` */
        uint32_t n = in->flags & 1 ? (uint32_t)b & 31 : (uint32_t)b > 32 ? 32 : (uint32_t)b;
        if (n == 0 || n >= 32) return n == 0 ? 0 : a;
        return is_signed ? (uint64_t)(int64_t)((int32_t)((uint32_t)a << (32 - n)) >> (32 - n)) : a & (((uint64_t)1 << n) - 1);
    }
    }
}

void ptx_int(const struct ptx_ins *in, void *d, const void *a, const void *b, const void *c, const void *e, uint32_t *carry, uint32_t m) {
    uint32_t width = width_of(in->type), carries = 0;
    bool to32 = in->sub == PTX_INT_BFIND, c32 = in->sub == PTX_INT_BFI, b32 = in->sub == PTX_INT_BMSK || in->sub == PTX_INT_SZEXT || in->sub == PTX_INT_FNS;
    bool unary = in->sub == PTX_INT_BFIND;
    bool binary = unary || b32 || in->sub <= PTX_INT_CARRY_SUB || in->sub == PTX_INT_ADD_SAT || in->sub == PTX_INT_SUB_SAT || in->sub == PTX_INT_MUL24;
    if (in->sub == PTX_INT_FNS) binary = false;
    for (uint32_t l = 0; l < PTX_WARP; l++) {
        uint64_t x = get(a, width, l), y = unary ? 0 : get(b, b32 ? 32 : width, l), z = binary ? 0 : get(c, c32 ? 32 : width, l), r;
        if (carry != NULL) {
            bool out;
            r = with_carry(in, width, x, y, z, (*carry >> l & 1) != 0, &out);
            carries |= (uint32_t)out << l;
        } else {
            r = one(in, width, x, y, z, in->sub == PTX_INT_BFI ? ((const uint32_t *)e)[l] : 0);
        }
        put(d, to32 ? 32 : width, l, r);
    }
    if (carry != NULL && in->flags & 2) *carry = (*carry & ~m) | (carries & m);
}
