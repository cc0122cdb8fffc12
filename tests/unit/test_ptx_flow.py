"""What PTX says of a kernel's arguments, against descriptors written by hand and against what kernels really do."""

# ruff: noqa: E402
from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "ptx"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(HERE))
from ptx_machine import compile_cuda

from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Source
from phos.gpu_engine.spec.ptx_flow import describe

R, W, RW, NONE = Access.READ, Access.WRITE, Access.READ | Access.WRITE, Access.NONE
HEAD = ".version 8.5\n.target sm_90\n.address_size 64\n"

Pointers = dict[int, Access]


def cuda(source: str, *options: str) -> dict[str, AccessDescriptor]:
    """Descriptors of CUDA C; the test is skipped where there is no NVRTC."""
    try:
        text = compile_cuda(source, *options)
    except ImportError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    except RuntimeError as error:
        if "libnvrtc" in str(error) or "Failed to" in str(error):
            pytest.skip(f"NVRTC is not installed: {error}")
        raise
    return describe(text)


def summary(descriptor: AccessDescriptor) -> tuple[Pointers, Access]:
    """(offset → access, indirect) of a descriptor all of whose fields are pointers, or tables: of these `~offset`."""
    assert all(field.kind in (FieldKind.POINTER, FieldKind.TABLE) for field in descriptor.fields), descriptor
    assert all(field.size == 8 for field in descriptor.fields), descriptor
    assert descriptor.source is Source.PTX
    places = {FieldKind.POINTER: lambda at: at, FieldKind.TABLE: lambda at: ~at}
    return {places[field.kind](field.offset): field.access for field in descriptor.fields}, descriptor.indirect


OPTIMISED, DEBUG = (), ("-G",)

