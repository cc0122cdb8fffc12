"""The four ways to the driver, and programs that have nothing to do with it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from tests.unit.frontend_fake import BUILD, LIBPHOS, PRELUDE, ROOT, SOFTGPU, environment_for

sys.path.insert(0, str(ROOT / "frontend"))
import gen_api
import own_code

DRIVER = SOFTGPU / "libcuda.so.1"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (LIBPHOS.exists() and DRIVER.exists()), reason="not built"),
]
ENTRIES = gen_api.parse(ROOT / "frontend" / "cuda_api.def")


def _run(body: str, *, preload: bool = True, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=environment_for(Path("/nonexistent/phosd.sock"), preload=preload) | environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Where an address lies: "phos", "driver", "none", or another library's name.
WHERE = """
import ctypes, sys
class Info(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
libc.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
libc.dlsym.restype = ctypes.c_void_p
def where(address):
    if not address:
        return "none"
    info = Info()
    assert libc.dladdr(address, ctypes.byref(info))
    name = info.path.decode().rsplit("/", 1)[-1]
    return {"libphos.so": "phos", "libcuda.so.1": "driver"}.get(name, name)
"""


def test_every_hooked_spelling_is_exported() -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", LIBPHOS], capture_output=True, text=True, check=True).stdout
    # With a version: wrappers of library functions, and the versions themselves (test_frontend_library.py).
    exported = {line.split()[2] for line in listing.splitlines() if "@" not in line and line.split()[1] != "A"}
    hooked = {e.symbol for e in ENTRIES if e.hooked}
    # What PyTorch's allocator reports to (test_frontend_parts.py).
    others = {"dlsym", "mmap", "syscall", "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"}
    assert hooked | others == {name for name in exported if not name.startswith("phos_")}


def test_dlsym_answers_with_wrappers_for_the_driver_only(tmp_path: Path) -> None:
    other = tmp_path / "other.c"
    other.write_text("int cuLaunchKernel(void) { return 42; }\nint cudnnCreate(void) { return 43; }\n")
    library = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, other], check=True)
    printed = _run(WHERE + f"""
other = ctypes.CDLL({str(library)!r})
print(where(libc.dlsym(None, b"cuInit")), where(libc.dlsym(other._handle, b"cuLaunchKernel")),
      where(libc.dlsym(other._handle, b"cudnnCreate")))
driver = ctypes.CDLL("libcuda.so.1")
handle = driver._handle
for name in (b"cuLaunchKernel", b"cuLaunchKernel_ptsz", b"cuMemAlloc_v2", b"cuInit", b"cuGetProcAddress_v2",
             b"cuDeviceGetCount", b"cuGetExportTable", b"cuNoSuchThing"):
    print(name.decode(), where(libc.dlsym(handle, name)))
print(where(libc.dlsym(other._handle, b"cuLaunchKernel")))
""")  # fmt: skip
    assert printed.splitlines() == [
        "none libother.so libother.so",
        "cuLaunchKernel phos",
        "cuLaunchKernel_ptsz phos",
        "cuMemAlloc_v2 phos",
        "cuInit phos",
        "cuGetProcAddress_v2 phos",
        "cuDeviceGetCount driver",
        "cuGetExportTable driver",
        "cuNoSuchThing none",
        "libother.so",
    ]


@pytest.mark.parametrize("handle", ["driver._handle", "None"])
def test_who_finds_a_symbol_hears_of_no_error(tmp_path: Path, handle: str) -> None:
    """Of an older driver we look for more than there is, which is no matter of a program that asks dlerror."""
    source = tmp_path / "older.c"
    source.write_text("int cuInit(unsigned int flags) { return flags; }\n")
    older = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", older, source], check=True)
    printed = _run(WHERE + f"""
driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
dlerror = libc.dlerror
dlerror.restype = ctypes.c_char_p
for name in (b"cuInit", b"cuInit", b"cuLaunchKernel"):
    print(where(libc.dlsym({handle}, name)), "silence" if dlerror() is None else "error")
""", LD_LIBRARY_PATH=str(tmp_path))  # fmt: skip
    assert printed.splitlines() == ["phos silence", "phos silence", "none error"]


@pytest.mark.parametrize("driver", [13000, 13020, 13050])
def test_cu_get_proc_address_gives_the_wrapper_of_the_right_form(driver: int) -> None:
    """For every name, version and stream kind: the wrapper of exactly what the driver alone would give."""
    body = (
        WHERE
        + """
driver = ctypes.CDLL("libcuda.so.1")
get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64,
                       ctypes.POINTER(ctypes.c_int))(libc.dlsym(driver._handle, b"cuGetProcAddress_v2"))
