"""Small libraries that stand for cuBLAS, cuDNN and NCCL, and programs that use them: compiled by the tests.

Every fake function answers a number that says which library it is in, and calls back the test in between, where a real
one would launch kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.unit.frontend_fake import LIBPHOS, ROOT, environment_for

GEMM = (
    "void *h, int ta, int tb, int m, int n, int k, void *alpha, void *A, int lda, void *B, int ldb, void *beta,"
    " void *C, int ldc"
)
# What a client passes: every argument another value, so that one that is lost or moved shows.
GEMM_CALL = (
    "(void *)1, 0, 1, 16, 8, 4, (void *)7, (void *)0x100000, 16, (void *)0x200000, 8, (void *)12, (void *)0x300000, 16"
)
REDUCE = "void *s, void *r, size_t count, int type, int op, void *comm, void *stream"

CALLBACK = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static void (*callback)(void);
void fake_callback(void (*f)(void)) { callback = f; }
static void launch(void) { if (callback) callback(); }
"""


def cublas_source(number: int, nested: str = "") -> str:
    """Answers `number`, or -1 if an argument was not what a client passes; `nested` is called first."""
    return CALLBACK + textwrap.dedent(f"""
        int cublasLtMatmul(void *h, void *d, void *a, void *A, void *Ad, void *B, void *Bd, void *b, void *C, void *Cd,
                           void *D, void *Dd, void *algo, void *w, size_t size, void *s);
        int cublasCreate_v2(void **h) {{ *h = (void *){number}; return 0; }}
        int cublasSgemm_v2({GEMM}) {{
            {nested}
            launch();
            return h == (void *)1 && ta == 0 && tb == 1 && m == 16 && n == 8 && k == 4 && alpha == (void *)7
                && lda == 16 && ldb == 8 && beta == (void *)12 && ldc == 16 && C ? {number} : -1;
        }}
        int cublasSetWorkspace_v2(void *h, void *workspace, size_t size) {{ return (size_t)workspace % 256 ? 7 : 0; }}
        int cublasDestroy_v2(void *h) {{ return 0; }}
        int cublasGemmBatchedEx(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *A, int at, int lda,
                                void *B, int bt, int ldb, void *beta, void *C, int ct, int ldc, int batch, int type,
                                int algo) {{
            launch();
            return {number};
        }}
        int cublasSaxpy_v2(void *h, int n, void *alpha, void *x, int incx, void *y, int incy) {{
            launch();
            return {number};
        }}
        """)  # fmt: skip


LT_SOURCE = CALLBACK + textwrap.dedent("""
    struct layout { uint32_t type; int32_t order; uint64_t rows, columns; int64_t leading; int32_t batch;
                    int64_t stride; int32_t mode; };
    int cublasLtMatrixLayoutGetAttribute(void *opaque, int which, void *to, size_t size, size_t *written) {
        struct layout *l = opaque;
        int64_t plane = 0;
        void *from[] = {&l->type, &l->order, &l->rows, &l->columns, &l->leading, &l->batch, &l->stride, &plane,
                        &l->mode};
        size_t sizes[] = {4, 4, 8, 8, 8, 4, 8, 8, 4};
        if (which > 8 || size < sizes[which]) return 7;
        memcpy(to, from[which], sizes[which]);
        *written = sizes[which];
        return 0;
    }
    /* A description is an array by attribute; a small number is none. */
    int cublasLtMatmulDescGetAttribute(void *opaque, int which, void *to, size_t size, size_t *written) {
        if ((uintptr_t)opaque < 4096 || which > 36 || size != (which == 7 ? 4 : 8)) return 7;
        memcpy(to, (uint64_t *)opaque + which, size);
        *written = size;
        return 0;
    }
    int cublasLtMatmul(void *h, void *d, void *a, void *A, void *Ad, void *B, void *Bd, void *b, void *C, void *Cd,
                       void *D, void *Dd, void *algo, void *w, size_t ws, void *s) {
        launch();
        return ws == 4096 ? 1301 : -1;
    }
    """)
