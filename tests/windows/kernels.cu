// The kernels of program.c; kernels.ptx is made from this by NVRTC (see packaging/make_content_hash.py).
//
// Each touches one word in 4096 bytes: that is enough to change a chunk, and cheap where kernels are interpreted.
typedef unsigned int u32;
#define STRIDE 1024

struct two {
    u32 *to;
    const u32 *from;
    u32 count, value;
};

__device__ u32 *target;

__device__ u32 here() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void fill(u32 *to, u32 count, u32 value)
{
    u32 i = here();
    if (i < count)
        to[(size_t)i * STRIDE] = value + i;
}

extern "C" __global__ void add(u32 *to, u32 count, u32 value)
{
    u32 i = here();
    if (i < count)
        to[(size_t)i * STRIDE] += value;
}

extern "C" __global__ void count_up(u32 *to, u32 count, u32 value)
{
    u32 i = here();
    if (i < count)
        atomicAdd(&to[(size_t)i * STRIDE], value);
}

extern "C" __global__ void derive(two both)
{
    u32 i = here();
    if (i < both.count)
        both.to[(size_t)i * STRIDE] = both.from[(size_t)i * STRIDE] + both.value;
}

// Writes through addresses that are not among its arguments.
extern "C" __global__ void scatter(u32 *const *table, u32 pointers, u32 count, u32 value)
{
    u32 i = here();
    if (i < count)
        for (u32 p = 0; p < pointers; p++)
            table[p][(size_t)i * STRIDE] = value + i;
}

extern "C" __global__ void aim(u32 *to) { target = to; }

extern "C" __global__ void shoot(u32 count, u32 value)
{
    u32 i = here();
    if (i < count)
        target[(size_t)i * STRIDE] += value;
}
