"""The questions `phos-gpu doctor` asks this machine. Each probe changes nothing and yields findings."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine import installation as places
from phos.gpu_engine import procfs, ring
from phos.gpu_engine.daemon.paths import refuse_unfit, socket_path
from phos.gpu_engine.errors import PhosError, UsageError
from phos.images.mapping import can_collapse
from phos.images.native import home

SYS_USERFAULTFD = 323  # x86-64
SYS_MEMBARRIER = 324
UFFDIO_API = 0xC018AA3F  # _IOWR(0xAA, 0x3F, struct uffdio_api), 24 bytes
UFFD_API = 0xAA
UFFD_FEATURE_WP_ASYNC = 1 << 15
MEMBARRIER_PRIVATE_EXPEDITED = 1 << 3
SOFT_DIRTY = 1 << 55
CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SYS_PTRACE": 19, "CAP_CHECKPOINT_RESTORE": 40}
OLDEST_CRIU = (4, 1)
OLDEST_DRIVER = 570  # the first with the checkpoint API
DESCRIPTORS = 16384  # one per block of GPU memory: hundreds in a PyTorch process, thousands in a fragmented one
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One row: state is ok, warning (works, but) or missing (needed); remedy says what to do, if anything."""

    name: str
    state: str
    found: str
    remedy: str = ""


def _read(path: str) -> str:
    """A file of /proc or /sys, stripped; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _run(*command: str, timeout: float = 20) -> tuple[int, str]:
    """Exit status (-1: not started or too slow) and all output of a command."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout


# ---- kernel -----------------------------------------------------------------------------------------------------


def _userfaultfd() -> int | None:
    """The features of this kernel's userfaultfd; None if it refuses us."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        return None
    try:
        answer = fcntl.ioctl(fd, UFFDIO_API, struct.pack("QQQ", UFFD_API, 0, 0))
        return int(struct.unpack("QQQ", answer)[1])
    finally:
        os.close(fd)


def _soft_dirty() -> bool:
    """Whether the kernel tracks written pages: a page just written must say so."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[0] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        return bool(struct.unpack("Q", pagemap.read(8))[0] & SOFT_DIRTY)


def kernel() -> Iterator[Finding]:
    """What the kernel has."""
    release = os.uname().release
    number = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if number >= (5, 11):
        yield Finding("kernel", "ok", release)
    else:
        yield Finding("kernel", "missing", release, "use Linux 5.11 or newer (CRIU and pidfd calls need it)")
    for name, have in (("memfd", hasattr(os, "memfd_create")), ("pidfd", _has_pidfd())):
        yield Finding(
            name, "ok" if have else "missing", "there" if have else "not there", "" if have else "newer kernel"
        )
    features = _userfaultfd()
    if features is None:
        yield Finding(
            "userfaultfd",
            "warning",
            "refused",
            "run as root, or sysctl vm.unprivileged_userfaultfd=1: for restore --lazy-pages",
        )
    else:
        asynchronous = "with" if features & UFFD_FEATURE_WP_ASYNC else "without"
        yield Finding("userfaultfd", "ok", f"there, {asynchronous} asynchronous write protection")
    scan, dirty = procfs.says_pages(), _soft_dirty()
    yield Finding(
        "PAGEMAP_SCAN",
        "ok" if scan else "warning",
        "there" if scan else "not there",
        ""
        if scan
        else "Linux 6.7 has it; without it CRIU alone copies the processes' memory, and they stand still for longer",
    )
    # Only CRIU's incremental dumps want it, and PhOS's own way is PAGEMAP_SCAN.
    yield Finding("soft-dirty", "ok", "there" if dirty else "not there (not needed)")
    barriers = ctypes.CDLL(None).syscall(SYS_MEMBARRIER, 0, 0, 0)
    fast = barriers > 0 and bool(barriers & MEMBARRIER_PRIVATE_EXPEDITED)
    yield Finding(
        "membarrier",
        "ok" if fast else "missing",
        "private expedited" if fast else "not there",
        "" if fast else "use a kernel with CONFIG_MEMBARRIER",
    )


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