CASES: dict[str, tuple[str, Pointers, Access]] = {
    "plain": ("k(const float *a, float *b, float *c, int n) { c[n] = a[n]; b[n] += 1; }", {0: R, 8: RW, 16: W}, NONE),
    "unused": ("k(float *a, float *b, int n) { b[n] = 1; }", {8: W}, NONE),
    "restrict": ("k(const float *__restrict__ a, float *__restrict__ b) { *b = *a; }", {0: R, 8: W}, NONE),
    "nothing": ("k(float *a, int n) {}", {}, NONE),
    "atomics": (
        "k(int *a, unsigned *b, unsigned long long *c, float *d)"
        " { atomicAdd(a, 1); if (atomicCAS(b, 1, 2) == 3) atomicExch(c, 4ull); atomicAdd(d, 1.0f); }",
        {0: RW, 8: RW, 16: RW, 24: RW},
        NONE,
    ),
    # The first of the two numbers might be a pointer for all that the code says. What names no memory costs nothing.
    "wide index": ("k(float *a, long long n, unsigned long long m) { a[n - m] = 1; }", {0: W, 8: W}, NONE),
    "loop": ("k(float *a, float *end) { for (; a != end; ++a) *a += 1; }", {0: RW}, NONE),
    "two tables": (
        "k(float **a, float **b, int n) { (n > 3 ? a[n] : b[n])[1] = 1; }",
        {0: R, 8: R, ~0: W, ~8: W},
        NONE,
    ),
    "own table": ("k(float **a, float *b, int n) { a[n] = b; __syncthreads(); a[n + 1][3] = 1; }", {0: RW}, W),
    "tagged": (
        "k(float **a, int n) { ((float *)((unsigned long long)a[n] & ~7ull))[3] = 1; }",
        {0: R, ~0: W},
        NONE,
    ),
    "keyed": (
        "k(unsigned long long *a, unsigned n) { *(float *)(a[n] ^ 0x7f0000000000ull) = 1; }",
        {
            0: R,
        },
        W,
    ),
    "linked": ("k(unsigned long long *a, unsigned n) { *(float *)(a[n] ^ a[n + 1]) = 1; }", {0: R}, W),
    "table of tables": ("k(float ***a, int n) { a[n][n][3] = 1; }", {0: R, ~0: R}, W),
    "chase": ("k(float **a, int n) { a[n][3] = 1; }", {0: R, ~0: W}, NONE),
    "list": (
        "k(Node *n, int *sum) { int s = 0; while (n) { s += n->v; n = n->next; } *sum = s; }",
        {0: R, 8: W},
        R,
    ),
    "device pointer": ("k(int n) { where[n] = 1; }", {}, W),
    "cooperative": (
        "k(float *a) { unsigned hi, lo; *a = 1; __syncthreads();"
        ' asm volatile("mov.u32 %0, %%envreg1;" : "=r"(hi)); asm volatile("mov.u32 %0, %%envreg2;" : "=r"(lo));'
        " atomicAdd((unsigned *)(((unsigned long long)hi << 32) | lo) + 1, 1u); }",
        {0: W},
        NONE,
    ),
    "device variable": ("k(int n) { values[n & 7] = n; atomicAdd(&counter, 1); }", {}, NONE),
    "constant memory": ("k(int *a, int n) { a[n] = fixed[n & 3]; }", {0: W}, NONE),
    "loaded index": (
        "k(const int *i, const long long *l, float *a) { a[i[0]] = 1; a[l[0]] = 2; }",
        {0: R, 8: R, 16: W},
        NONE,
    ),
    "select": ("k(float *a, float *b, int n) { (n > 3 ? a : b)[n] = 1; }", {0: W, 8: W}, NONE),
    "struct": ("k(Two t, int i) { t.to[i] = t.from[i] * t.scale; }", {0: R, 16: W}, NONE),
    "shared tile": (
        "k(const float *a, float *b, int n) { __shared__ float t[64]; t[threadIdx.x] = a[threadIdx.x];"
        " __syncthreads(); b[n] = t[63 - threadIdx.x]; }",
        {0: R, 8: W},
        NONE,
    ),
    "dynamic shared": (
        "k(const double *a, double *b) { extern __shared__ double s[]; s[threadIdx.x] = a[threadIdx.x];"
        " __syncthreads(); b[threadIdx.x] = s[0]; }",
        {0: R, 8: W},
        NONE,
    ),
    "called": ("k(const float *a, float *b, int n) { store(b + n, load(a, n)); }", {0: R, 8: W}, NONE),
    "called twice": ("k(const float *a, float *b, int n) { *advance(b, n) = *advance(a, n); }", {0: R, 8: W}, NONE),
    "recursion": ("k(int *a, int n) { a[n] = fib(n); }", {0: W}, NONE),
    "recursive pointer": ("k(float *a, int n) { deep(a, n); }", {0: W}, NONE),
    "result by address": ("k(float *a, float *b, int n) { float *p; pick(&p, a, n); *p = *b; }", {0: W, 8: R}, NONE),
    "struct by reference": ("k(Two t, int n) { through(t, n); }", {0: R, 16: W}, NONE),
    "function pointer": ("k(float *a, int n) { a[n] = table[n & 1](a, n); }", {0: RW}, NONE),
    "function pointer argument": ("k(float *a, F f) { f(a, 1); }", {0: R}, NONE),
    "virtual": (
        "k(float *a, int n) { A x(a); B y(a); Base *b = n ? (Base *)&x : (Base *)&y; b->f(n); }",
        {0: RW},
        NONE,
    ),
    "printf": ('k(float *a, int *b) { printf("%p %d", a, *b); }', {8: R}, NONE),
    "assert": ("k(int *a) { assert(*a > 3); }", {0: R}, NONE),
    "heap": ("k(int *a) { int *p = (int *)malloc(8); if (p) { p[0] = 1; a[0] = p[0]; free(p); } }", {0: W}, NONE),
    "inline assembly": (
        'k(unsigned *a, unsigned n) { asm volatile("{ .reg .pred p; .reg .b64 t; setp.ne.b32 p, %1, 0;'
        ' add.u64 t, %0, 8; @p st.global.u32 [t], %1; }" :: "l"(a), "r"(n) : "memory"); }',
        {0: W},
        NONE,
    ),
    "asynchronous copy": (
        "k(const float4 *a, float4 *b) { __shared__ float4 s[32]; unsigned d = (unsigned)__cvta_generic_to_shared(s);"
        ' asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(d), "l"(a + threadIdx.x));'
        ' asm volatile("cp.async.wait_all;"); b[threadIdx.x] = s[threadIdx.x]; }',
        {0: R, 8: W},
        NONE,
    ),
    "read-only loads": ("k(const float *a, float *b) { *b = __ldg(a) + __ldcg(a + 1); }", {0: R, 8: W}, NONE),
    "switch": (
        "k(int *a, int *b, int n) { switch (n) { case 0: a[0] = 1; break; case 1: a[9] = 2; break; case 2: a[4] = 6;"
        " break; case 3: b[1] = 8; break; case 4: a[2] = 8; break; case 5: a[7] = 8; break; case 6: a[1] = 3; } }",
        {0: W, 8: W},
        NONE,
    ),
    "aligned": ("k(char *a) { *(int *)(((unsigned long long)a + 15) & ~15ull) = 1; }", {0: W}, NONE),
    "distance": ("k(float *a, float *b, int n) { a[b - a + n] = 1; }", {0: W, 8: W}, NONE),
    "short distance": ("k(float *a, float *b, int n) { int d = b - a; a[d + n] = 1; }", {0: W, 8: W}, NONE),
    "distance on the stack": (
        "k(char *a, int n) { char s[64]; for (int i = 0; i < 64; i++) s[i] = clock(); s[n] = 0; char *e = s;"
        " while (*e) e++; a[e - s] = 1; }",
        {0: W},
        NONE,
    ),
    "texture": ("k(cudaTextureObject_t t, float *a, int n) { a[n] = tex1Dfetch<float>(t, n); }", {8: W}, R),
    "halves": (
        "k(uint2 p, int n) { int *a = (int *)((unsigned long long)p.y << 32 | p.x); a[n] = 1; }",
        {0: W},
        NONE,
    ),
    "halves and a wide index": (
        "k(uint2 p, long long n) { char *a = (char *)((unsigned long long)p.y << 32 | p.x); a[n] = 1; }",
        {0: W},
        NONE,
    ),
    "halves added up": (
        "k(uint2 p, long long n) { char *a = (char *)(p.y * 0x100000000ull + p.x); a[n] = 1; }",
        {0: W, 8: W},
        NONE,
    ),
    "halves in shared memory": (
        "k(char *a, long long n) { __shared__ unsigned s[9]; s[1] = (size_t)a; s[2] = (size_t)a >> 32;"
        " __syncthreads(); ((char *)((size_t)s[n + 1] << 32 | s[n]))[n] = 1; }",
        {0: W, 8: W},
        NONE,
    ),
    "bytes in shared memory": (
        "k(char *a, long long n) { __shared__ char s[16]; memcpy(s + 3, &a, 8); __syncthreads();"
        " memcpy(&a, s + 3, 8); a[n] = 1; }",
        {0: W, 8: W},
        NONE,
    ),
    "copied byte by byte": (
        "k(char *a, int n, long long m) { __shared__ char s[64]; for (int i = 0; i < n; i++) s[i] = ((char *)&a)[i];"
        " char *b; for (int i = 0; i < n; i++) ((char *)&b)[i] = s[i]; b[m] = 1; }",
        {0: W, 16: W},
        NONE,
    ),
    "reduced halves": (
        "k(char *a, long long n) { unsigned l = __reduce_or_sync(~0u, (size_t)a);"
        " unsigned h = __reduce_or_sync(~0u, (size_t)a >> 32); ((char *)((size_t)h << 32 | l))[n] = 1; }",
        {0: W, 8: W},
        NONE,
    ),
    "tag cut off": ("k(long long p, long long n) { ((char *)(p << 16 >> 16))[n] = 1; }", {0: W}, NONE),
    "aligned by division": ("k(char *a, long long n) { ((char *)((size_t)a / 64 * 64))[n] = 1; }", {0: W, 8: W}, NONE),
    "packed": ("k(Packed s, long long n) { s.to[n] = 1; }", {1: W}, NONE),
    "packed in memory": ("k(Packed *s, long long n) { s[1].to[n] = 1; }", {0: R}, W),
    "packed array": (
        "k(Several s, int i, long long n) { s.all[i].to[n] = 1; }",
        {**dict.fromkeys(range(1, 45, 9), W), 56: W},
        W,
    ),
}