def symbol_of(address):
    info = Info()
    libc.dladdr(address, ctypes.byref(info))
    return info.name.decode() if info.name else "?"
import os
for name in sys.stdin.read().split():
    for version in (2000, 3020, 7000, 11000, 12000, 12080, 13000, 13010, 13040, 13060):
        for flags in (0, 1, 2):
            p, status = ctypes.c_void_p(), ctypes.c_int()
            r = get(name.encode(), ctypes.byref(p), version, flags, ctypes.byref(status))
            found = p.value if not r else None
            print(name, version, flags, r, where(found), symbol_of(found) if found else "-")
"""
    )
    names = sorted({e.name for e in ENTRIES})
    pretended = {"SOFTGPU_DRIVER_VERSION": str(driver)}
    outputs = []
    for preload in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", body],
            input="\n".join(names), capture_output=True, text=True, timeout=60, check=False,
            env=environment_for(Path("/nonexistent/phosd.sock"), preload=preload) | pretended,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append([line.split() for line in done.stdout.splitlines()])
    hooked = {e.symbol for e in ENTRIES if e.hooked}
    wrapped = 0
    assert len(outputs[0]) == len(outputs[1]) > 5000
    for alone, under in zip(*outputs, strict=True):
        assert alone[:4] == under[:4]
        if alone[5] in hooked:
            assert under[4] == "phos", (alone, under)
            assert under[5] == alone[5], (alone, under)
            wrapped += 1
        else:
            assert under[4:] == alone[4:], (alone, under)
    assert wrapped > 3000


def test_a_program_linked_against_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "linked.c"
    source.write_text(
        """
        #include <stdio.h>
        int cuInit(unsigned); int cuDeviceGet(int *, int); int cuDevicePrimaryCtxRetain(void **, int);
        int cuCtxSetCurrent(void *); int cuMemAlloc_v2(unsigned long long *, unsigned long);
        int main(void) {
            int device; void *context; unsigned long long p = 0;
            if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device)
                || cuCtxSetCurrent(context) || cuMemAlloc_v2(&p, 100)) return 1;
            printf("%llx\\n", p >> 40);
            return 0;
        }"""
    )
    program = tmp_path / "linked"
    subprocess.run(["gcc", "-o", program, source, DRIVER], check=True)
    environment = environment_for(Path("/nonexistent/phosd.sock"))
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "60"), done.stderr


@pytest.mark.parametrize("command", [["/bin/ls", "/"], ["/bin/bash", "-c", "echo $((1 + 2)) | cat"], ["/bin/true"]])
def test_other_programs_are_left_alone(command: list[str]) -> None:
    outputs = []
    for preload in (False, True):
        environment = environment_for(Path("/nonexistent/phosd.sock"), preload=preload)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        outputs.append((done.stdout, done.stderr))
    assert outputs[0] == outputs[1]


def test_no_thread_and_no_socket_before_cu_init() -> None:
    printed = _run(PRELUDE + """
count = lambda: (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
before = count()
cu.cuDriverGetVersion()
same = count() == before
ok(cu.cuInit(0))
time.sleep(0.05)
tasks = os.listdir("/proc/self/task")
say(same, "phos" in [open("/proc/self/task/" + t + "/comm").read().strip() for t in tasks])
""")  # fmt: skip
    assert printed.split() == ["True", "True"]


def test_rtld_next_means_the_callers_next(tmp_path: Path) -> None:
    """A second preloaded library that wraps a function by dlsym(RTLD_NEXT): we must not be taken for the caller."""
    source = tmp_path / "second.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <sys/types.h>
        pid_t getppid(void) {
            pid_t (*next)(void) = dlsym(RTLD_NEXT, "getppid");
            return next == getppid ? -1 : next() + 1000000000;
        }"""
    )
    library = tmp_path / "libsecond.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    for order in (f"{LIBPHOS} {library}", f"{library} {LIBPHOS}"):
        printed = _run("import os; print(os.getppid())", LD_PRELOAD=order)
        assert int(printed) == os.getpid() + 1000000000


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the older version has another number elsewhere")
def test_both_versions_of_dlsym_are_answered(tmp_path: Path) -> None:
    source = tmp_path / "versions.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        #include <string.h>
        extern void *old(void *, const char *);
        __asm__(".symver old, dlsym@GLIBC_2.2.5");
        static int ours(void *address) {
            Dl_info info;
            return dladdr(address, &info) && strstr(info.dli_fname, "libphos.so") != NULL;
        }
        int main(void) {
            void *driver = dlopen("libcuda.so.1", RTLD_NOW);
            printf("%d %d\\n", ours(old(driver, "cuLaunchKernel")), ours(dlsym(driver, "cuLaunchKernel")));
            return 0;
        }"""
    )
    program = tmp_path / "versions"
    subprocess.run(["gcc", "-o", program, source], check=True)
    environment = environment_for(Path("/nonexistent/phosd.sock"))
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["1", "1"]


SLOW_DLSYM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
volatile int step; /* 1: it waits in the middle of finding the driver, 2: it is to go on soon */
__attribute__((noinline)) void *dlsym(void *handle, const char *name) {
    void *(*next)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!strcmp(name, "cuLaunchKernel") && !step) {
        step = 1;
        while (step == 1)
            usleep(1000);
        usleep(200000);
    }
    void *volatile found = next(handle, name);
    return found;
}
"""