CUDNN_SOURCE = CALLBACK + textwrap.dedent("""
    int cudnnGetTensorSizeInBytes(void *d, size_t *size) { *size = (size_t)d; return 0; }
    int cudnnBatchNormalizationForwardInference(void *h, int mode, void *alpha, void *beta, void *xd, void *x, void *yd,
        void *y, void *bd, void *scale, void *bias, void *mean, void *variance, double epsilon) {
        launch(); return epsilon == 0.125 && variance == (void *)0x700000 ? 900 : -1; }
    /* A dropout descriptor is the address of its states, a description of an RNN one of such a descriptor. */
    int cudnnGetDropoutDescriptor(void *d, void *h, float *dropout, void **states, unsigned long long *seed) {
        *dropout = 0.5f; *states = d; *seed = 1; return h ? 0 : 2000; }
    int cudnnGetRNNDescriptor_v8(void *r, int *algo, int *cell, int *bias, int *direction, int *input, int *data,
        int *precision, int *math, int *in, int *hidden, int *projection, int *layers, void **dropout, unsigned *f) {
        int *numbers[] = {algo, cell, bias, direction, input, data, precision, math, in, hidden, projection, layers};
        for (int i = 0; i < 12; i++) *numbers[i] = i;
        *f = 0; *dropout = r; return 0; }
    int cudnnDropoutForward(void *h, void *d, void *xd, void *x, void *yd, void *y, void *reserve, size_t size) {
        launch(); return 903; }
    /* Of backend descriptors no more than that a null attribute is refused. */
    int cudnnBackendSetAttribute(void *d, int attribute, int type, long long count, void *elements) {
        return elements || !count ? 0 : 2000; }
    int cudnnBackendDestroyDescriptor(void *d) { return 0; }
    int cudnnBackendExecute(void *h, void *plan, void *pack) { launch(); return 902; }
    int cudnnRNNForward(void *h, void *r, int mode, void *lengths, void *xd, void *x, void *yd, void *y, void *hd,
        void *hx, void *hy, void *cd, void *cx, void *cy, size_t ws, void *w, size_t os, void *o, size_t rs,
        void *reserve) {
        launch(); return 901; }
    """)


def nccl_source(number: int) -> str:
    return CALLBACK + textwrap.dedent(f"""
        static __thread int depth, queued;
        int ncclCommCount(void *comm, int *count) {{ *count = 4; return 0; }}
        static int queue(void) {{ queued = 1; if (!depth) launch(); return {number}; }}
        int ncclAllReduce({REDUCE}) {{ return queue(); }}
        int ncclAllGather(void *s, void *r, size_t count, int type, void *comm, void *stream) {{ return queue(); }}
        int ncclSend(void *b, size_t count, int type, int peer, void *comm, void *stream) {{ return queue(); }}
        int ncclRecv(void *b, size_t count, int type, int peer, void *comm, void *stream) {{ return queue(); }}
        int ncclGroupStart(void) {{ depth++; return 0; }}
        int ncclGroupEnd(void) {{ if (!--depth && queued) {{ queued = 0; launch(); }} return 0; }}
        """)