PRELUDE = r"""
#pragma pack(push, 1)
struct Packed { char c; char *to; };
struct Several { Packed all[5]; };
#pragma pack(pop)
struct Node { Node *next; int v; };
struct Two { const float *from; float scale; float *to; };
typedef float (*F)(const float *, int);
__device__ float *where; __device__ int values[8]; __device__ int counter; __constant__ int fixed[4];
__device__ __noinline__ float load(const float *a, int n) { return a[n]; }
__device__ __noinline__ float other(const float *a, int n) { return a[n] + 1; }
__device__ __noinline__ void store(float *a, float v) { *a = v; }
template <class T> __device__ __noinline__ T *advance(T *a, int n) { return a + n; }
__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
__device__ __noinline__ void deep(float *a, int n) { if (n > 0) { a[n] = 1; deep(a + n, n - 1); a[0] = 2; } }
__device__ __noinline__ void pick(float **out, float *a, int n) { *out = a + n; }
__device__ __noinline__ void through(const Two &t, int n) { t.to[n] = t.from[n]; }
__device__ F table[2] = {load, other};
struct Base { float *p; __device__ Base(float *p) : p(p) {} __device__ virtual void f(int n) = 0; };
struct A : Base { __device__ A(float *p) : Base(p) {} __device__ void f(int n) override { p[n] = 1; } };
struct B : Base { __device__ B(float *p) : Base(p) {} __device__ void f(int n) override { p[n] += 1; } };
"""


@pytest.mark.parametrize("name", CASES)
def test_descriptors_are_what_a_reader_of_the_source_expects(name: str) -> None:
    code, pointers, indirect = CASES[name]
    assert summary(cuda(PRELUDE + 'extern "C" __global__ void ' + code)["k"]) == (pointers, indirect)


@pytest.mark.parametrize("name", CASES)
def test_unoptimised_code_is_covered(name: str) -> None:
    """Everything is on the stack there: more may be claimed, nothing less."""
    code, pointers, indirect = CASES[name]
    found = cuda(PRELUDE + 'extern "C" __global__ void ' + code, "-G")["k"]
    tables = {~field.offset: field.access for field in found.fields if field.kind is FieldKind.TABLE}
    for offset, access in pointers.items():
        said = covered(found, offset) if offset >= 0 else tables.get(offset, NONE) | found.indirect
        assert access & ~said == NONE, (offset, found)
    assert indirect & ~found.indirect == NONE


def covered(descriptor: AccessDescriptor, offset: int) -> Access:
    """What a descriptor says of the eight bytes at ``offset``."""
    result = NONE
    for field in descriptor.fields:
        if field.offset <= offset and offset + 8 <= field.offset + field.size:
            result |= field.access
    return result


@pytest.mark.parametrize("options", [(), ("-G",)], ids=str)
def test_an_array_of_pointers_with_a_computed_index(options: tuple[str, ...]) -> None:
    source = """struct S { const float *a; int n; float *b[4]; };
    extern "C" __global__ void k(S s, int j) { s.b[j][threadIdx.x] = s.a[j]; }
    extern "C" __global__ void g(const __grid_constant__ S s, int j) { s.b[j][threadIdx.x] = s.a[j]; }"""
    for descriptor in cuda(source, *options).values():
        assert covered(descriptor, 0) & R
        for offset in range(16, 48, 8):
            assert covered(descriptor, offset) & W
        assert descriptor.indirect == NONE
        assert [(p.offset, p.size) for p in descriptor.parameters] == [(0, 48), (48, 4)]


TENSORS = """
struct alignas(64) Map { unsigned long long opaque[16]; };
struct Maps { int n; Map map[2]; };
#define SMEM(x) ((unsigned)__cvta_generic_to_shared(x))
__device__ void fetch(void *s, const void *m, void *bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2}], [%3];"
    :: "r"(SMEM(s)), "l"(m), "r"(0), "r"(SMEM(bar)) : "memory"); }
__device__ void put(const void *m, void *s, int kind) {
  if (kind) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %2}], [%1];"
    :: "l"(m), "r"(SMEM(s)), "r"(0) : "memory");
  else asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %2}], [%1];"
    :: "l"(m), "r"(SMEM(s)), "r"(0) : "memory"); }
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const __grid_constant__ Map in, const __grid_constant__ Map out,
    const __grid_constant__ Map sum, const __grid_constant__ Map unused, float *p) {
  __shared__ alignas(128) float s[64]; __shared__ unsigned long long bar;
  asm volatile("prefetch.tensormap [%0];" :: "l"(&in));
  asm volatile("prefetch.tensormap [%0];" :: "l"(&unused));
  fetch(s, &in, &bar); put(&out, s, 1); put(&sum, s, 0); p[0] = s[threadIdx.x]; }
extern "C" __global__ void array(const __grid_constant__ Maps m, int i) {
  __shared__ alignas(128) float s[64]; put(&m.map[i], s, 1); }
extern "C" __global__ void in_memory(const Map *m) { __shared__ alignas(128) float s[64]; put(m, s, 1); }
extern "C" __global__ void bulk(float *to, const float *from, float *sum) {
  __shared__ alignas(128) float s[64]; __shared__ unsigned long long bar;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
    :: "r"(SMEM(s)), "l"(from), "r"(SMEM(&bar)) : "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" :: "l"(to), "r"(SMEM(s)) : "memory");
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 256;"
    :: "l"(sum), "r"(SMEM(s)) : "memory"); }
extern "C" __global__ void far(float *a) { __shared__ int s[32]; unsigned x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(x) : "r"(SMEM(s)));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%0];" :: "r"(x), "r"(1));
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(x), "r"(2)); a[0] = s[0]; }
"""


