"""What the documentation of a library call says of the launches made inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.frontend_fake import LIBPHOS
from tests.unit.library_fakes import CUDNN_SOURCE, LT_SOURCE, Workshop, nccl_source, run

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not LIBPHOS.exists(), reason="not built")]

# Of the client's cublasSgemm_v2: m, n, k = 16, 8, 4; A as it is, B transposed.
A, B, C = (0x100000, 16 * 4 * 4), (0x200000, (8 * 3 + 8) * 4), (0x300000, 16 * 8 * 4)
R, W, RW = 1, 2, 3


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def gemm(shop: Workshop, *launches: str) -> list[str]:
    """What becomes of the touches of launches inside a call."""
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    body = "".join(
        f"seen = inside(fake, {launch})\nassert client.client_gemm() == 1300\nprint(seen[0])\n" for launch in launches
    )
    return run(
        f"fake, client = open_({str(cublas)!r}), open_({str(client)!r})\nwindow(True)\n{body}", probe=shop.probe()
    ).splitlines()


def test_inputs_become_reads_of_their_size_and_outputs_are_added(shop: Workshop) -> None:
    seen = gemm(
        shop,
        f"[({A[0]}, 0, RW), ({B[0]}, 0, RW), ({C[0]}, 0, RW)]",
        f"[({A[0] + 64}, 0, W), ({B[0]}, 100, RW)]",
        "[]",
    )
    assert seen == [
        str([(*A, R), (*B, R), (*C, RW)]),
        str([(*A, R), (B[0], 100, R), (*C, RW)]),
        str([(*C, RW)]),
    ]


def test_what_is_not_documented_stays_as_the_kernel_has_it(shop: Workshop) -> None:
    """A workspace in the same allocation as an input, right behind it; anything through unknown addresses."""
    behind = A[0] + A[1]
    seen = gemm(
        shop,
        f"[({behind}, 0, RW), ({A[0] - 4}, 0, W), ({B[0] + B[1]}, 8, RW), ({C[0] + C[1]}, 0, W)]",
        f"[({A[0]}, 0, R), ({C[0]}, 0, R)]",
    )
    assert seen == [
        str([(behind, 0, RW), (A[0] - 4, 0, W), (B[0] + B[1], 8, RW), (C[0] + C[1], 0, W), (*C, RW)]),
        str([(*A, R), (*C, R), (*C, RW)]),
    ]


def test_what_a_kernel_does_through_unknown_addresses_is_what_is_documented(shop: Workshop) -> None:
    """Its operands and no more: a lazy restore waits for these, a checkpoint saves them first."""
    seen = gemm(
        shop,
        f"[({A[0]}, 0, R), ({C[0]}, 0, R)], RW",
        "[], R",
        f"[({B[0] - 64}, 4096, R)], W",
    )
    assert seen == [
        str([(*A, R), (*C, R), (*B, R), (*C, RW)]),
        str([(*A, R), (*B, R), (*C, RW)]),
        str([(B[0] - 64, 4096, R), (*A, R), (*C, RW)]),
    ]


def test_a_launch_in_a_window_in_a_call_that_began_before_it(shop: Workshop) -> None:
    """A checkpoint finds a program in the middle of a call: at the gate, before a launch."""
    lt = shop.library("libcublasLt.so.13", LT_SOURCE, version="libcublasLt.so.13")
    nested = "cublasLtMatmul(0, 0, 0, (void *)0x900000, 0, A, 0, 0, 0, 0, C, 0, 0, (void *)0xa00000, 4096, 0);"
    cublas = shop.cublas(13, "", 0, lt, f"-Wl,-rpath,{lt.parent}", nested=nested)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        lt, fake, client = open_({str(lt)!r}), open_({str(cublas)!r}), open_({str(client)!r})
        client.client_gemm()
        seen = []
        def launch():
            window(True)
            seen.append(refined([({A[0]}, 0, RW)], RW))
            window(False)
        callback = ctypes.CFUNCTYPE(None)(launch)
        lt.fake_callback(callback)
        fake.fake_callback(callback)
        print(client.client_gemm(), client.client_gemm())
        window(True)
        print(refined([({A[0]}, 0, RW)], RW, left=RW))
        print(len(seen), *seen[:2], seen[:2] == seen[2:], sep="\\n")
        """,
        probe=shop.probe(),
    ).splitlines()
    assert printed[0] == "1300 1300"
    assert printed[1] == str([(A[0], 0, RW)])  # outside of any call
    assert printed[2] == "4"
    assert printed[3] == str([(A[0], 0, R), (0x900000, 0, R), (C[0], 0, RW), (0xA00000, 4096, RW), (*B, R)])
    assert printed[4] == str([(*A, R), (*B, R), (*C, RW)])
    assert printed[5] == "True"