ASKING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
extern volatile int step;
__attribute__((constructor)) static void ask(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    step = 2;
    if (!dlsym(driver, "cuInit"))
        _exit(2);
}
"""

FINDING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
extern volatile int step;
static void *driver;
static void *find(void *unused) {
    return dlsym(driver, "cuInit") ? unused : NULL;
}
int main(int argc, char **words) {
    pthread_t thread;
    void *found;
    int status;
    alarm(10);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    pthread_create(&thread, NULL, find, &driver);
    while (!step)
        usleep(1000);
    if (argc > 1 && !dlopen(words[1], RTLD_NOW))
        return 3;
    if (argc == 1) {
        pid_t child = fork();
        if (!child) {
            alarm(5);
            _exit(dlsym(driver, "cuInit") ? 0 : 4);
        }
        if (waitpid(child, &status, 0) != child || status)
            return 5;
        step = 2;
    }
    pthread_join(thread, &found);
    return found ? 0 : 6;
}
"""


@pytest.mark.parametrize("how", ["a library's constructor", "a forked child"])
def test_who_needs_the_driver_while_another_thread_finds_it_does_not_wait(tmp_path: Path, how: str) -> None:
    """The other may need the dynamic linker's lock, which who runs a constructor has; a child has no other thread."""
    (tmp_path / "versions").write_text("GLIBC_2.34 { dlsym; };")
    for name, text in (("slow.c", SLOW_DLSYM), ("asking.c", ASKING), ("finding.c", FINDING)):
        (tmp_path / name).write_text(text)
    slow, asking, program = tmp_path / "slow.so", tmp_path / "asking.so", tmp_path / "finding"
    script = f"-Wl,--version-script={tmp_path / 'versions'}"
    subprocess.run(["gcc", "-shared", "-fPIC", script, "-o", slow, tmp_path / "slow.c"], check=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", asking, tmp_path / "asking.c"], check=True)
    subprocess.run(["gcc", "-pthread", "-o", program, tmp_path / "finding.c", slow], check=True)
    environment = environment_for(Path("/nonexistent/phosd.sock")) | {"LD_PRELOAD": f"{LIBPHOS} {slow}"}
    words = [program, asking] if how == "a library's constructor" else [program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_library_needs_no_glibc_newer_than_ubuntu_22_04() -> None:
    listing = subprocess.run(["objdump", "-T", LIBPHOS], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", listing)}
    assert max(versions) <= (2, 35)
    needed = subprocess.run(["readelf", "-d", LIBPHOS], capture_output=True, text=True, check=True).stdout
    assert "protobuf" not in needed
    assert "libcuda" not in needed


def test_wrappers_of_frequent_calls_lie_together() -> None:
    """Programs run so much else between two calls that each page, and each line of a cache, is fetched anew."""
    with open(LIBPHOS, "rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        found = {s.name: (s["st_value"], s["st_size"]) for s in table.iter_symbols()}
    places = [found[f"hook_{name}"] for name in own_code.FREQUENT]
    size = sum(size for _, size in places)
    first, last = min(at for at, _ in places), max(at + size for at, size in places)
    assert size < 150 * len(places), "what an open gate does not need lies elsewhere"
    assert last - first < 1.5 * size + 4096


@pytest.mark.parametrize(
    "line, message",
    [
        ("cuX | cuX | 2000 | - | gate", "5 columns"),
        ("cuX | cuX | 2000 | - | gate | int", "cannot tell type from name"),
        ("cuX | cuX | 2000 | - | gate | int a\ncuX | cuX | 2000 | - | gate | int a", "comes twice"),
    ],
)
def test_a_malformed_list_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "list.def"
    path.write_text("# heading\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"list\.def, line \d: .*" + message):
        gen_api.parse(path)


def test_calls_of_a_lost_driver_answer_an_error(tmp_path: Path) -> None:
    """A program that calls an exported symbol although no driver is there gets an error, not a crash."""
    library = ctypes.CDLL(str(LIBPHOS))
    assert BUILD.exists()
    assert library.cuCtxSynchronize() == 3
    assert library.cuInit(0) == 3
