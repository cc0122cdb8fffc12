/* Half precision in software: the same bits on every machine. Inline, for the interpreter's loops. */
#ifndef SOFTGPU_PTX_HALF_H
#define SOFTGPU_PTX_HALF_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t ptx_bits_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline float ptx_f32_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Whatever NaN an operation in single precision gives is this one on the device. */
static inline float ptx_canonical(float f) { return f != f ? ptx_f32_bits(0x7fffffffu) : f; }

/* Exact. Subnormals go through a multiplication by a power of two, which is exact too; the branches become selections. */
static inline float ptx_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = h & 0x7fffu;
    uint32_t normal = (body << 13) + ((127u - 15u) << 23);
    uint32_t special = 0x7f800000u | (body & 0x3ffu) << 13;
    float small = (float)(int32_t)body * 0x1p-24f;
    uint32_t bits = body >= 0x7c00u ? special : body < 0x400u ? ptx_bits_f32(small) : normal;
    return ptx_f32_bits(bits | sign);
}

/* To nearest, ties to even. A NaN becomes the canonical one, 0x7fff, as on the device. */
static inline uint16_t ptx_f32_to_f16(float f) {
    uint32_t bits = ptx_bits_f32(f), sign = bits >> 16 & 0x8000u, body = bits & 0x7fffffffu;
    uint32_t normal = (body - ((127u - 15u) << 23) + 0xfffu + (body >> 13 & 1u)) >> 13;
    /* adding 0.5 lines the half's subnormal step up with the float's last bit: the addition rounds */
    uint32_t small = ptx_bits_f32(ptx_f32_bits(body > 0x38800000u ? 0 : body) + 0.5f) - 0x3f000000u;
    uint32_t out = body > 0x7f800000u ? 0x7fffu : body >= 0x477ff000u ? 0x7c00u : body < 0x38800000u ? small : normal;
    return (uint16_t)(body > 0x7f800000u ? 0x7fffu : (sign | out));
}

static inline float ptx_bf16_to_f32(uint16_t h) { return ptx_f32_bits((uint32_t)h << 16); }

static inline uint16_t ptx_f32_to_bf16(float f) {
    uint32_t bits = ptx_bits_f32(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline uint32_t ptx_brev32(uint32_t x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}

/* Bits [position, position + length) of a value, both taken modulo 256; bits past the top are the sign or zero. */
static inline uint64_t ptx_bfe(uint64_t x, uint32_t width, uint32_t position, uint32_t length, bool is_signed) {
    uint32_t pos = position & 0xff, len = length & 0xff;
    if (len == 0) return 0;
    uint64_t value = width == 32 && is_signed ? (uint64_t)(int64_t)(int32_t)x : x;
    uint64_t moved = is_signed ? (uint64_t)((int64_t)value >> (pos > 63 ? 63 : pos)) : pos > 63 ? 0 : value >> pos;
    if (!is_signed) return len > 63 ? moved : moved & (((uint64_t)1 << len) - 1);
    if (len > 63) return moved;
    uint32_t up = 64 - len; /* the sign is the field's top bit, or the value's where the field ends beyond it */
    return (uint64_t)((int64_t)(moved << up) >> up);
}

#endif
