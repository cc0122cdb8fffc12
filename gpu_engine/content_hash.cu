// The hash of every chunk of a block: phos_chunk_hash() of images/chunk_hash.c on the GPU, and the two must agree.
//
// A thread block sums SPAN bytes; several add to one chunk's two sums, which must be zero before. Compiled to content_hash.ptx
// by packaging/make_content_hash.py, so that no compiler is needed where phosd runs.
//
// What is hashed where it has arrived brings its sums to the host by itself: a copy of a few bytes to the host, thousands of
// times a second, would keep that copy engine from who brings a process back meanwhile (save_loop.c).

#define SPAN 65536
#define THREADS 256
#define KEY_1 0x9e3779b97f4a7c15ull
#define KEY_2 0xc2b2ae3d27d4eb4full

typedef unsigned long long u64;

__device__ __forceinline__ u64 product(u64 x)
{
    return (x & 0xffffffffu) * (x >> 32);
}

__device__ __forceinline__ u64 swapped(u64 word)
{
    return word << 32 | word >> 32;
}

__device__ __forceinline__ void add_span(const ulonglong2 *block, u64 chunk_bytes, u64 *sums)
{
    __shared__ u64 partial_1[THREADS], partial_2[THREADS];
    u64 start = (u64)blockIdx.x * SPAN;
    u64 chunk = start / chunk_bytes;
    u64 pair = start / 16 + threadIdx.x;            // in the block
    u64 word = (start - chunk * chunk_bytes) / 8 + 2 * threadIdx.x; // in the chunk
    u64 key_1 = (word + 1) * KEY_1, key_2 = (word + 1) * KEY_2;
    u64 sum_1 = 0, sum_2 = 0;
#pragma unroll 4
    for (int i = 0; i < SPAN / 16 / THREADS; i++) {
        ulonglong2 two = block[pair];
        sum_1 += two.x + product(two.x ^ key_1) + two.y + product(two.y ^ (key_1 + KEY_1));
        sum_2 += swapped(two.x) + product(two.x ^ key_2) + swapped(two.y) + product(two.y ^ (key_2 + KEY_2));
        pair += THREADS;
        key_1 += 2 * THREADS * KEY_1;
        key_2 += 2 * THREADS * KEY_2;
    }
    partial_1[threadIdx.x] = sum_1;
    partial_2[threadIdx.x] = sum_2;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            partial_1[threadIdx.x] += partial_1[threadIdx.x + half];
            partial_2[threadIdx.x] += partial_2[threadIdx.x + half];
        }
    }
    if (!threadIdx.x) {
        atomicAdd(&sums[2 * chunk], partial_1[0]);
        atomicAdd(&sums[2 * chunk + 1], partial_2[0]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) phos_content_hash(const ulonglong2 *block, u64 chunk_bytes,
                                                                        u64 *sums)
{
    add_span(block, chunk_bytes, sums);
}

#define ROOM_HEAD 2 // words of a room before the sums: how many thread blocks have added what is theirs, and nothing

// `room`: what the thread blocks work at; zero before, and after.
extern "C" __global__ void __launch_bounds__(THREADS) phos_arrival_hash(const ulonglong2 *block, u64 chunk_bytes, u64 *room,
                                                                        u64 *host)
{
    __shared__ bool last;
    u64 *sums = room + ROOM_HEAD;
    add_span(block, chunk_bytes, sums);
    if (!threadIdx.x) {
        __threadfence();
        last = atomicAdd(room, 1ull) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    u64 words = 2 * (((u64)gridDim.x * SPAN + chunk_bytes - 1) / chunk_bytes);
    for (u64 i = threadIdx.x; i < words; i += THREADS)
        host[i] = atomicExch(&sums[i], 0ull);
    if (!threadIdx.x)
        *room = 0;
}