def test_tensor_maps_and_bulk_copies() -> None:
    found = cuda(TENSORS)
    maps = [(field.offset, field.size, field.access, field.kind) for field in found["k"].fields]
    tensor = FieldKind.TENSOR_MAP
    assert maps == [(0, 128, R, tensor), (128, 128, W, tensor), (256, 128, RW, tensor), (512, 8, W, FieldKind.POINTER)]
    assert found["k"].indirect == NONE
    array = {field.offset: field.access for field in found["array"].fields if field.kind is tensor}
    assert array[64] == array[192] == W
    assert summary(found["in_memory"]) == ({0: R}, W)
    assert summary(found["bulk"]) == ({0: W, 8: R, 16: RW}, NONE)
    assert summary(found["far"]) == ({0: W}, NONE)


MADE_MAPS = (
    TENSORS
    + """
__device__ void replace(void *s, const void *p) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" :: "r"(SMEM(s)), "l"(p)); }
__device__ void copy(void *to, void *s) {
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
    :: "l"(to), "r"(SMEM(s)) : "memory"); }
extern "C" __global__ void made(const float *a, float *b, Map *scratch, Map *other) {
  __shared__ alignas(128) Map map; __shared__ alignas(128) float s[64]; __shared__ unsigned long long bar;
  replace(&map, a); copy(scratch, &map); replace(&map, b); copy(scratch + 1, &map);
  fetch(s, scratch, &bar); put(scratch + 1, s, 1); }
extern "C" __global__ void another(const float *a, Map *scratch, Map *other) {
  __shared__ alignas(128) Map map; __shared__ alignas(128) float s[64];
  replace(&map, a); copy(scratch, &map); put(other, s, 1); }
extern "C" __global__ void no_address(Map *scratch) {
  __shared__ alignas(128) Map map; __shared__ alignas(128) float s[64]; copy(scratch, &map); put(scratch, s, 1); }
extern "C" __global__ void in_place(float *a, Map *map) { __shared__ alignas(128) float s[64];
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" :: "l"(map), "l"(a) : "memory");
  put(map, s, 1); }
extern "C" __global__ void from_memory(float **a, Map *scratch) { __shared__ alignas(128) Map map;
  __shared__ alignas(128) float s[64]; replace(&map, a[1]); copy(scratch, &map); put(scratch, s, 1); }
"""
)


def test_tensor_maps_that_a_kernel_makes_in_memory() -> None:
    """Of which it is not told apart what is done through each."""
    found = cuda(MADE_MAPS)
    assert summary(found["made"]) == ({0: RW, 8: RW, 16: RW}, NONE)
    assert summary(found["another"])[1] == W
    assert summary(found["no_address"])[1] == W
    assert summary(found["in_place"]) == ({0: RW, 8: RW}, NONE)
    assert summary(found["from_memory"]) == ({0: R, ~0: RW, 8: RW}, NONE)


# A number of 64 bits is added besides, which passes for the address where nothing better is there.
HALVES = (
    "ld.param.u32 %r1, [v]; ld.param.u32 %r2, [v+4]; cvt.u64.u32 %a, %r1; cvt.u64.u32 %b, %r2; ld.param.u64 %c, [q];"
    " SUM add.u64 %d, %d, %c; st.global.u32 [%d], 1;"
)
SUMS = {
    "shifted and added": "shl.b64 %b, %b, 32; add.s64 %d, %b, %a;",
    "shifted and added in the other order": "shl.b64 %b, %b, 32; add.s64 %d, %a, %b;",
    "multiplied and added": "mad.lo.u64 %d, %b, 0x100000000, %a;",
    "multiplied, then added": "mul.lo.u64 %d, %b, 4294967296; add.u64 %d, %d, %c; add.u64 %d, %d, %a;",
    "multiplied by a number in a register": "mov.b64 %d, 0x100000000; mad.lo.u64 %d, %d, %b, %a;",
    "shifted by a number in a register": "mov.b32 %r3, 32; shl.b64 %b, %b, %r3; add.u64 %d, %a, %b;",
    "a product added": "shl.b64 %b, %b, 32; mad.wide.u32 %d, %r1, 1, %b;",
    "shifted and either": "shl.b64 %b, %b, 32; xor.b64 %d, %b, %a;",
}

# Where an address may go and come from besides, in halves.
APART = "ld.param.u64 %a, [p]; mov.b64 {%r1, %r2}, %a;"
TOGETHER = "mov.b64 %b, {%r3, %r4}; ld.param.u64 %c, [q]; add.u64 %d, %b, %c; st.global.u32 [%d], 1;"
WAYS: dict[str, tuple[str, Pointers, Access]] = {
    "matrices in shared memory": (
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r0], {%r1, %r2};"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r0];",
        {0: W, 8: W},
        NONE,
    ),
    "shared memory and a matrix": (
        "st.shared.u64 [%r0], %a; ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r0];",
        {0: W, 8: W},
        NONE,
    ),
    "a copy to shared memory and a matrix": (
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%a], 16, [%r5];"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r0];",
        {0: R, 8: W},
        W,
    ),
    "transposed matrices": (
        "movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r1; movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r2;",
        {0: W, 8: W},
        NONE,
    ),
    "tensor memory": (
        "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r0], {%r1, %r2};"
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r0];",
        {0: W, 8: W},
        NONE,
    ),
    "a matrix in memory": (
        "wmma.load.c.sync.aligned.row.m16n16k16.global.s32 {%r3, %r4}, [%a], %r5;",
        {0: R, ~0: W, 8: W},
        NONE,
    ),
    "multicast memory": (
        "multimem.ld_reduce.global.or.b32 %r3, [%a]; multimem.ld_reduce.global.or.b32 %r4, [%a+4];",
        {0: R, ~0: W, 8: W},
        NONE,
    ),
}