def test_a_kernel_of_which_nothing_is_known_is_refined_too(shop: Workshop) -> None:
    """Its layout cannot be asked for: what the call documents is all there is."""
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        fake, client = open_({str(cublas)!r}), open_({str(client)!r})
        window(True)
        seen = inside(fake, [], RW)
        assert client.client_gemm() == 1300
        print(seen[0])
        """,
        probe=shop.probe(),
    )
    assert printed == str([(*A, R), (*B, R), (*C, RW)])


def test_an_output_that_a_touch_covers_is_not_added_again(shop: Workshop) -> None:
    assert gemm(shop, f"[({C[0] - 16}, 4096, RW)]") == [str([(C[0] - 16, 4096, RW)])]


def call(shop: Workshop, body: str, **libraries: Path) -> list[str]:
    """Calls functions by dlsym, as ctypes does, in a window."""
    opened = "".join(f"{name} = open_({str(path)!r})\n" for name, path in libraries.items())
    helper = "P = c_void_p\ndef fetch(library, name, *kinds):\n"
    helper += "    return ctypes.CFUNCTYPE(c_int, *kinds)(libc.dlsym(library._handle, name))\n"
    return run(opened + helper + "window(True)\n" + body, probe=shop.probe()).splitlines()


def test_an_argument_that_is_input_and_output_is_an_output(shop: Workshop) -> None:
    printed = call(
        shop,
        "axpy = fetch(blas, b'cublasSaxpy_v2', P, c_int, P, P, c_int, P, c_int)\n"
        "seen = inside(blas, [(0x100000, 0, RW), (0x100010, 0, W)])\n"
        "axpy(1, 16, 7, 0x100000, 1, 0x100000, 1)\nprint(seen[0])\n"
        "seen = inside(blas, [(0x100000, 0, RW)])\naxpy(1, 16, 7, 0x100000, -2, 0x200000, 1)\nprint(seen[0])\n"
        "seen = inside(blas, [(0x100000, 0, RW)])\naxpy(1, 0, 7, 0x100000, 1, 0x200000, 1)\nprint(seen[0])\n",
        blas=shop.cublas(13),
    )
    assert printed == [
        str([(0x100000, 64, RW), (0x100000, 64, W)]),
        str([(0x100000, 124, R), (0x200000, 64, RW)]),
        str([(0x100000, 0, RW)]),
    ]


LT = """
class Layout(ctypes.Structure):
    _fields_ = [("type", c_uint32), ("order", ctypes.c_int32), ("rows", c_uint64), ("columns", c_uint64),
                ("leading", ctypes.c_int64), ("batch", ctypes.c_int32), ("stride", ctypes.c_int64),
                ("mode", ctypes.c_int32)]
matmul = fetch(lt, b'cublasLtMatmul', *[P] * 14, c_size_t, P)
def run_matmul(*layouts):
    a, b, c, d = [ctypes.addressof(l) for l in layouts]
    return matmul(1, 2, 3, 0x100000, a, 0x200000, b, 4, 0x300000, c, 0x400000, d, 5, 0x500000, 4096, 0)
