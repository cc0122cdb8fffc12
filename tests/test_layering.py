"""Which part of PhOS may import which: read from the sources, so that it needs neither packages nor a GPU.

From the top: the command line, the daemon, the protocols, what protocols are made of (speculation, copying, images),
the driver. A part imports from its own layer or below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "gpu_engine", "images")

# Longest matching prefix decides; the number is the layer.
LAYERS = {
    "phos.cli": 50,
    "phos.gpu_engine.daemon": 40,
    # Leaves that speak to or about the daemon without being it: how messages are framed and how long one waits for
    # them, where its socket is, and the keeper, a program of the standard library alone, which shares how descriptors
    # are received.
    "phos.gpu_engine.daemon.blocking": 10,
    "phos.gpu_engine.daemon.keeper": 10,
    "phos.gpu_engine.daemon.wire": 10,
    "phos.gpu_engine.daemon.paths": 10,
    "phos.gpu_engine.stop": 30,
    "phos.gpu_engine.cow": 30,
    "phos.gpu_engine.recopy": 30,
    "phos.gpu_engine.restore": 30,
    "phos.gpu_engine.configuration": 30,  # how checkpoints are made, read from a file
    "phos.gpu_engine": 20,  # copier, inventory, toggle, process, ...
    "phos.gpu_engine.spec": 20,
    "phos.gpu_engine.ptx_instrument": 20,
    "phos.images": 20,
    "phos.gpu_engine.driver": 10,
    "phos.gpu_engine.installation": 10,
    "phos.gpu_engine.errors": 0,
    "phos.images.errors": 0,
    "phos.images.native": 0,
    "phos.gen": 0,
    "phos": 60,  # the SDK
}
# Objects that the daemon owns and the protocols are handed: named in annotations only.
TYPE_CHECKING_ONLY = "TYPE_CHECKING"


def layer(module: str) -> int:
    prefix = max((known for known in LAYERS if module == known or module.startswith(f"{known}.")), key=len)
    return LAYERS[prefix]


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = ("phos", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that happens at run time, whether at the top or inside a function."""
    tree = ast.parse(path.read_text(), str(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and TYPE_CHECKING_ONLY in ast.dump(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported_from(path, node))


def imported_from(path: Path, node: ast.ImportFrom) -> list[str]:
    """The modules that a `from` statement reaches: the named things themselves where those are modules."""
    base = node.module or ""
    if node.level:
        package = module_name(path).split(".")
        package = package if path.name == "__init__.py" else package[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, base] if base else package)
    names = []
    for alias in node.names:
        candidate = f"{base}.{alias.name}"
        folder = ROOT.joinpath(*candidate.split(".")[1:])
        known = folder.is_dir() or folder.with_suffix(".py").exists()
        names.append(candidate if candidate.startswith("phos.") and known else base)
    return names


def test_there_is_something_to_look_at() -> None:
    assert len(sources()) > 10


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = layer(module_name(path))
    wrong = [
        f"line {line}: {module} (layer {layer(module)}) from layer {own}"
        for line, module in imports(path)
        if module.startswith("phos.") and layer(module) > own
    ]
    assert not wrong


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_cuda_is_called_in_one_place(path: Path) -> None:
    if path == ROOT / "gpu_engine" / "driver.py":
        return
    assert not [f"line {line}: {module}" for line, module in imports(path) if module.split(".")[0] == "cuda"]


@pytest.mark.parametrize("path", sorted((ROOT / "images").rglob("*.py")), ids=lambda path: path.name)
def test_images_stand_alone(path: Path) -> None:
    """They are read on machines without a GPU, by programs that want nothing else of PhOS."""
    allowed = ("phos.images", "phos.gen")
    wrong = [module for _, module in imports(path) if module.startswith("phos.") and not module.startswith(allowed)]
    assert not wrong


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_name_the_package(path: Path) -> None:
    """`import images` works in a clone by accident and in no installation."""
    assert not [f"line {line}: {name}" for line, name in imports(path) if name.split(".")[0] in PACKAGES]
