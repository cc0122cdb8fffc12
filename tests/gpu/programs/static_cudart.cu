// A program as nvcc makes them by default: the CUDA runtime linked statically, which finds the driver by itself.
// Two host threads with a stream each, a __device__ counter, pinned memory, managed by the runtime's own calls.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u64 steps_done = 100;

__device__ u64 mix(u64 x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__global__ void step(u32 *words, u32 count, u32 salt)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        words[i] = (u32)mix((u64)words[i] << 32 | (i ^ salt));
    if (i == 0)
        atomicAdd(&steps_done, 1ull);
}

__global__ void sum_up(const u32 *words, u32 count, u64 *sum)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        atomicAdd(sum, mix((u64)i << 32 | words[i]));
}

static void check(cudaError_t status, const char *what)
{
    if (status != cudaSuccess) {
        fprintf(stderr, "%s failed: %s\n", what, cudaGetErrorString(status));
        exit(1);
    }
}

static void print(const char *path, const std::string &line)
{
    if (!path)
        puts(line.c_str()), fflush(stdout);
    else if (FILE *file = fopen(path, "a"))
        fprintf(file, "%s\n", line.c_str()), fclose(file);
}

int main(int argc, char **argv)
{
    const char *report = nullptr;
    u32 iterations = 20, count = 1 << 20;
    double seconds = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--report"))
            report = argv[i + 1];
        else if (!strcmp(argv[i], "--iterations"))
            iterations = (u32)atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--iteration-seconds"))
            seconds = atof(argv[i + 1]);
    }
    u32 *words[2];
    u64 *sums[2], *host;
    cudaStream_t streams[2];
    check(cudaMallocHost(&host, 2 * sizeof *host), "cudaMallocHost");
    for (int i = 0; i < 2; i++) {
        check(cudaMalloc(&words[i], count * sizeof(u32)), "cudaMalloc");
        check(cudaMemset(words[i], i + 1, count * sizeof(u32)), "cudaMemset");
        check(cudaMalloc(&sums[i], sizeof(u64)), "cudaMalloc");
        check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    u64 chain = 0;
    for (u32 iteration = 1; iteration <= iterations; iteration++) {
        std::vector<std::thread> threads;
        for (int i = 0; i < 2; i++)
            threads.emplace_back([&, i] {
                step<<<(count + 255) / 256, 256, 0, streams[i]>>>(words[i], count, iteration);
                check(cudaGetLastError(), "step");
                // Stream-ordered allocation, used and freed on the stream.
                u32 *scratch;
                check(cudaMallocAsync(&scratch, count * sizeof(u32), streams[i]), "cudaMallocAsync");
                check(cudaMemcpyAsync(scratch, words[i], count * sizeof(u32), cudaMemcpyDeviceToDevice, streams[i]), "copy");
                check(cudaMemsetAsync(sums[i], 0, sizeof(u64), streams[i]), "cudaMemsetAsync");
                sum_up<<<(count + 255) / 256, 256, 0, streams[i]>>>(scratch, count, sums[i]);
                check(cudaFreeAsync(scratch, streams[i]), "cudaFreeAsync");
                check(cudaMemcpyAsync(&host[i], sums[i], sizeof(u64), cudaMemcpyDeviceToHost, streams[i]), "copy");
                check(cudaStreamSynchronize(streams[i]), "cudaStreamSynchronize");
            });
        for (std::thread &thread : threads)
            thread.join();
        u64 done;
        check(cudaMemcpyFromSymbol(&done, steps_done, sizeof done), "cudaMemcpyFromSymbol");
        chain = chain * 0x100000001b3ull + host[0] + 3 * host[1] + done;
        char line[160];
        snprintf(line, sizeof line, "ITERATION %u digest %016llx steps %llu", iteration, host[0] ^ host[1], done);
        print(report, line);
        usleep((useconds_t)(seconds * 1e6));
    }
    char line[64];
    snprintf(line, sizeof line, "RESULT %016llx", chain);
    print(report, line);
    return 0;
}