half, rows = Layout(2, 0, 100, 10, 128, 1, 0), Layout(2, 1, 10, 100, 128, 3, 5000)
tiled = Layout(3, 2, 64, 64, 64, 1, 0)
"""


def test_cublaslt_takes_sizes_from_its_layouts(shop: Workshop) -> None:
    path = shop.library("libcublasLt.so.13", LT_SOURCE, version="libcublasLt.so.13")
    printed = call(
        shop,
        LT + "touches = [(a, 0, RW) for a in (0x100000, 0x200000, 0x300000, 0x400000, 0x500000)]\n"
        "seen = inside(lt, touches)\nprint(run_matmul(half, rows, half, half))\nprint(seen[0])\n"
        "seen = inside(lt, touches)\nrun_matmul(tiled, tiled, tiled, tiled)\nprint(seen[0])\n",
        lt=path,
    )
    half = (9 * 128 + 100) * 2
    assert printed[0] == "1301"
    assert printed[1] == str(
        [
            (0x100000, half, R),
            (0x200000, half + 2 * 5000 * 2, R),
            (0x300000, half, R),
            (0x400000, half, RW),
            (0x500000, 4096, RW),
        ]
    )
    # Sizes of tiled layouts are not computed. A documented input is one all the same; the workspace may not be
    # narrowed, because the output below it may reach it.
    assert printed[2] == str(
        [(0x100000, 0, R), (0x200000, 0, R), (0x300000, 0, R), (0x400000, 0, RW), (0x500000, 0, RW)]
    )


def test_of_matrices_whose_addresses_lie_in_memory_nothing_is_known(shop: Workshop) -> None:
    """Batches by pointers: the arrays of these are not the matrices. One operand of the kind is enough."""
    printed = call(
        shop,
        LT + "pointers = Layout(2, 0, 100, 10, 128, 3, 0, 1)\n"
        "for at in range(4):\n"
        "    layouts = [half] * 4\n    layouts[at] = pointers\n"
        "    seen = inside(lt, [(0x500000, 0, R)], RW, left=RW)\n    run_matmul(*layouts)\n"
        "    print((0x500000, 4096, RW) in seen[0])\n"
        "seen = inside(lt, [], RW)\nrun_matmul(half, half, half, half)\nprint(seen[0] != [])\n",
        lt=shop.library("libcublasLt.so.13", LT_SOURCE, version="libcublasLt.so.13"),
    )
    assert printed == ["True"] * 5


@pytest.mark.parametrize(
    ("epilogue", "added"),
    [
        (1, []),  # the plain one: a bias that is set is not used
        (4, [(0x600000, 0, R)]),  # BIAS
        (32 | 128 | 4, [(0x600000, 0, R), (0x700000, 0, RW)]),  # GELU_AUX_BIAS
        (64 | 128 | 16, [(0x600000, 0, RW), (0x700000, 0, R)]),  # DGELU_BGRAD
        (512, [(0x600000, 0, RW)]),  # BGRADB
    ],
)
def test_cublaslt_writes_what_its_description_names(shop: Workshop, epilogue: int, added: list[object]) -> None:
    path = shop.library("libcublasLt.so.13", LT_SOURCE, version="libcublasLt.so.13")
    named = {7: epilogue, 8: 0x600000, 11: 0x700000, 17: 0x800000, 21: 0x900000}
    printed = call(
        shop,
        LT + f"description = (c_uint64 * 37)(*[{named}.get(i, 0) for i in range(37)])\n"
        "where = [ctypes.addressof(half)] * 4\n"
        "def launched(anything):\n"
        "    seen = inside(lt, [], anything)\n"
        "    matmul(1, ctypes.addressof(description), 3, 0x100000, where[0], 0x200000, where[1], 4, 0x300000, where[2],"
        " 0x400000, where[3], 5, 0x500000, 4096, 0)\n"
        "    print(seen[0])\n"
        "launched(RW)\nlaunched(0)\n",
        lt=path,
    )
    half = (9 * 128 + 100) * 2
    operands = [(0x100000, half, R), (0x200000, half, R), (0x300000, half, R)]
    outputs = [(0x400000, half, RW), (0x500000, 4096, RW)]
    assert printed == [str([*operands, *outputs, *added, (0x900000, 4, RW), (0x800000, 0, R)]), str(outputs)]


def test_cudnn_takes_sizes_from_its_descriptors_and_passes_doubles(shop: Workshop) -> None:
    path = shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9")
    printed = call(
        shop,
        "norm = fetch(dnn, b'cudnnBatchNormalizationForwardInference', P, c_int, *[P] * 11, c_double)\n"
        "seen = inside(dnn, [(a, 0, RW) for a in (0x100000, 0x200000, 0x400000, 0x700000)])\n"
        "print(norm(1, 0, 2, 3, 4000, 0x100000, 5000, 0x200000, 60, 0x400000, 0x500000, 0x600000, 0x700000, 0.125))\n"
        "print(seen[0])\n"
        # The output of unknown size lies below one input and above the other.
        "rnn = fetch(dnn, b'cudnnRNNForward', P, P, c_int, *[P] * 11, c_size_t, P, c_size_t, P, c_size_t, P)\n"
        "seen = inside(dnn, [(a, 0, RW) for a in (0x100000, 0x300000)])\n"
        "state = (80, 0x300000, None, 0, None, None)\n"
        "print(rnn(1, 2, 0, None, 3, 0x100000, 4, 0x200000, *state, 0, None, 0, None, 0, None))\n"
        "print(seen[0])\n",
        dnn=path,
    )
    assert printed == [
        "900",
        str([(0x100000, 4000, R), (0x200000, 5000, RW), (0x400000, 60, R), (0x700000, 60, R)]),
        "901",
        str([(0x100000, 0, R), (0x300000, 0, RW), (0x200000, 0, RW)]),
    ]


def test_cudnn_keeps_states_of_random_numbers_for_dropout(shop: Workshop) -> None:
    """They change with each call, and only the descriptor names them: one of an RNN, that of its dropout."""
    printed = call(
        shop,
        "drop = fetch(dnn, b'cudnnDropoutForward', *[P] * 7, c_size_t)\n"
        "def dropped(states, *anything, **about):\n"
        "    seen = inside(dnn, [], *anything, **about)\n"
        "    assert drop(1, states, 64, 0x100000, 64, 0x200000, 0x300000, 128) == 903\n    print(seen[0])\n"
        "dropped(0x400000, RW)\ndropped(0x400000)\ndropped(0x400000, guessed=True)\ndropped(None, RW)\n"
        "rnn = fetch(dnn, b'cudnnRNNForward', P, P, c_int, *[P] * 11, c_size_t, P, c_size_t, P, c_size_t, P)\n"
        "seen = inside(dnn, [], W)\n"
        "rnn(1, 0x500000, 1, *[None] * 3, 4, 0x200000, *[None] * 6, 0, None, 0, None, 0, None)\nprint(seen[0])\n",
        dnn=shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9"),
    )
    inputs, outputs, states = [(0x100000, 64, R)], [(0x200000, 64, RW), (0x300000, 128, RW)], (0x400000, 0, RW)
    assert printed == [
        str([*inputs, *outputs, states]),
        str(outputs),
        str([*inputs, *outputs, states]),
        str([*inputs, *outputs]),
        str([(0x200000, 0, RW), (0x500000, 0, W)]),
    ]


PACK = """
set_attribute = fetch(dnn, b'cudnnBackendSetAttribute', P, c_int, c_int, ctypes.c_longlong, P)
destroy, execute = fetch(dnn, b'cudnnBackendDestroyDescriptor', P), fetch(dnn, b'cudnnBackendExecute', P, P, P)
POINTERS, UNIQUE_IDS, INTERMEDIATES, WORKSPACE, VOID_POINTER, INT64 = 1001, 1000, 1002, 1003, 6, 3
def give(pack, attribute, *addresses, kind=VOID_POINTER):
    return set_attribute(pack, attribute, kind, len(addresses), (P * max(1, len(addresses)))(*addresses))
