"""Calls into cuBLAS, cuDNN and NCCL: that each caller gets the function it would have got without us."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.frontend_fake import LIBPHOS, ROOT
from tests.unit.library_fakes import GEMM, GEMM_CALL, REDUCE, Workshop, nccl_source, run, run_program

sys.path.insert(0, str(ROOT / "frontend"))
import gen_library

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not LIBPHOS.exists(), reason="not built")]
LIBRARIES, FUNCTIONS = gen_library.parse(ROOT / "frontend" / "library_api.def")


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.mark.parametrize("mode", ["LOCAL", "GLOBAL"])
def test_a_library_that_is_linked_against_cublas(shop: Workshop, mode: str) -> None:
    client = shop.client("client.so", shop.cublas(13))
    printed = run(f"""
        client = open_({str(client)!r}, os.RTLD_{mode})
        print(client.client_gemm(), client.client_gemm())
        window(True)
        print(client.client_gemm())
        window(False)
        print(client.client_gemm())
    """)
    assert printed.split() == ["1300"] * 4


def test_the_first_call_may_come_in_a_window(shop: Workshop) -> None:
    client = shop.client("client.so", shop.cublas(13))
    assert run(f"client = open_({str(client)!r})\nwindow(True)\nprint(client.client_gemm())") == "1300"


def test_a_program_that_is_linked_against_cublas(shop: Workshop) -> None:
    cublas = shop.cublas(13)
    source = shop.folder / "main.c"
    source.write_text(
        f"#include <stdio.h>\nint cublasSgemm_v2({GEMM});\n"
        f'int main(void) {{ printf("%d\\n", cublasSgemm_v2({GEMM_CALL})); return 0; }}\n'
    )
    program = shop.folder / "main"
    for lazy in ("lazy", "now"):
        subprocess.run(
            ["gcc", "-O2", f"-Wl,-z,{lazy}", "-o", program, source, cublas, f"-Wl,-rpath,{cublas.parent}"], check=True
        )
        assert run_program(program).stdout == "1300\n"
        assert run_program(program, PHOS_LIBRARIES="off").stdout == "1300\n"


def test_two_versions_in_one_process_serve_each_its_own_callers(shop: Workshop) -> None:
    """The callers jump into cuBLAS (tail calls), so that a return address would name somebody else."""
    clients = [shop.client(f"client{n}.so", shop.cublas(n)) for n in (12, 13, 14)]
    for order in (clients, clients[::-1]):
        for mode in ("LOCAL", "GLOBAL"):
            printed = run(f"""
                clients = [open_(p, os.RTLD_{mode}) for p in {[str(path) for path in order]!r}]
                for on in (False, True, False):
                    window(on)
                    print(*[c.client_gemm() for c in clients])
            """)
            expected = " ".join(str(int(path.stem.removeprefix("client")) * 100) for path in order)
            assert printed.splitlines() == [expected] * 3


def test_a_reference_without_a_version_goes_past_us(shop: Workshop) -> None:
    """Linked against a stub without versions: the dynamic linker takes any version, and must not take ours."""
    stub = shop.library("stub/libcublas.so.13", f"int cublasSgemm_v2({GEMM}) {{ return 0; }}", soname="libcublas.so.13")
    client = shop.client("client.so", stub)
    stub.unlink()
    real = shop.cublas(13)
    (shop.folder / "stub" / "libcublas.so.13").symlink_to(real)
    assert run(f"print(open_({str(client)!r}).client_gemm())") == "1300"


def test_dlsym_through_a_handle_gets_the_wrapper_of_that_library(shop: Workshop) -> None:
    paths = {n: str(shop.cublas(n)) for n in (12, 13, 14)}
    other = shop.library("libother.so", f"int cublasSgemm_v2({GEMM}) {{ return 77; }}")
    printed = run(f"""
        paths = {paths!r}
        for n in (13, 12, 14):
            library = open_(paths[n])
            found = libc.dlsym(library._handle, b"cublasSgemm_v2")
            print(n, where(found), where(libc.dlsym(library._handle, b"cublasCreate_v2")),
                  where(libc.dlsym(library._handle, b"cublasDgemm_v2")))
            call = ctypes.CFUNCTYPE(c_int, c_void_p, *[c_int] * 5, c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p,
                                    c_void_p, c_int)(found)
            print(call(1, 0, 1, 16, 8, 4, 7, 1 << 20, 16, 1 << 21, 8, 12, 1 << 22, 16))
        print(where(libc.dlsym(open_({str(other)!r})._handle, b"cublasSgemm_v2")))
    """)
    assert printed.splitlines() == [
        "13 phos libcublas.so.13 none", "1300",
        "12 phos libcublas.so.12 none", "1200",
        "14 libcublas.so.14 libcublas.so.14 none", "1400",
        "libother.so",
    ]  # fmt: skip


def test_a_program_that_asks_whether_the_library_is_there_gets_the_truth(shop: Workshop) -> None:
    cublas, nccl = shop.cublas(13), shop.library("libnccl.so.2", nccl_source(2))
    body = f"""
        names = (b"cublasSgemm_v2", b"ncclAllReduce", b"ncclGroupStart", b"cudnnAddTensor")
        everyone = lambda: [where(libc.dlsym(handle, n)) for n in names for handle in (None, libc._handle)]
        print(everyone())
        local = [open_({str(cublas)!r}), open_({str(nccl)!r})]
        print(everyone())
        wide = [open_({str(cublas)!r}, os.RTLD_GLOBAL), open_({str(nccl)!r}, os.RTLD_GLOBAL)]
        print(everyone())
    """
    alone, under = run(body, preload=False).splitlines(), run(body).splitlines()
    assert alone[0] == str(["none"] * 8)
    assert under[:2] == alone[:2]
    there, found = ([name.strip(" [']") for name in lines[2].split(",")] for lines in (alone, under))
    assert set(there) == {"libcublas.so.13", "libnccl.so.2", "none"}
    assert [name in ("phos", real) for name, real in zip(found, there, strict=True)] == [True] * 8
    # Without a handle the answer depends on who asks, and is left alone.
    assert found[::2] == there[::2]


def test_a_second_copy_of_a_version_keeps_its_own_functions(shop: Workshop) -> None:
    first, second = shop.cublas(13, "first", 1), shop.cublas(13, "second", 2)
    client = shop.client("client.so", first)
    printed = run(f"""
        a, b = open_({str(first)!r}), open_({str(second)!r})
        kind = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_int)
        for library in (a, b):
            found = libc.dlsym(library._handle, b"cublasSaxpy_v2")
            print(where(found), kind(found)(1, 4, 7, 1 << 20, 1, 1 << 21, 1))
        print(open_({str(client)!r}).client_gemm())
    """)
    assert printed.splitlines() == ["phos 1", "libcublas.so.13 2", "1"]


def test_a_global_copy_comes_before_one_that_was_loaded_first(shop: Workshop) -> None:
    """As the dynamic linker searches: the same answers with and without us."""
    first, second = shop.cublas(13, "first", 1), shop.cublas(13, "second", 2)
    client = shop.client("client.so", first)
    body = f"""
        a = open_({str(first)!r})
        b = open_({str(second)!r}, os.RTLD_GLOBAL)
        print(open_({str(client)!r}).client_gemm())
    """
    assert run(body) == run(body, preload=False) == "2"


def test_a_library_that_is_closed_and_opened_again(shop: Workshop) -> None:
    client = shop.client("client.so", shop.cublas(13))
    printed = run(f"""
        libc.dlclose.argtypes = [c_void_p]
        for _ in range(3):
            client = open_({str(client)!r})
            print(client.client_gemm())
            libc.dlclose(client._handle)
        print(sum("libcublas" in line for line in open("/proc/self/maps")) > 0)
    """)
    assert printed.split() == ["1300"] * 3 + ["True"]


@pytest.mark.parametrize("mode", ["LOCAL", "GLOBAL"])
def test_another_library_that_stands_in_front_of_cublas(shop: Workshop, mode: str) -> None:
    """Preloaded as well, before us or after us: as without us, for the function it has and for those it has not."""
    cublas = shop.cublas(13)
    second = shop.library(
        "second.so",
        f"""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        int cublasSgemm_v2({GEMM}) {{
            int (*next)({GEMM}) = dlsym(RTLD_NEXT, "cublasSgemm_v2");
            return next ? next(h, ta, tb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc) + 1 : 5;
        }}""",
    )
    more = "int cublasSaxpy_v2(void *, int, void *, void *, int, void *, int);"
    source = f"""int cublasSgemm_v2({GEMM}); {more} int client_gemm(void) {{ return cublasSgemm_v2({GEMM_CALL}); }}
        int client_axpy(void) {{ return cublasSaxpy_v2((void *)1, 2, 0, 0, 1, 0, 1); }}"""
    client = shop.library("client.so", source, cublas, f"-Wl,-rpath,{cublas.parent}")
    body = f"client = open_({str(client)!r}, os.RTLD_{mode})\nprint(client.client_gemm(), client.client_axpy())"
    alone = run(body, LD_PRELOAD=str(second))
    assert alone == ("5 1300" if mode == "LOCAL" else "1301 1300")
    for order in ((LIBPHOS, second), (second, LIBPHOS)):
        assert run(body, LD_PRELOAD=" ".join(map(str, order))) == alone


def test_a_successful_dlsym_leaves_no_error_behind(shop: Workshop) -> None:
    source = """
        #include <dlfcn.h>
        int client_ask(const char *path) {
            void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            dlerror();
            return !handle || !dlsym(handle, "cublasSgemm_v2") || dlerror() != 0;
        }"""
    asker = shop.library("asker.so", source)
    for path in (shop.cublas(13, "first"), shop.cublas(13, "second"), shop.cublas(12)):
        assert run(f"print(open_({str(asker)!r}).client_ask({str(path)!r}.encode()))") == "0"


def test_linked_nccl(shop: Workshop) -> None:
    nccl = shop.library("libnccl.so.2", nccl_source(2))
    client = shop.nccl_client("client.so", nccl, f"-Wl,-rpath,{nccl.parent}")
    for mode in ("LOCAL", "GLOBAL"):
        printed = run(f"""
            client = open_({str(client)!r}, os.RTLD_{mode})
            for on in (False, True, False):
                window(on)
                print(client.client_reduce(), client.client_reduce())
        """)
        assert printed.split() == ["2"] * 6


def test_no_nccl_at_all_is_not_initialised(shop: Workshop) -> None:
    client = shop.nccl_client("client.so")
    printed = run(f"""
        client = open_({str(client)!r})
        print(client.client_reduce())
        window(True)
        print(client.client_reduce())
    """)
    assert printed.split() == ["2", "2"]


@pytest.mark.parametrize("first", ["embedded", "shared"])
def test_programs_that_carry_an_nccl_of_their_own(shop: Workshop, first: str) -> None:
    """One library has NCCL inside, another uses the shared one; both came before or after the other's first call."""
    nccl = shop.library("libnccl.so.2", nccl_source(22))
    shared = shop.nccl_client("shared.so", nccl, f"-Wl,-rpath,{nccl.parent}")
    embedded = shop.nccl_client("embedded.so", more=nccl_source(33).replace("#include", "//"))
    order = [embedded, shared] if first == "embedded" else [shared, embedded]
    body = f"""
        opened = []
        for path in {[str(path) for path in order]!r}:
            opened.append(open_(path))
            print(*[library.client_reduce() for library in opened])
        for on in (True, False):
            window(on)
            print(*[library.client_reduce() for library in opened])
    """
    numbers = ["33", "22"] if first == "embedded" else ["22", "33"]
    both = " ".join(numbers)
    assert run(body.replace("window(on)", ""), preload=False).splitlines() == [numbers[0], both, both, both]
    assert run(body).splitlines() == [numbers[0], both, both, both]