SWAPPED = "ld.param.u32 %a, [v]; ld.param.u32 %b, [v+4];"
STORED = "cvta.to.global.u64 %d, %d; st.global.u32 [%d], 1;"

# The distance from %b to %a leads from the one to the other when it is subtracted, however it was computed meanwhile.
# Only the first is a pointer elsewhere.
CONVERTED = "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; cvta.to.global.u64 %a, %a; cvta.to.global.u64 %b, %b;"
DISTANCE = "IN ld.param.u64 %b, [q]; ld.global.u32 %r1, [%a];"
DISTANCES = {
    "a distance subtracted": "sub.s64 %c, %a, %b; sub.s64 %d, %a, %c; st.global.u32 [%d], %r1;",
    "a distance negated": "sub.s64 %c, %a, %b; neg.s64 %c, %c; add.s64 %d, %a, %c; st.global.u32 [%d], %r1;",
    "a distance complemented": "sub.s64 %c, %a, %b; not.b64 %c, %c; add.s64 %d, %a, %c; st.global.u32 [%d+1], %r1;",
    "a distance times -1": "sub.s64 %c, %a, %b; mad.lo.s64 %d, %c, -1, %a; st.global.u32 [%d], %r1;",
    "a distance times a number": (
        "sub.s64 %c, %a, %b; cvt.s64.s32 %d, %r2; mul.lo.s64 %c, %c, %d; add.s64 %d, %a, %c; st.global.u32 [%d], %r1;"
    ),
    "a distance in elements": (
        "sub.s64 %c, %a, %b; shr.s64 %c, %c, 2; shl.b64 %c, %c, 2; sub.s64 %d, %a, %c; st.global.u32 [%d], %r1;"
    ),
    "a distance in shared memory": (
        "sub.s64 %c, %a, %b; st.shared.u64 [tile], %c; ld.shared.u64 %d, [tile]; sub.s64 %d, %a, %d;"
        "st.global.u32 [%d], %r1;"
    ),
    "one of two distances": (
        "sub.s64 %c, %a, %b; selp.b64 %c, %c, 64, %p1; sub.s64 %d, %a, %c; st.global.u32 [%d], %r1;"
    ),
    "a distance in 32 bits": (
        "cvt.u32.u64 %r2, %a; cvt.u32.u64 %r3, %b; sub.s32 %r4, %r2, %r3; cvt.s64.s32 %c, %r4; sub.s64 %d, %a, %c;"
        "st.global.u32 [%d], %r1;"
    ),
    "a pointer times -1": "mad.lo.s64 %c, %b, -1, %a; sub.s64 %d, %a, %c; st.global.u32 [%d], %r1;",
    "a negated pointer": "neg.s64 %c, %b; add.s64 %c, %a, %c; sub.s64 %d, %a, %c; st.global.u32 [%d], %r1;",
}

