/* The hash of a chunk: two sums over its 64-bit words w, which are counted from j = 1. With lo and hi for the halves,
 *
 *     first:   w               + lo(x) * hi(x),   x = w xor j * KEY_1
 *     second:  w, halves swapped + lo(y) * hi(y),   y = w xor j * KEY_2
 *
 * both modulo 2^64. Addition is commutative, so a GPU may sum in any order (content_hash.cu, which must agree). A change in
 * the upper half of one word alone always changes the first, one in the lower half the second; contents that differ in more,
 * by chance, have the same two once in 2^128. Not for adversaries.
 * A part of a word at the end counts as if zeros followed it. No state; any thread. */
#include "chunk_hash.h"

#include <string.h>

#define KEY_1 0x9e3779b97f4a7c15ull
#define KEY_2 0xc2b2ae3d27d4eb4full

#define EXPORT __attribute__((visibility("default")))

static inline void add(uint64_t sums[2], uint64_t word, uint64_t j)
{
    uint64_t x = word ^ (j * KEY_1), y = word ^ (j * KEY_2);
    sums[0] += word + (x & 0xffffffffu) * (x >> 32);
    sums[1] += (word << 32 | word >> 32) + (y & 0xffffffffu) * (y >> 32);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* 4 words at a time: one multiplication of halves gives what the formula asks for. Returns how many words it has added. */
__attribute__((target("avx2"))) static uint64_t add_avx2(uint64_t sums[2], const unsigned char *data, uint64_t words)
{
    const __m256i step_1 = _mm256_set1_epi64x((long long)(KEY_1 * 4)), step_2 = _mm256_set1_epi64x((long long)(KEY_2 * 4));
    __m256i key_1 = _mm256_setr_epi64x((long long)KEY_1, (long long)(KEY_1 * 2), (long long)(KEY_1 * 3), (long long)(KEY_1 * 4));
    __m256i key_2 = _mm256_setr_epi64x((long long)KEY_2, (long long)(KEY_2 * 2), (long long)(KEY_2 * 3), (long long)(KEY_2 * 4));
    __m256i first = _mm256_setzero_si256(), second = _mm256_setzero_si256();
    uint64_t done = words & ~(uint64_t)3;
    for (uint64_t i = 0; i < done; i += 4) {
        __m256i word = _mm256_loadu_si256((const __m256i *)(data + 8 * i));
        __m256i x = _mm256_xor_si256(word, key_1), y = _mm256_xor_si256(word, key_2);
        first = _mm256_add_epi64(first, _mm256_add_epi64(word, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32))));
        second = _mm256_add_epi64(
            second, _mm256_add_epi64(_mm256_shuffle_epi32(word, 0xb1), _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32))));
        key_1 = _mm256_add_epi64(key_1, step_1);
        key_2 = _mm256_add_epi64(key_2, step_2);
    }
    uint64_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, first);
    _mm256_storeu_si256((__m256i *)(lanes + 4), second);
    sums[0] += lanes[0] + lanes[1] + lanes[2] + lanes[3];
    sums[1] += lanes[4] + lanes[5] + lanes[6] + lanes[7];
    return done;
}
#endif

EXPORT void phos_chunk_hash(const unsigned char *data, uint64_t bytes, uint64_t sums[2])
{
    uint64_t words = bytes / 8, done = 0;
    sums[0] = sums[1] = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        done = add_avx2(sums, data, words);
#endif
    for (uint64_t word; done < words; done++) {
        memcpy(&word, data + 8 * done, 8);
        add(sums, word, done + 1);
    }
    if (bytes % 8) {
        uint64_t word = 0;
        memcpy(&word, data + 8 * words, bytes % 8);
        add(sums, word, words + 1);
    }
}