def test_trampolines_that_look_nccl_up_do_not_meet_themselves(shop: Workshop) -> None:
    """A library that exports functions of these names which ask dlsym and go on there, as generated stubs do."""
    nccl = shop.library("libnccl.so.2", nccl_source(44))
    stub = shop.library(
        "stub.so",
        f"""
        #include <dlfcn.h>
        #include <stddef.h>
        int ncclAllReduce({REDUCE}) {{
            static void *handle;
            if (!handle) handle = dlopen("{nccl}", RTLD_NOW | RTLD_LOCAL);
            return ((int (*)(void *, void *, size_t, int, int, void *, void *))dlsym(handle, "ncclAllReduce"))(
                s, r, count, type, op, comm, stream);
        }}
        int client_reduce(void) {{ return ncclAllReduce((void *)1, (void *)2, 3, 4, 5, NULL, NULL) + 1; }}
        """,
    )
    printed = run(f"""
        stub = open_({str(stub)!r})
        for on in (False, True, False):
            window(on)
            print(stub.client_reduce(), stub.client_reduce())
    """)
    assert printed.split() == ["45"] * 6


def test_switched_off_nothing_is_replaced_and_everything_works(shop: Workshop) -> None:
    cublas = shop.cublas(13)
    client = shop.client("client.so", cublas)
    printed = run(
        f"""
        client, library = open_({str(client)!r}), open_({str(cublas)!r})
        window(True)
        print(where(libc.dlsym(library._handle, b"cublasSgemm_v2")), client.client_gemm())
        """,
        PHOS_LIBRARIES="off",
    )
    assert printed.split() == ["libcublas.so.13", "1300"]


