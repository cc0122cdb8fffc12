// Kernels whose machine code the tests of data flow read. What each does with its arguments is in test_spec_sass_flow.py.

struct alignas(16) Vector { float x, y, z, w; };

// Pointers by value, as in PyTorch's elementwise kernels.
struct Pointers { float *data[4]; };

extern "C" __global__ void vectorised(int count, Pointers all, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 4 >= count) return;
    Vector a = *(Vector *)(all.data[1] + 4 * i), b = *(Vector *)(all.data[2] + 4 * i);
    a.x += factor * b.x; a.y += b.y; a.z += b.z; a.w += b.w;
    *(Vector *)(all.data[0] + 4 * i) = a;
}

// A list of tensors by value and a dynamic index into it, as in PyTorch's foreach kernels.
struct TensorLists {
    void *address[2][30];
    int length[30];
    unsigned char block_to_tensor[320];
    int block_to_chunk[320];
};

extern "C" __global__ void lists(TensorLists all, float factor) {
    int tensor = all.block_to_tensor[blockIdx.x], chunk = all.block_to_chunk[blockIdx.x];
    int length = all.length[tensor] - chunk * 65536;
    float *from = (float *)all.address[0][tensor] + chunk * 65536, *to = (float *)all.address[1][tensor] + chunk * 65536;
    for (int i = threadIdx.x; i < length; i += blockDim.x) to[i] = from[i] * factor;
}

struct Pair { const float *from; float *to; long length; };
struct Pairs { Pair of[16]; };

extern "C" __global__ void pairs(Pairs all) {
    Pair p = all.of[blockIdx.x];
    for (long i = threadIdx.x; i < p.length; i += blockDim.x) p.to[i] = p.from[i];
}

extern "C" __global__ void reduction(const float *from, float *sum, int count) {
    float s = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) s += from[i];
    for (int step = 16; step; step /= 2) s += __shfl_down_sync(~0u, s, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, s);
}

extern "C" __global__ void locked(int *lock, int *out) {
    while (atomicCAS(lock, 0, 1)) {}
    out[0] += 1;
    __threadfence();
    atomicExch(lock, 0);
}

extern "C" __global__ void product(const float *a, const float *b, float *c, int n, long lda, long ldb) {
    __shared__ float x[16][17], y[16][17];
    int column = threadIdx.x, row = threadIdx.y;
    float sum = 0;
    long i = blockIdx.y * 16 + row, j = blockIdx.x * 16 + column;
    for (int k = 0; k < n; k += 16) {
        x[row][column] = a[i * lda + k + column];
        y[row][column] = b[(k + row) * ldb + j];
        __syncthreads();
#pragma unroll 4
        for (int l = 0; l < 16; l++) sum += x[row][l] * y[l][column];
        __syncthreads();
    }
    c[i * n + j] = sum;
}

extern "C" __global__ void pipeline(const Vector *from, Vector *to, int tiles) {
    __shared__ Vector stage[2][64];
    for (int tile = 0; tile < tiles; tile++) {
        unsigned place = (unsigned)__cvta_generic_to_shared(&stage[tile & 1][threadIdx.x]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from + tile * 64 + threadIdx.x));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_all;");
        __syncthreads();
        to[tile * 64 + threadIdx.x] = stage[tile & 1][63 - threadIdx.x];
    }
}

struct Strided { float *data; long strides[3]; };

extern "C" __global__ void strided(Strided to, Strided from) {
    long i = blockIdx.x, j = blockIdx.y, k = threadIdx.x;
    to.data[i * to.strides[0] + j * to.strides[1] + k * to.strides[2]] =
        from.data[i * from.strides[0] + j * from.strides[1] + k * from.strides[2]];
}

// A 64-bit number added to a pointer to bytes: only the other access says which of the two is the pointer.
extern "C" __global__ void bytes(char *data, long offset) {
    data[threadIdx.x] = 1;
    data[offset] = 2;
}

extern "C" __global__ void gather(const char *data, const long *index, char *out) {
    data[0] ? (void)0 : __trap();
    out[threadIdx.x] = data[index[threadIdx.x]];
}

__device__ int counter;
__device__ float *remembered;
__constant__ float *fixed;

extern "C" __global__ void own_variable(int value) { counter = value; }
extern "C" __global__ void through_variable(float value) { remembered[threadIdx.x] = value; }
extern "C" __global__ void through_constant(float value) { fixed[threadIdx.x] = value; }

struct Node { Node *next; int value; };

extern "C" __global__ void chase(const Node *head, int *sum) {
    int s = 0;
    for (; head; head = head->next) s += head->value;
    *sum = s;
}

extern "C" __global__ void table(float **rows, int row, const float *from) { rows[row][threadIdx.x] = from[threadIdx.x]; }

__device__ __noinline__ void put(float *to, int i, float value) { to[i] = value; }
__device__ __noinline__ float get(const float *from, int i) { return from[i]; }

extern "C" __global__ void calls(const float *a, const float *b, float *c) {
    put(c, threadIdx.x, get(a, threadIdx.x) * get(b, threadIdx.x + 1));
}

typedef float (*Function)(float);
__device__ float plus(float x) { return x + 1; }
__device__ float twice(float x) { return x * 2; }
__device__ Function functions[2] = {plus, twice};

extern "C" __global__ void through_function(float *data, int which) { data[threadIdx.x] = functions[which](data[threadIdx.x]); }

