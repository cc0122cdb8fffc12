"""Unpack the wheels of a folder that fit the running Python into its environment, without pip and without an index.

    VENV/bin/python unpack_wheels.py WHEELS REQUIRED_MODULE...

A carried folder is set up where there may be neither pip nor ensurepip. A wheel is a zip file whose top level belongs
in site-packages, and none of ours needs more than that (no build, no data files; commands have launchers of their own).
Packages that the folder leaves out are taken from the Python that the environment was made with. Ends with 1 and a
sentence if a required module is in neither.
"""

import importlib.util
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path


def fits(wheel: Path) -> bool:
    """Whether a wheel's file name (PEP 427) allows the running CPython; platforms were chosen when it was fetched."""
    python_tags, abi_tags = wheel.stem.split("-")[-3:-1]
    minor = sys.version_info.minor
    for tag in python_tags.split("."):
        if tag in ("py3", f"py3{minor}", f"cp3{minor}"):
            return f"cp3{minor}t" not in abi_tags.split(".")
        stable = re.fullmatch(r"cp3(\d+)", tag)
        if stable and "abi3" in abi_tags and int(stable.group(1)) <= minor:
            return True
    return False


def parent_packages() -> list[str]:
    """Folders in which the Python that made this environment looks for packages."""
    base = Path(sys.prefix, "base-python")
    if not base.exists():
        return []
    answer = subprocess.run(
        [base.read_text().strip(), "-I", "-c", "import sys; print('\\n'.join(p for p in sys.path if 'packages' in p))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in answer.stdout.splitlines() if line]


def found(module: str) -> bool:
    """Whether `module` (dotted) could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def main(argv: list[str]) -> int:
    """See the module's text."""
    wheels = sorted(Path(argv[1]).glob("*.whl"))
    site = Path(sysconfig.get_path("purelib"))
    for wheel in filter(fits, wheels):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.split("/", 1)[0].endswith(".data")]
            archive.extractall(site, names)
    inherited = parent_packages()
    # Its entries come after our own packages, so those win. Without "import" lines: folders only.
    (site / "phos-inherited.pth").write_text("".join(f"{folder}\n" for folder in inherited))
    sys.path += inherited
    importlib.invalidate_caches()
    missing = [module for module in argv[2:] if not found(module)]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(
            f"Python {version} lacks {', '.join(missing)}, and this folder holds no wheel that fits: make the bundle "
            f"with --for-python {version}, or install these packages here.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
