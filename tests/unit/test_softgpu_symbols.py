"""The software GPU exports the whole driver API, and finds every entry point by name and version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .softgpu_host import LIBRARY, ROOT, needs_softgpu, run

pytestmark = needs_softgpu


def listed() -> list[list[str]]:
    lines = (ROOT / "frontend" / "cuda_api.def").read_text().splitlines()
    return [
        [column.strip() for column in line.split("|")] for line in lines if line.strip() and not line.startswith("#")
    ]


def test_every_entry_point_of_the_list_is_exported_and_nothing_else() -> None:
    out = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in out.splitlines()}
    # And one name of its own, by which phosd tells it from NVIDIA's, and what it stands in for of NVML.
    own = {"softgpu_version", "nvmlInit_v2", "nvmlDeviceGetCount_v2"}
    assert exported == {entry[0] for entry in listed()} | own


def test_entry_points_are_found_by_version_and_stream_flavour() -> None:
    run(
        """
        lib = ctypes.CDLL("libcuda.so.1")
        def find(name, version, flags=0):
            pointer, found = ctypes.c_void_p(), ctypes.c_int(-1)
            where, how = ctypes.byref(pointer), ctypes.byref(found)
            result = lib.cuGetProcAddress_v2(name, where, version, ctypes.c_uint64(flags), how)
            return result, pointer.value, found.value
        def address(symbol):
            return ctypes.cast(getattr(lib, symbol), ctypes.c_void_p).value
        for name, version, flags, symbol in [
            (b"cuMemAlloc", 13000, 0, "cuMemAlloc_v2"), (b"cuMemAlloc", 3010, 0, "cuMemAlloc"),
            (b"cuMemcpyHtoDAsync", 13000, 0, "cuMemcpyHtoDAsync_v2"),
            (b"cuMemcpyHtoDAsync", 13000, 2, "cuMemcpyHtoDAsync_v2_ptsz"),
            (b"cuGetProcAddress", 11030, 0, "cuGetProcAddress"), (b"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ]:
            assert find(name, version, flags) == (0, address(symbol), 0), name
        assert find(b"cuCheckpointProcessLock", 12000) == (500, None, 2)  # the version is not sufficient
        assert find(b"cuNoSuchThing", 13000) == (500, None, 1)
        """
    )


def test_an_older_driver_lacks_what_came_later() -> None:
    run(
        """
        lib = ctypes.CDLL("libcuda.so.1")
        version, pointer, found = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        assert lib.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value == 12000
        where, how, name = ctypes.byref(pointer), ctypes.byref(found), b"cuCheckpointProcessLock"
        assert lib.cuGetProcAddress_v2(name, where, 13000, ctypes.c_uint64(0), how) == 500
        """,
        SOFTGPU_DRIVER_VERSION=12000,
    )


def test_what_is_not_simulated_answers_not_supported_and_calls_before_init_are_refused() -> None:
    run(
        """
        lib = ctypes.CDLL("libcuda.so.1")
        assert lib.cuMulticastCreate(None, None) == 3 and lib.cuCtxSynchronize() == 3
        start()
        assert lib.cuMulticastCreate(None, None) == 801
        assert cu.cuGetErrorName(E.CUDA_ERROR_NOT_SUPPORTED)[1] == b"CUDA_ERROR_NOT_SUPPORTED"
        """
    )


def test_the_generator_names_the_line_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "bad.def").write_text("cuInit | cuInit | 2000\n")
    script, bad = str(ROOT / "softgpu" / "gen_stubs.py"), str(tmp_path / "bad.def")
    command = [sys.executable, script, "--list", bad, "--output", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "bad.def:1: expected 6 columns" in done.stderr


@pytest.mark.parametrize(("devices", "result"), [(0, "CUDA_ERROR_NO_DEVICE"), (3, "CUDA_SUCCESS")])
def test_the_number_of_devices_is_a_setting(devices: int, result: str) -> None:
    out = run("print(cu.cuInit(0)[0].name, cu.cuDeviceGetCount()[1])", SOFTGPU_DEVICES=devices)
    assert out.split()[0] == result
    if devices:
        assert out.split()[1] == str(devices)


def test_devices_look_like_ones_frameworks_accept() -> None:
    run(
        """
        start()
        a = cu.CUdevice_attribute
        names = (
            "COMPUTE_CAPABILITY_MAJOR", "MULTIPROCESSOR_COUNT", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "MEMORY_POOLS_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "UNIFIED_ADDRESSING",
            "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM")
        asked = {n: ok(cu.cuDeviceGetAttribute(getattr(a, "CU_DEVICE_ATTRIBUTE_" + n), 1)) for n in names}
        assert list(asked.values()) == [9, 132, 1, 1, 1, 1, 1], asked
        assert ok(cu.cuDeviceGetUuid(0)).bytes != ok(cu.cuDeviceGetUuid(1)).bytes
        assert cu.cuDeviceGetAttribute(a.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 2)[0] == E.CUDA_ERROR_INVALID_DEVICE
        """,
        SOFTGPU_DEVICES=2,
    )