def test_many_threads_call_first_at_once(shop: Workshop) -> None:
    client = shop.client("client.so", shop.cublas(13))
    printed = run(f"""
        client = open_({str(client)!r})
        barrier = threading.Barrier(16)
        results = []
        def work():
            barrier.wait()
            results.extend(client.client_gemm() for _ in range(100))
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(results), set(results))
    """)
    assert printed == "1600 {1300}"


def test_a_constructor_may_call_cublas(shop: Workshop) -> None:
    """While the dynamic linker holds its lock: nobody may wait for that with a lock of ours."""
    cublas = shop.cublas(13)
    source = f"""int cublasSgemm_v2({GEMM}); static int answer;
        __attribute__((constructor)) static void early(void) {{ answer = cublasSgemm_v2({GEMM_CALL}); }}
        int client_answer(void) {{ return answer; }}"""
    client = shop.library("early.so", source, cublas, f"-Wl,-rpath,{cublas.parent}")
    assert run(f"print(open_({str(client)!r}).client_answer())") == "1300"


def test_exports_are_the_list_under_versions_that_dlsym_does_not_see() -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", LIBPHOS], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[2] for line in listing.splitlines() if "@" in line}
    expected = {
        f"{function.name}@{instance.version}"
        for instance in gen_library.instances(LIBRARIES)
        if instance.linked
        for function in FUNCTIONS
        if function.library == instance.library.name
    }
    assert exported == expected
    assert len(expected) > 500
    assert not any("hook_" in line for line in listing.splitlines())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="counts instructions of x86-64")
