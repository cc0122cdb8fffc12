// The content hash of every chunk of a block: phos_content_hash() of chunk_table.c on the GPU, and the two must agree.
//
// A thread block sums SPAN bytes; several add to one chunk's sum, which must be zero before. Compiled to content_hash.ptx
// by packaging/make_content_hash.py, so that no compiler is needed where phosd runs.

#define SPAN 65536
#define THREADS 256
#define KEY 0x9e3779b97f4a7c15ull

typedef unsigned long long u64;

__device__ __forceinline__ u64 term(u64 word, u64 key)
{
    u64 x = word ^ key;
    return word + (x & 0xffffffffu) * (x >> 32);
}

extern "C" __global__ void __launch_bounds__(THREADS) phos_content_hash(const ulonglong2 *block, u64 chunk_bytes,
                                                                        u64 *sums)
{
    __shared__ u64 partial[THREADS];
    u64 start = (u64)blockIdx.x * SPAN;
    u64 chunk = start / chunk_bytes;
    u64 pair = start / 16 + threadIdx.x;            // in the block
    u64 word = (start - chunk * chunk_bytes) / 8 + 2 * threadIdx.x; // in the chunk
    u64 key = (word + 1) * KEY;
    u64 sum = 0;
#pragma unroll 4
    for (int i = 0; i < SPAN / 16 / THREADS; i++) {
        ulonglong2 two = block[pair];
        sum += term(two.x, key) + term(two.y, key + KEY);
        pair += THREADS;
        key += 2 * THREADS * KEY;
    }
    partial[threadIdx.x] = sum;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (!threadIdx.x)
        atomicAdd(&sums[chunk], partial[0]);
}
