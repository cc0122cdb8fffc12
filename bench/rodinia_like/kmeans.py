"""k-means: membership by the nearest centre, sums by atomics, centres from the sums; a kernel of each."""

from __future__ import annotations

from common import Program, floats, i32, ints, main, random_ints, read

SOURCE = r"""
__global__ void nearest(const float *points, const float *centres, int *member, int count, int clusters, int features)
{
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= count)
        return;
    float least = 3e38f;
    for (int c = 0; c < clusters; c++) {
        float distance = 0;
        for (int f = 0; f < features; f++) {
            float d = points[p * features + f] - centres[c * features + f];
            distance += d * d;
        }
        if (distance < least) {
            least = distance;
            member[p] = c;
        }
    }
}
__global__ void add_up(const float *points, const int *member, float *sums, int *sizes, int count, int features)
{
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= count)
        return;
    atomicAdd(&sizes[member[p]], 1);
    for (int f = 0; f < features; f++)
        atomicAdd(&sums[member[p] * features + f], points[p * features + f]);
}
__global__ void divide(float *centres, const float *sums, const int *sizes, int features)
{
    int c = blockIdx.x, f = threadIdx.x;
    if (sizes[c])
        centres[c * features + f] = sums[c * features + f] / sizes[c];
}
"""
NAMES = ["nearest", "add_up", "divide"]


def run(program: Program) -> str:
    count, clusters, features = 1024 * program.scale, 4, 2
    noise = random_ints(count * features, 100)
    # Four heaps, 1000 apart.
    values = [1000.0 * (p % clusters) + noise[p * features + f] for p in range(count) for f in range(features)]
    points, centres = floats(values), floats([1000.0 * c + 300 for c in range(clusters) for _ in range(features)])
    member, sizes, sums = ints([-1] * count), ints([0] * clusters), floats([0.0] * (clusters * features))
    grid = -(-count // 128)
    for _ in range(3):
        program.launch("nearest", grid, 128, points, centres, member, i32(count), i32(clusters), i32(features))
        sums.fill(0)
        sizes.fill(0)
        program.launch("add_up", grid, 128, points, member, sums, sizes, i32(count), i32(features))
        program.launch("divide", clusters, features, centres, sums, sizes, i32(features))
    return "" if read(member, "i") == [p % clusters for p in range(count)] else "a point's cluster"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