def test_without_a_window_a_call_costs_a_test_a_branch_and_a_jump() -> None:
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", LIBPHOS], capture_output=True, text=True, check=True
    )
    bodies = re.findall(r"^[0-9a-f]+ <(hook_(?:cublas|cudnn|nccl)\w*|(?:cublas|cudnn|nccl)\w+@\S+)>:\n((?:.+\n)+)",
                        listing.stdout, re.MULTILINE)  # fmt: skip
    assert len(bodies) > 500
    for name, body in bodies:
        instructions = [line.split("\t")[1].split()[0] for line in body.splitlines()]
        instructions = [word for word in instructions if not word.startswith(("nop", "cs", "data16", "xchg"))]
        group = "ncclGroup" in name
        assert instructions == (["endbr64", "jmp"] if group else ["endbr64", "testb", "jne", "jmp"]), name


@pytest.mark.parametrize(
    "line, message",
    [
        ("cublasX | cublas | void *h", "3 columns"),
        ("cublasX | cufft | void *h | in h;", "no library cufft"),
        ("cublasX | cublas | float x | in x;", "'float x' is no parameter"),
        ("cublasX | cublas | void *h | in y;", "no parameter y"),
        ("cublasX | cublas | void *h | inout h;", "is no role"),
        ("cublasX | cublas | void *h | in h = span_bytes(T);", "bits of cublasX are not known"),
        ("cublasX | cublas | void *status | in status;", "cannot be called status"),
        ("cublasX | cublas | void *h | in h;\ncublasX | cublas | void *h | in h;", "comes twice"),
        ("cublasX | cublas | void *h | " + "in h; " * 17, "17 roles"),
    ],
)
def test_a_malformed_list_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "list.def"
    path.write_text("@library cublas | libcublas.so | 13 | versioned | 1\n" + line + "\n")
    with pytest.raises(ValueError, match=r"list\.def, line \d: .*" + message):
        gen_library.parse(path)


def test_the_version_script_has_every_version_and_the_plain_one_first() -> None:
    script = (ROOT / "frontend" / "libphos.map").read_text()
    assert gen_library.missing_versions(LIBRARIES, script) == []
    assert gen_library.missing_versions(LIBRARIES, script.replace("libcudnn.so.9 {", "other {")) == ["libcudnn.so.9"]
    assert gen_library.missing_versions(LIBRARIES, "first { };\n" + script) == [gen_library.PLAIN]
