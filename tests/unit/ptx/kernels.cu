/* Kernels of test_ptx_cuda.py and of the fuzzer's corpus. kernels.ptx is what NVRTC 13.0 makes of this file for compute_90. */
struct Pair { float *data; int count; float scale; short table[3]; };
__device__ float weights[4] = {1, 2, 3, 4};
__device__ float *second_weight = weights + 1;
__constant__ int offsets[8] = {1, 1, 2, 3, 5, 8, 13, 21};
__device__ unsigned long long counter;
extern __shared__ float dynamic[];

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

extern "C" __global__ void vector_add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

extern "C" __global__ void through_struct(Pair s) {
    int i = threadIdx.x;
    if (i < s.count) s.data[i] = s.scale * second_weight[i & 1] + s.table[i % 3] + offsets[i & 7];
}

extern "C" __global__ void recursion(int *out) { out[threadIdx.x] = fibonacci(threadIdx.x & 15); }

extern "C" __global__ void matrix_product(const float *A, const float *B, float *C, int n) {
    __shared__ float a[16][16], b[16][16];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0;
    for (int t = 0; t < n; t += 16) {
        a[y][x] = A[row * n + t + x];
        b[y][x] = B[(t + y) * n + column];
        __syncthreads();
        for (int k = 0; k < 16; k++) sum += a[y][k] * b[k][x];
        __syncthreads();
    }
    C[row * n + column] = sum;
}

extern "C" __global__ void reduce(const float *a, float *out, int n) {
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += a[i];
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
    if ((threadIdx.x & 31) == 0) dynamic[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x / 32; i++) sum += dynamic[i];
        atomicAdd(out, sum);
        atomicAdd(&counter, 1ull);
    }
}

extern "C" __global__ void functions(const float *x, float *y, double *z) {
    int i = threadIdx.x;
    y[i] = sinf(x[i]) + expf(-x[i]) * logf(1 + x[i] * x[i]) + tanhf(x[i]) + powf(2.5f, x[i]);
    z[i] = sqrt((double)x[i] * x[i] + 1) / 3.0 + exp((double)x[i] / 10) + cbrt((double)x[i]);
}

extern "C" __global__ void many_ways(int *p) {
    int r = 0;
    switch (p[threadIdx.x]) {
    case 0: r = 3; break;
    case 1: r = 14; break;
    case 2: for (int k = 0; k < p[threadIdx.x + 1] + 5; k++) r += k * k; break;
    case 3: r = __popc(threadIdx.x); break;
    case 4: r = (int)(threadIdx.x * 1000003ull % 97); break;
    case 5: r = -(int)(threadIdx.x / 3); break;
    default: return;
    }
    p[threadIdx.x] = r + 10000;
}

extern "C" __global__ void adam(float *w, const float *g, float *m, float *v, int n, float rate, float b1, float b2, float e, int step) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = b1 * m[i] + (1 - b1) * g[i];
    v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
    w[i] -= rate * (m[i] / (1 - powf(b1, step))) / (sqrtf(v[i] / (1 - powf(b2, step))) + e);
}

extern "C" __global__ void chase(const long *next, long start, int steps, long *out) {
    long at = start + threadIdx.x;
    for (int i = 0; i < steps; i++) at = next[at];
    out[threadIdx.x] = at;
}