def launched(pack, touches, anything=0, left=0, **about):
    seen = inside(dnn, touches, anything, left, **about)
    assert execute(1, 2, pack) == 902
    return seen[0]
"""


def test_what_cudnn_does_through_unknown_addresses_is_done_to_the_pointers_it_was_given(shop: Workshop) -> None:
    """Attention of cuDNN: tensor maps in the workspace. The pack is filled before the window, as packs are."""
    printed = call(
        shop,
        "window(False)\n" + PACK + "assert give(0x10, POINTERS, 0x100000, None, 0x200000, 0x300000) == 0\n"
        "assert give(0x10, UNIQUE_IDS, 0x800000, kind=INT64) == 0\n"
        "assert give(0x10, WORKSPACE, 0x400000) == 0\nwindow(True)\n"
        "print(launched(0x10, [(0x500000, 64, R), (0x200000, 0, RW)], RW))\n"
        "print(launched(0x10, [(0x500000, 64, R)], R))\n",
        dnn=shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9"),
    )
    others = (0x100000, 0x300000, 0x400000)
    assert printed == [
        str([(0x500000, 64, R), (0x200000, 0, RW), *((a, 0, RW) for a in others)]),
        str([(0x500000, 64, R), *((a, 0, R) for a in (0x100000, 0x200000, 0x300000, 0x400000))]),
    ]


def test_what_is_known_of_a_kernel_of_cudnn_stays_as_it_is(shop: Workshop) -> None:
    """A convolution's weights are in the pack, and are not written because of that."""
    printed = call(
        shop,
        PACK + "give(0x10, POINTERS, 0x100000, 0x200000)\n"
        "known = [(0x100000, 0, R), (0x200000, 0, W)]\nprint(launched(0x10, known))\n"
        # Where only the arguments are known, or not even the code, there may be more.
        "for about in ({'source': 2}, {'source': 3}, {'guessed': True}): print(launched(0x10, known, **about))\n"
        "print(launched(0x10, known, source=255))\n",
        dnn=shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9"),
    )
    known = [(0x100000, 0, R), (0x200000, 0, W)]
    assert printed == [str(known)] + [str([*known, (0x100000, 0, RW), (0x200000, 0, RW)])] * 3 + [str(known)]


