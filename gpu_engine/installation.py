"""Where PhOS's own files are, and which GPU is meant: the machine's, or the software GPU."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from pathlib import Path

from phos.gpu_engine.errors import Unsupported, UsageError
from phos.images import native
from phos.images.native import home


def launcher(name: str) -> Path:
    """The launcher ``criu``, ``phosd`` or ``phos-gpu``."""
    return Path(native.launcher(name))


def plugin_folder() -> Path:
    """What CRIU is told with ``--libdir``.

    Raises:
        Unsupported: the plugin has not been built.
    """
    return _existing(home() / "plugin" / "phos_plugin.so").parent


def frontend_library() -> Path:
    """libphos.so, as LD_PRELOAD names it.

    Raises:
        Unsupported: it has not been built, or lies where no program could be started under it.
    """
    path = _existing(home() / "lib" / "libphos.so")
    if " " in str(path) or ":" in str(path):
        raise Unsupported(
            f"{path}: the dynamic linker takes a blank or a colon for the end of a library's name (LD_PRELOAD). "
            "Install PhOS in a folder without them."
        )
    return path


def sdk_folder() -> Path | None:
    """The folder that holds ``phos`` as programs import it, and nothing else; None if this installation has none."""
    folder = home() / "sdk"
    return folder if (folder / "phos" / "__init__.py").exists() else None


def software_gpu_folder() -> Path:
    """The folder with the software GPU's libcuda.so.1.

    Raises:
        Unsupported: it has not been built.
    """
    return _existing(home() / "softgpu" / "libcuda.so.1").parent


def examples_folder() -> Path:
    """The example programs."""
    installed = home() / "examples"
    return _existing(installed if installed.exists() else home().parent / "examples")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise Unsupported(f"{path} is missing: PhOS is not completely installed. Run install.sh again (or make build).")
    return path


def version() -> str:
    """Of this PhOS, or "source tree" where it is not installed.

    Read from the name of the folder with the package's metadata, where importlib.metadata finds it as well: that itself
    takes longer to load than the command line.
    """
    for place in sys.path:
        for name in glob.glob("phos-*.dist-info", root_dir=place or os.curdir):
            return name.removeprefix("phos-").removesuffix(".dist-info")
    return "source tree"


def device_kind(asked: str | None = None) -> str:
    """``nvidia`` or ``software``; ``asked`` (else PHOS_DEVICE, else ``auto``) may leave the choice to what there is.

    Raises:
        UsageError: another word.
    """
    wanted = asked or os.environ.get("PHOS_DEVICE", "auto")
    if wanted in ("nvidia", "software"):
        return wanted
    if wanted != "auto":
        raise UsageError(f"'{wanted}' is no device: PHOS_DEVICE and --device take auto, nvidia or software.")
    return "nvidia" if os.path.exists("/dev/nvidiactl") else "software"


def load_driver(kind: str) -> None:
    """Make ``libcuda.so.1`` mean the right library in this process, before cuda-python asks for it."""
    if kind == "software":
        # A library that is loaded already answers to its soname whatever the search path.
        ctypes.CDLL(str(software_gpu_folder() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def application_environment(kind: str, socket: Path) -> dict[str, str]:
    """What a program needs in its environment to run under the frontend on that device."""
    environment = {"PHOS_SOCKET": str(socket), "PHOS_DEVICE": kind}
    preload = os.environ.get("LD_PRELOAD", "")
    environment["LD_PRELOAD"] = f"{frontend_library()}{' ' + preload if preload else ''}"
    if kind == "software":
        path = os.environ.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = f"{software_gpu_folder()}{':' + path if path else ''}"
    if sdk := sdk_folder():  # last: a phos of the program's own environment comes first
        path = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{path + ':' if path else ''}{sdk}"
    # How a detached frontend starts a new phosd when the old one has been killed; PHOS_SOCKET says where, too.
    where = "" if " " in str(socket) else f" --socket {socket}"
    environment["PHOS_DAEMON_COMMAND"] = f"{launcher('phosd')} --ensure{where}"
    return environment
