"""Drivers older than the list of entry points, and newer: what is found under the frontend is what they have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.frontend_fake import BUILD, CUDA_INCLUDE, LIBPHOS, ROOT, environment_for

sys.path.insert(0, str(ROOT / "frontend"))
import gen_api

OBJECTS = sorted(path for path in (BUILD / "obj/softgpu").glob("*.o") if (ROOT / f"softgpu/{path.stem}.c").exists())
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (LIBPHOS.exists() and OBJECTS and (CUDA_INCLUDE / "cuda.h").exists()), reason="not built"),
]
ENTRIES = gen_api.parse(ROOT / "frontend" / "cuda_api.def")
NEWEST = gen_api.newest(ENTRIES)
FLAGS = [f"-fsanitize={os.environ['PHOS_SANITIZE']}"] if os.environ.get("PHOS_SANITIZE") else []

# Prints a line a question: the error, and whose the answer is, under which name.
ASK = """
import ctypes, sys
class Info(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
libc.dlsym.argtypes, libc.dlsym.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64,
                       ctypes.c_void_p)(libc.dlsym(driver._handle, b"cuGetProcAddress_v2"))
def whose(address):
    if not address:
        return "nobody -"
    info = Info()
    libc.dladdr(address, ctypes.byref(info))
    return ("phos " if b"libphos" in info.path else "driver ") + (info.name or b"?").decode()
for line in sys.stdin:
    name, version = line.split()
    found = ctypes.c_void_p()
    if version == "0":  # by every way that dlsym has
        handles = (driver._handle, None, ctypes.CDLL(None)._handle)
        print(0, *{whose(libc.dlsym(handle, name.encode())) for handle in handles})
    else:
        result = get(name.encode(), ctypes.byref(found), int(version), 0, None)
        print(result, whose(None if result else found.value))
"""


def _link(folder: Path, *arguments: str | Path) -> Path:
    """The software GPU once more, put together another way."""
    command = ["gcc", *FLAGS, "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, *arguments, "-lm", "-ldl"], check=True)
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver of CUDA 13.0, which does not export what came later."""
    folder = tmp_path_factory.mktemp("old")
    hidden = " ".join(f"{entry.symbol};" for entry in ENTRIES if entry.since > 13000)
    (folder / "map").write_text(f"{{ global: *; local: {hidden} }};\n")
    return _link(folder, f"-Wl,--version-script={folder / 'map'}", *OBJECTS)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver of the CUDA after the list's, with a new entry point and a new form of an old one."""
    folder = tmp_path_factory.mktemp("new")
    later = NEWEST + 10
    (folder / "list.def").write_text(
        (ROOT / "frontend/cuda_api.def").read_text()
        + f"cuLaunchHostFunc_v3 | cuLaunchHostFunc | {later} | legacy | gate | CUstream hStream, int more\n"
        + f"cuNewThing | cuNewThing | {later} | - | gate | int more\n"
    )
    command = [sys.executable, ROOT / "softgpu/gen_stubs.py", "--list", folder / "list.def", "--output", folder]
    subprocess.run(command, check=True)
    flags = [*FLAGS, "-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread"]
    include = [f"-I{folder}", f"-I{BUILD / 'gen'}", f"-I{ROOT / 'softgpu'}", "-isystem", str(CUDA_INCLUDE)]
    made = [folder / "api.o", *(path for path in OBJECTS if path.stem != "api")]
    subprocess.run(["gcc", *flags, *include, "-c", "-o", made[0], ROOT / "softgpu/api.c"], check=True)
    return _link(folder, *made)


def _answers(driver: Path, version: int, questions: list[tuple[str, int]]) -> list[str]:
    environment = environment_for(driver / "nobody.sock") | {
        "LD_LIBRARY_PATH": str(driver),
        "SOFTGPU_DRIVER_VERSION": str(version),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input="\n".join(f"{name} {asked}" for name, asked in questions),
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_header_that_is_fetched_is_of_the_lists_cuda() -> None:
    assert f"local version={gen_api.spelt(NEWEST)} number={NEWEST} " in (ROOT / "install.sh").read_text()


def test_what_an_older_driver_lacks_is_not_found(old: Path) -> None:
    later = [entry for entry in ENTRIES if entry.since > 13000]
    assert len(later) > 50
    names = sorted({entry.name for entry in later} - {entry.name for entry in ENTRIES if entry.since <= 13000})
    assert _answers(old, 13000, [(entry.symbol, 0) for entry in later]) == ["0 nobody -"] * len(later)
    assert _answers(old, 13000, [(name, NEWEST) for name in names]) == ["500 nobody -"] * len(names)


def test_of_what_an_older_driver_has_in_another_form_that_one_is_found(old: Path) -> None:
    """A newer runtime library asks for a newer form, which may take other arguments than the older one."""
    forms = {
        "cuLaunchHostFunc": "cuLaunchHostFunc",
        "cuGraphAddNode": "cuGraphAddNode_v2",
        "cuGraphNodeSetParams": "cuGraphNodeSetParams",
        "cuMulticastBindMem": "cuMulticastBindMem",
        "cuMulticastBindAddr": "cuMulticastBindAddr",
    }
    answers = _answers(old, 13000, [(name, NEWEST) for name in forms])
    assert answers == [f"0 phos {symbol}" for symbol in forms.values()]


def test_an_older_driver_answers_an_error_to_who_is_linked_against_a_newer_one(old: Path, tmp_path: Path) -> None:
    source = tmp_path / "linked.c"
    source.write_text(
        """
        int cuInit(unsigned); int cuDeviceGetCliqueCount(unsigned long *, int); int cuLogicalEndpointDestroy(unsigned);
        int main(void) {
            unsigned long count;
            return cuInit(0) || cuDeviceGetCliqueCount(&count, 0) != 801 || cuLogicalEndpointDestroy(1) != 801;
        }"""
    )
    program = tmp_path / "linked"
    subprocess.run(["gcc", "-o", program, source, BUILD / "softgpu/libcuda.so.1"], check=True)
    environment = environment_for(tmp_path / "nobody.sock") | {"LD_LIBRARY_PATH": str(old)}
    assert subprocess.run([program], env=environment, timeout=30, check=False).returncode == 0


def test_a_newer_driver_keeps_what_is_not_in_the_list(new: Path) -> None:
    """Its prototype is unknown. What is in the list is found as before, whatever version is asked for."""
    later = NEWEST + 10
    questions = [
        ("cuLaunchHostFunc", NEWEST), ("cuLaunchHostFunc", later), ("cuNewThing", later), ("cuNewThing", NEWEST),
        ("cuGraphAddNode", later), ("cuNewThing", 0), ("cuLaunchHostFunc_v3", 0), ("cuLaunchHostFunc_v2", 0),
    ]  # fmt: skip
    assert _answers(new, later, questions) == [
        "0 phos cuLaunchHostFunc_v2",
        "0 driver cuLaunchHostFunc_v3",
        "0 driver cuNewThing",
        "500 nobody -",
        "0 phos cuGraphAddNode_v3",
        "0 driver cuNewThing",
        "0 driver cuLaunchHostFunc_v3",
        "0 phos cuLaunchHostFunc_v2",
    ]