# ---- CRIU -------------------------------------------------------------------------------------------------------


def criu() -> Iterator[Finding]:
    """CRIU, its own opinion of the kernel, and our plugin."""
    launcher = str(places.launcher("criu"))
    status, output = _run(launcher, "--version")
    match = re.search(r"Version: (\d+)\.(\d+)\S*", output)
    if status != 0 or match is None:
        last = output.strip().splitlines()[-1:] or ["no output"]
        yield Finding("CRIU", "missing", f"does not start: {last[0]}", "run install.sh again")
        return
    version = match.group(0).removeprefix("Version: ")
    if (int(match[1]), int(match[2])) < OLDEST_CRIU:
        yield Finding("CRIU", "missing", version, "run install.sh again: 4.1 or newer is needed")
    else:
        yield Finding("CRIU", "ok", f"{version}, started by {launcher}")
    status, output = _run(launcher, "check")
    if status == 0:
        yield Finding("criu check", "ok", "looks good")
    else:
        errors = [line.split(": ", 1)[-1] for line in output.splitlines() if "Error" in line or "rror:" in line]
        found = "; ".join(errors[:3]) or f"exit status {status}"
        remedy = "run as root; in a container, with --privileged"
        if "/tmp/.criu" in found:  # kerndat.c tries there what the kernel can do
            remedy = "CRIU needs a /tmp that it can write to; in a container that is read-only, with --tmpfs /tmp"
        yield Finding("criu check", "missing", found, remedy)
    found_on_path = shutil.which("criu")
    if found_on_path and os.path.realpath(found_on_path) != os.path.realpath(launcher):
        yield Finding(
            "criu on PATH",
            "warning",
            found_on_path,
            f"put ours first, or call {launcher}: that one does not know --lib phos",
        )
    yield criu_cache()
    yield plugin()


def criu_cache() -> Finding:
    """Whether CRIU may keep what it finds out about the kernel (its kerndat.c): in /run, if that is a tmpfs."""
    kinds = [words[2] for line in _read("/proc/mounts").splitlines() if (words := line.split())[1] == "/run"]
    if kinds[-1:] == ["tmpfs"]:
        return Finding("CRIU's cache", "ok", "/run is a tmpfs")
    remedy = (
        "mount a tmpfs there before phosd starts: else each dump and restore first looks through the kernel's features"
    )
    return Finding("CRIU's cache", "warning", "/run is no tmpfs", remedy)


def plugin() -> Finding:
    """Whether CRIU can load the plugin: there, alone, its symbols all provided."""
    path = home() / "plugin" / "phos_plugin.so"
    if not path.exists():
        return Finding("plugin", "missing", f"{path} is not there", "run install.sh again")
    others = [other.name for other in path.parent.glob("*.so") if other != path]
    if others:
        return Finding(
            "plugin",
            "warning",
            f"{', '.join(others)} beside it",
            f"remove what is not ours from {path.parent}: CRIU loads all",
        )
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".dynsym")
            described = any(symbol.name == "CR_PLUGIN_DESC" for symbol in symbols.iter_symbols())
    except (ELFError, AttributeError):
        described = False
    if not described:
        return Finding("plugin", "missing", f"{path} is no CRIU plugin", "run install.sh again")
    return Finding("plugin", "ok", str(path))


# ---- GPU --------------------------------------------------------------------------------------------------------

# In a process of its own: the doctor must not hold a CUDA context, and a sick driver must not hang it.
ASK_DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
status = cuda.cuInit(0)
print("init", status)
number = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(number)); print("version", number.value)
print("checkpoint", int(hasattr(cuda, "cuCheckpointProcessCheckpoint")))
if status == 0:
    cuda.cuDeviceGetCount(ctypes.byref(number)); count = number.value
    for index in range(count):
        name = ctypes.create_string_buffer(100)
        device = ctypes.c_int(); cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 100, device)
        total = ctypes.c_size_t(); cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        print("gpu", total.value, name.value.decode())