PTX_CASES: dict[str, tuple[str, Pointers, Access]] = {
    **{f"through {name}": (APART + way + TOGETHER, *found) for name, (way, *found) in WAYS.items()},
    **{f"halves {name}": (HALVES.replace("SUM", code), {8: W, 32: W}, NONE) for name, code in SUMS.items()},
    # An index is no address: neither shifted by less, nor what comes down again, nor beside an address in halves.
    "an index shifted and added": (HALVES.replace("SUM", "shl.b64 %b, %b, 8; add.u64 %d, %b, %a;"), {8: W}, NONE),
    "an index extended by shifts": (
        HALVES.replace("SUM", ".reg .b64 %e, %f; shl.b64 %e, %b, 32; shr.s64 %f, %e, 32; add.s64 %d, %f, %a;"),
        {8: W},
        NONE,
    ),
    "halves and the index behind them": (
        HALVES.replace(
            "SUM",
            "shl.b64 %b, %b, 32; add.u64 %d, %b, %a; ld.param.u32 %r4, [v+8];"
            "mad.wide.u32 %d, %r4, 4, %d; .reg .b64 %e; cvt.u64.u32 %e, %r4; add.u64 %d, %d, %e;",
        ),
        {8: W, 32: W},
        NONE,
    ),
    # What arguments hold in another form than an address is found by no search of them.
    "halves, the upper one first, shifted": (SWAPPED + "shl.b64 %a, %a, 32; or.b64 %d, %a, %b;" + STORED, {}, W),
    "halves, the upper one first, added": (SWAPPED + "shl.b64 %a, %a, 32; add.s64 %d, %b, %a;" + STORED, {}, W),
    "halves, the upper one first, inserted": (SWAPPED + "bfi.b64 %d, %a, %b, 32, 32;" + STORED, {}, W),
    "halves, the upper one first, multiplied": (SWAPPED + "mad.lo.u64 %d, %a, 0x100000000, %b;" + STORED, {}, W),
    "halves, the upper one first, packed": (
        "ld.param.v2.u32 {%r1, %r2}, [v]; mov.b64 %d, {%r2, %r1};" + STORED,
        {},
        W,
    ),
    "halves apart": (
        "ld.param.u32 %r1, [v]; ld.param.u32 %r2, [v+8]; mov.b64 %d, {%r1, %r2};" + STORED,
        {},
        W,
    ),
    "halves inserted": (
        "ld.param.u32 %a, [v]; ld.param.u32 %b, [v+4]; bfi.b64 %d, %b, %a, 32, 32;" + STORED,
        {32: W},
        NONE,
    ),
    "bytes in the other order": (
        "ld.param.v2.u32 {%r1, %r2}, [v]; prmt.b32 %r3, %r1, 0, 0x123; prmt.b32 %r4, %r2, 0, 0x123;"
        "mov.b64 %d, {%r3, %r4};" + STORED,
        {32: W},
        W,
    ),
    "an address and a key": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; xor.b64 %d, %a, %b;" + STORED,
        {0: W, 8: W},
        W,
    ),
    "an address from the bits in which it differs from another": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; xor.b64 %c, %a, %b; xor.b64 %d, %a, %c;" + STORED,
        {0: W, 8: W},
        W,
    ),
    # A compiler that neither converts addresses nor declares pointers (Triton).
    "no conversions": (
        "ld.param.u64 %a, [p]; ld.param.u32 %r1, [n]; mul.wide.s32 %b, %r1, 4; add.s64 %c, %a, %b;"
        "@%p1 ld.global.b32 {%r2}, [%c+0]; ld.param.u64 %d, [q]; @%p1 st.global.b32 [%d+8], {%r2};",
        {0: R, 8: W},
        NONE,
    ),
    "halves with carry": (
        "ld.param.v2.u32 {%r1, %r2}, [p]; add.cc.u32 %r1, %r1, 8; addc.u32 %r2, %r2, 0; mov.b64 %a, {%r1, %r2};"
        "st.global.u32 [%a], %r1;",
        {0: W},
        NONE,
    ),
    "taken apart and shuffled": (
        "ld.param.u64 %a, [q]; mov.b64 {%r1, %r2}, %a; shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;"
        "shfl.sync.idx.b32 %r4, %r2, 0, 31, -1; mov.b64 %b, {%r3, %r4}; st.u32 [%b], %r1;",
        {8: W},
        NONE,
    ),
    "kept in shared memory": (
        "ld.param.u64 %a, [p]; st.shared.u64 [tile], %a; ld.shared.u64 %b, [tile+8]; st.global.u32 [%b], 1;",
        {0: W},
        NONE,
    ),
    "inner names": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; { .reg .b64 t; mov.b64 t, %a; ld.u32 %r1, [t]; }"
        "{ .reg .b64 t; mov.b64 t, %b; st.u32 [t], %r1; }",
        {0: R, 8: W},
        NONE,
    ),
    "distance of two pointers": (
        "ld.param.u64 %a, [p]; cvta.to.global.u64 %a, %a; ld.param.u64 %b, [q]; cvta.to.global.u64 %b, %b;"
        "sub.s64 %c, %b, %a; add.s64 %d, %a, %c; st.global.u32 [%d], 1;",
        {0: W, 8: W},
        NONE,
    ),
    **{
        f"{name}, {kind}": (DISTANCE.replace("IN", way) + code, {0: RW, 8: W}, NONE)
        for kind, way in {"by name": "ld.param.u64 %a, [p];", "by cvta": CONVERTED}.items()
        for name, code in DISTANCES.items()
    },
    "a distance from a pointer that nothing is done with": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; sub.s64 %c, %b, %a; ld.param.u64 %d, [v];"
        "cvta.to.global.u64 %d, %d; add.s64 %d, %d, %c; st.global.u32 [%d], %r1;",
        {8: W, 32: W},
        NONE,
    ),
    # What is counted up to, or by, is no pointer that is written through.
    "the length of an array as an index": (
        CONVERTED + "ld.param.u64 %c, [v]; cvta.to.global.u64 %c, %c; sub.s64 %d, %b, %a; ld.global.u32 %r1, [%a];"
        "shr.s64 %d, %d, 2; add.s64 %c, %c, %d; st.global.u32 [%c], 1;",
        {0: R, 8: W, 32: W},
        NONE,
    ),
    "the length of an array as a bound": (
        CONVERTED + "sub.s64 %d, %b, %a; shr.s64 %d, %d, 2; setp.lt.s64 %p1, %d, 3; @%p1 st.global.u32 [%a+8], 1;",
        {0: W},
        NONE,
    ),
    "a number subtracted": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; sub.s64 %c, %a, %b; st.u32 [%c], 1;",
        {0: W},
        NONE,
    ),
    "unknown function": ("ld.param.u64 %a, [p]; call stranger, (%a);", {0: RW}, RW),
    "handed to an unknown function in memory": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; st.global.u64 [%b], %a; call stranger, ();",
        {0: RW, 8: W},
        RW,
    ),
    "an address from nowhere": ("cvt.u64.u32 %a, %clock; st.u32 [%a], 1;", {}, W),
    "an instruction not known here": ("ld.param.u64 %a, [p]; frobnicate.global.u32 %r1, [%a];", {0: RW}, RW),
    "prefetch, discard": (
        "ld.param.u64 %a, [p]; prefetch.global.L2 [%a]; ld.param.u64 %b, [q]; discard.global.L2 [%b], 128;",
        {0: R, 8: W},
        NONE,
    ),
    "multicast": (
        "ld.param.u64 %a, [p]; multimem.ld_reduce.global.add.u32 %r1, [%a]; ld.param.u64 %b, [q];"
        "multimem.st.global.u32 [%b], %r1;",
        {0: R, 8: W},
        NONE,
    ),
    "a mark put into an address": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; mov.b64 %c, 5; bfi.b64 %d, %c, %a, 0, 4; add.s64 %d, %d, %b;"
        "st.global.u32 [%d], 1;",
        {0: W, 8: W},
        NONE,
    ),
    "asynchronous stores": (
        "ld.param.u64 %a, [p]; st.async.mmio.release.sys.global.u32 [%a], 1; ld.param.u64 %b, [q];"
        "red.async.mmio.release.sys.global.add.u32 [%b], 1;"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], 2, [%r2];",
        {0: W, 8: RW},
        NONE,
    ),
    "matrix tiles": (
        "ld.param.u64 %a, [p]; wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2}, [%a], %r3;"
        "ld.param.u64 %b, [q]; wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%b], {%r1, %r2}, %r3;",
        {0: R, 8: W},
        NONE,
    ),
    "asynchronous stores to generic addresses": (
        "ld.param.u64 %a, [p]; st.async.release.gpu.u32 [%a], 1; ld.param.u64 %b, [q];"
        "red.async.release.sys.add.u32 [%b], 1; st.async.u32 [%r1], 2, [%r2];",
        {0: W, 8: RW},
        NONE,
    ),
    "surface": ("ld.param.u64 %a, [p]; sust.b.1d.b32.trap [%a, {%r1}], {%r2};", {}, W),
    "registers that are vectors": (
        ".reg .v2 .u64 %v, %w; .local .align 16 .b8 copy[16]; ld.param.v2.u64 %v, [v]; st.local.v2.u64 [copy], %v;"
        "mov.u64 %a, %v.y; st.global.u32 [%a], 1; ld.local.u64 %b, [copy+8]; ld.global.u32 %r1, [%b];",
        {32: RW, 40: RW},
        NONE,
    ),
    "a block with fewer registers of the same name": (
        ".reg .u64 %e<9>; ld.param.u64 %e5, [p];"
        "{ .reg .u64 %e<2>; ld.param.u64 %e1, [q]; add.u64 %e0, %e5, %e1; st.global.u32 [%e0], 1; }",
        {0: W, 8: W},
        NONE,
    ),
    "selected as numbers": (
        ".reg .f64 %x, %y; ld.param.f64 %x, [p]; ld.param.f64 %y, [q]; selp.f64 %x, %x, %y, %p1;"
        "mov.b64 %a, %x; st.global.u32 [%a], 1;",
        {0: W, 8: W},
        NONE,
    ),
    "an address from a surface": (
        "ld.param.u64 %a, [p]; suld.b.1d.b64.trap %b, [%a, {%r1}]; ld.param.u64 %c, [q]; add.u64 %b, %b, %c;"
        "st.global.u32 [%b], 1;",
        {8: W},
        RW,
    ),
    "an address made of half a word": (
        "ld.param.u32 %r1, [n]; mul.wide.u32 %a, %r1, 256; cvta.to.global.u64 %b, %a; ld.param.u64 %c, [q];"
        "add.s64 %d, %b, %c; st.global.u32 [%d], 1;",
        {},
        W,
    ),
    "an address with a tag below": (
        "ld.param.u64 %a, [p]; shr.u64 %b, %a, 8; cvta.to.global.u64 %c, %b; st.global.u32 [%c+8], 1;",
        {0: W},
        W,
    ),
    "a tag cut off by a field of bits": (
        "ld.param.u64 %a, [p]; bfe.u64 %b, %a, 0, 48; ld.param.u64 %c, [q]; add.s64 %d, %b, %c;st.global.u32 [%d], 1;",
        {0: W, 8: W},
        NONE,
    ),
    "a copy of a kind not known here": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; cp.async.frobnicate.L2 [%a], [%b], 16;"
        "cp.async.mbarrier.arrive.b64 [%c];",
        {0: RW, 8: RW},
        RW,
    ),
    "a mask in both halves": (
        "ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; ld.param.u32 %r5, [n]; mov.b64 {%r1, %r2}, %a;"
        "mov.b64 {%r3, %r4}, %b; prmt.b32 %r6, %r1, %r3, %r5; prmt.b32 %r7, %r2, %r4, %r5; mov.b64 %c, {%r6, %r7};"
        "st.global.u32 [%c], 1;",
        {0: W, 8: W},
        NONE,
    ),
    # The assembler takes it, and reads what lies there.
    "a parameter read by another's name": ("ld.param.u64 %a, [p+8]; st.global.u32 [%a], 1;", {8: W}, NONE),
    "a parameter read by the next one's name": ("ld.param.u64 %a, [q+-8]; st.global.u32 [%a], 1;", {0: W}, NONE),
    "a parameter read through another's address": (
        "mov.b64 %c, p; ld.param.u64 %a, [%c+8]; st.global.u32 [%a], 1;",
        {8: W},
        NONE,
    ),
    "two parameters read as one vector": (
        "ld.param.v2.u64 {%a, %b}, [p]; ld.global.u32 %r1, [%a]; st.global.u32 [%b], %r1;",
        {0: R, 8: W},
        NONE,
    ),
    "an address from beyond the parameters": ("ld.param.u64 %a, [v+16]; st.global.u32 [%a], 1;", {}, W),
    "vector of addresses": (
        "ld.param.v2.u64 {%a, %b}, [v]; ld.global.u32 %r1, [%a]; st.global.u32 [%b], %r1;",
        {32: R, 40: W},
        NONE,
    ),
}