// More live values than registers; some of them are pointers.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float *a, const float *b, float *c, float *d, int n) {
    float r[24];
    for (int i = 0; i < 24; i++) r[i] = a[i * n + threadIdx.x] * b[i];
    for (int k = 0; k < n; k++) {
        float first = r[0];
        for (int i = 0; i < 23; i++) r[i] = r[i + 1] * r[i] + first;
        r[23] = first;
        c[k] = first;
    }
    for (int i = 0; i < 24; i++) d[i * n + threadIdx.x] = r[i];
}

// An array of pointers on the stack, indexed by a variable.
extern "C" __global__ void stack(float *a, float *b, const float *c, int i, int j) {
    float *of[4] = {a, b, (float *)c, a + 16};
    of[i] += 4;
    float value = c[threadIdx.x];
    of[j & 1][threadIdx.x] = value;
}

extern "C" __global__ void chosen(float *a, float *b, int which) {
    float *p = which ? a : b;
    p[threadIdx.x] = 1;
}

extern "C" __global__ void difference(const char *a, const char *b, long *out) { out[threadIdx.x] = a - b; }

extern "C" __global__ void branches(float *a, float *b, float *c, int which) {
    switch (which) {
    case 0: a[threadIdx.x] = 1; break;
    case 1: b[threadIdx.x * 2] = 2; __syncthreads(); break;
    case 2: c[1] = 3; break;
    case 3: a[4] = b[4]; break;
    case 4: c[threadIdx.x] = a[7]; break;
    case 5: b[9] += 1; break;
    case 6: __trap();
    case 7: a[which * 9] = __sinf(b[7]);
    }
}

extern "C" __global__ void divided(char *data, long a, long b, long i) { data[i / b * a + threadIdx.x % b] = 1; }

extern "C" __global__ void generic(float *data, int shared) {
    __shared__ float s[64];
    float *p = shared ? s : data;
    p[threadIdx.x] = 1;
    __syncthreads();
    data[threadIdx.x + 64] = s[threadIdx.x];
}

extern "C" __global__ void prints(float *data) {
    printf("%p\n", data);
    data[0] = 1;
}

extern "C" __global__ void heap(int **out) {
    int *p = (int *)malloc(16);
    p[0] = 3;
    *out = p;
}

extern "C" __global__ void textures(unsigned long long handle, float *out) {
    float a, b, c, d;
    asm volatile("tex.1d.v4.f32.s32 {%0,%1,%2,%3},[%4,{%5}];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(handle), "r"(3));
    out[0] = a;
}

extern "C" __global__ void surfaces(unsigned long long handle) {
    asm volatile("sust.b.1d.b32.trap [%0,{%1}],{%2};" ::"l"(handle), "r"(4), "r"(5));
}

struct Big { float *data[40]; int count; };

__device__ __noinline__ float *pick(const Big *from, int i) { return from->data[i]; }

extern "C" __global__ void by_address(const __grid_constant__ Big all, int i) { pick(&all, i)[threadIdx.x] = 1; }

#if __CUDA_ARCH__ >= 900
struct alignas(64) Map { char opaque[128]; };
struct Maps { int row; Map of[2]; };

#define SHARED(x) ((unsigned)__cvta_generic_to_shared(x))

extern "C" __global__ void tensors(const __grid_constant__ Map from, int row, const __grid_constant__ Map to) {
    __shared__ alignas(128) float tile[1024];
    __shared__ unsigned long long barrier;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&from));
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(SHARED(&barrier)));
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 4096;" ::"r"(SHARED(&barrier)));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];" ::"r"(
                         SHARED(tile)), "l"(&from), "r"(0), "r"(row), "r"(SHARED(&barrier)) : "memory");
    }
    __syncthreads();
    tile[threadIdx.x] += 1;
    asm volatile("fence.proxy.async;");
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%2}],[%3];" ::"l"(&to), "r"(0), "r"(row),
                     "r"(SHARED(tile)) : "memory");
}

extern "C" __global__ void tensor_sum(const __grid_constant__ Maps all) {
    __shared__ alignas(128) float tile[1024];
    tile[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0,{%1,%2}],[%3];" ::"l"(&all.of[1]),
                     "r"(0), "r"(all.row), "r"(SHARED(tile)) : "memory");
}

extern "C" __global__ void tensor_any(const __grid_constant__ Maps all) {
    __shared__ alignas(128) float tile[1024];
    tile[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%2}],[%3];" ::"l"(&all.of[blockIdx.x]), "r"(0),
                     "r"(all.row), "r"(SHARED(tile)) : "memory");
}

extern "C" __global__ void tensor_pointer(const Map *map) {
    __shared__ alignas(128) float tile[1024];
    tile[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%2}],[%3];" ::"l"(map), "r"(0), "r"(0),
                     "r"(SHARED(tile)) : "memory");
}

extern "C" __global__ void bulk(const float *from, float *to, float *sum) {
    __shared__ alignas(128) float tile[1024];
    __shared__ unsigned long long barrier;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(SHARED(&barrier)));
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 4096;" ::"r"(SHARED(&barrier)));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],4096,[%2];" ::"r"(SHARED(tile)),
                     "l"(from + blockIdx.x * 1024), "r"(SHARED(&barrier)) : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],4096;" ::"l"(to + blockIdx.x * 1024), "r"(SHARED(tile))
                     : "memory");
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0],[%1],4096;" ::"l"(sum + blockIdx.x * 1024),
                     "r"(SHARED(tile)) : "memory");
    }
}
#endif
