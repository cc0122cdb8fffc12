"""Compile kernels.cu and record the disassembly beside it, for tests on machines that have no disassembler.

Run it with NVRTC installed and nvdisasm found (see disassembler.py) after kernels.cu was changed, or to see what
another version of either makes of it: `python tests/unit/spec/sass/record.py`.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100a")

_DROPPED = re.compile(
    r"\s*(//|\.align|\.other|\.size|\.global|\.weak|\.elftype|\.sectioninfo|\.sectionflags|/\*\w+\*/\s+NOP)"
)


def find_nvrtc() -> Path | None:
    """NVRTC's library as the package from PyPI holds it, or None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for found in sorted(glob.glob(f"{folder}/**/libnvrtc.so.1[2-9]", recursive=True), reverse=True):
            return Path(found)
    return None


def compile_kernels(architecture: str, source: str | None = None) -> tuple[bytes, str]:
    """The cubin and the PTX of a source, kernels.cu by default."""
    library = find_nvrtc()
    if library is None:
        raise RuntimeError("NVRTC is not installed: pip install nvidia-cuda-nvrtc.")
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    text = (HERE / "kernels.cu").read_text() if source is None else source
    unit = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(unit), text.encode(), b"kernels.cu", 0, None, None), "create")
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    array = (ctypes.c_char_p * len(options))(*options)
    if nvrtc.nvrtcCompileProgram(unit, len(options), array):
        raise RuntimeError(_fetch(nvrtc, "ProgramLog", unit).decode())
    return _fetch(nvrtc, "CUBIN", unit), _fetch(nvrtc, "PTX", unit).rstrip(b"\0").decode()


def _fetch(nvrtc: ctypes.CDLL, what: str, unit: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(unit, ctypes.byref(size)), what)
    data = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(unit, data), what)
    return data.raw


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status} at {what}.")


def main() -> None:
    """Write one listing and one file of layouts for each architecture."""
    from phos.gpu_engine.spec import cubin, disassembler, sass_disassembly, sass_elf

    tool = disassembler.find_disassembler()
    if tool is None:
        sys.exit("There is no nvdisasm.")
    for architecture in ARCHITECTURES:
        image, _ = compile_kernels(architecture)
        infos = cubin.infos(image)
        lines = sass_disassembly.disassemble(image, infos, tool).splitlines()
        kept = [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip() and not _DROPPED.match(line)]
        (HERE / f"{architecture}.txt").write_text("\n".join(kept) + "\n")
        layouts = {
            name: {"base": info.base, "size": info.size, "parameters": [[p.offset, p.size] for p in info.parameters]}
            for name, info in infos.items()
        }
        slots = {str(place): symbol for place, symbol in sass_elf.address_slots(image).items()}
        document = {"architecture": int(re.sub(r"\D", "", architecture)), "slots": slots, "kernels": layouts}
        (HERE / f"{architecture}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        print(f"{architecture}: {len(kept)} lines, {len(layouts)} kernels")


if __name__ == "__main__":
    main()