@pytest.mark.parametrize("name", PTX_CASES)
def test_hand_written_ptx(name: str) -> None:
    body, pointers, indirect = PTX_CASES[name]
    text = (
        f"{HEAD}.extern .func stranger(.param .b64 x);\n.shared .b64 tile[4];\n"
        ".entry k(.param .u64 p, .param .u64 q, .param .u32 n, .param .align 16 .b8 v[16]) {\n"
        ".reg .b64 %a, %b, %c, %d; .reg .b32 %r<9>; .reg .pred %p<9>;\n" + body + " ret; }"
    )
    assert summary(describe(text)["k"]) == (pointers, indirect)


def test_a_parameter_read_by_the_name_of_one_that_is_not_at_the_same_distance_everywhere() -> None:
    """Where b lies behind a depends on where the GPU's parameter block begins."""
    text = (
        HEAD
        + """
    .entry k(.param .u64 a, .param .align 64 .b8 b[64], .param .u64 c) { .reg .u64 %a, %b; ld.param.u64 %a, [a+64];
      st.u32 [%a], 1; ret; }
    .entry l(.param .u64 a, .param .align 64 .b8 b[64], .param .u64 c) { .reg .u64 %a, %b; ld.param.u64 %a, [b+64];
      st.u32 [%a], 1; ret; }
    """
    )
    found = describe(text)
    assert summary(found["k"]) == ({}, W)
    assert summary(found["l"]) == ({128: W}, NONE)