"""


def gpu() -> Iterator[Finding]:
    """The driver and its GPUs; or the software GPU."""
    software = home() / "softgpu" / "libcuda.so.1"
    soft = "the software GPU is there" if software.exists() else "and no software GPU either"
    module = re.search(r"NVRM version:.*?\s(\d+)\.(\d+(?:\.\d+)?)\s", _read("/proc/driver/nvidia/version") + " ")
    if module is None:
        state = "ok" if software.exists() else "missing"
        remedy = "" if software.exists() else "run install.sh again"
        yield Finding("GPU driver", state, f"no NVIDIA driver; {soft}", remedy)
        return
    version = f"{module[1]}.{module[2]}"
    if int(module[1]) < OLDEST_DRIVER:
        yield Finding(
            "GPU driver", "missing", version, f"install driver {OLDEST_DRIVER} or newer: older ones cannot checkpoint"
        )
    else:
        yield Finding("GPU driver", "ok", version)
    nodes = [node for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", node.name)]
    refused = sorted(str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK))
    if refused:
        yield Finding(
            "/dev/nvidia*", "missing", f"no access to {', '.join(refused)}", "run as root, or join their group"
        )
    elif {"nvidiactl", "nvidia-uvm"} - {node.name for node in nodes}:
        yield Finding(
            "/dev/nvidia*",
            "missing",
            "device files are not there",
            "nvidia-modprobe -u -c 0; in a container, pass the GPU in",
        )
    else:
        yield Finding("/dev/nvidia*", "ok", f"{len(nodes)} device files")
    status, output = _run(sys.executable, "-I", "-c", ASK_DRIVER, timeout=60)
    if status != 0:
        last = (output.strip().splitlines() or ["no output"])[-1]
        yield Finding("libcuda.so.1", "missing", last, "install the driver's user libraries, of the same version")
        return
    answers = [line.split(" ", 1) for line in output.splitlines()]
    facts = dict(answers)
    if facts.get("init") != "0":
        yield Finding(
            "cuInit",
            "missing",
            f"error {facts.get('init')}",
            "nvidia-smi says more; library and kernel module must match",
        )
    api = int(facts.get("version", "0"))
    have = facts.get("checkpoint") == "1"
    yield Finding(
        "checkpoint API",
        "ok" if have else "missing",
        f"CUDA {api // 1000}.{api % 1000 // 10}, {'there' if have else 'not there'}",
        "" if have else f"install driver {OLDEST_DRIVER} or newer",
    )
    for key, value in answers:
        if key == "gpu":
            memory, name = value.split(" ", 1)
            yield Finding("GPU", "ok", f"{name}, {int(memory) / GIB:.0f} GiB")


# ---- permissions and limits ---------------------------------------------------------------------------------------


def permissions() -> Iterator[Finding]:
    """Capabilities, and who may trace whom."""
    effective = int(re.search(r"^CapEff:\s*(\w+)", _read("/proc/self/status"), re.M)[1], 16)  # type: ignore[index]
    for name, bit in CAPABILITIES.items():
        have = bool(effective >> bit & 1)
        # CAP_SYS_ADMIN contains CAP_CHECKPOINT_RESTORE.
        enough = have or (name == "CAP_CHECKPOINT_RESTORE" and bool(effective >> 21 & 1))
        remedy = "" if enough else "run as root (sudo); in a container, with --privileged"
        yield Finding(name, "ok" if enough else "missing", "held" if have else "not held", remedy)
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope == "3":
        yield Finding(
            "yama",
            "missing",
            "ptrace_scope 3: nobody may trace",
            "sysctl kernel.yama.ptrace_scope=1 (needs a reboot to leave 3)",
        )
    else:
        yield Finding("yama", "ok", f"ptrace_scope {scope}" if scope else "not there")


def _limit(name: str, kind: int, wanted: int, unit: str, remedy: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    unlimited = resource.RLIM_INFINITY
    text = "unlimited" if soft == unlimited else f"{soft}{unit}"
    if soft == unlimited or soft >= wanted:
        return Finding(name, "ok", text)
    if kind == resource.RLIMIT_NOFILE and (hard == unlimited or hard >= wanted):
        return Finding(name, "ok", f"{text}, which phosd raises to {hard}")
    if kind == resource.RLIMIT_MEMLOCK and os.geteuid() == 0:
        return Finding(name, "ok", f"{text}, which does not bind root")
    return Finding(name, "warning", text, remedy)


def _ring_bytes() -> int:
    """What phosd will want to lock."""
    try:
        return ring.wanted_bytes(ring.default_threads())
    except UsageError:  # phosd will say so, and not start
        return ring.MAXIMUM_RING


def limits() -> Iterator[Finding]:
    """Resource limits, huge pages, shared memory."""
    yield _limit(
        "memlock",
        resource.RLIMIT_MEMLOCK,
        _ring_bytes(),
        " bytes",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity for its service",
    )
    yield _limit(
        "nofile",
        resource.RLIMIT_NOFILE,
        DESCRIPTORS,
        "",
        f"ulimit -n {DESCRIPTORS}, or LimitNOFILE={DESCRIPTORS} for its service",
    )
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = re.search(r"\[(\w+)\]", setting)
    if pages is not None and pages[1] == "never":
        yield Finding(
            "huge pages",
            "warning",
            "never",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: the driver's checkpoint takes half the time",
        )
    else:
        yield Finding("huge pages", "ok", pages[1] if pages else "unknown: /sys cannot be read")
    collapses = can_collapse()
    yield Finding(
        "MADV_COLLAPSE",
        "ok" if collapses else "warning",
        "there" if collapses else "not there, or no huge page is free",
        ""
        if collapses
        else "Linux 6.1 has it; without it GPUs write into an image in memory only in a tmpfs mounted with huge=always",
    )
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        yield Finding("/dev/shm", "missing", "not there", "mount -t tmpfs tmpfs /dev/shm")
        return
    size = shared.f_blocks * shared.f_frsize
    small = size < GIB
    yield Finding(
        "/dev/shm",
        "warning" if small else "ok",
        f"{size / GIB:.1f} GiB, {shared.f_bavail * shared.f_frsize / GIB:.1f} free",
        "mount -o remount,size=50% /dev/shm (docker: --shm-size)" if small else "",
    )


# ---- PhOS -------------------------------------------------------------------------------------------------------


def installation() -> Iterator[Finding]:
    """Our own parts, and whether a phosd answers."""
    try:
        yield Finding("frontend", "ok", str(places.frontend_library()))
    except PhosError as error:
        yield Finding("frontend", "missing", str(error))
    try:
        path = socket_path()
        refuse_unfit(path)
    except PhosError as error:
        yield Finding("phosd", "missing", str(error))
        return
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(2)
    try:
        client.connect(str(path))
        client.shutdown(socket.SHUT_WR)
        client.recv(1)  # it closes a connection over which nothing will come
    except FileNotFoundError:
        yield Finding("phosd", "ok", "does not run; it starts when it is needed")
    except (ConnectionRefusedError, ConnectionResetError):
        yield Finding("phosd", "ok", f"{path} is left over from one that ended; the next takes its place")
    except PermissionError as error:
        yield Finding(
            "phosd", "warning", f"{path}: {error.strerror}", "it belongs to another user: run as that user, or as root"
        )
    except (BlockingIOError, TimeoutError):  # as many wait to be accepted as may; or it is stopped
        yield Finding("phosd", "warning", f"does not answer at {path}", "its log may say why; end it if it hangs")
    except OSError as error:
        yield Finding("phosd", "warning", f"{path}: {error.strerror}", "name another place for it (PHOS_SOCKET)")
    else:
        yield Finding("phosd", "ok", f"answers at {path}")
    finally:
        client.close()