@dataclass
class Workshop:
    """Compiles into a folder."""

    folder: Path

    def library(
        self, file: str, source: str, *flags: str | Path, soname: str = "", version: str = "", optimise: str = "-O2"
    ) -> Path:
        """A shared library. `version`: of all its symbols."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.with_suffix(path.suffix + ".c")
        text.write_text(source)
        options: list[str | Path] = [f"-Wl,-soname,{soname or path.name}"]
        if version:
            script = text.with_suffix(".map")
            script.write_text(f"{version} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={script}")
        subprocess.run(["gcc", optimise, "-shared", "-fPIC", "-w", *options, "-o", path, text, *flags], check=True)
        return path

    def cublas(self, number: int, folder: str = "", answer: int = 0, *flags: str | Path, nested: str = "") -> Path:
        soname = f"libcublas.so.{number}"
        source = cublas_source(answer or number * 100, nested)
        return self.library(f"{folder}/{soname}".lstrip("/"), source, *flags, soname=soname, version=soname)

    def client(self, file: str, against: Path, *flags: str, optimise: str = "-O2") -> Path:
        """A library linked against a cuBLAS; its calls are jumps when optimised."""
        source = f"int cublasSgemm_v2({GEMM}); int client_gemm(void) {{ return cublasSgemm_v2({GEMM_CALL}); }}"
        return self.library(file, source, against, f"-Wl,-rpath,{against.parent}", *flags, optimise=optimise)

    def nccl_client(self, file: str, *flags: str | Path, more: str = "") -> Path:
        source = (
            f"#include <stddef.h>\nint ncclAllReduce({REDUCE});\n"
            "int client_reduce(void) { int s = ncclAllReduce((void *)0x100000, (void *)0x200000, 64, 7, 0, 0, 0);"
            ' return s + 0 * ((volatile char *)"")[0]; }\n' + more
        )
        return self.library(file, source, *flags)

    def probe(self) -> Path:
        """Turns lists of touches into phos_touches and back."""
        self.folder.joinpath("phos_api.h").write_text(
            "typedef unsigned long long CUdeviceptr; typedef struct CUstream_st *CUstream; typedef int CUresult;"
            " typedef struct CUfunc_st *CUfunction;\n"
        )
        source = """
            #include "touch.h"
            #include <string.h>
            static void (*begin)(struct phos_touches *, CUstream);
            static void (*refine)(struct phos_touches *), (*end)(struct phos_touches *);
            static void (*add)(struct phos_touches *, CUdeviceptr, size_t, uint32_t);
            void probe_init(void *b, void *a, void *r, void *e) { begin = b; add = a; refine = r; end = e; }
            size_t probe_refine(uint64_t *rows, size_t count, size_t room, uint32_t *anything, uint32_t unsure,
                                bool guessed, uint32_t source) {
                struct phos_touches t;
                begin(&t, NULL);
                t.anything = *anything;
                t.unsure = unsure;
                t.guessed = guessed;
                t.source = source;
                for (size_t i = 0; i < count; i++) add(&t, rows[3 * i], rows[3 * i + 1], (uint32_t)rows[3 * i + 2]);
                refine(&t);
                *anything = t.anything;
                size_t made = t.count;
                for (size_t i = 0; i < made && i < room; i++) {
                    struct phos_touch *touch = &t.list[i];
                    memcpy(&rows[3 * i], (uint64_t[]){touch->address, touch->size, touch->access}, 24);
                }
                end(&t);
                return made;
            }
        """
        return self.library("probe.so", source, f"-I{self.folder}", f"-I{ROOT / 'frontend'}")


def offsets() -> dict[str, int]:
    """Where the frontend's hidden symbols lie in its file."""
    listing = subprocess.run(["nm", LIBPHOS], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines())
    return {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


# `hidden(name)` is the address of a hidden symbol of libphos; `window(on)` sets the bit that a window sets;
# `refined(...)` is what a launch with these touches is turned into; `where` names the library that holds an address.
PRELUDE = """
import ctypes, os, sys, threading
from ctypes import c_int, c_void_p, c_char_p, c_size_t, c_uint32, c_uint64, c_double
class Info(ctypes.Structure):
    _fields_ = [("path", c_char_p), ("base", c_void_p), ("name", c_char_p), ("at", c_void_p)]
libc = ctypes.CDLL(None)
libc.dladdr.argtypes = [c_void_p, ctypes.POINTER(Info)]
libc.dlsym.argtypes = [c_void_p, c_char_p]
libc.dlsym.restype = c_void_p
def where(address):
    if not address:
        return "none"
    info = Info()
    assert libc.dladdr(address, ctypes.byref(info))
    return info.path.decode().rsplit("/", 2)[-1] if "libphos" not in info.path.decode() else "phos"
def open_(path, mode=os.RTLD_LOCAL):
    return ctypes.CDLL(str(path), mode | os.RTLD_NOW)
def base():
    for line in open("/proc/self/maps"):
        if line.rstrip().endswith("libphos.so"):
            return int(line.split("-")[0], 16)
def hidden(name):
    return base() + OFFSETS[name]
def window(on):
    word = c_uint32.from_address(hidden("phos_gate_word"))
    word.value = word.value | 16 if on else word.value & ~16
R, W, RW = 1, 2, 3
def refined(touches, anything=0, left=0, unsure=0, guessed=False, source=1):
    probe = ctypes.CDLL(PROBE)
    probe.probe_init(*[c_void_p(hidden(n)) for n in
                       ("phos_touches_begin", "phos_touches_add", "phos_library_refine", "phos_touches_end")])
    probe.probe_refine.restype = c_size_t
    rows = (c_uint64 * 300)(*[v for t in touches for v in t])
    everything = c_uint32(anything)
    count = probe.probe_refine(rows, c_size_t(len(touches)), c_size_t(100), ctypes.byref(everything), c_uint32(unsure),
                               ctypes.c_bool(guessed), c_uint32(source))
    assert everything.value == left
    return [tuple(rows[3 * i:3 * i + 3]) for i in range(count)]
keep = []
def inside(library, touches, anything=0, left=0, **about):
    # What a launch of these touches becomes, for each launch made inside a call; filled in as calls are made.
    seen = []
    callback = ctypes.CFUNCTYPE(None)(lambda: seen.append(refined(touches, anything, left, **about)))
    keep.append(callback)
    library.fake_callback(callback)
    return seen
"""


def run(body: str, *, preload: bool = True, probe: Path | None = None, **environment: str) -> str:
    """What a Python program prints under the frontend. Raises AssertionError with its standard error if it fails."""
    symbols = {name: value for name, value in offsets().items() if name.startswith("phos_")}
    text = f"OFFSETS = {symbols!r}\nPROBE = {str(probe)!r}\n" + PRELUDE + textwrap.dedent(body)
    variables = environment_for(Path("/nonexistent/phosd.sock"), preload=preload) | environment
    done = subprocess.run(
        [sys.executable, "-c", text], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_program(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = environment_for(Path("/nonexistent/phosd.sock")) | environment
    return subprocess.run([os.fspath(path)], env=variables, capture_output=True, text=True, timeout=60, check=False)