@pytest.mark.parametrize("first", ["head", "head+64"])
def test_a_tensor_map_named_by_another_parameter(first: str) -> None:
    text = (
        HEAD
        + f"""
    .entry k(.param .align 64 .b8 head[64], .param .align 16 .b8 map[128], .param .align 64 .b8 other[128]) {{
      .reg .u64 %a; .reg .b32 %s; mov.b64 %a, {first};
      cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%a{"" if "+" in first else "+64"}, {{0}}], [%s]; ret; }}
    .entry small(.param .align 64 .b8 head[64], .param .u64 n) {{ .reg .u64 %a, %b; .reg .b32 %s; mov.b64 %a, head;
      ld.param.u64 %b, [n]; add.u64 %a, %a, %b;
      cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%a, {{0}}], [%s]; ret; }}
    .entry far(.param .align 64 .b8 head[64], .param .align 64 .b8 map[128]) {{
      .reg .u64 %a; .reg .b32 %s; mov.b64 %a, head;
      cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%a+64, {{0}}], [%s]; ret; }}
    """
    )
    found = describe(text)
    assert (found["k"].fields, found["k"].indirect) == ((Field(64, 128, W, FieldKind.TENSOR_MAP),), NONE)
    assert (found["far"].fields, found["far"].indirect) == ((), W)
    assert found["small"].indirect == W


def test_an_address_of_the_modules_that_is_handed_over_in_a_register() -> None:
    text = (
        HEAD
        + """
    .global .u32 counter;
    .func at(.param .u64 to, .param .u64 i) { .reg .u64 %a, %b; ld.param.u64 %a, [to]; ld.param.u64 %b, [i];
      add.u64 %a, %a, %b; st.u32 [%a], 1; ret; }
    .entry k(.param .u64 p, .param .u64 i) { .reg .u64 %a, %b, %i; .reg .pred %p; ld.param.u64 %a, [p];
      mov.u64 %b, counter; cvta.global.u64 %b, %b; ld.param.u64 %i, [i]; setp.eq.u64 %p, %i, 0;
      selp.u64 %a, %a, %b, %p; call at, (%a, %i); ret; }
    """
    )
    assert describe(text)["k"].fields[0] == Field(0, 8, W, FieldKind.POINTER)


def test_a_table_of_functions_in_a_body() -> None:
    text = (
        HEAD
        + """
    .func writes(.reg .u64 a) { st.u32 [a], 1; ret; }
    .func other(.reg .u64 a) { ret; }
    .global .u64 others[1] = { other };
    .entry k(.param .u64 p) { .global .u64 table[1] = { writes }; .reg .u64 %a, %f; ld.param.u64 %a, [p];
      ld.global.u64 %f, [table]; t: .callprototype _ (.param .u64 _); call %f, (%a), t; }
    """
    )
    assert summary(describe(text)["k"]) == ({0: W}, NONE)


def test_lists_of_targets_with_the_same_name() -> None:
    text = (
        HEAD
        + """
    .func reads(.reg .u64 a) { .reg .b32 r; ld.u32 r, [a]; ret; }
    .func writes(.reg .u64 a) { st.u32 [a], 1; ret; }
    .entry k(.param .u64 p) { .reg .u64 %a, %f; ld.param.u64 %a, [p]; ld.param.u64 %f, [p];
      t: .calltargets writes; { t: .calltargets reads; call %f, (%a), t; } call %f, (%a), t; }
    """
    )
    assert summary(describe(text)["k"]) == ({0: RW}, NONE)


def test_calls_of_listed_targets() -> None:
    text = (
        HEAD
        + """
    .func one(.reg .u64 a) { st.u32 [a], 1; ret; }
    .func two(.reg .u64 a) { .reg .b32 r; ld.u32 r, [a]; ret; }
    .func three(.reg .u64 a) { atom.add.u32 _, [a], 1; ret; }
    .entry k(.param .u64 p) { .reg .u64 %a, %f; ld.param.u64 %a, [p]; mov.u64 %f, one;
      t: .calltargets one, two; call %f, (%a), t; }
    .entry direct(.param .u64 p) { .reg .u64 %a, %f; ld.param.u64 %a, [p]; mov.u64 %f, two; call %f, (%a), t;
      t: .callprototype _ (.param .u64 _); }
    """
    )
    found = describe(text)
    assert summary(found["k"]) == ({0: RW}, NONE)
    assert summary(found["direct"]) == ({0: R}, NONE)


EXPECTED_EXAMPLES: dict[str, dict[str, tuple[Pointers, Access]]] = {
    "stencil": {"relax": ({0: R, 8: W}, NONE), "prepare": ({0: W}, NONE)},
    "device_pointer": {"write_through": ({}, RW), "swap": ({}, NONE)},
}


@pytest.mark.parametrize("name", ["mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil"])
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    source = importlib.import_module("cuda_program").DIGEST_SOURCE + importlib.import_module(name).SOURCE
    found = cuda(source)
    assert summary(found["digest"]) == ({0: R, 24: RW}, NONE)
    assert set(found) == set(re.findall(r"__global__ void (\w+)\(", source))
    for kernel, expected in EXPECTED_EXAMPLES.get(name, {}).items():
        assert summary(found[kernel]) == expected
    for kernel, descriptor in found.items():
        if name != "device_pointer" and kernel != "chase":
            assert descriptor.indirect == NONE, kernel