def test_a_pack_of_which_not_all_is_known_leaves_a_kernel_what_it_may_do(shop: Workshop) -> None:
    printed = call(
        shop,
        PACK + "print(launched(0x10, [], RW, left=RW))\n"  # never seen
        "give(0x10, WORKSPACE, 0x400000)\nprint(launched(0x10, [], RW, left=RW))\n"  # seen in part
        # An attribute that cuDNN refuses is not set; one that is set again is what was set last.
        "assert set_attribute(0x10, POINTERS, VOID_POINTER, 1, None) == 2000\n"
        "print(launched(0x10, [], RW, left=RW))\n"
        "give(0x10, POINTERS, 0x100000, 0x200000)\ngive(0x10, POINTERS, 0x300000)\n"
        "print(launched(0x10, [], RW))\n"
        # Another descriptor at the same address is another pack.
        "destroy(0x10)\nprint(launched(0x10, [], RW, left=RW))\n"
        # Pointers of a kind that we do not know.
        "give(0x10, POINTERS, 0x100000, kind=INT64)\nprint(launched(0x10, [], RW, left=RW))\n",
        dnn=shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9"),
    )
    assert printed == ["[]", "[]", "[]", str([(0x300000, 0, RW), (0x400000, 0, RW)]), "[]", "[]"]


def test_packs_of_many_pointers_and_many_packs(shop: Workshop) -> None:
    printed = call(
        shop,
        PACK + "def pointers(pack): return [0x100000 * pack + 4096 * i for i in range(40)]\n"
        "for pack in range(1, 3000): give(pack << 4, POINTERS, *pointers(pack))\n"
        "for pack in (1, 1500, 2999):\n"
        "    for access in (W, RW):\n"
        "        wanted = [(a, 0, access) for a in pointers(pack)]\n"
        "        print(launched(pack << 4, [], access) == wanted)\n"
        "for pack in range(1, 3000): destroy(pack << 4)\n"
        "print(launched(1500 << 4, [], W, left=W))\n",
        dnn=shop.library("libcudnn.so.9", CUDNN_SOURCE, version="libcudnn.so.9"),
    )
    assert printed == ["True"] * 6 + ["[]"]


def test_the_workspace_of_a_cublas_handle_is_among_what_cannot_be_known(shop: Workshop) -> None:
    """PyTorch gives each handle one, and a kernel may reach it through a tensor map only."""
    printed = call(
        shop,
        "axpy = fetch(blas, b'cublasSaxpy_v2', P, c_int, P, P, c_int, P, c_int)\n"
        "set_workspace = fetch(blas, b'cublasSetWorkspace_v2', P, P, c_size_t)\n"
        "destroy = fetch(blas, b'cublasDestroy_v2', P)\n"
        "def launched(handle, *more, **about):\n"
        "    seen = inside(blas, [(0x100000, 0, R)], *more, **about)\n"
        "    axpy(handle, 16, 7, 0x100000, 1, 0x200000, 1)\n    return seen[0]\n"
        "set_workspace(1, 0x900000, 4096), set_workspace(1, 0x900001, 64), set_workspace(2, 0xa00000, 4096)\n"
        "print(launched(1))\nprint(launched(1, RW))\nprint(launched(1, unsure=W))\nprint(launched(3, RW))\n"
        "set_workspace(2, None, 0)\nprint(launched(2, RW))\n"
        "destroy(1)\nprint(launched(1, RW))\n",
        blas=shop.cublas(13),
    )
    operands = [(0x100000, 64, R), (0x200000, 64, RW)]
    assert printed == [
        str(operands),
        str([*operands, (0x900000, 4096, RW)]),
        str([*operands, (0x900000, 4096, W)]),
        *[str(operands)] * 3,
    ]


