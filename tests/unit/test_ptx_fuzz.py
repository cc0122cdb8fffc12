"""Hostile texts: no crash, no read past the text, no write past a register; under ASan and UBSan."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "ptx"
ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("PTX_FUZZ_SECONDS", "8"))
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE=", "-DPTX_PORTABLE", "-O1", "-g", "-pthread"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=alignment"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the fuzzer; about ten seconds on two cores."""
    folder = tmp_path_factory.mktemp("fuzz")
    sources = [HERE / "fuzz" / "fuzz_ptx.c", *sorted((ROOT / "softgpu").glob("ptx_*.c"))]

    def build(source: Path) -> str:
        target = folder / (source.stem + ".o")
        subprocess.run(["gcc", *FLAGS, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(build, sources))
    subprocess.run(["gcc", *FLAGS, *objects, "-o", str(folder / "fuzz_ptx"), "-lm"], check=True)
    return folder / "fuzz_ptx"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kernels, one function a text, and the hand-written programs of the other tests."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = (HERE / "fuzz" / "corpus.ptx").read_text().split("// ---\n")
    whole = (HERE / "kernels.ptx").read_text()
    texts.append(whole)
    head, *functions = whole.split("\n\t// .globl\t")
    texts += [head + "\n// " + f for f in functions]
    names = []
    for i, text in enumerate(texts):
        path = folder / f"{i:03}.ptx"
        path.write_text(text)
        names.append(str(path))
    return names


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_texts_neither_crash_the_loader_nor_the_interpreter(
    harness: Path, corpus: list[str], seed: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(harness), str(SECONDS), str(seed), *corpus[seed - 1 :: 2]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )
    crash = tmp_path / "crash.ptx"
    assert done.returncode == 0, done.stderr[-3000:] + (
        crash.read_text(errors="replace")[-2000:] if crash.exists() else ""
    )
    tried, loaded, ran = (int(part.split()[0]) for part in done.stdout.split(",")[:3])
    assert min(tried // 500, loaded // 50, ran // 10) > 0, done.stdout