def test_of_a_kernel_of_which_we_are_unsure_a_call_says_what_it_does(shop: Workshop) -> None:
    """Where the call does not say it either, it may be anything; outside of all calls it is taken not to happen."""
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    printed = call(
        shop,
        f"client = open_({str(client)!r})\n"
        f"seen = inside(blas, [({A[0]}, 0, R)], unsure=W)\nclient.client_gemm()\nprint(seen[0])\n"
        "batched = fetch(blas, b'cublasGemmBatchedEx', P, *[c_int] * 5, P, P, c_int, c_int, P, c_int, c_int, P, P,"
        " *[c_int] * 5)\n"
        "seen = inside(blas, [(0x100000, 0, R)], unsure=W, left=W)\n"
        "batched(1, 0, 0, 8, 8, 8, 2, 0x100000, 2, 8, 0x200000, 2, 8, 3, 0x300000, 2, 8, 4, 68, -1)\nprint(seen[0])\n"
        "print(refined([(0x100000, 0, R)], unsure=W))\n",
        blas=cublas,
    )
    assert printed == [
        str([(*A, R), (*B, R), (*C, RW)]),
        str([(0x100000, 32, R)]),
        str([(0x100000, 0, R)]),
    ]


def test_calls_that_libraries_make_to_each_other_keep_both_scopes(shop: Workshop) -> None:
    """cuBLAS calls cuBLASLt with a copy of A in its workspace as an operand: A stays an input, the copy becomes one."""
    lt = shop.library("libcublasLt.so.13", LT_SOURCE, version="libcublasLt.so.13")
    nested = "cublasLtMatmul(0, 0, 0, (void *)0x900000, 0, A, 0, 0, 0, 0, C, 0, 0, (void *)0xa00000, 4096, 0);"
    cublas = shop.cublas(13, "", 0, lt, f"-Wl,-rpath,{lt.parent}", nested=nested)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        lt, fake, client = open_({str(lt)!r}), open_({str(cublas)!r}), open_({str(client)!r})
        window(True)
        touches = [({A[0]}, 0, RW), ({B[0]}, 0, RW), (0x80000, 0, RW), (0xa00000, 0, RW)]
        inner, outer = inside(lt, touches), inside(fake, touches)
        print(client.client_gemm())
        print(inner[0], outer[0], len(inner), len(outer), sep="\\n")
        print(refined(touches))
        """,
        probe=shop.probe(),
    ).splitlines()
    assert printed[0] == "1300"
    # Inside, the output of unknown size at C may reach the workspace: that stays whole.
    assert printed[1] == str([(A[0], 0, R), (*B, R), (0x80000, 0, RW), (0xA00000, 0, RW), (C[0], 0, RW)])
    assert printed[2] == str([(*A, R), (*B, R), (0x80000, 0, RW), (0xA00000, 0, RW), (*C, RW)])
    assert printed[3:5] == ["1", "1"]
    assert printed[5] == str([(A[0], 0, RW), (B[0], 0, RW), (0x80000, 0, RW), (0xA00000, 0, RW)])


def test_scopes_belong_to_their_thread(shop: Workshop) -> None:
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        fake, client = open_({str(cublas)!r}), open_({str(client)!r})
        window(True)
        touches = [({A[0]}, 0, RW)]
        entered, done, outside, here = threading.Event(), threading.Event(), [], []
        @ctypes.CFUNCTYPE(None)
        def callback():
            here.append(refined(touches))
            entered.set()
            done.wait(10)
        fake.fake_callback(callback)
        thread = threading.Thread(target=client.client_gemm)
        thread.start()
        entered.wait(10)
        outside.append(refined(touches))
        done.set()
        thread.join()
        print(here[0], outside[0], sep="\\n")
        """,
        probe=shop.probe(),
    )
    assert printed.splitlines() == [str([(*A, R), (*C, RW)]), str([(A[0], 0, RW)])]


@pytest.mark.parametrize("open_window", [False, True])
def test_switched_off_there_is_no_scope(shop: Workshop, open_window: bool) -> None:
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        fake, client = open_({str(cublas)!r}), open_({str(client)!r})
        window({open_window})
        seen = inside(fake, [({A[0]}, 0, RW)])
        print(client.client_gemm(), client.client_gemm(), seen)
        """,
        probe=shop.probe(),
        PHOS_LIBRARIES="off",
    )
    assert printed == f"1300 1300 {[[(A[0], 0, RW)]] * 2}"


def test_collectives_have_no_scope_without_a_window(shop: Workshop) -> None:
    path = shop.library("libnccl.so.2", nccl_source(2))
    printed = call(
        shop,
        NCCL + "window(False)\nseen = inside(nccl, [(0x100000, 0, RW)])\n"
        "gather(0x100000, 0x200000, 100, 7, 0, 0)\nprint(seen[0])\n",
        nccl=path,
    )
    assert printed == [str([(0x100000, 0, RW)])]


NCCL = """
gather = fetch(nccl, b'ncclAllGather', P, P, c_size_t, c_int, P, P)
send, receive = [fetch(nccl, n, P, c_size_t, c_int, c_int, P, P) for n in (b'ncclSend', b'ncclRecv')]
start, end = fetch(nccl, b'ncclGroupStart'), fetch(nccl, b'ncclGroupEnd')
"""


def test_collectives(shop: Workshop) -> None:
    printed = call(
        shop,
        NCCL + "seen = inside(nccl, [(0x100000, 0, RW), (0x200000, 0, RW)])\n"
        "print(gather(0x100000, 0x200000, 100, 7, 0, 0))\nprint(seen[0])\n"
        # In place: what this rank sends lies in what it receives.
        "seen = inside(nccl, [(0x200190, 0, RW)])\ngather(0x200190, 0x200000, 100, 7, 0, 0)\nprint(seen[0])\n",
        nccl=shop.library("libnccl.so.2", nccl_source(2)),
    )
    assert printed == [
        "2",
        str([(0x100000, 400, R), (0x200000, 1600, RW)]),
        str([(0x200000, 1600, RW)]),
    ]


def test_a_group_is_launched_with_what_all_its_calls_document(shop: Workshop) -> None:
    printed = call(
        shop,
        NCCL + "seen = inside(nccl, [(0x100000, 0, RW), (0x200000, 0, RW)])\n"
        "start(); start()\nsend(0x100000, 10, 7, 1, 0, 0)\nend()\nreceive(0x200000, 10, 7, 1, 0, 0)\n"
        "print(len(seen))\nend()\nprint(seen)\n"
        # The next one knows nothing of the last.
        "seen = inside(nccl, [(0x100000, 0, RW)])\nstart()\nreceive(0x300000, 10, 7, 1, 0, 0)\nend()\nprint(seen)\n"
        # One that began before the window, and one call of which came before it.
        "window(False)\nstart()\nsend(0x100000, 10, 7, 1, 0, 0)\nwindow(True)\n"
        "seen = inside(nccl, [(0x100000, 0, RW)])\nend()\nprint(seen)\n"
        # One whose window ends in the middle leaves nothing behind.
        "start()\nsend(0x100000, 10, 7, 1, 0, 0)\nwindow(False)\nend()\nwindow(True)\n"
        "seen = inside(nccl, [(0x100000, 0, RW)])\nsend(0x400000, 10, 7, 1, 0, 0)\nprint(seen)\n",
        nccl=shop.library("libnccl.so.2", nccl_source(2)),
    )
    assert printed == [
        "0",
        str([[(0x100000, 40, R), (0x200000, 40, RW)]]),
        str([[(0x100000, 0, RW), (0x300000, 40, RW)]]),
        str([[(0x100000, 0, RW)]]),
        str([[(0x100000, 0, RW)]]),
    ]


def test_a_group_of_a_thousand_calls(shop: Workshop) -> None:
    printed = call(
        shop,
        NCCL + "seen = inside(nccl, [(0x100000 + 4096 * 999, 0, RW)])\nstart()\n"
        "for i in range(1000): send(0x100000 + 4096 * i, 10, 7, 1, 0, 0)\nend()\nprint(seen)\n",
        nccl=shop.library("libnccl.so.2", nccl_source(2)),
    )
    assert printed == [str([[(0x100000 + 4096 * 999, 40, R)]])]
